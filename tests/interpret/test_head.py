"""Circuits of single heads against dense float64 formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import randn, redraw
from torch import Tensor

from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention import model as lm
from gnn_attention.interpret.circuits import TopTokens, each, of, top_tokens
from gnn_attention.rotary import Rotary

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "width is not heads times dim": {"head_dim": 5, "value_dim": 2},
    "one wide head": {"num_heads": 1, "head_dim": 20},
    "biases, grouped": {"bias": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "value_dim": 2},
    "two sources": {"source_width": 7, "bias": True},
}
FORMS = {
    "standard": lambda heads: heads,
    "factored, sender": lambda heads: FactoredHeads.of(heads, side="sender"),
    "layer of factored": lambda heads: MessagePassingAttention(FactoredHeads.of(heads)),
}


def make_heads(**kind: Any) -> StandardHeads:
    return redraw(StandardHeads(**{"width": 12, "num_heads": 3, **kind}))


def make_block() -> lm.Block:
    return redraw(lm.Block(lm.Config(9, width=12, num_heads=3, head_dim=4, mlp_width=8)))


def weights_of(heads: StandardHeads, head: int) -> list[Tensor]:
    """Return W_Q and W_O of one query head, and W_K and W_V of its group."""
    shared = head // (heads.num_heads // heads.num_kv_heads)
    matrices = (heads.W_Q[head], heads.W_K[shared], heads.W_V[shared], heads.W_O[head])
    return [matrix.detach() for matrix in matrices]


def states_outside(space: Any, *shape: int) -> Tensor:
    """Draw states orthogonal to the subspace."""
    return space.reject(randn(*shape, space.width, seed=9))


def head_weights(layer: MessagePassingAttention, x: Any, graph: Any, head: int) -> Tensor:
    """Return the weights of one head."""
    _, (_, weights) = layer(x, graph, return_attention_weights=True)
    return weights[:, head].detach()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_matrices(kind, form):
    """W_P = W_Q W_K^T and W_M = W_V W_O have the rank of the head, and no gradients."""
    heads = make_heads(**kind)
    for head, circuit in enumerate(each(form(heads))):
        W_Q, W_K, W_V, W_O = weights_of(heads, head)
        assert_exact(circuit.pattern.full(), W_Q @ W_K.mT)
        assert_exact(circuit.message.full(), W_V @ W_O)
        assert circuit.pattern.rank() == min(heads.head_dim, heads.width, heads.source_width)
        assert circuit.message.rank() == min(W_V.shape[1], heads.width, heads.source_width)
        assert not circuit.pattern.left.requires_grad
        assert not circuit.message.right.requires_grad
        assert circuit.pattern_at(-3) is circuit.pattern_at(5) is circuit.pattern


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_subspaces(kind):
    """The columns of W_Q, W_K, W_V and the rows of W_O span all that matters (seed S1.24)."""
    heads, graph = make_heads(**kind), patterns.cross(5, 6)
    layer, form = MessagePassingAttention(heads), FactoredHeads.of(heads)
    x_dst, x_src = randn(5, heads.width), randn(6, heads.source_width, seed=1)
    for head, circuit in enumerate(each(heads)):
        receiver, sender, value = circuit.reads_as_receiver, circuit.reads_as_sender, circuit.reads_as_value
        W_Q, W_K, W_V, W_O = weights_of(heads, head)
        for space, matrix in ((receiver, W_Q), (sender, W_K), (value, W_V), (circuit.writes, W_O.mT)):
            assert_exact(space.projector(), matrix @ torch.linalg.pinv(matrix))
        weights, sent = head_weights(layer, (x_src, x_dst), graph, head), form.messages(x_src[None])[0, head]
        assert_exact(head_weights(layer, (x_src, x_dst + states_outside(receiver, 5)), graph, head), weights)
        assert_exact(head_weights(layer, (x_src + states_outside(sender, 6), x_dst), graph, head), weights)
        assert_exact(form.messages((x_src + states_outside(value, 6))[None])[0, head].detach(), sent.detach())
        assert_exact(circuit.writes.project(sent.detach()), sent.detach())
        read = receiver.project(randn(5, heads.width, seed=9))
        assert (head_weights(layer, (x_src, x_dst + read), graph, head) - weights).abs().max() > 1e-3


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(base=30.0, interleaved=True)])
@pytest.mark.parametrize("gain", [None, randn(12, seed=5)], ids=["", "gain"])
def test_rotary_logits_by_distance(rotary, gain):
    """The logit from rotated queries and keys, such as of dst = 7 and src = 4, is x W_P(3) x'^T."""
    heads = make_heads(num_heads=4, num_kv_heads=2, head_dim=6, rotary=rotary)
    x, channels = randn(10, 12), torch.ones(12, dtype=torch.float64) if gain is None else gain
    q, (k, _) = heads.receive((channels * x)[None])[0], heads.send((channels * x)[None])
    for head, circuit in enumerate(each(heads, gain)):
        for dst, src in ((7, 4), (4, 7), (0, 0), (9, 0)):
            logit = q[head, dst] @ k[0, head // 2, src]
            assert_exact(x[dst] @ circuit.pattern_at(dst - src).full() @ x[src], logit.detach())
        with pytest.raises(ValueError, match=rf"head {head} of StandardHeads.* is rotary.*use pattern_at\("):
            _ = circuit.pattern


def test_a_block_brings_its_gain():
    """The circuit reads states before the norm, each divided by its root mean square."""
    layer, x = make_block(), randn(1, 5, 12)
    unit = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    form, normed = FactoredHeads.of(layer.attention.heads), layer.attention_norm(x)
    for head, circuit in enumerate(each(layer)):
        assert_exact(unit @ circuit.message.full(), form.messages(normed)[:, head].detach())
        expected = form.patterns(normed)[0, head] @ normed[0].mT
        assert_exact(unit[0] @ circuit.pattern.full() @ unit[0].mT, expected.detach())


def test_top_tokens_against_sorted_products():
    vectors, embedding = randn(2, 3, 12), randn(30, 12, seed=1)
    best = top_tokens(vectors, embedding, k=5)
    values, tokens = (vectors @ embedding.mT).sort(descending=True)
    assert torch.equal(best.tokens, tokens[..., :5])
    assert_exact(best.values, values[..., :5])
    half = torch.eye(3, dtype=torch.bfloat16)
    assert isinstance(top_tokens(torch.ones(3), half, k=1), TopTokens)


def test_refusals():
    two_widths, gain = make_heads(source_width=7), torch.ones(12)
    without_output = of(StandardHeads.from_arrays(*(randn(2, 6, 3, seed=s) for s in range(3))), 0)
    assert without_output.reads_as_value.dim == 3
    ones = torch.ones
    cases = [
        (partial(of, MergedHeads(12, 3, head_dim=4), 0), TypeError, r"source must be .*heads_of\(model"),
        (partial(of, make_heads(), 3), IndexError, "head must be"),
        (partial(of, make_heads(), 0, ones(5)), ValueError, r"gain must be a float tensor \[12\]"),
        (lambda: of(make_heads(qk_norm=True), 2).pattern, ValueError, "qk_norm have no pattern matrix"),
        (partial(of, two_widths, 0, gain), ValueError, "gain needs heads of one width"),
        (partial(of, make_block(), 0, gain), ValueError, "gain must not be passed with a Block"),
        (lambda: without_output.message, ValueError, "without W_O have values but no messages"),
        (lambda: without_output.writes, ValueError, r"without W_O .*: they write no states"),
        (partial(top_tokens, ones(4), ones(9, 3)), ValueError, r"must fit embedding .* \[4\] and \[9, 3\]"),
        (partial(top_tokens, ones(3), ones(9, 3), k=10), ValueError, "k must be at most 9, the size of"),
    ]
    assert_refusals(cases)
