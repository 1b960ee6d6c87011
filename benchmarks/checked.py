"""Compare every method with a float64 reference before it is timed, on a CPU and on a GPU.

On large graphs only a sample of the receivers is checked. Their outputs are dense attention over their own in-edges;
with a ``grad_out`` that is 0 at all other receivers, the gradients of all inputs follow from the same rows, so the
reference needs no tensor of the size of the graph. Half of the sample are neighbours, so that the seams between
tiles are checked too. The tolerance is that of ``verify``: for outputs at most twice the error of torch's SDPA in
the same dtype, for gradients three times.
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

__all__ = ["Checked", "in_edges_of", "sample_receivers"]

# The numbers of sampled receivers are for graphs of at most LONG senders and for longer ones.
SAMPLED, FEW, LONG = 64, 16, 2**15
ORDERS = 3  # SDPA's own error is the largest over this many summation orders


class Checked:
    """The float64 outputs and gradients of sampled receivers, with which methods are compared."""

    def __init__(self, problem: Problem) -> None:
        """Compute the float64 output, its gradients, and the errors of SDPA in the problem's dtype."""
        self.problem, graph = problem, problem.graph
        rows, senders, mask = in_edges_of(graph, sample_receivers(graph))
        self.rows, self.senders, self.mask = (x.to(problem.device) for x in (rows, senders, mask))
        self.axis = 2 if problem.layer is None else 1  # the axis of tokens
        self.direction = problem.grad_out.index_select(self.axis, self.rows)
        out, gradients = self._solve(torch.float64, oracle.attention)
        orders = (partial(oracle.sdpa, seed=seed) for seed in range(ORDERS))
        attempts = (self._solve(problem.grad_out.dtype, order) for order in orders)
        errors = (measure_errors(attempt, (out, gradients)) for attempt in attempts)
        self.truth = Truth(out, gradients, merge_errors(errors))

    def verdict(self, prepared: Prepared, backward: bool) -> Outcome:
        """Run a method once, forward and, if ``backward``, backward, and compare it with the reference."""
        leaves = {name: x.detach().requires_grad_(backward) for name, x in self._inputs().items()}
        # The method is likely to get this memory again, so an output that it leaves unwritten is NaN.
        templates = [self.problem.grad_out, *(leaves.values() if backward else ())]
        nan_tensors = [torch.full_like(x, torch.nan) for x in templates]
        del nan_tensors
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves.values())
        # The gradient is 0 at receivers that are not sampled.
        grad_out = torch.zeros_like(out).index_copy(self.axis, self.rows, self.direction)
        gradients = self._sample_gradients(differentiate(out, grad_out, leaves)) if backward else {}
        return judge(out.index_select(self.axis, self.rows), gradients, self.truth)

    def _inputs(self) -> dict[str, Tensor]:
        return dict(zip("qkv" if self.problem.layer is None else "x", self.problem.inputs, strict=True))

    def _tokens(self, name: str) -> Tensor:
        """Return the tokens of an input on which the sampled outputs depend."""
        if name == "x":
            return torch.arange(self.problem.graph.num_dst)
        return self.rows if name == "q" else self.senders

    def _sample_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select the gradients at sampled tokens, or NaN if a gradient at any other token is not 0."""
        sampled = {}
        for name, gradient in gradients.items():
            rows = gradient.index_select(self.axis, self._tokens(name))
            is_zero_elsewhere = torch.count_nonzero(gradient) == torch.count_nonzero(rows)
            sampled[name] = rows if bool(is_zero_elsewhere) else torch.full_like(rows, torch.nan)
        return sampled

    def _solve(self, dtype: torch.dtype, core: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = {name: x.index_select(self.axis, self._tokens(name)) for name, x in self._inputs().items()}
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
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


def sample_receivers(graph: TokenGraph) -> Tensor:
    """Return all receivers of a small graph, else the first, the last, random ones and a run of neighbours.

    >>> from gnn_attention import patterns
    >>> [len(sample_receivers(patterns.window(n, 9))) for n in (40, 10_000)]
    [40, 64]
    """
    num_dst, num_src = graph.num_dst, graph.num_src
    rows = torch.arange(num_dst)
    count = SAMPLED if num_src <= LONG else FEW
    if num_dst > count and num_dst * num_src > 256**2:
        rng = torch.Generator().manual_seed(1)
        first = int(torch.randint(1, num_dst - count // 2, (1,), generator=rng))
        random_rows = torch.randperm(num_dst, generator=rng)[: 2 * count].tolist()
        candidates = dict.fromkeys([0, num_dst - 1, *range(first, first + count // 2), *random_rows])
        rows = torch.tensor(sorted(list(candidates)[:count]))
    return rows


def in_edges_of(graph: TokenGraph, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the receivers ``rows``, all senders to which one of them attends, and the mask between them.

    >>> from gnn_attention import patterns
    >>> rows, senders, mask = in_edges_of(patterns.window(9, 2), torch.tensor([0, 5]))
    >>> senders.tolist(), mask[0, 0].int().tolist()
    ([0, 4, 5], [[1, 0, 0], [0, 1, 1]])
    """
    if graph.edges.listed() is None:
        src_by_row = [graph.rows(row, row + 1).edge_index[0] for row in rows.tolist()]
        src = torch.cat(src_by_row)
        row_index = torch.repeat_interleave(torch.tensor([len(src) for src in src_by_row]))
    else:
        src, dst = graph.edge_index
        index_of = torch.full((graph.num_dst,), -1).index_copy(0, rows, torch.arange(len(rows)))
        is_sampled = index_of[dst] >= 0
        src, row_index = src[is_sampled], index_of[dst][is_sampled]
    senders, column = torch.unique(src, return_inverse=True)
    mask = torch.zeros(len(rows), len(senders), dtype=torch.bool)
    mask[row_index, column] = True
    return rows, senders, mask[None, None]
