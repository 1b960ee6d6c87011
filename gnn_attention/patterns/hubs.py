"""Tokens that every token attends to, and extra nodes: sinks, global tokens, memory, relays, latents."""

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

    ``causal=False`` drops the second condition. ``window(n, w) | sinks(n, 4)`` is StreamingLLM (Xiao et al.
    2023, arXiv 2309.17453); as one builder, ``sink_window``.

    >>> sinks(5, 2).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    return TokenGraph.from_rule(rules.drop_future((src < s) & (dst >= 0), causal), n)


@builder()
def global_tokens(n: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """Chosen tokens G attend to all and are attended to by all.

    ``src in G or dst in G``, and ``src <= dst`` unless ``causal=False``. ``tokens``: their positions, or a
    number m for the first m. Longformer's global attention (Beltagy et al. 2020, arXiv 2004.05150, section
    3.1) is ``causal=False``. IndexError for a position outside ``0 .. n - 1``.

    >>> global_tokens(4, [1]).edge_index.tolist()
    [[0, 1, 1, 1], [1, 1, 2, 3]]
    """
    listed = tokens if isinstance(tokens, Iterable) else range(checks.size("tokens", tokens))
    table = _data.mark_positions(_operands.positions("tokens", listed, n, any_order=True), n)
    return TokenGraph.from_rule(rules.drop_future(look_up(table, dst) | look_up(table, src), causal), n)


@builder()
def longformer(n: int, w: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """A window and global tokens G: ``|dst - src| < w or src in G or dst in G``.

    ``src <= dst`` unless ``causal=False``. The union of ``window(n, w)`` and ``global_tokens(n, tokens)``.
    The paper's encoder is ``causal=False``; others count w differently: with the paper's and Hugging Face's
    ``attention_window`` W each token attends to W / 2 tokens on each side, which is ``w = W // 2 + 1`` here;
    attention-gym's ``global_sliding_window(r)`` is ``w = r + 1``. Beltagy et al. 2020, Longformer (arXiv
    2004.05150), section 3.1. IndexError for a position outside ``0 .. n - 1``.

    >>> longformer(5, 2, [0], causal=False).in_degree().tolist()
    [5, 3, 4, 4, 3]
    """
    return window(n, w, causal) | global_tokens(n, tokens, causal)


@builder()
def etc(n: int, w: int, num_global: int) -> TokenGraph:
    """``num_global`` extra tokens stand before ``n`` long ones, attend to all and are attended to by all.

    Long ones attend to a window. Nodes ``0 .. g - 1`` are global (g = num_global), ``g .. g + n - 1`` long:
    ``src < g or dst < g or |dst - src| < w``. Never causal. The code's ``local_radius`` r is ``w = r + 1``.
    Ainslie et al. 2020, ETC (arXiv 2004.08483) and its code, google-research/etcmodel.

    >>> etc(4, 1, 2).in_degree().tolist()
    [6, 6, 3, 3, 3, 3]
    """
    near = abs(dst - src) < w
    return TokenGraph.from_rule((dst < num_global) | (src < num_global) | near, num_global + n)


@builder(block=1, heads=1)
def bigbird(n: int, block: int, num_random: int = 3, heads: int | None = None, seed: int = 0) -> TokenGraph:
    """Blocks of tokens attend to themselves, both neighbours, the first and last block, and random ones.

    Those two attend to every token. With ``i = dst // block``, ``j = src // block`` and L the last block:
    ``i in {0, L} or j in {0, L} or |i - j| <= 1 or j in R(i)``, where R(i) holds ``num_random`` further
    blocks, drawn without repetition from those that i does not attend to anyway (all of them, if there are
    fewer). ``heads`` draws R for each head; head 0 has the same as ``heads=None``, and a larger
    ``num_random`` only adds edges. The last block may be short. Never causal.

    In evaluation Hugging Face replaces all of R(i) by copies of block 0, which is ``num_random=0`` with
    ``log(1 + num_random)`` added to the logits from block 0 to the middle blocks. Zaheer et al. 2020, Big
    Bird (arXiv 2007.14062): the internal construction, ITC.

    >>> bigbird(6, 1, num_random=1).in_degree().tolist()
    [6, 5, 6, 6, 5, 6]
    """
    last = -(-n // block) - 1
    row, column = dst // block, src // block
    hubs = (row == 0) | (row == last) | (column == 0) | (column == last)
    near = abs(row - column) <= 1
    rule = hubs | near | _is_random_block(row, column, last + 1, {0, last}, num_random, heads, seed)
    return TokenGraph.from_rule(rule, n, heads=heads)


@builder(block=1, heads=1)
def bigbird_etc(
    n: int, block: int, num_global: int, num_random: int = 3, heads: int | None = None, seed: int = 0
) -> TokenGraph:
    """``num_global`` extra tokens stand before ``n`` attend to all and are attended to by all.

    The n attend to three blocks and random ones. Nodes ``0 .. g - 1`` are global (g = num_global). With
    ``i = (dst - g) // block`` and ``j = (src - g) // block``:
    ``dst < g or src < g or |i - j| <= 1 or j in R(i)``, R(i) as in :func:`bigbird`, drawn from the blocks
    outside the window. Never causal. Zaheer et al. 2020, Big Bird (arXiv 2007.14062), extended: ETC.

    >>> bigbird_etc(8, 2, num_global=1, num_random=0).in_degree().tolist()
    [9, 5, 5, 7, 7, 7, 7, 5, 5]
    """
    row, column = (compute(torch.clamp, token - num_global, 0) // block for token in (dst, src))
    drawn = _is_random_block(row, column, -(-n // block), set(), num_random, heads, seed)
    rule = (dst < num_global) | (src < num_global) | (abs(row - column) <= 1) | drawn
    return TokenGraph.from_rule(rule, num_global + n, heads=heads)


@builder()
def memory_tokens(graph: TokenGraph, m: int, causal: bool = True) -> TokenGraph:
    """``m`` memory tokens before the tokens of ``graph`` attend to all and are attended to by all.

    Among themselves these keep ``graph``. Nodes ``0 .. m - 1`` are memory, token i is node ``m + i``:
    ``dst < m or src < m or (src - m -> dst - m) in graph``, and ``src <= dst`` unless ``causal=False``; then
    the memory attends to no token and is a sink that can be learnt. ``causal=False`` is the both-way memory
    of GMAT (Gupta and Berant 2020, arXiv 2006.03274), of the Memory Transformer (Burtsev et al. 2020, arXiv
    2006.11527) and of registers in vision transformers, where ``graph`` is full. TypeError for anything but a
    graph, ValueError unless it is square.

    >>> from gnn_attention.patterns import window
    >>> memory_tokens(window(3, 1), 1, causal=False).edge_index.tolist()
    [[0, 1, 2, 3, 0, 1, 0, 2, 0, 3], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]]
    """
    _operands.square("memory_tokens", graph, "memory stands before the tokens of one sequence")
    # A graph of no tokens may be unable to answer.
    inner = graph.edges.contains if graph.num_dst else rules.all_pairs
    rule = rules.drop_future(partial(_memory, m, inner), causal)
    return TokenGraph.from_rule(rule, m + graph.num_dst, heads=graph.heads, batch=graph.batch)


@builder(block=1)
def tglobal(n: int, w: int, block: int) -> TokenGraph:
    """Each token attends to a window and every side node, one for each ``block`` tokens.

    ``|dst - src| < w or src >= n``. ``n`` receivers; senders are the n tokens, then ``n // block`` side
    nodes. What these are is :func:`side_nodes`. Never causal. Hugging Face's ``local_radius`` r is
    ``w = r + 1``; its defaults 127 and ``global_block_size`` 16 are ``tglobal(n, 128, 16)``. Guo et al. 2022,
    LongT5 (arXiv 2112.07916): transient global attention.

    >>> tglobal(5, 1, 2).in_degree().tolist()
    [3, 3, 3, 3, 3]
    """
    return TokenGraph.from_rule((src >= n) | (abs(dst - src) < w), n, n + n // block)


@builder(block=1)
def side_nodes(n: int, block: int) -> TokenGraph:
    """Side node k attends to the tokens of block k.

    ``dst = min(src // block, K - 1)`` with ``K = n // block`` side nodes. The tokens that are left over
    belong to the last block; fewer than ``block`` tokens have no side node. A side node of LongT5 is the sum
    of its tokens, made anew in each layer (Guo et al. 2022, arXiv 2112.07916, and Hugging Face's code).

    >>> print(side_nodes(5, 2))
    side_nodes(5, 2): mask[dst, src] and in-edges
    0 ■ ■ · · ·   0 <- 0 1
    1 · · ■ ■ ■   1 <- 2 3 4
    """
    nodes = n // block
    return TokenGraph.from_rule(compute(torch.clamp, src // block, 0, max(nodes - 1, 0)) == dst, nodes, n)


@builder()
def star(n: int) -> TokenGraph:
    """``n`` satellites attend to their neighbours on a ring, their embeddings and a relay.

    The relay attends to all satellites. The Star-Transformer as one graph of ``2 n + 1`` nodes: node 0 is the
    relay, ``i = 1 .. n`` the satellites, ``n + i`` the embedding of satellite i. A satellite attends to
    itself, its two neighbours on the ring (n and 1 are neighbours), its embedding and the relay; the relay
    attends to itself and all satellites; embeddings have no in-edges and so stay what they are. ``6 n + 1``
    edges for n >= 3. The paper updates the satellites first: ``star(n).rows(1, n + 1)``, then
    ``star(n).rows(0, 1)``. Guo et al. 2019, Star-Transformer (arXiv 1902.09113).

    >>> star(3).in_degree().tolist()
    [4, 5, 5, 5, 0, 0, 0]
    """
    gap = abs(dst - src)
    ring = (src <= n) & ((gap <= 1) | (gap == n - 1))  # or the relay, which is attended to anyway
    to_satellite = (dst >= 1) & (dst <= n) & (ring | (src == 0) | (src == dst + n))
    return TokenGraph.from_rule(to_satellite | ((dst == 0) & (src <= n)), 2 * n + 1)


def isab(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """``n`` elements exchange through ``m`` inducing points, in two steps.

    All points attend to all elements, then the other way. The two complete bipartite graphs ``m <- n`` and
    ``n <- m``: ``2 n m`` edges instead of ``n^2``; for m >= 1 their product is the full graph,
    ``back @ there == full(n)``. ISAB(X) = MAB(X, MAB(I, X)) of the Set Transformer (Lee et al. 2019, arXiv
    1810.00825); its pooling with k seeds is the first of ``isab(n, k)``.

    >>> there, back = isab(3, 2)
    >>> there.num_edges, back.num_edges, (back @ there).num_edges
    (6, 6, 9)
    """
    n, m = checks.size("n", n), checks.size("m", m)
    return cross(m, n), cross(n, m)


def perceiver(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """``m`` latents attend to all ``n`` inputs, then each other.

    The graphs ``m <- n`` and ``m <- m``, applied in turn. ``n m`` and ``m^2`` edges: the depth in latents
    does not cost what the inputs cost. The inputs have no in-edges. Jaegle et al. 2021, Perceiver (arXiv
    2103.03206).

    >>> [graph.num_edges for graph in perceiver(100, 4)]
    [400, 16]
    """
    n, m = checks.size("n", n), checks.size("m", m)
    return cross(m, n), full(m)


def _is_random_block(
    row: Any, column: Any, blocks: int, hubs: set[int], num_random: int, heads: int | None, seed: int
) -> Any:
    """Whether the block ``column`` is in R(row): drawn, or the row itself where there are fewer blocks."""
    wanted, copies = min(num_random, blocks), heads or 1
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(blocks, device="cpu")
    table = every[None, :, None].repeat(copies, 1, wanted)
    lonely = torch.tensor([block not in hubs for block in range(blocks)], dtype=torch.bool, device="cpu")
    for head in range(copies):
        for place in every[lonely].tolist():
            far = every[lonely & ((every - place).abs() > 1)]
            picks = far[torch.randperm(len(far), generator=generator, device="cpu")[:wanted]]
            table[head, place, : len(picks)] = picks
    tables = (table[0] if heads is None else table).unbind(-1)
    return any_of(look_up(drawn, row) == column for drawn in tables)


def _memory(m: int, inner: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst < m) | (src < m) | inner(b, h, (dst - m).clamp(min=0), (src - m).clamp(min=0))
