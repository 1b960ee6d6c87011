"""The declared bounds of an audit: which tokens may influence which after so many layers of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph

MOST_TOKENS = 4096


@dataclass(frozen=True)
class Bounds:
    """``after[k][dst, src]``: may src influence dst after k layers; ``hops[k]``: in layer k + 1 alone.

    In a square graph each token may influence itself (its state is carried along).
    """

    after: Sequence[Bool[Tensor, "dst src"]]
    hops: Sequence[Bool[Tensor, "dst src"]]

    @classmethod
    def of(cls, graphs: Sequence[TokenGraph], layers: int) -> Bounds:
        """Those of so many layers; the graphs are cycled. ValueError where a graph cannot follow itself."""
        square = is_square(graphs[0])
        if layers > 1 and not square:
            raise ValueError(f"layers must be 1 for the oblong {graphs[0]!r}, got {layers}")
        start = torch.eye(graphs[0].num_src, dtype=torch.bool, device="cpu")
        masks = [graph.mask() | start if square else graph.mask() for graph in graphs]
        after, hops = [start], [masks[layer % len(masks)] for layer in range(layers)]
        for hop in hops:
            after.append(hop.float() @ after[-1].float() > 0)
        return cls(after, hops)


def declared_graphs(value: TokenGraph | Sequence[TokenGraph]) -> tuple[TokenGraph, ...]:
    graphs = tuple(value) if isinstance(value, Sequence) else (value,)
    if not graphs or not all(isinstance(graph, TokenGraph) for graph in graphs):
        raise TypeError(f"graph must be a TokenGraph, or a list of one for each layer, got {quoted(value)}")
    for graph in graphs:
        if graph.batch is not None:
            raise ValueError(f"graph {graph!r} differs by sample: audit one of them, graph.select(batch=...)")
        if not (graph.num_dst and graph.num_src) or max(graph.num_dst, graph.num_src) > MOST_TOKENS:
            raise ValueError(f"graph must have 1 to {MOST_TOKENS} tokens, got {graph!r}: cut it")
        if len(graphs) > 1 and not (is_square(graph) and graph.num_dst == graphs[0].num_dst):
            raise ValueError(f"graphs must be square, of the same tokens, got {graphs[0]!r} and {graph!r}")
    # an edge of any head is an edge
    return tuple(g if g.heads is None else as_graph(g.mask().any(0), g, g.name) for g in graphs)


def as_graph(pairs: Bool[Tensor, "dst src"], like: TokenGraph, name: str) -> TokenGraph:
    graph = TokenGraph.from_edges(pairs.nonzero().T.flip(0), like.num_dst, like.num_src, name=name)
    return replace(graph, dst_offset=like.dst_offset, src_offset=like.src_offset)


def edges(pairs: Bool[Tensor, "dst src"]) -> tuple[tuple[int, int], ...]:
    return tuple((src, dst) for dst, src in pairs.nonzero().tolist())
