"""The claims of the five source texts, one test for each, in their order: ``test_S1_15_...`` is seed S1.15.

S0 = "Refactoring the Attention Equations: Patterns and Messages", S1 = "Patterns and Messages - Part 2 -
Token Communication" (both Chris McCormick), S2 = the note on query, key and value projections, S3 =
"Multi-Headed attention as matrix multiplication", S4 = "Attention: All you need to know" (far.in.net). What
is expected is written out in plain torch and float64; of the library only parameters are read for it. Where a
text errs, the right thing is tested and the docstring says "Erratum".
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import timeit
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from support.bounds import assert_exact, error
from support.explorer_engine import data_of
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import EdgeConv

import gnn_attention as ga
from gnn_attention import (
    FactoredHeads,
    MergedHeads,
    MessagePassingAttention,
    StandardHeads,
    cost,
    edges,
    explorer,
    patterns,
)
from gnn_attention import model as lm
from gnn_attention.cache import PatternMessageCache
from gnn_attention.cli import cost as cli_cost
from gnn_attention.interpret import circuits, trace
from gnn_attention.layer.pairwise import PairwiseMessages, StaticNodes
from gnn_attention.verify.measure import EXACT

# notebooks with cells for what a seed claims beyond its numbers; the cells are tagged with it
SHOWN = {
    "S0.9": "07_three_forms",
    "S0.10": "06_four_perspectives",
    "S1.7": "07_three_forms",
    "S1.10": "07_three_forms",
    "S1.16": "07_three_forms",
    "S1.26": "10_low_rank_and_subspaces",
    "S3.4": "08_matrix_multiplication_is_message_passing",
    "S4.3": "11_communication_and_computation",
    "S4.11": "06_four_perspectives",
    "S4.15": "10_low_rank_and_subspaces",
    "S4.20": "12_induction_heads",
    "S4.23": "08_matrix_multiplication_is_message_passing",
}
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# asymmetric: 0 -> 2 but not 2 -> 0; its edges in no order, no isolated row
LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)


@pytest.fixture(params=[None, "reference", "dense"], ids=["walk", "reference", "dense"])
def way(request: pytest.FixtureRequest) -> str | None:
    """Edge by edge as torch_geometric walks, and two backends (``attend`` has no walk: "auto")."""
    way: str | None = request.param
    return way


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from N(0, 1) in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redrawn(module: nn.Module, seed: int = 1) -> Any:
    """The module in float64 with every parameter drawn anew (biases, norms and tables too), frozen."""
    for number, parameter in enumerate(module.double().requires_grad_(False).parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=100 * seed + number) / 2)
    return module


def heads_with(width: int = 12, num_heads: int = 3, seed: int = 1, **sizes: Any) -> StandardHeads:
    heads: StandardHeads = redrawn(StandardHeads(width, num_heads, **sizes), seed)
    return heads


def forms(heads: StandardHeads, *side: str) -> tuple[Any, Any]:
    """The two forms with patterns and messages."""
    return FactoredHeads.of(heads, *side), MergedHeads.of(heads, *side)


def model_with(num_layers: int = 2) -> lm.LanguageModel:
    """A small language model whose every parameter is drawn."""
    sizes = {"width": 12, "num_heads": 3, "head_dim": 4, "mlp_width": 8, "reach": 3}
    model: lm.LanguageModel = redrawn(
        lm.LanguageModel(lm.Config(vocabulary_size=9, num_layers=num_layers, **sizes))
    )
    return model


def run(heads: Any, x: Any, graph: ga.TokenGraph, way: str | None = None) -> Tensor:
    """The update of the layer."""
    update: Tensor = MessagePassingAttention(heads, backend=way)(x, graph)
    return update


def run_with_weights(
    heads: Any, x: Any, graph: ga.TokenGraph, way: str | None = None
) -> tuple[Tensor, Tensor]:
    """The update, and the weights ``[heads, E]``."""
    layer = MessagePassingAttention(heads, backend=way)
    update, (edge_index, weights) = layer(x, graph, return_attention_weights=True)
    assert torch.equal(edge_index, graph.edge_index)
    return update, weights.T


def softmaxed(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """``softmax(q k^T / sqrt(d))`` over the pairs of the mask ``[dst, src]``, in plain torch."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)


def weights_of(heads: StandardHeads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[heads, dst, src]``."""
    return softmaxed(x @ heads.W_Q, x @ heads.W_K, mask)


def update_of(heads: StandardHeads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The update by the standard form: ``sum_h softmax(q k^T / sqrt(d)) v W_O``."""
    return (weights_of(heads, x, mask) @ (x @ heads.W_V) @ heads.W_O).sum(0)


def ungrouped(heads: StandardHeads) -> StandardHeads:
    """With a key and a value head for each query head."""
    group = heads.num_heads // heads.num_kv_heads
    W_K, W_V = (W.repeat_interleave(group, dim=0) for W in (heads.W_K, heads.W_V))
    return StandardHeads.from_arrays(heads.W_Q, W_K, W_V, heads.W_O)


def table_of(weights: Tensor, graph: ga.TokenGraph) -> Tensor:
    """Weights of edges ``[..., E]`` as a table ``[..., dst, src]``, 0 elsewhere."""
    src, dst = graph.edge_index
    table = weights.new_zeros(*weights.shape[:-1], graph.num_dst, graph.num_src)
    table[..., dst, src] = weights
    return table


def differ(a: Tensor, b: Tensor) -> bool:
    """True if the two are further apart than any rounding."""
    return bool((a - b).abs().max() > 1e-3)


def test_S0_1_concat_heads_equals_mha(way):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O."""
    mha, x = redrawn(nn.MultiheadAttention(12, 3, batch_first=True)), drawn(2, 6, 12)
    heads = StandardHeads.from_mha(mha)
    qkv = functional.linear(x, mha.in_proj_weight, mha.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    for graph in (patterns.full(6), patterns.causal(6)):
        update = run(heads, x, graph, way)
        assert_exact(update, mha(x, x, x, attn_mask=~graph.mask(), need_weights=False)[0])
        concat = sdpa(q, k, v, attn_mask=graph.mask()).transpose(1, 2).flatten(2)
        assert_exact(update, functional.linear(concat, mha.out_proj.weight, mha.out_proj.bias))


def test_S0_2_concat_becomes_a_sum(way):
    """By splitting W^O by head, we can replace the concatenation with a sum."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    head = weights_of(heads, x, graph.mask()) @ (x @ heads.W_V)
    W_O = heads.W_O.flatten(0, 1)  # [h * d_v, d_model]
    update = run(heads, x, graph, way)
    assert_exact(update, torch.cat([*head], dim=1) @ W_O)
    assert_exact(update, sum(head[i] @ W_O[4 * i : 4 * i + 4] for i in range(3)))
    for i in range(3):
        rest = [j for j in range(3) if j != i]
        arrays = (W[rest] for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O))
        without = run(StandardHeads.from_arrays(*arrays), x, graph, way)
        assert_exact(update - without, head[i] @ W_O[4 * i : 4 * i + 4])


def test_S0_3_inputs_from_different_sources(way):
    """MultiHead(Q, K, V) indicates that these three inputs can have different sources (cross-attention)."""
    heads, graph = heads_with(source_width=8), patterns.cross(5, 7)
    text, image, sound = drawn(5, 12), drawn(7, 8, seed=2), drawn(7, 8, seed=3)
    q, k, v = text @ heads.W_Q, image @ heads.W_K, image @ heads.W_V
    assert_exact(run(heads, (image, text), graph, way), (sdpa(q, k, v) @ heads.W_O).sum(0))
    queries, keys, values = heads.receive(text[None]), heads.send(image[None])[0], heads.send(sound[None])[1]
    mixed = ga.attend(queries, keys, values, graph, backend=way or "auto")
    assert_exact(mixed[0], sdpa(q, k, sound @ heads.W_V))


def test_S0_4_values_moved_out_of_the_scores(way):
    """MultiHead(X) = sum_i scores_i values_i with values_i = X W_i^V W^O_i."""
    heads, x = heads_with(), drawn(6, 12)
    values = FactoredHeads.of(heads).messages(x[None])[0]
    assert values.shape == (3, 6, 12)
    assert_exact(values, x @ heads.W_V @ heads.W_O)
    assert_exact(run(heads, x, patterns.full(6), way), (weights_of(heads, x) @ values).sum(0))


def test_S0_5_messages_are_low_rank():
    """M_i = X W^M_i: rows are messages, W^V and W^O a low-rank decomposition, scores their influence."""
    heads, x = heads_with(), drawn(6, 12)
    factored, merged = forms(heads)
    M = x @ (heads.W_V @ heads.W_O)
    assert_exact(factored.messages(x[None])[0], M)
    assert_exact(merged.messages(x[None])[0], M)
    assert torch.linalg.matrix_rank(merged.W_M).tolist() == [4, 4, 4]  # d_head, of 12
    q, (k, messages) = merged.receive(x[None]), merged.send(x[None])
    slope = jacobian(lambda M: ga.attend(q, k, M, patterns.full(6), scale=merged.scale), messages)
    influence = torch.einsum("hiwhjw->hij", slope[0, :, :, :, 0]) / 12  # of message j on the update of i
    assert_exact(influence, weights_of(heads, x))


def test_S0_6_patterns_of_the_query_side():
    """P_i = X W^P_i with W^P_i = W^Q_i (W^K_i)^T, and logits_i = P_i X^T."""
    heads, x = heads_with(), drawn(6, 12)
    for form in forms(heads):
        P = form.patterns(x[None])[0]
        assert P.shape == (3, 6, 12)
        assert_exact(P, x @ heads.W_Q @ heads.W_K.mT)
        assert_exact(P @ x.T / 4**0.5, (x @ heads.W_Q) @ (x @ heads.W_K).mT / 4**0.5)
        logits = edges.logit(form.receive(x[None]), form.send(x[None])[0], form.scale)
        assert_exact(logits[0], (P * x).sum(-1) / 4**0.5)


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


def test_S0_8_the_scale_keeps_the_head_size():
    """scores_i = softmax(P_i X^T / sqrt(d_k)): d_k stays the size of a head although P_i is wider."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    expected = update_of(heads, x, graph.mask())
    for form in (heads, *forms(heads)):
        assert form.scale == 4**-0.5
        call = (form.receive(x[None]), *form.send(x[None]), graph)
        assert_exact(form.collect(ga.attend(*call, scale=4**-0.5))[0], expected)
        assert differ(form.collect(ga.attend(*call, scale=12**-0.5))[0], expected)  # sqrt(d_model)


def test_S0_9_the_compact_formulation(way):
    """MultiHead(X) = sum_i softmax(P_i X^T / sqrt(d_k)) M_i as a plain function of P_i = X W^P_i, M_i."""

    def multi_head(X: Tensor, W_P: Tensor, W_M: Tensor, d_k: int) -> Tensor:
        P, M = X @ W_P, X @ W_M
        return (torch.softmax(P @ X.mT / d_k**0.5, dim=-1) @ M).sum(0)

    heads, x = heads_with(), drawn(6, 12)
    expected = multi_head(x, heads.W_Q @ heads.W_K.mT, heads.W_V @ heads.W_O, d_k=4)
    assert_exact(expected, update_of(heads, x))
    for form in (heads, *forms(heads)):
        assert_exact(run(form, x, patterns.full(6), way), expected)


def test_S0_10_words_before_and_after_the_softmax():
    """logits_i = P_i X^T come before the softmax, "scores" (here: weights) after it."""
    q, k, v = (drawn(1, 3, 5, 4, seed=s) for s in range(3))
    src, dst = LISTED.edge_index
    logits = edges.logit(q[:, :, dst], k[:, :, src], 0.5)
    assert_exact(logits, (q @ k.mT * 0.5)[:, :, dst, src])
    expected = softmaxed(q, k, LISTED.mask())[:, :, dst, src]
    assert_exact(edges.softmax(logits, dst, 5)[0], expected)
    assert_exact(ga.attend(q, k, v, LISTED, return_info=True)[1].weights(), expected)
    public = {*ga.__all__, *ga._ON_DEMAND, *edges.__all__, *dir(StandardHeads), *dir(MergedHeads)}
    public |= set(inspect.signature(ga.attend).parameters)
    # FlexAttention's word, before the softmax
    assert {name for name in public if "score" in name} == {"score_mods", "score_mod"}


def test_S0_11_applications_illustrations_experiments():
    """Practical applications, illustrations and experimental results: notebooks, with checked exercises."""
    files = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    notebooks = [json.loads(file.read_text(encoding="utf-8"))["cells"] for file in files]
    assert len(notebooks) >= 15
    outputs = [[out for cell in cells for out in cell.get("outputs", ())] for cells in notebooks]
    pictures = [any("image/png" in out.get("data", {}) for out in outs) for outs in outputs]
    assert sum(pictures) >= 14  # an audit is in words
    for cells in notebooks[5:]:
        solved = [cell for cell in cells if "solution" in cell["metadata"].get("tags", ())]
        assert len(solved) == 3
        assert all("assert" in "".join(cell["source"]) for cell in solved)


def test_S1_1_names_of_what_is_projected():
    """W^VO and W^QK are low rank products; they project a token to its "message" and its "pattern"."""
    heads, x = heads_with(), drawn(6, 12)
    merged, QK, VO = MergedHeads.of(heads), heads.W_Q @ heads.W_K.mT, heads.W_V @ heads.W_O
    assert_exact([merged.W_P, heads.pattern_matrix().full()], [QK, QK])
    assert_exact([merged.W_M, heads.message_matrix().full()], [VO, VO])
    for form in forms(heads):
        assert_exact(form.patterns(x[None])[0], x @ QK)
        assert_exact(form.messages(x[None])[0], x @ VO)


def test_S1_2_heads_are_separable(way):
    """The multiple heads are independent and cleanly separable."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.window(6, 3)

    def update(chosen: list[int]) -> Tensor:
        arrays = (W[chosen] for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O))
        return run(StandardHeads.from_arrays(*arrays), x, graph, way)

    whole = update_of(heads, x, graph.mask())
    assert_exact(update([2, 0, 1]), whole)
    alone = [update([i]) for i in range(3)]
    assert_exact(alone[0] + alone[1] + alone[2], whole)
    form = FactoredHeads.of(heads)  # its results of single heads are in model space
    parts = ga.attend(form.receive(x[None]), *form.send(x[None]), graph, scale=form.scale)[0]
    assert_exact(parts, torch.stack(alone))


def test_S1_3_two_independent_processes(way):
    """The per-head Query-Key and Value-Output matrices belong to two independent processes."""
    heads, other, x = heads_with(), heads_with(seed=2), drawn(6, 12)
    new_vo = StandardHeads.from_arrays(heads.W_Q, heads.W_K, other.W_V, other.W_O)
    new_qk = StandardHeads.from_arrays(other.W_Q, other.W_K, heads.W_V, heads.W_O)
    three = (heads, new_vo, new_qk)
    weights, same, changed = (run_with_weights(h, x, patterns.window(6, 3), way)[1] for h in three)
    assert torch.equal(weights, same)
    assert differ(weights, changed)
    messages, changed, same = (FactoredHeads.of(h).messages(x[None]) for h in three)
    assert torch.equal(messages, same)
    assert differ(messages, changed)


def test_S1_4_value_output_is_linear():
    """X W^V_i W^O_i forms a linear operation, and we could fold W^V_i and W^O_i together."""
    heads, x, y = heads_with(), drawn(1, 6, 12), drawn(1, 6, 12, seed=2)
    for form in forms(heads):
        assert_exact(form.messages(2.5 * x - 0.5 * y), 2.5 * form.messages(x) - 0.5 * form.messages(y))
        assert_exact(form.messages(x)[0], x[0] @ (heads.W_V @ heads.W_O))


def test_S1_5_merging_costs_sixteen_times_more():
    """Embedding 4,096, head 128: x W^VO requires 16M multiply-accumulate operations, x W^V W^O only 1M."""
    counts = {"merged": 16_777_216, "factored": 1_048_576}
    with torch.device("meta"):
        standard, x = StandardHeads(4096, 1, head_dim=128), torch.empty(1, 1, 4096)
        made = {"merged": MergedHeads(4096, 1, head_dim=128), "factored": FactoredHeads.of(standard)}
    for name, form in made.items():
        with FlopCounterMode(display=False) as counter:
            form.messages(x)
        assert counter.get_total_flops() == 2 * counts[name]  # a multiplication and an addition each
        assert cost.of_form(name, 4096, 1, head_dim=128).macs.send == counts[name]
    assert counts == {"merged": 4096 * 4096, "factored": 2 * 4096 * 128}


def test_S1_6_the_decomposition_is_a_design_choice(way):
    """The decomposition is merely a design choice, which we could choose to approach differently."""
    x, thin = drawn(6, 12), heads_with(head_dim=2)
    latent = StandardHeads.from_arrays(thin.W_Q, drawn(12, 3) @ drawn(3, 3, 2), thin.W_V, thin.W_O)
    designs = {
        "as usual": heads_with(),
        "another rank, values wider": heads_with(head_dim=1, value_dim=7),
        "grouped queries": heads_with(num_heads=4, num_kv_heads=2),
        "one key and value for all": heads_with(num_heads=4, num_kv_heads=1),
        "keys through a latent vector": latent,
    }
    for heads in designs.values():
        for form in (heads, *forms(heads)):
            assert_exact(run(form, x, patterns.full(6), way), update_of(ungrouped(heads), x))


def test_S1_7_values_and_outputs_merge_into_messages():
    """Illustration 2: the value and output projections merge into the message projection."""
    heads, x = heads_with(), drawn(6, 12)
    W_M, merged = heads.message_matrix(), MergedHeads.of(heads)
    assert (W_M.left.shape, W_M.right.shape, merged.W_M.shape) == ((3, 12, 4), (3, 4, 12), (3, 12, 12))
    assert_exact(merged.W_M, heads.W_V @ heads.W_O)
    assert_exact(merged.messages(x[None])[0], (x @ heads.W_V) @ heads.W_O)


def test_S1_8_messages_are_created_by_the_context():
    """The input / query vector isn't directly involved in the creation of the messages (except its own)."""
    heads, x = heads_with(), drawn(5, 12)
    for form in forms(heads):
        slope = jacobian(lambda x, form=form: form.messages(x[None])[0], x)  # [head, message, :, token, :]
        assert torch.equal(slope.abs().sum((0, 2, 4)) > 0, torch.eye(5, dtype=torch.bool))
        assert_exact(slope[:, 2, :, 2], (heads.W_V @ heads.W_O).mT)


def test_S1_9_a_message_sent_on_through_the_current_token(way):
    """The context tokens communicate via the current input vector, to influence future tokens."""
    j, q, t, loops = 1, 3, 5, patterns.window(6, 1)
    hop = [ga.convert.from_edge_index(torch.tensor([[a], [b]]), 6) for a, b in ((j, q), (q, t))]
    first, second, x, relay = heads_with(), heads_with(seed=2), drawn(6, 12), loops | hop[1]

    def two_layers(graph: ga.TokenGraph) -> tuple[Tensor, Tensor]:
        state, expected = x + run(first, x, graph, way), x + update_of(first, x, graph.mask())
        return run(second, state, relay, way), update_of(second, expected, relay.mask())

    # two hops, though neither graph has the edge j -> t
    assert (relay @ (loops | hop[0])).mask()[t, j]
    (found, expected), (cut, expected_cut) = two_layers(loops | hop[0]), two_layers(loops)
    assert_exact(found - cut, expected - expected_cut)
    changed = (found - cut).abs().amax(1) > 1e-3  # without j -> q: at q, and at t beyond it
    assert changed.tolist() == [False, False, False, True, False, True]


def test_S1_10_patterns_of_one_vector():
    """The term x W^Q_i W^K'_i X' becomes x W^P_i X': p_i = x W^P_i is the pattern to match against others."""
    heads, x = heads_with(), drawn(6, 12)
    for form in forms(heads):
        p = form.patterns(x[None, 4:5])[0]  # [heads, 1, width]
        assert_exact(p, x[4:5] @ heads.W_Q @ heads.W_K.mT)
        assert_exact(p @ x.T, (x[4:5] @ heads.W_Q) @ (x @ heads.W_K).mT)


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


def test_S1_12_llama_3_8b_dimensions(capsys):
    """Dimensions of Llama 3 8B. Erratum: its rotary patterns depend on the distance, and are not cached."""
    with torch.device("meta"):
        plain = StandardHeads(4096, 32, num_kv_heads=8)
        rotary = StandardHeads(4096, 32, num_kv_heads=8, rotary=ga.rotary.Rotary(base=500_000.0))
        x = torch.empty(1, 5, 4096)
        assert plain.receive(x).shape == (1, 32, 5, 128)
        assert [part.shape for part in plain.send(x)] == [(1, 8, 5, 128)] * 2
        form = FactoredHeads.of(plain)
        assert form.patterns(x).shape == form.messages(x).shape == (1, 32, 5, 4096)
        # the 32 query heads share 8 values, but each has its own W^O and so its own W^M
        assert rotary.pattern_matrix(distance=2).shape == rotary.message_matrix().shape == (32, 4096, 4096)
    assert str(rotary).startswith("StandardHeads(4096, num_heads=32, head_dim=128, num_kv_heads=8")
    parser = argparse.ArgumentParser()
    cli_cost.add_cost(parser.add_subparsers())
    args = parser.parse_args(["cost", "--config", "llama-3-8b"])
    assert args.run(args) == 0
    shapes = "W_Q 32 x [4096, 128], W_K 8 x [4096, 128], W_V 8 x [4096, 128], W_O 32 x [128, 4096]"
    merged = "W_P 32 x [4096, 4096], W_M 32 x [4096, 4096]"
    assert {shapes, merged} <= set(re.findall(r"W_.*\]", capsys.readouterr().out))
    with pytest.raises(ValueError, match=r"cannot hold rotary.*pattern_matrix\(distance\)"):
        FactoredHeads.of(rotary, side="sender")


def test_S1_13_the_example_text():
    """The example text "Llamas do not output words": nodes in the notebooks, and what the explorer shows."""
    sentence = "Llamas do not output words"
    texts = {file.stem[:2]: file.read_text(encoding="utf-8") for file in NOTEBOOKS.glob("*.py")}
    words = "WORDS = " + str(sentence.split()).replace("'", '"')
    assert {number for number, text in texts.items() if words in text} >= {"01", "13"}
    assert {number for number, text in texts.items() if sentence in text} >= {"06", "11", "13", "15"}
    _, vocabulary = lm.load_trained()
    assert vocabulary.decode(vocabulary.encode(sentence)) == sentence
    assert repr(explorer.page(sentence)).startswith(f"Page({sentence!r}")


def test_S1_14_cache_a_message():
    """First, we project the input token to its pattern and message vectors, and add these to the cache."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    cache = PatternMessageCache(MergedHeads.of(heads, side="sender"), graph)
    for t in range(6):
        cache.append(x[None, t : t + 1])
        P, M = cache.senders()
        assert_exact(P[0], x[: t + 1] @ heads.W_K @ heads.W_Q.mT)
        assert_exact(M[0], x[: t + 1] @ heads.W_V @ heads.W_O)
        assert_exact(cache.attend(x[None, t : t + 1])[0, 0], update_of(heads, x, graph.mask())[t])


def test_S1_15_patterns_of_the_key_side(way):
    """alpha_i = softmax(P_i x_q' / sqrt(d_k)). Erratum: these patterns are the senders', x_j W^K W^Q'."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    for form in forms(heads, "sender"):
        P, _ = form.send(x[None])
        assert_exact(P[0], x @ heads.W_K @ heads.W_Q.mT)
        assert_exact(form.patterns(x[None]), P)
        update, weights = run_with_weights(form, x, graph, way)
        assert_exact(update, update_of(heads, x, graph.mask()))
        assert_exact(weights[:, -6:], torch.softmax(P[0] @ x[5] / 4**0.5, dim=-1))  # x_q is the last token
    assert_exact(heads.pattern_matrix().T.full(), heads.W_K @ heads.W_Q.mT)


def test_S1_16_the_magnitude_of_a_pattern_matters():
    """The magnitude of the pattern vectors also influences the matching: p . x = |p| |x| cos."""
    heads, x = heads_with(), drawn(1, 6, 12)
    larger = StandardHeads.from_arrays(heads.W_Q * 3, heads.W_K, heads.W_V, heads.W_O)
    p, p_3 = (FactoredHeads.of(h).patterns(x)[0] for h in (heads, larger))
    logits = (x @ heads.W_Q) @ (x @ heads.W_K).mT
    cos = functional.cosine_similarity(p.unsqueeze(2), x.unsqueeze(1), dim=-1)
    assert_exact(p.norm(dim=-1, keepdim=True) * x.norm(dim=-1).unsqueeze(1) * cos, logits)
    assert_exact(functional.cosine_similarity(p_3.unsqueeze(2), x.unsqueeze(1), dim=-1), cos)
    assert_exact(p_3.norm(dim=-1), 3 * p.norm(dim=-1))
    weights = [run_with_weights(h, x[0], patterns.full(6))[1] for h in (heads, larger)]
    assert_exact(weights[1].view(3, 6, 6), (3 * logits / 4**0.5).softmax(-1))
    assert differ(*weights)


def test_S1_17_softmax_is_a_competition():
    """A similarity is only significant compared to the others. Erratum: the magnitude is only bounded."""
    q, k, v = drawn(1, 1, 1, 4), drawn(1, 1, 6, 4, seed=1), drawn(1, 1, 6, 4, seed=2)
    graph, strong = patterns.cross(1, 6), torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]).double()
    infos = [ga.attend(q, k, v, graph, bias=bias, return_info=True)[1] for bias in (None, strong)]
    calm, lifted = (info.weights()[0, 0] for info in infos)
    assert_exact(lifted, (q[0, 0, 0] @ k[0, 0].T / 2 + strong).softmax(0))
    assert ((lifted < calm) == (strong == 0)).all()
    assert ga.attend(q, k, v, graph).norm() <= v.norm(dim=-1).max()
    # even weights over T messages from N(0, 1)^64: |o| is chi with 64 degrees, mean 7.969 (variance < 1/2),
    # over sqrt(T)
    for tokens, samples in ((1, 4096), (16, 1024), (1024, 64)):
        messages, graph = drawn(samples, 1, tokens, 64), patterns.cross(1, tokens)
        sizes = ga.attend(messages[:, :, :1], messages, messages, graph, scale=0.0).norm(dim=-1)
        assert abs(sizes.mean() * tokens**0.5 - 7.969) < 5 * (0.5 / samples) ** 0.5  # measured: 8.02 and 0.25


def test_S1_18_aggregate_messages(way):
    """o_i = alpha_i M_i, where alpha_i is 1 x T and M_i is T x d_model."""
    heads, x, now = heads_with(num_heads=1, head_dim=4), drawn(6, 12), patterns.causal(6).rows(5, 6)
    M = FactoredHeads.of(heads).messages(x[None])[0, 0]
    o, alpha = run_with_weights(heads, (x, x[5:]), now, way)
    assert (alpha.shape, M.shape, o.shape) == ((1, 6), (6, 12), (1, 12))
    assert_exact(alpha, softmaxed(x[5:] @ heads.W_Q[0], x @ heads.W_K[0]))
    assert_exact(o, alpha @ M)
    assert_exact(o, sum(alpha[0, j] * (x[j] @ heads.W_V[0] @ heads.W_O[0]) for j in range(6))[None])


def test_S1_19_the_residual_connection():
    """The output of the Attention block, including the residual connection: x' = x + sum_i alpha_i M_i."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    assert_exact(x + run(heads, x, graph), x + update_of(heads, x, graph.mask()))
    model, tokens = model_with(num_layers=1), torch.tensor([[3, 1, 4, 1, 5]])
    block = model.blocks[0]
    block.attention.score_mod.table.zero_()  # the text has no positions
    before, after, _ = model.states(tokens)  # the third is that after the MLP
    normed = functional.rms_norm(before[0], (12,), block.attention_norm.weight)
    assert_exact(after[0], before[0] + update_of(block.attention.heads, normed, patterns.causal(5).mask()))


def test_S1_20_aggregate_is_a_word_of_graph_neural_networks():
    """Aggregate is the step where a graph node sums up the weighted messages of its neighbors."""
    heads, x, seen = heads_with(), drawn(5, 12), {}
    layer, steps = MessagePassingAttention(heads), ["edge_update", "message", "aggregate"]
    for step in steps:
        register = getattr(layer, f"register_{step}_forward_hook")
        register(lambda module, inputs, output, step=step: seen.update({step: output}))
    update, (src, dst) = layer(x, LISTED), LISTED.edge_index
    assert list(seen) == steps  # weights, then weighted messages, then their sums
    weights = weights_of(heads, x, LISTED.mask())[:, dst, src].T
    messages = weights.unsqueeze(-1) * (x @ heads.W_V).transpose(0, 1)[src]
    sums = torch.stack([messages[dst == node].sum(0) for node in range(5)])
    assert_exact([seen[step] for step in steps], [weights, messages, sums])
    assert_exact(update, torch.einsum("nhv,hvw->nw", sums, heads.W_O))
    named = [line.split(":")[0] for line in layer.mapping().splitlines()]
    assert named == [*steps, "update"]
    assert all(callable(getattr(layer, name)) for name in named)


def test_S1_21_three_formulations(way):
    """Standard, refactored and merged are equal; only the latter two create P_i and M_i."""
    heads, x = heads_with(), drawn(5, 12)
    for form in (heads, *forms(heads)):
        assert_exact(run(form, x, LISTED, way), update_of(heads, x, LISTED.mask()))
    assert not any(hasattr(heads, word) for word in ("patterns", "messages"))
    for form in forms(heads):
        assert_exact(form.receive(x[None])[0], x @ heads.W_Q @ heads.W_K.mT)
        assert_exact(form.send(x[None])[1][0], x @ heads.W_V @ heads.W_O)


def test_S1_22_compute_requirements():
    """The "refactored" form requires more compute than the "standard" form, the "merged" even more."""
    heads = heads_with(width=32, num_heads=4)  # heads of 8
    made = (heads, *forms(heads))
    for T in (1, 2, 7, 64):
        operations = []
        for form in made:
            with FlopCounterMode(display=False) as counter:
                _, (k, v) = form.receive(drawn(1, T, 32)), form.send(drawn(1, T, 32))
                form.collect(v)  # in the place of the mixture, which has its shape
            operations.append(counter.get_total_flops() // 2 + 4 * T * T * (k.shape[-1] + v.shape[-1]))
        # four thin projections for each head; the same, but matched in model space; two square projections
        thin, square = 16 * T * 32 * 8, 8 * T * 32 * 32
        narrow, wide = 8 * T * T * 8, 8 * T * T * 32
        assert operations == [thin + narrow, thin + wide, square + wide]
        assert operations[0] < operations[1] < operations[2]
        costs = [cost.of_form(name, 32, 4, graph=patterns.full(T)) for name in cost.FORMS]
        assert [each.macs.total for each in costs] == operations
        for memory in ([c.activations for c in costs], [next(iter(c.cache.values())) for c in costs]):
            assert memory[0] < memory[1] == memory[2]  # both store model space
    counts = [sum(p.numel() for p in form.parameters()) for form in made]
    assert counts == [16 * 32 * 8, 16 * 32 * 8, 8 * 32 * 32]


def test_S1_23_very_low_rank():
    """W^P_i and W^M_i are very low rank: like LoRA, each head has a limited impact on the word vector."""
    big = heads_with(width=4096, num_heads=1, head_dim=128)
    for matrix in (big.pattern_matrix(), big.message_matrix()):
        assert matrix.shape == (1, 4096, 4096)
        assert matrix.rank().tolist() == [128]
    rank = torch.linalg.matrix_rank
    assert rank(big.W_Q[0] @ (big.W_K[0].T @ drawn(4096, 200))) == 128
    heads, x = heads_with(num_heads=1, head_dim=3), drawn(40, 12)
    merged = MergedHeads.of(heads)
    assert rank(merged.W_P).tolist() == rank(merged.W_M).tolist() == [3]
    assert rank(x) == 12
    assert rank(run(heads, x, patterns.causal(40))) == 3


def test_S1_24_heads_read_and_write_subspaces(way):
    """Each attention head reads and writes to a sub-space of the word vector, of the size of the head."""
    heads, x, graph = heads_with(num_heads=1, head_dim=2), drawn(6, 12), patterns.causal(6)
    inputs = torch.cat([heads.W_Q[0], heads.W_K[0], heads.W_V[0]], dim=1)
    write, read = (torch.linalg.qr(W)[0] for W in (heads.W_O[0].T, inputs))
    assert (write.shape, read.shape) == ((12, 2), (12, 6))
    update, noise = run(heads, x, graph, way), drawn(6, 12, seed=5)
    assert_exact(update @ write @ write.T, update)  # nothing outside the write space
    unread = noise - noise @ read @ read.T
    assert_exact(run(heads, x + unread, graph, way), update)
    assert differ(unread, torch.zeros(6, 12))
    assert differ(run(heads, x + noise, graph, way), update)


def test_S1_25_edit_a_word_along_a_line():
    """Project down to the sentiment line, modify the value, and project back up; two lines form a plane."""
    words, sentiment, formality = drawn(200, 3), *drawn(2, 3, seed=1)
    line = circuits.Subspace.spanned_by(sentiment)
    unit = sentiment / sentiment.norm()
    assert_exact(line.project(words), (words @ unit).unsqueeze(1) * unit)
    moved = line.edit(words, sentiment, 2.0)
    assert_exact(moved, words + (2 - words @ unit).unsqueeze(1) * unit)  # along the line, nowhere else
    assert_exact(moved @ unit, torch.full((200,), 2.0, dtype=torch.float64))
    plane = line + circuits.Subspace.spanned_by(formality)
    across = torch.linalg.cross(sentiment, formality)
    assert (line.dim, plane.dim, plane.width) == (1, 2, 3)
    assert_exact(plane.reject(words), (words @ across).unsqueeze(1) * across / across.square().sum())
    assert_exact(plane.reject(plane.edit(words, formality, -1.0)), plane.reject(words))


def test_S1_26_alternative_decompositions(way):
    """Alternative decompositions: three with equally many parameters."""
    x, own, down, up = drawn(6, 12), heads_with(), drawn(12, 8), drawn(2, 3, 8, 4, seed=2)
    thinner, grouped = (
        heads_with(num_heads=4, head_dim=3),
        heads_with(num_heads=4, head_dim=4, num_kv_heads=2),
    )
    latent = StandardHeads.from_arrays(own.W_Q, down @ up[0], down @ up[1], own.W_O)
    parts = ([*thinner.parameters()], [*grouped.parameters()], [own.W_Q, own.W_O, down, up])
    assert [sum(part.numel() for part in each) for each in parts] == [576] * 3
    assert torch.linalg.matrix_rank(torch.cat([*latent.W_K, *latent.W_V], dim=1)) == 8
    for heads, rank in ((thinner, 3), (grouped, 4), (latent, 4)):
        assert heads.pattern_matrix().rank().unique().tolist() == [rank]
        assert_exact(run(heads, x, patterns.full(6), way), update_of(ungrouped(heads), x))


def test_S2_1_column_convention(way):
    """q_i = W_Q x_i with W_Q in R^(d_head x d_model): from columns, from nn.Linear and from rows."""
    x, linear = drawn(5, 12), [redrawn(nn.Linear(12, 12, bias=False), seed) for seed in range(4)]
    W_Q, W_K, W_V, W_O = (layer.weight for layer in linear)
    by_head = [W.unflatten(0, (3, 4)) for W in (W_Q, W_K, W_V)]  # [heads, d_head, d_model]
    loaded = (
        StandardHeads.from_arrays(W_Q, W_K, W_V, W_O, layout="column", num_heads=3),
        StandardHeads.from_arrays(*by_head, W_O.unflatten(1, (3, 4)).transpose(0, 1), layout="column"),
        StandardHeads.from_arrays(W_Q.T, W_K.T, W_V.T, W_O.T, layout="row", num_heads=3),
    )
    queries = torch.stack([torch.stack([W @ x_i for x_i in x]) for W in by_head[0]])
    q, k, v = (layer(x).unflatten(1, (3, 4)).transpose(0, 1) for layer in linear[:3])
    expected = linear[3](sdpa(q, k, v).transpose(0, 1).flatten(1))
    for heads in loaded:
        assert_exact(heads.receive(x[None])[0], queries)
        assert_exact(run(heads, x, patterns.full(5), way), expected)


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


def test_S2_3_scores_of_edges():
    """score_ij = q_i . k_j / sqrt(d_head), one for each edge."""
    heads, x, (src, dst) = heads_with(), drawn(5, 12), LISTED.edge_index
    q, (k, v) = heads.receive(x[None]), heads.send(x[None])
    ends = [(x[i] @ heads.W_Q, x[j] @ heads.W_K) for j, i in LISTED.edge_index.T]
    score = torch.stack([(q_i * k_j).sum(-1) / 4**0.5 for q_i, k_j in ends], dim=1)
    assert_exact(edges.logit(q[:, :, dst], k[:, :, src], heads.scale)[0], score)
    _, info = ga.attend(q, k, v, LISTED, return_info=True)
    assert_exact(info.weights().log()[0] + info.lse[0, :, dst], score)


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
    # the same for heads of any size: two medians of 160 numbers that vary by half are off by 7 % of each
    # other
    assert 0.8 < gradient / of_a_typical_receiver(16, 16**-0.5)[0] < 1.25
    assert unscaled[0] > 10 * unscaled[1] > 100 * unscaled[2]
    assert unscaled[2] < gradient / 100
    assert saturated[2] > 0.99 > 0.2 > largest  # one sender has all the weight


def test_S2_5_the_future_cannot_reach_the_past(way):
    """For causal attention score_ij = -inf for all j > i: no information from the future to the past."""
    heads, x, graph = heads_with(), drawn(6, 12), patterns.causal(6)
    changed = x.clone()
    changed[3] = 1e6
    before, after = run(heads, x, graph, way), run(heads, changed, graph, way)
    assert torch.equal(before[:3], after[:3])  # to the bit
    assert ((before != after).any(1)[3:]).all()
    q, k, one_hot = x @ heads.W_Q[0], x @ heads.W_K[0], torch.eye(6).double()
    attention = ga.attend(*(y[None, None] for y in (q, k, one_hot)), graph, backend=way or "auto")[0, 0]
    assert_exact(attention, (q @ k.T / 2 + torch.full((6, 6), -torch.inf).triu(1)).softmax(-1))
    assert (attention.triu(1) == 0).all()


def test_S2_6_attention_is_transfer_strength(way):
    """attention_ij describes how strongly information from position j is transferred to position i."""
    heads, x, (src, dst) = heads_with(), drawn(5, 12), LISTED.edge_index
    _, weights = run_with_weights(heads, x, LISTED, way)
    ones = torch.ones(3, 5, dtype=torch.float64)
    assert_exact(torch.zeros_like(ones).index_add(1, dst, weights), ones)  # 1 for each receiver
    assert_exact(weights, weights_of(heads, x, LISTED.mask())[:, dst, src])
    strengths = weights.unsqueeze(-1) * (x @ heads.W_V)[:, src]
    weighted_value = torch.stack([strengths[:, dst == i].sum(1) for i in range(5)], dim=1)
    mixed = ga.attend(heads.receive(x[None]), *heads.send(x[None]), LISTED, backend=way or "auto")[0]
    assert_exact(mixed, weighted_value)


def test_S2_7_output_of_each_head(way):
    """attention_out^(h) = W_O^(h) weighted_value^(h) + b_O^(h), summed over heads, biases too."""
    heads, x, graph = heads_with(), drawn(5, 12), patterns.causal(5)
    b_O, shift = drawn(3, 12, seed=7), drawn(12, seed=8)
    matrices = (heads.W_Q, heads.W_K, heads.W_V, heads.W_O)
    expected = update_of(heads, x, graph.mask()) + b_O.sum(0)
    shifted = b_O + torch.stack([shift, -shift, 0 * shift])
    for split in (b_O, shifted, b_O.sum(0).expand(3, 12) / 3, b_O.sum(0)):
        assert_exact(run(StandardHeads.from_arrays(*matrices, b_O=split), x, graph, way), expected)


def test_S2_8_sizes_of_the_original_paper():
    """It is usually the case that d_model = d_head n_heads: 512 with 8 heads of 64; but it need not be."""
    assert StandardHeads(512, 8).head_dim == 64
    assert StandardHeads(512, 8).scale == 1 / 8
    x, graph = drawn(4, 512), patterns.causal(4)
    for heads in (heads_with(512, 8), heads_with(512, 8, head_dim=48), heads_with(512, 3, head_dim=5)):
        heads.W_Q /= 16  # logits of the order of 1
        heads.W_K /= 16
        assert_exact(run(heads, x, graph), update_of(heads, x, graph.mask()))
    with pytest.raises(ValueError, match="width 512 is no multiple of num_heads 3: give head_dim"):
        StandardHeads(512, 3)


MEASURED = [(16, 15.97, 0.998), (64, 63.96, 0.999), (256, 255.8, 0.999)]


@pytest.mark.parametrize(("d_head", "measured", "measured_scaled"), MEASURED)
def test_S2_9_variance_of_dot_products(d_head, measured, measured_scaled):
    """For q_i, k_i from N(0, 1), q_i . k_i has mean 0 and variance d_head, scaled a variance of 1."""
    n = 2**15
    q, k, scale = drawn(n, d_head), drawn(n, d_head, seed=1), StandardHeads(4, 1, d_head).scale
    # five standard errors of a variance: the sum's excess kurtosis is 6 / d_head
    error = 5 * ((2 + 6 / d_head) / n) ** 0.5
    for factor, variance, seen in ((1.0, d_head, measured), (scale, 1.0, measured_scaled)):
        scores = edges.logit(q, k, factor)
        assert abs(scores.mean()) < 5 * (variance / n) ** 0.5
        assert abs(scores.var() - variance) < error * variance
        assert abs(scores.var() - seen) < error * variance


def test_S3_1_pairwise_similarities():
    """(AB)_ij = a_i . b_j: a pairwise similarity matrix of two sets of vectors, n and m of them."""
    a, b, graph = drawn(4, 3), drawn(6, 3, seed=1), patterns.cross(4, 6)
    src, dst = graph.edge_index
    similarity = table_of(edges.logit(a[dst], b[src], 1.0), graph)
    assert similarity.shape == (4, 6)
    assert_exact(similarity, a @ b.T)
    assert_exact(similarity, torch.tensor([[sum(a_i * b_j) for b_j in b] for a_i in a], dtype=torch.float64))
    _, info = ga.attend(a[None, None], b[None, None], b[None, None], graph, scale=1.0, return_info=True)
    assert_exact(table_of(info.weights().log()[0, 0] + info.lse[0, 0, dst], graph), a @ b.T)


def test_S3_2_weights_before_they_are_normalised(way):
    """w_j is proportional to exp((W^Q v_i) . (W^K v_j) / sqrt(d))."""
    (q, k, v), (src, dst) = (drawn(1, 2, 5, 4, seed=s) for s in range(3)), LISTED.edge_index
    _, info = ga.attend(q, k, v, LISTED, return_info=True, backend=way or "auto")
    unnormalised = info.weights() * info.lse.exp()[:, :, dst]
    assert_exact(unnormalised, torch.exp((q[:, :, dst] * k[:, :, src]).sum(-1) / 4**0.5))


def test_S3_3_rows_are_attention_weights(way):
    """A = Softmax(Q K^T / sqrt(d)): A_ij is the weight of v_j in the output for v_i."""
    heads, x, graph = heads_with(num_heads=1, head_dim=4), drawn(5, 12), patterns.full(5)
    A = table_of(run_with_weights(heads, x, graph, way)[1], graph)[0]
    S = (x @ heads.W_Q[0]) @ (x @ heads.W_K[0]).T / 4**0.5
    assert_exact(A, S.softmax(dim=1))
    for i in range(5):  # one query after the other
        w = [torch.exp((x[i] @ heads.W_Q[0]) @ (x[j] @ heads.W_K[0]) / 4**0.5) for j in range(5)]
        assert_exact(A[i], torch.stack(w) / sum(w))


def test_S3_4_matrices_instead_of_iteration():
    """Matrix multiplication is more efficient than visiting each input vector in turn."""
    (q, k, v), graph = (drawn(1, 2, 128, 8, seed=s) for s in range(3)), patterns.causal(128)
    rows = [graph.rows(i, i + 1) for i in range(128)]

    def in_turn() -> Tensor:
        return torch.cat(
            [ga.attend(q[:, :, i : i + 1], k, v, g, backend="dense") for i, g in enumerate(rows)], 2
        )

    def at_once() -> Tensor:
        return ga.attend(q, k, v, graph, backend="dense")

    expected = softmaxed(q, k, graph.mask()) @ v
    assert_exact([in_turn(), at_once(), ga.attend(q, k, v, graph, backend="reference")], [expected] * 3)
    slow, fast = (min(timeit.repeat(run, number=1, repeat=3)) for run in (in_turn, at_once))
    assert fast < slow  # by far: one call against 128


def test_S3_5_a_product_is_weighted_sums_of_rows(way):
    """Each row of AB is the weighted sum of the rows of B, with the weights of that row of A."""
    heads, x = heads_with(num_heads=1, head_dim=4), drawn(5, 12)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V)
    out, weights = run_with_weights(bare, x, LISTED, way)
    A, V = weights_of(heads, x, LISTED.mask())[0], x @ heads.W_V[0]
    assert_exact(table_of(weights, LISTED)[0], A)
    assert_exact(out, A @ V)
    assert_exact(out, torch.stack([sum(A[i, j] * V[j] for j in range(5)) for i in range(5)]))


def test_S3_6_a_sum_without_oneself(way):
    """o_i = sum over j != i of w_j W^V v_j. Erratum: O = A V has j = i too; this is another graph."""
    heads, x = heads_with(num_heads=1, head_dim=4), drawn(6, 12)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V)
    full, others = (run(bare, x, graph, way) for graph in (patterns.full(6), patterns.no_self(6)))
    S, V = (x @ heads.W_Q[0]) @ (x @ heads.W_K[0]).T / 2, x @ heads.W_V[0]
    assert_exact(full, S.softmax(1) @ V)
    assert_exact(others, (S + torch.full((6,), -torch.inf).diag()).softmax(1) @ V)
    assert differ(full, others)
    diagonal = S.softmax(1).diag()[:, None]
    without = S.softmax(1).fill_diagonal_(0) @ V  # as in O = A V with A_ii set to 0
    assert_exact(others, without / (1 - diagonal))
    assert (others - without).abs().max() > 0.1


def test_S3_7_row_and_column_conventions():
    """Erratum: the ith row of I W^Q is (W^Q)^T v_i and not "W^Q v_i"; a layout says which is meant."""
    v, W = drawn(5, 8), [drawn(8, 8, seed=s) for s in range(4)]
    rows = StandardHeads.from_arrays(*W, layout="row", num_heads=2)
    columns = StandardHeads.from_arrays(*W, layout="column", num_heads=2)
    transposed = StandardHeads.from_arrays(*(matrix.T for matrix in W), layout="column", num_heads=2)
    row, column = (heads.receive(v[None])[0].transpose(0, 1).flatten(1) for heads in (rows, columns))
    assert_exact(row, v @ W[0])
    assert_exact(row, torch.stack([W[0].T @ v_i for v_i in v]))
    assert_exact(column, torch.stack([W[0] @ v_i for v_i in v]))
    assert differ(row, column)
    assert_exact(run(transposed, v, patterns.full(5)), run(rows, v, patterns.full(5)))


def test_S3_8_no_output_matrix(way):
    """O = Softmax(Q K^T / sqrt(d)) V ends the computation: there is no W^O in this text."""
    heads, x, graph = heads_with(), drawn(2, 6, 12), patterns.causal(6)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V, W_O=None)
    q, k, v = (x.unsqueeze(1) @ W for W in (heads.W_Q, heads.W_K, heads.W_V))
    expected = sdpa(q, k, v, is_causal=True)
    assert_exact(run(bare, x, graph, way), torch.cat(expected.unbind(1), dim=-1))
    with pytest.raises(ValueError, match="needs W_O: without it there are values but no messages"):
        FactoredHeads.of(bare)


def test_S4_1_four_perspectives_on_one_run():
    """A soft search, routed information, two coupled transforms, a message exchange: the same numbers."""
    heads, x = heads_with(), drawn(5, 12)
    call = trace.record(MessagePassingAttention(heads), x, LISTED).layers[0]
    views = [call.terms(view) for view in ("search", "routing", "transforms", "message exchange")]
    assert_exact(views[0]["query"][0], x @ heads.W_Q)
    assert_exact(views[0]["value"][0], x @ heads.W_V)
    weights, update = weights_of(heads, x, LISTED.mask()), update_of(heads, x, LISTED.mask())
    names = ("soft result ranking", "attention matrix", "column-probability matrix", "listening distribution")
    updates = ("interpretation", "information written", "mixture of updates", "state update")
    for view, name, last in zip(views, names, updates, strict=True):
        assert_exact(table_of(view[name].mT, LISTED)[0], weights)
        assert_exact(view[last][0], update)


def test_S4_2_a_sequence_model():
    """An embedding block, transformer blocks (attention, MLP), each an additive update, an unembedding."""
    model, tokens = model_with(), torch.tensor([[3, 1, 4, 1, 5]])
    x, rms_norm = model.embedding.weight[tokens[0]], functional.rms_norm
    distance = (torch.arange(5)[:, None] - torch.arange(5)).clamp(-3, 3) + 3
    past = torch.ones(5, 5, dtype=torch.bool).tril()
    for block in model.blocks:
        heads, n = block.attention.heads, rms_norm(x, (12,), block.attention_norm.weight)
        logits = (n @ heads.W_Q) @ (n @ heads.W_K).mT / 2 + block.attention.score_mod.table[:, distance]
        A = logits.masked_fill(~past, -torch.inf).softmax(-1)
        x = x + (A @ n @ heads.W_V @ heads.W_O).sum(0)
        up, _, down = block.mlp
        hidden = functional.gelu(rms_norm(x, (12,), block.mlp_norm.weight) @ up.weight.T + up.bias)
        x = x + hidden @ down.weight.T + down.bias
    assert_exact(model(tokens)[0], rms_norm(x, (12,), model.norm.weight) @ model.unembedding.weight.T)
    assert [model(torch.zeros(2, T, dtype=torch.int64)).shape for T in (1, 7)] == [(2, 1, 9), (2, 7, 9)]


def test_S4_3_only_attention_moves_information():
    """Attention is the only such step, as all other steps operate on each sequence element independently."""
    model, x, graph = model_with(num_layers=1), drawn(1, 5, 12), patterns.window(5, 2) | patterns.sinks(5, 1)
    block = model.blocks[0]

    def reached(step: Any) -> Tensor:
        return jacobian(step, x)[0, :, :, 0].abs().sum((1, 3)) > 1e-9  # [position out, position in]

    alone, loops = torch.eye(5, dtype=torch.bool), patterns.self_loops(5)
    assert torch.equal(reached(block.compute), alone)
    assert torch.equal(reached(lambda x: model.unembedding(model.norm(x))), alone)
    assert torch.equal(reached(lambda x: block.communicate(x, graph)), graph.mask())
    for part, declared in ((block.mlp, loops), (model.norm, loops), (block.attention, graph)):
        assert ga.audit(part, declared, (5, 12), layers=1).exact
    tokens, others = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[3, 1, 2, 1, 5]])
    moved = model.embedding(tokens) != model.embedding(others)
    assert torch.equal(moved[0].all(1), torch.arange(5) == 2)


def test_S4_4_columns(way):
    """Y = W_O^T W_V X sigma(X^T W_K^T W_Q X), tokens as columns. Erratum: X^T W_K W_Q X does not fit."""
    W_Q, W_K, W_V, W_O = (drawn(rows, 12, seed=s) for s, rows in enumerate((3, 3, 5, 5)))  # R^(h x e)
    X, M = drawn(12, 6, seed=4), torch.ones(6, 6, dtype=torch.float64).triu()
    A = torch.exp(X.T @ W_K.T @ W_Q @ X / 3**0.5)
    Y = W_O.T @ W_V @ X @ (M * A / (M * A).sum(0))
    heads = StandardHeads.from_arrays(W_Q, W_K, W_V, W_O.T, layout="column", num_heads=1)
    assert_exact(run(heads, X.T, patterns.causal(6), way).T, Y)
    assert (heads.head_dim, heads.W_V.shape, heads.W_O.shape) == (3, (1, 12, 5), (1, 5, 12))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        X.T @ W_K @ W_Q @ X


def test_S4_5_two_hidden_dimensions(way):
    """Here, h and h' are hidden dimensions of the query/key and value/output pairs, respectively."""
    heads, x = heads_with(head_dim=3, value_dim=5), drawn(2, 6, 12)
    q, k, v = (x.unsqueeze(1) @ W for W in (heads.W_Q, heads.W_K, heads.W_V))
    assert (heads.receive(x).shape[-1], heads.send(x)[1].shape[-1], heads.scale) == (3, 5, 3**-0.5)
    assert_exact(heads.send(x)[1], v)
    expected = (sdpa(q, k, v, is_causal=True) @ heads.W_O).sum(1)
    assert_exact(run(heads, x, patterns.causal(6), way), expected)


@pytest.mark.parametrize("graph", [LISTED, patterns.causal(5)], ids=["listed", "causal"])
def test_S4_6_masked_column_softmax(graph, way):
    """sigma(A)_ji = M_ji exp(beta A_ji) / sum_k M_ki exp(beta A_ki): column stochastic."""
    heads, X = heads_with(num_heads=1, head_dim=4), drawn(12, 5)
    sigma = table_of(run_with_weights(heads, X.T, graph, way)[1], graph)[0].T  # column i: the senders of i
    A, M = X.T @ heads.W_K[0] @ heads.W_Q[0].T @ X, torch.zeros(5, 5, dtype=torch.float64)
    M[tuple(graph.edge_index)] = 1  # M_ji = 1: an edge from j to i
    multiplied = M * torch.exp(A / 4**0.5)
    assert_exact(sigma, multiplied / multiplied.sum(0))
    # the additive mask of minus infinity
    assert_exact(sigma, (A / 4**0.5).masked_fill(M == 0, -torch.inf).softmax(0))
    assert_exact(sigma.sum(0), torch.ones(5, dtype=torch.float64))
    assert bool(sigma.tril(-1).any()) == (graph is LISTED)  # triangular where M is


def weights_at(graph: ga.TokenGraph, beta: float | None, way: str | None) -> Tensor:
    """``[dst, src]``, of the queries and keys of the next three tests."""
    one_hot = torch.eye(5, dtype=torch.float64)[None, None]
    found: Tensor = ga.attend(Q5, K5, one_hot, graph, scale=beta, backend=way or "auto")
    return found[0, 0]


Q5, K5 = drawn(1, 1, 5, 4), drawn(1, 1, 5, 4, seed=1)


def test_S4_7_inverse_temperature(way):
    """The factor beta is an inverse temperature, usually 1 / sqrt(h): how soft the softmax is."""
    logits, mask = (Q5 @ K5.mT)[0, 0].masked_fill(~LISTED.mask(), -torch.inf), LISTED.mask()
    assert_exact(weights_at(LISTED, None, way), (logits / 4**0.5).softmax(1))
    assert_exact(weights_at(LISTED, 0.3, way), (0.3 * logits).softmax(1))
    assert_exact(weights_at(LISTED, 1e6, way), functional.one_hot(logits.argmax(1), 5).double())
    assert_exact(weights_at(LISTED, 0.0, way), mask / mask.sum(1, keepdim=True).double())


def test_S4_8_three_stages_of_a_ranking(way):
    """The best result as a one-hot vector, a soft ranking in the simplex, and a masked soft ranking."""
    a = torch.stack([torch.stack([k_j @ q_i for q_i in Q5[0, 0]]) for k_j in K5[0, 0]])  # [j, i]
    full, causal = patterns.full(5), patterns.causal(5)
    assert_exact(weights_at(full, 1e6, way), functional.one_hot(a.argmax(0), 5).double())
    mass = torch.exp(a / 2)
    assert_exact(weights_at(full, 0.5, way).T, mass / mass.norm(p=1, dim=0))
    masked = torch.ones(5, 5, dtype=torch.float64).triu() * mass
    assert_exact(weights_at(causal, 0.5, way).T, masked / masked.norm(p=1, dim=0))
    # the soft and the masked soft ranking, to switch between in the explorer
    masks = data_of(explorer.page("Llamas do not output words"))["masks"]
    assert {"full", "causal"} <= {mask["name"].partition("(")[0] for mask in masks}


def test_S4_9_sum_to_i_or_to_T(way):
    """The sum runs to T. Erratum: written to i in the masked formula, which fits causal masks only."""
    graphs = {patterns.causal(5): True, patterns.window(5, 2): True, patterns.full(5): False, LISTED: False}
    for graph, same in graphs.items():
        mass = graph.mask().T * torch.exp((K5 @ Q5.mT)[0, 0] / 4**0.5)  # M_ji exp(beta a_ji)
        attention = weights_at(graph, None, way).T
        assert_exact(attention, mass / mass.sum(0))
        to_i = torch.stack([sum(mass[j, i] for j in range(i + 1)) for i in range(5)])
        assert (error(attention * to_i, mass) <= EXACT) == same


def test_S4_10_content_mixture_interpretation(way):
    """Values are the content, mixtures combine it, the output transform interprets the result."""
    heads, X, graph = heads_with(num_heads=1, head_dim=3, value_dim=5), drawn(12, 5), patterns.causal(5)
    W_V, W_O = heads.W_V[0].T, heads.W_O[0]  # R^(h' x e), where the text writes R^h once
    A = weights_of(heads, X.T, graph.mask())[0].T
    key, value = heads.send(X.T[None])
    mixture = ga.attend(heads.receive(X.T[None]), key, value, graph, backend=way or "auto")
    assert_exact(value[0, 0].T, W_V @ X)
    assert_exact(mixture[0, 0].T, W_V @ X @ A)
    assert_exact(heads.collect(mixture)[0].T, W_O.T @ (W_V @ X @ A))
    assert_exact(run(heads, X.T, graph, way).T, W_O.T @ (W_V @ X @ A))


def test_S4_11_residual_streams():
    """A residual stream has length B + 1, where B is the number of attention/MLP blocks."""
    model, tokens, graph = model_with(), torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]), patterns.causal(5)
    streams, updates = model.states(tokens), []
    assert len(streams) == 2 * len(model.blocks) + 1
    assert_exact(streams[0], model.embedding.weight[tokens])
    for block, state, mixed in zip(model.blocks, streams[0::2], streams[1::2], strict=False):
        updates += [block.communicate(state, graph), block.compute(mixed)]
    for before, update, after in zip(streams, updates, streams[1:], strict=False):
        assert_exact(after, before + update)  # x_i + y_i
    last = functional.rms_norm(streams[0] + sum(updates), (12,), model.norm.weight)
    assert_exact(model(tokens), last @ model.unembedding.weight.T)


@torch.no_grad()
def test_S4_12_attention_patterns_and_probes():
    """Visualise attention patterns; probe the residual stream at different points."""
    model, _ = lm.load_trained()
    tokens = torch.randint(model.config.vocabulary_size, (48, 96), generator=torch.Generator().manual_seed(1))
    states, (weights, _) = model.states(tokens), model.listen(tokens)
    src, dst = patterns.causal(96).edge_index
    # a head that attends to the token before
    assert weights[:, dst - src == 1].mean((0, 1)).max() > 0.5
    # to be read from a state: which token came before
    wanted = model.embedding(tokens)[:, :-1].flatten(0, 1).double()

    def explained(state: Tensor) -> float:
        x, y = (part - part.mean(0) for part in (state[:, 1:].flatten(0, 1).double(), wanted))
        half = len(x) // 2
        probe = torch.linalg.lstsq(x[:half], y[:half]).solution
        return 1 - ((x[half:] @ probe - y[half:]).square().sum() / y[half:].square().sum()).item()

    assert explained(states[0]) < 0.02  # an embedding knows nothing of its neighbour
    assert explained(states[1]) > 0.05  # after the first communication
    # the viewer has all that weights are computed from
    shown = data_of(explorer.page("Llamas do not output words"))
    assert set(shown["model"]["tensors"]) == set(model.state_dict())


def test_S4_13_the_attention_transform():
    """W_A = W_K^T W_Q, of rank at most h, determines a quadratic relationship A = X^T W_A X."""
    heads, X, graph = heads_with(num_heads=1, head_dim=4), drawn(12, 6), patterns.full(6)
    W_A = heads.W_K[0] @ heads.W_Q[0].T  # W_K^T W_Q where W_K and W_Q multiply columns
    assert_exact(heads.pattern_matrix().T.full()[0], W_A)
    assert heads.pattern_matrix().rank().tolist() == [4] == [torch.linalg.matrix_rank(W_A)]
    src, dst = graph.edge_index
    q, (k, _) = heads.receive(X.T[None]), heads.send(X.T[None])
    A = table_of(edges.logit(q[:, :, dst], k[:, :, src], 1.0), graph)[0, 0].T
    assert_exact(A, torch.stack([torch.stack([x_j @ W_A @ x_i for x_i in X.T]) for x_j in X.T]))
    even, odd = (W_A + W_A.T) / 2, (W_A - W_A.T) / 2  # how far two tokens match, and in which direction
    assert_exact(A + A.T, 2 * X.T @ even @ X)
    assert_exact(A - A.T, 2 * X.T @ odd @ X)
    assert_exact(A.diag(), (X.T @ even @ X).diag())


def test_S4_14_the_information_transform(way):
    """W_I = W_O^T W_V gives u_i = W_I x_i; Y = U sigma(A). Erratum: the u_i are columns of U, not rows."""
    heads, X, graph = heads_with(num_heads=1, head_dim=3, value_dim=5), drawn(12, 6), patterns.causal(6)
    W_I = heads.W_O[0].T @ heads.W_V[0].T  # of rank at most h'
    assert_exact(heads.message_matrix().T.full()[0], W_I)
    assert heads.message_matrix().rank().tolist() == [5] == [torch.linalg.matrix_rank(W_I)]
    U = FactoredHeads.of(heads).messages(X.T[None])[0, 0].T
    assert_exact(U, torch.stack([W_I @ x_i for x_i in X.T], dim=1))
    sigma = weights_of(heads, X.T, graph.mask())[0].T
    for form in (heads, *forms(heads)):
        assert_exact(run(form, X.T, graph, way).T, U @ sigma)


def test_S4_15_factors_or_products():
    """Why learn the factors, not the products? 41.9 M parameters, not 1.07 G (a layer of Llama 3 8B)."""
    with torch.device("meta"):
        llama = (StandardHeads(4096, 32, num_kv_heads=8), MergedHeads(4096, 32, head_dim=128))
    assert [sum(p.numel() for p in heads.parameters()) for heads in llama] == [41_943_040, 1_073_741_824]
    factors, x, goal = heads_with(num_heads=2, head_dim=2), drawn(8, 12), drawn(8, 12, seed=9)
    products, before, after = MergedHeads.of(factors), [], []
    for heads in (factors.requires_grad_(), products):
        before.append(run(heads, x, patterns.causal(8)))
        functional.mse_loss(before[-1], goal).backward()
        torch.optim.SGD(heads.parameters(), lr=0.05).step()
        after.append(run(heads, x, patterns.causal(8)))
    assert_exact(*before)  # one function and one step on the same data
    assert differ(*after)
    ranks = [torch.linalg.matrix_rank(W_P).tolist() for W_P in (factors.W_Q @ factors.W_K.mT, products.W_P)]
    assert max(ranks[0]) == 2 < 4 < min(ranks[1])  # what is learned in factors stays of low rank


def test_S4_16_the_mask_is_an_adjacency_matrix():
    """One node for each sequence position, and an edge from node j to node i where M_ji = 1."""
    G = ga.convert.to_networkx(LISTED)
    M = torch.tensor(nx.to_numpy_array(G, nodelist=range(5))) == 1
    assert set(G.edges) == {(0, 2), (3, 1), (1, 1), (3, 0), (2, 4), (4, 3), (0, 4)}  # sender, receiver
    assert torch.equal(M, LISTED.mask().T)
    assert not torch.equal(M, LISTED.mask())
    graph = ga.convert.from_networkx(G)
    assert graph == LISTED
    assert sorted(G.predecessors(4)) == [0, 2]
    heads, x, changed = heads_with(), drawn(5, 12), drawn(5, 12)
    changed[2] += 1  # node 2 sends to node 4 alone; its own senders are others
    before, after = run(heads, x, graph), run(heads, changed, graph)
    assert_exact(before, update_of(heads, x, M.T))
    assert ((before - after).abs().amax(1) > 1e-6).tolist() == [i in G.successors(2) for i in range(5)]


def test_S4_17_the_protocol():
    """The seven steps of the message exchange; the channel overlap exists off the edges too."""
    heads, x, (src, dst) = heads_with(), drawn(5, 12), LISTED.edge_index
    call = trace.record(MessagePassingAttention(heads), x, LISTED).layers[0]
    overlap = (x @ heads.W_Q) @ (x @ heads.W_K).mT * heads.head_dim**-0.5
    weights = weights_of(heads, x, LISTED.mask())
    wanted = {
        "receiving channel": x @ heads.W_Q,
        "sending channel": x @ heads.W_K,
        "channel overlap": overlap[:, dst, src].mT,
        "listening distribution": weights[:, dst, src].mT,
        "outgoing message": x @ heads.W_V,
        "mixed incoming message": weights @ (x @ heads.W_V),
        "state update": update_of(heads, x, LISTED.mask()),
    }
    found = call.terms("message exchange")
    assert list(found) == list(wanted)
    assert_exact([tensor[0] for tensor in found.values()], list(wanted.values()))
    assert_exact(call.overlap()[0], overlap)  # the whole matrix, "masking will be applied in the next step"


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
    # a message made of both ends
    both = EdgeConv(redrawn(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))))
    both.register_message_forward_hook(lambda module, inputs, output: seen.append(output))
    both(x, graph.edge_index)
    assert rank(seen[1][src == 5]) == 8


def test_S4_19_communication_and_computation():
    """An alternation between communication phases along the edges and computation phases on each node."""
    model, tokens, phases = model_with(), torch.tensor([[3, 1, 4, 1, 5]]), []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda *_: phases.append("communication"))
        block.mlp.register_forward_hook(lambda *_: phases.append("computation"))
    states, causal = model.states(tokens), patterns.causal(5)
    assert phases == ["communication", "computation"] * 2
    # without edges nothing is communicated, all is still computed
    for number, (before, after) in enumerate(pairwise(model.states(tokens, causal - causal))):
        assert torch.equal(before, after) == (number % 2 == 0)
    assert_exact(model.blocks[1].compute(states[3]), states[4] - states[3])
    assert_exact(model.blocks[1].communicate(states[2], causal), states[3] - states[2])
    assert_exact(model.blocks[1](states[2], causal), states[4])
    recorded = trace.record(model, tokens).phases
    assert [phase.name for phase in recorded] == phases[:4]
    for phase, before, after in zip(recorded, states, states[1:], strict=False):
        assert_exact([phase.before, phase.before + phase.update], [before, after])


def test_S4_20_a_program_on_a_graph(way):
    """An efficient, general-purpose, differentiable computer: two layers that complete a repeated text."""
    text = torch.tensor([3, 1, 4, 0, 2, 3, 1, 4, 0, 2])
    # a state is [token, what the token before was]
    token, memory = torch.eye(10, dtype=torch.float64).view(2, 5, 10)
    before = patterns.window(10, 2) - patterns.window(10, 1)
    shift = StandardHeads.from_arrays(token.T[None], token.T[None], token.T[None], memory[None])
    match = StandardHeads.from_arrays(token.T[None] * 100, memory.T[None], token.T[None], token[None])
    state = functional.one_hot(text, 5).double() @ token
    shifted = run(shift, state, before, way)
    assert torch.equal((shifted @ memory.T)[1:], functional.one_hot(text[:-1], 5).double())
    # which token followed my earlier occurrence?
    answer = run(match, state + shifted, patterns.strict_causal(10), way) @ token.T
    assert_exact(answer[5:9], functional.one_hot(text[6:], 5).double())
    shift.W_V.requires_grad_()
    learned = run(match, state + run(shift, state, before, way), patterns.causal(10), way)
    learned.square().sum().backward()
    assert 0 < shift.W_V.grad.norm() < torch.inf


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Identity()], ids=str)
def test_S4_21_a_contextual_mlp(activation):
    """Attention as a contextual MLP, with weights from the sequence; an MLP attends to static nodes."""
    mlp, x = redrawn(nn.Sequential(nn.Linear(12, 20), activation, nn.Linear(20, 12))), drawn(6, 12)
    hidden = activation(x @ mlp[0].weight.T + mlp[0].bias)
    assert_exact(StaticNodes.of(mlp)(x), hidden @ mlp[2].weight.T + mlp[2].bias)
    heads, graph = heads_with(), patterns.window(6, 3)
    found = PairwiseMessages.of(heads, normaliser=activation)(x, graph)
    for i in range(6):
        senders = x[graph.mask()[i]]
        # a row and a column for each sender
        first = senders @ heads.W_K @ heads.W_Q.mT / heads.head_dim**0.5
        second = senders @ heads.W_V @ heads.W_O
        assert_exact(found[i], (activation(first @ x[i]).unsqueeze(1) @ second).sum((0, 1)))
    assert_exact(PairwiseMessages.of(heads)(x, graph), update_of(heads, x, graph.mask()))


def test_S4_22_senders_and_receivers_are_symmetric(way):
    """Sending and receiving messages are equivalent pursuits: the same edges, read from either end."""
    heads, x, (src, dst) = heads_with(), drawn(5, 12), LISTED.edge_index
    assert LISTED.T.T == LISTED != LISTED.T
    assert torch.equal(LISTED.T.edge_index, torch.stack([dst, src]))
    assert LISTED.T.in_degree().tolist() == [(src == j).sum() for j in range(5)]
    update, weights = run_with_weights(heads, x, LISTED, way)
    messages = FactoredHeads.of(heads).messages(x[None])[0][:, src]
    sent = (weights.unsqueeze(-1) * messages).sum(0)  # [E, width]
    # each reads its in-edges
    assert_exact(update, torch.stack([sent[dst == i].sum(0) for i in range(5)]))
    written = torch.zeros(5, 12, dtype=torch.float64)
    reversed_src, reversed_dst = LISTED.T.edge_index
    for j in range(5):  # each writes to all that attend to it
        written.index_add_(0, reversed_src[reversed_dst == j], sent[src == j])
    assert_exact(written, update_of(heads, x, LISTED.mask()))
    assert_exact(update, written)


def test_S4_23_keys_times_queries(way):
    """With columns, a product of keys and queries, whose columns are distributions: an alignment."""
    # four target words, and the source words that they translate
    words, order = drawn(6, 12) * 4, torch.tensor([2, 0, 5, 3])
    heads = StandardHeads.from_arrays(*[torch.eye(12, dtype=torch.float64)[None]] * 4)
    source, target, graph = words, words[order] + 0.1 * drawn(4, 12, seed=1), patterns.cross(4, 6)
    update, weights = run_with_weights(heads, (source, target), graph, way)
    alignment = table_of(weights, graph)[0].T  # [source, target]
    assert_exact(alignment, (source @ target.T / 12**0.5).softmax(0))
    assert_exact(alignment.sum(0), torch.ones(4, dtype=torch.float64))
    assert torch.equal(alignment.argmax(0), order)
    assert_exact(update.T, source.T @ alignment)


@pytest.mark.parametrize(("seed", "notebook"), list(SHOWN.items()))
def test_notebooks_show_it(seed, notebook):
    """The committed notebook has an output where its source says that it is for this seed."""
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert any(cell["outputs"] for cell in cells if seed in cell["metadata"].get("tags", ()))


def test_every_seed_is_tested():
    """Once each, in the order of the list."""
    every = [f"S{text}.{n}" for text, last in enumerate((11, 26, 9, 8, 23)) for n in range(1, last + 1)]
    found = [re.match(r"test_S(\d)_(\d+)_", name) for name in globals()]
    assert [f"S{match[1]}.{match[2]}" for match in found if match] == every
