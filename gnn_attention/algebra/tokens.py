"""Change the tokens of a graph: select some, put them in another order, or add new ones.

A list names old tokens in their new order: in ``restrict(g, [5, 2])``, token 5 of g is at position 0.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention.algebra import _operands
from gnn_attention.algebra.products import block_edges, block_rule
from gnn_attention.algebra.stacks import copy_offsets
from gnn_attention.graph import TokenGraph, edge_list, rules, text
from gnn_attention.graph.rules import Rule
from gnn_attention.graph.symbols import dst, src

__all__ = ["extend", "restrict"]


@not_compiled
def restrict(g: TokenGraph, tokens: Iterable[int], src: Iterable[int] | None = None) -> TokenGraph:
    """Return the induced subgraph on ``tokens``, which are renumbered in the order of the list.

    The mask is ``mask[i, j] = g.mask()[tokens[i], src[j]]``; with ``src=None`` the senders are the
    same tokens. The result begins at position 0, so ``restrict(g, range(num_dst), range(num_src))``
    removes offsets. Edge lists keep their order. Raises ValueError if a token occurs twice.

    >>> from gnn_attention import patterns
    >>> restrict(patterns.window(6, 2), [0, 4, 3]).edge_index.tolist()
    [[0, 1, 2, 2], [0, 1, 1, 2]]
    """
    sizes = _operands.get_sizes("restrict", g)
    if src is None:
        _operands.check_square("restrict without src", g, "also pass senders: restrict(g, tokens, src)")
    receivers = _check_distinct("tokens", tokens, g.num_dst)
    senders = receivers if src is None else _check_distinct("src", src, g.num_src)
    src_text = "" if src is None else text.format_list(senders, "tokens")
    name = _operands.format_call("restrict", (g,), text.format_list(receivers, "tokens"), src_text)
    dst_tokens = torch.tensor(receivers, dtype=torch.int64, device="cpu")
    src_tokens = torch.tensor(senders, dtype=torch.int64, device="cpu")
    edges = g.edges.unique_edges.listed()
    if edges is None:
        rule = partial(rules.map_tokens, g.edges.contains, dst_tokens, src_tokens)
        return TokenGraph.from_rule(rule, len(receivers), len(senders), **sizes, name=name)
    edges = edge_list.edges_between(edges, dst_tokens, src_tokens, g.num_dst, g.num_src)
    return TokenGraph.from_edges(edges, len(receivers), len(senders), name=name)


@not_compiled
def extend(g: TokenGraph, count: int, link: str = "receivers", among: str = "causal") -> TokenGraph:
    """Return the graph with ``count`` new tokens at its end.

    ``link`` says how the new tokens are connected to the old ones: as "receivers" (they attend to
    all old tokens), as "senders" (all old tokens attend to them), "both" or "none". ``among`` says
    how they are connected to each other: "causal" (``src <= dst``), "full", "self" (self loops) or
    "none". The default continues a sequence: ``extend(causal(n), c) == causal(n + c)``;
    ``extend(g, m, "both", "full")`` adds m virtual nodes. For other families call the builder with
    more tokens, as in ``window(n + c, w)``. Old tokens keep their positions. An edge list holds the
    edges of g, then those from new to old tokens, from old to new ones, and among the new ones.

    >>> from gnn_attention import patterns
    >>> extend(patterns.window(3, 1), 2, "senders", "self").in_degree().tolist()
    [3, 3, 3, 1, 1]
    """
    _operands.check_square("extend", g, "extend the whole graph, then use rows(start, stop)")
    sizes = _operands.get_sizes("extend", g)
    count = checks.size("count", count)
    link = checks.choice("link", link, ("none", "senders", "receivers", "both"))
    among = checks.choice("among", among, AMONG_RULES)
    n = g.num_dst
    blocks = [(g, 0, 0)]
    if link in ("senders", "both"):
        blocks.append((TokenGraph.from_rule(rules.all_pairs, n, count), 0, n))
    if link in ("receivers", "both"):
        blocks.append((TokenGraph.from_rule(rules.all_pairs, count, n), n, 0))
    if (rule := AMONG_RULES[among]) is not None:
        blocks.append((TokenGraph.from_rule(rule, count), n, n))
    option_text = "" if (link, among) == ("receivers", "causal") else f"{link!r}, {among!r}"
    name = _operands.format_call("extend", (g,), str(count), option_text)
    if g.edges.listed() is not None:
        return copy_offsets(g, TokenGraph.from_edges(block_edges(blocks), n + count, name=name))
    return copy_offsets(g, TokenGraph.from_rule(block_rule(blocks), n + count, **sizes, name=name))


AMONG_RULES: dict[str, Rule | None]
AMONG_RULES = {"none": None, "self": dst == src, "causal": rules.causal, "full": rules.all_pairs}


def _check_distinct(name: str, values: object, size: int) -> list[int]:
    tokens = _operands.check_positions(name, values, size)
    if len(set(tokens)) != len(tokens):
        duplicate = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"{name} must hold a token at most once, got {duplicate} twice")
    return tokens
