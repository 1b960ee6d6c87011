"""Graphs with near and far senders: powers of two, butterflies, partition trees, dilated segments."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import any_of, dst, head, look_up, src
from gnn_attention.patterns._builder import builder

__all__ = ["binary_partition", "butterfly", "butterfly_factor", "fibottention", "h_matrix_level"]
__all__ += ["log_sparse", "longnet", "power_attention"]


@builder()
def log_sparse(n: int, causal: bool = True) -> TokenGraph:
    """Each token attends to itself and the tokens at distances 1, 2, 4, 8, ....

    The edges are those where ``dst - src`` is 0 or a power of two, and the in-degree is
    ``1 + ceil(log2(dst + 1))``; ``causal=False`` allows these distances on both sides. A message needs
    as many layers as its distance has binary ones, so ``floor(log2 n)`` layers reach every token.
    Source: LogSparse attention (Li et al. 2019, arXiv 1907.00235), whose positions l in ``l - 2^k``
    count from 1. The two extensions of the paper, a dense window and restarts, are not included.

    >>> log_sparse(6).in_degree().tolist()
    [1, 2, 3, 3, 4, 4]
    """
    return TokenGraph.from_rule(rules.drop_future(_is_zero_or_power(abs(dst - src), n), causal), n)


@builder(block=1, window=1)
def power_attention(n: int, block: int = 1, window: int = 1, sinks: int = 0) -> TokenGraph:
    """Each token attends to near blocks, to the first blocks, and to blocks at power-of-two distances.

    With ``gap = dst // block - src // block`` the edges satisfy ``src <= dst``, and ``gap < window``
    or ``gap`` is a power of two or ``src // block < sinks``. ``window`` and ``sinks`` count blocks;
    ``window=1`` is the token's own block. ``power_attention(n)`` is ``log_sparse(n)``. In d layers messages
    cross every gap below ``2^d``. Source: PowerAttention (Chen et al. 2025, arXiv 2503.03588, section 3.3).

    >>> power_attention(4096, block=16, window=4, sinks=1).in_degree().max().item() // 16   # blocks, of 256
    11
    """
    gap = dst // block - src // block
    is_near_or_sink = (gap < window) | (src < sinks * block)
    rule = (src <= dst) & (is_near_or_sink | _is_zero_or_power(gap, -(-n // block)))
    return TokenGraph.from_rule(rule, n)


@builder(block=1)
def butterfly(n: int, block: int = 1) -> TokenGraph:
    """Each token attends to its own block and the blocks whose number differs in one binary digit.

    The edges are ``blk(src) = blk(dst)`` or ``blk(src) = blk(dst) xor 2^k``. The in-degree is
    ``block * (1 + log2(n / block))`` if n is ``block`` times a power of two; otherwise the graph is
    cut from the next larger such graph. It is symmetric and not causal (in ``butterfly(n) & causal(n)``
    messages only reach blocks whose number has all binary ones of the sender's). Any token reaches any other
    in ``log2(n / block)`` layers. Source: the *flat* block butterfly of Pixelated Butterfly (Dao et
    al. 2022, arXiv 2112.00029), a sum of the factors whose product is a butterfly (:func:`butterfly_factor`).

    >>> butterfly(8).in_degree().tolist()
    [4, 4, 4, 4, 4, 4, 4, 4]
    """
    return TokenGraph.from_rule(_is_zero_or_power((dst // block) ^ (src // block), -(-n // block)), n)


@builder(block=1)
def butterfly_factor(n: int, level: int, block: int = 1) -> TokenGraph:
    """Each token attends to its own block and the block whose number differs in digit ``level``.

    This is one layer of a butterfly network. The edges are ``blk(src) = blk(dst)`` or
    ``blk(src) = blk(dst) xor 2^level``. The in-degree is ``2 * block`` if both blocks are whole. If
    n is ``block`` times a power of two, the product of all levels, in any order, is full, with one path
    between any two blocks. Source: block butterfly matrices (Dao et al. 2022, arXiv 2112.00029).

    >>> butterfly_factor(4, 1).edge_index.tolist()
    [[0, 2, 1, 3, 0, 2, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    # Two numbers agree outside digit 2^k iff their quotients by 2^(k+1) and remainders modulo 2^k agree.
    i, j, stride = dst // block, src // block, 2**level
    rule = (i // (2 * stride) == j // (2 * stride)) & ((i - j) % stride == 0)
    return TokenGraph.from_rule(rule, n)


@builder(k=1)
def binary_partition(n: int, k: int = 1, causal: bool = True) -> TokenGraph:
    """Tokens attend to near tokens one by one, and to far tokens through the spans of a binary tree.

    Nodes ``0 .. n - 1`` are the tokens. Then come the spans, level by level from left to right.
    Level l has ``ceil(n / 2^l)`` spans of ``2^l`` tokens, of which the last may be shorter, up to
    the root. A span attends to all its tokens. A token attends to itself and then, going left, to k
    tokens, k spans of level 1, k of level 2, and so on to the beginning; no token is covered twice.
    Where a level begins in the middle of a span, the first of its k nodes is the remaining half, a
    node of the level below. ``causal=False`` adds the right side. With ``causal=True`` tokens only
    receive from earlier tokens, although span nodes have higher numbers. Source: BP-Transformer (Ye
    et al. 2019, arXiv 1911.04070; k is ``step`` in its code).

    >>> binary_partition(4).in_degree().tolist()   # four tokens, two halves and the root
    [1, 2, 3, 3, 2, 2, 4]
    """
    # The list holds the first node of each level, then the number of nodes.
    level_starts, num_spans = [0, n], n
    while num_spans > 1:
        num_spans = (num_spans + 1) // 2
        level_starts.append(level_starts[-1] + num_spans)
    token = torch.arange(n, device="cpu")
    edges = [torch.stack([token, start + token // 2**level]) for level, start in enumerate(level_starts[:-1])]
    edges.append(_context_edges(n, k, level_starts, left=True))
    if not causal:
        edges.append(_context_edges(n, k, level_starts, left=False))
    src, dst = torch.cat(edges, 1)
    order = (dst * level_starts[-1] + src).argsort()
    return TokenGraph.from_edges(torch.stack([src, dst])[:, order], level_starts[-1])


@builder(heads=1)
def longnet(
    n: int, segments: Iterable[int], dilations: Iterable[int], heads: int | None = None, causal: bool = True
) -> TokenGraph:
    """In segments of w tokens, the tokens at every r-th place attend to each other, for several w and r.

    The pairs (w, r) are ``zip(segments, dilations)``. A pair has the edges ``dst // w == src // w``
    and ``dst % w % r == src % w % r == h % r``, with ``src <= dst`` unless ``causal=False``. The
    offset ``h % r`` varies by head as in the paper; without ``heads`` it is 0. One pair should have
    ``r = 1``, or some tokens are isolated. Source: LongNet (Ding et al. 2023, arXiv 2307.02486,
    equations 3 to 5 and 13 to 15). The paper merges the pairs by their softmax denominators, so an
    edge in m pairs counts m times. To do the same, add up the masks of the single pairs and pass
    the sum to ``score_mods.log_multiplicity``. In the paper's code (torchscale) neighbouring heads
    share the offset ``h // ceil(heads / r)``. Raises ValueError unless there is at least one
    segment, and one dilation for each segment.

    >>> longnet(8, [2, 8], [1, 4]).in_degree().tolist()
    [1, 2, 1, 2, 2, 2, 1, 2]
    """
    sizes, steps = checks.sizes("segments", segments, 1), checks.sizes("dilations", dilations, 1)
    if len(sizes) != len(steps) or not sizes:
        raise ValueError(
            f"longnet needs a dilation for each segment, got {len(steps)} dilations for {len(sizes)} segments"
        )
    scales = []
    for w, r in zip(sizes, steps, strict=True):
        offset = 0 if heads is None else head % r
        scales.append((dst // w == src // w) & (dst % w % r == offset) & (src % w % r == offset))
    return TokenGraph.from_rule(rules.drop_future(any_of(scales), causal), n, heads=heads)


@builder(block=1)
def h_matrix_level(n: int, block: int, level: int, causal: bool = True) -> TokenGraph:
    """Each token attends to the tokens that belong to one level of a hierarchical matrix.

    With ``near(size) = |dst // size - src // size| <= 1``, level 0 is ``near(block)``: the diagonal
    blocks and their neighbours. Level l is ``near(block * 2^l)`` without ``near(block * 2^(l - 1))``. Edges
    satisfy ``src <= dst`` unless ``causal=False``. Every pair belongs to exactly one level, so all
    levels together are ``causal(n)`` or ``full(n)``. Source: H-Transformer-1D (Zhu and Soricut
    2021, arXiv 2107.11906). The paper's cost is linear because level l works on averages of ``2^l``
    senders and receivers. In this graph every edge connects two tokens.

    >>> h_matrix_level(8, 1, 1).in_degree().tolist()
    [0, 0, 1, 2, 1, 2, 1, 2]
    """
    size = block * 2**level
    rule = abs(dst // size - src // size) <= 1
    if level:
        rule = rule & (abs(dst // (size // 2) - src // (size // 2)) > 1)
    return TokenGraph.from_rule(rules.drop_future(rule, causal), n)


@builder(heads=1)
def fibottention(n: int, heads: int, w_min: int = 5, w_max: int | None = None) -> TokenGraph:
    """Each head has its own distances; its tokens attend to tokens this far away on both sides.

    The distances are a row of the Wythoff array, which grows like the Fibonacci
    numbers. In head i (from 1) ``|dst - src|`` is one of ``a, b, a + b, ...`` with
    ``a = floor(m phi)``, ``b = a + m``, ``m = floor(i phi)`` and phi the golden ratio, up to
    ``w_i = w_min + (w_max - w_min) (i - 1) // (heads - 1)``; a is always included. No distance
    belongs to two heads, and no token attends to itself. ``w_max`` is ``n // 3`` by default, and
    at least ``w_min``. Source: Fibottention (Rahimian et al. 2024, arXiv 2406.19391), as in the
    authors' code; ``graph | global_tokens(n, 1, causal=False)`` adds their class token.

    >>> fibottention(6, 2).select(head=0).in_degree().tolist()
    [4, 4, 5, 5, 4, 4]
    """
    w_max = max(n // 3, w_min) if w_max is None else checks.size("w_max", w_max, w_min)
    has_distance = torch.zeros(heads, max(n, 1), dtype=torch.bool, device="cpu")
    for h in range(heads):
        max_distance = w_min + (w_max - w_min) * h // max(heads - 1, 1)
        # Integer square roots make floor((h + 1) phi) and floor(m phi) exact.
        m = (h + 1 + math.isqrt(5 * (h + 1) ** 2)) // 2
        first = (m + math.isqrt(5 * m * m)) // 2
        distances = [first, first + m]
        while distances[-1] <= max_distance:
            distances.append(distances[-1] + distances[-2])
        has_distance[h, [distance for distance in distances[:-1] if distance < n]] = True
    return TokenGraph.from_rule(look_up(has_distance, abs(dst - src)), n, heads=heads)


def _is_zero_or_power(gap: Any, upper_bound: int) -> Any:
    """Return the rule that ``gap`` is 0 or a power of two below ``bound``."""
    powers = [2**k for k in range(max(upper_bound - 1, 0).bit_length())]
    return any_of(gap == distance for distance in (0, *powers))


def _context_edges(n: int, k: int, level_starts: list[int], left: bool) -> Int[Tensor, "2 edges"]:
    """Return the edges from k nodes of each level to each token, from near to far nodes."""
    token = torch.arange(n, device="cpu")
    edges = [torch.empty(2, 0, dtype=torch.int64, device="cpu")]
    # The edges so far cover the tokens between the receiver and the boundary.
    boundary = token if left else token + 1
    for level in range(len(level_starts) - 1):
        for _ in range(k):
            is_aligned = boundary % 2**level == 0
            size = torch.where(is_aligned, 2**level, max(2**level // 2, 1))
            start = torch.where(is_aligned, level_starts[level], level_starts[max(level - 1, 0)])
            node = start + (boundary - size if left else boundary) // size
            edges.append(torch.stack([node, token])[:, boundary > 0 if left else boundary < n])
            boundary = boundary - size if left else boundary + size
    return torch.cat(edges, 1)
