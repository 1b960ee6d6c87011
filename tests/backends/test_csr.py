"""The kernels over edges against dense attention in float64, and the lists that they read."""

from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact, assert_results, assert_rule, attention_truth, error, formula
from support.inputs import random_edges, scattered
from support.kernel_cases import lse_bound

import gnn_attention as ga
from gnn_attention import edge_softmax, patterns
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.cpu import csr_primitives
from gnn_attention.backends.cpu.csr import backward, forward
from gnn_attention.backends.plan.csr import edges_of, order_of, sorted_edges

SCALE = 0.4
WAYS = {"folded": 10**9, "head by head": 0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(csr_primitives, "MOST_EDGES", WAYS[request.param])
    return request.param


def masks(name):
    rng = torch.Generator().manual_seed(3)
    mask = torch.rand(20, 30, generator=rng) < 0.3
    if name == "isolated rows and columns":
        mask[[0, 7]], mask[:, [2, 29]] = False, False
    if name == "hub":
        mask = torch.zeros(40, 40, dtype=torch.bool)
        mask[:, 3], mask[5] = True, True
    return {"one token": torch.ones(1, 1, dtype=torch.bool), "no edges": mask & False}.get(name, mask)


def inputs(mask, heads=4, kv_heads=2, dim=8, value_dim=5, dtype=torch.float64, size=1.0, batch=2):
    """q, k, v, grad_out and grad_lse; token-major in memory, as projections give them."""
    rng, (num_dst, num_src) = torch.Generator().manual_seed(0), mask.shape
    shapes = (num_dst, heads, dim), (num_src, kv_heads, dim), (num_src, kv_heads, value_dim)
    shapes = (*shapes, (num_dst, heads, value_dim))
    drawn = [torch.randn(batch, *s, generator=rng, dtype=torch.float64).transpose(1, 2) for s in shapes]
    q, k, v, grad = (x.to(dtype) for x in (drawn[0] * size, drawn[1] * size, *drawn[2:]))
    return q, k, v, grad, torch.randn(batch, heads, num_dst, generator=rng, dtype=torch.float64)


def listed(mask):
    dst, src = mask.nonzero().t()
    return sorted_edges(src, dst, mask.shape[1], mask.shape[0])[0]


def empty_like(*tensors):
    return [torch.full_like(x, torch.nan) for x in tensors]


def run(mask, q, k, v, grad, grad_lse, add=False):
    wide = edge_softmax.accumulation_dtype(q.dtype)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], torch.nan, dtype=wide)
    forward(q, k, v, listed(mask), SCALE, out, lse)
    delta = (out.to(wide) * grad.to(wide)).sum(-1) - grad_lse.to(wide)
    grads = empty_like(q, k, v)
    backward(grad, delta, (q, k, v), lse, listed(mask), SCALE, grads, add=False)
    return out, lse, *grads


def dense(mask, *given):
    q, k, v = (x.detach().double().requires_grad_() for x in given[:3])
    out, lse = formula(q, k, v, mask, SCALE)
    total = (out * given[3]).sum() + (lse * given[4])[:, :, mask.any(1)].sum()
    return out, lse, *torch.autograd.grad(total, (q, k, v))


@pytest.mark.parametrize("name", ["irregular", "isolated rows and columns", "hub", "one token", "no edges"])
@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 2, 5), (3, 3, 8), (6, 1, 1)])
def test_both_passes_are_those_of_the_formula(name, size, heads, kv_heads, value_dim, way):
    """Logits close together (one shift for all) and far apart (a shift for each receiver)."""
    mask = masks(name)
    given = inputs(mask, heads, kv_heads, value_dim=value_dim, size=size)
    assert_results(run(mask, *given), dense(mask, *given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, way):
    """Half types come in and go out; sums are float32. Within the rule of verify."""
    mask = masks("isolated rows and columns")
    q, k, v, grad, grad_lse = inputs(mask, dtype=dtype)
    out, lse, *grads = found = run(mask, q, k, v, grad, grad_lse * 0)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype]
    truth = attention_truth(q, k, v, mask, grad, SCALE).for_backend(BACKENDS["rows"])
    assert_rule(out, dict(zip("qkv", grads, strict=True)), truth)
    true_lse = dense(mask, q, k, v, grad, grad_lse)[1]
    assert error(lse, true_lse) <= lse_bound(q, k, SCALE, true_lse)


def test_sums_over_the_group_and_over_many_edges_are_wide(way):
    """4096 equal fp16 gradients of 1 into one value: half sums would stop at 2048."""
    mask = torch.ones(1024, 1, dtype=torch.bool)
    q, k, v, grad, grad_lse = inputs(mask, heads=4, kv_heads=1, dtype=torch.float16, batch=1)
    *_, dv = run(mask, q, k, v, torch.ones_like(grad), grad_lse)
    assert dv.flatten().tolist() == [4096.0] * 5


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("columns", [0, 11, 30])
def test_two_lists_of_disjoint_edges_merge_to_the_whole(columns, size, way):
    """Also where one, or both, leave a receiver without in-edges; gradients add up with the lse of both."""
    mask = masks("isolated rows and columns")
    left = mask & (torch.arange(30) < columns)
    q, k, v, grad, grad_lse = given = inputs(mask, size=size)
    out, lse = torch.empty_like(grad), torch.empty_like(grad_lse)
    parts = [listed(left), replace(listed(mask & ~left), fresh=False)]
    for part in parts:
        forward(q, k, v, part, SCALE, out, lse)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for part in parts:
        backward(grad, (out * grad).sum(-1) - grad_lse, (q, k, v), lse, part, SCALE, grads)
    assert_results((out, lse, *grads), dense(mask, *given))


def test_a_nan_of_one_head_does_not_stay_in_the_buffers():
    mask = masks("irregular")
    q, k, v, grad, grad_lse = inputs(mask, heads=3, kv_heads=3)
    clean = run(mask, q, k, v, grad, grad_lse)
    q[0, 0], v[0, 1] = torch.nan, torch.inf
    found = run(mask, q, k, v, grad, grad_lse)
    for x, wanted in zip(found, clean, strict=True):
        assert_exact(x[0, 2], wanted[0, 2])
        assert_exact(x[1], wanted[1])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [1.0, 8.0])
def test_receivers_of_infinite_lse_contribute_nothing(value, size, way):
    """The gradients are those without their edges, whatever is in them and in a sender of theirs alone."""
    mask = masks("irregular")
    mask[:, 29] = torch.arange(20) == 3
    q, k, v, grad, grad_lse = inputs(mask, size=size)
    out, lse, *_ = run(mask, q, k, v, grad, grad_lse)
    delta = (out * grad).sum(-1) - grad_lse
    lse[:, :, 3] = value
    wanted, found = empty_like(q, k, v), empty_like(q, k, v)
    rest = mask.clone()
    rest[3] = False
    backward(grad, delta, (q, k, v), lse, listed(rest), SCALE, wanted, add=False)
    q[:, :, 3], grad[:, :, 3], delta[:, :, 3] = torch.inf, torch.nan, torch.nan
    k[:, :, 29], v[:, :, 29] = torch.inf, torch.nan
    backward(grad, delta, (q, k, v), lse, listed(mask), SCALE, found, add=False)
    assert_exact(found, wanted)


SIZES = {"irregular": (7, 5, 17), "wide": (40, 3, 60), "no edges": (4, 3, 0), "no tokens": (0, 0, 0)}


@pytest.mark.parametrize(("num_src", "num_dst", "count"), SIZES.values(), ids=SIZES)
def test_rows_columns_and_places_agree_with_the_pairs(num_src, num_dst, count):
    """Read back by loops: in-edges of each receiver, out-edges of each sender, the order of the caller."""
    src, dst = random_edges(num_dst, num_src, count)
    found, order = sorted_edges(src, dst, num_src, num_dst)
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    ptr, out_ptr = found.ptr.tolist(), found.out_ptr.tolist()
    assert (len(ptr), len(out_ptr)) == (num_dst + 1, num_src + 1)
    for i in range(num_dst):
        assert found.src[ptr[i] : ptr[i + 1]].tolist() == sorted(s for s, d in pairs if d == i)
    for j in range(num_src):
        assert found.out_dst[out_ptr[j] : out_ptr[j + 1]].tolist() == sorted(d for s, d in pairs if s == j)
    places = found.out_position.long()
    assert found.dst[places].tolist() == found.out_dst.tolist()
    assert found.src[places].tolist() == sorted(src.tolist())
    listed_pairs = list(zip(found.src.tolist(), found.dst.tolist(), strict=True))
    assert [pairs[place] for place in order.tolist()] == listed_pairs


def test_lists_of_graphs():
    """In the order of edge_index, which is the caller's; cached; int32. Varying graphs have none."""
    cpu, graph, rule = torch.device("cpu"), scattered(8, 9, 30), patterns.window(9, 3)
    found = edges_of(graph, cpu)
    assert not torch.equal(order_of(graph, cpu), torch.arange(30))
    assert torch.equal(graph.edge_index[:, order_of(graph, cpu)], torch.stack([found.src, found.dst]).long())
    assert torch.equal(order_of(rule, cpu), torch.arange(rule.num_edges))
    assert edges_of(rule, cpu).src is edges_of(rule, cpu).src
    assert found.src.dtype == torch.int32
    with pytest.raises(ValueError, match="differs by head"):
        edges_of(ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 5, heads=2), cpu)
