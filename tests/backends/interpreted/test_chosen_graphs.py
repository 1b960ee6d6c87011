"""Graphs that vary by sample, head or both, by index or rule: one launch computes all slices."""

import pytest
import torch
from support.bounds import assert_exact
from support.kernel_cases import mark_slow, record_launches

import gnn_attention as ga
from gnn_attention.backends.gpu.kernels import _row_passes

BATCH, HEADS, KV_HEADS, DST, SRC = 2, 2, 1, 4, 5
AXES = {"the same": (), "by head": (HEADS,), "by sample": (BATCH, 1), "by both": (BATCH, HEADS)}


def drawn_index(axes, entries=3):
    """Draw senders in any order, some of them twice, -1 for none, and an isolated receiver."""
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(-1, SRC, (*axes, DST, entries), generator=rng)
    index[..., 3, :] = -1
    return index


def mask_of(index):
    """Set the edges of an index one by one."""
    mask = torch.zeros(*index.shape[:-1], SRC + 1, dtype=torch.bool)
    return mask.scatter_(-1, index.masked_fill(index < 0, SRC), True)[..., :SRC]


def drawn_inputs(device):
    rng = torch.Generator().manual_seed(1)
    shapes = (HEADS, DST, 4), (KV_HEADS, SRC, 4), (KV_HEADS, SRC, 3)
    drawn = [torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64) for shape in shapes]
    return [x.to(device).requires_grad_() for x in drawn]


def dense_output(mask, q, k, v):
    """Compute the formula over all pairs."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = (q @ k.mT / 2).masked_fill(~mask, -torch.inf)
    weights = torch.where(mask.any(-1, keepdim=True), logits, 0.0).softmax(-1).where(mask, 0.0)
    return weights @ v


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_chosen_graph_is_that_of_its_mask(axes, device, monkeypatch):
    """Outputs and gradients agree with grouped heads, by one launch of the forward pass."""
    index, (q, k, v) = drawn_index(axes), drawn_inputs(device)
    launches = record_launches(monkeypatch)
    graph = ga.TokenGraph.from_indices(index.to(device), SRC, coalesce=True)
    out = ga.attend(q, k, v, graph, backend="rows")
    assert launches == [_row_passes.forward]
    expected = dense_output(mask_of(index).to(device), q, k, v)
    results = [[x, *torch.autograd.grad(x.square().sum(), (q, k, v))] for x in (out, expected)]
    assert_exact(*results)


RULES = {"by head": {"heads": HEADS}, "by sample": {"batch": BATCH}}
RULES["by both"] = RULES["by head"] | RULES["by sample"]


def every_third(b, h, dst, src):
    return (dst - src - h - 2 * b) % 3 == 0


@pytest.mark.parametrize("name", mark_slow(RULES, ["by both"]))
def test_a_rule_that_differs(name, device, monkeypatch):
    sizes = RULES[name]
    launches = record_launches(monkeypatch)
    graph = ga.TokenGraph.from_rule(every_third, DST, SRC, **sizes)
    q, k, v = drawn_inputs(device)
    out = ga.attend(q, k, v, graph, backend="rows")
    assert launches == [_row_passes.forward]
    b, h, dst, src = torch.meshgrid(*map(torch.arange, (BATCH, HEADS, DST, SRC)), indexing="ij")
    b, h = b * ("batch" in sizes), h * ("heads" in sizes)
    expected = dense_output(every_third(b, h, dst, src).to(device), q, k, v)
    results = [[x, *torch.autograd.grad(x.square().sum(), (q, k, v))] for x in (out, expected)]
    assert_exact(*results)
