"""Latent heads equal the formula of the paper, which absorbs no matrix, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import randn
from support.refusals import assert_refusals
from torch import Tensor, nn

from gnn_attention import MessagePassingAttention, patterns
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.rotary import Rotary

SIZES = {"width": 12, "num_heads": 4, "content_dim": 5, "rotary_dim": 6, "latent_dim": 7, "value_dim": 3}
KINDS = {
    "plain": {},
    "query latent": {"query_dim": 8},
    "biases": {"query_dim": 8, "bias": True},
    "interleaved": {"rotary": Rotary(base=50.0, interleaved=True)},
    "frequencies": {"rotary": Rotary(frequencies=(1.0, 0.3, 0.01)), "bias": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def make(kind: dict) -> LatentHeads:
    """Make heads with random matrices, norms and biases."""
    heads = LatentHeads(**SIZES, **kind).double()
    for seed, (name, parameter) in enumerate(heads.named_parameters()):
        spread = 0.5 if parameter.dim() == 1 else 1.3 * parameter.shape[-2] ** -0.5
        parameter.data = randn(*parameter.shape, seed=seed) * spread + ("norm" in name)
    return heads


def apply_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Multiply each token by the rotation matrix of its position."""
    return torch.stack([x[..., t, :] @ rotary.matrix(t, x.shape[-1]) for t in range(x.shape[-2])], dim=-2)


def paper_formula(heads: LatentHeads, x_dst: Tensor, x_src: Tensor, mask: Tensor) -> Tensor:
    """Compute equations 9 to 19 of DeepSeek-V2, where each head has its own keys and values."""

    def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
        return y if bias is None else y + bias

    u = x_dst if heads.W_DQ is None else apply_norm(add_bias(x_dst @ heads.W_DQ, heads.b_DQ), heads.q_norm)
    c = apply_norm(add_bias(x_src @ heads.W_DKV, heads.b_DKV), heads.kv_norm)
    k_R = rotate(add_bias(x_src @ heads.W_KR, heads.b_KR), heads.rotary)
    update = torch.zeros_like(x_dst)
    for h in range(heads.num_heads):
        q = torch.cat([u @ heads.W_UQ[h], rotate(u @ heads.W_QR[h], heads.rotary)], dim=-1)
        k = torch.cat([c @ heads.W_UK[h], k_R], dim=-1)
        logits = q @ k.mT / math.sqrt(SIZES["content_dim"] + SIZES["rotary_dim"])
        # An isolated receiver has weights of 0.
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
        update = update + weights @ (c @ heads.W_UV[h]) @ heads.W_O[h]
    return add_bias(update, heads.b_O)


@each_kind
@pytest.mark.parametrize("backend", ["message_passing", "reference", "dense", "auto"])
def test_the_absorbed_form_is_the_papers_formula(kind, backend):
    heads, x, graph = make(kind), randn(2, 9, 12), patterns.strict_causal(9)
    update = MessagePassingAttention(heads, backend=backend)(x, graph)
    assert_exact(update, paper_formula(heads, x, x, graph.mask()))


def test_what_is_refused():
    heads = LatentHeads(**SIZES)
    cases = [
        (lambda: LatentHeads(**SIZES | {"rotary_dim": 5}), ValueError, "rotary_dim must be even, got 5"),
        (lambda: LatentHeads(**SIZES, rotary=1.0), TypeError, "rotary must be a .*Rotary or None, got float"),
        (lambda: heads.receive(torch.zeros(1, 4, 11)), ValueError, r"x must be \[B, T, 12\] in"),
        (lambda: heads.send(torch.zeros(1, 4, 12).double()), ValueError, r"in torch\.float64; convert it"),
    ]
    assert_refusals(cases)


@each_kind
def test_pattern_and_message_matrix(kind):
    """The two matrices give the logits and the update without any other parameter."""
    heads, x = make({**kind, "bias": False}), randn(1, 9, 12)
    graph = patterns.full(9)
    q, (k, _) = heads.receive(x), heads.send(x)
    logits = q @ k.mT
    u = x if heads.W_DQ is None else apply_norm(x @ heads.W_DQ, heads.q_norm)
    senders = torch.cat([heads.latents(x), x @ heads.W_KR], dim=-1)
    for dst, src in [(0, 0), (7, 2), (2, 7), (8, 8)]:
        W_P = heads.pattern_matrix(dst - src)
        assert W_P.shape == (4, u.shape[-1], 13)
        assert W_P.rank().max() <= heads.head_dim
        assert_exact((u[:, dst] @ W_P.full() @ senders[0, src]).flatten(), logits[0, :, dst, src])
    weights = torch.softmax(logits * heads.scale, dim=-1)
    update = (weights @ heads.latents(x).unsqueeze(1) @ heads.message_matrix().full()).sum(1)
    assert_exact(update, MessagePassingAttention(heads)(x, graph))
