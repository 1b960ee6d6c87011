"""The zoo: builders of token graphs, one short function for each.

Every builder returns a :class:`TokenGraph`, and its docstring states the exact set of edges. Builders are
causal (``src <= dst``) unless their docstring says otherwise, and ``causal=False`` lifts the restriction.
Rules are expressions of the symbols ``dst``, ``src`` and ``head``, so that graphs can be pickled; they
only use broadcasting operators, so that ``gnn_attention.graph.tiling`` can evaluate ranges.

Each module holds one family. ``gnn-attention graphs`` lists them with an example of each builder.
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
