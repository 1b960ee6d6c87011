"""Between tokens and groups of tokens: every token becomes a block, or every group becomes a token."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import each_alone
from gnn_attention.algebra.tokens import gathered
from gnn_attention.graph import TokenGraph, edge_list, text

__all__ = ["blow_up", "quotient"]

EDGES_AT_ONCE = 2**22  # of a rule, while a quotient looks at them


@not_compiled
def blow_up(
    g: TokenGraph, sizes: int | Iterable[int], src_sizes: int | Iterable[int] | None = None
) -> TokenGraph:
    """Every token becomes a block of tokens, every edge all pairs between its two blocks.

    ``mask[i, j] = g.mask()[block(i), block(j)]``. ``sizes``: one for all, or one for each token (0 allowed);
    ``src_sizes`` where the senders are others, None = the same. A graph of blocks as a graph of tokens:
    ``E * size^2`` edges. The blow-up of Phan 2026 (arXiv 2605.06725, section 1), with self loops as well.
    Lists: edge by edge; for each, by receiver, then sender. ValueError unless there are as many.

    >>> from gnn_attention import patterns
    >>> blow_up(patterns.causal(2), [1, 2]).edge_index.tolist()
    [[0, 0, 1, 2, 0, 1, 2], [0, 1, 1, 1, 2, 2, 2]]
    """
    varies = _operands.from_zero("blow_up", g)
    of_dst, of_src, name = _both_sides("blow_up", "sizes", g, sizes, src_sizes, 0, _for_each)
    num_dst, num_src = int(of_dst.sum()), int(of_src.sum())
    if g.listed_edges is not None:
        edges = _block_edges(g.listed_edges, of_dst, of_src)
        return TokenGraph.from_edges(edges, num_dst, num_src, name=name)
    blocks = [torch.arange(len(sizes), device="cpu").repeat_interleave(sizes) for sizes in (of_dst, of_src)]
    return TokenGraph.from_rule(partial(gathered, g.rule, *blocks), num_dst, num_src, **varies, name=name)


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
    of_dst, of_src, name = _both_sides("quotient", "groups", g, groups, src_groups, 1, _owners)
    return each_alone(lambda plain: _quotient_of(plain, of_dst, of_src), g, name)


Given = int | list[int]  # one number for all tokens, or one for each
Numbering = Callable[[str, Given, int], Tensor]


def _both_sides(
    function: str, word: str, g: TokenGraph, own: object, others: object, smallest: int, of: Numbering
) -> tuple[Tensor, Tensor, str]:
    """A number for each receiver and each sender, the same where no others are given; the call as text."""
    given, senders = [_numbers(word, own, smallest)], word if others is None else f"src_{word}"
    if others is not None:
        given.append(_numbers(senders, others, smallest))
    elif g.num_dst != g.num_src and isinstance(given[0], list):
        raise ValueError(f"{function} of {g!r} needs src_{word} too: it has other senders than receivers")
    shown = (str(value) if isinstance(value, int) else text.listed(value, word) for value in given)
    name = _operands.name(function, (g,), *shown)
    return of(word, given[0], g.num_dst), of(senders, given[-1], g.num_src), name


def _numbers(word: str, value: object, smallest: int) -> Given:
    checks.check_order(word, value)
    value = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        return checks.size(word, value, smallest)
    return [checks.size(f"each of {word}", number) for number in value]


def _for_each(word: str, numbers: Given, count: int) -> Tensor:
    """One number for each token, the same for all where a single one was given."""
    values = [numbers] * count if isinstance(numbers, int) else numbers
    if len(values) != count:
        raise ValueError(f"{word} must hold one number for each of {count} tokens, got {len(values)}")
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _owners(word: str, value: Given, count: int) -> Tensor:
    if isinstance(value, int):
        return torch.arange(count, device="cpu") // value
    if gaps := set(range(max(value, default=0))) - set(value):
        got = f"{max(value)} but no {min(gaps)}"
        raise ValueError(f"{word} must be numbered 0, 1, ... without gaps, got {got}")
    return _for_each(word, value, count)


def _block_edges(edges: Tensor, of_dst: Tensor, of_src: Tensor) -> Tensor:
    src, dst = edges
    pairs = of_dst[dst] * of_src[src]
    edge = torch.arange(len(pairs), device="cpu").repeat_interleave(pairs)
    inside = torch.arange(len(edge), device="cpu") - (pairs.cumsum(0) - pairs)[edge]
    first_dst, first_src, width = of_dst.cumsum(0) - of_dst, of_src.cumsum(0) - of_src, of_src[src][edge]
    return torch.stack([first_src[src][edge] + inside % width, first_dst[dst][edge] + inside // width])


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
    if g.listed_edges is not None:
        yield g.listed_edges
        return
    step = max(1, EDGES_AT_ONCE // max(1, g.max_in_degree))
    for start in range(0, g.num_dst, step):
        rows = g.rows(start, min(start + step, g.num_dst)).edge_index
        yield rows + torch.tensor([[0], [start]], device="cpu")
