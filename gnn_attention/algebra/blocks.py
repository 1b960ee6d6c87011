"""Groups of tokens as tokens."""

from collections.abc import Iterable, Iterator

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import each_alone
from gnn_attention.graph import TokenGraph, edge_list, text

__all__ = ["quotient"]

EDGES_AT_ONCE = 2**22  # of a rule, while a quotient looks at them


@not_compiled
def quotient(
    g: TokenGraph, groups: int | Iterable[int], src_groups: int | Iterable[int] | None = None
) -> TokenGraph:
    """Groups of tokens as tokens, joined where any member of one attends to any of the other.

    ``mask[I, J] = any(g.mask()[i, j] for i in I for j in J)``. ``groups``: a block length (the last block may
    be shorter), or the group of each token, numbered 0, 1, ... without gaps; ``src_groups`` where the senders
    are others, None = the same. networkx's ``quotient_graph`` leaves out the self loops that edges within a
    group make here. It looks at the edges, and carries those it found, in the order in which g's edges first
    show them. ValueError unless there is a group for each token.

    >>> from gnn_attention import patterns
    >>> quotient(patterns.window(6, 2), 2) == patterns.window(3, 2)
    True
    """
    _operands.from_zero("quotient", g)
    of_dst, shown = _group_of("groups", groups, g.num_dst)
    if src_groups is not None:
        of_src, src_shown = _group_of("src_groups", src_groups, g.num_src)
    elif g.num_dst != g.num_src and isinstance(groups, Iterable):
        raise ValueError(f"quotient of {g!r} needs src_groups too: it has other senders than receivers")
    else:
        of_src, src_shown = _group_of("groups", groups, g.num_src)[0], ""
    name = _operands.name("quotient", (g,), shown, src_shown)
    return each_alone(lambda plain: _quotient_of(plain, of_dst, of_src), g, name)


def _group_of(word: str, groups: object, count: int) -> tuple[Tensor, str]:
    """The group of each of ``count`` tokens, from a block length or a list of groups, and that in text."""
    checks.check_order(word, groups)
    groups = groups.tolist() if isinstance(groups, Tensor) else groups
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        return torch.arange(count, device="cpu") // checks.size(word, groups, 1), str(groups)
    numbers = [checks.size(f"each of {word}", number) for number in groups]
    if gaps := set(range(max(numbers, default=0))) - set(numbers):
        got = f"{max(numbers)} but no {min(gaps)}"
        raise ValueError(f"{word} must be numbered 0, 1, ... without gaps, got {got}")
    if len(numbers) != count:
        raise ValueError(f"{word} must hold one number for each of {count} tokens, got {len(numbers)}")
    return torch.tensor(numbers, dtype=torch.int64, device="cpu"), text.listed(numbers, word)


def _quotient_of(g: TokenGraph, of_dst: Tensor, of_src: Tensor) -> TokenGraph:
    num_dst, num_src = (int(owner.max()) + 1 if len(owner) else 0 for owner in (of_dst, of_src))
    width = max(num_src, 1)
    found = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for src, dst in _edges_in_parts(g):
        key = of_dst[dst] * width + of_src[src]
        found.append(key[edge_list.first_of_each(key)])
    key = torch.cat(found)
    key = key[edge_list.first_of_each(key)]
    return TokenGraph.from_edges(torch.stack([key % width, key // width]), num_dst, num_src)


def _edges_in_parts(g: TokenGraph) -> Iterator[Tensor]:
    """The edges, some rows at a time where they are not listed yet."""
    if (listed := g.edges.distinct.listed()) is not None:
        yield listed
        return
    step = max(1, EDGES_AT_ONCE // max(1, g.max_in_degree))
    for start in range(0, g.num_dst, step):
        rows = g.rows(start, min(start + step, g.num_dst)).edge_index
        yield rows + torch.tensor([[0], [start]], device="cpu")
