"""Every method is compared with a float64 truth before it is timed, on a CPU and on a GPU.

On large graphs some receivers stand for all: their outputs are exact dense attention over their own in-edges,
and with a ``grad_out`` that is 0 elsewhere so are the gradients of all inputs, so that the truth needs nothing of
the size of the graph. Half of the receivers are neighbours of one another, so that pieces which meet are seen. The
rule is that of ``verify``: at most twice the error of torch's SDPA in the same dtype for outputs, three times
for gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import Prepared
from benchmarks.workloads import Problem
from gnn_attention import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Outcome, Truth, differentiate, judge, measure_errors, merge_errors

__all__ = ["Checked", "in_edges_of", "sampled_receivers"]

SAMPLED, FEW, LONG = 64, 16, 2**15  # receivers; fewer of them above LONG senders
ORDERS = 3  # of the sums from which SDPA's own error is taken


class Checked:
    """The truth about some receivers of a problem, and the verdict on methods."""

    def __init__(self, problem: Problem) -> None:
        """Compute the float64 output, its gradients, and how far SDPA in the problem's dtype is from them."""
        self.problem, graph = problem, problem.graph
        rows, senders, mask = in_edges_of(graph, sampled_receivers(graph))
        self.rows, self.senders, self.mask = (x.to(problem.device) for x in (rows, senders, mask))
        self.axis = 2 if problem.layer is None else 1  # of tokens
        self.direction = problem.grad_out.index_select(self.axis, self.rows)
        out, gradients = self._solved(torch.float64, oracle.attention)
        orders = (partial(oracle.sdpa, number=number) for number in range(ORDERS))
        attempts = (self._solved(problem.grad_out.dtype, order) for order in orders)
        errors = (measure_errors(attempt, (out, gradients)) for attempt in attempts)
        self.truth = Truth(out, gradients, merge_errors(errors))

    def verdict(self, prepared: Prepared, backward: bool) -> Outcome:
        """Run a method once, forward and, if ``backward``, backward, on memory that was filled with NaN before."""
        leaves = {name: x.detach().requires_grad_(backward) for name, x in self._inputs().items()}
        likely = [self.problem.grad_out, *(leaves.values() if backward else ())]
        poisoned = [torch.full_like(x, torch.nan) for x in likely]
        del poisoned
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves.values())
        # 0 for all other receivers
        grad_out = torch.zeros_like(out).index_copy(self.axis, self.rows, self.direction)
        gradients = self._sampled(differentiate(out, grad_out, leaves)) if backward else {}
        return judge(out.index_select(self.axis, self.rows), gradients, self.truth)

    def _inputs(self) -> dict[str, Tensor]:
        return dict(zip("qkv" if self.problem.layer is None else "x", self.problem.inputs, strict=True))

    def _tokens(self, name: str) -> Tensor:
        """The tokens of an input that the sampled outputs depend on."""
        if name == "x":
            return torch.arange(self.problem.graph.num_dst)
        return self.rows if name == "q" else self.senders

    def _sampled(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients where the truth is known; all others must be 0, else they are NaN throughout."""
        sampled = {}
        for name, gradient in gradients.items():
            own = gradient.index_select(self.axis, self._tokens(name))
            alone = torch.count_nonzero(gradient) == torch.count_nonzero(own)
            sampled[name] = own if bool(alone) else torch.full_like(own, torch.nan)
        return sampled

    def _solved(self, dtype: torch.dtype, core: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        parts = {name: x.index_select(self.axis, self._tokens(name)) for name, x in self._inputs().items()}
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in parts.items()}
        out = self._formula(leaves, core)
        return out.detach(), differentiate(out, self.direction, leaves)

    def _formula(self, leaves: Mapping[str, Tensor], core: Callable[..., Tensor]) -> Tensor:
        scale = self.problem.dim**-0.5
        if self.problem.layer is None:
            return core(*leaves.values(), self.mask, scale)
        heads: Any = copy.deepcopy(self.problem.layer).to(leaves["x"].dtype)
        q, (k, v) = heads.receive(leaves["x"]), heads.send(leaves["x"])
        rows, senders = self.rows, self.senders
        out: Tensor = heads.collect(core(q[:, :, rows], k[:, :, senders], v[:, :, senders], self.mask, scale))
        return out


def sampled_receivers(graph: TokenGraph) -> Tensor:
    """All receivers of a small graph; else the first, the last, random ones and a run of neighbours.

    >>> from gnn_attention import patterns
    >>> [len(sampled_receivers(patterns.window(n, 9))) for n in (40, 10_000)]
    [40, 64]
    """
    num_dst, num_src = graph.num_dst, graph.num_src
    rows = torch.arange(num_dst)
    count = SAMPLED if num_src <= LONG else FEW
    if num_dst > count and num_dst * num_src > 256**2:
        rng = torch.Generator().manual_seed(1)
        first = int(torch.randint(1, num_dst - count // 2, (1,), generator=rng))
        drawn = torch.randperm(num_dst, generator=rng)[: 2 * count].tolist()
        ordered = dict.fromkeys([0, num_dst - 1, *range(first, first + count // 2), *drawn])
        rows = torch.tensor(sorted(list(ordered)[:count]))
    return rows


def in_edges_of(graph: TokenGraph, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The receivers, the senders that any of them attends to, and the mask between them.

    >>> from gnn_attention import patterns
    >>> rows, senders, mask = in_edges_of(patterns.window(9, 2), torch.tensor([0, 5]))
    >>> senders.tolist(), mask[0, 0].int().tolist()
    ([0, 4, 5], [[1, 0, 0], [0, 1, 1]])
    """
    if graph.edges.listed() is None:
        parts = [graph.rows(row, row + 1).edge_index[0] for row in rows.tolist()]
        src, place = torch.cat(parts), torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
    else:
        src, dst = graph.edge_index
        place_of = torch.full((graph.num_dst,), -1).index_copy(0, rows, torch.arange(len(rows)))
        src, place = src[place_of[dst] >= 0], place_of[dst][place_of[dst] >= 0]
    senders, column = torch.unique(src, return_inverse=True)
    mask = torch.zeros(len(rows), len(senders), dtype=torch.bool)
    mask[place, column] = True
    return rows, senders, mask[None, None]
