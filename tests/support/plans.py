"""Make graphs for tests of plans, and read plans back pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from gnn_attention.backends.plan.plan import EdgeRows, Groups, Piece, Strided


def tokens(groups: Groups, number: int) -> Tensor:
    """Return the tokens of one group of a rectangle."""
    if isinstance(groups, Strided):
        first = groups.start + number * groups.stride
        return torch.arange(first, first + groups.size)
    return groups.index[number]


def visits(pieces: list[Piece], num_dst: int, num_src: int) -> Tensor:
    """Count how often the pieces of a plan contain each pair ``[dst, src]``."""
    count = torch.zeros(num_dst, num_src, dtype=torch.int64)
    for piece in pieces:
        if isinstance(piece, EdgeRows):
            dst = torch.repeat_interleave(torch.arange(num_dst), piece.ptr.long().diff())
            count.index_put_((dst, piece.src.long()), torch.ones_like(dst), accumulate=True)
            continue
        for g in range(piece.dst.count):
            edge = torch.ones(piece.dst.size, piece.src.size, dtype=torch.int64)
            if piece.causal:
                edge = edge.tril()
            if piece.masks is not None:
                edge *= piece.masks.table[piece.masks.index[g]]
            count[tokens(piece.dst, g)[:, None], tokens(piece.src, g)] += edge
    return count


def edges_of_tiles(mask: Tensor, height: int, width: int) -> Tensor:
    """Count the edges of each tile ``[rows, columns]`` of a mask."""
    rows, columns = -(-mask.shape[0] // height), -(-mask.shape[1] // width)
    padded = torch.zeros(rows * height, columns * width, dtype=torch.int64)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    return padded.view(rows, height, columns, width).sum((1, 3))


def random_mask(num_dst: int, num_src: int, density: float, seed: int = 0) -> Tensor:
    """Return a bool mask in which each pair is an edge with probability ``density``."""
    return torch.rand(num_dst, num_src, generator=torch.Generator().manual_seed(seed)) < density


def _odd(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Return edges of a rule that cannot be evaluated on ranges."""
    return torch.sin((7 * dst + 3 * src).double()) > 0.3


def _steps_down(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Return edges whose first senders decrease and then increase from tile to tile, unlike strided views."""
    start = torch.tensor([256, 192, 128, 64, 0, 64, 128, 192])[dst // 64 % 8]
    return (src >= start) & (src < start + 128)


def _structured() -> dict[str, TokenGraph]:
    p, parents = patterns, [-1] + [(7 * i) % i for i in range(1, 200)]
    return {
        "causal": p.causal(333),
        "full": p.full(130),
        "window": p.window(500, 40),
        "window, both sides": p.window(321, 65, causal=False),
        "window wider than a tile": p.window(517, 129),
        "window and sinks": p.window(500, 40) | p.sinks(500, 3),
        "sinks alone": p.sinks(300, 70),
        "global tokens": p.global_tokens(300, [3, 77, 250], causal=False) - p.window(300, 9, causal=False),
        "documents": p.documents([100, 50, 7, 200]),
        "documents of one length": p.documents([64] * 6),
        "documents, full": p.documents([30, 30, 30, 41], causal=False),
        "documents with a window": p.documents([150, 3, 0, 130]) & p.window(283, 20),
        "prefix": p.prefix(300, 50),
        "dilated": p.dilated(300, 5, 8),
        "all but a window": p.full(200) - p.window(200, 9),
        "tree": p.tree(parents),
        "cross": p.cross(100, 200),
        "one column": TokenGraph.from_rule(lambda b, h, dst, src: src * 0 + dst >= 100, 170, 1),
        "one column, the first": TokenGraph.from_rule(lambda b, h, dst, src: src * 0 + dst < 100, 170, 30),
        "the last alone": TokenGraph.from_rule(lambda b, h, dst, src: (dst == 299) & (src == 0), 300, 70),
        "rows": p.causal(333).rows(100, 333),
        "rows of a window": p.window(333, 100).rows(63, 257),
        "transposed": (p.window(260, 40) | p.sinks(260, 3)).T,
        "steps down": TokenGraph.from_rule(_steps_down, 1024, 400),
        "no ranges": TokenGraph.from_rule(_odd, 150, 131),
        "no edges": p.window(200, 0),
        "no receivers": p.cross(0, 70),
        "no senders": p.cross(70, 0),
    }


STRUCTURED = _structured()
LISTED = {
    f"listed {name}": ga.convert.from_mask(graph.mask())
    for name, graph in STRUCTURED.items()
    if name not in ("cross", "full", "steps down")
}
RANDOM = {f"random {d}": ga.convert.from_mask(random_mask(150, 170, d)) for d in (0.01, 0.1, 0.25, 0.5, 0.95)}
SHUFFLED = torch.randperm(300 * 200, generator=torch.Generator().manual_seed(1))[:2000]
SHUFFLED = torch.stack([SHUFFLED % 200, SHUFFLED // 200])
RANDOM["random, in no order"] = ga.convert.from_edge_index(SHUFFLED, 300, 200)
PLAIN = {**STRUCTURED, **LISTED, **RANDOM}
