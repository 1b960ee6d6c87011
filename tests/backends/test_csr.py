"""The edge kernels of the backend ``rows`` equal the formula, with heads folded together and one by one."""

import pytest
import torch
from support.bounds import assert_exact, assert_results, formula
from support.inputs import qkv

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.edge_ops import csr_primitives

WAYS = {"folded": 10**9, "sample by sample": 1000, "head by head": 0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(csr_primitives, "MAX_EDGES", WAYS[request.param])
    return request.param


def make_mask(name):
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(3)) < 0.3
    if name == "isolated rows and columns":
        mask[[0, 7]], mask[:, [2, 29]] = False, False
    if name == "hub":
        mask = torch.zeros(80, 80, dtype=torch.bool)
        mask[:, 3], mask[5] = True, True
    return {"one token": torch.ones(1, 1, dtype=torch.bool), "no edges": mask & False}.get(name, mask)


@pytest.mark.parametrize("name", ["irregular", "isolated rows and columns", "hub", "one token", "no edges"])
@pytest.mark.parametrize("size", [1.0, 40.0])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(2, 5), (4, 8), (1, 1)])
def test_both_passes_are_those_of_the_formula(name, size, kv_heads, value_dim, way):
    """Small logits need no shift, and large logits are shifted for each receiver."""
    mask = make_mask(name)
    inputs = qkv(*mask.shape, kv_heads=kv_heads, value_dim=value_dim)
    out, info = ga.attend(*inputs, ga.convert.from_mask(mask), scale=size, backend="rows", return_info=True)
    results = []
    for x, lse in ((out, info.lse), formula(*inputs, mask, size)):
        total = x.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
        results.append((x, lse, *torch.autograd.grad(total, inputs)))
    assert_results(*results)


def test_sums_over_the_group_and_over_many_edges_are_wide(way):
    """A value gets 4096 float16 gradients of 1: a sum in float16 would stop at 2048."""
    q, k, v = qkv(1024, 1, heads=4, kv_heads=1, dtype=torch.float16, batch=1)
    out = ga.attend(q, k, v, patterns.cross(1024, 1), backend="rows")
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert set(dv.flatten().tolist()) == {4096.0}


def test_a_nan_of_one_head_does_not_stay_in_the_buffers():
    q, k, v = (x.detach() for x in qkv(20, 30, heads=3, kv_heads=3))
    graph = ga.convert.from_mask(make_mask("irregular"))
    expected = ga.attend(q, k, v, graph, backend="rows")
    q[0, 0], v[0, 1] = torch.nan, torch.inf
    output = ga.attend(q, k, v, graph, backend="rows")
    assert_exact(output[0, 2], expected[0, 2])
    assert_exact(output[1], expected[1])
