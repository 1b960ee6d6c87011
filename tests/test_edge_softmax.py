"""The arithmetic of edges equals loops over receivers in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.bounds import assert_exact, assert_sum, summation_bound
from support.inputs import randn
from torch import Tensor

from gnn_attention import edge_softmax

INF = torch.inf


def assert_each(output: Tensor, expected: Tensor) -> None:
    """Assert that every number, small ones too, is exact to 1e-12 of its own size."""
    assert_exact(torch.where(output == expected, 1.0, output / expected), torch.ones_like(expected))


def loop_softmax(
    logits: Tensor, dst: Tensor, num_dst: int, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call torch.softmax for each leading index and receiver, and drop the weight of the sink."""
    weights = torch.zeros_like(logits)
    lse = torch.full((*logits.shape[:-1], num_dst), -INF, dtype=logits.dtype)
    sinks = None if sink_logits is None else sink_logits.to(logits).expand(logits.shape[:-1])
    for lead in product(*map(range, logits.shape[:-1])):
        for receiver in dst.unique().tolist():
            in_edges = (dst == receiver).nonzero().flatten()
            total = logits[lead][in_edges]
            total = total if sinks is None else torch.cat([total, sinks[lead].reshape(1)])
            lse[(*lead, receiver)] = torch.logsumexp(total, 0)
            if not bool((total == -INF).all()):
                weights[lead][in_edges] = torch.softmax(total, 0)[: len(in_edges)]
    return weights, lse


DST = {
    # Receivers 2 and 4 are isolated.
    "mixed": (torch.tensor([3, 0, 3, 1, 0, 3]), 5),
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
        """Isolated receivers have the lse -inf even with sinks; ``check=False`` changes no number."""
        logits = 3 * randn(*lead, len(dst))
        sinks = 2 * randn(*lead[-1:], seed=1) if with_sinks else None
        weights, lse = edge_softmax.softmax(logits, dst, num_dst, sinks)
        expected, expected_lse = loop_softmax(logits, dst, num_dst, sinks)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)
        for size, shift in ((0.1, 0.0), (9.0, 0.0), (1.0, -1e3)) if not with_sinks else ():
            scaled = logits * size + shift
            weights, lse = edge_softmax.softmax(scaled, dst, num_dst, check=False)
            assert_each(weights, loop_softmax(scaled, dst, num_dst)[0])

    def test_a_sink_of_minus_infinity_is_no_sink_and_a_large_one_takes_everything(self):
        logits = randn(6)
        no_sink = edge_softmax.softmax(logits, MIXED, FIVE)
        for ours, theirs in zip(
            edge_softmax.softmax(logits, MIXED, FIVE, torch.tensor(-INF)), no_sink, strict=True
        ):
            assert torch.equal(ours, theirs)
        weights, lse = edge_softmax.softmax(torch.zeros(2), torch.tensor([0, 0]), 1, torch.tensor(1e4))
        assert (weights.tolist(), lse.tolist()) == ([0.0, 0.0], [1e4])

    @pytest.mark.parametrize("sink", [None, torch.tensor(0.7)], ids=["no sink", "sink"])
    def test_logits_of_minus_infinity(self, sink):
        """Weights of such logits are 0 and gradients finite, also at receiver 1, which has no others."""
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
        shifted = randn(6) + shift
        weights, lse = edge_softmax.softmax(shifted, MIXED, FIVE)
        # Shifting back is exact, because the sum has fewer digits after the point than float64 near 0.
        expected, expected_lse = loop_softmax(shifted - shift, MIXED, FIVE)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse + shift)

    @pytest.mark.parametrize("bad", [torch.nan, INF])
    @pytest.mark.parametrize("sink", [None, torch.tensor(0.5)], ids=["no sink", "sink"])
    def test_a_bad_logit_reaches_its_receiver_alone(self, bad, sink):
        clean_logits = randn(6).requires_grad_()
        bad_logits = clean_logits.detach().clone().index_fill(0, torch.tensor([2]), bad).requires_grad_()
        results = [edge_softmax.softmax(logits, MIXED, FIVE, sink) for logits in (clean_logits, bad_logits)]
        (weights, lse), (bad_weights, bad_lse) = results
        is_bad, is_clean = MIXED == 3, MIXED != 3
        assert bad_weights[is_bad].isnan().all()
        assert bad_lse[3].isnan() or bad_lse[3] == INF
        assert torch.equal(bad_weights[is_clean], weights[is_clean])
        assert torch.equal(bad_lse[torch.arange(5) != 3], lse[torch.arange(5) != 3])
        for values, sums in results:
            (values[is_clean] * torch.arange(1.0, 4)).sum().backward(retain_graph=True)
            sums[:2].sum().backward()
        assert torch.equal(bad_logits.grad[is_clean], clean_logits.grad[is_clean])

    @pytest.mark.parametrize("sink", [False, True])
    def test_gradcheck(self, sink):
        inputs = [randn(2, 6).requires_grad_()] + [randn(2, seed=1).requires_grad_()] * sink

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


DST_OF_EDGES, ALL = torch.tensor([3, 0, 3, 1, 0, 3, 0]), torch.arange(7)
LOGITS, VALUES = 3 * randn(2, 7), randn(2, 7, 3, seed=1)


def attend_to_edges(edges: Tensor, logits: Tensor = LOGITS, values: Tensor = VALUES) -> tuple[Tensor, Tensor]:
    """Return the out ``[heads, dst, dim]`` and lse ``[heads, dst]`` of attention along some of the edges."""
    weights, lse = edge_softmax.softmax(logits[:, edges], DST_OF_EDGES[edges], 5)
    out = torch.zeros(logits.shape[0], 5, values.shape[-1], dtype=values.dtype)
    return out.index_add(1, DST_OF_EDGES[edges], weights.unsqueeze(-1) * values[:, edges]), lse


class TestMerge:
    @pytest.mark.parametrize("first", [[0, 1, 2], [], [0, 2, 5]], ids=str)
    def test_two_disjoint_halves_are_the_whole(self, first):
        """Receivers have in-edges in one half, in both or in none, and a half may be empty."""
        second = torch.tensor([e for e in range(7) if e not in first], dtype=torch.int64)
        halves = attend_to_edges(torch.tensor(first, dtype=torch.int64)), attend_to_edges(second)
        out, lse = edge_softmax.merge(*halves[0], *halves[1])
        for output, expected in zip((out, lse), attend_to_edges(ALL), strict=True):
            assert_exact(output, expected)
        assert bool((out[:, [2, 4]] == 0).all())
        assert bool((lse[:, [2, 4]] == -INF).all())
        swapped_result = edge_softmax.merge(*halves[1], *halves[0])
        assert all(torch.equal(a, b) for a, b in zip((out, lse), swapped_result, strict=True))

    def test_shares_sum_to_one(self):
        """For a large lse shares sum to 1 up to roundings, which ``e^(lse_a - lse)`` does not."""
        lse_a, lse_b = (300 + 2 * randn(2, 500, seed=seed).float() for seed in (0, 1))
        ones = torch.ones(2, 500, 1)
        out, _ = edge_softmax.merge(ones, lse_a, ones, lse_b)
        # The sum of both masses, its reciprocal, a product with it and the sum of shares are each rounded.
        assert_sum(out, ones, terms=4, magnitude=1.0)

    def test_a_share_too_small_to_change_the_sum_has_its_gradient(self):
        values = [randn(4, 3), torch.zeros(4), randn(4, 3, seed=1), -20 - randn(4, seed=2).abs()]
        gradients = []
        for dtype in (torch.float32, torch.float64):
            inputs = [x.to(dtype).requires_grad_() for x in (y.float() for y in values)]
            gradients.append(torch.autograd.grad(edge_softmax.merge(*inputs)[0].sum(), inputs[3])[0].double())
        # The gradient is e^lse_b (2 roundings) times the difference of two weighted sums of 3.
        reach = values[3].float().double().exp() * (values[0].abs().sum(-1) + values[2].abs().sum(-1))
        assert ((gradients[0] - gradients[1]).abs() <= summation_bound(16, reach, torch.float32)).all()

    def test_gradients_where_halves_are_empty(self):
        """In row 0 both halves are empty, and gradients are 0; in row 1 only the second half is empty."""
        out_a, lse_a = torch.zeros(2, 3, requires_grad=True), torch.tensor([-INF, 0.5], requires_grad=True)
        out_b, lse_b = torch.zeros(2, 3, requires_grad=True), torch.full((2,), -INF, requires_grad=True)
        out, lse = edge_softmax.merge(out_a, lse_a, out_b, lse_b)
        ((out * torch.tensor([1.0, 2.0, 3.0])).sum() + lse[1]).backward()
        assert out_a.grad.tolist() == [[0, 0, 0], [1, 2, 3]]
        assert (lse_a.grad.tolist(), lse_b.grad.tolist()) == ([0, 1], [0, 0])
        assert out_b.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


class TestAddSinks:
    """A result to which a sink is added equals the softmax that has this logit from the beginning."""

    @pytest.mark.parametrize("sinks", [[-3.0, 40.0], [-INF, 700.0]], ids=str)
    def test_is_the_softmax_with_the_logit_in_it(self, sinks):
        logits, values = randn(3, 2, 7), randn(3, 2, 7, 4, seed=1)
        sink_logits, results = torch.tensor(sinks, dtype=torch.float64), []
        dst = torch.tensor([3, 0, 3, 1, 0, 3, 1])
        for sink in (None, sink_logits):
            weights, lse = edge_softmax.softmax(logits, dst, 5, sink)
            out = torch.zeros(3, 2, 5, 4, dtype=torch.float64)
            results.append((out.index_add(2, dst, weights.unsqueeze(-1) * values), lse))
        has_in_edges = torch.tensor([True, True, False, True, False])
        out, lse = edge_softmax.add_sinks(*results[0], sink_logits, has_in_edges)
        # A logit minus 700 is rounded by half an ulp of 700, 6e-14, which is less than 1e-12 of each number.
        assert_each(out, results[1][0])
        assert_exact(lse, results[1][1])
        assert out[:, :, [2, 4]].abs().max() == 0
        assert bool((lse[:, :, [2, 4]] == -INF).all())

    def test_gradients(self):
        sinks, out = randn(2).requires_grad_(), randn(1, 2, 3, 4, seed=1).requires_grad_()
        lse = randn(1, 2, 3, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(edge_softmax.add_sinks, (out, lse, sinks, torch.tensor(True)))
        empty = torch.full((1, 2, 3), -INF, dtype=torch.float64, requires_grad=True)
        sinks = torch.tensor([0.3, -INF], dtype=torch.float64, requires_grad=True)
        result, result_lse = edge_softmax.add_sinks(out, empty, sinks, torch.tensor(False))
        gradients = torch.autograd.grad(result.sum() + result_lse.sum(), (out, empty, sinks))
        assert [gradient.abs().max().item() for gradient in gradients] == [0.0, 0.0, 0.0]


def compile_anew(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("program", [torch.func.vmap, compile_anew])
def test_programs_that_must_not_depend_on_numbers(program):
    """The softmax of mapped and compiled programs is right, although no number can be read in them."""
    logits, dst = randn(2, 3, 6), torch.tensor([0, 2, 2, 0, 3, 2])
    output = program(lambda x: edge_softmax.softmax(x, dst, 4, check=False)[0])(logits)
    assert_each(output, loop_softmax(logits, dst, 4)[0])
