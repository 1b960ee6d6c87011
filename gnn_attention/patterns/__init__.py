"""A zoo of attention graphs. Each graph is built by one short function, its builder.

A builder returns a :class:`TokenGraph` (or two), and its docstring states the exact set of edges. A
builder with the option ``causal`` keeps only edges with ``src <= dst`` by default, unless its
docstring says otherwise; ``causal=False`` keeps all edges. Rules are partial functions or
expressions of the symbols ``dst``, ``src`` and ``head``, so graphs can be pickled. The rules use
only broadcasting operators, so the module ``gnn_attention.graph.tiling`` can evaluate them on
ranges of tokens.

Each module holds one family of builders. ``gnn-attention graphs`` lists them, with an example of
each.
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
