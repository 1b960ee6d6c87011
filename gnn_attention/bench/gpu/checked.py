"""Right before fast, on a GPU: some receivers of a large graph, exactly, against the same arithmetic in float64.

Each output depends on its own receiver's in-edges alone, and with a ``grad_out`` that is 0 for all but the sampled receivers so
do the gradients of all inputs: the truth needs the sampled receivers and the senders that they hear, nothing of the size of the
graph. The rule is that of ``verify``: at most twice the error of torch's SDPA in the same dtype, three times for gradients.
"""

from __future__ import annotations

from functools import partial

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.bench.checked import ORDERS, Core, Verdict, sampled_receivers
from gnn_attention.bench.methods import Prepared
from gnn_attention.bench.workloads import Problem
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, judge, worst_errors

__all__ = ["Sample", "heard_by"]

MOST_LOGITS = 2**20  # of one head that the truth may hold


class Sample:
    """The truth about some receivers of a problem, and the verdict on methods."""

    def __init__(self, problem: Problem) -> None:
        """Work out the float64 output, its gradients, and how far SDPA in the problem's dtype is from them."""
        graph, device = problem.graph, problem.inputs[0].device
        rows, senders, mask = heard_by(graph, _few(graph))
        self.problem, self.rows, self.senders, self.mask = problem, *(x.to(device) for x in (rows, senders, mask))
        self.direction = problem.grad_out[:, :, self.rows]
        out, gradients = self._solved(torch.float64, oracle.attention)
        sizes = (problem.inputs[0].shape[0], len(rows), len(senders), problem.dim)
        orders = [oracle.Order.draw(number, *sizes, str(device)) for number in range(ORDERS)]
        attempts = (self._solved(problem.inputs[0].dtype, partial(oracle.reordered_sdpa, order)) for order in orders)
        self.truth = Truth(out, gradients, worst_errors(attempts, out, gradients))

    def verdict(self, prepared: Prepared, backward: bool) -> Verdict:
        """Run a method once, forward and, if it can, backward, on memory that was filled with NaN before."""
        leaves = {name: x.detach().requires_grad_(backward) for name, x in zip("qkv", self.problem.inputs, strict=True)}
        poisoned = [torch.full_like(x, torch.nan) for x in (self.problem.grad_out, *(leaves.values() if backward else ()))]
        del poisoned
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves.values())
        gradients = self._chosen(gradients_of(out, self._grad_out(), leaves)) if backward else {}
        outcome = judge(out[:, :, self.rows], gradients, self.truth)
        return Verdict(outcome.passed, outcome.output, outcome.gradient if backward else None)

    def _grad_out(self) -> Tensor:
        return torch.zeros_like(self.problem.grad_out).index_copy(2, self.rows, self.direction)

    def _chosen(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where the truth knows them; nobody else may have any, else they are NaN throughout."""
        found = {}
        for name, gradient in gradients.items():
            own = gradient[:, :, self.rows if name == "q" else self.senders]
            alone = torch.count_nonzero(gradient) == torch.count_nonzero(own)
            found[name] = own if bool(alone) else torch.full_like(own, torch.nan)
        return found

    def _solved(self, dtype: torch.dtype, core: Core) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.problem.inputs
        parts = (q[:, :, self.rows], k[:, :, self.senders], v[:, :, self.senders])
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in zip("qkv", parts, strict=True)}
        out = core(*leaves.values(), self.mask, self.problem.dim**-0.5)
        return out.detach(), gradients_of(out, self.direction, leaves)


def _few(graph: TokenGraph) -> Int[Tensor, " rows"]:
    """So many receivers that their logits over all whom they hear are no burden."""
    rows = sampled_receivers(graph.num_dst, graph.num_src)
    heard = min(int(graph.in_degree()[rows].sum()), graph.num_src)
    most = max(2, min(len(rows), MOST_LOGITS // max(heard, 1)))
    return rows[torch.linspace(0, len(rows) - 1, min(most, len(rows)), device="cpu").round().long()]


def heard_by(
    graph: TokenGraph, rows: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " senders"], Bool[Tensor, "1 1 rows senders"]]:
    """The receivers, the senders that any of them hears, and the mask between them.

    >>> from gnn_attention import patterns
    >>> rows, senders, mask = heard_by(patterns.window(9, 2), torch.tensor([0, 5]))
    >>> senders.tolist(), mask[0, 0].int().tolist()
    ([0, 4, 5], [[1, 0, 0], [0, 1, 1]])
    """
    src, place = _edges_to(graph, rows)
    senders, column = torch.unique(src, return_inverse=True)
    mask = torch.zeros(len(rows), len(senders), dtype=torch.bool, device="cpu")
    mask[place, column] = True
    return rows, senders, mask.view(1, 1, *mask.shape)


def _edges_to(graph: TokenGraph, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The senders of all edges to these receivers, and the place of each receiver among them."""
    if graph._listed is None:
        found = [graph.rows(row, row + 1).edge_index[0] for row in rows.tolist()]
        return torch.cat(found), torch.arange(len(rows), device="cpu").repeat_interleave(torch.tensor([len(x) for x in found]))
    src, dst = graph.edge_index
    place = torch.full((graph.num_dst,), -1, device="cpu").index_copy(0, rows, torch.arange(len(rows), device="cpu"))
    of_edge = place[dst]
    return src[of_edge >= 0], of_edge[of_edge >= 0]
