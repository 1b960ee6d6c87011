"""Circuits of single heads against dense float64 formulas, in every form: matrices, biases, subspaces, gains,
distances.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor, nn

from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.interpret.circuits.head import Circuit, each, of
from gnn_attention.rotary import Rotary
from gnn_attention.verify.measure import EXACT

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "width is not heads times dim": {"head_dim": 5, "value_dim": 2},
    "one wide head": {"num_heads": 1, "head_dim": 20},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3},
    "one key for all": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 3},
    "biases": {"bias": True},
    "biases, grouped": {"bias": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "value_dim": 2},
    "two sources": {"source_width": 7, "bias": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FORMS = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender": lambda heads: FactoredHeads.of(heads, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender": lambda heads: MergedHeads.of(heads, side="sender"),
    "layer": MessagePassingAttention,
    "layer of merged": lambda heads: MessagePassingAttention(MergedHeads.of(heads)),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redrawn(module: Any) -> Any:
    """In float64, every number drawn: biases and norms too."""
    module = module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = drawn(*parameter.shape, seed=seed) / 2
    return module


def made(kind: dict[str, Any]) -> StandardHeads:
    return redrawn(StandardHeads(**{"width": 12, "num_heads": 3, **kind}))


def own_weights(heads: StandardHeads, head: int) -> dict[str, Tensor | None]:
    """The matrices of one query head, found by hand: its key and value head is the one of its group."""
    shared = head // (heads.num_heads // heads.num_kv_heads)
    rows = {"W_Q": head, "W_K": shared, "W_V": shared, "W_O": head, "b_Q": head, "b_K": shared, "b_V": shared}
    parts = {name: getattr(heads, name) for name in rows}
    return {name: None if part is None else part[rows[name]].detach() for name, part in parts.items()}


def outside(space: Any, *shape: int, seed: int = 9) -> Tensor:
    """States with no part in the subspace."""
    return space.reject(drawn(*shape, space.width, seed=seed))


@each_kind
@each_form
class TestEveryForm:
    def test_pattern_and_message(self, kind, form):
        """W_P = W_Q W_K^T and W_M = W_V W_O, no wider than the head."""
        heads = made(kind)
        for head, circuit in enumerate(each(form(heads))):
            own = own_weights(heads, head)
            assert_exact(circuit.pattern.full(), own["W_Q"] @ own["W_K"].mT)
            assert_exact(circuit.message.full(), own["W_V"] @ own["W_O"])
            assert circuit.pattern.left.shape[1] <= max(
                heads.head_dim, heads.width if heads.head_dim > heads.width else 0
            )
            assert circuit.pattern.rank() == min(heads.head_dim, heads.width, heads.source_width)
            assert circuit.message.rank() == min(own["W_V"].shape[1], heads.width, heads.source_width)
            assert circuit.scale == heads.head_dim**-0.5
            assert not circuit.pattern.left.requires_grad
            assert not circuit.message.right.requires_grad

    def test_the_same_at_every_distance(self, kind, form):
        circuit = of(form(made(kind)), 0)
        assert circuit.pattern_at(-3) is circuit.pattern_at(5) is circuit.pattern

    def test_biases(self, kind, form):
        """P = x W_P + b_Q W_K^T, P' = x W_P^T + b_K W_Q^T, M = x W_M + b_V W_O; None without biases."""
        heads = made(kind)
        for head, circuit in enumerate(each(form(heads))):
            own = own_weights(heads, head)
            if own["b_Q"] is None:
                assert circuit.b_P is circuit.b_S is circuit.b_M is None
                continue
            assert_exact(circuit.b_P, own["b_Q"] @ own["W_K"].mT)
            assert_exact(circuit.b_S, own["b_K"] @ own["W_Q"].mT)
            assert_exact(circuit.b_M, own["b_V"] @ own["W_O"])

    def test_vectors_are_those_of_the_forms(self, kind, form):
        """Patterns of both sides and messages, of any leading axes, as the forms of the heads make them."""
        heads, form = made(kind), form(made(kind))
        x_dst, x_src = drawn(2, 5, heads.width), drawn(2, 6, heads.source_width, seed=1)
        near, far = FactoredHeads.of(heads), FactoredHeads.of(heads, side="sender")
        for head, circuit in enumerate(each(form)):
            assert_exact(circuit.patterns(x_dst), near.patterns(x_dst)[:, head])
            assert_exact(circuit.patterns(x_src, side="sender"), far.patterns(x_src)[:, head])
            assert_exact(circuit.messages(x_src), near.messages(x_src)[:, head])
            assert_exact(circuit.messages(x_src[0, 3]), near.messages(x_src)[0, head, 3])

    def test_logits_up_to_what_all_edges_share(self, kind, form):
        heads = made(kind)
        x_dst, x_src = drawn(5, heads.width), drawn(6, heads.source_width, seed=1)
        for head, circuit in enumerate(each(form(heads))):
            own = own_weights(heads, head)
            zero = torch.zeros((), dtype=torch.float64)
            b_Q, b_K = (zero if own[name] is None else own[name] for name in ("b_Q", "b_K"))
            logits = (x_dst @ own["W_Q"] + b_Q) @ (x_src @ own["W_K"] + b_K).mT * circuit.scale
            ours = circuit.patterns(x_dst) @ x_src.mT * circuit.scale
            assert_exact(
                (logits - ours).std(dim=1),
                torch.zeros(5, dtype=torch.float64),
                largest=float(logits.abs().max()),
            )

    def test_subspaces(self, kind, form):
        """Of the size of the head, and spanned by the columns of W_Q, W_K, W_V and the rows of W_O."""
        heads = made(kind)
        for head, circuit in enumerate(each(form(heads))):
            own = own_weights(heads, head)
            spaces = {
                "W_Q": circuit.reads_as_receiver,
                "W_K": circuit.reads_as_sender,
                "W_V": circuit.reads_as_value,
                "W_O": circuit.writes,
            }
            for name, space in spaces.items():
                matrix = own[name] if name != "W_O" else own[name].mT
                assert_exact(space.projector(), matrix @ torch.linalg.pinv(matrix))
            assert circuit.reads_as_receiver.dim == min(
                heads.head_dim, heads.width, heads.source_width if "merged" in repr(form) else 99
            )

    def test_nothing_outside_the_subspaces_matters(self, kind, form):
        """Seed S1.24, on the layer: weights from what is read alone, updates inside what is written alone."""
        heads = made(kind)
        layer, x_dst, x_src = (
            MessagePassingAttention(heads),
            drawn(5, heads.width),
            drawn(6, heads.source_width, seed=1),
        )
        graph = patterns.cross(5, 6)
        for head, circuit in enumerate(each(form(heads))):
            weights = heard(layer, (x_src, x_dst), graph, head)
            assert_exact(
                heard(layer, (x_src, x_dst + outside(circuit.reads_as_receiver, 5)), graph, head), weights
            )
            assert_exact(
                heard(layer, (x_src + outside(circuit.reads_as_sender, 6), x_dst), graph, head), weights
            )
            said = circuit.messages(x_src)
            assert_exact(circuit.messages(x_src + outside(circuit.reads_as_value, 6)), said)
            assert circuit.writes.contains(said, tolerance=EXACT).all()
            read = circuit.reads_as_receiver.project(drawn(5, heads.width, seed=9))
            assert (heard(layer, (x_src, x_dst + read), graph, head) - weights).abs().max() > 1e-3


def heard(layer: MessagePassingAttention, x: Any, graph: Any, head: int) -> Tensor:
    """The weights of one head."""
    _, (_, weights) = layer(x, graph, return_attention_weights=True)
    return weights[:, head].detach()


class TestRotary:
    @pytest.mark.parametrize(
        "rotary", [Rotary(), Rotary(base=30.0, interleaved=True), Rotary(frequencies=(1.0, 0.5, 0.1))]
    )
    @pytest.mark.parametrize("gain", [None, drawn(12, seed=5)], ids=["", "gain"])
    def test_logits_by_distance(self, rotary, gain):
        """The logit of dst = 7 and src = 4 from whole turned queries and keys is x W_P(3) x'^T."""
        heads = made({"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rotary": rotary})
        x, channels = drawn(10, 12), torch.ones(12, dtype=torch.float64) if gain is None else gain
        q, (k, _) = heads.receive((channels * x)[None])[0], heads.send((channels * x)[None])
        for head, circuit in enumerate(each(heads, gain)):
            for dst, src in ((7, 4), (4, 7), (0, 0), (9, 0)):
                logit = q[head, dst] @ k[0, head // 2, src]
                assert_exact(x[dst] @ circuit.pattern_at(dst - src).full() @ x[src], logit.detach())
            assert circuit.pattern_at(5).rank() == 6

    def test_messages_and_subspaces_need_no_distance(self):
        heads = made({"head_dim": 6, "rotary": Rotary(), "bias": True})
        circuit = of(heads, 1)
        assert_exact(circuit.message.full(), (heads.W_V @ heads.W_O)[1].detach())
        assert circuit.reads_as_receiver.contains(heads.W_Q[1].mT.detach()).all()
        assert circuit.reads_as_receiver.contains(circuit.pattern_at(7).left.mT).all()

    @pytest.mark.parametrize("ask", ["pattern", "b_P", "b_S"])
    def test_there_is_no_one_pattern(self, ask):
        circuit = of(made({"head_dim": 6, "rotary": Rotary(), "bias": True}), 1)
        with pytest.raises(
            ValueError, match=r"head 1 of StandardHeads.* is rotary.*take pattern_at\(dst - src\)"
        ):
            getattr(circuit, ask)
        with pytest.raises(ValueError, match="is rotary"):
            circuit.patterns(drawn(3, 12))

    def test_normed_queries_have_no_pattern_but_subspaces(self):
        heads = made({"qk_norm": True})
        layer, x, circuit = MessagePassingAttention(heads), drawn(5, 12), of(heads, 2)
        with pytest.raises(ValueError, match="qk_norm have no pattern matrix"):
            _ = circuit.pattern
        weights = heard(layer, x, patterns.full(5), 2)
        both = circuit.reads_as_receiver + circuit.reads_as_sender
        assert_exact(heard(layer, x + outside(both, 5), patterns.full(5), 2), weights)


class TestLatent:
    @pytest.fixture(params=[{}, {"query_dim": 8, "bias": True}], ids=["", "query latent"])
    def heads(self, request: pytest.FixtureRequest) -> LatentHeads:
        sizes = {
            "width": 12,
            "num_heads": 3,
            "content_dim": 2,
            "rotary_dim": 2,
            "latent_dim": 5,
            "value_dim": 3,
        }
        made: LatentHeads = redrawn(LatentHeads(**sizes, **request.param))
        return made

    def test_matrices(self, heads):
        for head, circuit in enumerate(each(heads)):
            assert_exact(circuit.message.full(), (heads.W_UV[head] @ heads.W_O[head]).detach())
            assert_exact(circuit.pattern_at(4).full(), heads.pattern_matrix(4).full()[head].detach())
            assert_exact(
                circuit.messages(drawn(2, 6, 12)),
                (heads.latents(drawn(2, 6, 12)) @ heads.W_UV[head] @ heads.W_O[head]).detach(),
            )

    def test_nothing_outside_the_subspaces_matters(self, heads):
        layer, x, graph = MessagePassingAttention(heads), drawn(6, 12), patterns.causal(6)
        for head, circuit in enumerate(each(heads)):
            weights, said = heard(layer, x, graph, head), circuit.messages(x)
            x_dst, x_src = x + outside(circuit.reads_as_receiver, 6), x + outside(circuit.reads_as_sender, 6)
            assert not torch.equal(x_dst, x)
            assert_exact(heard(layer, (x, x_dst), graph, head), weights)
            assert_exact(heard(layer, (x_src, x), graph, head), weights)
            assert_exact(circuit.messages(x + outside(circuit.reads_as_value, 6)), said)
            assert circuit.writes.contains(said, tolerance=EXACT).all()

    def test_refusals(self, heads):
        with pytest.raises(ValueError, match=r"LatentHeads.* is rotary"):
            _ = of(heads, 0).pattern
        with pytest.raises(ValueError, match="gain cannot be folded into LatentHeads"):
            of(heads, 0, gain=torch.ones(12))


class TestGain:
    """What a norm multiplies channels with, folded in: matrices of states before the norm."""

    @each_form
    def test_against_gained_states(self, form):
        heads, gain, x = made({"bias": True}), drawn(12, seed=8), drawn(5, 12)
        for plain, circuit in zip(each(form(heads)), each(form(heads), gain), strict=True):
            assert repr(circuit).endswith(", gain folded)")
            assert_exact(circuit.patterns(x) @ x.mT, plain.patterns(gain * x) @ (gain * x).mT)
            assert_exact(
                circuit.patterns(x, "sender") @ x.mT, plain.patterns(gain * x, "sender") @ (gain * x).mT
            )
            assert_exact(circuit.messages(x), plain.messages(gain * x))
            assert not circuit.reads_as_value.contains(plain.reads_as_value.basis.mT).any()
            assert_exact(circuit.messages(x + outside(circuit.reads_as_value, 5)), circuit.messages(x))
            assert_exact(circuit.writes.projector(), plain.writes.projector())

    def test_a_block_brings_its_own(self):
        """From states before the norm, each divided by its root mean square, to what the layer says."""
        block = redrawn(lm.Block(lm.Config(9, width=12, num_heads=3, head_dim=4, mlp_width=8)))
        x, heads = drawn(1, 5, 12), block.attention.heads
        unit = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
        form = FactoredHeads.of(heads)
        for head, circuit in enumerate(each(block)):
            assert_exact(circuit.messages(unit), form.messages(block.attention_norm(x))[:, head].detach())
            patterns_of_unit = (circuit.patterns(unit) @ unit.mT)[0]
            assert_exact(
                patterns_of_unit,
                (form.patterns(block.attention_norm(x))[0, head] @ block.attention_norm(x)[0].mT).detach(),
            )

    def test_a_channel_that_the_norm_drops_is_not_read(self):
        gain = torch.ones(12)
        gain[3] = 0
        circuit = of(made({"num_heads": 1, "head_dim": 12}), 0, gain)
        assert circuit.reads_as_value.dim == circuit.pattern.rank() == 11
        assert circuit.writes.dim == 12

    @pytest.mark.parametrize(
        "gain", [torch.ones(5), torch.ones(12, 1), torch.ones(12, dtype=torch.int64), 2.0]
    )
    def test_refusals(self, gain):
        with pytest.raises(ValueError, match=r"gain must be a float tensor \[12\]"):
            of(made({}), 0, gain)

    def test_refused_sources(self):
        with pytest.raises(ValueError, match=r"gain cannot be folded.*states of one norm"):
            of(made({"source_width": 7}), 0, torch.ones(12))
        block = lm.Block(lm.Config(9, width=12, num_heads=3, head_dim=4, mlp_width=8))
        with pytest.raises(ValueError, match="gain must not be given with a Block"):
            of(block, 0, torch.ones(12))


class TestReading:
    def test_merged_heads_without_a_bottleneck(self):
        heads = redrawn(MergedHeads(12, 2, head_dim=4))
        circuit = of(heads, 1)
        assert_exact(circuit.pattern.full(), heads.pattern[1].detach())
        assert circuit.pattern.rank() == circuit.message.rank() == circuit.reads_as_sender.dim == 12
        assert circuit.scale == 0.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rounded_merged_heads_keep_their_rank(self, dtype):
        """What rounding adds to the 60 - 4 singular values that are 0 is not read as directions."""
        heads = MergedHeads.of(StandardHeads(60, 2, head_dim=4)).to(dtype)
        circuit = of(heads, 0)
        assert circuit.pattern.left.dtype == torch.float32
        assert circuit.pattern.left.shape[1] == circuit.writes.dim == 4

    def test_heads_of_zeros(self):
        heads = StandardHeads.from_arrays(
            *(torch.zeros(2, *shape) for shape in ((6, 3), (6, 3), (6, 3), (3, 6)))
        )
        for form in (heads, MergedHeads.of(heads)):
            circuit = of(form, 0)
            assert circuit.pattern.rank() == circuit.writes.dim == circuit.reads_as_receiver.dim == 0
            assert torch.equal(circuit.messages(torch.ones(2, 6)), torch.zeros(2, 6))

    def test_without_an_output_matrix_there_are_no_messages(self):
        circuit = of(StandardHeads.from_arrays(*(drawn(2, 6, 3, seed=s) for s in range(3))), 0)
        assert circuit.reads_as_value.dim == 3
        with pytest.raises(ValueError, match="without W_O have values but no messages"):
            _ = circuit.message
        with pytest.raises(ValueError, match="without W_O have values but no messages: they write no states"):
            _ = circuit.writes

    def test_a_reading_does_not_change_with_the_weights(self):
        heads = made({})
        circuit = of(heads, 0)
        before = circuit.pattern.full()
        with torch.no_grad():
            heads.W_Q.mul_(2)
        assert torch.equal(circuit.pattern.full(), before)
        assert_exact(of(heads, 0).pattern.full(), 2 * before)

    def test_repr(self):
        assert repr(of(made({}), 2)) == "Circuit(head 2 of StandardHeads(12, num_heads=3, head_dim=4))"

    @pytest.mark.parametrize("source", [nn.Linear(3, 3), "heads", LazyHeads(2, 4), None, Circuit])
    def test_another_source(self, source):
        with pytest.raises(
            TypeError, match=r"source must be heads whose widths are known.*heads_of\(model, layer\)"
        ):
            of(source, 0)
        with pytest.raises(TypeError, match="source must be heads"):
            each(source)

    @pytest.mark.parametrize(
        ("head", "error"), [(3, IndexError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
    )
    def test_another_head(self, head, error):
        with pytest.raises(error, match="head must be"):
            of(made({}), head)

    def test_another_side_or_distance_or_state(self):
        circuit = of(made({"source_width": 7}), 0)
        with pytest.raises(ValueError, match="side must be one of 'receiver', 'sender', got 'dst'"):
            circuit.patterns(drawn(3, 12), "dst")
        with pytest.raises(TypeError, match="distance must be an integer"):
            circuit.pattern_at(1.5)
        for act, width in ((circuit.patterns, 12), (circuit.messages, 7)):
            for x in (drawn(3, 5), torch.ones(3, width, dtype=torch.int64), [1.0]):
                with pytest.raises(ValueError, match=rf"x must be states \[\*, {width}\] of floats, got"):
                    act(x)
