"""The zoo: builders of token graphs, one short function for each.

Every builder takes sizes and returns a :class:`TokenGraph`; the docstring states its set of edges exactly.
Builders are causal (``src <= dst``) unless their definition says otherwise; ``causal=False`` is the
other. Rules are expressions of the symbols ``dst``, ``src`` and ``head``, so that graphs can be pickled; they
use broadcasting operators only, so that ``gnn_attention.graph.tiling`` can evaluate them on ranges.

The modules are the families: ``gnn-attention graphs`` lists them, with an example of each builder.
"""

import inspect

from gnn_attention.patterns.basic import *  # noqa: F403
from gnn_attention.patterns.blocks import *  # noqa: F403
from gnn_attention.patterns.content import *  # noqa: F403
from gnn_attention.patterns.expanders import *  # noqa: F403
from gnn_attention.patterns.grids import *  # noqa: F403
from gnn_attention.patterns.hierarchies import *  # noqa: F403
from gnn_attention.patterns.hubs import *  # noqa: F403
from gnn_attention.patterns.local import *  # noqa: F403
from gnn_attention.patterns.sequences import *  # noqa: F403
from gnn_attention.patterns.structure import *  # noqa: F403
from gnn_attention.patterns.trees import *  # noqa: F403

__all__ = [name for name, value in list(globals().items()) if inspect.isfunction(value)]
