"""Results over disjoint sets of in-edges joined in one, against the softmax over all edges."""

import pytest
import torch
from support.bounds import assert_exact, assert_sum

import gnn_attention as ga
from gnn_attention.distributed.merge_lse import merged
from gnn_attention.verify.measure import summation_bound

FIRSTS = (0, 2, 1)
ROWS = ((0, 5), (2, 5), (1, 3))
NUM_DST = 6


def drawn(*, dtype=torch.float64, seed=0):
    """Three results for some of six receivers each; the last is in none, the fifth isolated in the second."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for start, stop in ROWS:
        size = (2, 3, stop - start)
        out = torch.randn(*size, 4, generator=generator, dtype=torch.float64)
        lse = torch.randn(size, generator=generator, dtype=torch.float64)
        results.append((out.to(dtype), 3 * lse.to(ga.edge_softmax.accumulation_dtype(dtype))))
    results[1][0][:, :, -1] = 0
    results[1][1][:, :, -1] = -torch.inf
    return results


def flat(results):
    return [x.detach().clone().requires_grad_() for result in results for x in result]


def formula(results):
    """``out = sum_p e^lse_p out_p / sum_p e^lse_p``, written out over full columns."""
    mass, total = [], []
    for (start, stop), (out, lse) in zip(ROWS, results, strict=True):
        ends = start, NUM_DST - stop
        weight = torch.nn.functional.pad(lse.exp(), ends)
        total.append(weight)
        mass.append(weight.unsqueeze(-1) * torch.nn.functional.pad(out, (0, 0, *ends)))
    whole = sum(total)
    return sum(mass) / whole.masked_fill(whole == 0, 1.0).unsqueeze(-1), whole.log()


def pairs(tensors):
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def test_equal_to_the_sum_over_all_edges():
    results = []
    for rule in (lambda given: merged(given, FIRSTS, NUM_DST), formula):
        given = flat(drawn())
        out, lse = rule(pairs(given))
        loss = out.sin().sum() + (lse[:, :, :5] * torch.arange(5)).cos().sum()
        results.append([out, lse, *torch.autograd.grad(loss, given)])
    for mine, exact in zip(*results, strict=True):
        finite = exact.isfinite()
        assert torch.equal(mine[~finite], exact[~finite].nan_to_num(0.0, neginf=-torch.inf))
        assert_exact(mine[finite], exact[finite])


def test_equal_parts_have_no_gradient_of_lse():
    """``s (g . out_p - g . out)`` is 0 in theory: some roundings are left, not those of a large lse."""
    rng = torch.Generator().manual_seed(0)
    same, direction = (torch.randn(1, 1, 50, 8, generator=rng) for _ in range(2))
    given = flat([(same, 200 + 2 * torch.rand(1, 1, 50, generator=rng)) for _ in range(3)])
    out, _ = merged(pairs(given), [0, 0, 0], 50)
    slopes = torch.autograd.grad(out, given, direction)
    size = (direction * same).abs().sum(-1)
    # two sums of 8 products (9 roundings each), and the shares in ``out``: the sum of three masses (2), its
    # reciprocal, the product with it and with the 1, their sum (2)
    assert all((slope.abs() <= summation_bound(25, size, torch.float32)).all() for slope in slopes[1::2])


def test_numerical_derivatives():
    given = [x[:1, :1, :2].detach().clone().requires_grad_() for result in drawn()[:2] for x in result]

    def run(*tensors):
        return merged(pairs(tensors), [0, 1], 3)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_isolated_receivers():
    """0 and -inf, with finite gradients even where a NaN comes in: in no part, or isolated in all."""
    results = drawn()
    results[0][0][:, :, 4], results[0][1][:, :, 4] = 0, -torch.inf
    given = flat(results)
    out, lse = merged(pairs(given), FIRSTS, NUM_DST)
    assert (out[:, :, 4:] == 0).all()
    assert (lse[:, :, 4:] == -torch.inf).all()
    direction = torch.ones_like(out)
    direction[:, :, 4:] = torch.nan
    gradients = torch.autograd.grad(out, given, direction)
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[2][:, :, -1] == 0).all()


def test_a_nan_stays_with_its_receiver():
    results = drawn()
    for x in results[0]:
        x[:, :, 2] = torch.nan
    given = flat(results)
    out, lse = merged(pairs(given), FIRSTS, NUM_DST)
    wanted = [i == 2 for i in range(NUM_DST)]
    assert out.isnan().any(-1)[0, 0].tolist() == lse.isnan()[0, 0].tolist() == wanted
    gradients = torch.autograd.grad(out.nansum() + lse.nansum(), given, allow_unused=True)
    assert all(x.isfinite().all() for x in gradients[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Whatever that of the parts, the result is float32; their gradients are theirs."""
    results = drawn(dtype=dtype)
    out, lse = merged(results, FIRSTS, NUM_DST)
    exact, _ = formula([(a.double(), b.double()) for a, b in results])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    # a mass is an exponential (2) of a difference, rounded itself (at most 20 of lse); and 7 more as above
    assert_sum(out, exact, 30, max(float(part.double().abs().max()) for part, _ in results))
    given = flat(results)
    slopes = torch.autograd.grad(merged(pairs(given), FIRSTS, NUM_DST)[0].sum(), given)
    assert [slope.dtype for slope in slopes] == [x.dtype for x in given]
