"""The zoo: builders of token graphs, one short function for each.

Every builder takes sizes and returns a :class:`TokenGraph`; the docstring states its set of edges exactly.
Builders are causal (``src <= dst``) unless their definition says otherwise; ``causal=False`` is the
other. Rules are functions of these modules bound by ``functools.partial``, so that graphs can be pickled;
they use broadcasting operators only, so that ``gnn_attention.graph.tiling`` can evaluate them on whole ranges
of tokens at once.

Where a builder stands:

===============  ==================================  =============  =============================
``basic``        all tokens, past, another sequence  ``sequences``  prefixes, packing, orders
``local``        windows and chunks on a line        ``streaming``  sinks and a window
``grids``        neighbourhoods in images, videos    ``trees``      ancestors, documents
``strided``      sets of sparse transformers         ``decoding``   drafts, block diffusion, media
``hubs``         tokens that all attend to           ``structure``  of a graph: hops, time, types
``latents``      extra nodes that are no tokens      ``content``    of data: top-k, hashing
``hierarchies``  logarithmic reach                   ``blocks``     of data, by blocks: MoBA, NSA
``expanders``    random and expander graphs
===============  ==================================  =============  =============================
"""

from gnn_attention.patterns import (
    basic,
    blocks,
    content,
    decoding,
    expanders,
    grids,
    hierarchies,
    hubs,
    latents,
    local,
    sequences,
    streaming,
    strided,
    structure,
    trees,
)
from gnn_attention.patterns.basic import *  # noqa: F403
from gnn_attention.patterns.blocks import *  # noqa: F403
from gnn_attention.patterns.content import *  # noqa: F403
from gnn_attention.patterns.decoding import *  # noqa: F403
from gnn_attention.patterns.expanders import *  # noqa: F403
from gnn_attention.patterns.grids import *  # noqa: F403
from gnn_attention.patterns.hierarchies import *  # noqa: F403
from gnn_attention.patterns.hubs import *  # noqa: F403
from gnn_attention.patterns.latents import *  # noqa: F403
from gnn_attention.patterns.local import *  # noqa: F403
from gnn_attention.patterns.sequences import *  # noqa: F403
from gnn_attention.patterns.streaming import *  # noqa: F403
from gnn_attention.patterns.strided import *  # noqa: F403
from gnn_attention.patterns.structure import *  # noqa: F403
from gnn_attention.patterns.trees import *  # noqa: F403

_FIRST = (basic, blocks, content, decoding, expanders, grids, hierarchies, hubs)
_SECOND = (latents, local, sequences, streaming, strided, structure, trees)
__all__ = [name for family in (*_FIRST, *_SECOND) for name in family.__all__]
