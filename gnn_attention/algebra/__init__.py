"""Graphs from graphs: what the operators ``| & - ^ ~ .T @ **`` of a graph leave to functions.

``stacks``: many graphs of the same nodes (one for each head, one for each sample).
``products``: graphs on more tokens (disjoint sum, Cartesian product). ``tokens``: other tokens (some of them,
in any order, further ones). ``walks``: several hops (closure).

The result is a rule made of the operands' rules, so that nothing is enumerated; where all operands carry
their edges as lists, so does the result, in the order each docstring states. Only ``closure`` must look at
the edges. Graphs that differ by head or by sample take part everywhere. Tokens that become other tokens begin
at position 0.

TypeError for what is no graph (no integer, no sequence of them), IndexError for a token that is none.
ValueError for graphs that do not fit: none at all, other nodes, heads or batch, not the same tokens on both
sides, or, where tokens become others, not from position 0 on. Docstrings name what else is refused.
"""

import inspect

from gnn_attention.algebra.products import *  # noqa: F403
from gnn_attention.algebra.stacks import *  # noqa: F403
from gnn_attention.algebra.tokens import *  # noqa: F403
from gnn_attention.algebra.walks import *  # noqa: F403

__all__ = [name for name, value in list(globals().items()) if inspect.isfunction(value)]
