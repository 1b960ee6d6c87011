"""Cut and mute: what is not sent is never read, interventions add up, and wrong ones are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support import traces
from support.bounds import assert_exact, assert_rule, attention_truth
from support.traces import CAUSAL, LISTED, TOKENS, at, cells, dense, drawn, heads, new_model, recorded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace.intervention import ChangedMessages


@pytest.mark.parametrize("backend", [*traces.BACKENDS, "message_passing"])
def test_interventions_on_a_model(backend: Any) -> None:
    """Only from the chosen layer on do states differ; so does a copy made inside; leaving restores."""
    model = new_model(backend)
    plain = trace.record(model, TOKENS)
    interventions = [trace.mute([(2, 5)], layers=1), trace.cut([(0, 4), (1, 4)], layers=[1, 2])]
    run = trace.record(model, TOKENS, interventions=interventions)
    with trace.intervene(model, *interventions) as inside:
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


def test_interventions_add_up_and_nest() -> None:
    """Two mutes, of which one is inside the other; a mute of an edge whose neighbour is cut."""
    made, x = heads(), drawn(2, 7, 12)
    layer = MessagePassingAttention(made)
    both = dense(made, x, LISTED, mute=cells([(6, 2), (0, 2)])).update
    with trace.intervene(layer, trace.mute([(6, 2)])), trace.intervene(layer, trace.mute([(0, 2), (6, 2)])):
        assert_exact(layer(x, LISTED), both)
        call = trace.record(layer, x, LISTED).layers[0]
        assert_exact(call.weights(), at(dense(made, x, LISTED).weights, LISTED.edge_index))
        assert call.norms([(6, 2), (0, 2)]).abs().max() == 0
    wanted = dense(made, x, LISTED, cut=cells([(6, 2)]), mute=cells([(0, 2)], [1]))
    found = trace.record(layer, x, LISTED, interventions=[trace.mute((0, 2), heads=1), trace.cut((6, 2))])
    assert_exact(found.output, wanted.update)
    assert_exact(layer(x, LISTED), dense(made, x, LISTED).update)


@pytest.mark.parametrize("kind", traces.KINDS)
def test_one_intervention_on_many_graphs(kind: str) -> None:
    """Each call's own graph is changed, of whatever length and form; a graph as far as its edges are."""
    made, x, intervention = heads(), drawn(2, 7, 12), traces.KINDS[kind]
    layer, graphs = MessagePassingAttention(made, backend="auto"), (LISTED, CAUSAL, patterns.window(7, 3))
    plain = {graph: layer(x, graph) for graph in (LISTED, CAUSAL)}
    with trace.intervene(layer, intervention((0, 2), heads=1)):
        wanted = [dense(made, x, graph, **{kind: cells([(0, 2)], [1])}).update for graph in graphs]
        assert_exact([layer(x, graph) for graph in graphs], wanted)
        for g in (LISTED, LISTED.edge_index, ga.convert.to_pyg(LISTED, "adj_t")):
            assert_exact(layer(x[1], g), wanted[0][1])
            assert_exact(layer(x[1], edge_index=g), wanted[0][1])
        assert_exact(layer(x[:, :5], patterns.causal(5)), layer(x, CAUSAL)[:, :5])
    # every edge of a head, and of all heads
    found = trace.record(layer, x, LISTED, interventions=intervention(heads=3))
    assert_exact(found.output, plain[LISTED] - recorded(made, x, LISTED).results(3).squeeze(2))
    assert_exact(
        trace.record(layer, x, LISTED, interventions=intervention()).output, made.b_O.expand(2, 7, 12)
    )
    window = patterns.window(7, 2)
    found = trace.record(layer, x, CAUSAL, interventions=intervention(patterns.window(7, 2, causal=False)))
    assert_exact(found.output, dense(made, x, CAUSAL, **{kind: window.mask()}).update)


@pytest.mark.parametrize("backend", [*traces.BACKENDS, "message_passing"])
@pytest.mark.parametrize("kind", traces.KINDS)
def test_what_is_not_sent_is_never_read(kind: str, backend: Any) -> None:
    """A NaN in the message of a cut or muted edge stays with its sender, and so does its gradient."""
    made, x = heads(), drawn(1, 7, 12)
    layer = MessagePassingAttention(made, backend=backend)
    graph, pairs = (
        CAUSAL - (traces.one(0, 3) | traces.one(1, 3) | traces.one(2, 3)),
        [(3, dst) for dst in range(4, 7)],
    )
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
    with trace.intervene(layer, traces.KINDS[kind](pairs)):
        found = layer(spoiled, graph)[0]
    assert found.isnan().any(-1).tolist() == [False] * 3 + [True] + [False] * 3
    assert_exact(found[4:], wanted)
    found[4:].square().sum().backward()
    assert spoiled.grad is not None
    assert torch.isfinite(spoiled.grad[0, [0, 1, 2, 4, 5, 6]]).all()


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
    mute = trace.mute([(0, dst) for dst in range(n)])
    found = ga.attend(q, k, v, graph, scale=scale, backend=ChangedMessages.wrap(backend, (mute, 0)))
    weights = (q.double() @ k.double().mT * scale).masked_fill(~graph.mask(), -math.inf).softmax(-1)
    assert weights[0, :, 20, 0].min() > 0.9
    quiet = v.clone()
    quiet[:, :, 0] = 0.0  # the same sum by SDPA, in the same dtype
    assert_rule(found, {}, attention_truth(q, k, quiet, graph))


@pytest.mark.parametrize("graph", traces.GRAPHS)
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles"])
def test_scaled_and_patched_messages(graph: str, backend: str) -> None:
    """In their order where an edge has both, against the formula: the update, and what is recorded."""
    made, x, other, listed = heads(), drawn(2, 7, 12), drawn(1, 5, 12, seed=1), traces.PAIRS[graph]
    g, layer = traces.GRAPHS[graph], MessagePassingAttention(heads(), backend=backend)
    source = trace.record(MessagePassingAttention(made), other, patterns.causal(5))
    early = [pair for pair in listed if pair[0] < 5]
    intervention = [trace.mute(listed[:2], heads=2, factor=-3.0), trace.patch(source, early, heads=[1, 2])]
    intervention.append(trace.mute(listed[:1], heads=2, factor=0.5))
    plain, given = dense(made, x, g), dense(made, other, patterns.causal(5)).messages
    sent = plain.messages.unsqueeze(2).expand(2, 4, 7, 7, 12).clone()
    for src, dst in listed[:2]:
        sent[:, 2, dst, src] *= -3.0
    for src, dst in early:
        sent[:, 1:3, dst, src] = given[0, 1:3, src]
    sent[:, 2, listed[0][1], listed[0][0]] *= 0.5
    carried = plain.weights.unsqueeze(-1) * sent
    call = trace.record(layer, x, g, interventions=intervention).layers[0]
    assert_exact(call.update, carried.sum((1, 3)) + made.b_O)
    pairs = call.edge_index
    assert_exact(call.weights(), at(plain.weights, pairs))
    assert_exact(call.carried(pairs), at(carried, pairs))
    assert_exact(call.norms(), at(carried.norm(dim=-1), pairs))
    assert_exact(call.messages(pairs), plain.messages[:, :, pairs[0]].transpose(1, 2))


def test_a_sink_counts_for_a_receiver_whose_messages_are_all_changed() -> None:
    """It has in-edges still."""
    q, k, v, sinks = drawn(1, 2, 3, 4), drawn(1, 2, 3, 4, seed=1), drawn(1, 2, 3, 4, seed=2), drawn(2, seed=3)
    mute = trace.mute([(0, 0), (0, 1), (1, 1)])
    changing = ChangedMessages.wrap("auto", (mute, 0))
    info = ga.attend(q, k, v, patterns.causal(3), sink_logits=sinks, backend=changing, return_info=True)[1]
    logits = (q @ k.mT / 2).masked_fill(~patterns.causal(3).mask(), -math.inf)
    assert_exact(info.lse, torch.cat([logits, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1).logsumexp(-1))


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
    with Sizes() as sizes:
        for intervention in (trace.cut([(9, 10)], heads=2), trace.mute([(9, 10), (7, 8)], heads=[1, 5])):
            call = trace.record(layer, torch.randn(n, width), graph, interventions=intervention).layers[0]
            assert call.norms().shape == (1, call.edge_index.shape[1], 8)
            assert call.carried([(2000, 2001)]).shape == (1, 1, 8, width)
    assert sizes.largest < n * n / 8, sizes.largest
    assert sizes.largest < call.edge_index.shape[1] * 8 * width / 4, sizes.largest


NO_EDGE = r"-> {} is no edge of TokenGraph\(causal\(7\).*: there is nothing to {}"


def patched(count: int, *edges: Any, copies: int = 1, **where: Any) -> trace.Intervention:
    """A patch from a run of this many tokens."""
    return trace.patch(trace.record(new_model(), TOKENS[:1, :count].expand(copies, -1)), *edges, **where)


WRONG_INTERVENTIONS = [
    (lambda: trace.cut(3), TypeError, r"edges must be a tensor \[2, K\] or a list of \(src, dst\), got 3"),
    (lambda: trace.mute((-1, 2)), IndexError, r"edges must be pairs \(src, dst\).*, got \[\[-1, 2\]\]"),
    (lambda: trace.mute((0, 1, 2)), ValueError, r"edges must be pairs \(src, dst\).*, got \(0, 1, 2\)"),
    (lambda: trace.mute([(0.0, 2.0)]), TypeError, r"edges must be pairs .*, got \[\(0\.0, 2\.0\)\]"),
    (lambda: trace.cut((0, 1), heads=[0, "x"]), TypeError, "each of heads must be an integer, got 'x'"),
    (lambda: trace.cut((0, 1), layers=[0, 3]), IndexError, "layers must be in 0 .. 2, the attention layers"),
    (lambda: trace.mute((0, 1), heads=3), IndexError, r"heads must be in 0 .. 2, got 3"),
    (lambda: trace.cut((3, 1)), ValueError, NO_EDGE.format(1, "cut")),
    (lambda: trace.cut(patterns.causal(8)), ValueError, "graphs joined by & must have the same nodes"),
    (lambda: trace.mute((0, 1), factor="2"), TypeError, "factor must be a number, got"),
    (lambda: trace.patch(new_model(), (0, 1)), TypeError, "run must be a result of trace.record, got"),
    (lambda: patched(7, (0, 1), layers=3), IndexError, r"must be among \[0, 1, 2\], which the run has"),
    (lambda: patched(7, copies=3), ValueError, r"\[3, 3, 7, 4\] in the run and \[2, 3, 7, 4\] here"),
    (lambda: "cut", TypeError, "interventions must be an? Intervention, got "),
]


def test_the_old_names_warn() -> None:
    model, mute = new_model(), trace.mute((0, 1))
    with pytest.warns(DeprecationWarning, match="called trace.intervene"), trace.operate(model, mute):
        changed = model(TOKENS)
    with pytest.warns(DeprecationWarning, match="called interventions=") as warned:
        assert_exact(trace.record(model, TOKENS, surgery=mute).output, changed)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("intervention", "error", "match"), WRONG_INTERVENTIONS)
def test_wrong_interventions_are_refused_before_anything_changes(
    intervention: Any, error: Any, match: str
) -> None:
    model = new_model()
    with pytest.raises(error, match=match), trace.intervene(model, intervention()):
        model(TOKENS)
    assert model.backend == "auto"
    assert not any(layer._forward_pre_hooks for layer in model.layers)
