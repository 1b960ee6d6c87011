"""What is measured on a GPU: dense, structured and irregular graphs of the sizes that one needs a GPU for.

Each has the peers that could run it. What the kernel that is best in theory would need follows from the rates
of the device that were measured (:meth:`benchmarks.gpu.measuring.Bench.floor`).
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.workloads import FLEX, MASKED, PYG, SPARSE, Problem, Workload
from gnn_attention import patterns
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph

__all__ = ["PASSES", "WORKLOADS", "barabasi_albert", "bytes_of", "scattered"]

PASSES = ("forward", "backward")
FLASH, CUDNN, EFFICIENT = "SDPA flash", "SDPA cuDNN", "SDPA efficient"
ALL_PAIRS, VARLEN, FLASH_ATTN = "SDPA all pairs", "torch varlen", "flash_attn"
PYG_COMPILED, ANEMOI = "PyG compiled", "anemoi graph transformer"


def bytes_of(problem: Problem, which: str, kind: str) -> float:
    """What must be read and written at least: inputs and results; for "gathers" a key and a value for each
    edge, and its index.

    A backward pass gathers keys and values for each receiver, then queries and gradients for each sender.
    """
    tensors = [*problem.inputs, problem.inputs[0]]  # and the output
    streams = float(sum(x.numel() * x.element_size() for x in tensors)) * (1.0 if which == "forward" else 2.0)
    if kind != "gathers":
        return streams
    row = 2 * problem.dim * problem.inputs[0].element_size()
    gathered = problem.inputs[0].shape[0] * problem.heads * problem.graph.num_edges * (row + 4.0)
    return streams + gathered * (1.0 if which == "forward" else 2.0)


def scattered(n: int, degree: float, seed: int = 0) -> TokenGraph:
    """Every token attends to ``degree`` different random ones (a fraction: some to one more), listed by
    receiver, then sender.

    Sorted numbers drawn from ``0 .. n - degree`` plus ``0, 1, 2, ...`` are all different: nothing is drawn
    twice.
    """
    most = min(n, -int(-degree // 1))
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, n - most + 1, (n, most), generator=rng, device="cpu").sort(1).values
    src = drawn + torch.arange(most, device="cpu")
    drawn_too = torch.ones(n, most, dtype=torch.bool, device="cpu")
    drawn_too[torch.rand(n, generator=rng, device="cpu") >= degree - (most - 1), -1] = False
    dst = torch.arange(n, device="cpu").unsqueeze(1).expand(n, most)
    return TokenGraph.from_distinct_edges(
        torch.stack([src[drawn_too], dst[drawn_too]]), n, n, f"{degree:g} of {n} senders"
    )


def barabasi_albert(n: int, m: int, seed: int = 0) -> TokenGraph:
    """Preferential attachment: each new token is joined, both ways, to m that are drawn in proportion to
    their degree.

    A draw among the ends of earlier edges is an end of an edge that was itself drawn, and so on: all draws
    are followed to their origin at once (Batagelj and Brandes 2005, Efficient generation of large random
    networks).
    """
    edges = n * m
    rng = torch.Generator().manual_seed(seed)
    place = (
        torch.rand(edges, generator=rng, device="cpu", dtype=torch.float64)
        * (2 * torch.arange(edges, device="cpu") + 1)
    ).long()
    while bool(
        (place % 2 == 1).any()
    ):  # an odd place holds what was drawn for its edge, an even one the token that drew
        place = torch.where(place % 2 == 1, place[place // 2], place)
    new, old = torch.arange(edges, device="cpu") // m, place // 2 // m
    ends = torch.cat([torch.stack([new, old]), torch.stack([old, new])], 1)
    keys = torch.unique(ends[1] * n + ends[0])
    keys = keys[keys // n != keys % n]
    return TokenGraph.from_distinct_edges(
        torch.stack([keys % n, keys // n]), n, n, f"barabasi_albert({n}, {m})"
    )


def documents(total: int, number: int = 67) -> TokenGraph:
    """Packed documents, causal inside, of log-normal lengths that add up to ``total``."""
    return patterns.documents(_lengths(total, min(number, total // 8)).tolist())


def _lengths(total: int, number: int) -> Int[Tensor, " documents"]:
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(0), device="cpu").exp()
    ends = (drawn.cumsum(0) / drawn.sum() * total).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).clamp(min=0)


def _window(n: int) -> TokenGraph:
    return patterns.window(n, min(1024, n // 4))


def _bigbird(n: int) -> TokenGraph:
    """Blocks of 64: three neighbours, two global ones, three random ones."""
    block = min(64, n // 16)
    return patterns.bigbird_etc(n - 2 * block, block, 2 * block, num_random=3)


def _token_bigbird(n: int) -> TokenGraph:
    """193 neighbours and 96 random tokens, as one list."""
    near = patterns.window(n, min(97, n // 8), causal=False).edge_index
    return TokenGraph.from_distinct_edges(near, n, n, f"window({n})") | scattered(n, min(96, n // 16))


SDPA = (FLASH, CUDNN, EFFICIENT, FLASH_ATTN)
GRAPH = (PYG, PYG_COMPILED, ANEMOI, SPARSE)
_wide = partial(Workload, heads=16, dim=128, dtype=torch.bfloat16)
_gathers = partial(Workload, kind="gathers", dtype=torch.bfloat16)


def _table() -> list[Workload]:
    degree32, m16, uniform = (
        partial(scattered, degree=32),
        partial(barabasi_albert, m=16),
        partial(scattered, degree=50.5),
    )
    return [
        _wide("causal8k", "causal, 8k", 8192, patterns.causal, (*SDPA, FLEX), batch=4),
        _wide(
            "causal32k",
            "causal, 32k",
            32768,
            patterns.causal,
            (*SDPA, FLEX),
        ),
        _wide(
            "window131k",
            "window 1024, 131k",
            131072,
            _window,
            (VARLEN, FLASH_ATTN, FLEX),
        ),
        _wide(
            "documents131k",
            "67 packed documents, 131k",
            131072,
            documents,
            (VARLEN, FLEX),
        ),
        _wide("bigbird131k", "BigBird of blocks, 131k", 131072, _bigbird, (FLEX,), dim=64),
        _gathers(
            "bigbird65k",
            "BigBird of tokens, 65k",
            65536,
            _token_bigbird,
            (MASKED, ALL_PAIRS),
        ),
        _gathers(
            "random131k",
            "in-degree 32, 131k",
            131072,
            degree32,
            (ALL_PAIRS, PYG, PYG_COMPILED, ANEMOI),
        ),
        _gathers("random100k", "in-degree 32, 100k", 100_000, degree32, GRAPH),
        _gathers(
            "random1m",
            "in-degree 32, 1M",
            1_000_000,
            degree32,
            GRAPH,
        ),
        _gathers(
            "barabasi1m",
            "Barabasi-Albert 1M, m=16",
            1_000_000,
            m16,
            GRAPH,
        ),
        _gathers(
            *("uniform2m", "in-degree 50.5, 2.45M", 2_449_029, uniform, GRAPH),
            heads=1,
            dim=128,
            dtype=torch.float16,
        ),
    ]


WORKLOADS = {workload.name: workload for workload in _table()}
