"""Circuits of single heads against dense float64 formulas, in every form of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import drawn, redrawn
from torch import Tensor, nn

from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.interpret.circuits.head import each, of
from gnn_attention.rotary import Rotary
from gnn_attention.verify.measure import EXACT

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "width is not heads times dim": {"head_dim": 5, "value_dim": 2},
    "one wide head": {"num_heads": 1, "head_dim": 20},
    "one key for all": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 3},
    "biases, grouped": {"bias": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "value_dim": 2},
    "two sources": {"source_width": 7, "bias": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FORMS = {
    "standard": lambda heads: heads,
    "factored, sender": lambda heads: FactoredHeads.of(heads, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender": lambda heads: MergedHeads.of(heads, side="sender"),
    "layer of factored": lambda heads: MessagePassingAttention(FactoredHeads.of(heads)),
    "layer of merged": lambda heads: MessagePassingAttention(MergedHeads.of(heads)),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def made(**kind: Any) -> StandardHeads:
    return redrawn(StandardHeads(**{"width": 12, "num_heads": 3, **kind}))


def block() -> lm.Block:
    return redrawn(lm.Block(lm.Config(9, width=12, num_heads=3, head_dim=4, mlp_width=8)))


def weights_of(heads: StandardHeads, head: int) -> dict[str, Tensor | None]:
    """The matrices of one query head, found by hand: its key and value head is the one of its group."""
    shared = head // (heads.num_heads // heads.num_kv_heads)
    rows = {"W_Q": head, "W_K": shared, "W_V": shared, "W_O": head, "b_Q": head, "b_K": shared, "b_V": shared}
    parts = {name: getattr(heads, name) for name in rows}
    return {name: None if part is None else part[rows[name]].detach() for name, part in parts.items()}


def outside(space: Any, *shape: int) -> Tensor:
    """States with no part in the subspace."""
    return space.reject(drawn(*shape, space.width, seed=9))


def attention(layer: MessagePassingAttention, x: Any, graph: Any, head: int) -> Tensor:
    """The weights of one head."""
    _, (_, weights) = layer(x, graph, return_attention_weights=True)
    return weights[:, head].detach()


@each_kind
@each_form
class TestEveryForm:
    def test_matrices_and_biases(self, kind, form):
        """W_P = W_Q W_K^T, W_M = W_V W_O; b_Q W_K^T, b_K W_Q^T, b_V W_O; no wider than the head."""
        heads = made(**kind)
        for head, circuit in enumerate(each(form(heads))):
            W = weights_of(heads, head)
            assert_exact(circuit.pattern.full(), W["W_Q"] @ W["W_K"].mT)
            assert_exact(circuit.message.full(), W["W_V"] @ W["W_O"])
            assert circuit.pattern.left.shape[1] <= max(heads.head_dim, heads.width)
            assert circuit.pattern.rank() == min(heads.head_dim, heads.width, heads.source_width)
            assert circuit.message.rank() == min(W["W_V"].shape[1], heads.width, heads.source_width)
            assert circuit.scale == heads.head_dim**-0.5
            assert not circuit.pattern.left.requires_grad
            assert not circuit.message.right.requires_grad
            assert circuit.pattern_at(-3) is circuit.pattern_at(5) is circuit.pattern
            if W["b_Q"] is None:
                assert circuit.b_P is circuit.b_S is circuit.b_M is None
                continue
            assert_exact(circuit.b_P, W["b_Q"] @ W["W_K"].mT)
            assert_exact(circuit.b_S, W["b_K"] @ W["W_Q"].mT)
            assert_exact(circuit.b_M, W["b_V"] @ W["W_O"])

    def test_patterns_messages_and_logits(self, kind, form):
        """Vectors of any leading axes; logits up to the product of biases, the same for all in-edges."""
        heads = made(**kind)
        x_dst, x_src = drawn(2, 5, heads.width), drawn(2, 6, heads.source_width, seed=1)
        near, far = FactoredHeads.of(heads), FactoredHeads.of(heads, side="sender")
        for head, circuit in enumerate(each(form(heads))):
            assert_exact(circuit.patterns(x_dst), near.patterns(x_dst)[:, head])
            assert_exact(circuit.patterns(x_src, side="sender"), far.patterns(x_src)[:, head])
            assert_exact(circuit.messages(x_src), near.messages(x_src)[:, head])
            assert_exact(circuit.messages(x_src[0, 3]), near.messages(x_src)[0, head, 3])
            W, zero = weights_of(heads, head), torch.zeros((), dtype=torch.float64)
            q = x_dst[0] @ W["W_Q"] + (zero if W["b_Q"] is None else W["b_Q"])
            k = x_src[0] @ W["W_K"] + (zero if W["b_K"] is None else W["b_K"])
            logits = q @ k.mT * circuit.scale
            shared = logits - circuit.patterns(x_dst[0]) @ x_src[0].mT * circuit.scale
            assert_exact(shared.std(dim=1), zero.expand(5), largest=float(logits.abs().max()))

    def test_subspaces(self, kind, form):
        """Spanned by the columns of W_Q, W_K, W_V and the rows of W_O; nothing outside matters (S1.24)."""
        heads, graph = made(**kind), patterns.cross(5, 6)
        layer, x_dst = MessagePassingAttention(heads), drawn(5, heads.width)
        x_src = drawn(6, heads.source_width, seed=1)
        for head, circuit in enumerate(each(form(heads))):
            W, receiver, sender = weights_of(heads, head), circuit.reads_as_receiver, circuit.reads_as_sender
            spaces = ((receiver, W["W_Q"]), (sender, W["W_K"]), (circuit.reads_as_value, W["W_V"]))
            for space, matrix in (*spaces, (circuit.writes, W["W_O"].mT)):
                assert_exact(space.projector(), matrix @ torch.linalg.pinv(matrix))
            weights, sent = attention(layer, (x_src, x_dst), graph, head), circuit.messages(x_src)
            assert_exact(attention(layer, (x_src, x_dst + outside(receiver, 5)), graph, head), weights)
            assert_exact(attention(layer, (x_src + outside(sender, 6), x_dst), graph, head), weights)
            assert_exact(circuit.messages(x_src + outside(circuit.reads_as_value, 6)), sent)
            assert circuit.writes.contains(sent, tolerance=EXACT).all()
            read = receiver.project(drawn(5, heads.width, seed=9))
            assert (attention(layer, (x_src, x_dst + read), graph, head) - weights).abs().max() > 1e-3


ROTARIES = [Rotary(), Rotary(base=30.0, interleaved=True), Rotary(frequencies=(1.0, 0.5, 0.1))]


class TestRotary:
    @pytest.mark.parametrize("rotary", ROTARIES)
    @pytest.mark.parametrize("gain", [None, drawn(12, seed=5)], ids=["", "gain"])
    def test_logits_by_distance(self, rotary, gain):
        """The logit of dst = 7 and src = 4 from whole rotated queries and keys is x W_P(3) x'^T."""
        heads = made(num_heads=4, num_kv_heads=2, head_dim=6, rotary=rotary)
        x, channels = drawn(10, 12), torch.ones(12, dtype=torch.float64) if gain is None else gain
        q, (k, _) = heads.receive((channels * x)[None])[0], heads.send((channels * x)[None])
        for head, circuit in enumerate(each(heads, gain)):
            for dst, src in ((7, 4), (4, 7), (0, 0), (9, 0)):
                logit = q[head, dst] @ k[0, head // 2, src]
                assert_exact(x[dst] @ circuit.pattern_at(dst - src).full() @ x[src], logit.detach())
            assert circuit.pattern_at(5).rank() == 6

    def test_what_needs_no_distance_and_what_does(self):
        heads = made(head_dim=6, rotary=Rotary(), bias=True)
        circuit = of(heads, 1)
        assert_exact(circuit.message.full(), (heads.W_V @ heads.W_O)[1].detach())
        assert circuit.reads_as_receiver.contains(heads.W_Q[1].mT.detach()).all()
        assert circuit.reads_as_receiver.contains(circuit.pattern_at(7).left.mT).all()
        for read in (lambda: circuit.pattern, lambda: circuit.b_P, lambda: circuit.patterns(drawn(3, 12))):
            with pytest.raises(ValueError, match=r"head 1 of StandardHeads.* is rotary.*take pattern_at\("):
                read()

    def test_normed_queries_have_no_pattern_but_subspaces(self):
        heads = made(qk_norm=True)
        layer, x, circuit = MessagePassingAttention(heads), drawn(5, 12), of(heads, 2)
        with pytest.raises(ValueError, match="qk_norm have no pattern matrix"):
            _ = circuit.pattern
        weights = attention(layer, x, patterns.full(5), 2)
        both = circuit.reads_as_receiver + circuit.reads_as_sender
        assert_exact(attention(layer, x + outside(both, 5), patterns.full(5), 2), weights)


@pytest.mark.parametrize("options", [{}, {"query_dim": 8, "bias": True}], ids=["", "query latent"])
def test_latent_heads(options):
    """Seed S1.6: patterns and messages are of latents, subspaces are those of states."""
    sizes = {"num_heads": 3, "content_dim": 2, "rotary_dim": 2, "latent_dim": 5, "value_dim": 3}
    heads, x, graph = redrawn(LatentHeads(12, **sizes, **options)), drawn(6, 12), patterns.causal(6)
    layer = MessagePassingAttention(heads)
    for head, circuit in enumerate(each(heads)):
        W_M = (heads.W_UV[head] @ heads.W_O[head]).detach()
        assert_exact(circuit.message.full(), W_M)
        assert_exact(circuit.pattern_at(4).full(), heads.pattern_matrix(4).full()[head].detach())
        assert_exact(circuit.messages(drawn(2, 6, 12)), (heads.latents(drawn(2, 6, 12)) @ W_M).detach())
        weights, sent = attention(layer, x, graph, head), circuit.messages(x)
        x_dst, x_src = x + outside(circuit.reads_as_receiver, 6), x + outside(circuit.reads_as_sender, 6)
        assert not torch.equal(x_dst, x)
        assert_exact(attention(layer, (x, x_dst), graph, head), weights)
        assert_exact(attention(layer, (x_src, x), graph, head), weights)
        assert_exact(circuit.messages(x + outside(circuit.reads_as_value, 6)), sent)
        assert circuit.writes.contains(sent, tolerance=EXACT).all()
    with pytest.raises(ValueError, match=r"LatentHeads.* is rotary"):
        _ = of(heads, 0).pattern
    with pytest.raises(ValueError, match="gain cannot be folded into LatentHeads"):
        of(heads, 0, gain=torch.ones(12))


class TestGain:
    """What a norm multiplies channels with, folded in: matrices of states before the norm."""

    @each_form
    def test_against_gained_states(self, form):
        heads, gain, x = made(bias=True), drawn(12, seed=8), drawn(5, 12)
        for plain, circuit in zip(each(form(heads)), each(form(heads), gain), strict=True):
            assert repr(circuit).endswith(", gain folded)")
            for side in ("receiver", "sender"):
                wanted = plain.patterns(gain * x, side) @ (gain * x).mT
                assert_exact(circuit.patterns(x, side) @ x.mT, wanted)
            assert_exact(circuit.messages(x), plain.messages(gain * x))
            assert not circuit.reads_as_value.contains(plain.reads_as_value.basis.mT).any()
            assert_exact(circuit.messages(x + outside(circuit.reads_as_value, 5)), circuit.messages(x))
            assert_exact(circuit.writes.projector(), plain.writes.projector())

    def test_a_block_brings_its_own(self):
        """From states before the norm, each divided by its root mean square."""
        own, x = block(), drawn(1, 5, 12)
        unit = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
        form, normed = FactoredHeads.of(own.attention.heads), own.attention_norm(x)
        for head, circuit in enumerate(each(own)):
            assert_exact(circuit.messages(unit), form.messages(normed)[:, head].detach())
            wanted = form.patterns(normed)[0, head] @ normed[0].mT
            assert_exact((circuit.patterns(unit) @ unit.mT)[0], wanted.detach())


class TestReading:
    def test_merged_heads_without_a_bottleneck(self):
        """Built directly they have full rank; their factors are those of the singular value decomposition."""
        heads = redrawn(MergedHeads(12, 2, head_dim=4))
        circuit = of(heads, 1)
        assert_exact(circuit.pattern.full(), heads.pattern[1].detach())
        assert circuit.pattern.rank() == circuit.message.rank() == circuit.reads_as_sender.dim == 12

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rounded_merged_heads_keep_their_rank(self, dtype):
        """What rounding adds to the 60 - 4 singular values that are 0 is not read as directions."""
        circuit = of(MergedHeads.of(StandardHeads(60, 2, head_dim=4)).to(dtype), 0)
        assert circuit.pattern.left.dtype == torch.float32
        assert circuit.pattern.left.shape[1] == circuit.writes.dim == 4

    def test_refusals(self):
        circuit, gain = of(made(source_width=7), 0), torch.ones(12)
        alone = of(StandardHeads.from_arrays(*(drawn(2, 6, 3, seed=s) for s in range(3))), 0)
        assert alone.reads_as_value.dim == 3
        cases = [
            *((lambda source=source: of(source, 0), TypeError, r"source must be heads .*heads_of\(model")
              for source in (nn.Linear(3, 3), LazyHeads(2, 4), None)),
            (lambda: of(made(), 3), IndexError, "head must be"),
            (lambda: of(made(), 1.0), TypeError, "head must be"),
            *((lambda wrong=wrong: of(made(), 0, wrong), ValueError, r"gain must be a float tensor \[12\]")
              for wrong in (torch.ones(5), torch.ones(12, dtype=torch.int64), 2.0)),
            (lambda: of(made(source_width=7), 0, gain), ValueError, "folded.*states of one norm"),
            (lambda: of(block(), 0, gain), ValueError, "gain must not be given with a Block"),
            (lambda: circuit.patterns(drawn(3, 12), "dst"), ValueError, "side must be one of 'receiver'"),
            (lambda: circuit.pattern_at(1.5), TypeError, "distance must be an integer"),
            *((lambda x=x: circuit.messages(x), ValueError, r"x must be states \[\*, 7\] of floats, got")
              for x in (drawn(3, 5), torch.ones(3, 7, dtype=torch.int64), [1.0])),
            (lambda: alone.message, ValueError, "without W_O have values but no messages"),
            (lambda: alone.writes, ValueError, r"without W_O .*: they write no states"),
        ]  # fmt: skip
        assert_refusals(cases)
