"""Kernels on chosen graphs: empty rows, -1 anywhere, one sender for all, more entries than tokens."""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga

FORMS = ("triton-rows", "triton-windows", "triton-tiles")
BATCH, HEADS, DST, SRC = 2, 2, 7, 9


def index_of(case):
    index = torch.randint(-1, SRC, (BATCH, HEADS, DST, 4), generator=torch.Generator().manual_seed(0))
    if case == "more entries than tokens":
        index = index.repeat(1, 1, 1, 3)
    if case == "one sender for all":
        index[..., 0] = 5
    index[..., 3, :] = -1
    return index[0, 0] if case == "the same for all heads" else index


CASES = ["by sample and head", "the same for all heads", "more entries than tokens", "one sender for all"]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])]
)
@pytest.mark.parametrize("form", FORMS)
def test_chosen_graphs_are_those_of_their_mask(form, case, device):
    """Output and gradients, in float64, against the dense formula."""
    index, draw = index_of(case), torch.Generator().manual_seed(1)
    shapes = (HEADS, DST, 4), (1, SRC, 4), (1, SRC, 3)
    q, k, v = (
        torch.randn(BATCH, *shape, generator=draw, dtype=torch.float64).to(device).requires_grad_()
        for shape in shapes
    )
    mask = torch.zeros(*index.shape[:-1], SRC + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, index.masked_fill(index < 0, SRC), True)[..., :SRC].to(device)
    logits = (q @ k.mT / 2).masked_fill(~mask, -torch.inf)
    due = torch.where(mask.any(-1, keepdim=True), logits, 0.0).softmax(-1).where(mask, 0.0) @ v
    graph = ga.TokenGraph.from_indices(index.to(device), SRC, coalesce=True)
    out = ga.attend(q, k, v, graph, backend=form)
    results = [[x, *torch.autograd.grad(x.square().sum(), (q, k, v))] for x in (out, due)]
    assert_exact(*results)


@pytest.mark.parametrize("form", FORMS)
def test_chosen_blocks_are_those_of_their_mask(form, device):
    blocks = torch.tensor([[[0, -1], [1, 0]], [[0, -1], [1, -1]]])
    graph = ga.TokenGraph.from_block_indices(blocks, 4, DST, DST, causal=True)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, HEADS, DST, 4, generator=draw).double().to(device) for _ in range(3))
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, graph.mask(q.device))
    assert_exact(ga.attend(q, k, v, graph, backend=form), due)
