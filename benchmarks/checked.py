"""Right before fast: every method is compared with a float64 oracle before it is timed, on a CPU and on a
GPU.

On large graphs some receivers stand for all: their outputs are exact dense attention over their own in-edges,
and with a ``grad_out`` that is 0 elsewhere so are the gradients of all inputs: the truth needs those
receivers and their senders, nothing of the size of the graph. Half of the receivers are neighbours of one
another, so that pieces which meet are seen. The rule is that of ``verify``: at most twice the error of
torch's SDPA in the same dtype for outputs, three times for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.methods import Prepared
from benchmarks.workloads import Problem
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, judge, worst_errors

__all__ = ["Checked", "Verdict", "in_edges_of", "sampled_receivers"]

SAMPLED, FEW, LONG = 64, 16, 2**15  # receivers; fewer of them above LONG senders
ORDERS = 3  # of the sums from which SDPA's own error is taken
MOST_LOGITS = 2**20  # of one head, in the truth

Core = Callable[..., Tensor]


@dataclass(frozen=True)
class Verdict:
    """Errors in units of SDPA's own, and whether they are allowed."""

    passed: bool
    output: float
    gradient: float | None

    def __str__(self) -> str:
        """As a reason for leaving a method out."""
        gradient = "" if self.gradient is None else f", gradient {self.gradient:.3g} (allowed 3)"
        return f"error {self.output:.3g} of SDPA's own (allowed 2){gradient}"


def sampled_receivers(num_dst: int, num_src: int) -> Tensor:
    """All receivers of a small graph; else the first, the last, random ones and a run of neighbours.

    >>> len(sampled_receivers(40, 40)), len(sampled_receivers(10_000, 10_000))
    (40, 64)
    """
    count = SAMPLED if num_src <= LONG else FEW
    if num_dst <= count or num_dst * num_src <= 256**2:
        return torch.arange(num_dst)
    rng = torch.Generator().manual_seed(1)
    first = int(torch.randint(1, num_dst - count // 2, (1,), generator=rng))
    drawn = torch.randperm(num_dst, generator=rng)[: 2 * count].tolist()
    ordered = dict.fromkeys([0, num_dst - 1, *range(first, first + count // 2), *drawn])
    return torch.tensor(sorted(list(ordered)[:count]))


class Checked:
    """The truth about some receivers of a problem, and the verdict on methods."""

    def __init__(self, problem: Problem) -> None:
        """Compute the float64 output, its gradients, and how far SDPA in the problem's dtype is from them."""
        self.problem, graph, device = problem, problem.graph, problem.grad_out.device
        self.rows, self.senders, self.mask = (x.to(device) for x in in_edges_of(graph, _few(graph)))
        self.axis = 2 if problem.layer is None else 1  # of tokens
        self.tokens = self._tokens_of_leaves()
        self.direction = problem.grad_out.index_select(self.axis, self.rows)
        out, gradients = self._solved(torch.float64, oracle.attention)
        orders = (partial(oracle.sdpa, number=number) for number in range(ORDERS))
        attempts = (self._solved(problem.grad_out.dtype, order) for order in orders)
        self.truth = Truth(out, gradients, worst_errors(attempts, out, gradients))

    def verdict(self, prepared: Prepared, backward: bool) -> Verdict:
        """Run a method once, forward and, if ``backward``, backward, on memory that was filled with NaN
        before.
        """
        leaves = {name: x.detach().requires_grad_(backward) for name, x in self._inputs().items()}
        poisoned = [
            torch.full_like(x, torch.nan)
            for x in (self.problem.grad_out, *(leaves.values() if backward else ()))
        ]
        del poisoned
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves.values())
        gradients = self._sampled(gradients_of(out, self._grad_out(), leaves)) if backward else {}
        outcome = judge(out.index_select(self.axis, self.rows), gradients, self.truth)
        return Verdict(outcome.passed, outcome.output, outcome.gradient if backward else None)

    def _inputs(self) -> dict[str, Tensor]:
        return dict(zip("qkv" if self.problem.layer is None else "x", self.problem.inputs, strict=True))

    def _tokens_of_leaves(self) -> dict[str, Tensor]:
        """For each input the tokens that the sampled outputs depend on."""
        if self.problem.layer is None:
            return {"q": self.rows, "k": self.senders, "v": self.senders}
        return {"x": torch.unique(torch.cat([self.rows, self.senders]))}

    def _grad_out(self) -> Tensor:
        return torch.zeros_like(self.problem.grad_out).index_copy(self.axis, self.rows, self.direction)

    def _sampled(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients where the truth is known; all others must be 0, else they are NaN throughout."""
        found = {}
        for name, gradient in gradients.items():
            own = gradient.index_select(self.axis, self.tokens[name])
            alone = torch.count_nonzero(gradient) == torch.count_nonzero(own)
            found[name] = own if bool(alone) else torch.full_like(own, torch.nan)
        return found

    def _solved(self, dtype: torch.dtype, core: Core) -> tuple[Tensor, dict[str, Tensor]]:
        parts = {name: x.index_select(self.axis, self.tokens[name]) for name, x in self._inputs().items()}
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in parts.items()}
        out = self._formula(leaves, core)
        return out.detach(), gradients_of(out, self.direction, leaves)

    def _formula(self, leaves: Mapping[str, Tensor], core: Core) -> Tensor:
        scale, layer = self.problem.dim**-0.5, self.problem.layer
        if layer is None:
            return core(*leaves.values(), self.mask, scale)
        x, W_O = leaves["x"], layer.W_O
        assert W_O is not None
        q, k, v = (torch.einsum("btw,hwd->bhtd", x, W.to(x.dtype)) for W in (layer.W_Q, layer.W_K, layer.W_V))
        rows, senders = (torch.searchsorted(self.tokens["x"], tokens) for tokens in (self.rows, self.senders))
        attended = core(q[:, :, rows], k[:, :, senders], v[:, :, senders], self.mask, scale)
        return torch.einsum("bhtd,hdw->btw", attended, W_O.to(x.dtype))


def _few(graph: TokenGraph) -> Int[Tensor, " rows"]:
    """Sampled receivers, so few that their logits over all of their senders are no burden."""
    rows = sampled_receivers(graph.num_dst, graph.num_src)
    senders = min(int(graph.in_degree()[rows].sum()), graph.num_src)
    most = max(2, min(len(rows), MOST_LOGITS // max(senders, 1)))
    return rows[torch.linspace(0, len(rows) - 1, min(most, len(rows)), device="cpu").round().long()]


def in_edges_of(
    graph: TokenGraph, rows: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " senders"], Bool[Tensor, "1 1 rows senders"]]:
    """The receivers, the senders that any of them attends to, and the mask between them.

    >>> from gnn_attention import patterns
    >>> rows, senders, mask = in_edges_of(patterns.window(9, 2), torch.tensor([0, 5]))
    >>> senders.tolist(), mask[0, 0].int().tolist()
    ([0, 4, 5], [[1, 0, 0], [0, 1, 1]])
    """
    src, place = _edges_to(graph, rows)
    senders, column = torch.unique(src, return_inverse=True)
    mask = torch.zeros(len(rows), len(senders), dtype=torch.bool, device="cpu")
    mask[place, column] = True
    return rows, senders, mask.view(1, 1, *mask.shape)


def _edges_to(graph: TokenGraph, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The senders of all edges to these receivers, and the position of each receiver among them."""
    if graph._listed is None:
        found = [graph.rows(row, row + 1).edge_index[0] for row in rows.tolist()]
        return torch.cat(found), torch.arange(len(rows), device="cpu").repeat_interleave(
            torch.tensor([len(x) for x in found])
        )
    src, dst = graph.edge_index
    place = torch.full((graph.num_dst,), -1, device="cpu").index_copy(
        0, rows, torch.arange(len(rows), device="cpu")
    )
    of_edge = place[dst]
    return src[of_edge >= 0], of_edge[of_edge >= 0]
