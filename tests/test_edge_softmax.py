"""The arithmetic of one edge against plain loops over receivers in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.bounds import assert_exact, assert_sum, summation_bound
from support.inputs import drawn
from torch import Tensor

from gnn_attention import edge_softmax

INF = torch.inf


def assert_each(found: Tensor, true: Tensor) -> None:
    """Every number for itself, small ones too: 1e-12 of its own size."""
    assert_exact(torch.where(found == true, 1.0, found / true), torch.ones_like(true))


def loop_softmax(
    logits: Tensor, dst: Tensor, num_dst: int, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each leading position and receiver: torch.softmax over its in-edges, without the sink."""
    weights = torch.zeros_like(logits)
    lse = torch.full((*logits.shape[:-1], num_dst), -INF, dtype=logits.dtype)
    sinks = None if sink_logits is None else sink_logits.to(logits).expand(logits.shape[:-1])
    for lead in product(*map(range, logits.shape[:-1])):
        for receiver in dst.unique().tolist():
            mine = (dst == receiver).nonzero().flatten()
            total = logits[lead][mine]
            total = total if sinks is None else torch.cat([total, sinks[lead].reshape(1)])
            lse[(*lead, receiver)] = torch.logsumexp(total, 0)
            if not bool((total == -INF).all()):
                weights[lead][mine] = torch.softmax(total, 0)[: len(mine)]
    return weights, lse


DST = {
    "mixed": (torch.tensor([3, 0, 3, 1, 0, 3]), 5),  # receivers 2 and 4 have no in-edges
    "one receiver": (torch.tensor([0, 0, 0]), 1),
    "no edges": (torch.tensor([], dtype=torch.int64), 4),
    "no receivers": (torch.tensor([], dtype=torch.int64), 0),
}
MIXED, FIVE = DST["mixed"]
each_list = pytest.mark.parametrize(("dst", "num_dst"), DST.values(), ids=DST)


class TestSoftmax:
    @each_list
    @pytest.mark.parametrize("with_sinks", [False, True])
    @pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
    def test_against_the_loop(self, dst, num_dst, lead, with_sinks):
        """Without in-edges lse is -inf, despite sinks; unchecked they are the same."""
        logits = 3 * drawn(*lead, len(dst))
        sinks = 2 * drawn(*lead[-1:], seed=1) if with_sinks else None
        weights, lse = edge_softmax.softmax(logits, dst, num_dst, sinks)
        expected, expected_lse = loop_softmax(logits, dst, num_dst, sinks)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)
        for size, shift in ((0.1, 0.0), (9.0, 0.0), (1.0, -1e3)) if not with_sinks else ():
            moved = logits * size + shift
            weights, lse = edge_softmax.softmax(moved, dst, num_dst, check=False)
            assert_each(weights, loop_softmax(moved, dst, num_dst)[0])

    def test_a_sink_of_minus_infinity_is_no_sink_and_a_large_one_takes_everything(self):
        logits = drawn(6)
        without = edge_softmax.softmax(logits, MIXED, FIVE)
        for ours, theirs in zip(
            edge_softmax.softmax(logits, MIXED, FIVE, torch.tensor(-INF)), without, strict=True
        ):
            assert torch.equal(ours, theirs)
        weights, lse = edge_softmax.softmax(torch.zeros(2), torch.tensor([0, 0]), 1, torch.tensor(1e4))
        assert (weights.tolist(), lse.tolist()) == ([0.0, 0.0], [1e4])

    @pytest.mark.parametrize("sink", [None, torch.tensor(0.7)], ids=["no sink", "sink"])
    def test_logits_of_minus_infinity(self, sink):
        """Receiver 0: one of two; receiver 1: all. Weights 0 there, and finite gradients."""
        logits = torch.tensor([1.0, -INF, -INF, -INF, 2.0], dtype=torch.float64, requires_grad=True)
        dst = torch.tensor([0, 0, 1, 1, 2])
        weights, lse = edge_softmax.softmax(logits, dst, 3, sink)
        expected, expected_lse = loop_softmax(logits.detach(), dst, 3, sink)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)
        ((weights * torch.arange(1.0, 6)).sum() + lse[lse > -INF].sum()).backward()
        assert torch.isfinite(logits.grad).all()

    @pytest.mark.parametrize("shift", [1e4, -1e4, 700.0])
    def test_large_logits_neither_overflow_nor_vanish(self, shift):
        shifted = drawn(6) + shift
        weights, lse = edge_softmax.softmax(shifted, MIXED, FIVE)
        # shifted back without a rounding: the sum has fewer digits after the point than float64 has near 0
        expected, expected_lse = loop_softmax(shifted - shift, MIXED, FIVE)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse + shift)

    @pytest.mark.parametrize("bad", [torch.nan, INF])
    @pytest.mark.parametrize("sink", [None, torch.tensor(0.5)], ids=["no sink", "sink"])
    def test_a_bad_logit_reaches_its_receiver_alone(self, bad, sink):
        clean = drawn(6).requires_grad_()
        poisoned = clean.detach().clone().index_fill(0, torch.tensor([2]), bad).requires_grad_()
        results = [edge_softmax.softmax(logits, MIXED, FIVE, sink) for logits in (clean, poisoned)]
        (weights, lse), (bad_weights, bad_lse) = results
        hit, spared = MIXED == 3, MIXED != 3
        assert bad_weights[hit].isnan().all()
        assert bad_lse[3].isnan() or bad_lse[3] == INF
        assert torch.equal(bad_weights[spared], weights[spared])
        assert torch.equal(bad_lse[torch.arange(5) != 3], lse[torch.arange(5) != 3])
        for values, sums in results:
            (values[spared] * torch.arange(1.0, 4)).sum().backward(retain_graph=True)
            sums[:2].sum().backward()
        assert torch.equal(poisoned.grad[spared], clean.grad[spared])

    @pytest.mark.parametrize("sink", [False, True])
    def test_gradcheck(self, sink):
        inputs = [drawn(2, 6).requires_grad_()] + [drawn(2, seed=1).requires_grad_()] * sink

        def call(logits, sinks=None):
            weights, lse = edge_softmax.softmax(logits, MIXED, FIVE, sinks)
            return weights, lse[..., MIXED.unique()]

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


class TestWeightsFromLse:
    def test_minus_infinity_is_weight_zero_and_nan_is_carried(self):
        logits, dst = torch.tensor([-INF, 0.0, 0.0], requires_grad=True), torch.tensor([0, 1, 2])
        weights = edge_softmax.weights_from_lse(logits, dst, torch.tensor([-INF, torch.nan, 0.0]))
        assert weights[0] == 0
        assert weights[1].isnan()
        assert weights[2] == 1
        assert torch.autograd.grad(weights[0], logits)[0][0] == 0


DST_OF_PARTS, ALL = torch.tensor([3, 0, 3, 1, 0, 3, 0]), torch.arange(7)  # 2 and 4 have no in-edges
LOGITS, VALUES = 3 * drawn(2, 7), drawn(2, 7, 3, seed=1)


def part(chosen: Tensor, logits: Tensor = LOGITS, values: Tensor = VALUES) -> tuple[Tensor, Tensor]:
    """Attention over some of the edges: out [heads, dst, dim] and lse [heads, dst]."""
    weights, lse = edge_softmax.softmax(logits[:, chosen], DST_OF_PARTS[chosen], 5)
    out = torch.zeros(logits.shape[0], 5, values.shape[-1], dtype=values.dtype)
    return out.index_add(1, DST_OF_PARTS[chosen], weights.unsqueeze(-1) * values[:, chosen]), lse


class TestMerge:
    @pytest.mark.parametrize("first", [[0, 1, 2], [], [0, 2, 5]], ids=str)
    def test_two_disjoint_halves_are_the_whole(self, first):
        """Receivers with in-edges in one half only, in both, in none; and an empty half; in either order."""
        second = torch.tensor([e for e in range(7) if e not in first], dtype=torch.int64)
        halves = part(torch.tensor(first, dtype=torch.int64)), part(second)
        out, lse = edge_softmax.merge(*halves[0], *halves[1])
        for found, expected in zip((out, lse), part(ALL), strict=True):
            assert_exact(found, expected)
        assert bool((out[:, [2, 4]] == 0).all())
        assert bool((lse[:, [2, 4]] == -INF).all())
        turned = edge_softmax.merge(*halves[1], *halves[0])
        assert all(torch.equal(a, b) for a, b in zip((out, lse), turned, strict=True))

    def test_shares_sum_to_one(self):
        """Up to some roundings, however large lse is; ``e^(lse_a - lse)`` has the rounding of lse."""
        lse_a, lse_b = (300 + 2 * drawn(2, 500, seed=seed).float() for seed in (0, 1))
        ones = torch.ones(2, 500, 1)
        out, _ = edge_softmax.merge(ones, lse_a, ones, lse_b)
        # the sum of both masses, its reciprocal, a product with it, the sum of both shares
        assert_sum(out, ones, terms=4, magnitude=1.0)

    def test_a_share_too_small_to_change_the_sum_has_its_gradient(self):
        given = [drawn(4, 3), torch.zeros(4), drawn(4, 3, seed=1), -20 - drawn(4, seed=2).abs()]
        slopes = []
        for dtype in (torch.float32, torch.float64):
            inputs = [x.to(dtype).requires_grad_() for x in (y.float() for y in given)]
            slopes.append(torch.autograd.grad(edge_softmax.merge(*inputs)[0].sum(), inputs[3])[0].double())
        # e^lse_b (2 roundings) times the difference of two sums of 3, weighted by shares of their own
        reach = given[3].float().double().exp() * (given[0].abs().sum(-1) + given[2].abs().sum(-1))
        assert ((slopes[0] - slopes[1]).abs() <= summation_bound(16, reach, torch.float32)).all()

    def test_gradients_where_halves_are_empty(self):
        """Row 0: both, whose gradients are 0; row 1: the second, and the first passes its gradient on."""
        out_a, lse_a = torch.zeros(2, 3, requires_grad=True), torch.tensor([-INF, 0.5], requires_grad=True)
        out_b, lse_b = torch.zeros(2, 3, requires_grad=True), torch.full((2,), -INF, requires_grad=True)
        out, lse = edge_softmax.merge(out_a, lse_a, out_b, lse_b)
        ((out * torch.tensor([1.0, 2.0, 3.0])).sum() + lse[1]).backward()
        assert out_a.grad.tolist() == [[0, 0, 0], [1, 2, 3]]
        assert (lse_a.grad.tolist(), lse_b.grad.tolist()) == ([0, 1], [0, 0])
        assert out_b.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


class TestAddSinks:
    """A finished result with one more logit, against the softmax that had it from the beginning."""

    @pytest.mark.parametrize("sinks", [[-3.0, 40.0], [-INF, 700.0]], ids=str)
    def test_is_the_softmax_with_the_logit_in_it(self, sinks):
        logits, values = drawn(3, 2, 7), drawn(3, 2, 7, 4, seed=1)
        sink_logits, results = torch.tensor(sinks, dtype=torch.float64), []
        dst = torch.tensor([3, 0, 3, 1, 0, 3, 1])
        for sink in (None, sink_logits):
            weights, lse = edge_softmax.softmax(logits, dst, 5, sink)
            out = torch.zeros(3, 2, 5, 4, dtype=torch.float64)
            results.append((out.index_add(2, dst, weights.unsqueeze(-1) * values), lse))
        has_in_edges = torch.tensor([True, True, False, True, False])
        out, lse = edge_softmax.add_sinks(*results[0], sink_logits, has_in_edges)
        # a logit less 700 is rounded by half an ulp of 700, 6e-14: 1e-12 of each number is more than both
        assert_each(out, results[1][0])
        assert_exact(lse, results[1][1])
        assert out[:, :, [2, 4]].abs().max() == 0
        assert bool((lse[:, :, [2, 4]] == -INF).all())

    def test_gradients(self):
        sinks, out = drawn(2).requires_grad_(), drawn(1, 2, 3, 4, seed=1).requires_grad_()
        lse = drawn(1, 2, 3, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(edge_softmax.add_sinks, (out, lse, sinks, torch.tensor(True)))
        empty = torch.full((1, 2, 3), -INF, dtype=torch.float64, requires_grad=True)
        sinks = torch.tensor([0.3, -INF], dtype=torch.float64, requires_grad=True)
        result, result_lse = edge_softmax.add_sinks(out, empty, sinks, torch.tensor(False))
        found = torch.autograd.grad(result.sum() + result_lse.sum(), (out, empty, sinks))
        assert [gradient.abs().max().item() for gradient in found] == [0.0, 0.0, 0.0]


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("program", [torch.func.vmap, compiled])
def test_programs_that_must_not_depend_on_numbers(program):
    """Mapped and compiled, where no logit can be looked at."""
    logits, dst = drawn(2, 3, 6), torch.tensor([0, 2, 2, 0, 3, 2])
    found = program(lambda x: edge_softmax.softmax(x, dst, 4, check=False)[0])(logits)
    assert_each(found, loop_softmax(logits, dst, 4)[0])
