"""Native sparse attention equals its formula, computed densely in float64."""

from __future__ import annotations

import pytest
import torch

from gnn_attention.rotary import Rotary
from gnn_attention.selectors import NativeSparseAttention
from tests.selectors.test_selectors import is_largest, randn
from tests.support.bounds import assert_exact

N, WIDTH, DIM = 50, 12, 4


def make_layer(kv_heads=2):
    torch.manual_seed(0)
    sizes = {"block": 8, "stride": 4, "selected": 6, "top": 4, "initial": 1, "local": 2, "window": 9}
    layer = NativeSparseAttention(WIDTH, 4, kv_heads, DIM, **sizes).double()
    torch.nn.init.normal_(layer.places)
    return layer


def softmax(q, k, mask):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT * DIM**-0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)


def compute_formula(layer, x):
    heads, groups = layer.heads, layer.heads.num_kv_heads
    expand_heads = lambda v: v.repeat_interleave(4 // groups, 1)  # noqa: E731
    q, k, v = (torch.einsum("btw,hwd->bhtd", x, W) for W in (heads.W_Q, heads.W_K, heads.W_V))
    branch_kv = [[torch.einsum("btw,hwd->bhtd", x, W) for W in pair] for pair in layer.senders]
    starts = range(0, N - 8 + 1, 4)
    pooled_kv = [
        torch.stack([net((y[:, :, s : s + 8] + place).flatten(2)) for s in starts], 2)
        for net, y, place in zip(layer.pools, branch_kv[0], layer.places, strict=True)
    ]
    dst, src = torch.arange(N).view(-1, 1), torch.arange(N)
    mask = torch.tensor([[s + 7 <= t for s in starts] for t in range(N)])
    weights = softmax(q, pooled_kv[0], mask)
    # A pooled block counts for a block to select by the strides that they share.
    shares = torch.tensor(
        [[len({*range(s, s + 8)} & {*range(b, b + 6)}) / 4 for b in range(0, N, 6)] for s in starts]
    )
    importance = weights.view(2, groups, -1, *weights.shape[2:]).sum(2) @ shares.double()
    block = torch.arange(9)
    is_fixed = (block < 1) | (block > dst // 6 - 2)
    importance = importance.masked_fill(is_fixed, torch.inf).masked_fill(block > dst // 6, -torch.inf)
    selection = is_largest(importance, 4)
    selection = selection.repeat_interleave(6, -1)[..., :N].repeat_interleave(4 // groups, 1) & (src <= dst)
    rotate = lambda y: Rotary().turn(y, src)  # noqa: E731
    window = (src <= dst) & (dst - src < 9)
    branches = [
        weights @ expand_heads(pooled_kv[1]),
        softmax(rotate(q), rotate(branch_kv[1][0]), selection) @ expand_heads(branch_kv[1][1]),
        softmax(rotate(q), rotate(k), window) @ expand_heads(v),
    ]
    gates = layer.gates(x).sigmoid().view(2, N, 3, 4)
    z = sum(gates[:, :, c].mT.unsqueeze(-1) * out for c, out in enumerate(branches))
    return torch.einsum("bhtd,hdw->btw", z, heads.W_O)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_the_three_branches_and_their_gates(kv_heads):
    """Outputs and gradients of input and parameters equal the formula; a group of heads chooses together."""
    layer, x = make_layer(kv_heads), randn(2, N, WIDTH, seed=4, grad=True)
    output, expected = layer(x), compute_formula(layer, x)
    assert_exact(output, expected)
    leaves = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in (output, expected)]
    assert_exact(*gradients)
    assert all(bool(gradient.any()) for gradient in gradients[0])


def test_few_tokens_have_no_pooled_block():
    layer, x = make_layer(), randn(1, 5, WIDTH)
    longer_output = layer(randn(1, N, WIDTH))
    assert_exact(layer(x), layer(torch.cat([x, x], 1))[:, :5])
    assert longer_output.shape == (1, N, WIDTH)
