"""The trace: what edges carried, cut and mute against a dense formula in float64, names, rollout and flow."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from support.covering import pairwise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, patterns, score_mods
from gnn_attention import model as lm
from gnn_attention.backends import call as backends_call
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace import interventions
from gnn_attention.verify.measure import EXACT

BACKENDS = ["auto", "reference", "dense", "tiles", "rows"]
TINY = lm.Config(vocabulary_size=50, width=12, num_layers=3, num_heads=3, head_dim=4, mlp_width=20, reach=4)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
CAUSAL = patterns.causal(7)
# 0 and 4 are isolated receivers
EDGES = torch.tensor([[6, 0, 5, 3, 4, 0, 2, 5, 6], [2, 2, 1, 3, 1, 6, 2, 5, 5]])
LISTED = ga.convert.from_edge_index(EDGES, 7)
GRAPHS = {
    "causal": CAUSAL,
    "window": patterns.window(7, 3),
    "listed": LISTED,
    "per head": ga.algebra.per_head(CAUSAL, patterns.window(7, 2), LISTED, patterns.strict_causal(7)),
    "per sample": ga.algebra.per_sample(patterns.strict_causal(7), LISTED),
}
# where an operation is tried: edges of the graph, in head 2 where it differs by head
PAIRS = {
    "causal": [(0, 3), (2, 3), (4, 4)],
    "window": [(1, 3), (2, 2)],
    "listed": [(6, 2), (0, 2), (5, 1), (4, 1), (3, 3)],
    "per head": [(0, 2), (5, 5)],
    "per sample": [(0, 2), (0, 6)],
}
KINDS = {"cut": trace.cut, "mute": trace.mute}


def heads() -> StandardHeads:
    """Four heads in two groups, float64, with drawn biases."""
    torch.manual_seed(0)
    made = StandardHeads(12, 4, head_dim=6, num_kv_heads=2, value_dim=5, bias=True).double()
    for name, parameter in made.named_parameters():
        if name.startswith("b_"):
            nn.init.normal_(parameter)
    return made


def states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def new_model(backend: Any = "auto") -> lm.LanguageModel:
    """Three small layers in float64, with drawn position biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = lm.LanguageModel(TINY, backend).double()
        for layer in model.layers:
            nn.init.normal_(next(layer.score_mod.parameters()))
    return model


def recorded(made: Any, x: Any, graph: Any, *score_mod: Any, **options: Any) -> trace.LayerTrace:
    """The only call of a layer of these heads."""
    return trace.record(MessagePassingAttention(made, *score_mod), x, graph, **options).layers[0]


class Dense(NamedTuple):
    """The formula of attention in float64 with every number written out, tokens x tokens: the oracle."""

    logits: Tensor  # [B, H, dst, src]
    weights: Tensor
    messages: Tensor  # [B, H, src, width]
    carried: Tensor  # [B, H, dst, src, width]
    update: Tensor


def dense(made: Any, x: Any, graph: Any, cut=None, mute=None, cap=None, bias=None) -> Dense:
    """``cut`` and ``mute`` are bool ``[H, dst, src]``, ``bias [H, E]`` in the order of the graph's edges."""
    each = made.num_heads // made.num_kv_heads

    shared = (made.W_K, made.W_V, made.b_K, made.b_V)
    W_K, W_V, b_K, b_V = (part.repeat_interleave(each, 0) for part in shared)
    q = torch.einsum("btw,hwd->bhtd", x, made.W_Q) + made.b_Q[:, None]
    k = torch.einsum("btw,hwd->bhtd", x, W_K) + b_K[:, None]
    logits = q @ k.mT / math.sqrt(made.head_dim)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if bias is not None:
        table = torch.zeros(made.num_heads, graph.num_dst, graph.num_src, dtype=x.dtype)
        table[:, graph.edge_index[1], graph.edge_index[0]] = bias
        logits = logits + table
    mask = graph.mask() if cut is None else graph.mask() & ~cut
    shown = logits.masked_fill(~mask, -math.inf)
    alive = mask.any(-1, keepdim=True)
    weights = torch.where(alive, shown, 0.0).softmax(-1).masked_fill(~mask, 0.0)
    messages = (torch.einsum("btw,hwd->bhtd", x, W_V) + b_V[:, None]) @ made.W_O
    sent = weights if mute is None else weights.masked_fill(mute, 0.0)
    carried = sent.unsqueeze(-1) * messages.unsqueeze(2)
    return Dense(shown, weights, messages, carried, carried.sum((1, 3)) + made.b_O)


def cells(pairs: list[tuple[int, int]], chosen: Any = None) -> Tensor:
    """Bool ``[4, 7, 7]``: the pairs, in some heads."""
    mask = torch.zeros(4, 7, 7, dtype=torch.bool)
    for src, dst in pairs:
        mask[list(range(4)) if chosen is None else chosen, dst, src] = True
    return mask


def at(matrix: Tensor, pairs: Tensor) -> Tensor:
    """``[B, E, H, ...]`` of ``[B, H, dst, src, ...]``."""
    return matrix[:, :, pairs[1], pairs[0]].transpose(1, 2)


def one(src: int, dst: int) -> ga.TokenGraph:
    return ga.convert.from_edge_index(torch.tensor([[src], [dst]]), 7)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_equals_the_dense_formula(graph: Any, backend: str) -> None:
    made, x, direction = heads(), states(2, 7, 12), states(12, seed=5)
    call = trace.record(MessagePassingAttention(made, backend=backend), x, graph).layers[0]
    wanted, pairs = dense(made, x, graph), call.edge_index
    everywhere = graph.mask().reshape(-1, 7, 7).any(0)
    assert sorted(pairs.mT.tolist()) == sorted(everywhere.nonzero().flip(1).tolist())
    assert_exact(call.weights(), at(wanted.weights, pairs))
    assert torch.equal(call.logits() == -math.inf, at(wanted.logits, pairs) == -math.inf)
    assert_exact(call.logits().nan_to_num(neginf=0.0), at(wanted.logits, pairs).nan_to_num(neginf=0.0))
    carried = at(wanted.carried, pairs)
    assert_exact(call.messages(pairs), wanted.messages[:, :, pairs[0]].transpose(1, 2))
    assert_exact(call.carried(pairs), carried)
    assert_exact(call.norms(), carried.norm(dim=-1))
    assert_exact(call.along(direction), carried @ direction)
    assert_exact(call.results(), wanted.carried.sum(3).transpose(1, 2))
    assert_exact(call.update, wanted.update)
    total = torch.zeros(2, 7, 12, dtype=torch.float64).index_add(1, pairs[1], call.carried(pairs).sum(2))
    assert_exact(total + made.b_O, call.update)
    assert_exact(call.dense(call.weights()), wanted.weights)
    assert torch.equal(call.dense(call.logits(), -math.inf) == -math.inf, wanted.logits == -math.inf)
    # the matrix before masking, defined for pairs that are no edges (seed S4.17)
    full = dense(made, x, patterns.full(7)).logits
    assert_exact(call.overlap(), full)
    assert_exact(call.overlap([(1, 0), (2, 2)]), at(full, torch.tensor([[1, 2], [0, 2]])))


FORMS = [ga.FactoredHeads.of, ga.MergedHeads.of, lambda h: ga.MergedHeads.of(h, side="sender")]


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_score_mods_and_biases_are_in_the_logits(kind: str | None) -> None:
    """A bias stays with its edges; in some heads a graph then has no single list of edges."""
    made, x, bias, pairs = heads(), states(1, 7, 12), states(4, 9), [(0, 2), (5, 1)]
    surgery = KINDS[kind](pairs) if kind else ()
    call = recorded(made, x, LISTED, score_mods.softcap(2.0), bias=bias, surgery=surgery)
    wanted = dense(made, x, LISTED, cap=2.0, bias=bias, **({kind: cells(pairs)} if kind else {}))
    assert_exact(call.logits(), at(wanted.logits, call.edge_index))
    assert_exact(call.logits(torch.tensor([6, 2])), at(wanted.logits, call.edge_index)[:, [6, 2]])
    assert_exact(call.weights(), at(wanted.weights, call.edge_index))
    assert_exact(call.update, wanted.update)
    if kind:
        with pytest.raises(NotImplementedError, match="bias with an operation on some heads: operate on all"):
            recorded(made, x, LISTED, bias=bias, surgery=KINDS[kind](pairs, heads=1))


@torch.no_grad()
def test_every_form_of_the_weights_and_half_precision() -> None:
    """Any form of the weights carries the same, latents too; what is read of half tensors is float32."""
    x, wanted = states(2, 7, 12), dense(heads(), states(2, 7, 12), LISTED)
    for form in FORMS:
        call = recorded(form(heads()), x, LISTED)
        assert_exact(call.carried(LISTED.edge_index), at(wanted.carried, LISTED.edge_index))
        assert_exact(call.norms(), at(wanted.carried, LISTED.edge_index).norm(dim=-1))
        assert_exact(call.results(), wanted.carried.sum(3).transpose(1, 2))
    torch.manual_seed(0)
    made = LatentHeads(12, 3, content_dim=4, rotary_dim=2, latent_dim=5).double()
    call = recorded(made, x, LISTED)
    carried, zeros = call.carried(LISTED.edge_index).sum(2), torch.zeros(2, 7, 12, dtype=torch.float64)
    assert_exact(zeros.index_add(1, LISTED.edge_index[1], carried), call.update)
    half = recorded(heads().bfloat16(), states(1, 7, 12).bfloat16(), LISTED)
    carried = half.carried(half.edge_index)
    assert {part.dtype for part in (half.weights(), half.norms(), carried, half.results())} == {torch.float32}
    q, k = half.q.double(), half.k.double().repeat_interleave(2, 1)
    products = at(q @ k.mT, half.edge_index) * 6**-0.5
    # products of two bfloat16 numbers are exact in float32: a sum of 6 and a product with the scale
    assert_sum(half.logits(), products, 7, float((q.abs() @ k.abs().mT).max()) * 6**-0.5)
    assert_rule(half.z, {}, attention_truth(half.q, half.k, half.v, LISTED))


def test_edges_are_chosen_by_position_or_by_pair_and_heads_by_number() -> None:
    call = recorded(heads(), states(2, 7, 12), LISTED)
    all_of_them = call.carried(call.edge_index)
    for edges in (torch.tensor([3, 0]), torch.tensor([[3, 6], [3, 2]]), [(3, 3), (6, 2)], ((3, 3), (6, 2))):
        assert_exact(call.carried(edges), all_of_them[:, [3, 0]])
        assert_exact(call.norms(edges, heads=[2, 1]), call.norms()[:, [3, 0]][..., [2, 1]])
    assert_exact(call.messages((6, 2), heads=3), call.messages(torch.tensor([0]))[:, :, [3]])
    assert_exact(call.weights((3, 3)), torch.ones(2, 1, 4, dtype=torch.float64))
    assert call.weights([]).shape == (2, 0, 4)
    assert call.carried([], heads=1).shape == (2, 0, 1, 12)
    parts = list(call.each_carried(heads=[0, 3], at_once=5))
    assert [part.shape[1] for part, _ in parts] == [5, 4]
    assert torch.equal(torch.cat([part for part, _ in parts], 1), call.edge_index)
    assert_exact(torch.cat([vectors for _, vectors in parts], 1), all_of_them[:, :, [0, 3]])


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_recording_changes_nothing(backend: Any) -> None:
    """Output, states and weights are those of the model, which is left as it was, after errors too."""
    model, graph = new_model(backend), patterns.window(7, 3)
    wanted, before = model(TOKENS, graph), copy.deepcopy(model.state_dict())
    run = trace.record(model, TOKENS, graph)
    assert_exact(run.output, wanted)
    for found, state in zip(run.states, model.states(TOKENS, graph), strict=True):
        assert_exact(found, state)
    for call, weights in zip(run.layers, model.listen(TOKENS, graph), strict=True):
        assert_exact(call.weights(), weights)
        assert torch.equal(call.edge_index, graph.edge_index)
    with pytest.raises(ValueError, match="does not fit x"):
        trace.record(model, TOKENS, patterns.causal(9))
    assert model.backend == backend
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_states_and_phases_of_the_residual_stream() -> None:
    """Seeds S4.11, S4.19: B + 1 states for B phases, each the one before plus its update."""
    run = trace.record(new_model(), TOKENS)
    names = [(layer, name) for layer in range(3) for name in ("communication", "computation")]
    assert [(phase.layer, phase.name) for phase in run.phases] == names
    assert len(run.states) == len(run.phases) + 1 == 7
    for phase, before, after in zip(run.phases, run.states, run.states[1:], strict=False):
        assert phase.before is before
        assert phase.after is after
        assert torch.equal(before + phase.update, after)
    assert repr(run) == "Run(3 calls of attention layers, 7 states)"
    assert repr(run.layers[2]) == "LayerTrace(layer 2, causal(7): 7 src -> 7 dst, batch 2, heads 3)"
    assert repr(run.phases[3]) == "Phase(layer 1, computation, [2, 7, 12])"


def test_a_block_and_a_layer_can_be_recorded_alone() -> None:
    """A block has two phases; a layer over [N, d] counts as a batch of one."""
    model, x = new_model(), states(7, 12)
    run = trace.record(model.blocks[1], x[None], CAUSAL)
    assert (len(run.layers), len(run.states), run.layers[0].number) == (1, 3, 0)
    assert_exact(run.output, model.blocks[1](x[None], CAUSAL))
    alone = trace.record(model.layers[0], x, CAUSAL)
    assert (alone.states, alone.phases, alone.output.shape) == ((), (), (7, 12))
    assert alone.layers[0].weights().shape == (1, 28, 3)
    assert alone.layers[0].update.data_ptr() == alone.output.data_ptr()
    assert alone.layers[0].update.shape == (1, 7, 12)


def test_cross_attention_and_rows() -> None:
    made, x_src, x_dst = heads(), states(2, 7, 12), states(2, 3, 12, seed=2)
    layer, graph = MessagePassingAttention(made), CAUSAL.rows(4, 7)
    call = trace.record(layer, (x_src, x_dst), graph).layers[0]
    carried = call.carried(call.edge_index).sum(2)
    total = torch.zeros(2, 3, 12, dtype=torch.float64).index_add(1, call.edge_index[1], carried)
    assert_exact(total + made.b_O, layer((x_src, x_dst), graph))
    # senders and receivers of the graph at hand: the edge 0 -> 5
    with trace.operate(layer, trace.cut([(0, 1)])):
        found = layer((x_src, x_dst), graph)
    assert_exact(found, layer((x_src, x_dst), (CAUSAL - one(0, 5)).rows(4, 7)))


def test_a_pair_that_is_no_edge_of_a_head_carries_no_nan() -> None:
    x = states(1, 7, 12)
    x[0, 5] = math.nan
    graph = ga.algebra.per_head(*[CAUSAL] * 2, *[patterns.window(7, 1) - one(5, 5)] * 2)
    call, pair = recorded(heads(), x, graph), [(5, 6)]
    for numbers in (call.carried(pair).norm(dim=-1), call.norms(pair), call.along(states(12), pair)):
        assert numbers.isnan().tolist() == [[[True, True, False, False]]]
        assert (numbers[..., 2:] == 0).all()


def test_what_is_recorded_has_gradients() -> None:
    made, x = heads(), states(1, 7, 12).requires_grad_()
    found, wanted = recorded(made, x, LISTED), dense(made, x, LISTED)
    for mine, theirs in (
        (found.weights((0, 2))[0, 0, 1], wanted.weights[0, 1, 2, 0]),
        (found.norms((6, 2), 3).sum(), wanted.carried[0, 3, 2, 6].norm()),
        (found.carried([(5, 1)]).square().sum(), wanted.carried[0, :, 1, 5].square().sum()),
    ):
        (grad,), (truth,) = (torch.autograd.grad(value, x, retain_graph=True) for value in (mine, theirs))
        assert_exact(grad, truth)


def test_hook_names_and_words_are_the_same_tensors() -> None:
    """No name has numbers of its own: every alias points at the same memory."""
    run = trace.record(new_model(), TOKENS)
    for number, call in enumerate(run.layers):
        for term in trace.GLOSSARY:
            part = call[term.name]
            words = [term.hook, term.search, term.routing, term.transforms, term.message_exchange]
            for word in filter(None, words):
                assert call[word].data_ptr() == part.data_ptr(), word
                assert run[f"blocks.{number}.{word}"].data_ptr() == part.data_ptr(), word
        for place, hook in enumerate(("hook_resid_pre", "hook_resid_mid", "hook_resid_post")):
            assert run[f"blocks.{number}.{hook}"] is run.states[2 * number + place]
        assert run[f"blocks.{number}.hook_mlp_out"] is run.phases[2 * number + 1].update
        assert run[f"blocks.{number}.hook_attn_out"] is run.phases[2 * number].update
    assert run["hook_embed"] is run.states[0]
    exchange = call.terms("message exchange")
    assert list(exchange) == [term.message_exchange for term in trace.GLOSSARY]
    assert exchange["channel overlap"].data_ptr() == call.logits().data_ptr()


def test_hooks_have_the_axes_of_transformer_lens() -> None:
    """[batch, pos, head, d_head], and [batch, head] before what stands for query_pos x key_pos."""
    run = trace.record(MessagePassingAttention(heads()), states(2, 7, 12), LISTED)
    shapes = {"q": (2, 7, 4, 6), "k": (2, 7, 2, 6), "v": (2, 7, 2, 5), "z": (2, 7, 4, 5)}
    shapes |= {"pattern": (2, 4, 9), "attn_scores": (2, 4, 9), "result": (2, 7, 4, 12)}
    assert {name: tuple(run[f"blocks.0.attn.hook_{name}"].shape) for name in shapes} == shapes
    assert_exact(run["blocks.0.attn.hook_result"].sum(2) + heads().b_O, run["blocks.0.hook_attn_out"])


@pytest.mark.parametrize(
    ("backend", "name", "chosen"), pairwise(backend=BACKENDS, name=list(GRAPHS), chosen=[None, [2], [0, 2]])
)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_mute_equal_the_dense_formula(kind: str, backend: str, name: str, chosen: Any) -> None:
    made, x, graph, direction = heads(), states(2, 7, 12), GRAPHS[name], states(12, seed=5)
    layer = MessagePassingAttention(made, backend=backend)
    call = trace.record(layer, x, graph, surgery=KINDS[kind](PAIRS[name], heads=chosen)).layers[0]
    wanted, pairs = dense(made, x, graph, **{kind: cells(PAIRS[name], chosen)}), call.edge_index
    carried = at(wanted.carried, pairs)
    assert_exact(call.update, wanted.update)
    assert_exact(call.weights(), at(wanted.weights, pairs))
    assert_exact(call.carried(pairs), carried)
    assert_exact(call.norms(), carried.norm(dim=-1))
    assert_exact(call.along(direction), carried @ direction)
    assert (call.update - layer(x, graph)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_gradients_of_an_operation(backend: Any, kind: str) -> None:
    """Of the states and of every parameter, against the dense formula."""
    made, x = heads(), states(2, 7, 12).requires_grad_()
    pairs, layer = PAIRS["listed"][:3], MessagePassingAttention(made, backend=backend)
    with trace.operate(layer, KINDS[kind](pairs)):
        found = layer(x, LISTED)
    wanted, inputs = dense(made, x, LISTED, **{kind: cells(pairs)}).update, [x, *made.parameters()]
    direction = states(*found.shape, seed=9)

    losses = ((y * direction).sum() for y in (found, wanted))
    assert_exact(*(torch.autograd.grad(loss, inputs, allow_unused=True) for loss in losses))


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_operations_on_a_model(backend: Any) -> None:
    """Only from the chosen layer on do states differ; a copy made inside is operated on; leaving restores."""
    model = new_model(backend)
    plain = trace.record(model, TOKENS)
    operations = [trace.mute([(2, 5)], layers=1), trace.cut([(0, 4), (1, 4)], layers=[1, 2])]
    run = trace.record(model, TOKENS, surgery=operations)
    with trace.operate(model, *operations) as inside:
        assert inside is model
        assert_exact(model(TOKENS), run.output)
        assert_exact(copy.deepcopy(model)(TOKENS), run.output)
    assert_exact(model(TOKENS), plain.output)
    assert all(torch.equal(a, b) for a, b in zip(run.states[:3], plain.states[:3], strict=True))
    changed = (run.states[3] - plain.states[3]).abs().amax((0, 2)) > 1e-9
    assert changed.nonzero().flatten().tolist() == [4, 5]
    assert [call.graph.num_edges for call in run.layers] == [28, 26, 26]
    assert run.layers[1].carried((2, 5)).abs().max() == 0 < run.layers[1].weights((2, 5)).min()
    assert run.layers[2].carried((2, 5)).abs().min() > 0


def test_operations_add_up_and_nest() -> None:
    """Two mutes, of which one is inside the other; a mute of an edge whose neighbour is cut."""
    made, x = heads(), states(2, 7, 12)
    layer = MessagePassingAttention(made)
    both = dense(made, x, LISTED, mute=cells([(6, 2), (0, 2)])).update
    with trace.operate(layer, trace.mute([(6, 2)])), trace.operate(layer, trace.mute([(0, 2), (6, 2)])):
        assert_exact(layer(x, LISTED), both)
        call = trace.record(layer, x, LISTED).layers[0]
        assert_exact(call.weights(), at(dense(made, x, LISTED).weights, LISTED.edge_index))
        assert call.norms([(6, 2), (0, 2)]).abs().max() == 0
    wanted = dense(made, x, LISTED, cut=cells([(6, 2)]), mute=cells([(0, 2)], [1]))
    found = trace.record(layer, x, LISTED, surgery=[trace.mute((0, 2), heads=1), trace.cut((6, 2))])
    assert_exact(found.output, wanted.update)
    assert_exact(layer(x, LISTED), dense(made, x, LISTED).update)


@pytest.mark.parametrize("kind", KINDS)
def test_one_operation_on_many_graphs(kind: str) -> None:
    """Each call's own graph is operated on, of whatever length; a graph of edges as far as they are there."""
    made, x = heads(), states(2, 7, 12)
    layer, operation = MessagePassingAttention(made, backend="auto"), KINDS[kind]
    plain = {graph: layer(x, graph) for graph in (LISTED, CAUSAL)}
    with trace.operate(layer, operation((0, 2), heads=1)):
        for graph in (LISTED, CAUSAL, patterns.window(7, 3), LISTED):
            assert_exact(layer(x, graph), dense(made, x, graph, **{kind: cells([(0, 2)], [1])}).update)
        assert_exact(layer(x[:, :5], patterns.causal(5)), layer(x, CAUSAL)[:, :5])
    # every edge of a head, and of all heads
    found = trace.record(layer, x, LISTED, surgery=operation(heads=3))
    assert_exact(found.output, plain[LISTED] - recorded(made, x, LISTED).results(3).squeeze(2))
    assert_exact(trace.record(layer, x, LISTED, surgery=operation()).output, made.b_O.expand(2, 7, 12))
    window = patterns.window(7, 2)
    found = trace.record(layer, x, CAUSAL, surgery=operation(patterns.window(7, 2, causal=False)))
    assert_exact(found.output, dense(made, x, CAUSAL, **{kind: window.mask()}).update)


def test_an_operation_on_one_head_leaves_the_others_their_plans() -> None:
    graph = patterns.causal(1024)
    touched, rest = trace.cut((3, 1000), heads=2).split(graph, 8)
    assert (touched.num_edges, rest.num_edges, rest.heads) == (1, 8 * graph.num_edges - 1, 8)
    for head in range(8):
        assert backends_call.one_of(touched, 0, head).num_edges == int(head == 2)
        assert (backends_call.one_of(rest, 0, head) is graph) == (head != 2)
    # and no mask of heads x tokens x tokens is made
    assert ga.explain(rest, heads=8, dim=64).choice == "tiles"


def test_other_forms_of_a_graph_are_taken() -> None:
    """edge_index and adj_t as torch_geometric gives them."""
    made, x = heads(), states(7, 12)
    layer = MessagePassingAttention(made)
    wanted = dense(made, x[None], LISTED, cut=cells([(0, 2)])).update[0]
    for g in (LISTED.edge_index, ga.convert.to_pyg(LISTED, "adj_t")):
        with trace.operate(layer, trace.cut((0, 2))):
            assert_exact(layer(x, g), wanted)
            assert_exact(layer(x, edge_index=g), wanted)
            y, (edges, weights) = layer(x, g=g, return_attention_weights=True)
        assert_exact(y, wanted)
        assert (edges.shape, weights.shape) == ((2, 8), (8, 4))


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_sent_is_never_read(kind: str, backend: Any) -> None:
    """A NaN in the message of a cut or muted edge stays with its sender, and so does its gradient."""
    made, x = heads(), states(1, 7, 12)
    layer = MessagePassingAttention(made, backend=backend)
    graph, pairs = CAUSAL - (one(0, 3) | one(1, 3) | one(2, 3)), [(3, dst) for dst in range(4, 7)]
    wanted = dense(made, x, graph, **{kind: cells(pairs)}).update[0, 4:]
    spoiled = x.clone()
    if kind == "cut":
        spoiled[0, 3] = math.nan
    else:  # only the values of token 3: its key is read, and must be
        send = made.send

        def spoiled_values(x: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
            k, v = send(x, positions)
            return k, v.index_fill(2, torch.tensor([3]), math.nan)

        made.send = spoiled_values
    spoiled.requires_grad_()
    with trace.operate(layer, KINDS[kind](pairs)):
        found = layer(spoiled, graph)[0]
    assert found.isnan().any(-1).tolist() == [False] * 3 + [True] + [False] * 3
    assert_exact(found[4:], wanted)
    found[4:].square().sum().backward()
    assert spoiled.grad is not None
    assert torch.isfinite(spoiled.grad[0, [0, 1, 2, 4, 5, 6]]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_receivers_whose_every_in_edge_is_cut_or_muted(kind: str, backend: str) -> None:
    """Cut: exactly 0 and lse -inf. Muted: exactly 0, weights still sum to 1. Gradients are finite."""
    made, x = heads(), states(1, 7, 12).requires_grad_()
    layer, pairs = MessagePassingAttention(made, backend=backend), [(6, 2), (0, 2), (2, 2)]
    run = trace.record(layer, x, LISTED, surgery=KINDS[kind](pairs))
    assert torch.equal(run.output[0, 2], made.b_O)
    assert (run.layers[0].z[0, :, 2] == 0).all()
    (grad,) = torch.autograd.grad(run.output.square().sum(), x, retain_graph=True)
    assert torch.isfinite(grad).all()
    if kind == "cut":
        assert (run.layers[0].lse[0, :, 2] == -math.inf).all()
    else:
        assert_exact(run.layers[0].weights(pairs).sum(1), torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows"])
@torch.no_grad()
def test_muting_the_loudest_edge_loses_no_digits(backend: str, dtype: torch.dtype) -> None:
    """What a subtraction would ruin: the edge has nearly all weight and a message 1000 times the others'."""
    torch.manual_seed(0)
    n, width = 24, 16
    q, k, v = torch.randn(3, 1, 2, n, width)
    k[:, :, 0] = 2 * q.mean(2) + 4 * q[:, :, 20]  # receiver 20 attends to token 0 alone, almost
    v[:, :, 0] *= 1000
    q, k, v = (x.to(dtype) for x in (q, k, v))
    graph, scale = patterns.causal(n), width**-0.5
    muted = interventions.LastSplit(trace.mute([(0, dst) for dst in range(n)]))
    found = ga.attend(q, k, v, graph, scale=scale, backend=interventions.Muting.over(backend, muted))
    weights = (q.double() @ k.double().mT * scale).masked_fill(~graph.mask(), -math.inf).softmax(-1)
    assert weights[0, :, 20, 0].min() > 0.9
    quiet = v.clone()
    quiet[:, :, 0] = 0.0  # the same sum by SDPA, in the same dtype
    assert_rule(found, {}, attention_truth(q, k, quiet, graph))


class Sizes(TorchDispatchMode):
    """Inside, the most numbers that any tensor made by torch had."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in tree_flatten(result)[0]:
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.untyped_storage().nbytes() // part.element_size())
        return result


@torch.no_grad()
def test_nothing_is_made_of_tokens_by_tokens() -> None:
    """Of 2048 tokens with 4 edges each, nor of edges x heads x width."""
    n, width, graph = 2048, 64, patterns.window(2048, 4)
    torch.manual_seed(0)

    layer = MessagePassingAttention(StandardHeads(width, 8, head_dim=4), backend="rows")

    some = trace.cut([(9, 10)], heads=2), trace.mute([(9, 10), (7, 8)], heads=[1, 5]), trace.mute((1, 3))
    with Sizes() as sizes:
        for surgery in some:
            call = trace.record(layer, torch.randn(n, width), graph, surgery=surgery).layers[0]
            for numbers in (call.norms(), call.along(torch.ones(width))):
                assert numbers.shape == (1, call.edge_index.shape[1], 8)
            assert call.carried([(2000, 2001)]).shape == (1, 1, 8, width)
            assert trace.rollout([call] * 2, [2000, 17]).shape == (1, 2, n)
    assert sizes.largest < n * n / 8, sizes.largest
    assert sizes.largest < call.edge_index.shape[1] * 8 * width / 4, sizes.largest


NO_EDGE = r"-> {} is no edge of TokenGraph\(causal\(7\).*: there is nothing to {}"
WRONG_OPERATIONS = [
    (lambda: trace.cut([(0, 1.5)]), TypeError, "edge_index must be a tensor of signed integers"),
    (lambda: trace.cut(3), TypeError, r"edges must be a tensor \[2, K\] or a list of \(src, dst\), got 3"),
    (lambda: trace.mute([(0, 1, 2)]), ValueError, r"edge_index must have shape \[2, E\]"),
    (lambda: trace.mute([(-1, 2)]), IndexError, "is no sender"),
    (lambda: trace.cut((0, 1), layers=-1), ValueError, "layers must be at least 0, got -1"),
    (lambda: trace.cut((0, 1), heads=[0, "x"]), TypeError, "each of heads must be an integer, got 'x'"),
    (lambda: trace.cut((0, 1), layers=[0, 3]), IndexError, "layers must be in 0 .. 2, the attention layers"),
    (lambda: trace.mute((0, 1), heads=3), IndexError, r"heads must be in 0 .. 2, got 3"),
    (lambda: trace.cut((3, 1)), ValueError, NO_EDGE.format(1, "cut")),
    (lambda: trace.mute([(0, 1), (5, 2)]), ValueError, NO_EDGE.format(2, "mute")),
    (lambda: trace.mute((0, 7)), IndexError, r"edge_index\[1, 0\] = 7 is no receiver: expected 0 .. 6"),
    (lambda: trace.cut(patterns.causal(8)), ValueError, "graphs joined by & must have the same nodes"),
    (lambda: "cut", TypeError, r"surgeries must be made by cut\(...\) or mute\(...\), got str"),
]


@pytest.mark.parametrize(("surgery", "error", "match"), WRONG_OPERATIONS)
def test_wrong_operations_are_refused_before_anything_changes(surgery: Any, error: Any, match: str) -> None:
    model = new_model()
    with pytest.raises(error, match=match), trace.operate(model, surgery()):
        model(TOKENS)
    assert model.backend == "auto"
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_modules_that_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="must hold a MessagePassingAttention, got Linear, which has none"):
        trace.record(nn.Linear(2, 2), torch.zeros(2))
    with pytest.raises(TypeError, match="module must be a Module, got 'model'"):
        trace.record("model", torch.zeros(2))
    walking, cut = new_model(None), trace.cut((0, 1), heads=1)
    with pytest.raises(NotImplementedError, match="needs one edge list"), trace.operate(walking, cut):
        walking(TOKENS)
    # hooks of torch_geometric force the message-passing path, on which nothing is muted or recorded
    layer, x = MessagePassingAttention(heads(), backend="auto"), states(7, 12)
    handle = layer.register_message_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(NotImplementedError, match=r"explainer of torch_geometric .*: remove it to record"):
        trace.record(layer, x, LISTED)

    mute = trace.mute((0, 2))
    with pytest.raises(NotImplementedError, match="to mute an edge"), trace.operate(layer, mute):
        layer(x, LISTED)
    handle.remove()
    assert trace.record(layer, x, LISTED).layers
    for call in (lambda: layer(x), lambda: layer("x", LISTED), lambda: layer()):
        with pytest.raises((TypeError, ValueError)), trace.operate(layer, trace.cut((0, 2))):
            call()


WRONG_QUESTIONS = [
    (lambda run: run[0].weights([(0, 1)]), ValueError, "0 -> 1 is no edge .*: nothing came along; overlap"),
    (lambda run: run[0].weights([(0, 9)]), IndexError, "is no receiver: expected 0 .. 6"),
    (lambda run: run[0].overlap([(7, 0)]), IndexError, "is no sender: expected 0 .. 6"),
    (lambda run: run[0].norms(torch.tensor([9])), IndexError, r"must be positions in 0 .. 8, got \[9\]"),
    (lambda run: run[0].norms(torch.ones(9, dtype=torch.bool)), TypeError, "of a bool mask use nonzero"),
    (lambda run: run[0].carried((0, 2), heads=4), IndexError, "heads must be in 0 .. 3, got 4"),
    (
        lambda run: run[0].along(torch.ones(5)),
        ValueError,
        r"direction must be a tensor \[12\], got .*shape \[5\]",
    ),
    (lambda run: run[0].dense(torch.ones(1, 3, 4)), ValueError, r"\[B, 9, heads\], got \[1, 3, 4\]"),
    (lambda run: run[0].each_carried(at_once=0), ValueError, "at_once must be at least 1, got 0"),
    (lambda run: run[0].terms("poetry"), ValueError, "view must be one of 'search', .*, got 'poetry'"),
    (lambda run: trace.rollout([]), ValueError, "layers must be over the same tokens"),
    (lambda run: trace.rollout(run, [7]), IndexError, "receivers must be in 0 .. 6, got 7"),
    (lambda run: trace.flow(run, 0, 7), IndexError, "dst must be in 0 .. 6, got 7"),
    (lambda run: trace.flow(run, 0, 1, sample=1), IndexError, "sample must be in 0 .. 0, got 1"),
    (lambda run: run[0]["attn.hook_x"], KeyError, "called 'attn.hook_x': expected one of .*listening dist"),
    (lambda run: run[0]["hook_resid_pre"], KeyError, "hook_resid_pre"),
]


@pytest.mark.parametrize(("question", "error", "match"), WRONG_QUESTIONS)
def test_wrong_questions_are_refused(question: Any, error: Any, match: str) -> None:
    run = trace.record(MessagePassingAttention(heads()), states(7, 12), LISTED)
    with pytest.raises(error, match=match):
        question(run.layers)


def test_wrong_names_of_a_run_and_heads_without_messages() -> None:
    run = trace.record(MessagePassingAttention(heads()), states(7, 12), LISTED)
    for name in ("blocks.1.attn.hook_q", "hook_embed", "blocks"):
        with pytest.raises(KeyError, match=f"no part of this run is called '{name}': expected blocks.0 .. "):
            run[name]
    made = StandardHeads.from_arrays(*(torch.randn(2, 4, 3) for _ in range(3)))
    with pytest.raises(ValueError, match="heads without W_O have values but no messages"):
        recorded(made, torch.randn(7, 4), LISTED).norms()


def mixed(layers: Any) -> Tensor:
    """The product of the dense ``mean weight over heads + I``, its rows divided by their sum."""
    product = eye = torch.eye(layers[0].graph.num_dst, dtype=torch.float64)
    for call in layers:
        share = call.dense(call.weights()).mean(1) + eye
        product = share / share.sum(-1, keepdim=True) @ product
    return product


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_rollout_is_the_product_of_the_layers(graph: Any) -> None:
    """Against the dense product; rows sum to 1 and nothing comes from where no path leads."""
    layers = [recorded(heads(), states(2, 7, 12) + number, graph) for number in range(3)]
    found = trace.rollout(layers)
    assert_exact(found, mixed(layers))
    assert_exact(found.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    assert_exact(trace.rollout(layers, [5, 2]), found[:, [5, 2]])
    if graph is CAUSAL:  # as the paper writes it, where no receiver is isolated
        half = 0.5 * layers[0].dense(layers[0].weights()).mean(1) + 0.5 * torch.eye(7, dtype=torch.float64)
        assert_exact(trace.rollout(layers[:1]), half)
    if graph.heads is None and graph.batch is None:
        paths = (graph | patterns.window(7, 1)) ** 3
        assert torch.equal(found[0] > 0, paths.mask())


CHAIN = patterns.window(7, 2) - patterns.window(7, 1)


def test_flow_is_the_least_cut_of_the_shares() -> None:
    """Between rollout and 1, no more than any cut lets through; of one layer the share itself."""
    run = trace.record(new_model(), TOKENS, ga.convert.from_edge_index(LISTED.edge_index, 7))
    shares = mixed(run.layers[:1])
    for src in range(7):
        for dst in (1, 2, 5):
            found = trace.flow(run.layers, src, dst, sample=1)
            # EXACT of shares, whose largest is at most 1: bounds that a flow may touch
            assert trace.rollout(run.layers)[1, dst, src] - EXACT <= found <= 1 + EXACT
            assert found <= sum(shares[1, :, src]) + EXACT
            assert_exact(trace.flow(run.layers[:1], src, dst), shares[0, dst, src].item())
    # one path over three layers, which bends never: the bottleneck
    layers = trace.record(new_model(), TOKENS, CHAIN).layers
    along = [mixed([call])[0, t + 1, t].item() for t, call in enumerate(layers)]
    assert_exact(trace.flow(layers, 0, 3), min(along))
    assert_exact(trace.rollout(layers)[0, 3, 0], math.prod(along))
    assert trace.flow(layers, 3, 0) == trace.flow(layers, 0, 4) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_muted_edge_brings_nothing_to_rollout_and_flow(kind: str) -> None:
    """The rest of the row grows to 1 again; without the edge there is no other path."""
    layers = trace.record(new_model(), TOKENS, CHAIN, surgery=KINDS[kind]((1, 2), layers=1)).layers
    found = trace.rollout(layers)
    assert_exact(found.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    assert found[:, 3, 0].abs().max() == 0 == trace.flow(layers, 0, 3)
    assert found[:, 4, 1].min() > 0


def test_pairs_in_parts_are_the_pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of more pairs than are gathered together, with gradients."""
    made, x = heads(), states(1, 7, 12).requires_grad_()
    chosen = torch.tensor([8, 1, 2, 3, 4, 5, 0, 7])

    def logits(edges: Any) -> tuple[Tensor, Tensor]:
        call = recorded(made, x, LISTED, score_mods.softcap(2.0))
        picked = call.logits()[:, chosen] if edges is None else call.logits(edges)
        return picked, torch.autograd.grad(picked.square().sum(), x)[0]

    whole, once = logits(None), logits(chosen)
    monkeypatch.setattr("gnn_attention.interpret.trace.pairs.AT_ONCE", 3)
    for found in (once, logits(chosen)):
        assert_exact(found, whole)
