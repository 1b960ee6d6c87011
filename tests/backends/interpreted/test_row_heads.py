"""Rows with several heads in one program: the same results, and which sizes take them."""

from functools import partial

import pytest
import torch
from support import kernel_cases
from support.bounds import assert_exact
from support.kernel_cases import CASES, LEARNED, Case, attended, gradients, parameters, with_slow

import gnn_attention as ga
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.kernels import _common, rows
from gnn_attention.backends.gpu.kernels.rows import Together
from gnn_attention.score_mods import alibi, alibi_slopes, chain, softcap

FEW = kernel_cases.listed(6, 5, 0.3)


def everything(heads, kv_heads, widths, batch=1):
    """All options but a learned table, which has two heads."""
    mod = chain(alibi(alibi_slopes(heads)), softcap(2.0))
    options = {"score_mod": mod, "bias": (heads,), "closed": True, "sinks": True, "dropout": 0.3}
    return Case(graph=FEW, heads=(heads, kv_heads), widths=widths, batch=batch, **options)


TAKEN = {
    "a group of eight": (everything(8, 1, (20, 64)), Together(1, 8)),
    "eight heads": (everything(8, 8, (64, 20)), Together(8, 1)),
    "two groups of two": (everything(4, 2, (128, 24), batch=2), Together(2, 2)),
    "three groups of three": (everything(9, 3, (20, 5)), Together(3, 3)),
    "half a group": (everything(4, 1, (20, 20)), Together(1, 2)),
    "a learned table": (CASES["everything"], Together(1, 2)),
}


def take(taken, monkeypatch):
    """Every pass takes so many heads; two edges at a time, so that there are several steps."""
    configs = {key: config._replace(edges=2) for key, config in rows.CONFIGS.items()}
    monkeypatch.setattr(rows, "CONFIGS", configs)
    monkeypatch.setattr(rows, "together", lambda *sizes: taken)


def check(case, device):
    """Output, lse and all gradients are those of the reference in float64."""
    LEARNED.to(device)
    given = case.inputs(torch.float64, device)
    inputs = parameters(case, given)
    found, true = (attended(case, given, name) for name in ("rows", "reference"))
    assert_exact(found, true)
    assert_exact(gradients(*found, inputs), gradients(*true, inputs))


@pytest.mark.parametrize("name", with_slow(TAKEN, ["two groups of two"]))
def test_every_option(name, device, monkeypatch):
    case, taken = TAKEN[name]
    take(taken, monkeypatch)
    check(case, device)


@pytest.mark.parametrize("name", with_slow(["two groups of two", "half a group"], ["half a group"]))
def test_long_rows_in_chunks(name, device, monkeypatch):
    """On both sides, where the workspace has room for the heads of one sample at a time."""
    case, taken = TAKEN[name]
    take(taken, monkeypatch)
    monkeypatch.setattr(csr, "CHUNK", 2)
    monkeypatch.setattr(rows, "WORKSPACE", 64)
    check(case, device)


def test_what_one_head_of_a_group_may_not_see_another_may(device, monkeypatch):
    """NaN in one query, and a key that makes an infinite logit for one head alone: bits as one by one."""
    q, k, v = (x.detach() for x in Case(graph=FEW, heads=(2, 1), batch=1).inputs(torch.float64, device)[:3])
    q[0, 1, 3, 0] = torch.nan
    k[0, 0, 2, 0] = torch.inf
    q[0, :, :, 0].abs_().mul_(torch.tensor([[1.0], [-1.0]], device=device))
    found = []
    for taken in (Together(1, 1), Together(1, 2)):
        monkeypatch.setattr(rows, "together", partial(lambda taken, *sizes: taken, taken))
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ga.attend(*given, FEW, backend="rows")
        found.append([out, torch.autograd.grad(out, given, torch.ones_like(out))[0]])
    assert torch.isfinite(found[0][1]).any()
    assert not torch.isfinite(found[0][0]).all()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_exact([other.nan_to_num()], [one.nan_to_num()])


HANDED = {"a group of eight": TAKEN["a group of eight"], "a learned table": TAKEN["a learned table"]}
HANDED |= {"plain": (Case(graph=FEW, heads=(4, 2), widths=(20, 24)), Together(2, 1))}


@pytest.mark.parametrize(
    ("name", "most"), with_slow([(name, most) for name in HANDED for most in (2**28, 0)], [("plain", 2**28)])
)
def test_p_and_ds_are_handed_to_the_senders(name, most, device, monkeypatch):
    """Where they are small, in chunks too: the same gradients, by kernels that were told so."""
    case, taken = HANDED[name]
    take(taken, monkeypatch)
    monkeypatch.setattr(csr, "CHUNK", 4)
    monkeypatch.setattr(csr, "MOST_HANDED", most)
    launch, told = _common.launch, []

    def launched(kernel, grid, arguments, constants, *rest, **more):
        told.append(constants.get("HANDS"))
        return launch(kernel, grid, arguments, constants, *rest, **more)

    monkeypatch.setattr(_common, "launch", launched)
    check(case, device)
    assert (True in told, False in told) == (most > 0, most == 0)
