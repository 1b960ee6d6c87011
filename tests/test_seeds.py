"""The claims of the five source texts, one test for each, in their order: ``test_S1_2_...`` is seed S1.2.

S0 = "Refactoring the Attention Equations: Patterns and Messages", S1 = "Patterns and Messages - Part 2 -
Token Communication" (both Chris McCormick), S2 = the note on query, key and value projections, S3 =
"Multi-Headed attention as matrix multiplication", S4 = "Attention: All you need to know" (far.in.net). What
is expected is written out in plain torch and float64; of the library only parameters are read for it. Where a
text errs, the right thing is tested and the docstring says "Erratum".
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import dense
from support.inputs import drawn
from torch import Tensor, nn
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import (
    FactoredHeads,
    MergedHeads,
    MessagePassingAttention,
    StandardHeads,
    edge_softmax,
    explorer,
    patterns,
)
from gnn_attention import model as lm

# what the tests of a package promise already: tests/<package>
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
# what chapters of the book compute and assert
IN_NOTEBOOKS = "S1.7 S1.9 S1.26 S1.27 S3.4 S4.8 S4.9 S4.12 S4.15 S4.20 S4.23 S4.24 S4.25"
# what notebooks show beyond numbers: their cells are tagged with it
SHOWN = (
    "S0.7 S0.9 S0.10 S1.7 S1.10 S1.11 S1.16 S1.26 S1.27 S2.7 S3.4 S3.8 S4.3 S4.5 S4.8 S4.9 S4.11 S4.12 S4.15 "
    "S4.20 S4.23 S4.24 S4.25"
)
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


# asymmetric: 0 -> 2 but not 2 -> 0; its edges in no order, no isolated row
LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)


@pytest.fixture(params=["message_passing", "reference", "dense"], ids=["walk", "reference", "dense"])
def way(request: pytest.FixtureRequest) -> str | None:
    """Edge by edge as torch_geometric walks, and two backends (``attend`` has no walk: "auto")."""
    way: str | None = request.param
    return way


def redrawn(module: nn.Module, seed: int = 1) -> Any:
    """The module in float64 with every parameter drawn anew (biases, norms and tables too), frozen."""
    for number, parameter in enumerate(module.double().requires_grad_(False).parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=100 * seed + number) / 2)
    return module


def heads_with(width: int = 12, num_heads: int = 3, seed: int = 1, **sizes: Any) -> StandardHeads:
    heads: StandardHeads = redrawn(StandardHeads(width, num_heads, **sizes), seed)
    return heads


def model_with(num_layers: int = 2) -> lm.LanguageModel:
    """A small language model whose every parameter is drawn."""
    sizes = {"width": 12, "num_heads": 3, "head_dim": 4, "mlp_width": 8, "reach": 3}
    model: lm.LanguageModel = redrawn(
        lm.LanguageModel(lm.Config(vocabulary_size=9, num_layers=num_layers, **sizes))
    )
    return model


def run(heads: Any, x: Any, graph: ga.TokenGraph, way: str = "message_passing") -> Tensor:
    """The update of the layer."""
    update: Tensor = MessagePassingAttention(heads, backend=way)(x, graph)
    return update


def softmaxed(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """``softmax(q k^T / sqrt(d))`` over the pairs of the mask ``[dst, src]``, in plain torch."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)


def weights_of(heads: StandardHeads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[heads, dst, src]``."""
    return softmaxed(x @ heads.W_Q, x @ heads.W_K, mask)


def test_S0_7_all_in_model_space():
    """The reformulation keeps attention in model space: patterns meet embeddings, messages unembeddings."""
    heads, words = heads_with(), [7, 0, 19, 7, 4]
    embedding, unembedding = drawn(20, 12, seed=2), drawn(12, 20, seed=3)
    x, merged = embedding[words], MergedHeads.of(heads)
    # what every word of the vocabulary would score
    scores = merged.patterns(x[None])[0] @ embedding.T / 4**0.5
    assert_exact(scores[:, :, words], (x @ heads.W_Q) @ (x @ heads.W_K).mT / 2)
    in_words = merged.messages(x[None])[0] @ unembedding
    update = run(merged, x, patterns.full(5))
    assert_exact(update @ unembedding, (weights_of(heads, x) @ in_words).sum(0))


def test_S0_10_words_before_and_after_the_softmax():
    """logits_i = P_i X^T come before the softmax, "scores" (here: weights) after it."""
    q, k, v = (drawn(1, 3, 5, 4, seed=s) for s in range(3))
    src, dst = LISTED.edge_index
    logits = edge_softmax.logit(q[:, :, dst], k[:, :, src], 0.5)
    assert_exact(logits, (q @ k.mT * 0.5)[:, :, dst, src])
    expected = softmaxed(q, k, LISTED.mask())[:, :, dst, src]
    assert_exact(edge_softmax.softmax(logits, dst, 5)[0], expected)
    assert_exact(ga.attend(q, k, v, LISTED, return_info=True)[1].weights(), expected)
    public = {*ga.__all__, *ga._ON_DEMAND, *edge_softmax.__all__, *dir(StandardHeads), *dir(MergedHeads)}
    public |= set(inspect.signature(ga.attend).parameters)
    # FlexAttention's word, before the softmax
    assert {name for name in public if "score" in name} == {"score_mods", "score_mod"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9]*.ipynb")), ids=lambda path: path.stem[:2])
def test_S0_11_applications_illustrations_experiments(path):
    """In every chapter a picture that it drew, an assert, and at least three exercises with a check."""
    code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert any("assert " in line for cell in code for line in cell["source"])
    assert sum("check" in cell["metadata"].get("tags", ()) for cell in code) >= 3


def test_S1_11_a_pattern_is_a_template():
    """A 'template' vector has a high dot product with vectors that match it; so have neurons of an MLP."""
    words, wanted = torch.eye(6).double(), torch.tensor([3, 0, 5, 1, 2, 4])  # word w looks for wanted[w]
    keys = words[wanted.argsort()][None] * 9
    heads = StandardHeads.from_arrays(words[None] * 9, keys, words[None], words[None])
    pattern = FactoredHeads.of(heads).patterns(words[None])[0, 0]
    assert torch.equal((pattern @ words.T).topk(1).indices[:, 0], wanted)
    for text in (torch.tensor([2, 5, 1, 3, 0, 4]), torch.tensor([4, 1, 0, 2, 3, 5])):
        found = run(heads, words[text], patterns.full(6)).argmax(1)  # wherever the matching word stands
        assert torch.equal(found, wanted[text])
    mlp, embedding = model_with().blocks[0].mlp, drawn(20, 12)
    matching = (embedding @ mlp[0].weight.T + mlp[0].bias).argmax(0)  # the word that fits each neuron best
    assert torch.equal(mlp[:2](embedding).argmax(0), matching)


def test_S1_13_the_example_text():
    """The example text "Llamas do not output words": nodes in the notebooks, and what the explorer shows."""
    sentence = "Llamas do not output words"
    texts = {file.stem[:2]: file.read_text(encoding="utf-8") for file in NOTEBOOKS.glob("[0-9]*.py")}
    words = "WORDS = " + str(sentence.split()).replace("'", '"')
    assert {number for number, text in texts.items() if words in text} >= {"01", "15"}
    assert {number for number, text in texts.items() if sentence in text} >= {"03", "12", "15", "13"}
    _, vocabulary = lm.load_trained()
    assert vocabulary.decode(vocabulary.encode(sentence)) == sentence
    assert repr(explorer.page(sentence)).startswith(f"Page({sentence!r}")


def test_S1_17_softmax_is_a_competition():
    """A similarity is only significant compared to the others. Erratum: the magnitude is only bounded."""
    q, k, v = drawn(1, 1, 1, 4), drawn(1, 1, 6, 4, seed=1), drawn(1, 1, 6, 4, seed=2)
    graph, strong = patterns.cross(1, 6), torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]).double()
    infos = [ga.attend(q, k, v, graph, bias=bias, return_info=True)[1] for bias in (None, strong)]
    calm, lifted = (info.weights()[0, 0] for info in infos)
    assert ((lifted < calm) == (strong == 0)).all()
    assert ga.attend(q, k, v, graph).norm() <= v.norm(dim=-1).max()
    # even weights over T messages from N(0, 1)^64: |o| is chi with 64 degrees, mean 7.969 (variance < 1/2),
    # over sqrt(T)
    for tokens, samples in ((1, 4096), (16, 1024), (1024, 64)):
        messages, graph = drawn(samples, 1, tokens, 64), patterns.cross(1, tokens)
        sizes = ga.attend(messages[:, :, :1], messages, messages, graph, scale=0.0).norm(dim=-1)
        assert abs(sizes.mean() * tokens**0.5 - 7.969) < 5 * (0.5 / samples) ** 0.5  # measured: 8.02 and 0.25


def test_S2_2_what_queries_keys_and_values_mean(way):
    """The query is what x_i looks for, the key what it contains, the value what it should propagate."""
    q, k, v = (drawn(1, 1, 5, 4, seed=s) for s in range(3))
    other, here = drawn(4, seed=9), torch.arange(5) == 2

    def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, info = ga.attend(q, k, v, patterns.full(5), backend=way or "auto", return_info=True)
        return out[0, 0], info.weights().view(5, 5)

    new_q, new_k, new_v = (torch.where(here[:, None], other, x) for x in (q, k, v))
    (out, weights), (_, by_query) = attended(q, k, v), attended(new_q, k, v)
    (_, by_key), (changed, by_value) = attended(q, new_k, v), attended(q, k, new_v)
    # token 2 alone has other weights
    assert torch.equal((by_query - weights).abs().amax(1) > 1e-9, here)
    # all others share what token 2 leaves
    assert_exact((by_key / weights)[:, ~here], (by_key / weights)[:, :1].expand(5, 4))
    assert ((by_key - weights)[:, here].abs() > 1e-6).all()
    assert torch.equal(by_value, weights)
    assert_exact(changed - out, softmaxed(q, k)[0, 0][:, here] * (other - v[0, 0, 2]))


def test_S2_4_without_scaling_gradients_vanish():
    """Larger dot products would cause the softmax function to saturate, resulting in vanishing gradients."""

    def of_a_typical_receiver(d: int, scale: float) -> tuple[float, float]:
        q, k, v, direction = (drawn(1, 4, 40, size, seed=s) for s, size in enumerate((d, d, 4, 4)))
        # its gradient is that of the logits
        added = torch.zeros(1, 4, 40 * 40, dtype=torch.float64, requires_grad=True)
        out, info = ga.attend(q, k, v, patterns.full(40), scale=scale, bias=added, return_info=True)
        (out * direction).sum().backward()
        gradients, weights = (x.unflatten(2, (40, 40)) for x in (added.grad, info.weights().detach()))
        return gradients.norm(dim=-1).median().item(), weights.amax(-1).median().item()

    gradient, largest = of_a_typical_receiver(1024, 1024**-0.5)
    unscaled, saturated = zip(*(of_a_typical_receiver(d, 1.0) for d in (16, 256, 1024)), strict=True)
    # the same for any size: two medians of 160 numbers that vary by half are off by 7 % of each other
    assert 0.8 < gradient / of_a_typical_receiver(16, 16**-0.5)[0] < 1.25
    assert unscaled[0] > 10 * unscaled[1] > 100 * unscaled[2]
    assert unscaled[2] < gradient / 100
    assert saturated[2] > 0.99 > 0.2 > largest  # one sender has all the weight


MEASURED = [(16, 15.97, 0.998), (64, 63.96, 0.999), (256, 255.8, 0.999)]


@pytest.mark.parametrize(("d_head", "measured", "measured_scaled"), MEASURED)
def test_S2_9_variance_of_dot_products(d_head, measured, measured_scaled):
    """For q_i, k_i from N(0, 1), q_i . k_i has mean 0 and variance d_head, scaled a variance of 1."""
    n = 2**15
    q, k, scale = drawn(n, d_head), drawn(n, d_head, seed=1), StandardHeads(4, 1, d_head).scale
    # five standard errors of a variance: the sum's excess kurtosis is 6 / d_head
    error = 5 * ((2 + 6 / d_head) / n) ** 0.5
    for factor, variance, seen in ((1.0, d_head, measured), (scale, 1.0, measured_scaled)):
        scores = edge_softmax.logit(q, k, factor)
        assert abs(scores.mean()) < 5 * (variance / n) ** 0.5
        assert abs(scores.var() - variance) < error * variance
        assert abs(scores.var() - seen) < error * variance


def test_S3_2_weights_before_they_are_normalised(way):
    """w_j is proportional to exp((W^Q v_i) . (W^K v_j) / sqrt(d))."""
    (q, k, v), (src, dst) = (drawn(1, 2, 5, 4, seed=s) for s in range(3)), LISTED.edge_index
    _, info = ga.attend(q, k, v, LISTED, return_info=True, backend=way or "auto")
    unnormalised = info.weights() * info.lse.exp()[:, :, dst]
    assert_exact(unnormalised, torch.exp((q[:, :, dst] * k[:, :, src]).sum(-1) / 4**0.5))


def test_S3_6_a_sum_without_oneself(way):
    """o_i = sum over j != i of w_j W^V v_j. Erratum: O = A V has j = i too; this is another graph."""
    heads, x = heads_with(num_heads=1, head_dim=4), drawn(6, 12)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V)
    full, others = (run(bare, x, graph, way) for graph in (patterns.full(6), patterns.no_self(6)))
    S, V = (x @ heads.W_Q[0]) @ (x @ heads.W_K[0]).T / 2, x @ heads.W_V[0]
    assert_exact(full, S.softmax(1) @ V)
    assert_exact(others, (S + torch.full((6,), -torch.inf).diag()).softmax(1) @ V)
    assert (full - others).abs().max() > 1e-3
    diagonal = S.softmax(1).diag()[:, None]
    without = S.softmax(1).fill_diagonal_(0) @ V  # as in O = A V with A_ii set to 0
    assert_exact(others, without / (1 - diagonal))
    assert (others - without).abs().max() > 0.1


def test_S4_2_a_sequence_model():
    """An embedding block, transformer blocks (attention, MLP), each an additive update, an unembedding."""
    model, ids = model_with(), [3, 1, 4, 1, 5]
    _, logits = dense(model.state_dict(), ids, patterns.causal(5).mask().expand(2, 3, 5, 5))
    assert_exact(model(torch.tensor([ids]))[0], logits)
    assert [model(torch.zeros(2, T, dtype=torch.int64)).shape for T in (1, 7)] == [(2, 1, 9), (2, 7, 9)]


def test_S4_7_inverse_temperature(way):
    """The factor beta is an inverse temperature, usually 1 / sqrt(h): how soft the softmax is."""
    q, k, one_hot = drawn(1, 1, 5, 4), drawn(1, 1, 5, 4, seed=1), torch.eye(5).double()[None, None]
    mask = LISTED.mask()
    logits = (q @ k.mT)[0, 0].masked_fill(~mask, -torch.inf)

    def weights_at(beta: float | None) -> Tensor:
        return ga.attend(q, k, one_hot, LISTED, scale=beta, backend=way)[0, 0]

    assert_exact(weights_at(None), (logits / 4**0.5).softmax(1))
    assert_exact(weights_at(0.3), (0.3 * logits).softmax(1))
    assert_exact(weights_at(1e6), functional.one_hot(logits.argmax(1), 5).double())
    assert_exact(weights_at(0.0), mask / mask.sum(1, keepdim=True).double())


def test_S4_18_limited_bandwidth():
    """A sender has one key and one message for all its receivers; multiple heads ameliorate that."""
    heads, x, graph, seen = heads_with(), drawn(8, 12), patterns.full(8), []
    layer = MessagePassingAttention(FactoredHeads.of(heads))
    layer.register_message_forward_hook(lambda module, inputs, output: seen.append(output))
    layer(x, graph)
    src = graph.edge_index[0]
    sent = seen[0][src == 5]  # [receivers, heads, width]: what node 5 sends to each of the 8
    weights = weights_of(heads, x)[:, :, 5].T
    assert_exact(sent, weights.unsqueeze(-1) * (x[5:6] @ heads.W_V @ heads.W_O)[:, 0])
    rank = torch.linalg.matrix_rank
    assert rank(sent.transpose(0, 1)).tolist() == [1, 1, 1]  # of one head: the same direction
    assert rank(sent.sum(1)) == 3


def test_notebooks_show_it():
    """The committed notebook has an output where its source says that it is for a seed."""
    shown = set()
    for file in NOTEBOOKS.glob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            shown.update(cell["metadata"].get("tags", ()) if cell.get("outputs") else ())
    assert shown >= set(SHOWN.split())


def test_every_seed_is_tested():
    """Here, by a package's own tests or by a notebook, and by one of them alone."""
    every = {f"S{text}.{n}" for text, last in enumerate((11, 28, 9, 8, 25)) for n in range(1, last + 1)}
    found = [re.match(r"test_S(\d)_(\d+)_", name) for name in globals()]
    here = [f"S{match[1]}.{match[2]}" for match in found if match]
    others = " ".join([*ELSEWHERE.values(), IN_NOTEBOOKS]).split()
    assert len(here + others) == len(every)
    assert {*here, *others} == every
    assert all((Path(__file__).parent / package).is_dir() for package in ELSEWHERE)
