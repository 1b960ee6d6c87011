"""Edge sets that are stored as a rule, and results of set operators on edge sets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.intervals.arithmetic import constant, token_ranges
from gnn_attention.graph.intervals.values import Box, Interval, as_tristate, unknown
from gnn_attention.graph.rules import Rule


@dataclass(frozen=True, eq=False)
class RuleEdges(EdgeSet):
    """All pairs for which ``rule(b, h, dst, src)`` is True.

    A rule that accepts only tensors raises an error on ranges of tokens. It is not evaluated
    on ranges again, and :attr:`obstacle` holds the error.
    """

    rule: Rule
    _obstacles: list[str] = field(default_factory=list, repr=False)

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        if not isinstance(dst, Interval):
            return self.rule(b, h, dst, src)
        if not self._obstacles:
            try:
                # The arithmetic of ranges needs __torch_function__, which `eager_mode` disables.
                with torch._C._EnableTorchFunction():
                    return as_tristate(dst.box, self.rule(b, h, dst, src))  # type: ignore[arg-type]
            # A user's rule may raise any error for values that are not tensors.
            except Exception as error:
                self._obstacles.append(f"{type(error).__name__}: {error}")
        return unknown(dst.box)

    @property
    def obstacle(self) -> str | None:
        if not self._obstacles:
            zero = torch.zeros(1, dtype=torch.int64, device="cpu")
            box = Box(zero, zero + 1, zero, zero + 1)
            self.boxes(constant(box, 0), constant(box, 0), *token_ranges(box))
        return self._obstacles[0] if self._obstacles else None

    def rows(self, start: int, stop: int) -> EdgeSet:
        return RuleEdges(partial(rules.map_tokens, self.contains, start, 0), self._obstacles)

    def select(self, batch: int, head: int) -> EdgeSet:
        return RuleEdges(partial(rules.fix_slice, self.contains, batch, head), self._obstacles)

    def transposed(self) -> EdgeSet:
        return RuleEdges(partial(rules.transpose, self.contains), self._obstacles)


@dataclass(frozen=True, eq=False)
class CombinedEdges(EdgeSet):
    """The result of a set operator, such as ``operator.or_``, on other edge sets."""

    operation: Callable[..., Any]
    operands: tuple[EdgeSet, ...]

    @cached_property
    def has_slices(self) -> bool:  # type: ignore[override]
        return any(edges.has_slices for edges in self.operands)

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        return self.operation(*(edges.contains(b, h, dst, src) for edges in self.operands))

    @property
    def obstacle(self) -> str | None:
        obstacles = (edges.obstacle for edges in self.operands)
        return next((obstacle for obstacle in obstacles if obstacle is not None), None)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.combine, self.operation, tuple(edges.rule for edges in self.operands))

    def rows(self, start: int, stop: int) -> EdgeSet:
        return CombinedEdges(self.operation, tuple(edges.rows(start, stop) for edges in self.operands))

    def select(self, batch: int, head: int) -> EdgeSet:
        return CombinedEdges(self.operation, tuple(edges.select(batch, head) for edges in self.operands))

    def transposed(self) -> EdgeSet:
        return CombinedEdges(self.operation, tuple(edges.transposed() for edges in self.operands))

    def extract_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        results = [edges.extract_lists(num_dst, num_src) for edges in self.operands]
        keys = [keys for _, operand_keys in results for keys in operand_keys]
        edges = CombinedEdges(self.operation, tuple(edges for edges, _ in results))
        return edges if keys else self, keys
