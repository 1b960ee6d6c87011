"""Functions that make graphs from graphs, beyond the operators ``| & - ^ ~ .T @ **`` of a graph.

``stacks`` joins graphs of the same nodes, one for each head or sample. ``products`` makes graphs on more
tokens (disjoint sum, Cartesian product). ``tokens`` selects and adds tokens. ``walks`` computes closures.

The result is a rule made of the operands' rules, so no edges are enumerated, except in ``closure``.
If all operands store edge lists, so does a result without ``stacks``, in the order of its docstring.
Graphs may differ by head and by sample, except along the axis that ``stacks`` adds.
The results of ``products`` and of ``restrict`` begin at position 0.

All functions raise TypeError for an argument that is not a graph (or not an integer, or not a
sequence of them), IndexError for a token that does not exist, and ValueError for no graph at
all, for graphs with different nodes, heads or batch, and for a graph that is not square or does
not begin at position 0 where the function requires it. Docstrings name further errors.
"""

import inspect

from gnn_attention.algebra.products import *  # noqa: F403
from gnn_attention.algebra.stacks import *  # noqa: F403
from gnn_attention.algebra.tokens import *  # noqa: F403
from gnn_attention.algebra.walks import *  # noqa: F403

__all__ = [name for name, value in list(globals().items()) if inspect.isfunction(value)]
