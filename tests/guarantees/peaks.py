"""The memory of one call, forward and backward, on every backend: what torch allocates, and what it may.

Allowed beyond inputs is ``6 (E H + N H C) itemsize`` for every sample, in numbers as wide as they are summed
(float32 or better), or, where that is more, what the backend states (``Backend.bytes_needed``) besides its
results: a workspace of some size that does not grow. ``E`` counts what a backend says it visits: edges; all
    pairs for ``dense``, and for ``tiles`` on edges drawn at random,
which lie in all its tiles. No piece is as large as ``E H C`` numbers, but in ``reference``, which keeps to
what it states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gnn_attention import edge_softmax, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose
from gnn_attention.graph import TokenGraph
from tests.guarantees.allocations import Allocated, allocated

HEADS, DIM, FACTOR = 8, 64, 6
SIZES, SMALL = (2048, 4096), 1024  # tokens; of those who visit all pairs, and of the reference
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
REFERENCE = "reference"


def _listed(n: int) -> TokenGraph:
    """64 random senders for everyone, duplicates dropped."""
    src = torch.randint(n, (64 * n,), generator=torch.Generator().manual_seed(n))
    return TokenGraph.from_edges(
        torch.stack([src, torch.arange(n).repeat_interleave(64)]), n, coalesce=True, name="listed"
    )


def _by_head(n: int) -> TokenGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= 64 + 8 * h)

    return TokenGraph.from_rule(rule, n, heads=HEADS, name="by head")


GRAPHS: Mapping[str, Callable[[int], TokenGraph]] = {
    "window": lambda n: patterns.window(n, 128),
    "window and sinks": lambda n: patterns.window(n, 64) | patterns.sinks(n, 4),
    "documents": lambda n: patterns.documents([n // 16] * 16),
    "list": _listed,
    "by head": _by_head,
}
OPTIONS: Mapping[str, Callable[[TokenGraph, torch.dtype], dict[str, Any]]] = {
    "plain": lambda graph, dtype: {},
    "lse and sinks": lambda graph, dtype: {
        "sink_logits": torch.zeros(HEADS, dtype=dtype),
        "return_info": True,
    },
    "score_mod": lambda graph, dtype: {"score_mod": score_mods.alibi(score_mods.alibi_slopes(HEADS))},
    "bias": lambda graph, dtype: {"bias": torch.zeros(HEADS, graph.num_edges, dtype=dtype)},
    "dropout": lambda graph, dtype: {"dropout": 0.1},
}
WAYS = ("auto", "rows", "tiles", "mixed", "dense", REFERENCE)


@dataclass(frozen=True)
class Cell:
    """A backend, a family of graphs, and what the call asks for."""

    backend: str
    graph: str
    option: str

    @property
    def is_supported(self) -> bool:
        """False for what the backend refuses, and for a bias of a graph without one list of edges."""
        if self.backend == REFERENCE:
            return self.option == "plain" and self.graph == "window"
        written_out = self.option in ("score_mod", "bias", "dropout")
        return not (self.backend == "mixed" and written_out) and not (
            self.graph == "by head" and self.option == "bias"
        )

    @property
    def visits_pairs(self) -> bool:
        """True where all pairs count, as the backend says."""
        return self.backend == "dense" or (self.backend, self.graph) == ("tiles", "list")

    def __str__(self) -> str:
        return f"{self.backend}, {self.graph}, {self.option}"


CELLS: Sequence[Cell] = [
    cell for cell in (Cell(*each) for each in product(WAYS, GRAPHS, OPTIONS)) if cell.is_supported
]


@dataclass(frozen=True)
class Peak:
    """What both passes took at most, as a share of the allowed; the largest piece of ``E H C`` numbers."""

    forward: float
    backward: float
    piece: float
    what: str  # sizes and bytes, in words


def measured(cell: Cell, seed: int) -> Peak:
    """Both passes of a second call: what is cached with the graph was made by a first."""
    n, dtype = SMALL if cell.visits_pairs or cell.backend == REFERENCE else SIZES[seed % 2], DTYPES[seed % 3]
    graph, rng = GRAPHS[cell.graph](n), torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, n, DIM, generator=rng, dtype=dtype).requires_grad_() for _ in range(3))
    given = OPTIONS[cell.option](graph, dtype)
    call = AttentionCall.checked(
        q, k, v, graph, **{key: value for key, value in given.items() if key != "return_info"}
    )
    backend = choose(call) if cell.backend == "auto" else BACKENDS[cell.backend]

    def run() -> Tensor:
        out: Tensor | tuple[Tensor, Any] = attend(q, k, v, graph, backend=backend, **given)
        return out[0] if isinstance(out, tuple) else out

    _backward(run(), (q, k, v))
    forward = _result(allocated(run))
    backward = _result(allocated(lambda: _backward(forward.result, (q, k, v))))
    return _judged(cell, call, backend.bytes_needed, forward, backward)


def _backward(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def _result(found: Allocated) -> Allocated:
    if found.error is not None:
        raise found.error
    return found


def _judged(
    cell: Cell,
    call: AttentionCall,
    stated: Callable[[AttentionCall], int] | None,
    forward: Allocated,
    backward: Allocated,
) -> Peak:
    wide = edge_softmax.accumulation_dtype(call.q.dtype).itemsize
    of_edges, of_nodes = _visited(cell, call.graph), call.q[..., 0].numel() * DIM
    formula = FACTOR * (of_edges + of_nodes) * wide
    workspace = stated(call) if stated is not None else 0
    allowed = [workspace + results * of_nodes * (wide + call.q.dtype.itemsize) for results in (2, 4)]
    if cell.backend != REFERENCE:
        allowed = [max(formula, bytes_) for bytes_ in allowed]
    piece = max(forward.largest, backward.largest) / (of_edges * DIM * call.q.dtype.itemsize)
    sizes = f"{call.graph.num_dst} tokens, {str(call.q.dtype).removeprefix('torch.')}, formula {formula / 2**20:.0f} MiB"
    words = f"{sizes}, forward {forward.peak / 2**20:.0f} of {allowed[0] / 2**20:.0f} MiB"
    words += f", backward {backward.peak / 2**20:.0f} of {allowed[1] / 2**20:.0f} MiB"
    return Peak(
        forward.peak / allowed[0],
        backward.peak / allowed[1],
        0.0 if cell.backend == REFERENCE else piece,
        words,
    )


def _visited(cell: Cell, graph: TokenGraph) -> int:
    """Edges of all heads together, or all pairs where the backend says that it visits them."""
    if cell.visits_pairs:
        return HEADS * graph.num_dst * graph.num_src
    return graph.num_edges if graph.heads is not None else HEADS * graph.num_edges
