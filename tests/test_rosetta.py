"""The Rosetta page: every conversion makes, from our tensors, what a text's own formulas make."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support import rosetta_formulas as world
from support.bounds import assert_exact
from torch import Tensor

import gnn_attention as ga

PAGE = Path(__file__).parents[1] / "docs" / "rosetta.md"
FORMULAS = {formula.__name__: formula for formula in world.FORMULAS}
# our names, then the rows of each text: ours | their word | their axes | from ours
OURS, *TEXTS = (
    [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
)
NOTIONS = [name for name, _ in OURS]
CELLS = [(text, row[0], row[3]) for text, rows in zip(FORMULAS, TEXTS, strict=True) for row in rows]


@cache
def ours() -> dict[str, Tensor]:
    """The twenty notions as this library computes them."""
    heads = ga.StandardHeads.from_arrays(world.WQ, world.WK, world.WV, world.WO)
    graph = ga.convert.from_mask(world.MASK)
    call = ga.trace.record(ga.MessagePassingAttention(heads), world.X, graph).layers[0]
    factored, edges = ga.FactoredHeads.of(heads), call.edge_index
    found = {"x": world.X, "edges": edges, "mask": graph.mask(), "src": edges[0], "dst": edges[1]}
    found |= {name: getattr(heads, name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    found |= {"q": call.q[0], "k": call.k[0], "v": call.v[0], "z": call.z[0], "update": call.update[0]}
    found |= {"overlap": call.overlap()[0], "logits": call.pair_logits()[0]}
    found |= {"weights": call.dense(call.weights())[0], "carried": call.carried(edges)[0]}
    found |= {"W_P": heads.pattern_matrix().full(), "W_M": heads.message_matrix().full()}
    found |= {"pattern": factored.patterns(world.X[None])[0], "message": factored.messages(world.X[None])[0]}
    return {name: part.detach() for name, part in found.items()}


@cache
def theirs(text: str) -> dict[str, Tensor]:
    """A text's own formulas."""
    return FORMULAS[text]()


@pytest.mark.parametrize(("text", "notion", "made"), CELLS, ids=lambda part: str(part)[:24])
def test_every_conversion_runs(text: str, notion: str, made: str) -> None:
    """The expression of the cell, evaluated, is what the text's own formula gives, axis by axis."""
    converted, wanted = eval(made, {}, ours()), theirs(text)[notion].detach()
    assert converted.shape == wanted.shape
    if wanted.is_floating_point():
        assert_exact(converted, wanted)
    else:
        assert torch.equal(converted, wanted)


def test_every_text_has_its_rows() -> None:
    """Thirteen texts, twenty notions; no formula without a row, no row without a formula."""
    assert (len(TEXTS), len(NOTIONS)) == (13, 20)
    for name, rows in zip(FORMULAS, TEXTS, strict=True):
        found = [row[0] for row in rows]
        assert len(found) == len(set(found))
        assert set(found) == set(theirs(name)) <= set(NOTIONS)
    assert {notion for _, notion, _ in CELLS} == set(NOTIONS)


def test_a_symmetric_world_would_hide_a_turned_table() -> None:
    """Each tensor with two axes of tokens differs from its transpose, so that no test passes by accident."""
    assert not torch.equal(world.MASK, world.MASK.T)
    for name in ("overlap", "weights", "W_P", "W_M"):
        assert (ours()[name] - ours()[name].mT).abs().max() > 0.1
