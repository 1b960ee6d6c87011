"""Composition of heads against its published definition, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import redrawn

from gnn_attention import StandardHeads
from gnn_attention import model as lm
from gnn_attention.interpret import circuits
from gnn_attention.rotary import Rotary


def made(seed: int = 0, **kind: Any) -> Any:
    return redrawn(StandardHeads(**{"width": 12, "num_heads": 3, **kind}), seed)


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
    def test_against_the_published_definition(self, kind, first, second):
        earlier, later = made(1, **first), made(2, **second)
        for h1, one in enumerate(circuits.each(earlier)):
            for h2, two in enumerate(circuits.each(later)):
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
    wrong = [
        (one, other, "q", ValueError, "writes states of width 12, the later reads vectors of width 9"),
        (one, one, "Q", ValueError, "kind must be one of 'q', 'k', 'v', got 'Q'"),
        (one, made(), "q", TypeError, "later must be a Circuit, got StandardHeads"),
    ]
    assert_refusals((partial(circuits.composition, *given), error, match) for *given, error, match in wrong)
    with pytest.raises(TypeError, match="model must be a LanguageModel, got"):
        circuits.compositions([[one]], "q")
