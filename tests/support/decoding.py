"""Decoding: graphs, tokens and chunks, and the full pass, the dense formula in float64 over all tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, cycle
from typing import Any

import torch
from support.inputs import drawn
from torch import Tensor, nn

from gnn_attention import StandardHeads, TokenGraph, algebra, patterns
from gnn_attention.verify import oracle

N, B, HEADS, KV_HEADS, DIM, VALUE_DIM = 23, 2, 4, 2, 6, 5
PARENTS = [-1] + [(5 * i + 3) % i for i in range(1, N)]


def listed() -> TokenGraph:
    """Edges in no order, all from earlier tokens or a token itself; some rows are isolated."""
    ends = ((s, d) for d in range(N) for s in range(d + 1) if d not in (0, 4))
    pairs = [(s, d) for s, d in ends if (3 * s + 5 * d + s * d) % 4 == 0]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    return TokenGraph.from_edges(torch.tensor(pairs).T, N)


def later() -> TokenGraph:
    """A square piece of a longer graph: its tokens stand at 5, 6, ..."""
    whole = patterns.window(N + 5, 4) | patterns.sinks(N + 5, 7)
    return whole.rows(5, N + 5).T.rows(5, N + 5).T


HEADWISE = (patterns.window(N, 2), patterns.causal(N), patterns.sinks(N, 1), patterns.dilated(N, 3, 3))
GRAPHS: dict[str, tuple[TokenGraph, int]] = {  # with the fewest tokens of the first chunk
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
    """Sizes of the chunks; the first has at least so many tokens."""
    return cut(chain([max(first, CHUNKS[name][0])], cycle(CHUNKS[name])))


def cut(sizes: Iterable[int]) -> list[int]:
    """So many of the sizes, the last one cut, that they sum to N."""
    found: list[int] = []
    for size in sizes:
        found.append(min(size, N - sum(found)))
        if sum(found) == N:
            break
    return found


def tokens(batch: int = B, n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: grouped heads, and values of another width."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    q, k, v = (drawn(batch, heads, n, width, seed=i, dtype=dtype) for i, (heads, width) in enumerate(shapes))
    return q, k, v


def absolute(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod that knows every index as it is."""
    b, h, dst, src = (x.to(score.dtype) for x in (b, h, dst, src))
    return score + torch.sin(0.3 * dst + h) * torch.cos(0.7 * src) + 0.1 * b


def absolute_dense(offset: int, logits: Tensor) -> Tensor:
    """The same on all logits at once."""
    b, h, dst, src = (torch.arange(size, dtype=logits.dtype) for size in logits.shape)
    dst, src = dst + offset, src + offset
    added = torch.sin(0.3 * dst[:, None] + h.view(-1, 1, 1)) * torch.cos(0.7 * src)
    return logits + added + 0.1 * b.view(-1, 1, 1, 1)


def whole_mask(graph: TokenGraph, batch: int = B) -> Tensor:
    mask = graph.mask()
    mask = mask if graph.batch else mask[None] if graph.heads else mask[None, None]
    return mask.expand(batch, HEADS, *mask.shape[2:])


def full_pass(
    q: Tensor, k: Tensor, v: Tensor, graph: TokenGraph, scale: float = DIM**-0.5, *more: Any
) -> Tensor:
    return oracle.attention(q, k, v, whole_mask(graph, len(q)), scale, *more)


def part(start: int, stop: int | None, *rows: Tensor) -> list[Tensor]:
    """Tokens ``start .. stop - 1`` of q, k and v."""
    return [x[:, :, start:stop] for x in rows]


def decoded(cache: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], **options: Any) -> Tensor:
    """All tokens through a cache, chunk by chunk."""
    found = []
    for parts in zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True):
        cache.append(*parts[1:])
        found.append(cache.attend(parts[0], **options))
    return torch.cat(found, dim=2)


def heads_with(bias: bool = True, **options: Any) -> StandardHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        options = {"num_kv_heads": KV_HEADS} | options
        options |= {"head_dim": DIM, "value_dim": VALUE_DIM, "bias": bias}
        made = StandardHeads(12, HEADS, **options).double()
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.startswith(("b_", "q_norm", "k_norm")):
                nn.init.normal_(parameter)
    return made
