"""The same graph on other tokens: some of them, in another order, with further ones.

A sequence says what the tokens of the result are: ``restrict(g, [5, 2])`` has token 5 at position 0 and token
2 at position 1.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention.algebra import _operands
from gnn_attention.algebra.products import block_edges, block_rule
from gnn_attention.algebra.stacks import at_positions_of
from gnn_attention.graph import TokenGraph, edge_list, rules, text
from gnn_attention.graph.rules import Rule
from gnn_attention.graph.symbols import dst, src

__all__ = ["extend", "restrict"]


@not_compiled
def restrict(g: TokenGraph, tokens: Iterable[int], src: Iterable[int] | None = None) -> TokenGraph:
    """The induced subgraph: the chosen tokens, in the order given, and the edges among them.

    ``mask[i, j] = g.mask()[tokens[i], src[j]]``; ``src=None``: the senders are the same tokens. The result
    begins at position 0, whatever the positions in g were: ``restrict(g, range(num_dst), range(num_src))``
    forgets offsets. Lists keep their order. ValueError for a token twice.

    >>> from gnn_attention import patterns
    >>> restrict(patterns.window(6, 2), [0, 4, 3]).edge_index.tolist()
    [[0, 1, 2, 2], [0, 1, 1, 2]]
    """
    sizes = _operands.varies("restrict", g)
    if src is None:
        hint = "name the receivers and the senders: restrict(g, tokens, src)"
        _operands.square("restrict without src", g, hint)
    dst_chosen = _distinct("tokens", tokens, g.num_dst)
    src_chosen = dst_chosen if src is None else _distinct("src", src, g.num_src)
    shown = (
        text.format_list(dst_chosen, "tokens"),
        "" if src is None else text.format_list(src_chosen, "tokens"),
    )
    name = _operands.name("restrict", (g,), *shown)
    num_dst, num_src = len(dst_chosen), len(src_chosen)
    of_dst, of_src = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (dst_chosen, src_chosen))
    listed = g.edges.unique_edges.stored_list()
    if listed is None:
        rule = partial(rules.map_tokens, g.edges.contains, of_dst, of_src)
        return TokenGraph.from_rule(rule, num_dst, num_src, **sizes, name=name)
    edges = edge_list.edges_between(listed, of_dst, of_src, g.num_dst, g.num_src)
    return TokenGraph.from_edges(edges, num_dst, num_src, name=name)


@not_compiled
def extend(g: TokenGraph, count: int, link: str = "receivers", among: str = "causal") -> TokenGraph:
    """The graph with ``count`` new tokens at its end.

    ``link`` says what the new tokens are to the old ones: "receivers" (they attend to all the old ones),
    "senders" (all the old ones attend to them), "both", "none". ``among``, the new tokens themselves:
    "causal" (``src <= dst``), "full", "self" (a self loop each), "none". The default continues a text:
    ``extend(causal(n), c) == causal(n + c)``. ``extend(g, m, "both", "full")`` adds m virtual nodes. A longer
    member of a family is its builder's business: a longer window is ``window(n + c, w)``. Positions stay.
    Lists: g's, then new senders to old receivers, old senders to new, and the new ones.

    >>> from gnn_attention import patterns
    >>> extend(patterns.window(3, 1), 2, "senders", "self").in_degree().tolist()
    [3, 3, 3, 1, 1]
    """
    sizes = _operands.square("extend", g, "extend the graph of all tokens and take rows(start, stop) of it")
    count = checks.size("count", count)
    link = checks.choice("link", link, ("none", "senders", "receivers", "both"))
    among = checks.choice("among", among, AMONG)
    n, parts = g.num_dst, [(g, 0, 0)]
    if link in ("senders", "both"):
        parts.append((TokenGraph.from_rule(rules.all_pairs, n, count), 0, n))
    if link in ("receivers", "both"):
        parts.append((TokenGraph.from_rule(rules.all_pairs, count, n), n, 0))
    rule = AMONG[among]
    parts += [] if rule is None else [(TokenGraph.from_rule(rule, count), n, n)]
    words = ("", "") if (link, among) == ("receivers", "causal") else (repr(link), repr(among))
    name = _operands.name("extend", (g,), str(count), *words)
    if g.edges.stored_list() is not None:
        return at_positions_of(g, TokenGraph.from_edges(block_edges(parts), n + count, name=name))
    return at_positions_of(g, TokenGraph.from_rule(block_rule(parts), n + count, **sizes, name=name))


AMONG: dict[str, Rule | None]
AMONG = {"none": None, "self": dst == src, "causal": rules.causal, "full": rules.all_pairs}


def _distinct(word: str, values: object, count: int) -> list[int]:
    chosen = _operands.positions(word, values, count)
    if len(set(chosen)) != len(chosen):
        twice = next(token for token, count in Counter(chosen).items() if count > 1)
        raise ValueError(f"{word} must hold a token at most once, got {twice} twice")
    return chosen
