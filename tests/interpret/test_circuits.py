"""The split of logits, lengths of patterns and composition, against dense float64 formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import drawn, redrawn
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret import circuits, trace
from gnn_attention.interpret.circuits import lengths
from gnn_attention.rotary import Rotary
from gnn_attention.verify.measure import EXACT

LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)
CAUSAL = patterns.causal(5)


def made(seed: int = 0, form: Any = StandardHeads, **kind: Any) -> Any:
    return redrawn(form(**{"width": 12, "num_heads": 3, **kind}), seed)


class TestSplit:
    @pytest.mark.parametrize("graph", [LISTED, CAUSAL, CAUSAL - CAUSAL], ids=["listed", "causal", "no edges"])
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize("side", ["receiver", "sender"])
    def test_the_product_is_the_logit(self, graph, bias, side, monkeypatch):
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
        assert (parts.cosine.abs() <= 1 + EXACT).all()
        # a few edges at a time
        monkeypatch.setattr(lengths, "NUMBERS_AT_ONCE", 200)
        for listed in (graph, graph.edge_index, graph.edge_index.t().tolist()):
            assert torch.equal(circuits.split(p, s, listed).cosine, parts.cosine)

    def test_without_edges_vector_by_vector(self):
        p, x = drawn(3, 5, 12), drawn(5, 12, seed=1)
        assert_exact(circuits.split(p, x).product, (p * x).sum(-1))
        every = circuits.split(p.unsqueeze(-2), x)
        assert_exact(every.product, p @ x.mT)
        assert_exact(every.cosine, functional.cosine_similarity(p.unsqueeze(-2), x, dim=-1))
        zero = circuits.split(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        assert zero.cosine.tolist() == zero.product.tolist() == [0.0, 0.0]

    def test_refusals(self):
        ints, vectors = torch.ones(5, 12, dtype=torch.int64), drawn(5, 12)
        wrong = [
            (vectors, drawn(5, 11), None, ValueError, r"of one width .*\[5, 12\] and .*shape \[5, 11\]"),
            (vectors, ints, None, TypeError, "must be float tensors"),
            (drawn(4, 12), vectors, None, ValueError, r"must broadcast, got .*\[4, 12\] and .*\[5, 12\]"),
            (drawn(12), vectors, LISTED, ValueError, r"patterns must be \[..., dst, width\]"),
            (vectors, drawn(4, 12), LISTED, ValueError, "edges must be over 4 senders and 5 receivers"),
            (vectors, vectors, [(0, 5)], IndexError, "is no receiver"),
        ]
        assert_refusals((partial(circuits.split, *given), error, match) for *given, error, match in wrong)


class TestPatternLengths:
    @pytest.mark.parametrize("kind", [{}, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "bias": True}])
    def test_against_the_patterns(self, kind):
        """From any form, a layer of it, and a run, whose queries hold the biases already."""
        heads, x = made(**kind), drawn(2, 5, 12)
        near = FactoredHeads.of(heads).patterns(x).square().sum(-1).sqrt().detach()
        far = FactoredHeads.of(heads, side="sender").patterns(x).square().sum(-1).sqrt().detach()
        layer = MessagePassingAttention(heads)
        forms = (heads, FactoredHeads.of(heads), MergedHeads.of(heads, side="sender"), layer)
        run = trace.record(layer, x, CAUSAL)
        found = [circuits.pattern_lengths(source, x) for source in forms]
        for one in (*found, circuits.pattern_lengths(run.layers[0])):
            assert_exact(one, (near, far))
        assert circuits.pattern_lengths(heads, x[0]).receiver.shape == (heads.num_heads, 5)

    def test_refusals(self):
        rotary, x = made(rotary=Rotary()), drawn(5, 12)
        layers = [MessagePassingAttention(heads) for heads in (MergedHeads.of(made()), rotary)]
        runs = [trace.record(layer, x, CAUSAL).layers[0] for layer in layers]
        wrong = [
            (made(), None, TypeError, "x must be given with heads or a layer"),
            ("heads", x, TypeError, "source must be heads"),
            (rotary, x, ValueError, "is rotary"),
            (runs[0], None, TypeError, "a run of StandardHeads, got MergedHeads: give its heads"),
            (runs[1], None, ValueError, "is rotary"),
        ]
        lengths_of = circuits.pattern_lengths
        assert_refusals((partial(lengths_of, source, x), error, match) for source, x, error, match in wrong)


def published(earlier: Any, later: Any, kind: str, h1: int, h2: int) -> float:
    """TransformerLens' ``composition_scores``: ``||left right|| / (||left|| ||right||)``, left = OV."""
    group = later.num_heads // later.num_kv_heads
    OV = earlier.W_V[h1 // (earlier.num_heads // earlier.num_kv_heads)] @ earlier.W_O[h1]
    QK = later.W_Q[h2] @ later.W_K[h2 // group].mT
    right = {"q": QK, "k": QK.mT, "v": later.W_V[h2 // group] @ later.W_O[h2]}[kind]
    norm = torch.linalg.matrix_norm
    return (norm(OV @ right) / (norm(OV) * norm(right))).item()


GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5}
PAIRS = [({}, {}), ({"head_dim": 20, "value_dim": 15}, {"head_dim": 2}), (GROUPED, {})]


@pytest.mark.parametrize("kind", ["q", "k", "v"])
class TestComposition:
    @pytest.mark.parametrize(("first", "second"), PAIRS, ids=["plain", "wider than the states", "grouped"])
    @pytest.mark.parametrize("form", [lambda heads: heads, MergedHeads.of], ids=["standard", "merged"])
    def test_against_the_published_definition(self, kind, first, second, form):
        earlier, later = made(1, **first), made(2, **second)
        for h1, one in enumerate(circuits.each(form(earlier))):
            for h2, two in enumerate(circuits.each(form(later))):
                expected = published(earlier, later, kind, h1, h2)
                assert_exact(circuits.composition(one, two, kind), expected)

    def test_all_pairs_of_a_model(self, kind):
        """0 unless the layers are in order; the gains of both layers' norms are folded in."""
        sizes = {"width": 12, "num_layers": 3, "num_heads": 2, "head_dim": 4, "mlp_width": 8, "reach": 3}
        model = redrawn(lm.LanguageModel(lm.Config(9, **sizes)))
        gained = []
        for block in model.blocks:
            heads, gain = block.attention.heads, block.attention_norm.weight.diag()
            W_in = (gain @ W for W in (heads.W_Q, heads.W_K, heads.W_V))
            gained.append(StandardHeads.from_arrays(*W_in, heads.W_O))
        wanted = torch.zeros(3, 2, 3, 2, dtype=torch.float64)
        for after, h2, before, h1 in wanted.new_ones(wanted.shape).nonzero().tolist():
            if before < after:
                wanted[after, h2, before, h1] = published(gained[before], gained[after], kind, h1, h2)
        scores = circuits.compositions(model, kind)
        assert_exact(scores, wanted)
        assert_exact(circuits.compositions(model, kind, relative=True), scores * 12**0.5)
        listed = [circuits.each(block) for block in model.blocks]
        assert torch.equal(circuits.compositions(listed, kind), scores)

    def test_the_extremes(self, kind):
        """A head that reads just the one direction that another writes, or nothing of it; a head of zeros."""
        axes = torch.eye(6, dtype=torch.float64)

        def head(read: int, write: int, size: float = 1.0) -> circuits.Circuit:
            column, row = size * axes[None, :, read : read + 1], size * axes[None, write : write + 1]
            return circuits.of(StandardHeads.from_arrays(column, column, column, row), 0)

        assert circuits.composition(head(0, 3), head(3, 4), kind) == 1.0
        for later, sizes in ((2, (1, 1)), (3, (0, 1)), (3, (1, 0))):
            one, two = head(0, 3, sizes[0]), head(later, 4, sizes[1])
            assert circuits.composition(one, two, kind) == 0.0

    def test_rotary_heads_by_distance(self, kind):
        """The pattern of that distance; what is passed on knows no distance."""
        earlier, later = made(1), made(2, rotary=Rotary())
        W_Q = later.W_Q @ Rotary().matrix(3, 4)
        rotated = StandardHeads.from_arrays(W_Q, later.W_K, later.W_V, later.W_O)
        one, two = circuits.of(earlier, 0), circuits.of(later, 1)
        assert_exact(
            circuits.composition(one, two, kind, distance=3), published(earlier, rotated, kind, 0, 1)
        )
        if kind != "v":
            with pytest.raises(ValueError, match="is rotary"):
                circuits.composition(one, two, kind)


def test_refusals_of_composition():
    one, other = circuits.of(made(), 0), circuits.of(made(width=9), 0)
    latent = circuits.of(made(1, form=LatentHeads, content_dim=2, rotary_dim=2, latent_dim=5), 0)
    wrong = [
        (one, other, "q", ValueError, "writes states of width 12, the later reads vectors of width 9"),
        (one, one, "Q", ValueError, "kind must be one of 'q', 'k', 'v', got 'Q'"),
        (one, made(), "q", TypeError, "later must be a Circuit, .* got StandardHeads"),
        (one, latent, "v", ValueError, "latent heads read latents"),
    ]
    assert_refusals((partial(circuits.composition, *given), error, match) for *given, error, match in wrong)
    for layers in ([[one], [one] * 3], []):
        with pytest.raises(ValueError, match="layers must be one or more, all with one number of heads"):
            circuits.compositions(layers, "q")
    assert 0 < circuits.composition(latent, one, "v") < 1
