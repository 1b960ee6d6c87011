"""Functions that make graphs from graphs, beyond the operators ``| & - ^ ~ .T @ **`` of a graph.

``stacks`` joins graphs on the same nodes, one for each head or sample. ``products`` makes graphs on
more tokens (disjoint sum, Cartesian product). ``tokens`` selects and adds tokens. ``walks``
computes closures.

The result is a rule that evaluates the operands' rules; only ``closure`` enumerates edges. Except
in ``stacks``, the result stores an edge list if all operands do, in the order that the docstring
states. Graphs may vary by head and by sample, except along the axis that ``stacks`` adds. The
results of ``products`` and of ``restrict`` begin at position 0.

All functions raise TypeError for an argument of the wrong type, and IndexError for a token that
does not exist. They raise ValueError for no graph, for graphs with different nodes, heads or
batch, and for a graph that is not square or does not begin at position 0 where a function requires
this. Docstrings name further errors.
"""

import inspect

from gnn_attention.algebra.products import *  # noqa: F403
from gnn_attention.algebra.stacks import *  # noqa: F403
from gnn_attention.algebra.tokens import *  # noqa: F403
from gnn_attention.algebra.walks import *  # noqa: F403

__all__ = [name for name, value in list(globals().items()) if inspect.isfunction(value)]
