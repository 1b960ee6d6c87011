"""Graphs with hubs, to which all tokens attend: sinks, global tokens, memory, relays, latents."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.rules import Rule
from gnn_attention.graph.symbols import any_of, compute, dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder
from gnn_attention.patterns.basic import cross, full
from gnn_attention.patterns.local import window

__all__ = ["bigbird", "bigbird_etc", "etc", "global_tokens", "isab", "longformer"]
__all__ += ["memory_tokens", "perceiver", "side_nodes", "sinks", "star", "tglobal"]


@builder()
def sinks(n: int, s: int, causal: bool = True) -> TokenGraph:
    """Every token attends to the first ``s`` tokens: ``src < s and src <= dst``.

    ``causal=False`` drops the second condition. ``window(n, w) | sinks(n, 4)`` is StreamingLLM
    (Xiao et al. 2023, arXiv 2309.17453), which ``sink_window`` builds in one call.

    >>> sinks(5, 2).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    return TokenGraph.from_rule(rules.drop_future((src < s) & (dst >= 0), causal), n)


@builder()
def global_tokens(n: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """Global tokens G attend to all tokens, and all tokens attend to them.

    The edges are ``src in G or dst in G``, and ``src <= dst`` unless ``causal=False``. ``tokens`` lists G;
    an integer m means the first m tokens. Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150, section
    3.1), whose graph is not causal. Raises IndexError for a position outside ``0 .. n - 1``.

    >>> global_tokens(4, [1]).edge_index.tolist()
    [[0, 1, 1, 1], [1, 1, 2, 3]]
    """
    positions = tokens if isinstance(tokens, Iterable) else range(checks.size("tokens", tokens))
    is_global = _data.index_to_mask(_operands.check_positions("tokens", positions, n, any_order=True), n)
    rule = look_up(is_global, dst) | look_up(is_global, src)
    return TokenGraph.from_rule(rules.drop_future(rule, causal), n)


@builder()
def longformer(n: int, w: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """Each token attends to a window and to the global tokens G, which attend to all tokens.

    The edges are ``|dst - src| < w or src in G or dst in G``, and ``src <= dst`` if causal. The graph is
    ``window(n, w) | global_tokens(n, tokens)``. In the paper's encoder and in Hugging Face it is not causal,
    and a token attends to ``attention_window / 2`` tokens on each side, so ``w = attention_window // 2 + 1``.
    attention-gym's ``global_sliding_window(r)`` is ``w = r + 1``. Source: Beltagy et al. 2020, Longformer
    (arXiv 2004.05150, section 3.1). Raises IndexError for a position outside ``0 .. n - 1``.

    >>> longformer(5, 2, [0], causal=False).in_degree().tolist()
    [5, 3, 4, 4, 3]
    """
    return window(n, w, causal) | global_tokens(n, tokens, causal)


@builder()
def etc(n: int, w: int, num_global: int) -> TokenGraph:
    """``n`` tokens attend to a window; ``num_global`` tokens before them are connected to all tokens.

    Nodes ``0 .. g - 1`` are global (g = num_global), and nodes ``g .. g + n - 1`` are the long input.
    The edges are ``src < g or dst < g or |dst - src| < w``; they are not causal. ``local_radius`` r
    in the code is ``w = r + 1``. Source: Ainslie et al. 2020, ETC (arXiv 2004.08483), and its code, etcmodel.

    >>> etc(4, 1, 2).in_degree().tolist()
    [6, 6, 3, 3, 3, 3]
    """
    rule = (dst < num_global) | (src < num_global) | (abs(dst - src) < w)
    return TokenGraph.from_rule(rule, num_global + n)


@builder(block=1, heads=1)
def bigbird(n: int, block: int, num_random: int = 3, heads: int | None = None, seed: int = 0) -> TokenGraph:
    """Blocks attend to themselves, their neighbours, the first and last block, and random blocks.

    The first and last block attend to all tokens. With ``i = dst // block``, ``j = src // block``
    and L the last block the edges are ``i in {0, L} or j in {0, L} or |i - j| <= 1 or j in R(i)``.
    R(i) holds ``num_random`` blocks, drawn without replacement from those that i does not attend to
    anyway (all if there are fewer). With ``heads`` every head has its own R, and head 0 has the R
    of ``heads=None``. A larger ``num_random`` only adds edges. The last block may be short. The
    graph is not causal.

    In evaluation Hugging Face replaces R(i) by copies of block 0, which is ``num_random=0`` with
    ``log(1 + num_random)`` added to the logits from block 0 to the middle blocks. Source: Zaheer et
    al. 2020, Big Bird (arXiv 2007.14062): the internal construction, ITC.

    >>> bigbird(6, 1, num_random=1).in_degree().tolist()
    [6, 5, 6, 6, 5, 6]
    """
    last = -(-n // block) - 1
    row, column = dst // block, src // block
    is_hub = (row == 0) | (row == last) | (column == 0) | (column == last)
    is_random = _is_random_block(row, column, last + 1, {0, last}, num_random, heads, seed)
    return TokenGraph.from_rule(is_hub | (abs(row - column) <= 1) | is_random, n, heads=heads)


@builder(block=1, heads=1)
def bigbird_etc(
    n: int, block: int, num_global: int, num_random: int = 3, heads: int | None = None, seed: int = 0
) -> TokenGraph:
    """Blocks attend to near and random blocks; global tokens before them are connected to all tokens.

    Nodes ``0 .. g - 1`` are global (g = num_global). With ``i = (dst - g) // block`` and
    ``j = (src - g) // block`` the edges are ``dst < g or src < g or |i - j| <= 1 or j in R(i)``.
    R(i) is drawn as in :func:`bigbird`, but from all blocks other than i and its neighbours. The graph is not
    causal. Source: Zaheer et al. 2020, Big Bird (arXiv 2007.14062): the extended construction, ETC.

    >>> bigbird_etc(8, 2, num_global=1, num_random=0).in_degree().tolist()
    [9, 5, 5, 7, 7, 7, 7, 5, 5]
    """
    row, column = (compute(torch.clamp, token - num_global, 0) // block for token in (dst, src))
    is_random = _is_random_block(row, column, -(-n // block), set(), num_random, heads, seed)
    rule = (dst < num_global) | (src < num_global) | (abs(row - column) <= 1) | is_random
    return TokenGraph.from_rule(rule, num_global + n, heads=heads)


@builder()
def memory_tokens(graph: TokenGraph, m: int, causal: bool = True) -> TokenGraph:
    """All tokens attend to ``m`` memory tokens in front of ``graph``; memory attends to all if not causal.

    Nodes ``0 .. m - 1`` are memory, and token i of ``graph`` is node ``m + i``. The edges are
    ``dst < m or src < m or (src - m -> dst - m) in graph``, and ``src <= dst`` unless ``causal=False``.
    Causal memory attends to no token of ``graph``: it is a sink that can be learned. ``causal=False`` is
    the two-way memory of GMAT (Gupta and Berant 2020, arXiv 2006.03274), of the Memory Transformer
    (Burtsev et al. 2020, arXiv 2006.11527) and of registers in vision transformers (``graph`` is
    full). Raises TypeError for an argument that is not a graph, and ValueError unless it is square.

    >>> from gnn_attention.patterns import window
    >>> memory_tokens(window(3, 1), 1, causal=False).edge_index.tolist()
    [[0, 1, 2, 3, 0, 1, 0, 2, 0, 3], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]]
    """
    _operands.check_square("memory_tokens", graph, "memory stands before the tokens of one sequence")
    # The rule of a graph without tokens may look up an empty table.
    inner_rule = graph.edges.contains if graph.num_dst else rules.all_pairs
    rule = rules.drop_future(partial(_attend_to_memory, m, inner_rule), causal)
    return TokenGraph.from_rule(rule, m + graph.num_dst, heads=graph.heads, batch=graph.batch)


@builder(block=1)
def tglobal(n: int, w: int, block: int) -> TokenGraph:
    """Each token attends to a window and to all side nodes. Each side node sums up a block of tokens.

    The receivers are n tokens. The senders are these tokens, then ``n // block`` side nodes (see
    :func:`side_nodes`). The edges are ``|dst - src| < w or src >= n``, not causal. ``local_radius``
    r in Hugging Face is ``w = r + 1``; its default graph is ``tglobal(n, 128, 16)``. Source:
    transient global attention of LongT5 (Guo et al. 2022, arXiv 2112.07916).

    >>> tglobal(5, 1, 2).in_degree().tolist()
    [3, 3, 3, 3, 3]
    """
    return TokenGraph.from_rule((src >= n) | (abs(dst - src) < w), n, n + n // block)


@builder(block=1)
def side_nodes(n: int, block: int) -> TokenGraph:
    """Side node k attends to the tokens of block k.

    The edges are ``dst = min(src // block, K - 1)`` with ``K = n // block`` side nodes: tokens
    after the last whole block belong to the last side node, and with n < block there are no side
    nodes. Source: LongT5 (Guo et al. 2022, arXiv 2112.07916), where each layer sums up the tokens
    anew.

    >>> print(side_nodes(5, 2))
    side_nodes(5, 2): mask[dst, src] and in-edges
    0 ■ ■ · · ·   0 <- 0 1
    1 · · ■ ■ ■   1 <- 2 3 4
    """
    num_nodes = n // block
    node = compute(torch.clamp, src // block, 0, max(num_nodes - 1, 0))
    return TokenGraph.from_rule(node == dst, num_nodes, n)


@builder()
def star(n: int) -> TokenGraph:
    """``n`` satellites attend to their neighbours on a ring, their embeddings and a relay.

    This is the Star-Transformer as one graph of ``2 n + 1`` nodes: node 0 is the relay, nodes ``i = 1 .. n``
    are the satellites, and node ``n + i`` is the embedding of satellite i. A satellite attends to itself,
    its two neighbours on the ring (n and 1 are neighbours), its embedding and the relay. The relay
    attends to itself and all satellites. Embeddings have no in-edges, so they do not change. There
    are ``6 n + 1`` edges for n >= 3. The paper updates the satellites first, ``star(n).rows(1, n + 1)``, then
    the relay, ``star(n).rows(0, 1)``. Source: Guo et al. 2019, Star-Transformer (arXiv 1902.09113).

    >>> star(3).in_degree().tolist()
    [4, 5, 5, 5, 0, 0, 0]
    """
    gap = abs(dst - src)
    # The ring condition may include the relay, to which satellites attend in any case.
    is_ring_edge = (src <= n) & ((gap <= 1) | (gap == n - 1))
    to_satellite = (dst >= 1) & (dst <= n) & (is_ring_edge | (src == 0) | (src == dst + n))
    return TokenGraph.from_rule(to_satellite | ((dst == 0) & (src <= n)), 2 * n + 1)


def isab(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """Return two graphs: ``m`` inducing points attend to ``n`` elements, then elements to points.

    So all elements exchange messages through the points. The graphs ``m <- n`` and ``n <- m`` are
    complete and bipartite. They have ``2 n m`` edges instead of ``n^2``, and their product is full
    if m >= 1. Source: ISAB(X) = MAB(X, MAB(I, X)) of the Set Transformer (Lee et al. 2019, arXiv
    1810.00825); its pooling with k seeds is the first graph of ``isab(n, k)``.

    >>> there, back = isab(3, 2)
    >>> there.num_edges, back.num_edges, (back @ there).num_edges
    (6, 6, 9)
    """
    n, m = checks.size("n", n), checks.size("m", m)
    return cross(m, n), cross(n, m)


def perceiver(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """Return two graphs: ``m`` latents attend to all ``n`` inputs, then to each other.

    The graphs ``m <- n`` and ``m <- m`` are applied in turn. They have ``n m`` and ``m^2`` edges,
    so the cost of further layers over the latents does not depend on n. The inputs are only
    senders: they have no in-edges, so they do not change. Source: Jaegle et al. 2021, Perceiver
    (arXiv 2103.03206).

    >>> [graph.num_edges for graph in perceiver(100, 4)]
    [400, 16]
    """
    n, m = checks.size("n", n), checks.size("m", m)
    return cross(m, n), full(m)


def _is_random_block(
    row: Any, column: Any, num_blocks: int, hubs: set[int], num_random: int, heads: int | None, seed: int
) -> Any:
    """Return the rule that block ``column`` is in R(row), as defined by :func:`bigbird`."""
    num_random = min(num_random, num_blocks)
    generator = torch.Generator().manual_seed(seed)
    block_index = torch.arange(num_blocks, device="cpu")
    is_middle = torch.tensor([i not in hubs for i in range(num_blocks)], dtype=torch.bool, device="cpu")
    # If there are fewer candidates, the remaining entries of R(i) are i itself, to which i attends anyway.
    random_blocks = block_index[None, :, None].repeat(heads or 1, 1, num_random)
    for head in range(heads or 1):
        for i in block_index[is_middle].tolist():
            candidates = block_index[is_middle & ((block_index - i).abs() > 1)]
            order = torch.randperm(len(candidates), generator=generator, device="cpu")
            sample = candidates[order[:num_random]]
            random_blocks[head, i, : len(sample)] = sample
    draws = (random_blocks[0] if heads is None else random_blocks).unbind(-1)
    return any_of(look_up(random_block, row) == column for random_block in draws)


def _attend_to_memory(m: int, inner_rule: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst < m) | (src < m) | inner_rule(b, h, (dst - m).clamp(min=0), (src - m).clamp(min=0))
