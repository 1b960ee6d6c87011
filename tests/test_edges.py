"""The arithmetic of one edge against plain loops over receivers in float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from support.bounds import assert_exact, assert_sum
from torch import Tensor

from gnn_attention import edges
from gnn_attention.verify.measure import summation_bound

INF = torch.inf


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_each(found: Tensor, true: Tensor) -> None:
    """Every number for itself, small ones too: 1e-12 of its own size."""
    same = found == true
    assert_exact(torch.where(same, 1.0, found / true), torch.ones_like(true))


def loop_softmax(
    logits: Tensor, dst: Tensor, num_dst: int, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each leading position and receiver: torch.softmax over its own in-edges (and the sink), thrown away
    again.
    """
    weights = torch.zeros_like(logits)
    lse = torch.full((*logits.shape[:-1], num_dst), -INF, dtype=logits.dtype)
    sinks = None if sink_logits is None else sink_logits.to(logits).expand(logits.shape[:-1])
    for lead in product(*map(range, logits.shape[:-1])):
        for receiver in range(num_dst):
            mine = (dst == receiver).nonzero().flatten()
            if not len(mine):
                continue
            total = (
                logits[lead][mine]
                if sinks is None
                else torch.cat([logits[lead][mine], sinks[lead].reshape(1)])
            )
            lse[(*lead, receiver)] = torch.logsumexp(total, 0)
            if not bool((total == -INF).all()):
                weights[lead][mine] = torch.softmax(total, 0)[: len(mine)]
    return weights, lse


DST = {
    "mixed": (torch.tensor([3, 0, 3, 1, 0, 3]), 5),  # receivers 2 and 4 hear nobody
    "one edge": (torch.tensor([1]), 3),
    "one receiver": (torch.tensor([0, 0, 0]), 1),
    "no edges": (torch.tensor([], dtype=torch.int64), 4),
    "no receivers": (torch.tensor([], dtype=torch.int64), 0),
}
each_list = pytest.mark.parametrize(("dst", "num_dst"), DST.values(), ids=DST)


class TestSmall:
    @pytest.mark.parametrize(
        ("dtype", "wide"),
        [
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_accumulation_dtype(self, dtype, wide):
        assert edges.accumulation_dtype(dtype) == wide

    def test_logit_is_the_scaled_dot_product(self):
        q, k = seeded(2, 3, 5, 4), seeded(2, 3, 5, 4, seed=1)
        result = edges.logit(q, k, 0.3)
        assert result.shape == (2, 3, 5)
        by_hand = [
            0.3 * sum(a * b for a, b in zip(one, other, strict=True))
            for one, other in zip(q.view(-1, 4).tolist(), k.view(-1, 4).tolist(), strict=True)
        ]
        assert_exact(result, torch.tensor(by_hand, dtype=torch.float64).view(2, 3, 5))

    @pytest.mark.parametrize(
        ("kv_heads", "heads"), [(1, 4), (2, 6), (3, 3), (1, 2)]
    )  # the last: as many samples as heads
    def test_query_head_h_is_served_by_its_group(self, kv_heads, heads):
        x = seeded(2, kv_heads, 3, 4)
        wide = edges.per_query_head(x, heads)
        assert wide.shape == (2, heads, 3, 4)
        for h in range(heads):
            assert torch.equal(wide[:, h], x[:, h // (heads // kv_heads)])


class TestSoftmax:
    @each_list
    @pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
    def test_against_the_loop(self, dst, num_dst, lead):
        logits = 3 * seeded(*lead, len(dst))
        weights, lse = edges.softmax(logits, dst, num_dst)
        expected, expected_lse = loop_softmax(logits, dst, num_dst)
        assert weights.shape == logits.shape
        assert lse.shape == (*lead, num_dst)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)

    @each_list
    @pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
    def test_with_sinks(self, dst, num_dst, lead):
        """One more logit for each head; who hears nobody still has weight none and lse -inf."""
        logits, sinks = 3 * seeded(*lead, len(dst)), 2 * seeded(*lead[-1:], seed=1)
        weights, lse = edges.softmax(logits, dst, num_dst, sinks)
        expected, expected_lse = loop_softmax(logits, dst, num_dst, sinks)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)
        deaf = [receiver for receiver in range(num_dst) if receiver not in dst.tolist()]
        assert bool((lse[..., deaf] == -INF).all())

    def test_a_sink_of_zero_is_softmax_plus_one(self):
        """exp(l) / (1 + sum exp(l)), worked by hand."""
        weights, lse = edges.softmax(
            torch.tensor([0.0, math.log(2)], dtype=torch.float64), torch.tensor([0, 0]), 1, torch.tensor(0.0)
        )
        assert_exact(weights, torch.tensor([0.25, 0.5]).double())
        assert_exact(lse, torch.tensor([math.log(4)], dtype=torch.float64))

    def test_a_sink_of_minus_infinity_is_no_sink(self):
        dst, num_dst = DST["mixed"]
        logits = seeded(6)
        for ours, theirs in zip(
            edges.softmax(logits, dst, num_dst, torch.tensor(-INF)),
            edges.softmax(logits, dst, num_dst),
            strict=True,
        ):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("sink", [None, torch.tensor(0.7)], ids=["no sink", "sink"])
    def test_logits_of_minus_infinity(self, sink):
        """Receiver 0: one of two; receiver 1: all. Weights 0 there, and finite gradients."""
        logits = torch.tensor([1.0, -INF, -INF, -INF, 2.0], dtype=torch.float64, requires_grad=True)
        dst = torch.tensor([0, 0, 1, 1, 2])
        weights, lse = edges.softmax(logits, dst, 3, sink)
        expected, expected_lse = loop_softmax(logits.detach(), dst, 3, sink)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse)
        (weights * torch.arange(1.0, 6)).sum().backward(retain_graph=True)
        assert torch.isfinite(logits.grad).all()
        lse[lse > -INF].sum().backward()
        assert torch.isfinite(logits.grad).all()

    @pytest.mark.parametrize("shift", [1e4, -1e4, 700.0])
    def test_large_logits_neither_overflow_nor_vanish(self, shift):
        dst, num_dst = DST["mixed"]
        shifted = seeded(6) + shift
        weights, lse = edges.softmax(shifted, dst, num_dst)
        # shifted back without a rounding: the sum has fewer digits after the point than float64 holds near 0
        expected, expected_lse = loop_softmax(shifted - shift, dst, num_dst)
        assert_each(weights, expected)
        assert_exact(lse, expected_lse + shift)

    def test_a_large_sink_takes_everything(self):
        weights, lse = edges.softmax(torch.zeros(2), torch.tensor([0, 0]), 1, torch.tensor(1e4))
        assert weights.tolist() == [0.0, 0.0]
        assert lse.tolist() == [1e4]

    def test_seventy_thousand_equal_logits(self):
        """Sums are as wide as the logits that come in."""
        n = 70_000
        weights, lse = edges.softmax(torch.zeros(n), torch.zeros(n, dtype=torch.int64), 1)
        # the sum of n ones is exact below 2^24: what is left is the rounding of 1 / n, and that of the
        # logarithm (3 at most)
        assert_sum(weights.double().sum(), 1.0, terms=2, magnitude=1.0)
        assert_sum(lse, torch.tensor([math.log(n)], dtype=torch.float64), terms=4, magnitude=math.log(n))

    @pytest.mark.parametrize("bad", [torch.nan, INF])
    @pytest.mark.parametrize("sink", [None, torch.tensor(0.5)], ids=["no sink", "sink"])
    def test_a_bad_logit_reaches_its_receiver_alone(self, bad, sink):
        """Forward and backward: the other receivers have what they had, bit for bit."""
        dst, num_dst = DST["mixed"]
        clean = seeded(6).requires_grad_()
        poisoned = clean.detach().clone().index_fill(0, torch.tensor([2]), bad).requires_grad_()
        results = [edges.softmax(logits, dst, num_dst, sink) for logits in (clean, poisoned)]
        (weights, lse), (bad_weights, bad_lse) = results
        hit, spared = dst == 3, dst != 3
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
        """Both results, receivers without in-edges included; their lse of -inf is left out, it has no
        derivative.
        """
        dst, num_dst = DST["mixed"]
        inputs = [seeded(2, 6).requires_grad_()] + [seeded(2, seed=1).requires_grad_()] * sink

        def call(logits, sinks=None):
            weights, lse = edges.softmax(logits, dst, num_dst, sinks)
            return weights, lse[..., dst.unique()]

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)

    def test_gradients_of_the_deaf_are_zero(self):
        """A loss over all of lse's finite part and all weights leaves the sink of a head that nobody uses at
        0.
        """
        sinks = torch.zeros(1, requires_grad=True)
        weights, _ = edges.softmax(torch.zeros(1, 0), torch.tensor([], dtype=torch.int64), 3, sinks)
        weights.sum().backward()
        assert sinks.grad.tolist() == [0.0]

    def test_order_of_the_edges_does_not_matter(self):
        dst, num_dst = DST["mixed"]
        logits, turn = seeded(6), torch.tensor([5, 2, 0, 1, 4, 3])
        weights, lse = edges.softmax(logits, dst, num_dst)
        turned, same = edges.softmax(logits[turn], dst[turn], num_dst)
        assert_each(turned, weights[turn])
        assert_exact(same, lse)

    def test_a_receiver_has_weights_that_sum_to_one(self):
        dst, num_dst = DST["mixed"]
        weights, _ = edges.softmax(seeded(6), dst, num_dst)
        sums = torch.zeros(num_dst, dtype=torch.float64).index_add(0, dst, weights)
        assert_exact(sums, torch.tensor([1.0, 1, 0, 1, 0]).double())


class TestWeightsFromLse:
    @each_list
    def test_they_are_those_of_the_softmax(self, dst, num_dst):
        logits = seeded(2, len(dst))
        weights, lse = edges.softmax(logits, dst, num_dst)
        assert_each(edges.weights_from_lse(logits, dst, lse), weights)

    def test_some_edges_only(self):
        dst, num_dst = DST["mixed"]
        logits, some = seeded(2, 6), torch.tensor([5, 1])
        weights, lse = edges.softmax(logits, dst, num_dst)
        assert_each(edges.weights_from_lse(logits[:, some], dst[some], lse), weights[:, some])

    def test_nothing_heard_is_weight_zero(self):
        logits = torch.full((2,), -INF, requires_grad=True)
        weights = edges.weights_from_lse(logits, torch.tensor([0, 0]), torch.tensor([-INF]))
        assert weights.tolist() == [0.0, 0.0]
        weights.sum().backward()
        assert logits.grad.tolist() == [0.0, 0.0]

    def test_nan_is_carried(self):
        weights = edges.weights_from_lse(
            torch.tensor([0.0, 0.0]), torch.tensor([0, 1]), torch.tensor([torch.nan, 0.0])
        )
        assert weights[0].isnan()
        assert weights[1] == 1


class TestMerge:
    dst, num_dst = torch.tensor([3, 0, 3, 1, 0, 3, 0]), 5  # 2 and 4 hear nobody

    def part(self, logits: Tensor, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over some of the edges: out [heads, dst, dim] and lse [heads, dst]."""
        weights, lse = edges.softmax(logits[:, chosen], self.dst[chosen], self.num_dst)
        out = torch.zeros(logits.shape[0], self.num_dst, values.shape[-1], dtype=values.dtype)
        return out.index_add(1, self.dst[chosen], weights.unsqueeze(-1) * values[:, chosen]), lse

    @pytest.mark.parametrize("first", [[0, 1, 2], [], [0, 1, 2, 3, 4, 5, 6], [3], [0, 2, 5]], ids=str)
    def test_two_disjoint_halves_are_the_whole(self, first):
        """Receivers that hear in one half only, in both, in none; and an empty half."""
        logits, values = 3 * seeded(2, 7), seeded(2, 7, 3, seed=1)
        first = torch.tensor(first, dtype=torch.int64)
        second = torch.tensor([e for e in range(7) if e not in first.tolist()], dtype=torch.int64)
        out, lse = edges.merge(*self.part(logits, values, first), *self.part(logits, values, second))
        expected, expected_lse = self.part(logits, values, torch.arange(7))
        assert_exact(out, expected)
        assert_exact(lse, expected_lse)
        assert bool((out[:, [2, 4]] == 0).all())
        assert bool((lse[:, [2, 4]] == -INF).all())

    def test_many_parts_in_any_order(self):
        logits, values = 3 * seeded(2, 7), seeded(2, 7, 3, seed=1)
        parts = [self.part(logits, values, torch.tensor([e])) for e in (4, 0, 6, 3, 1, 5, 2)]
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = edges.merge(out, lse, *part)
        expected, expected_lse = self.part(logits, values, torch.arange(7))
        assert_exact(out, expected)
        assert_exact(lse, expected_lse)

    def test_it_commutes(self):
        logits, values = seeded(2, 7), seeded(2, 7, 3, seed=1)
        a, b = self.part(logits, values, torch.arange(3)), self.part(logits, values, torch.arange(3, 7))
        for one, other in zip(edges.merge(*a, *b), edges.merge(*b, *a), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("shift", [1e4, -1e4])
    def test_large_normalisers(self, shift):
        logits, values = 3 * seeded(2, 7), seeded(2, 7, 3, seed=1)
        parts = [
            self.part(logits + shift, values, chosen) for chosen in (torch.arange(3), torch.arange(3, 7))
        ]
        out, _ = edges.merge(*parts[0], *parts[1])
        # a share has the roundings of two lse, each the sum of a logarithm and a largest logit, which is
        # rounded itself
        assert_sum(
            out,
            self.part(logits, values, torch.arange(7))[0],
            4,
            1e4 * float(values.abs().max()),
            torch.float64,
        )

    def test_shares_sum_to_one(self):
        """Up to some roundings, however large lse is; ``e^(lse_a - lse)`` has the rounding of lse."""
        lse_a, lse_b = (300 + 2 * seeded(2, 500, seed=seed).float() for seed in (0, 1))
        ones = torch.ones(2, 500, 1)
        out, _ = edges.merge(ones, lse_a, ones, lse_b)
        # the sum of both masses, its reciprocal, a product with it, the sum of both shares
        assert_sum(out, ones, terms=4, magnitude=1.0)

    def test_a_share_too_small_to_change_the_sum_has_its_gradient(self):
        """Of lse, in float32, up to some roundings: ``s_b (g . out_b - g . out)``."""
        given = [seeded(4, 3), torch.zeros(4), seeded(4, 3, seed=1), -20 - seeded(4, seed=2).abs()]
        slopes = []
        for dtype in (torch.float32, torch.float64):
            inputs = [x.to(dtype).requires_grad_() for x in (y.float() for y in given)]
            slopes.append(torch.autograd.grad(edges.merge(*inputs)[0].sum(), inputs[3])[0].double())
        # e^lse_b (2 roundings) times the difference of two sums of 3, which are weighed by shares of their
        # own
        reach = given[3].float().double().exp() * (given[0].abs().sum(-1) + given[2].abs().sum(-1))
        assert ((slopes[0] - slopes[1]).abs() <= summation_bound(16, reach, torch.float32)).all()

    def test_gradcheck(self):
        inputs = [seeded(2, 3, seed=0), seeded(2, seed=1), seeded(2, 3, seed=2), seeded(2, seed=3)]
        assert torch.autograd.gradcheck(edges.merge, [x.requires_grad_() for x in inputs])
        assert torch.autograd.gradgradcheck(edges.merge, inputs)

    def test_gradients_where_one_half_is_empty(self):
        """The empty half's out is 0 and has weight 0; the other passes its gradient on unchanged."""
        out_a, lse_a = seeded(1, 3).requires_grad_(), seeded(1, seed=1).requires_grad_()
        out_b = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        lse_b = torch.full((1,), -INF, dtype=torch.float64, requires_grad=True)
        out, lse = edges.merge(out_a, lse_a, out_b, lse_b)
        (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward(retain_graph=True)
        lse.sum().backward()
        assert out_a.grad.tolist() == [[1.0, 2.0, 3.0]]
        assert lse_a.grad.tolist() == [1.0]
        assert out_b.grad.tolist() == [[0.0, 0.0, 0.0]]
        assert lse_b.grad.tolist() == [0.0]

    def test_gradients_where_both_halves_are_empty_are_finite(self):
        """A receiver that hears nobody in either half, beside one that does."""
        logits = seeded(2, 7).requires_grad_()
        values = seeded(2, 7, 3, seed=1).requires_grad_()
        parts = [self.part(logits, values, chosen) for chosen in (torch.arange(3), torch.arange(3, 7))]
        out, lse = edges.merge(*parts[0], *parts[1])
        (out.sum() + lse[:, [0, 1, 3]].sum()).backward()
        assert torch.isfinite(logits.grad).all()
        assert torch.isfinite(values.grad).all()
        whole = [x.detach().clone().requires_grad_() for x in (logits, values)]
        out, lse = self.part(*whole, torch.arange(7))
        (out.sum() + lse[:, [0, 1, 3]].sum()).backward()
        assert_exact(logits.grad, whole[0].grad)
        assert_exact(values.grad, whole[1].grad)

    def test_gradients_of_given_empty_halves_are_finite(self):
        lse_a, lse_b = (torch.tensor([-INF, 0.5], dtype=torch.float64, requires_grad=True) for _ in range(2))
        outs = [torch.zeros(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        out, lse = edges.merge(outs[0], lse_a, outs[1], lse_b)
        (out.sum() + lse[1]).backward()
        assert lse_a.grad.tolist() == [0.0, 0.5]
        assert lse_b.grad.tolist() == [0.0, 0.5]
        assert all(torch.isfinite(part.grad).all() for part in outs)

    def test_nan_stays_in_its_row(self):
        out_a, out_b = seeded(3, 2), seeded(3, 2, seed=1)
        lse_a, lse_b = seeded(3, seed=2), seeded(3, seed=3)
        clean, clean_lse = edges.merge(out_a, lse_a, out_b, lse_b)
        out_a[1], lse_a[1] = torch.nan, torch.nan
        out, lse = edges.merge(out_a, lse_a, out_b, lse_b)
        assert out[1].isnan().all()
        assert lse[1].isnan()
        assert torch.equal(out[[0, 2]], clean[[0, 2]])
        assert torch.equal(lse[[0, 2]], clean_lse[[0, 2]])


class TestAddSinks:
    """A finished result with one more logit, against the softmax that had it from the beginning."""

    @pytest.mark.parametrize("sinks", [[0.0, 0.0], [-3.0, 40.0], [-INF, 700.0]], ids=str)
    def test_is_the_softmax_with_the_logit_in_it(self, sinks):
        logits, values, sink_logits = (
            seeded(3, 2, 7),
            seeded(3, 2, 7, 4, seed=1),
            torch.tensor(sinks, dtype=torch.float64),
        )
        dst, num_dst = torch.tensor([3, 0, 3, 1, 0, 3, 1]), 5  # receivers 2 and 4 hear nobody
        results = []
        for sink in (None, sink_logits):
            weights, lse = edges.softmax(logits, dst, num_dst, sink)
            out = torch.zeros(3, 2, num_dst, 4, dtype=torch.float64).index_add(
                2, dst, weights.unsqueeze(-1) * values
            )
            results.append((out, lse))
        out, lse = edges.add_sinks(*results[0], sink_logits, torch.tensor([True, True, False, True, False]))
        # a logit less 700 is rounded by half an ulp of 700, which is 6e-14: 1e-12 of each number is more than
        # both ways have
        assert_each(out, results[1][0])
        assert_exact(lse, results[1][1])
        assert out[:, :, [2, 4]].abs().max() == 0
        assert bool((lse[:, :, [2, 4]] == -INF).all())

    def test_large_normalisers(self):
        """What is left of the output has some roundings, not those of lse."""
        lse, sinks = 300 + 2 * seeded(1, 2, 500).float(), 300 + seeded(2, seed=1).float()
        out, _ = edges.add_sinks(torch.ones(1, 2, 500, 1), lse, sinks, torch.tensor(True))
        exact = (lse.double() - sinks.double().view(1, 2, 1)).sigmoid()
        # the exponential (2), the sum of both masses, its reciprocal, a product with it, and one for the
        # output
        assert ((out.squeeze(-1) - exact).abs() <= summation_bound(6, exact, torch.float32)).all()

    def test_a_sink_too_weak_to_change_the_sum_has_its_gradient(self):
        """In float32, up to some roundings."""
        sinks = torch.tensor([-20.0, -30.0], requires_grad=True)
        out, _ = edges.add_sinks(torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1), sinks, torch.tensor(True))
        (slope,) = torch.autograd.grad(out.sum(), sinks)
        # two shares (5 roundings each, as above), their product, and that with the gradient
        exact = sinks.detach().double().exp()
        assert ((slope + exact).abs() <= summation_bound(13, exact, torch.float32) + exact.square()).all()

    def test_gradients(self):
        """Right where somebody is heard, finite and 0 where nobody is."""
        sinks, out, lse = (
            seeded(2).requires_grad_(),
            seeded(1, 2, 3, 4, seed=1).requires_grad_(),
            seeded(1, 2, 3, seed=2),
        )
        assert torch.autograd.gradcheck(
            edges.add_sinks, (out, lse.requires_grad_(), sinks, torch.tensor(True))
        )
        deaf = torch.full((1, 2, 3), -INF, dtype=torch.float64, requires_grad=True)
        sinks = torch.tensor([0.3, -INF], dtype=torch.float64, requires_grad=True)
        result, result_lse = edges.add_sinks(out, deaf, sinks, torch.tensor(False))
        found = torch.autograd.grad(result.sum() + result_lse.sum(), (out, deaf, sinks))
        assert [part.abs().max().item() for part in found] == [0.0, 0.0, 0.0]

    def test_in_edges_that_weigh_nothing(self):
        """They leave the sink alone in the softmax; and nothing at all if the sink weighs nothing too."""
        lse = torch.full((1, 2, 1), -INF)
        out, found = edges.add_sinks(
            torch.zeros(1, 2, 1, 1), lse, torch.tensor([0.5, -INF]), torch.tensor(True)
        )
        assert out.flatten().tolist() == [0.0, 0.0]
        assert found.flatten().tolist() == [0.5, -INF]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_outputs_stay_half(self, dtype):
        sinks = torch.zeros(2, dtype=dtype)
        out, lse = edges.add_sinks(
            torch.ones(1, 2, 3, 4, dtype=dtype), torch.zeros(1, 2, 3), sinks, torch.tensor(True)
        )
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert bool((out == 0.5).all())
