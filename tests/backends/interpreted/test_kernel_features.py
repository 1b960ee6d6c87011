"""Features of edges in the kernel of ``rows``: values that are not finite, empty axes, and derivatives."""

from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import randn
from support.kernel_cases import CASES, GRAPH, LEARNED, Case, run_attention
from torch.autograd import forward_ad

import gnn_attention as ga
from gnn_attention.backends.gpu import csr
from gnn_attention.score_mods import softcap


def test_a_feature_that_is_not_finite_reaches_no_logit_without_a_map_of_keys(device):
    """Only its channel of the output is infinite; lse is that of the call without features."""
    case = Case(features=3, maps=("edge_value",), batch=1)
    inputs = [None if x is None else x.detach() for x in case.inputs(torch.float64, device)]
    inputs[5][2, 0] = torch.inf
    results = [run_attention(case, inputs, name) for name in ("rows", "message_passing")]
    assert torch.isfinite(results[0][1]).any()
    for output, expected in zip(*results, strict=True):
        assert torch.equal(output.isfinite(), expected.isfinite())
        assert_exact([output.nan_to_num()], [expected.nan_to_num()])


@pytest.mark.parametrize("mod", [None, softcap(2.0)])
def test_a_query_that_is_nan_gives_features_no_gradient(mod, device):
    """Its receiver has a NaN for lse, so it does not count in the backward pass."""
    case = Case(features=3, maps=("edge_value",), batch=1, score_mod=mod)
    inputs = [None if x is None else x.detach() for x in case.inputs(torch.float64, device)]
    inputs[0][:, :, 1] = torch.nan
    attr = inputs[5] = inputs[5].requires_grad_()
    out, _ = run_attention(case, inputs, "rows")
    counted = torch.arange(GRAPH.num_dst, device=device) != 1
    (grad,) = torch.autograd.grad(out[:, :, counted].sum(), attr)
    assert torch.isfinite(grad).all()
    assert not grad[GRAPH.edge_index[1].to(device) == 1].any()


def test_lse_of_long_rows_needs_no_values(device, monkeypatch):
    monkeypatch.setattr(csr, "MIN_CHUNK_SIZE", 2)
    q, k, v, *_ = (None if x is None else x.detach() for x in Case().inputs(torch.float64, device))
    infos = [
        ga.attend(q, k, value, replace(GRAPH), backend="rows", return_info=True)[1]
        for value in (v, v[..., :0])
    ]
    assert_exact(*([info.lse] for info in infos))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_features_change_nothing(dtype, device):
    q, k, v, *_ = (None if x is None else x.detach() for x in Case().inputs(dtype, device))
    attr, maps = q.new_empty(GRAPH.num_edges, 0), k.new_empty(1, 0, 8)
    options = {"edge_attr": attr, "edge_key": maps, "edge_value": maps}
    results = [ga.attend(q, k, v, GRAPH, backend="rows", **x) for x in (options, {})]
    assert torch.equal(*results)


def test_derivatives_of_features_alone_leave_the_kernel(device):
    """Forward mode, and autograd around ``torch.func.grad``, whose inputs are other tensors."""
    case = CASES["features"]
    LEARNED.to(device)
    inputs = [None if x is None else x.detach() for x in case.inputs(torch.float64, device)]
    attr, results = inputs[5], []
    for name in ("rows", "message_passing"):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(attr, randn(*attr.shape, seed=1).to(device))
            out, _ = run_attention(case, [*inputs[:5], dual, *inputs[6:]], name)
            results.append([forward_ad.unpack_dual(out).tangent])
        leaf = attr.clone().requires_grad_()

        def loss(q, leaf=leaf, name=name):
            return run_attention(case, [q, *inputs[1:5], leaf, *inputs[6:]], name)[0].sin().sum()

        results[-1].append(torch.autograd.grad(torch.func.grad(loss)(inputs[0]).square().sum(), leaf)[0])
    assert_exact(*results)
