"""Random cases of attention, each made from its number alone: ``Draw(1234)`` is the same everywhere, so a
failure is a line.

A draw is a graph (a family with its definition, two of them joined, a list in no order, a mask, some rows of
a longer one), tokens (0 to 300, samples, heads, grouped heads, widths, strides), numbers (dtype, size) and
what is added to the logits. What its edges are is read off the definition pair by pair, never from the
library.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import DTYPES as DTYPES
from tests.guarantees.families import Definition, any_family, cross_table, mixed, shuffled_list, some_rows

WIDTHS = (1, 2, 3, 8, 16, 17, 24, 33, 64)
MODS = ("none", "none", "none", "alibi", "softcap", "relative", "multiplicity", "alibi, softcap")
BIASES = ("none", "none", "none", "one for all", "by head", "by sample and head")
LAYOUTS = ("as made", "as made", "tokens first", "every second channel", "one sample for all")
# a graph, its definition, its edges in the order of a bias where they are listed, and what kind it is
Made = tuple[TokenGraph, Definition, list[tuple[int, int]] | None, str]
FORMS = ("attend", "attend", "attend", "attend", "standard", "factored", "merged")


@dataclass(frozen=True)
class Numbers:
    """What a draw says about numbers: its form, sizes, dtype, and what is added to the logits."""

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
    def drawn(rng: random.Random) -> Numbers:
        """In the order of the fields, so that a further one changes no other."""
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
    """Case ``number``: everything else follows from it. Print it to see what it is.

    >>> Draw(9).graph, Draw(9).numbers.dtype
    (TokenGraph(block_causal(0, 1).rows(0, 0): 0 src -> 0 dst), 'float64')
    """

    number: int
    lengths = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 97, 128, 177, 300)

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers.drawn(random.Random(self.number))

    @cached_property
    def graph(self) -> TokenGraph:
        return self._made[0]

    @property
    def kind(self) -> str:
        return self._made[3]

    @cached_property
    def mask(self) -> Bool[Tensor, "batch heads dst src"]:
        graph, edge, first = self.graph, self._made[1], self.graph.dst_offset
        samples, heads = graph.batch or 1, graph.heads or 1
        cells = [
            edge(b, h, i + first, j)
            for b in range(samples)
            for h in range(heads)
            for i in range(graph.num_dst)
            for j in range(graph.num_src)
        ]
        table = torch.tensor(cells, dtype=torch.bool).reshape(samples, heads, graph.num_dst, graph.num_src)
        return table.expand(self.numbers.batch, self.numbers.heads, -1, -1)

    @cached_property
    def edges(self) -> list[tuple[int, int]] | None:
        """``(src, dst)`` in the order of a per-edge bias; None where the graph differs by sample or head."""
        if self.graph.batch is not None or self.graph.heads is not None:
            return None
        listed, mask = self._made[2], self.mask
        if listed is not None or not mask.shape[0]:
            return listed
        return [(j, i) for i, j in mask[0, 0].nonzero().tolist()]

    @cached_property
    def _made(self) -> Made:
        rng, numbers = random.Random(-1 - self.number), self.numbers
        kind = rng.choice(["family", "family", "family", "mixed", "rows", "list", "table"])
        n = rng.choice(self.lengths)
        if kind == "list":
            graph, listed = shuffled_list(rng, min(n, 128), numbers.batch, numbers.heads)
            known = set(listed)
            return graph, lambda b, h, i, j: (j, i) in known, listed, "list"
        make = {"family": any_family, "mixed": mixed, "rows": some_rows, "table": cross_table}[kind]
        return *make(rng, n, numbers.batch, numbers.heads), None, kind

    def __str__(self) -> str:
        options = ", ".join(f"{field.name} {getattr(self.numbers, field.name)}" for field in fields(Numbers))
        return f"{self.number}: {self.kind}, {self.graph!r}, {options}"
