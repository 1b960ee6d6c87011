"""Hierarchies and logarithmic reach: powers of two, butterflies, partition trees, dilated segments."""

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

    ``dst - src`` is 0 or a power of two. In-degree ``1 + ceil(log2(dst + 1))``; ``causal=False`` takes these
    distances on both sides. A message takes as many layers as its distance has binary ones, so
    ``floor(log2 n)`` layers reach everything. LogSparse attention (Li et al. 2019, arXiv 1907.00235; its
    ``l - 2^k`` counts from 1). The paper's two extensions, a dense window and restarts, are not in it.

    >>> log_sparse(6).in_degree().tolist()
    [1, 2, 3, 3, 4, 4]
    """
    return TokenGraph.from_rule(rules.drop_future(_zero_or_power(abs(dst - src), n), causal), n)


@builder(block=1, window=1)
def power_attention(n: int, block: int = 1, window: int = 1, sinks: int = 0) -> TokenGraph:
    """Each token attends to blocks at distances that are powers of two, to near and first ones.

    ``src <= dst``, and with ``gap = dst // block - src // block``: ``gap < window``, or ``gap`` is a power of
    two, or ``src // block < sinks``. ``window`` and ``sinks`` count blocks, the own block included, so
    ``power_attention(n)`` is ``log_sparse(n)``. After d layers a token has received from all blocks at a gap
    below ``2^d``. PowerAttention (Chen et al. 2025, arXiv 2503.03588, section 3.3).

    >>> power_attention(4096, block=16, window=4, sinks=1).in_degree().max().item() // 16   # blocks, of 256
    11
    """
    gap = dst // block - src // block
    rule = (src <= dst) & ((gap < window) | (src < sinks * block) | _zero_or_power(gap, -(-n // block)))
    return TokenGraph.from_rule(rule, n)


@builder(block=1)
def butterfly(n: int, block: int = 1) -> TokenGraph:
    """Each token attends to its own block and the blocks whose number differs in one binary digit.

    ``blk(src) = blk(dst) xor 2^k``. In-degree ``block * (1 + log2(n / block))`` where n is ``block`` times a
    power of two; for any other n, what is left of the next power. Symmetric, not causal (``& causal(n)`` lets
    messages reach only the blocks whose digits include the sender's). Everything is reached in
    ``log2(n / block)`` layers. The *flat* block butterfly of Pixelated Butterfly (Dao et al. 2022, arXiv
    2112.00029), a sum where the butterfly is a product: :func:`butterfly_factor`.

    >>> butterfly(8).in_degree().tolist()
    [4, 4, 4, 4, 4, 4, 4, 4]
    """
    return TokenGraph.from_rule(_zero_or_power((dst // block) ^ (src // block), -(-n // block)), n)


@builder(block=1)
def butterfly_factor(n: int, level: int, block: int = 1) -> TokenGraph:
    """One layer of a butterfly network.

    Each token attends to its own block and the block that differs in binary digit ``level``. ``blk(src)`` is
    ``blk(dst)`` or ``blk(dst) xor 2^level``: in-degree ``2 * block`` where the partner exists. One layer of
    each level, in any order, connects everybody where n is ``block`` times a power of two: the product of the
    factors is full, each pair by exactly one path of blocks. A factor of block butterfly matrices (Dao et al.
    2022, arXiv 2112.00029).

    >>> butterfly_factor(4, 1).edge_index.tolist()
    [[0, 2, 1, 3, 0, 2, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    # Numbers differ in digit 2^k at most iff their run of 2^(k+1) and their rest modulo 2^k agree.
    ours, theirs, stride = dst // block, src // block, 2**level
    rule = (ours // (2 * stride) == theirs // (2 * stride)) & ((ours - theirs) % stride == 0)
    return TokenGraph.from_rule(rule, n)


@builder(k=1)
def binary_partition(n: int, k: int = 1, causal: bool = True) -> TokenGraph:
    """Tokens and the spans of a binary tree above them.

    Near context token by token, far context span by span. Nodes ``0 .. n - 1`` are the tokens; then come,
    level by level and left to right, ``ceil(n / 2^l)`` spans of ``2^l`` tokens, up to the root (the last may
    be cut). A span attends to all its tokens. Each token attends to itself and, going left from itself, k
    tokens, then k spans of level 1, k of level 2, and so on to the beginning, no token twice: where a level
    begins in the middle of one of its spans, the first of the k is the half that is left, a node of the level
    below. ``causal=False`` goes to the right too. With ``causal=True`` tokens attend only to what lies before
    them, though each token attends to span nodes of higher number. BP-Transformer (Ye et al. 2019, arXiv
    1911.04070; its code's ``step`` is k).

    >>> print(binary_partition(4))   # 4 and 5 are the halves, 6 is the root
    binary_partition(4): mask[dst, src] and in-edges
    0 ■ · · · · · ·   0 <- 0
    1 ■ ■ · · · · ·   1 <- 0 1
    2 ■ ■ ■ · · · ·   2 <- 0 1 2
    3 · · ■ ■ ■ · ·   3 <- 2 3 4
    4 ■ ■ · · · · ·   4 <- 0 1
    5 · · ■ ■ · · ·   5 <- 2 3
    6 ■ ■ ■ ■ · · ·   6 <- 0 1 2 3
    """
    first = _first_of_levels(n)
    token = torch.arange(n, device="cpu")
    parts = [torch.stack([token, start + token // 2**level]) for level, start in enumerate(first[:-1])]
    parts += [_context(n, k, first, left) for left in ((True,) if causal else (True, False))]
    src, dst = torch.cat(parts, 1)
    order = (dst * first[-1] + src).argsort()
    return TokenGraph.from_edges(torch.stack([src, dst])[:, order], first[-1])


@builder(heads=1)
def longnet(
    n: int, segments: Iterable[int], dilations: Iterable[int], heads: int | None = None, causal: bool = True
) -> TokenGraph:
    """Within segments of w tokens every r-th attends to every r-th, for several pairs (w, r).

    The union over the pairs of ``dst // w == src // w`` and ``dst % w % r == src % w % r == h % r``, and
    ``src <= dst``; ``causal=False`` drops the last. ``heads``: the offset ``h % r`` differs by head, as in
    the paper; without it, it is 0. The first pair should have ``r = 1``, or some tokens have no in-edges.
    LongNet (Ding et al. 2023, arXiv 2307.02486, equations 3 to 5 and 13 to 15) merges the pairs by their
    softmax denominators, so that an edge of m pairs counts m times: sum the masks of the single pairs and
    give ``score_mods.log_multiplicity`` the sum. Its code (torchscale) gives neighbouring heads the same
    offset, ``h // ceil(heads / r)``. Raises ValueError unless there are as many dilations as segments.

    >>> longnet(8, [2, 8], [1, 4]).in_degree().tolist()
    [1, 2, 1, 2, 2, 2, 1, 2]
    """
    sizes, steps = checks.sizes("segments", segments, 1), checks.sizes("dilations", dilations, 1)
    if len(sizes) != len(steps) or not sizes:
        got = f"got {len(steps)} dilations for {len(sizes)} segments"
        raise ValueError(f"longnet needs a dilation for each segment length, {got}")
    parts = []
    for w, r in zip(sizes, steps, strict=True):
        offset = 0 if heads is None else head % r
        parts.append((dst // w == src // w) & (dst % w % r == offset) & (src % w % r == offset))
    return TokenGraph.from_rule(rules.drop_future(any_of(parts), causal), n, heads=heads)


@builder(block=1)
def h_matrix_level(n: int, block: int, level: int, causal: bool = True) -> TokenGraph:
    """The pairs of tokens that one level of a hierarchical matrix holds.

    Neighbouring blocks, less what finer levels hold. With ``near(size) = |dst // size - src // size| <= 1``:
    level 0 is ``near(block)``, the band of diagonal, sub- and super-diagonal blocks; level l is
    ``near(block * 2^l)`` without ``near(block * 2^(l - 1))``; and ``src <= dst`` unless ``causal=False``.
    Every pair stands in exactly one level, so the levels together are ``causal(n)`` (``full(n)``).
    H-Transformer-1D (Zhu and Soricut 2021, arXiv 2107.11906) works level l out on averages of ``2^l`` tokens,
    both senders and receivers, hence its linear cost; this graph holds the pairs of tokens, not the averages.

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
    """Every head attends to the tokens at its own distances, on both sides.

    A row of the Wythoff array, which grows like Fibonacci's. Head i (from 1) takes ``|dst - src|`` from
    ``a, b, a + b, ...`` with ``a = floor(m phi)``, ``b = a + m``, ``m = floor(i phi)`` and phi the golden
    ratio, up to ``w_i = w_min + (w_max - w_min) (i - 1) // (heads - 1)``; its first distance always.
    Every distance belongs to one head alone, so heads differ and no token attends to itself. ``w_max`` is
    ``n // 3`` by default, and at least ``w_min``. A graph by head. Fibottention (Rahimian et al. 2024, arXiv
    2406.19391), as in the authors' code; their class token is one of :func:`global_tokens`.

    >>> fibottention(6, 2).select(head=0).in_degree().tolist()
    [4, 4, 5, 5, 4, 4]
    """
    furthest = max(n // 3, w_min) if w_max is None else checks.size("w_max", w_max, w_min)
    attended = torch.zeros(heads, max(n, 1), dtype=torch.bool, device="cpu")
    for row in range(heads):
        distances = _wythoff_row(row + 1, w_min + (furthest - w_min) * row // max(heads - 1, 1))
        attended[row, [distance for distance in distances if distance < n]] = True
    return TokenGraph.from_rule(look_up(attended, abs(dst - src)), n, heads=heads)


def _zero_or_power(gap: Any, bound: int) -> Any:
    """Whether a gap is 0 or a power of two below ``bound``."""
    powers = [2**k for k in range(max(bound - 1, 0).bit_length())]
    return any_of(gap == distance for distance in (0, *powers))


def _first_of_levels(n: int) -> list[int]:
    """The first node of each level of the tree over n tokens, and the number of nodes at the end."""
    first, count = [0, n], n
    while count > 1:
        count = (count + 1) // 2
        first.append(first[-1] + count)
    return first


def _context(n: int, k: int, first: list[int], left: bool) -> Int[Tensor, "2 edges"]:
    """k nodes of each level in turn from each token outwards; ``end`` is the end of what it attends to."""
    token = torch.arange(n, device="cpu")
    end, found = token if left else token + 1, [torch.empty(2, 0, dtype=torch.int64, device="cpu")]
    for level in (level for level in range(len(first) - 1) for _ in range(k)):
        whole = end % 2**level == 0
        size = torch.where(whole, 2**level, max(2**level // 2, 1))
        start = torch.where(whole, first[level], first[max(level - 1, 0)])
        node = start + (end - size if left else end) // size
        found.append(torch.stack([node, token])[:, end > 0 if left else end < n])
        end = end - size if left else end + size
    return torch.cat(found, 1)


def _wythoff_row(i: int, longest: int) -> list[int]:
    """Row i of the Wythoff array up to ``longest``, and its first term."""
    m = (i + math.isqrt(5 * i * i)) // 2  # floor(i phi), exactly
    first = (m + math.isqrt(5 * m * m)) // 2
    terms = [first, first + m]
    while terms[-1] <= longest:
        terms.append(terms[-1] + terms[-2])
    return terms[:-1]
