"""The claims ("seeds") of five source texts hold; each has one test, as ``test_S1_2_...`` for seed S1.2.

S0 = "Refactoring the Attention Equations: Patterns and Messages", S1 = "Patterns and Messages - Part 2 -
Token Communication" (both Chris McCormick), S2 = the note on query, key and value projections, S3 =
"Multi-Headed attention as matrix multiplication", S4 = "Attention: All you need to know" (far.in.net). The
expected values are computed in plain torch and float64, from parameters of the library alone. If a text
errs, the corrected claim is tested and the docstring says "Erratum".
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import dense
from support.inputs import randn
from support.traces import redraw
from torch import Tensor

import gnn_attention as ga
from gnn_attention import MergedHeads, StandardHeads, edge_softmax, explorer, patterns
from gnn_attention import model as lm

# Tests of a package, in tests/<package>, already test these seeds.
ELSEWHERE = {
    "heads": "S0.1 S0.2 S0.3 S0.4 S0.5 S0.6 S0.8 S0.9 S1.1 S1.2 S1.3 S1.4 S1.6 S1.8 S1.10 S1.12 S1.15 S1.16 "
    "S1.18 S1.21 S1.23 S2.1 S2.7 S2.8 S3.7 S3.8 S4.5 S4.13 S4.14",
    "layer": "S1.20 S2.6 S4.21",
    "cache": "S1.14 S1.28",
    "analyse": "S1.5 S1.22",
    "convert": "S4.16",
    "graph": "S4.22",
    "interpret": "S1.24 S1.25 S3.1 S3.3 S3.5 S4.1 S4.3 S4.4 S4.10 S4.11 S4.17 S4.19",
    "model": "S1.19 S2.5",
    "backends": "S2.3 S4.6",
}
# Chapters of the book compute and assert these seeds.
IN_NOTEBOOKS = (
    "S0.7 S1.7 S1.9 S1.11 S1.17 S1.26 S1.27 S2.4 S2.9 S3.4 S3.6 S4.7 S4.8 S4.9 S4.12 S4.15 S4.18 S4.20 S4.23 "
    "S4.24 S4.25"
)
# Notebooks show these seeds by more than numbers, in cells that are tagged with them.
SHOWN = (
    "S0.7 S0.9 S0.10 S1.7 S1.10 S1.11 S1.16 S1.26 S1.27 S2.7 S3.4 S3.8 S4.3 S4.5 S4.8 S4.9 S4.11 S4.12 S4.15 "
    "S4.20 S4.23 S4.24 S4.25"
)
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

# The graph is asymmetric (0 -> 2 but not 2 -> 0), its edges are in no order, and no receiver is isolated.
LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)

each_backend = pytest.mark.parametrize("backend", ["message_passing", "reference", "dense"])


def masked_softmax(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d))`` over the pairs of the mask ``[dst, src]``."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)


def test_S0_10_words_before_and_after_the_softmax():
    """The logits P_i X^T come before the softmax, the "scores" (here: weights) after it."""
    q, k, v = (randn(1, 3, 5, 4, seed=s) for s in range(3))
    src, dst = LISTED.edge_index
    logits = edge_softmax.logit(q[:, :, dst], k[:, :, src], 0.5)
    assert_exact(logits, (q @ k.mT * 0.5)[:, :, dst, src])
    expected = masked_softmax(q, k, LISTED.mask())[:, :, dst, src]
    assert_exact(edge_softmax.softmax(logits, dst, 5)[0], expected)
    assert_exact(ga.attend(q, k, v, LISTED, return_info=True)[1].weights(), expected)
    public = {*ga.__all__, *ga._LAZY_IMPORTS, *edge_softmax.__all__, *dir(StandardHeads), *dir(MergedHeads)}
    public |= set(inspect.signature(ga.attend).parameters)
    # The exception is score_mod, FlexAttention's name for a change before the softmax.
    assert {name for name in public if "score" in name} == {"score_mods", "score_mod"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9]*.ipynb")), ids=lambda path: path.stem[:2])
def test_S0_11_applications_illustrations_experiments(path):
    """Every chapter has a picture among its outputs, an assert, and at least three exercises with a check."""
    code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert any("assert " in line for cell in code for line in cell["source"])
    assert sum("check" in cell["metadata"].get("tags", ()) for cell in code) >= 3


def test_S1_13_the_example_text():
    """The example text "Llamas do not output words" is used in notebooks and in the explorer."""
    sentence = "Llamas do not output words"
    texts = {file.stem[:2]: file.read_text(encoding="utf-8") for file in NOTEBOOKS.glob("[0-9]*.py")}
    words = "WORDS = " + str(sentence.split()).replace("'", '"')
    assert {number for number, text in texts.items() if words in text} >= {"01", "17"}
    assert {number for number, text in texts.items() if sentence in text} >= {"04", "13", "14", "17"}
    _, vocabulary = lm.load_trained()
    assert vocabulary.decode(vocabulary.encode(sentence)) == sentence
    assert repr(explorer.page(sentence)).startswith(f"Page({sentence!r}")


@each_backend
def test_S2_2_what_queries_keys_and_values_mean(backend):
    """The query is what x_i looks for, the key what it contains, the value what it should propagate."""
    q, k, v = (randn(1, 1, 5, 4, seed=s) for s in range(3))
    new_row, is_token_2 = randn(4, seed=9), torch.arange(5) == 2

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, info = ga.attend(q, k, v, patterns.full(5), backend=backend, return_info=True)
        return out[0, 0], info.weights().view(5, 5)

    new_q, new_k, new_v = (torch.where(is_token_2[:, None], new_row, x) for x in (q, k, v))
    (out, weights), (_, query_weights) = run(q, k, v), run(new_q, k, v)
    (_, key_weights), (new_out, value_weights) = run(q, new_k, v), run(q, k, new_v)
    # A new query changes the weights of token 2 alone.
    assert torch.equal((query_weights - weights).abs().amax(1) > 1e-9, is_token_2)
    # After a new key, the weights of all other senders change by one factor.
    ratio = key_weights / weights
    assert_exact(ratio[:, ~is_token_2], ratio[:, :1].expand(5, 4))
    assert ((key_weights - weights)[:, is_token_2].abs() > 1e-6).all()
    assert torch.equal(value_weights, weights)
    assert_exact(new_out - out, masked_softmax(q, k)[0, 0][:, is_token_2] * (new_row - v[0, 0, 2]))


@each_backend
def test_S3_2_weights_before_they_are_normalised(backend):
    """The weight w_j is proportional to exp((W^Q v_i) . (W^K v_j) / sqrt(d))."""
    (q, k, v), (src, dst) = (randn(1, 2, 5, 4, seed=s) for s in range(3)), LISTED.edge_index
    _, info = ga.attend(q, k, v, LISTED, return_info=True, backend=backend)
    unnormalised = info.weights() * info.lse.exp()[:, :, dst]
    assert_exact(unnormalised, torch.exp((q[:, :, dst] * k[:, :, src]).sum(-1) / 4**0.5))


@torch.no_grad()
def test_S4_2_a_sequence_model():
    """A model has an embedding, blocks whose attention and MLP each add an update, and an unembedding."""
    model, ids = redraw(lm.LanguageModel(lm.Config(9, 12, 2, 3, 4, 8, reach=3))), [3, 1, 4, 1, 5]
    _, logits = dense(model.state_dict(), ids, patterns.causal(5).mask().expand(2, 3, 5, 5))
    assert_exact(model(torch.tensor([ids]))[0], logits)
    assert [model(torch.zeros(2, T, dtype=torch.int64)).shape for T in (1, 7)] == [(2, 1, 9), (2, 7, 9)]


def test_notebooks_show_it():
    """The committed notebooks have outputs in the cells that are tagged with seeds."""
    tags = set()
    for file in NOTEBOOKS.glob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            tags.update(cell["metadata"].get("tags", ()) if cell.get("outputs") else ())
    assert tags >= set(SHOWN.split())


def test_every_seed_is_tested():
    """Each seed has exactly one test, which is here, in the tests of a package, or in a notebook."""
    seeds = {f"S{text}.{n}" for text, last in enumerate((11, 28, 9, 8, 25)) for n in range(1, last + 1)}
    matches = [re.match(r"test_S(\d)_(\d+)_", name) for name in globals()]
    tested_seeds = [f"S{match[1]}.{match[2]}" for match in matches if match]
    tested_seeds += " ".join([*ELSEWHERE.values(), IN_NOTEBOOKS]).split()
    assert len(tested_seeds) == len(seeds)
    assert set(tested_seeds) == seeds
    assert all((Path(__file__).parent / package).is_dir() for package in ELSEWHERE)
