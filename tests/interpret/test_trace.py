"""The trace: what edges carried, cut and mute against a dense formula in float64, names, rollout and flow."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from support.covering import pairwise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import gnn_attention as ga
from gnn_attention import (
    FactoredHeads,
    MergedHeads,
    MessagePassingAttention,
    StandardHeads,
    patterns,
    score_mods,
)
from gnn_attention import model as lm
from gnn_attention.backends import call as backends_call
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace import intervene, interventions
from gnn_attention.verify.measure import EXACT

BACKENDS = ["auto", "reference", "dense", "tiles", "rows"]
TINY = lm.Config(vocabulary_size=50, width=12, num_layers=3, num_heads=3, head_dim=4, mlp_width=20, reach=4)
LISTED = ga.convert.from_edge_index(
    torch.tensor([[6, 0, 5, 3, 4, 0, 2, 5, 6], [2, 2, 1, 3, 1, 6, 2, 5, 5]]), 7
)  # 0 and 4 are deaf
GRAPHS = {
    "causal": patterns.causal(7),
    "window": patterns.window(7, 3),
    "listed": LISTED,
    "per head": ga.algebra.per_head(
        patterns.causal(7), patterns.window(7, 2), LISTED, patterns.strict_causal(7)
    ),
    "per sample": ga.algebra.per_sample(patterns.strict_causal(7), LISTED),
}
# Where an operation is tried: edges of the graph, in head 2 where it differs by head.
PAIRS = {
    "causal": [(0, 3), (2, 3), (4, 4)],
    "window": [(1, 3), (2, 2)],
    "listed": [(6, 2), (0, 2), (5, 1), (4, 1), (3, 3)],
}
PAIRS |= {"per head": [(0, 2), (5, 5)], "per sample": [(0, 2), (0, 6)]}


def heads(bias: bool = True, **options: Any) -> StandardHeads:
    """Four heads in two groups, float64, with drawn biases."""
    torch.manual_seed(0)
    made = StandardHeads(12, 4, head_dim=6, num_kv_heads=2, value_dim=5, bias=bias, **options).double()
    for name, parameter in made.named_parameters():
        if name.startswith("b_"):
            nn.init.normal_(parameter)
    return made


def states(*shape: int, seed: int = 1) -> Tensor:
    """Random float64 states."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def new_model(backend: Any = "auto") -> lm.LanguageModel:
    """Three small layers in float64, with drawn position biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = lm.LanguageModel(TINY, backend).double()
        for layer in model.layers:
            nn.init.normal_(next(layer.score_mod.parameters()))
    return model


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


@dataclass
class Dense:
    """The formula of attention in float64 with every number written out, tokens x tokens: the oracle."""

    logits: Tensor  # [B, H, dst, src]
    weights: Tensor
    messages: Tensor  # [B, H, src, width]
    carried: Tensor  # [B, H, dst, src, width]
    update: Tensor


def dense(
    made: StandardHeads,
    x: Tensor,
    graph: Any,
    cut: Any = None,
    mute: Any = None,
    cap: float | None = None,
    bias: Any = None,
):
    each = made.num_heads // made.num_kv_heads
    W_K, W_V, b_K, b_V = (
        getattr(made, name).repeat_interleave(each, 0) for name in ("W_K", "W_V", "b_K", "b_V")
    )
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
    said = weights if mute is None else weights.masked_fill(mute, 0.0)
    carried = said.unsqueeze(-1) * messages.unsqueeze(2)
    return Dense(shown, weights, messages, carried, carried.sum((1, 3)) + made.b_O)


def cells(pairs: list[tuple[int, int]], chosen: Any = None) -> Tensor:
    """Bool ``[4, 7, 7]``: the pairs, in some heads."""
    mask = torch.zeros(4, 7, 7, dtype=torch.bool)
    for src, dst in pairs:
        mask[list(range(4)) if chosen is None else chosen, dst, src] = True
    return mask


def at(matrix: Tensor, pairs: Tensor) -> Tensor:
    """``[B, E, H]`` of ``[B, H, dst, src]``."""
    return matrix[:, :, pairs[1], pairs[0]].mT


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_equals_the_dense_formula(graph, backend):
    made, x, direction = heads(), states(2, 7, 12), states(12, seed=5)
    call = trace.record(MessagePassingAttention(made, backend=backend), x, graph).layers[0]
    wanted = dense(made, x, graph)
    pairs = call.edge_index
    everywhere = graph.mask().reshape(-1, 7, 7).any(0)
    assert sorted(pairs.mT.tolist()) == sorted(everywhere.nonzero().flip(1).tolist())
    assert_exact(call.weights(), at(wanted.weights, pairs))
    assert torch.equal(call.logits() == -math.inf, at(wanted.logits, pairs) == -math.inf)
    assert_exact(call.logits().nan_to_num(neginf=0.0), at(wanted.logits, pairs).nan_to_num(neginf=0.0))
    carried = wanted.carried[:, :, pairs[1], pairs[0]].transpose(1, 2)
    assert_exact(call.messages(pairs), wanted.messages[:, :, pairs[0]].transpose(1, 2))
    assert_exact(call.carried(pairs), carried)
    assert_exact(call.norms(), carried.norm(dim=-1))
    assert_exact(call.along(direction), carried @ direction)
    assert_exact(call.results(), wanted.carried.sum(3).transpose(1, 2))
    assert_exact(call.update, wanted.update)
    total = torch.zeros(2, 7, 12, dtype=torch.float64).index_add(1, pairs[1], call.carried(pairs).sum(2))
    assert_exact(total + made.b_O, call.update)


@pytest.mark.parametrize(
    "form", [lambda h: h, FactoredHeads.of, MergedHeads.of, lambda h: MergedHeads.of(h, side="sender")]
)
def test_every_form_of_the_weights_carries_the_same(form):
    """What an edge carries does not depend on where the product of matrices was taken."""
    made, x = heads(), states(2, 7, 12)
    wanted = dense(made, x, LISTED)
    call = trace.record(MessagePassingAttention(form(made)), x, LISTED).layers[0]
    src, dst = LISTED.edge_index
    assert_exact(call.weights(), at(wanted.weights, LISTED.edge_index))
    assert_exact(call.carried(LISTED.edge_index), wanted.carried[:, :, dst, src].transpose(1, 2))
    assert_exact(call.norms(), wanted.carried[:, :, dst, src].transpose(1, 2).norm(dim=-1))
    assert_exact(call.results(), wanted.carried.sum(3).transpose(1, 2))


def test_heads_of_two_factors_between_value_and_message():
    """Latent heads: what edges carried sums to the update."""
    torch.manual_seed(0)
    layer = MessagePassingAttention(LatentHeads(12, 3, content_dim=4, rotary_dim=2, latent_dim=5).double())
    call = trace.record(layer, states(2, 7, 12), LISTED).layers[0]
    total = torch.zeros(2, 7, 12, dtype=torch.float64)
    total = total.index_add(1, LISTED.edge_index[1], call.carried(LISTED.edge_index).sum(2))
    assert_exact(total, call.update)


def test_score_mods_and_biases_are_in_the_logits():
    """A per-edge bias stays with its edge, for chosen edges too."""
    made, x, bias = heads(), states(1, 7, 12), states(4, 9)
    run = trace.record(MessagePassingAttention(made, score_mods.softcap(2.0)), x, LISTED, bias=bias)
    wanted = dense(made, x, LISTED, cap=2.0, bias=bias)
    call = run.layers[0]
    assert_exact(call.logits(), at(wanted.logits, LISTED.edge_index))
    assert_exact(call.logits(torch.tensor([8, 2])), at(wanted.logits, LISTED.edge_index)[:, [8, 2]])
    assert_exact(call.weights([(6, 5), (5, 1)]), at(wanted.weights, LISTED.edge_index)[:, [8, 2]])
    assert_exact(run.output, wanted.update)


def test_edges_are_chosen_by_position_or_by_pair_and_heads_by_number():
    """Four ways to name the same edges, three to name heads."""
    call = trace.record(MessagePassingAttention(heads()), states(2, 7, 12), LISTED).layers[0]
    all_of_them = call.carried(call.edge_index)
    for edges in (torch.tensor([3, 0]), torch.tensor([[3, 6], [3, 2]]), [(3, 3), (6, 2)], ((3, 3), (6, 2))):
        assert_exact(call.carried(edges), all_of_them[:, [3, 0]])
        assert_exact(call.norms(edges, heads=[2, 1]), call.norms()[:, [3, 0]][..., [2, 1]])
    assert_exact(call.messages((6, 2), heads=3), call.messages(torch.tensor([0]))[:, :, [3]])
    assert_exact(call.weights((3, 3)), torch.ones(2, 1, 4, dtype=torch.float64))
    assert call.weights([]).shape == (2, 0, 4)
    assert call.carried([], heads=1).shape == (2, 0, 1, 12)


def test_many_edges_come_in_parts():
    """Piece by piece what all of them carried, each beside its edges."""
    call = trace.record(MessagePassingAttention(heads()), states(2, 7, 12), patterns.causal(7)).layers[0]
    parts = list(call.each_carried(heads=[0, 3], at_once=5))
    assert [part.shape[1] for part, _ in parts] == [5, 5, 5, 5, 5, 3]
    assert torch.equal(torch.cat([part for part, _ in parts], 1), call.edge_index)
    assert_exact(torch.cat([vectors for _, vectors in parts], 1), call.carried(call.edge_index, [0, 3]))


def test_the_overlap_is_defined_for_pairs_that_are_no_edges():
    """Seed S4.17: the matrix before masking; on edges without a bias it is the logit."""
    made, x = heads(), states(2, 7, 12)
    call = trace.record(MessagePassingAttention(made), x, LISTED).layers[0]
    full = dense(made, x, patterns.full(7)).logits
    assert_exact(call.overlap(), full)
    assert_exact(call.overlap([(1, 0), (2, 2)]), at(full, torch.tensor([[1, 2], [0, 2]])))
    assert_exact(call.overlap(LISTED.edge_index), call.logits())


def test_matrices_are_made_on_request():
    """Dense as SDPA would have them, with a fill of one's own."""
    made, x = heads(), states(2, 7, 12)
    call = trace.record(MessagePassingAttention(made), x, LISTED).layers[0]
    wanted = dense(made, x, LISTED)
    assert_exact(call.dense(call.weights()), wanted.weights)
    assert torch.equal(call.dense(call.logits(), -math.inf) == -math.inf, wanted.logits == -math.inf)
    assert_exact(call.dense(call.norms(heads=2)), wanted.carried.norm(dim=-1)[:, [2]])


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_recording_changes_nothing(backend):
    model, graph = new_model(backend), patterns.window(7, 3)
    wanted, before = model(TOKENS, graph), copy.deepcopy(model.state_dict())
    run = trace.record(model, TOKENS, graph)
    assert_exact(run.output, wanted)
    for found, state in zip(run.states, model.states(TOKENS, graph), strict=True):
        assert_exact(found, state)
    for call, heard in zip(run.layers, model.listen(TOKENS, graph), strict=True):
        assert_exact(call.weights(), heard)
        assert torch.equal(call.edge_index, graph.edge_index)
    with pytest.raises(ValueError, match="does not fit x"):
        trace.record(model, TOKENS, patterns.causal(9))
    assert model.backend == backend
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_states_and_phases_of_the_residual_stream():
    run = trace.record(new_model(), TOKENS)
    assert [(phase.layer, phase.name) for phase in run.phases] == [
        (layer, name) for layer in range(3) for name in ("communication", "computation")
    ]
    assert len(run.states) == len(run.phases) + 1 == 7
    for phase, before, after in zip(run.phases, run.states, run.states[1:], strict=False):
        assert phase.before is before
        assert phase.after is after
        assert torch.equal(before + phase.update, after)
    updates = torch.stack([phase.update for phase in run.phases]).sum(0)
    assert_exact(updates, run.states[-1] - run.states[0])


def test_a_block_and_a_layer_can_be_recorded_alone():
    model, x = new_model(), states(7, 12)
    run = trace.record(model.blocks[1], x[None], patterns.causal(7))
    assert (len(run.layers), len(run.states), run.layers[0].number) == (1, 3, 0)
    assert_exact(run.output, model.blocks[1](x[None], patterns.causal(7)))
    alone = trace.record(model.layers[0], x, patterns.causal(7))
    assert (alone.states, alone.phases, alone.output.shape) == ((), (), (7, 12))
    assert alone.layers[0].weights().shape == (1, 28, 3)
    assert alone.layers[0].update.data_ptr() == alone.output.data_ptr()
    assert alone.layers[0].update.shape == (1, 7, 12)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MessagePassingAttention(heads())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.layer(x, LISTED), patterns.causal(7))

    run = trace.record(Twice(), x)
    assert [(call.number, call.graph.num_edges) for call in run.layers] == [(0, 9), (0, 28)]


def test_cross_attention_and_rows():
    """Senders and receivers of different number; a decoding step."""
    made, x_src, x_dst = heads(), states(2, 7, 12), states(2, 3, 12, seed=2)
    layer, graph = MessagePassingAttention(made), patterns.causal(7).rows(4, 7)
    call = trace.record(layer, (x_src, x_dst), graph).layers[0]
    total = torch.zeros(2, 3, 12, dtype=torch.float64).index_add(
        1, call.edge_index[1], call.carried(call.edge_index).sum(2)
    )
    assert_exact(total + made.b_O, layer((x_src, x_dst), graph))
    with trace.operate(
        layer, trace.cut([(0, 1)])
    ):  # senders and receivers of the graph at hand: the edge 0 -> 5
        found = layer((x_src, x_dst), graph)
    assert_exact(found, layer((x_src, x_dst), (patterns.causal(7) - one(0, 5)).rows(4, 7)))


def one(src: int, dst: int) -> ga.TokenGraph:
    """The graph of a single edge among seven tokens."""
    return ga.convert.from_edge_index(torch.tensor([[src], [dst]]), 7)


def test_a_pair_that_is_no_edge_of_a_head_carries_no_nan():
    made, x = heads(), states(1, 7, 12)
    x[0, 5] = math.nan
    graph = ga.algebra.per_head(*[patterns.causal(7)] * 2, *[patterns.window(7, 1) - one(5, 5)] * 2)
    call = trace.record(MessagePassingAttention(made), x, graph).layers[0]
    for numbers in (
        call.carried([(5, 6)]).norm(dim=-1),
        call.norms([(5, 6)]),
        call.along(states(12), [(5, 6)]),
    ):
        assert numbers.isnan().tolist() == [[[True, True, False, False]]]
        assert (numbers[..., 2:] == 0).all()


def test_half_precision_is_read_in_float32():
    made, x = heads().bfloat16(), states(1, 7, 12).bfloat16()
    call = trace.record(MessagePassingAttention(made), x, LISTED).layers[0]
    assert {
        part.dtype for part in (call.weights(), call.norms(), call.carried(call.edge_index), call.results())
    } == {torch.float32}
    src, _ = call.edge_index
    q, k, v, W_O = (part.detach().double() for part in (call.q, call.k, call.v, made.W_O))
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    scale = 6**-0.5
    logits, weights = (part.detach() for part in (call.logits(), call.weights()))
    # Products of two bfloat16 numbers are exact in float32: a sum of 6 and a product with the scale.
    wide, size = at(q @ k.mT, call.edge_index) * scale, float((q.abs() @ k.abs().mT).max()) * scale
    assert_sum(logits, wide, 7, size)
    # w = e^(logit - lse): its relative error is that of the two, at most one rounding of each for every step
    # on the way to them (difference, exp, sum of at most 4 edges, log, sum, difference, exp: 16 of numbers of
    # at most the logits' size or 1).
    exact = at(
        torch.where(LISTED.mask(), q @ k.mT * scale, -math.inf).softmax(-1).nan_to_num(), call.edge_index
    )
    assert_sum(weights, exact, 2 * 7 + 16, max(size, 1.0))
    messages = torch.einsum("bhev,hvw->behw", v[:, :, src], W_O)
    size = float(torch.einsum("bhev,hvw->behw", v[:, :, src].abs(), W_O.abs()).max())
    assert_sum(call.carried(call.edge_index).detach(), weights.double().unsqueeze(-1) * messages, 6, size)
    with torch.no_grad():
        assert_rule(call.z.detach(), {}, attention_truth(call.q, call.k, call.v, LISTED))


def test_what_is_recorded_has_gradients():
    """The sensitivity of an edge's weight is that of the dense formula."""
    made, x = heads(), states(1, 7, 12).requires_grad_()
    found = trace.record(MessagePassingAttention(made), x, LISTED).layers[0]
    wanted = dense(made, x, LISTED)
    for mine, theirs in (
        (found.weights((0, 2))[0, 0, 1], wanted.weights[0, 1, 2, 0]),
        (found.norms((6, 2), 3).sum(), wanted.carried[0, 3, 2, 6].norm()),
        (found.carried([(5, 1)]).square().sum(), wanted.carried[0, :, 1, 5].square().sum()),
    ):
        (grad,), (truth,) = (torch.autograd.grad(value, x, retain_graph=True) for value in (mine, theirs))
        assert_exact(grad, truth)


def test_a_record_prints_on_one_line():
    """Sizes, not numbers."""
    run = trace.record(new_model(), TOKENS)
    assert repr(run) == "Run(3 calls of attention layers, 7 states)"
    assert repr(run.layers[2]) == "LayerTrace(layer 2, causal(7): 7 src -> 7 dst, batch 2, heads 3)"
    assert repr(run.phases[3]) == "Phase(layer 1, computation, [2, 7, 12])"


def test_hook_names_and_words_are_the_same_tensors():
    """No name has numbers of its own: every alias points at the same memory."""
    run = trace.record(new_model(), TOKENS)
    for number, call in enumerate(run.layers):
        for term in trace.GLOSSARY:
            part = call[term.name]
            words = [term.hook, term.search, term.routing, term.transforms, term.message_exchange]
            for word in filter(None, words):
                assert call[word].data_ptr() == part.data_ptr(), word
                assert run[f"blocks.{number}.{word}"].data_ptr() == part.data_ptr(), word
        assert run[f"blocks.{number}.hook_resid_pre"] is run.states[2 * number]
        assert run[f"blocks.{number}.hook_resid_mid"] is run.states[2 * number + 1]
        assert run[f"blocks.{number}.hook_resid_post"] is run.states[2 * number + 2]
        assert run[f"blocks.{number}.hook_mlp_out"] is run.phases[2 * number + 1].update
        assert run[f"blocks.{number}.hook_attn_out"] is run.phases[2 * number].update
    assert run["hook_embed"] is run.states[0]


def test_hooks_have_the_axes_of_transformer_lens():
    """[batch, pos, head, d_head], and [batch, head] before what stands for query_pos x key_pos."""
    run = trace.record(MessagePassingAttention(heads()), states(2, 7, 12), LISTED)
    shapes = {
        name: tuple(run[f"blocks.0.attn.hook_{name}"].shape)
        for name in ("q", "k", "v", "z", "pattern", "attn_scores")
    }
    assert shapes == {
        "q": (2, 7, 4, 6),
        "k": (2, 7, 2, 6),
        "v": (2, 7, 2, 5),
        "z": (2, 7, 4, 5),
        "pattern": (2, 4, 9),
        "attn_scores": (2, 4, 9),
    }
    assert run["blocks.0.attn.hook_result"].shape == (2, 7, 4, 12)
    assert_exact(run["blocks.0.attn.hook_result"].sum(2) + heads().b_O, run["blocks.0.hook_attn_out"])


def test_one_run_told_in_four_views():
    call = trace.record(MessagePassingAttention(heads()), states(2, 7, 12), LISTED).layers[0]
    told = {view: call.terms(view) for view in trace.VIEWS}
    assert list(told["message exchange"]) == [
        *("receiving channel", "sending channel", "channel overlap", "listening distribution"),
        *("outgoing message", "mixed incoming message", "state update"),
    ]
    assert list(told["search"])[:4] == ["query", "key", "relevance score", "soft result ranking"]
    assert (
        told["transforms"]["column-probability matrix"].data_ptr()
        == told["search"]["soft result ranking"].data_ptr()
    )
    assert told["routing"]["information written"] is call.update
    with pytest.raises(
        ValueError,
        match="view must be one of 'search', 'routing', 'transforms', 'message exchange', got 'poetry'",
    ):
        call.terms("poetry")


def test_unknown_names_are_refused_by_name():
    """A KeyError that lists what there is."""
    run = trace.record(MessagePassingAttention(heads()), states(7, 12), LISTED)
    with pytest.raises(
        KeyError,
        match=r"no part of attention is called 'attn.hook_nonsense': expected one of .*listening distribution",
    ):
        run["blocks.0.attn.hook_nonsense"]
    with pytest.raises(
        KeyError, match=r"no part of this run is called 'blocks.1.attn.hook_q': expected blocks.0 .. blocks.0"
    ):
        run["blocks.1.attn.hook_q"]
    with pytest.raises(KeyError, match="no part of this run is called 'hook_embed'"):
        run["hook_embed"]
    with pytest.raises(KeyError, match="hook_resid_pre"):  # a layer alone has no residual stream
        run["blocks.0.hook_resid_pre"]


@pytest.mark.parametrize(
    ("backend", "name", "chosen"), pairwise(backend=BACKENDS, name=list(GRAPHS), chosen=[None, [2], [0, 2]])
)
def test_cut_and_mute_equal_the_dense_formula(backend, name, chosen):
    """Output, weights and what was carried, by head and edge, on every backend and graph; the two differ."""
    made, x, graph, direction = heads(), states(2, 7, 12), GRAPHS[name], states(12, seed=5)
    layer, gone = MessagePassingAttention(made, backend=backend), cells(PAIRS[name], chosen)
    cut = trace.record(layer, x, graph, surgery=trace.cut(PAIRS[name], heads=chosen))
    mute = trace.record(layer, x, graph, surgery=trace.mute(PAIRS[name], heads=chosen))
    for run, wanted in ((cut, dense(made, x, graph, cut=gone)), (mute, dense(made, x, graph, mute=gone))):
        call = run.layers[0]
        pairs = call.edge_index
        carried = wanted.carried[:, :, pairs[1], pairs[0]].transpose(1, 2)
        assert_exact(run.output, wanted.update)
        assert_exact(call.weights(), at(wanted.weights, pairs))
        assert_exact(call.carried(pairs), carried)
        assert_exact(call.norms(), carried.norm(dim=-1))
        assert_exact(call.along(direction), carried @ direction)
    assert (cut.output - mute.output).abs().max() > 1e-3
    assert (cut.output - layer(x, graph)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["cut", "mute"])
@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_gradients_of_an_operation(backend, kind):
    """Of the states and of every parameter, against the dense formula."""
    made, x = heads(), states(2, 7, 12).requires_grad_()
    pairs = PAIRS["listed"][:3]
    layer, operation = MessagePassingAttention(made, backend=backend), getattr(trace, kind)(pairs)
    with trace.operate(layer, operation):
        found = layer(x, LISTED)
    wanted = dense(made, x, LISTED, **{kind: cells(pairs)}).update
    inputs = [x, *(parameter for name, parameter in made.named_parameters())]
    direction = states(*found.shape, seed=9)
    grads, truths = (
        torch.autograd.grad((y * direction).sum(), inputs, allow_unused=True) for y in (found, wanted)
    )
    assert_exact(grads, truths)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_operations_on_a_model(backend):
    model = new_model(backend)
    plain = trace.record(model, TOKENS)
    operations = [trace.mute([(2, 5)], layers=1), trace.cut([(0, 4), (1, 4)], layers=[1, 2])]
    run = trace.record(model, TOKENS, surgery=operations)
    with trace.operate(model, *operations) as inside:
        assert inside is model
        assert_exact(model(TOKENS), run.output)
    assert_exact(model(TOKENS), plain.output)
    assert all(torch.equal(a, b) for a, b in zip(run.states[:3], plain.states[:3], strict=True))
    changed = (run.states[3] - plain.states[3]).abs().amax((0, 2)) > 1e-9
    assert changed.nonzero().flatten().tolist() == [4, 5]
    assert run.layers[0].graph.num_edges == 28
    assert run.layers[1].graph.num_edges == run.layers[2].graph.num_edges == 26
    assert run.layers[1].carried((2, 5)).abs().max() == 0 < run.layers[1].weights((2, 5)).min()
    assert run.layers[2].carried((2, 5)).abs().min() > 0


def test_operations_add_up_and_nest():
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


def test_one_operation_on_many_graphs():
    made, x = heads(), states(2, 7, 12)
    layer = MessagePassingAttention(made, backend="auto")
    for kind in ("cut", "mute"):
        with trace.operate(layer, getattr(trace, kind)((0, 2), heads=1)):
            for graph in (LISTED, patterns.causal(7), patterns.window(7, 3), LISTED):
                assert_exact(layer(x, graph), dense(made, x, graph, **{kind: cells([(0, 2)], [1])}).update)
            assert_exact(layer(x[:, :5], patterns.causal(5)), layer(x, patterns.causal(7))[:, :5])


def test_text_goes_on_under_an_operation():
    """Generating runs the whole pass for each token, since no cache knows of the operation."""
    model, tokens = new_model(), TOKENS[0]
    with trace.operate(model, trace.mute([(1, 4), (2, 5)], layers=1)):
        found, wanted = lm.generate(model, tokens, 4, temperature=0.0), tokens
        for _ in range(4):
            wanted = torch.cat([wanted, model(wanted[None])[0, -1].argmax(-1, keepdim=True)])
    assert torch.equal(found, wanted)


def test_an_operation_on_one_head_leaves_the_others_their_plans():
    graph = patterns.causal(1024)
    touched, rest = trace.cut((3, 1000), heads=2).split(graph, 8)
    assert (touched.num_edges, rest.num_edges, rest.heads) == (1, 8 * graph.num_edges - 1, 8)
    assert [backends_call.one_of(touched, 0, head).num_edges for head in range(8)] == [
        int(head == 2) for head in range(8)
    ]
    assert [backends_call.one_of(rest, 0, head) is graph for head in range(8)] == [
        head != 2 for head in range(8)
    ]
    assert ga.explain(rest, heads=8, dim=64).choice == "tiles"


def test_every_edge_of_a_head_and_graphs_of_edges():
    """No list: all edges, which takes a head out; a graph: its edges, as far as they are there."""
    made, x = heads(), states(2, 7, 12)
    layer = MessagePassingAttention(made)
    normal = trace.record(layer, x, LISTED)
    for kind in (trace.cut, trace.mute):
        found = trace.record(layer, x, LISTED, surgery=kind(heads=3))
        assert_exact(found.output, normal.output - normal.layers[0].results(3).squeeze(2))
        assert_exact(trace.record(layer, x, LISTED, surgery=kind()).output, made.b_O.expand(2, 7, 12))
    found = trace.record(layer, x, patterns.causal(7), surgery=trace.cut(patterns.window(7, 2, causal=False)))
    assert_exact(found.output, layer(x, patterns.causal(7) - patterns.window(7, 2)))


def test_a_bias_stays_with_its_edges():
    made, x, bias = heads(), states(1, 7, 12), states(4, 9)
    layer, pairs = MessagePassingAttention(made), [(0, 2), (5, 1)]
    for kind in ("cut", "mute"):
        found = trace.record(layer, x, LISTED, bias=bias, surgery=getattr(trace, kind)(pairs))
        wanted = dense(made, x, LISTED, bias=bias, **{kind: cells(pairs)})
        assert_exact(found.output, wanted.update)
        assert_exact(found.layers[0].weights(), at(wanted.weights, found.layers[0].edge_index))
        with pytest.raises(
            NotImplementedError, match="bias with an operation on some heads: operate on all heads"
        ):
            trace.record(layer, x, LISTED, bias=bias, surgery=getattr(trace, kind)(pairs, heads=1))


def test_other_forms_of_a_graph_are_taken():
    """edge_index and adj_t as torch_geometric gives them."""
    made, x = heads(), states(7, 12)
    layer = MessagePassingAttention(made)
    wanted = dense(made, x[None], LISTED, cut=cells([(0, 2)])).update[0]
    for g in (LISTED.edge_index, ga.convert.to_pyg(LISTED, "adj_t")):
        with trace.operate(layer, trace.cut((0, 2))):
            assert_exact(layer(x, g), wanted)
            y, (edges, weights) = layer(x, g=g, return_attention_weights=True)
        assert_exact(y, wanted)
        assert (edges.shape, weights.shape) == ((2, 8), (8, 4))


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("kind", ["cut", "mute"])
def test_what_is_not_sent_is_never_read(kind, backend):
    made, x = heads(), states(1, 7, 12)
    layer = MessagePassingAttention(made, backend=backend)
    graph, pairs = patterns.causal(7) - (one(0, 3) | one(1, 3) | one(2, 3)), [(3, dst) for dst in range(4, 7)]
    wanted = dense(made, x, graph, **{kind: cells(pairs)}).update[0, 4:]
    spoiled = x.clone()
    if kind == "cut":
        spoiled[0, 3] = math.nan
    else:  # only the values of token 3: its key is heard, and must be
        send = made.send

        def sent(x: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
            k, v = send(x, positions)
            return k, v.index_fill(2, torch.tensor([3]), math.nan)

        made.send = sent
    spoiled.requires_grad_()
    with trace.operate(layer, getattr(trace, kind)(pairs)):
        found = layer(spoiled, graph)[0]
    assert found.isnan().any(-1).tolist() == [False] * 3 + [True] + [False] * 3
    assert_exact(found[4:], wanted)
    found[4:].square().sum().backward()
    assert spoiled.grad is not None
    assert torch.isfinite(spoiled.grad[0, [0, 1, 2, 4, 5, 6]]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_receivers_left_with_nobody_hear_nothing(backend):
    made, x = heads(), states(1, 7, 12).requires_grad_()
    layer, pairs = MessagePassingAttention(made, backend=backend), [(6, 2), (0, 2), (2, 2)]
    for kind in (trace.cut, trace.mute):
        run = trace.record(layer, x, LISTED, surgery=kind(pairs))
        assert torch.equal(run.output[0, 2], made.b_O)
        assert (run.layers[0].z[0, :, 2] == 0).all()
        (grad,) = torch.autograd.grad(run.output.square().sum(), x)
        assert torch.isfinite(grad).all()
    assert_exact(run.layers[0].weights(pairs).sum(1), torch.ones(1, 4, dtype=torch.float64))
    cut = trace.record(layer, x, LISTED, surgery=trace.cut(pairs))
    assert (cut.layers[0].lse[0, :, 2] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows"])
@torch.no_grad()
def test_muting_the_loudest_edge_loses_no_digits(backend, dtype):
    torch.manual_seed(0)
    n, width = 24, 16
    q, k, v = torch.randn(1, 2, n, width), torch.randn(1, 2, n, width), torch.randn(1, 2, n, width)
    k[:, :, 0] = 2 * q.mean(2) + 4 * q[:, :, 20]  # receiver 20 listens to token 0 alone, almost
    v[:, :, 0] *= 1000
    q, k, v = (x.to(dtype) for x in (q, k, v))
    graph, scale = patterns.causal(n), width**-0.5
    muted = intervene.LastSplit(trace.mute([(0, dst) for dst in range(n)]))
    found = ga.attend(q, k, v, graph, scale=scale, backend=intervene.Muting.over(backend, muted))
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
def test_nothing_is_made_of_tokens_by_tokens():
    n, width = 2048, 64
    torch.manual_seed(0)
    layer, x = (
        MessagePassingAttention(StandardHeads(width, 8, head_dim=4), backend="rows"),
        torch.randn(n, width),
    )
    graph = patterns.window(n, 4)
    with Sizes() as sizes:
        for surgery in (
            trace.cut([(9, 10)], heads=2),
            trace.mute([(9, 10), (2000, 2001)], heads=[1, 5]),
            trace.mute((1, 3)),
        ):
            call = trace.record(layer, x, graph, surgery=surgery).layers[0]
            assert (
                call.norms().shape == call.along(torch.ones(width)).shape == (1, call.edge_index.shape[1], 8)
            )
            assert call.carried([(2000, 2001)]).shape == (1, 1, 8, width)
            assert trace.rollout([call] * 2, [2000, 17]).shape == (1, 2, n)
    assert sizes.largest < n * n / 8, sizes.largest
    assert sizes.largest < call.edge_index.shape[1] * 8 * width / 4, sizes.largest


def test_wrong_operations_are_refused_before_anything_changes():
    """Each by name; the model serves the next call."""
    model = new_model()
    for operation, error, match in (
        (lambda: trace.cut([(0, 1.5)]), TypeError, "edge_index must be a tensor of signed integers"),
        (
            lambda: trace.cut(3),
            TypeError,
            r"edges must be a tensor \[2, K\] or a list of \(src, dst\), got int",
        ),
        (lambda: trace.mute([(0, 1, 2)]), ValueError, r"edge_index must have shape \[2, E\]"),
        (lambda: trace.mute([(-1, 2)]), IndexError, "is no sender"),
        (lambda: trace.cut((0, 1), layers=-1), ValueError, "layers must be at least 0, got -1"),
        (lambda: trace.cut((0, 1), heads=[0, "x"]), TypeError, "each of heads must be an integer, got 'x'"),
    ):
        with pytest.raises(error, match=match):
            operation()
    for surgery, error, match in (
        (
            trace.cut((0, 1), layers=[0, 3]),
            IndexError,
            r"layers must be in 0 .. 2, the attention layers of the module, got 3",
        ),
        (trace.mute((0, 1), heads=3), IndexError, r"heads must be in 0 .. 2, got 3"),
        (
            trace.cut((3, 1)),
            ValueError,
            r"3 -> 1 is no edge of TokenGraph\(causal\(7\).*: there is nothing to cut",
        ),
        (
            trace.mute([(0, 1), (5, 2)]),
            ValueError,
            r"5 -> 2 is no edge of TokenGraph\(causal\(7\).*: there is nothing to mute",
        ),
        (trace.mute((0, 7)), IndexError, r"edge_index\[1, 0\] = 7 is no receiver: expected 0 .. 6"),
        (trace.cut(patterns.causal(8)), ValueError, "graphs joined by & must have the same nodes"),
        ("cut", TypeError, r"surgeries must be made by cut\(...\) or mute\(...\), got str"),
    ):
        with pytest.raises(error, match=match), trace.operate(model, surgery):
            model(TOKENS)
        assert model.backend == "auto"
        assert not any(layer._forward_pre_hooks for layer in model.layers)
    with pytest.raises(
        ValueError, match=r"module must hold a MessagePassingAttention, got Linear, which has none"
    ):
        trace.record(nn.Linear(2, 2), torch.zeros(2))
    walking = new_model(None)
    with (
        pytest.raises(NotImplementedError, match=r"the walk \(backend=None\) needs one edge list"),
        trace.operate(walking, trace.cut((0, 1), heads=1)),
    ):
        walking(TOKENS)


def test_wrong_questions_are_refused():
    """Each by name, about the record of a run."""
    call = trace.record(MessagePassingAttention(heads()), states(7, 12), LISTED).layers[0]
    valueless = trace.record(
        MessagePassingAttention(StandardHeads.from_arrays(*(torch.randn(2, 4, 3) for _ in range(3)))),
        torch.randn(7, 4),
        LISTED,
    ).layers[0]
    for question, error, match in (
        (
            lambda: call.weights([(0, 1)]),
            ValueError,
            "0 -> 1 is no edge of TokenGraph.*: nothing came along; overlap",
        ),
        (lambda: call.weights([(0, 9)]), IndexError, "is no receiver: expected 0 .. 6"),
        (lambda: call.overlap([(7, 0)]), IndexError, "is no sender: expected 0 .. 6"),
        (lambda: call.norms(torch.tensor([9])), IndexError, r"edges must be positions in 0 .. 8, got 9 .. 9"),
        (lambda: call.norms(torch.ones(9, dtype=torch.bool)), TypeError, "of a bool mask use nonzero"),
        (lambda: call.carried((0, 2), heads=4), IndexError, r"heads must be in 0 .. 3, got 4"),
        (
            lambda: call.along(torch.ones(5)),
            ValueError,
            r"direction must be a tensor \[12\], as wide as a state, got .*shape \[5\]",
        ),
        (
            lambda: call.dense(call.weights()[:, :3]),
            ValueError,
            r"numbers must be \[B, 9, heads\], one for each edge, got \[1, 3, 4\]",
        ),
        (lambda: call.each_carried(at_once=0), ValueError, "at_once must be at least 1, got 0"),
        (lambda: valueless.norms(), ValueError, "heads without W_O have values but no messages"),
        (lambda: trace.rollout([]), ValueError, "layers must be over the same tokens"),
        (lambda: trace.rollout([call], [7]), IndexError, r"receivers must be in 0 .. 6, got 7"),
        (lambda: trace.flow([call], 0, 7), IndexError, r"dst must be in 0 .. 6, got 7"),
        (lambda: trace.flow([call], 0, 1, sample=1), IndexError, r"sample must be in 0 .. 0, got 1"),
    ):
        with pytest.raises(error, match=match):
            question()


def test_a_layer_with_message_hooks_is_refused():
    layer, x = MessagePassingAttention(heads(), backend="auto"), states(7, 12)
    handle = layer.register_message_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(
        NotImplementedError,
        match="a hook or explainer of torch_geometric keeps this layer on the message-passing path: remove it to record",
    ):
        trace.record(layer, x, LISTED)
    with (
        pytest.raises(NotImplementedError, match="remove it to mute an edge"),
        trace.operate(layer, trace.mute((0, 2))),
    ):
        layer(x, LISTED)
    handle.remove()
    assert trace.record(layer, x, LISTED).layers


def test_a_run_under_surgery_can_be_copied():
    model = new_model()
    with trace.operate(model, trace.mute((0, 5))):
        inside = model(TOKENS)
        assert_exact(copy.deepcopy(model)(TOKENS), inside)


@torch.no_grad()
def test_a_message_sent_on_through_another_token():
    model, _ = lm.load_trained()
    first = torch.randint(model.config.vocabulary_size, (4, 24), generator=torch.Generator().manual_seed(1))
    tokens = torch.cat([first, first], dim=1)
    head = divmod(int(lm.induction_scores(model, samples=2).argmax()), model.config.num_heads)
    copies = [(dst - 23, dst) for dst in range(24, 48)]
    before = [(dst - 1, dst) for dst in range(1, 48)]
    runs = {
        kind: trace.record(model, tokens, surgery=kind(before, layers=0)) for kind in (trace.cut, trace.mute)
    }
    plain = trace.record(model, tokens).layers[head[0]].weights(copies, heads=head[1]).mean()
    assert head[0] == 1
    assert plain > 0.3
    for run in runs.values():
        assert run.layers[1].weights(copies, heads=head[1]).mean() < plain / 3


def mixed(layers: Any) -> Tensor:
    """The product of the dense ``mean weight over heads + I``, its rows divided by their sum."""
    product = eye = torch.eye(layers[0].graph.num_dst, dtype=torch.float64)
    for call in layers:
        share = call.dense(call.weights()).mean(1) + eye
        product = share / share.sum(-1, keepdim=True) @ product
    return product


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_rollout_is_the_product_of_the_layers(graph):
    """Against the dense product; rows sum to 1 and nothing comes from where no path leads."""
    model = nn.ModuleList(MessagePassingAttention(heads()) for _ in range(3))
    x = states(2, 7, 12)
    layers = [trace.record(layer, x + number, graph).layers[0] for number, layer in enumerate(model)]
    found = trace.rollout(layers)
    assert_exact(found, mixed(layers))
    assert_exact(found.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    assert_exact(trace.rollout(layers, [5, 2]), found[:, [5, 2]])
    assert_exact(trace.rollout(layers[:1]), mixed(layers[:1]))
    if graph is GRAPHS["causal"]:  # as the paper writes it, where everybody hears somebody
        half = 0.5 * layers[0].dense(layers[0].weights()).mean(1) + 0.5 * torch.eye(7, dtype=torch.float64)
        assert_exact(trace.rollout(layers[:1]), half)
    if graph.heads is None and graph.batch is None:
        paths = (graph | patterns.window(7, 1)) ** 3
        assert torch.equal(found[0] > 0, paths.mask())


def test_flow_is_the_least_cut_of_the_shares():
    run = trace.record(new_model(), TOKENS, ga.convert.from_edge_index(LISTED.edge_index, 7))
    shares = [mixed([call]) for call in run.layers]
    for src in range(7):
        for dst in (1, 2, 5):
            found = trace.flow(run.layers, src, dst, sample=1)
            # EXACT of shares, whose largest is at most 1: bounds that a flow may touch
            assert trace.rollout(run.layers)[1, dst, src] - EXACT <= found <= 1 + EXACT
            assert found <= sum(shares[0][1, :, src]) + EXACT
            assert_exact(trace.flow(run.layers[:1], src, dst), shares[0][0, dst, src].item())
    chain = patterns.window(7, 2) - patterns.window(
        7, 1
    )  # 0 -> 1 -> 2 ...: one path over three layers, and it bends never
    layers = trace.record(new_model(), TOKENS, chain).layers
    along = [mixed([call])[0, t + 1, t].item() for t, call in enumerate(layers)]
    assert_exact(trace.flow(layers, 0, 3), min(along))
    assert_exact(trace.rollout(layers)[0, 3, 0], math.prod(along))
    assert trace.flow(layers, 3, 0) == 0.0
    assert trace.flow(layers, 0, 4) == 0.0


def test_a_muted_edge_brings_nothing_to_rollout_and_flow():
    """The rest of the row grows to 1 again; without the edge there is no other way."""
    chain = patterns.window(7, 2) - patterns.window(7, 1)
    for kind in (trace.cut, trace.mute):
        layers = trace.record(new_model(), TOKENS, chain, surgery=kind((1, 2), layers=1)).layers
        found = trace.rollout(layers)
        assert_exact(found.sum(-1), torch.ones(2, 7, dtype=torch.float64))
        assert found[:, 3, 0].abs().max() == 0 == trace.flow(layers, 0, 3)
        assert found[:, 4, 1].min() > 0


def test_pairs_in_parts_are_the_pairs_at_once(monkeypatch):
    made, x = heads(), states(1, 7, 12).requires_grad_()
    chosen = torch.tensor([8, 1, 2, 3, 4, 5, 0, 7])

    def asked(edges: Any) -> tuple[Tensor, Tensor]:
        call = trace.record(MessagePassingAttention(made, score_mods.softcap(2.0)), x, LISTED).layers[0]
        logits = call.logits() if edges is None else call.logits(edges)
        picked = logits[:, chosen] if edges is None else logits
        return picked, torch.autograd.grad(picked.square().sum(), x)[0]

    whole, once = asked(None), asked(chosen)
    monkeypatch.setattr("gnn_attention.interpret.trace.pairs.AT_ONCE", 3)
    for found in (once, asked(chosen)):
        assert_exact(found[0], whole[0])
        assert_exact(found[1], whole[1])
