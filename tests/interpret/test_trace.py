"""Compare what edges carried with a dense formula in float64, and test the names of tensors."""

from __future__ import annotations

import copy
import math
import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support import traces
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from support.refusals import assert_refusals
from support.traces import CAUSAL, LISTED, TOKENS, cells, dense, heads, new_model, randn, record, take
from torch import nn

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, patterns, score_mods
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret import trace


def has_one_edge_list(backend: Any, name: str, kind: str | None, numbers: Any) -> bool:
    """Return False if the message-passing path would need several edge lists."""
    return backend != "message_passing" or (numbers is None and not name.startswith("per"))


BACKENDS = [*traces.BACKENDS, "message_passing"]
INTERVENTIONS = {"kind": [None, *traces.KINDS], "heads": [None, [2], [0, 2]]}
CASES = [row for row in product(BACKENDS, traces.GRAPHS, *INTERVENTIONS.values()) if has_one_edge_list(*row)]


@pytest.mark.parametrize(("backend", "name", "kind", "numbers"), random.Random(0).sample(CASES, 40))
def test_everything_equals_the_dense_formula(backend: Any, name: str, kind: str | None, numbers: Any) -> None:
    """Values and gradients are right, with and without edges cut or muted in some heads."""
    form, x, graph = heads(), randn(2, 7, 12).requires_grad_(), traces.GRAPHS[name]
    layer = MessagePassingAttention(form, backend=backend)
    masks = {kind: cells(traces.PAIRS[name], numbers)} if kind else {}
    intervention = traces.KINDS[kind](traces.PAIRS[name], heads=numbers) if kind else ()
    call = trace.record(layer, x, graph, interventions=intervention).layers[0]
    expected, pairs = dense(form, x, graph, **masks), call.edge_index
    is_edge = graph.mask().expand(2, 4, 7, 7) if graph.batch is None else graph.mask()
    in_union = (is_edge & ~masks.get("cut", cells([]))).reshape(-1, 7, 7).any(0)
    assert sorted(pairs.mT.tolist()) == sorted(in_union.nonzero().flip(1).tolist())
    assert_exact(call.weights(), take(expected.weights, pairs))
    assert torch.equal(call.logits() == -math.inf, take(expected.logits, pairs) == -math.inf)
    assert_exact(call.logits().nan_to_num(neginf=0.0), take(expected.logits, pairs).nan_to_num(neginf=0.0))
    carried = take(expected.carried, pairs)
    assert_exact(call.messages(pairs), expected.messages[:, :, pairs[0]].transpose(1, 2))
    assert_exact(call.carried(pairs), carried)
    assert_exact(call.norms(), carried.norm(dim=-1))
    assert_exact(call.results(), expected.carried.sum(3).transpose(1, 2))
    assert_exact(call.update, expected.update)
    assert_exact(call.dense(call.weights()), expected.weights)
    assert torch.equal(call.dense(call.logits(), -math.inf) == -math.inf, expected.logits == -math.inf)
    # The matrix before masking has values for pairs that are no edges (seed S4.17).
    full = dense(form, x, patterns.full(7)).logits
    assert_exact(call.pair_logits(), full)
    assert_exact(call.pair_logits([(1, 0), (2, 2)]), take(full, torch.tensor([[1, 2], [0, 2]])))
    assert_exact(call.overlap() * form.scale, full)
    assert_exact(call.overlap([(1, 0), (2, 2)]) * form.scale, take(full, torch.tensor([[1, 2], [0, 2]])))
    results = (call.update, call.carried(pairs)), (expected.update, carried)
    losses = ((y * randn(*y.shape, seed=9)).sum() + vectors.square().sum() for y, vectors in results)
    inputs = [x, *form.parameters()]
    assert_exact(*(torch.autograd.grad(loss, inputs, allow_unused=True) for loss in losses))
    assert kind is None or (call.update - layer(x, graph)).abs().max() > 1e-3


FORMS = [ga.FactoredHeads.of, ga.MergedHeads.of, lambda h: ga.MergedHeads.of(h, side="sender")]


@pytest.mark.parametrize("kind", [None, *traces.KINDS])
def test_score_mods_and_biases_are_in_the_logits(kind: str | None) -> None:
    """A bias stays with its edges, but an intervention on some heads leaves no single edge list."""
    form, x, bias, pairs = heads(), randn(1, 7, 12), randn(4, 9), [(0, 2), (5, 1)]
    intervention = traces.KINDS[kind](pairs) if kind else ()
    call = record(form, x, LISTED, score_mods.softcap(2.0), bias=bias, interventions=intervention)
    expected = dense(form, x, LISTED, cap=2.0, bias=bias, **({kind: cells(pairs)} if kind else {}))
    assert_exact(call.logits(), take(expected.logits, call.edge_index))
    subset = call.edge_index[:, [6, 2]]
    assert_exact(call.logits(subset), take(expected.logits, subset))
    assert_exact(call.weights(), take(expected.weights, call.edge_index))
    assert_exact(call.update, expected.update)
    if kind:
        with pytest.raises(
            NotImplementedError, match="bias= excludes interventions on some heads: select all"
        ):
            record(form, x, LISTED, bias=bias, interventions=traces.KINDS[kind](pairs, heads=1))


@torch.no_grad()
def test_every_form_of_the_weights_and_half_precision() -> None:
    """All forms of heads carry the same, latent heads too; half tensors give float32 values."""
    x, expected = randn(2, 7, 12), dense(heads(), randn(2, 7, 12), LISTED)
    for form in FORMS:
        call = record(form(heads()), x, LISTED)
        assert_exact(call.carried(LISTED.edge_index), take(expected.carried, LISTED.edge_index))
        assert_exact(call.norms(), take(expected.carried, LISTED.edge_index).norm(dim=-1))
        assert_exact(call.results(), expected.carried.sum(3).transpose(1, 2))
    torch.manual_seed(0)
    form = LatentHeads(12, 3, content_dim=4, rotary_dim=2, latent_dim=5).double()
    call = record(form, x, LISTED)
    carried, zeros = call.carried(LISTED.edge_index).sum(2), torch.zeros(2, 7, 12, dtype=torch.float64)
    assert_exact(zeros.index_add(1, LISTED.edge_index[1], carried), call.update)
    half = record(heads().bfloat16(), randn(1, 7, 12).bfloat16(), LISTED)
    carried = half.carried(half.edge_index)
    assert {part.dtype for part in (half.weights(), half.norms(), carried, half.results())} == {torch.float32}
    q, k = half.q.double(), half.k.double().repeat_interleave(2, 1)
    products = take(q @ k.mT, half.edge_index) * 6**-0.5
    # Products of bfloat16 numbers are exact in float32, which leaves a sum of 6 and the scaling.
    assert_sum(half.logits(), products, 7, float((q.abs() @ k.abs().mT).max()) * 6**-0.5)
    assert_rule(half.z, {}, attention_truth(half.q, half.k, half.v, LISTED))


def test_edges_are_chosen_by_pair_and_heads_by_number() -> None:
    call = record(heads(), randn(2, 7, 12), LISTED)
    all_carried = call.carried(call.edge_index)
    for edges in (torch.tensor([[3, 6], [3, 2]]), [(3, 3), (6, 2)], ((3, 3), (6, 2))):
        assert_exact(call.carried(edges), all_carried[:, [3, 0]])
        assert_exact(call.norms(edges, heads=[2, 1]), call.norms()[:, [3, 0]][..., [2, 1]])
    assert_exact(call.messages((6, 2), heads=3), call.messages(call.edge_index[:, :1])[:, :, [3]])
    assert_exact(call.weights((3, 3)), torch.ones(2, 1, 4, dtype=torch.float64))
    assert call.weights([]).shape == (2, 0, 4)
    assert call.carried([], heads=1).shape == (2, 0, 1, 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_recording_changes_nothing(backend: Any) -> None:
    """Output, states and weights equal the model's, which is left unchanged, after errors too."""
    model, graph = new_model(backend), patterns.window(7, 3)
    expected, state_dict = model(TOKENS, graph), copy.deepcopy(model.state_dict())
    run = trace.record(model, TOKENS, graph)
    assert_exact(run.output, expected)
    for output, state in zip(run.states, model.states(TOKENS, graph), strict=True):
        assert_exact(output, state)
    for call, weights in zip(run.layers, model.listen(TOKENS, graph), strict=True):
        assert_exact(call.weights(), weights)
        assert torch.equal(call.edge_index, graph.edge_index)
    with pytest.raises(ValueError, match="does not fit x"):
        trace.record(model, TOKENS, patterns.causal(9))
    assert model.backend == backend
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(torch.equal(state_dict[name], value) for name, value in model.state_dict().items())


def test_states_and_phases_of_the_residual_stream() -> None:
    """B phases have B + 1 states, each the previous one plus an update (seeds S4.11, S4.19)."""
    model, x = new_model(), randn(7, 12)
    run = trace.record(model, TOKENS)
    names = [(layer, name) for layer in range(3) for name in ("communication", "computation")]
    assert [(phase.layer, phase.name) for phase in run.phases] == names
    assert len(run.states) == len(run.phases) + 1 == 7
    for phase, before, after in zip(run.phases, run.states, run.states[1:], strict=False):
        assert phase.before is before
        assert phase.after is after
        assert torch.equal(before + phase.update, after)
    assert repr(run) == "Run(3 calls of attention layers, 7 states)"
    assert repr(run.layers[2]) == "LayerTrace(layer 2, causal(7): 7 src -> 7 dst, batch 2, heads 3)"
    # A block has two phases, a layer has none, and states [N, d] count as a batch of one.
    run = trace.record(model.blocks[1], x[None], CAUSAL)
    assert (len(run.layers), len(run.states), run.layers[0].number) == (1, 3, 0)
    assert_exact(run.output, model.blocks[1](x[None], CAUSAL))
    layer_run = trace.record(model.layers[0], x, CAUSAL)
    assert (layer_run.states, layer_run.phases, layer_run.output.shape) == ((), (), (7, 12))
    assert layer_run.layers[0].update.shape == (1, 7, 12)


def test_cross_attention_and_rows() -> None:
    form, x_src, x_dst = heads(), randn(2, 7, 12), randn(2, 3, 12, seed=2)
    layer, graph = MessagePassingAttention(form), CAUSAL.rows(4, 7)
    call = trace.record(layer, (x_src, x_dst), graph).layers[0]
    carried = call.carried(call.edge_index).sum(2)
    total = torch.zeros(2, 3, 12, dtype=torch.float64).index_add(1, call.edge_index[1], carried)
    assert_exact(total + form.b_O, layer((x_src, x_dst), graph))
    # Pairs count the call's senders and receivers: (0, 1) is 0 -> 5. Receivers may have no features.
    for states in ((x_src, x_dst), (x_src, None)):
        with trace.intervene(layer, trace.cut([(0, 1)])):
            output = layer(states, graph)
        assert_exact(output, layer(states, (CAUSAL - traces.one_edge(0, 5)).rows(4, 7)))


def test_a_pair_that_is_no_edge_of_a_head_carries_no_nan() -> None:
    x = randn(1, 7, 12)
    x[0, 5] = math.nan
    graph = ga.algebra.per_head(*[CAUSAL] * 2, *[patterns.window(7, 1) - traces.one_edge(5, 5)] * 2)
    call, pair = record(heads(), x, graph), [(5, 6)]
    for numbers in (call.carried(pair).norm(dim=-1), call.norms(pair)):
        assert numbers.isnan().tolist() == [[[True, True, False, False]]]
        assert (numbers[..., 2:] == 0).all()


def test_hook_names_and_words_are_the_same_tensors() -> None:
    """Every alias has the same memory, with TransformerLens' axes; its two tables are dense."""
    run = trace.record(new_model(), TOKENS)
    for number, call in enumerate(run.layers):
        for term in trace.GLOSSARY:
            words = [term.hook, term.search, term.routing, term.transforms, term.message_exchange]
            for word in filter(None, words):
                alias = call[word]
                if word in (trace_hooks := ("attn.hook_attn_scores", "attn.hook_pattern")):
                    fill = -torch.inf if word == trace_hooks[0] else 0.0
                    table = call.dense(call[term.name], fill)
                    assert torch.equal(alias, table), word
                elif isinstance(alias, FactoredMatrix):
                    assert alias.left.data_ptr() == call[term.name].left.data_ptr(), word
                else:
                    assert alias.data_ptr() == call[term.name].data_ptr(), word
        assert call["hook_attn_out"] is run.phases[2 * number].update
    terms = [term.message_exchange for term in trace.GLOSSARY if term.message_exchange]
    assert list(call.terms("message exchange")) == terms
    assert len(terms) == 7
    run = trace.record(MessagePassingAttention(heads()), randn(2, 7, 12), LISTED)
    shapes = {"q": (2, 7, 4, 6), "k": (2, 7, 2, 6), "v": (2, 7, 2, 5), "z": (2, 7, 4, 5)}
    shapes |= {"pattern": (2, 4, 7, 7), "attn_scores": (2, 4, 7, 7), "result": (2, 7, 4, 12)}
    assert {name: tuple(run.layers[0][f"attn.hook_{name}"].shape) for name in shapes} == shapes


def test_modules_that_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="must hold a MessagePassingAttention, got Linear"):
        trace.record(nn.Linear(2, 2), torch.zeros(2))
    model, cut = new_model("message_passing"), trace.cut((0, 1), heads=1)
    with pytest.raises(NotImplementedError, match="needs one edge list"), trace.intervene(model, cut):
        model(TOKENS)
    # Hooks of torch_geometric force the message-passing path, which cannot be muted or recorded.
    layer, x = MessagePassingAttention(heads(), backend="auto"), randn(7, 12)
    handle = layer.register_message_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(
        NotImplementedError, match=r"an explainer or an overridden step .*: remove it to record"
    ):
        trace.record(layer, x, LISTED)
    mute = trace.mute((0, 2))
    with pytest.raises(NotImplementedError, match="to mute an edge"), trace.intervene(layer, mute):
        layer(x, LISTED)
    handle.remove()
    assert trace.record(layer, x, LISTED).layers


INVALID_QUERIES = [
    (lambda run: run.layers[0].weights([(0, 1)]), ValueError, "0 -> 1 is not an edge .*: it carried nothing"),
    (lambda run: run.layers[0].overlap([(7, 0)]), IndexError, "is not a sender: expected 0 .. 6"),
    (lambda run: run.layers[0].carried((0, 2), heads=4), IndexError, "heads must be in 0 .. 3, got 4"),
    (lambda run: run.layers[0].dense(torch.ones(1, 3, 4)), ValueError, r"\[B, 9, heads\], got \[1, 3, 4\]"),
    (lambda run: run.layers[0].terms("poetry"), ValueError, "view must be one of 'search', .*, got 'poetry'"),
    (lambda run: run.layers[0]["attn.hook_x"], KeyError, "'attn.hook_x': expected one of .*listening dist"),
]


def test_invalid_queries_are_refused() -> None:
    run = trace.record(MessagePassingAttention(heads()), randn(7, 12), LISTED)
    assert_refusals((partial(query, run), error, match) for query, error, match in INVALID_QUERIES)
    form = StandardHeads.from_arrays(*(torch.randn(2, 4, 3) for _ in range(3)))
    with pytest.raises(ValueError, match="heads without W_O have values but no messages"):
        record(form, torch.randn(7, 4), LISTED).norms()


def test_pairs_may_be_repeated_and_in_any_order() -> None:
    """Logits and gradients are those of one pair at a time."""
    form, x = heads(), randn(1, 7, 12).requires_grad_()
    call = record(form, x, LISTED, score_mods.softcap(2.0))
    pairs = call.edge_index[:, [8, 1, 2, 3, 1, 5, 0, 8]]
    expected = torch.cat([call.logits(pair) for pair in pairs.split(1, dim=1)], dim=1)
    output = call.logits(pairs)
    assert_exact(output, expected)
    losses = (logits.square().sum() for logits in (output, expected))
    assert_exact(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses))
