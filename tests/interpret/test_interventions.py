"""Unsent messages are never read, interventions combine, and invalid ones are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support import traces
from support.bounds import assert_exact, assert_rule, attention_truth
from support.traces import CAUSAL, LISTED, TOKENS, cells, dense, heads, new_model, randn, record, take
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace.intervention import ChangedMessages


@pytest.mark.parametrize("backend", [*traces.BACKENDS, "message_passing"])
def test_interventions_on_a_model(backend: Any) -> None:
    """States differ from the selected layer on, in a copy too, and leaving restores the model."""
    model = new_model(backend)
    plain = trace.record(model, TOKENS)
    interventions = [trace.mute([(2, 5)], layers=1), trace.cut([(0, 4), (1, 4)], layers=[1, 2])]
    run = trace.record(model, TOKENS, interventions=interventions)
    with trace.intervene(model, *interventions) as value:
        assert value is model
        assert_exact(model(TOKENS), run.output)
        assert_exact(copy.deepcopy(model)(TOKENS), run.output)
    assert_exact(model(TOKENS), plain.output)
    assert all(torch.equal(a, b) for a, b in zip(run.states[:3], plain.states[:3], strict=True))
    has_changed = (run.states[3] - plain.states[3]).abs().amax((0, 2)) > 1e-9
    assert has_changed.nonzero().flatten().tolist() == [4, 5]
    assert [call.graph.num_edges for call in run.layers] == [28, 26, 26]
    assert run.layers[1].carried((2, 5)).abs().max() == 0 < run.layers[1].weights((2, 5)).min()
    assert run.layers[2].carried((2, 5)).abs().min() > 0


def test_interventions_add_up_and_nest() -> None:
    """One mute contains another, and a mute combines with the cut of a neighbouring edge."""
    form, x = heads(), randn(2, 7, 12)
    layer = MessagePassingAttention(form)
    update = dense(form, x, LISTED, mute=cells([(6, 2), (0, 2)])).update
    with trace.intervene(layer, trace.mute([(6, 2)])), trace.intervene(layer, trace.mute([(0, 2), (6, 2)])):
        assert_exact(layer(x, LISTED), update)
        call = trace.record(layer, x, LISTED).layers[0]
        assert_exact(call.weights(), take(dense(form, x, LISTED).weights, LISTED.edge_index))
        assert call.norms([(6, 2), (0, 2)]).abs().max() == 0
    expected = dense(form, x, LISTED, cut=cells([(6, 2)]), mute=cells([(0, 2)], [1]))
    output = trace.record(layer, x, LISTED, interventions=[trace.mute((0, 2), heads=1), trace.cut((6, 2))])
    assert_exact(output.output, expected.update)
    assert_exact(layer(x, LISTED), dense(form, x, LISTED).update)


@pytest.mark.parametrize("kind", traces.KINDS)
def test_one_intervention_on_many_graphs(kind: str) -> None:
    """An intervention changes the graph of each call, whatever its length and form."""
    form, x, intervention = heads(), randn(2, 7, 12), traces.KINDS[kind]
    layer, graphs = MessagePassingAttention(form, backend="auto"), (LISTED, CAUSAL, patterns.window(7, 3))
    plain = {graph: layer(x, graph) for graph in (LISTED, CAUSAL)}
    with trace.intervene(layer, intervention((0, 2), heads=1)):
        expected = [dense(form, x, graph, **{kind: cells([(0, 2)], [1])}).update for graph in graphs]
        assert_exact([layer(x, graph) for graph in graphs], expected)
        for g in (LISTED, LISTED.edge_index, ga.convert.to_pyg(LISTED, "adj_t")):
            assert_exact(layer(x[1], g), expected[0][1])
            assert_exact(layer(x[1], edge_index=g), expected[0][1])
        assert_exact(layer(x[:, :5], patterns.causal(5)), layer(x, CAUSAL)[:, :5])
    # Without edges, all edges of one head or of all heads are selected.
    output = trace.record(layer, x, LISTED, interventions=intervention(heads=3))
    assert_exact(output.output, plain[LISTED] - record(form, x, LISTED).results(3).squeeze(2))
    assert_exact(
        trace.record(layer, x, LISTED, interventions=intervention()).output, form.b_O.expand(2, 7, 12)
    )
    window = patterns.window(7, 2)
    output = trace.record(layer, x, CAUSAL, interventions=intervention(patterns.window(7, 2, causal=False)))
    assert_exact(output.output, dense(form, x, CAUSAL, **{kind: window.mask()}).update)


@pytest.mark.parametrize("backend", [*traces.BACKENDS, "message_passing"])
@pytest.mark.parametrize("kind", traces.KINDS)
def test_unsent_messages_are_never_read(kind: str, backend: Any) -> None:
    """A NaN in the message of a cut or muted edge stays with its sender, and so does its gradient."""
    form, x = heads(), randn(1, 7, 12)
    layer = MessagePassingAttention(form, backend=backend)
    graph, pairs = (
        CAUSAL - (traces.one_edge(0, 3) | traces.one_edge(1, 3) | traces.one_edge(2, 3)),
        [(3, dst) for dst in range(4, 7)],
    )
    expected = dense(form, x, graph, **{kind: cells(pairs)}).update[0, 4:]
    x_with_nan = x.clone()
    if kind == "cut":
        x_with_nan[0, 3] = math.nan
    else:  # The key of token 3 must still be read.
        send = form.send

        def send_nan(x: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
            k, v = send(x, positions)
            return k, v.index_fill(2, torch.tensor([3]), math.nan)

        form.send = send_nan
    x_with_nan.requires_grad_()
    with trace.intervene(layer, traces.KINDS[kind](pairs)):
        output = layer(x_with_nan, graph)[0]
    assert output.isnan().any(-1).tolist() == [False] * 3 + [True] + [False] * 3
    assert_exact(output[4:], expected)
    output[4:].square().sum().backward()
    assert x_with_nan.grad is not None
    assert torch.isfinite(x_with_nan.grad[0, [0, 1, 2, 4, 5, 6]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows"])
@torch.no_grad()
def test_muting_the_loudest_edge_loses_no_digits(backend: str, dtype: torch.dtype) -> None:
    """A subtraction would lose digits: the edge has most of the weight and a 1000 times larger message."""
    torch.manual_seed(0)
    n, width = 24, 16
    q, k, v = torch.randn(3, 1, 2, n, width)
    k[:, :, 0] = 2 * q.mean(2) + 4 * q[:, :, 20]  # Receiver 20 attends almost only to token 0.
    v[:, :, 0] *= 1000
    q, k, v = (x.to(dtype) for x in (q, k, v))
    graph, scale = patterns.causal(n), width**-0.5
    mute = trace.mute([(0, dst) for dst in range(n)])
    output = ga.attend(q, k, v, graph, scale=scale, backend=ChangedMessages.wrap(backend, (mute, 0)))
    weights = (q.double() @ k.double().mT * scale).masked_fill(~graph.mask(), -math.inf).softmax(-1)
    assert weights[0, :, 20, 0].min() > 0.9
    muted_v = v.clone()
    muted_v[:, :, 0] = 0.0  # SDPA then computes the same sum in the same dtype.
    assert_rule(output, {}, attention_truth(q, k, muted_v, graph))


@pytest.mark.parametrize("graph", traces.GRAPHS)
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles"])
def test_scaled_and_patched_messages(graph: str, backend: str) -> None:
    """Changes apply in order: the update and the record equal the dense formula."""
    form, x, other, edges = heads(), randn(2, 7, 12), randn(1, 5, 12, seed=1), traces.PAIRS[graph]
    g, layer = traces.GRAPHS[graph], MessagePassingAttention(heads(), backend=backend)
    source = trace.record(MessagePassingAttention(form), other, patterns.causal(5))
    short_pairs = [pair for pair in edges if pair[0] < 5]
    steps = [trace.mute(edges[:2], heads=2, factor=-3.0), trace.patch(source, short_pairs, heads=[1, 2])]
    steps.append(trace.mute(edges[:1], heads=2, factor=0.5))
    plain, messages = dense(form, x, g), dense(form, other, patterns.causal(5)).messages
    changed_messages = plain.messages.unsqueeze(2).expand(2, 4, 7, 7, 12).clone()
    for src, dst in edges[:2]:
        changed_messages[:, 2, dst, src] *= -3.0
    for src, dst in short_pairs:
        changed_messages[:, 1:3, dst, src] = messages[0, 1:3, src]
    changed_messages[:, 2, edges[0][1], edges[0][0]] *= 0.5
    carried = plain.weights.unsqueeze(-1) * changed_messages
    call = trace.record(layer, x, g, interventions=steps).layers[0]
    assert_exact(call.update, carried.sum((1, 3)) + form.b_O)
    pairs = call.edge_index
    assert_exact(call.weights(), take(plain.weights, pairs))
    assert_exact(call.carried(pairs), take(carried, pairs))
    assert_exact(call.norms(), take(carried.norm(dim=-1), pairs))
    assert_exact(call.messages(pairs), plain.messages[:, :, pairs[0]].transpose(1, 2))


def test_a_sink_counts_for_a_receiver_whose_messages_are_all_changed() -> None:
    """Such a receiver still has in-edges."""
    q, k, v, sinks = randn(1, 2, 3, 4), randn(1, 2, 3, 4, seed=1), randn(1, 2, 3, 4, seed=2), randn(2, seed=3)
    mute = trace.mute([(0, 0), (0, 1), (1, 1)])
    backend = ChangedMessages.wrap("auto", (mute, 0))
    info = ga.attend(q, k, v, patterns.causal(3), sink_logits=sinks, backend=backend, return_info=True)[1]
    logits = (q @ k.mT / 2).masked_fill(~patterns.causal(3).mask(), -math.inf)
    assert_exact(info.lse, torch.cat([logits, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1).logsumexp(-1))


class Sizes(TorchDispatchMode):
    """A mode that records the number of elements of the largest tensor that torch makes."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in tree_flatten(result)[0]:
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.untyped_storage().nbytes() // part.element_size())
        return result


@torch.no_grad()
def test_no_tensor_has_tokens_by_tokens_elements() -> None:
    """No tensor of 2048 tokens with 4 edges each has that size, or edges x heads x width."""
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


NO_EDGE = r"-> {} is not an edge of TokenGraph\(causal\(7\).*: there is nothing to {}"


def patch_from(count: int, *edges: Any, copies: int = 1, **options: Any) -> trace.Intervention:
    """Return a patch from a run of ``count`` tokens."""
    return trace.patch(trace.record(new_model(), TOKENS[:1, :count].expand(copies, -1)), *edges, **options)


WRONG_INTERVENTIONS = [
    (lambda: trace.cut(3), TypeError, r"edges must be a tensor \[2, K\] or a list of \(src, dst\), got 3"),
    (lambda: trace.mute((-1, 2)), IndexError, r"edges must be pairs \(src, dst\).*, got \[\[-1, 2\]\]"),
    (lambda: trace.mute((0, 1, 2)), ValueError, r"edges must be pairs \(src, dst\).*, got \(0, 1, 2\)"),
    (lambda: trace.mute([(0.0, 2.0)]), TypeError, r"edges must be pairs .*, got \[\(0\.0, 2\.0\)\]"),
    (lambda: trace.cut((0, 1), heads=[0, "x"]), TypeError, "each entry of heads must be an integer, got 'x'"),
    (lambda: trace.cut((0, 1), layers=[0, 3]), IndexError, "layers must be in 0 .. 2, the attention layers"),
    (lambda: trace.mute((0, 1), heads=3), IndexError, r"heads must be in 0 .. 2, got 3"),
    (lambda: trace.cut((3, 1)), ValueError, NO_EDGE.format(1, "cut")),
    (lambda: trace.cut(patterns.causal(8)), ValueError, "graphs joined by & must have the same tokens"),
    (lambda: trace.mute((0, 1), factor="2"), TypeError, "factor must be a number, got"),
    (lambda: trace.patch(new_model(), (0, 1)), TypeError, "run must be a result of trace.record, got"),
    (lambda: patch_from(7, (0, 1), layers=3), IndexError, r"must be among \[0, 1, 2\], those of the run"),
    (lambda: patch_from(7, copies=3), ValueError, r"\[3, 3, 7, 4\] in the run and \[2, 3, 7, 4\] here"),
    (lambda: "cut", TypeError, "interventions must be an? Intervention, got "),
]


def test_the_old_names_warn() -> None:
    model, mute = new_model(), trace.mute((0, 1))
    with pytest.warns(DeprecationWarning, match="called trace.intervene"), trace.operate(model, mute):
        changed = model(TOKENS)
    with pytest.warns(DeprecationWarning, match="called interventions=") as warnings:
        assert_exact(trace.record(model, TOKENS, surgery=mute).output, changed)
    assert warnings[0].filename == __file__


@pytest.mark.parametrize(("intervention", "error", "match"), WRONG_INTERVENTIONS)
def test_wrong_interventions_are_refused_before_anything_changes(
    intervention: Any, error: Any, match: str
) -> None:
    model = new_model()
    with pytest.raises(error, match=match), trace.intervene(model, intervention()):
        model(TOKENS)
    assert model.backend == "auto"
    assert not any(layer._forward_pre_hooks for layer in model.layers)
