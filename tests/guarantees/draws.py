"""Random cases of attention. ``Draw(1234)`` is the same case everywhere, so its number reproduces a failure.

A draw has a graph (of a family, of two families combined, of a shuffled edge list, of a mask, or some rows of a
longer graph), 0 to 300 tokens, samples, heads, grouped heads, widths, strides, a dtype, the size of its numbers,
and the terms that are added to logits. Its true edges are read off the definition of the graph pair by pair,
never from the library.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import DTYPES as DTYPES
from tests.guarantees.families import MAKERS, Definition, draw_edge_list

WIDTHS = (1, 2, 3, 8, 16, 17, 24, 33, 64)
MODS = ("none", "none", "none", "alibi", "softcap", "relative", "multiplicity", "alibi, softcap")
BIASES = ("none", "none", "none", "one for all", "by head", "by sample and head")
LAYOUTS = ("as made", "as made", "tokens first", "every second channel", "one sample for all")
# This is a graph, its definition, its edges (src, dst) in the caller's order if it is a list, and its kind.
GraphDraw = tuple[TokenGraph, Definition, list[tuple[int, int]] | None, str]
FORMS = ("attend", "attend", "attend", "attend", "standard", "factored", "merged")


@dataclass(frozen=True)
class Numbers:
    """The form, sizes and dtype of a draw, and the terms that are added to its logits."""

    form: str
    batch: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: str
    size: float = 1.0
    scale: float | None = None
    mod: str = "none"
    bias: str = "none"
    sinks: bool = False
    layout: str = "as made"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @staticmethod
    def draw(rng: random.Random) -> Numbers:
        """Draw every field in order, so that a new field at the end changes no other."""
        return Numbers(
            form=rng.choice(FORMS),
            batch=rng.choice([0, 1, 1, 2, 3]),
            kv_heads=rng.choice([1, 1, 2, 3]),
            group=rng.choice([1, 1, 2, 3]),
            dim=rng.choice(WIDTHS),
            value_dim=rng.choice(WIDTHS),
            dtype=rng.choice(list(DTYPES)),
            size=rng.choice([1.0, 5.0]),
            scale=rng.choice([None, None, None, 0.7, 0.05]),
            mod=rng.choice(MODS),
            bias=rng.choice(BIASES),
            sinks=rng.random() < 0.2,
            layout=rng.choice(LAYOUTS),
        )


@dataclass(frozen=True)
class Draw:
    """Case ``number``, from which every property follows; printing a draw describes it.

    >>> Draw(9).graph, Draw(9).numbers.dtype
    (TokenGraph(block_causal(0, 1).rows(0, 0): 0 src -> 0 dst), 'float64')
    """

    number: int
    lengths = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 97, 128, 177, 300)

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers.draw(random.Random(self.number))

    @cached_property
    def graph(self) -> TokenGraph:
        return self._graph_draw[0]

    @property
    def kind(self) -> str:
        return self._graph_draw[3]

    @cached_property
    def mask(self) -> Bool[Tensor, "batch heads dst src"]:
        graph, is_edge, _, _ = self._graph_draw
        samples, heads = graph.batch or 1, graph.heads or 1
        cells = [
            is_edge(b, h, i + graph.dst_offset, j)
            for b in range(samples)
            for h in range(heads)
            for i in range(graph.num_dst)
            for j in range(graph.num_src)
        ]
        table = torch.tensor(cells, dtype=torch.bool).reshape(samples, heads, graph.num_dst, graph.num_src)
        return table.expand(self.numbers.batch, self.numbers.heads, -1, -1)

    @cached_property
    def edges(self) -> list[tuple[int, int]] | None:
        """Pairs ``(src, dst)`` in the order of a per-edge bias; None if the graph varies by sample or head."""
        if self.graph.batch is not None or self.graph.heads is not None:
            return None
        edges = self._graph_draw[2]
        if edges is not None or not self.mask.shape[0]:
            return edges
        return [(j, i) for i, j in self.mask[0, 0].nonzero().tolist()]

    @cached_property
    def _graph_draw(self) -> GraphDraw:
        rng, numbers = random.Random(-1 - self.number), self.numbers
        kind = rng.choice(["family", "family", "family", "mixed", "rows", "list", "table"])
        n = rng.choice(self.lengths)
        if kind == "list":
            graph, edges = draw_edge_list(rng, min(n, 128))
            pairs = set(edges)
            return graph, lambda b, h, i, j: (j, i) in pairs, edges, "list"
        return *MAKERS[kind](rng, n, numbers.batch, numbers.heads), None, kind

    def __str__(self) -> str:
        options = ", ".join(f"{field.name} {getattr(self.numbers, field.name)}" for field in fields(Numbers))
        return f"{self.number}: {self.kind}, {self.graph!r}, {options}"
