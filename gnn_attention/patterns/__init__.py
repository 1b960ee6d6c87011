"""The zoo of token graphs: every graph has a builder, which is one short function.

A builder returns a :class:`TokenGraph` (or a pair of them), and its docstring states the exact set of edges.
Builders with the option ``causal=True`` make causal graphs (``src <= dst``) unless their docstring says
otherwise, and ``causal=False`` lifts the restriction; all others have exactly the edges of their docstring.
Rules are expressions of the symbols ``dst``, ``src`` and ``head``, so that graphs can be pickled; they only
use broadcasting operators, so that ``gnn_attention.graph.tiling`` can evaluate ranges of tokens.

Each module holds one family. ``gnn-attention graphs`` lists the builders with an example of each.
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
