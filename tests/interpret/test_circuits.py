"""The split of logits, lengths of patterns and composition, against dense float64 formulas and
TransformerLens' definitions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.bounds import assert_exact, assert_sum
from torch import Tensor

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret import circuits, trace
from gnn_attention.interpret.circuits import lengths
from gnn_attention.rotary import Rotary
from gnn_attention.verify.measure import EXACT

LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(seed: int = 0, form: Any = StandardHeads, **kind: Any) -> Any:
    """Heads in float64 whose every number is drawn."""
    heads = form(**{"width": 12, "num_heads": 3, **kind}).double()
    for number, parameter in enumerate(heads.parameters()):
        parameter.data = drawn(*parameter.shape, seed=100 * seed + number) / 2
    return heads


def test_every_name_is_there():
    """The module is the one door to the pieces."""
    assert set(circuits.__all__) <= set(dir(circuits))
    assert circuits.TEMPLATES.keys() == {"previous_token", "duplicate_token", "induction"}


class TestSplit:
    @pytest.mark.parametrize("graph", [LISTED, patterns.causal(5), patterns.window(5, 2)], ids=repr)
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize("side", ["receiver", "sender"])
    def test_the_product_is_the_logit(self, graph, bias, side):
        """Seed S1.16: |p| |x| cos of every edge and head, in the order of the graph's edges."""
        heads, x = made(num_heads=4, num_kv_heads=2, head_dim=5, bias=bias), drawn(2, 5, 12)
        form = FactoredHeads.of(heads, side=side)
        p, s = form.receive(x).detach(), form.send(x)[0].detach()
        parts = circuits.split(p, s, graph)
        src, dst = graph.edge_index
        q = x.unsqueeze(1) @ heads.W_Q + (heads.b_Q.unsqueeze(1) if bias else 0)
        k = (x.unsqueeze(1) @ heads.W_K + (heads.b_K.unsqueeze(1) if bias else 0)).repeat_interleave(2, dim=1)
        assert_exact(parts.product, (q[:, :, dst] * k[:, :, src]).sum(-1).detach())
        assert_exact(parts.length_of_pattern, p.square().sum(-1).sqrt()[:, :, dst])
        assert_exact(parts.length_of_state, s.square().sum(-1).sqrt()[:, :, src])
        assert parts.cosine.abs().max() <= 1 + EXACT
        for listed in (graph.edge_index, graph.edge_index.t().tolist()):
            assert torch.equal(circuits.split(p, s, listed).cosine, parts.cosine)

    def test_without_edges_vector_by_vector(self):
        p, x = drawn(3, 5, 12), drawn(5, 12, seed=1)
        parts = circuits.split(p, x)
        assert parts.cosine.shape == parts.length_of_state.shape == (3, 5)
        assert_exact(parts.product, (p * x).sum(-1))
        every = circuits.split(p.unsqueeze(-2), x)  # all pairs, as asked
        assert_exact(every.product, p @ x.mT)
        assert_exact(every.cosine, torch.nn.functional.cosine_similarity(p.unsqueeze(-2), x, dim=-1))

    def test_some_edges_at_a_time(self, monkeypatch):
        p, x = drawn(3, 5, 12), drawn(5, 12, seed=1)
        whole = circuits.split(p, x, patterns.causal(5))
        monkeypatch.setattr(lengths, "NUMBERS_AT_ONCE", 70)  # 36 of them are one edge
        parts = circuits.split(p, x, patterns.causal(5))
        assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))

    def test_a_vector_of_length_zero(self):
        parts = circuits.split(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        assert parts.cosine.tolist() == parts.product.tolist() == [0.0, 0.0]

    def test_half_vectors_are_measured_in_float32(self):
        p = drawn(4, 300).bfloat16()
        x = (
            p + drawn(4, 300, seed=1).bfloat16() / 8
        )  # nearly parallel: no small number beside what is allowed
        parts = circuits.split(p, x)
        assert parts.cosine.dtype == torch.float32
        # 300 products, which are exact in float32, sum in absolute value to at most the two lengths' product
        # (Cauchy and Schwarz); three roundings more are those of the lengths' product, of the cosine, and of
        # both multiplied.
        size = float((p.double().norm(dim=-1) * x.double().norm(dim=-1)).max())
        assert_sum(parts.product, (p.double() * x.double()).sum(-1), 303, size)

    def test_no_edges(self):
        assert circuits.split(
            drawn(3, 5, 12), drawn(5, 12), patterns.causal(5) - patterns.causal(5)
        ).cosine.shape == (3, 0)

    @pytest.mark.parametrize(
        ("p", "x", "edges", "error", "match"),
        [
            (drawn(5, 12), drawn(5, 11), None, ValueError, r"of one width .*shape \[5, 12\] and .*shape \[5, 11\]"),
            (drawn(5, 12), torch.ones(5, 12, dtype=torch.int64), None, TypeError, "must be float tensors"),
            ("p", drawn(5, 12), None, TypeError, "got 'p' and a Tensor"),
            (drawn(4, 12), drawn(5, 12), None, ValueError, r"must broadcast, got .*\[4, 12\] and .*\[5, 12\]"),
            (drawn(2, 5, 12), drawn(3, 5, 12), LISTED, ValueError, r"must broadcast, got .*\[2, 5, 12\]"),
            (drawn(12), drawn(5, 12), LISTED, ValueError, r"patterns must be \[..., dst, width\]"),
            (drawn(5, 12), drawn(4, 12), LISTED, ValueError, "edges must be over 4 senders and 5 receivers"),
            (drawn(5, 12), drawn(5, 12), [(0, 5)], IndexError, "is no receiver"),
            (drawn(5, 12), drawn(5, 12), 3, TypeError, "edges must be"),
        ],
    )  # fmt: skip
    def test_refusals(self, p, x, edges, error, match):
        with pytest.raises(error, match=match):
            circuits.split(p, x, edges)


class TestPatternLengths:
    @pytest.mark.parametrize(
        "kind", [{}, {"bias": True}, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "bias": True}]
    )
    def test_against_the_patterns(self, kind):
        """From any form, a layer of it, and a run, whose queries hold the biases already."""
        heads, x = made(**kind), drawn(2, 5, 12)
        near = FactoredHeads.of(heads).patterns(x).square().sum(-1).sqrt().detach()
        far = FactoredHeads.of(heads, side="sender").patterns(x).square().sum(-1).sqrt().detach()
        sources = (
            heads,
            FactoredHeads.of(heads),
            MergedHeads.of(heads, side="sender"),
            MessagePassingAttention(heads),
        )
        run = trace.record(MessagePassingAttention(heads), x, patterns.causal(5))
        for found in (
            *(circuits.pattern_lengths(source, x) for source in sources),
            circuits.pattern_lengths(run.layers[0]),
        ):
            assert_exact(found.receiver, near)
            assert_exact(found.sender, far)
        assert circuits.pattern_lengths(heads, x[0]).receiver.shape == (heads.num_heads, 5)

    def test_two_sources(self):
        heads, x_dst, x_src = made(source_width=7), drawn(5, 12), drawn(6, 7)
        lengths = circuits.pattern_lengths(heads, (x_src, x_dst))
        assert_exact(lengths.receiver, (x_dst @ heads.W_Q @ heads.W_K.mT).norm(dim=-1).detach())
        assert_exact(lengths.sender, (x_src @ heads.W_K @ heads.W_Q.mT).norm(dim=-1).detach())

    def test_refusals(self):
        with pytest.raises(TypeError, match="x must be given with heads or a layer"):
            circuits.pattern_lengths(made())
        with pytest.raises(TypeError, match="source must be heads"):
            circuits.pattern_lengths("heads", drawn(5, 12))
        with pytest.raises(ValueError, match="is rotary"):
            circuits.pattern_lengths(made(rotary=Rotary()), drawn(5, 12))
        run = trace.record(MessagePassingAttention(MergedHeads.of(made())), drawn(5, 12), patterns.causal(5))
        with pytest.raises(
            TypeError, match="source must be a run of StandardHeads, got MergedHeads: give its heads"
        ):
            circuits.pattern_lengths(run.layers[0])
        run = trace.record(MessagePassingAttention(made(rotary=Rotary())), drawn(5, 12), patterns.causal(5))
        with pytest.raises(ValueError, match="is rotary"):
            circuits.pattern_lengths(run.layers[0])


def published(earlier: StandardHeads, later: StandardHeads, kind: str, h1: int, h2: int) -> float:
    group = later.num_heads // later.num_kv_heads
    OV = earlier.W_V[h1 // (earlier.num_heads // earlier.num_kv_heads)] @ earlier.W_O[h1]
    QK = later.W_Q[h2] @ later.W_K[h2 // group].mT
    right = {"q": QK, "k": QK.mT, "v": later.W_V[h2 // group] @ later.W_O[h2]}[kind]
    norm = torch.linalg.matrix_norm
    return (norm(OV @ right) / (norm(OV) * norm(right))).item()


@cache
def turned_at_random() -> list[circuits.Circuit]:
    """One head, whose results are turned by 225 random rotations."""
    heads, found = made(1, num_heads=1, head_dim=2), []
    for seed in range(225):
        turn, upper = torch.linalg.qr(drawn(12, 12, seed=seed))
        turned = StandardHeads.from_arrays(
            heads.W_Q, heads.W_K, heads.W_V, heads.W_O @ (turn * upper.diag().sign())
        )
        found.append(circuits.of(turned, 0))
    return found


@pytest.mark.parametrize("kind", ["q", "k", "v"])
class TestComposition:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({}, {}),
            ({"head_dim": 20, "value_dim": 15}, {"head_dim": 2}),
            ({"num_heads": 4, "num_kv_heads": 2, "head_dim": 5}, {}),
        ],
        ids=["plain", "wider than the states", "grouped"],
    )
    @pytest.mark.parametrize("form", [lambda heads: heads, MergedHeads.of], ids=["standard", "merged"])
    def test_against_the_published_definition(self, kind, first, second, form):
        earlier, later = made(1, **first), made(2, **second)
        for h1, one in enumerate(circuits.each(form(earlier))):
            for h2, two in enumerate(circuits.each(form(later))):
                expected = published(earlier, later, kind, h1, h2)
                assert_exact(circuits.composition(one, two, kind), expected)

    def test_all_pairs_of_a_model(self, kind):
        sizes = {"width": 12, "num_layers": 3, "num_heads": 2, "head_dim": 4, "mlp_width": 8, "reach": 3}
        model = lm.LanguageModel(lm.Config(9, **sizes)).double()
        for seed, parameter in enumerate(model.parameters()):
            parameter.data = drawn(*parameter.shape, seed=seed)
        scores = circuits.compositions(model, kind)
        assert scores.shape == (3, 2, 3, 2)
        for after in range(3):
            for before in range(3):
                if before >= after:
                    assert scores[after, :, before].abs().max() == 0
                    continue
                blocks: list[Any] = [model.blocks[before], model.blocks[after]]
                gained = [
                    StandardHeads.from_arrays(
                        *(b.attention_norm.weight.diag() @ W for W in (own.W_Q, own.W_K, own.W_V)), own.W_O
                    )
                    for b in blocks
                    for own in [b.attention.heads]
                ]
                for h1 in range(2):
                    for h2 in range(2):
                        expected = published(*gained, kind, h1, h2)
                        assert_exact(scores[after, h2, before, h1], expected)
        assert_exact(circuits.compositions(model, kind, relative=True), scores * 12**0.5)
        listed = [circuits.each(block) for block in model.blocks]
        assert torch.equal(circuits.compositions(listed, kind), scores)

    def test_the_extremes(self, kind):
        axes = torch.eye(6, dtype=torch.float64)

        def head(read: int, write: int) -> circuits.Circuit:
            column, row = axes[None, :, read : read + 1], axes[None, write : write + 1]
            return circuits.of(StandardHeads.from_arrays(column, column, column, row), 0)

        assert circuits.composition(head(0, 3), head(3, 4), kind) == 1.0
        assert circuits.composition(head(0, 3), head(2, 3), kind) == 0.0

    def test_unrelated_heads(self, kind):
        later = circuits.of(made(2, num_heads=1, head_dim=5), 0)
        squares = torch.tensor(
            [circuits.composition(turned, later, kind) for turned in turned_at_random()]
        ).square()
        # 225 draws: four standard errors of their mean.
        assert abs(squares.mean() - 1 / 12) < 4 * squares.std() / 15

    def test_a_silent_head_composes_with_nobody(self, kind):
        heads = made(1)
        silent = StandardHeads.from_arrays(0 * heads.W_Q, heads.W_K, heads.W_V, 0 * heads.W_O)
        assert circuits.composition(circuits.of(silent, 0), circuits.of(heads, 0), kind) == 0.0
        assert circuits.composition(circuits.of(heads, 0), circuits.of(silent, 0), kind) == 0.0

    def test_rotary_heads_by_distance(self, kind):
        """The pattern of that distance; what is passed on knows no distance."""
        earlier, later = made(1), made(2, rotary=Rotary())
        R = Rotary().matrix(3, 4)
        turned = StandardHeads.from_arrays(later.W_Q @ R, later.W_K, later.W_V, later.W_O)
        one, two = circuits.of(earlier, 0), circuits.of(later, 1)
        assert_exact(circuits.composition(one, two, kind, distance=3), published(earlier, turned, kind, 0, 1))
        if kind != "v":
            with pytest.raises(ValueError, match="is rotary"):
                circuits.composition(one, two, kind)

    def test_refusals(self, kind):
        one, other = circuits.of(made(), 0), circuits.of(made(width=9), 0)
        with pytest.raises(
            ValueError, match=r"writes states of width 12, the later reads vectors of width 9"
        ):
            circuits.composition(one, other, kind)
        with pytest.raises(ValueError, match="kind must be one of 'q', 'k', 'v', got 'Q'"):
            circuits.composition(one, one, kind.upper().replace("K", "Q").replace("V", "Q"))
        with pytest.raises(ValueError, match=r"all with one number of heads, got \[1, 3\]"):
            circuits.compositions([[one], [one] * 3], kind)
        for nothing in ([], [[], []]):
            with pytest.raises(ValueError, match="layers must be one or more"):
                circuits.compositions(nothing, kind)


def test_values_of_latent_heads_read_no_states():
    latent = made(1, form=LatentHeads, content_dim=2, rotary_dim=2, latent_dim=5)
    with pytest.raises(ValueError, match="latent heads read latents"):
        circuits.composition(circuits.of(made(), 0), circuits.of(latent, 0), "v")
    assert 0 < circuits.composition(circuits.of(latent, 0), circuits.of(made(), 0), "v") < 1


@pytest.fixture(scope="module")
def trained() -> lm.LanguageModel:
    return lm.load_trained()[0]


class TestTheTrainedModel:
    """What is known of the weights that ship with the package, read off the weights alone and off a run."""

    def test_induction_heads_read_what_previous_token_heads_write(self, trained):
        before = (lm.previous_token_scores(trained, samples=4)[0] > 0.35).nonzero()[:, 0].tolist()
        after = (lm.induction_scores(trained, samples=4)[1] > 0.35).nonzero()[:, 0].tolist()
        assert len(before) == len(after) == 2
        scores = circuits.compositions(trained, "k", relative=True)[1, :, 0]
        strongest = {divmod(pair, 4) for pair in scores.flatten().topk(3).indices.tolist()}
        assert strongest <= {(one, other) for one in after for other in before}
        assert scores.max() > 2  # times what unrelated heads have

    def test_without_the_edge_to_the_token_before_there_is_no_induction(self, trained):
        first = torch.stack(
            [torch.randperm(1024, generator=torch.Generator().manual_seed(s))[:24] for s in range(4)]
        )
        tokens = torch.cat([first, first], dim=1)
        edges = circuits.previous_token(tokens).edge_index
        with torch.no_grad():
            whole = circuits.match(trace.record(trained, tokens), circuits.induction(tokens))
            cut = trace.record(trained, tokens, surgery=trace.cut(edges, layers=0, heads=[2, 3]))
        assert whole[1, [0, 3]].min() > 0.4
        assert circuits.match(cut, circuits.induction(tokens))[1, [0, 3]].max() < 0.1

    def test_the_layers_of_a_model_from_elsewhere(self):
        """Any model's heads by heads_of: here torch's own encoder."""
        layer = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, norm_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        layers = [
            circuits.each(ga.heads_of(encoder, number), gain=encoder.layers[number].norm1.weight)
            for number in range(2)
        ]
        assert circuits.compositions(layers, "q").shape == (2, 3, 2, 3)
