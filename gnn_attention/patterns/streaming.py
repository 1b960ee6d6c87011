"""Streaming: sinks and a window, and heads that differ in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, text
from gnn_attention.patterns import _data

__all__ = ["duo_attention", "sink_window"]


def sink_window(n: int, w: int, s: int = 4) -> TokenGraph:
    """Each token attends to the first ``s`` tokens and the last ``w``, itself included.

    ``src <= dst and (src < s or dst - src < w)``. In-degree ``min(dst + 1, s + w)``: the keys that a cache of
    fixed size still holds, and ``window(n, w) | sinks(n, s)``. StreamingLLM (Xiao et al. 2023, arXiv
    2309.17453, section 3.2; in its code ``start_size = s``, ``recent_size = w``, room being made for the new
    token first) and the Λ-shaped mask of LM-Infinite (Han et al. 2023, arXiv 2308.16137; in its code
    ``global_branch = s``, ``local_branch = w``). Both also change positions, which a graph does not:
    StreamingLLM counts them inside the cache, LM-Infinite bounds the distance to the first tokens.

    >>> print(sink_window(6, 2, 1))
    sink_window(6, 2, 1): mask[dst, src] and in-edges
    0 ■ · · · · ·   0 <- 0
    1 ■ ■ · · · ·   1 <- 0 1
    2 ■ ■ ■ · · ·   2 <- 0 1 2
    3 ■ · ■ ■ · ·   3 <- 0 2 3
    4 ■ · · ■ ■ ·   4 <- 0 3 4
    5 ■ · · · ■ ■   5 <- 0 4 5
    """
    n, w, s = checks.size("n", n), checks.size("w", w), checks.size("s", s)
    return TokenGraph.from_rule(partial(_sink_window, w, s), n, name=f"sink_window({n}, {w}, {s})")


def duo_attention(n: int, heads: int, retrieval: Iterable[int], w: int, s: int = 4) -> TokenGraph:
    """A graph for each head: the ``retrieval`` heads are causal, the others ``sink_window(n, w, s)``.

    ``retrieval`` lists head numbers. DuoAttention (Xiao et al. 2024, arXiv 2410.10819) finds the retrieval
    heads by optimisation; with grouped queries it decides by group, so list all heads of a group. IndexError
    for a head outside ``0 .. heads - 1``.

    >>> duo_attention(9, 3, [1], 2, 1).in_degree().tolist()
    [[1, 2, 3, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 3, 3, 3, 3, 3, 3]]
    """
    n, heads = checks.size("n", n), checks.size("heads", heads, 1)
    w, s = checks.size("w", w), checks.size("s", s)
    chosen = _heads(retrieval, heads)
    whole = torch.zeros(heads, dtype=torch.bool, device="cpu")
    whole[chosen] = True
    name = f"duo_attention({n}, {heads}, {text.listed(chosen, 'heads', 8)}, {w}, {s})"
    return TokenGraph.from_rule(partial(_by_head, whole, w, s), n, heads=heads, name=name)


def _sink_window(w: int, s: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & ((src < s) | (dst - src < w))


def _by_head(whole: Tensor, w: int, s: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & (whole.to(dst.device)[h] | (src < s) | (dst - src < w))


def _heads(retrieval: Iterable[int], heads: int) -> list[int]:
    if not isinstance(retrieval, Iterable):
        got = f"got {quoted(retrieval)}; one head is [{quoted(retrieval)}]"
        raise TypeError(f"retrieval must be a list of head numbers, {got}")
    return _data.positions("retrieval", retrieval, heads, "hold head numbers")
