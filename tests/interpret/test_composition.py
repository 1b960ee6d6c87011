"""Composition of heads against its reference_composition definition, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import redraw

from gnn_attention import StandardHeads
from gnn_attention import model as lm
from gnn_attention.interpret import circuits
from gnn_attention.rotary import Rotary


def make_heads(seed: int = 0, **kind: Any) -> Any:
    return redraw(StandardHeads(**{"width": 12, "num_heads": 3, **kind}), seed)


def reference_score(earlier: Any, later: Any, kind: str, h1: int, h2: int) -> float:
    """Return TransformerLens' ``composition_scores``, ``||OV right|| / (||OV|| ||right||)``."""
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
        earlier, later = make_heads(1, **first), make_heads(2, **second)
        for h1, first_circuit in enumerate(circuits.each(earlier)):
            for h2, second_circuit in enumerate(circuits.each(later)):
                expected = reference_score(earlier, later, kind, h1, h2)
                assert_exact(circuits.composition(first_circuit, second_circuit, kind), expected)

    def test_all_pairs_of_a_model(self, kind):
        """Scores are 0 unless the first layer is earlier, and the gains of both norms are folded in."""
        sizes = {"width": 12, "num_layers": 3, "num_heads": 2, "head_dim": 4, "mlp_width": 8, "reach": 3}
        model = redraw(lm.LanguageModel(lm.Config(9, **sizes)))
        scaled_heads = []
        for block in model.blocks:
            heads, gain = block.attention.heads, block.attention_norm.weight.diag()
            W_in = (gain @ W for W in (heads.W_Q, heads.W_K, heads.W_V))
            scaled_heads.append(StandardHeads.from_arrays(*W_in, heads.W_O))
        expected = torch.zeros(3, 2, 3, 2, dtype=torch.float64)
        for layer_2, h2, layer_1, h1 in expected.new_ones(expected.shape).nonzero().tolist():
            if layer_1 < layer_2:
                first, second = scaled_heads[layer_1], scaled_heads[layer_2]
                expected[layer_2, h2, layer_1, h1] = reference_score(first, second, kind, h1, h2)
        scores = circuits.compositions(model, kind)
        assert_exact(scores, expected)
        assert_exact(circuits.compositions(model, kind, relative=True), scores * 12**0.5)

    def test_the_extremes(self, kind):
        """A head reads exactly the direction that another one writes, or nothing of it, or is zero."""
        axes = torch.eye(6, dtype=torch.float64)

        def head(read: int, write: int, size: float = 1.0) -> circuits.Circuit:
            column, row = size * axes[None, :, read : read + 1], size * axes[None, write : write + 1]
            return circuits.of(StandardHeads.from_arrays(column, column, column, row), 0)

        assert circuits.composition(head(0, 3), head(3, 4), kind) == 1.0
        for later, sizes in ((2, (1, 1)), (3, (0, 1)), (3, (1, 0))):
            writer, reader = head(0, 3, sizes[0]), head(later, 4, sizes[1])
            assert circuits.composition(writer, reader, kind) == 0.0

    def test_rotary_heads_by_distance(self, kind):
        """Queries and keys compose through the pattern at a distance, values without a distance."""
        earlier, later = make_heads(1), make_heads(2, rotary=Rotary())
        W_Q = later.W_Q @ Rotary().matrix(3, 4)
        rotated = StandardHeads.from_arrays(W_Q, later.W_K, later.W_V, later.W_O)
        writer, reader = circuits.of(earlier, 0), circuits.of(later, 1)
        expected = reference_score(earlier, rotated, kind, 0, 1)
        assert_exact(circuits.composition(writer, reader, kind, distance=3), expected)
        if kind != "v":
            with pytest.raises(ValueError, match="is rotary"):
                circuits.composition(writer, reader, kind)


def test_refusals_of_composition():
    circuit, narrow = circuits.of(make_heads(), 0), circuits.of(make_heads(width=9), 0)
    cases = [
        (circuit, narrow, "q", ValueError, "writes states of width 12, the later reads vectors of width 9"),
        (circuit, circuit, "Q", ValueError, "kind must be one of 'q', 'k', 'v', got 'Q'"),
        (circuit, make_heads(), "q", TypeError, "later must be a Circuit, got StandardHeads"),
    ]
    assert_refusals((partial(circuits.composition, *args), error, match) for *args, error, match in cases)
    with pytest.raises(TypeError, match="model must be a LanguageModel, got"):
        circuits.compositions([[circuit]], "q")
