"""Programs with several query heads of a group give the same results, in chunks too."""

import pytest
import torch
from support import kernel_cases
from support.bounds import assert_exact
from support.kernel_cases import CASES, Case, check_against_the_reference, mark_slow

import gnn_attention as ga
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.kernels import rows
from gnn_attention.score_mods import alibi, alibi_slopes, chain, softcap

FEW = kernel_cases.listed(6, 5, 0.3)


def every_option(heads, kv_heads, widths, batch=1):
    """Return a case with all options but a learned table, which has two heads."""
    mod = chain(softcap(2.0), alibi(alibi_slopes(heads)))
    options = {"score_mod": mod, "bias": (heads,), "closed": True, "sinks": True, "dropout": 0.3}
    return Case(graph=FEW, heads=(heads, kv_heads), widths=widths, batch=batch, **options)


PROGRAMS = {
    "a group of eight": (every_option(8, 1, (20, 64)), 8),
    "two groups of two": (every_option(4, 2, (128, 24), batch=2), 2),
    "three groups of three": (every_option(9, 3, (20, 5)), 3),
    "half a group": (every_option(4, 1, (20, 20)), 2),
    "a learned table": (CASES["everything"], 2),
}


@pytest.mark.parametrize("name", mark_slow(PROGRAMS, ["two groups of two"]))
def test_every_option(name, device, monkeypatch):
    """Every pass takes this number of heads of a group, in several steps of two edges."""
    case, members = PROGRAMS[name]
    configs = {key: config._replace(num_edges=2) for key, config in rows.CONFIGS.items()}
    monkeypatch.setattr(rows, "CONFIGS", configs)
    monkeypatch.setattr(rows, "choose_num_members", lambda *sizes: members)
    check_against_the_reference(case, device)


@pytest.mark.parametrize("name", mark_slow(["two groups of two", "half a group"], ["half a group"]))
def test_long_rows_in_chunks(name, device, monkeypatch):
    """Rows are long on both sides, and the workspace holds one sample and key/value head at a time."""
    monkeypatch.setattr(csr, "MIN_CHUNK_SIZE", 2)
    monkeypatch.setattr(rows, "MAX_WORKSPACE_BYTES", 64)
    test_every_option(name, device, monkeypatch)


def test_what_one_head_of_a_group_may_not_see_another_may(device, monkeypatch):
    """A NaN in a query, and a key with an infinite logit for one head, give the bits of separate heads."""
    q, k, v = (x.detach() for x in Case(graph=FEW, heads=(2, 1), batch=1).inputs(torch.float64, device)[:3])
    q[0, 1, 3, 0] = torch.nan
    k[0, 0, 2, 0] = torch.inf
    q[0, :, :, 0].abs_().mul_(torch.tensor([[1.0], [-1.0]], device=device))
    results = []
    for members in (1, 2):
        monkeypatch.setattr(rows, "choose_num_members", lambda *sizes, members=members: members)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ga.attend(*inputs, FEW, backend="rows")
        results.append([out, torch.autograd.grad(out, inputs, torch.ones_like(out))[0]])
    assert torch.isfinite(results[0][1]).any()
    assert not torch.isfinite(results[0][0]).all()
    for expected, output in zip(*results, strict=True):
        assert torch.equal(expected.isnan(), output.isnan())
        assert_exact([output.nan_to_num()], [expected.nan_to_num()])
