"""Blocks of hubs, done in chunks, and the careful launch, which only flagged programs do."""

from dataclasses import replace

import pytest
import torch
from support import kernel_cases
from support.bounds import assert_exact
from support.kernel_cases import CASES, LEARNED, Case, attended, gradients, parameters

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import chunks, row_windows, tiles
from gnn_attention.backends.gpu.kernels import _common, rows

HUBS = patterns.window(140, 4, causal=False) | patterns.global_tokens(140, [3], causal=False)
MAKERS = {"windows": row_windows.windows_of, "tiles": tiles.tiles_of}


def each_kind(*quick):
    """Those that are not quick run with the slow ones."""
    kinds = ("windows 32", "tiles 64", "tiles 128")
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def form_of(kind, graph):
    name, _, size = kind.partition(" ")
    return MAKERS[name](graph, torch.device("cpu"), int(size))


def spoiled(form, token, which, times):
    """Of each program of a form for receivers, whether it multiplies by a NaN in k (1) or v (2) of a token.

    A NaN in k comes to the edges of a token alone, one in v to every pair that is visited.
    """
    for block, lo, hi, *_ in form.items.tolist():
        visits = bool((form.other[lo:hi] == token // form.across).any())
        rows = torch.arange(block * form.size, (block + 1) * form.size).view(times, -1)
        attends = HUBS.mask()[rows.clamp(max=139), token].any(1) & (rows[:, 0] < 140)
        yield [visits and (which == 2 or bool(each)) for each in attends]


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 64 tokens, added two at a time, with room for those of few heads in a workspace."""
    monkeypatch.setattr(chunks, "CHUNK", 64)
    monkeypatch.setattr(rows, "TOGETHER", 2)
    monkeypatch.setattr(rows, "WORKSPACE", 2**16)


@pytest.mark.parametrize("kind", each_kind("windows 32"))
@pytest.mark.parametrize("case", ["groups of two", "everything"])
def test_hubs_in_chunks(kind, case, device, short_chunks, monkeypatch):
    """Output, lse and gradients are those of the formula in float64; on both sides there are long blocks."""
    for side in form_of(kind, HUBS):
        assert side.chunks >= 3
        assert 3 in side.long
    options = CASES[case]
    case = Case(HUBS, (2, 1), (24, 5), options.score_mod, options.bias, dropout=options.dropout, batch=1)
    LEARNED.to(device)
    backend = kernel_cases.use(kind, monkeypatch)
    given = case.inputs(torch.float64, device)
    inputs = parameters(case, given)
    found, true = (attended(case, given, name) for name in (backend, "reference"))
    assert_exact(found, true)
    assert_exact(gradients(*found, inputs), gradients(*true, inputs))


@pytest.fixture
def launches(monkeypatch):
    """The flags that each careful launch was given; none of its other programs may write anything."""
    found, launch = [], _common.launch

    def watched(kernel, grid, arguments, constants, warps, stages):
        if not constants.get("CAREFUL"):
            return launch(kernel, grid, arguments, constants, warps, stages)
        (flags,) = (x for x in arguments if isinstance(x, torch.Tensor) and x.dtype == torch.int8)
        found.append(flags.view(grid[1], grid[0]).clone())
        before = [x.clone() for x in arguments if isinstance(x, torch.Tensor)]
        if not flags.any():
            results = [x for x in arguments[3:8] if isinstance(x, torch.Tensor) and x.is_floating_point()]
            for x in results:
                x.fill_(7.0)
        launch(kernel, grid, arguments, constants, warps, stages)
        if not flags.any():
            assert all((x == 7.0).all() for x in results)
            for x, old in zip((x for x in arguments if isinstance(x, torch.Tensor)), before, strict=True):
                x.copy_(old)
        return None

    monkeypatch.setattr(_common, "launch", watched)
    return found


@pytest.mark.parametrize("kind", each_kind("windows 32"))
def test_careful_programs_leave_at_once_where_nothing_is_flagged(
    kind, device, launches, short_chunks, monkeypatch
):
    """One careful launch forward and one for the gradient of q, and what they were given is unchanged."""
    backend, graph = kernel_cases.use(kind, monkeypatch), replace(HUBS)
    given = Case(graph=HUBS, batch=1).inputs(torch.float32, device)[:3]
    out = ga.attend(*given, graph, backend=backend)
    torch.autograd.grad(out.sum(), given)
    assert len(launches) == 2
    assert not any(flags.any() for flags in launches)


@pytest.mark.parametrize("kind", each_kind("windows 32"))
@pytest.mark.parametrize("which", [1, 2])
def test_only_blocks_that_visit_a_nan_are_flagged(kind, which, device, launches, short_chunks, monkeypatch):
    """Those with the token or its tile, chunks too; receivers that do not attend to it have the same bits."""
    backend, graph = kernel_cases.use(kind, monkeypatch), replace(HUBS)
    given = [x.detach() for x in Case(graph=HUBS, batch=1).inputs(torch.float32, device)[:3]]
    clean = ga.attend(*given, graph, backend=backend)
    given[which] = given[which].clone()
    given[which][..., 100, 2] = torch.nan
    found, info = ga.attend(*given, graph, backend=backend, return_info=True)
    receivers, _ = form_of(kind, HUBS)
    programs = launches[-1].shape[1]
    want = torch.tensor(list(spoiled(receivers, 100, which, programs // len(receivers.items))))
    assert not launches[0].any()
    assert 0 < want.sum() < want.numel()
    assert torch.equal(launches[-1].cpu(), want.flatten().expand(2, -1).to(torch.int8))
    hit = HUBS.mask(device)[:, 100]
    assert found[:, :, hit].isnan().all()
    assert info.lse[:, :, hit].isnan().all()
    assert torch.equal(found[:, :, ~hit], clean[:, :, ~hit])
