"""Edges given by a rule, and those that set operators make of other edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.intervals.arithmetic import constant, token_ranges
from gnn_attention.graph.intervals.values import Box, Interval, TriState, as_tristate, unknown
from gnn_attention.graph.rules import Rule


@dataclass(frozen=True, eq=False)
class RuleEdges(EdgeSet):
    """All pairs for which ``rule(b, h, dst, src)`` holds.

    A rule that raises an error for ranges of tokens, as one does that was written for tensors alone, is not
    evaluated on ranges again: :attr:`obstacle` says why.
    """

    rule: Rule
    _obstacles: list[str] = field(default_factory=list, repr=False)

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        if isinstance(dst, Interval):
            return self._evaluate_on_ranges(b, h, dst, src)
        return self.rule(b, h, dst, src)

    def _evaluate_on_ranges(self, b: Any, h: Any, dst: Any, src: Any) -> TriState:
        if not self._obstacles:
            try:
                # torch hands its functions to the arithmetic of ranges, which `eager_mode` prevents.
                with torch._C._EnableTorchFunction():
                    return as_tristate(dst.box, self.rule(b, h, dst, src))
            except Exception as error:  # A user's rule may raise anything for values that are no tensors.
                self._obstacles.append(f"{type(error).__name__}: {error}")
        return unknown(dst.box)

    @property
    def obstacle(self) -> str | None:
        if not self._obstacles:
            first = torch.zeros(1, dtype=torch.int64, device="cpu")
            box = Box(first, first + 1, first, first + 1)
            self.boxes(constant(box, 0), constant(box, 0), *token_ranges(box))
        return self._obstacles[0] if self._obstacles else None

    def rows(self, start: int, stop: int) -> EdgeSet:
        return RuleEdges(partial(rules.of_tokens, self.contains, start, 0), self._obstacles)

    def select(self, batch: int, head: int) -> EdgeSet:
        return RuleEdges(partial(rules.fix_slice, self.contains, batch, head), self._obstacles)

    def transposed(self) -> EdgeSet:
        return RuleEdges(partial(rules.transposed, self.contains), self._obstacles)


@dataclass(frozen=True, eq=False)
class CombinedEdges(EdgeSet):
    """The edges that a set operator makes of others, such as ``join=operator.or_``."""

    join: Callable[..., Any]
    operands: tuple[EdgeSet, ...]

    @cached_property
    def has_slices(self) -> bool:  # type: ignore[override]
        return any(edges.has_slices for edges in self.operands)

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        return self.join(*(edges.contains(b, h, dst, src) for edges in self.operands))

    @property
    def obstacle(self) -> str | None:
        return next((why for edges in self.operands if (why := edges.obstacle) is not None), None)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.combine, self.join, tuple(edges.rule for edges in self.operands))

    def rows(self, start: int, stop: int) -> EdgeSet:
        return CombinedEdges(self.join, tuple(edges.rows(start, stop) for edges in self.operands))

    def select(self, batch: int, head: int) -> EdgeSet:
        return CombinedEdges(self.join, tuple(edges.select(batch, head) for edges in self.operands))

    def transposed(self) -> EdgeSet:
        return CombinedEdges(self.join, tuple(edges.transposed() for edges in self.operands))

    def without_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        parts = [edges.without_lists(num_dst, num_src) for edges in self.operands]
        keys = [key for _, part in parts for key in part]
        return CombinedEdges(self.join, tuple(edges for edges, _ in parts)) if keys else self, keys
