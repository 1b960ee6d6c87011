"""Make graphs, tokens and chunks for tests of decoding, and compute all tokens by a dense float64 formula."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, cycle
from typing import Any

import torch
from support.inputs import randn
from torch import Tensor, nn

from gnn_attention import StandardHeads, TokenGraph, algebra, patterns
from gnn_attention.verify import oracle

N, B, HEADS, KV_HEADS, DIM, VALUE_DIM = 23, 2, 4, 2, 6, 5
PARENTS = [-1] + [(5 * i + 3) % i for i in range(1, N)]


def listed() -> TokenGraph:
    """Return a graph with a list of unsorted causal edges, in which some receivers are isolated."""
    ends = ((s, d) for d in range(N) for s in range(d + 1) if d not in (0, 4))
    pairs = [(s, d) for s, d in ends if (3 * s + 5 * d + s * d) % 4 == 0]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    return TokenGraph.from_edges(torch.tensor(pairs).T, N)


def later() -> TokenGraph:
    """Return a square part of a longer graph, whose tokens have the positions 5, 6, ..."""
    graph = patterns.window(N + 5, 4) | patterns.sinks(N + 5, 7)
    return graph.rows(5, N + 5).T.rows(5, N + 5).T


HEADWISE = (patterns.window(N, 2), patterns.causal(N), patterns.sinks(N, 1), patterns.dilated(N, 3, 3))
# Next to each graph stands the smallest size that its first chunk may have.
GRAPHS: dict[str, tuple[TokenGraph, int]] = {
    "causal": (patterns.causal(N), 1),
    "strict causal": (patterns.strict_causal(N), 1),
    "window": (patterns.window(N, 6), 1),
    "prefix": (patterns.prefix(N, 5), 5),
    "window | sinks": (patterns.window(N, 4) | patterns.sinks(N, 2), 1),
    "dilated": (patterns.dilated(N, 3, 2), 1),
    "tree": (patterns.tree(PARENTS), 1),
    "documents": (patterns.documents([5, 0, 1, 9, 8]), 1),
    "listed": (listed(), 1),
    "by head": (algebra.per_head(*HEADWISE), 1),
    "by sample": (algebra.per_sample(patterns.window(N, 3), patterns.documents([7, 16])), 1),
    "at other positions": (later(), 1),
    "empty": (patterns.window(N, 0), 1),
}
SINKS = patterns.window(N, 5) | patterns.sinks(N, 1)
CHUNKS = {"1": [1], "3": [3], "7": [7], "mixed": [2, 1, 6, 1, 1, 3]}


def chunks(name: str, first: int) -> list[int]:
    """Return the sizes of chunks; the first chunk has at least ``first`` tokens."""
    return cut(chain([max(first, CHUNKS[name][0])], cycle(CHUNKS[name])))


def cut(sizes: Iterable[int]) -> list[int]:
    """Return the first sizes up to a sum of N, with the last one reduced to fit."""
    chunk_sizes: list[int] = []
    for size in sizes:
        chunk_sizes.append(min(size, N - sum(chunk_sizes)))
        if sum(chunk_sizes) == N:
            break
    return chunk_sizes


def tokens(batch: int = B, n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with grouped heads; values have another width than keys."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    q, k, v = (randn(batch, heads, n, width, seed=i, dtype=dtype) for i, (heads, width) in enumerate(shapes))
    return q, k, v


def absolute(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Change a score by every index: this score_mod depends on sample, head and both absolute positions."""
    b, h, dst, src = (x.to(score.dtype) for x in (b, h, dst, src))
    return score + torch.sin(0.3 * dst + h) * torch.cos(0.7 * src) + 0.1 * b


def absolute_dense(offset: int, logits: Tensor) -> Tensor:
    """Apply :func:`absolute` to all logits at once."""
    b, h, dst, src = (torch.arange(size, dtype=logits.dtype) for size in logits.shape)
    dst, src = dst + offset, src + offset
    added = torch.sin(0.3 * dst[:, None] + h.view(-1, 1, 1)) * torch.cos(0.7 * src)
    return logits + added + 0.1 * b.view(-1, 1, 1, 1)


def whole_mask(graph: TokenGraph, batch: int = B) -> Tensor:
    mask = graph.mask()
    mask = mask if graph.batch else mask[None] if graph.heads else mask[None, None]
    return mask.expand(batch, HEADS, *mask.shape[2:])


def full_pass(
    q: Tensor, k: Tensor, v: Tensor, graph: TokenGraph, scale: float = DIM**-0.5, *options: Any
) -> Tensor:
    return oracle.attention(q, k, v, whole_mask(graph, len(q)), scale, *options)


def part(start: int, stop: int | None, *rows: Tensor) -> list[Tensor]:
    """Return the tokens ``start .. stop - 1`` of q, k and v."""
    return [x[:, :, start:stop] for x in rows]


def decode(cache: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], **options: Any) -> Tensor:
    """Decode all tokens with a cache, chunk by chunk, and return their outputs."""
    outputs = []
    for q_chunk, k_chunk, v_chunk in zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True):
        cache.append(k_chunk, v_chunk)
        outputs.append(cache.attend(q_chunk, **options))
    return torch.cat(outputs, dim=2)


def make_heads(bias: bool = True, **options: Any) -> StandardHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        options = {"num_kv_heads": KV_HEADS} | options
        options |= {"head_dim": DIM, "value_dim": VALUE_DIM, "bias": bias}
        heads = StandardHeads(12, HEADS, **options).double()
        for parameter_name, parameter in heads.named_parameters():
            if parameter_name.startswith(("b_", "q_norm", "k_norm")):
                nn.init.normal_(parameter)
    return heads
