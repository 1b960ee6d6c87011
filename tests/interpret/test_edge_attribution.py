"""Compare effects of edges with models in which edges are cut, and test the pruned graphs."""

import itertools

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import convert, patterns, trace
from gnn_attention.interpret.trace import edge_attribution

needs("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import gnn_attention.huggingface  # noqa: E402

TOKENS, LAYERS, HEADS = 6, 2, 4
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


@pytest.fixture(scope="module")
def llama():
    """A Llama in float64 with grouped heads, none of whose parameters is trained."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "initializer_range": 0.06}
    heads |= {"bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, attn_implementation="gnn_attention")
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def last_loss(logits):
    """Return the loss of one token, a scalar."""
    return functional.cross_entropy(logits[0, -1:], IDS[0, :1])


def token_losses(logits):
    """Return the loss of each token, a vector."""
    return functional.cross_entropy(logits[0, :-1], IDS[0, 1:], reduction="none")


def metric_along(model, tables, metric=last_loss):
    """Return the metric of a model with the graph ``[heads, dst, src]`` of each layer."""
    graphs = [convert.from_mask(table) for table in tables]
    with torch.no_grad(), ga.use_graph(model, lambda layer, head, length: graphs[layer]):
        return metric(model(IDS, use_cache=False).logits)


def full_tables():
    """Return all edges of all heads."""
    return torch.ones(LAYERS, HEADS, TOKENS, TOKENS, dtype=torch.bool).tril()


def gated_metric(model, gates, metric=last_loss, renormalised=True):
    """Run dense attention whose weights are multiplied by gates ``[layers, heads, T, T]``."""
    from gnn_attention.backends import Backend
    from gnn_attention.huggingface import attending

    def backend(module):
        def run(call):
            k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (call.k, call.v))
            logits = (call.q @ k.mT * call.scale).masked_fill(~call.graph.mask(), -torch.inf)
            gate = gates[module.layer_idx]
            w = logits.softmax(-1) * gate
            w = w / w.sum(-1, keepdim=True).clamp(min=1e-300) if renormalised else w
            return w @ v, None

        return Backend("gated", run)

    with attending(backend):
        return metric(model(IDS, use_cache=False).logits)


def values_at_edges(a, table, layer):
    """Return ``table [layers, heads, dst, src]`` in the order of the scores."""
    src, dst = a.edge_index(layer)
    return table[layer][:, dst, src]


@pytest.mark.parametrize(("without", "renormalised"), [("slope", True), ("mute", False)])
def test_slopes_and_mutes_are_derivatives_by_the_gates_of_edges(llama, without, renormalised):
    """A mute is linear in the output, so its first order is the derivative by the gate, times -1."""
    gates = full_tables().double().requires_grad_()
    value = gated_metric(llama, gates, renormalised=renormalised)
    (gradient,) = torch.autograd.grad(value, gates)
    a = trace.attribute(llama, IDS, last_loss)
    for layer in range(LAYERS):
        expected = -values_at_edges(a, gradient, layer)
        assert (a.scores(layer, without) - expected).abs().max() <= 1e-12


def test_cuts_in_the_last_layer_of_a_linear_readout_are_exact(llama):
    """The first order is exact, because the metric is linear in the outputs of the last heads."""
    outputs = []
    hook = llama.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: outputs.append(inputs[0])
    )
    a = trace.attribute(llama, IDS, last_loss)
    last_loss(llama(IDS, use_cache=False).logits)
    o = outputs[-1].detach().requires_grad_()
    patch = llama.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: (o,))
    (g,) = torch.autograd.grad(last_loss(llama(IDS, use_cache=False).logits), o)
    patch.remove()
    src, dst = a.edge_index(1)
    for head, edge in itertools.product(range(HEADS), range(len(src))):
        tables = full_tables()
        tables[1, head, dst[edge], src[edge]] = False
        metric_along(llama, tables)
        expected = ((outputs[-1] - o) * g).sum()
        assert abs(a.scores(1)[head, edge] - expected) <= 1e-12, (head, edge)
    hook.remove()


def test_absent_edges_have_the_effect_of_not_adding_them(llama):
    """The effect is a derivative at the graph without them; other edges keep the effect of a cut."""
    small = patterns.window(TOKENS, 3)
    a = trace.attribute(llama, IDS, last_loss)
    with ga.use_graph(llama, small):
        b = trace.attribute(llama, IDS, last_loss, edges=patterns.causal(TOKENS))
        own_edges = trace.attribute(llama, IDS, last_loss)
    gates = small.mask().double().expand(LAYERS, HEADS, -1, -1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gated_metric(llama, gates), gates)
    for layer in range(LAYERS):
        assert torch.equal(b.edge_index(layer), a.edge_index(layer))
        expected = -values_at_edges(a, gradient, layer)
        assert (b.scores(layer, "slope") - expected).abs().max() <= 1e-12
    src, dst = b.edge_index(0)
    is_in_small = small.mask()[dst, src]
    assert (own_edges.scores(0) - b.scores(0)[:, is_in_small]).abs().max() <= 1e-12


def test_parts_of_a_vector_add_up_as_squares(llama):
    """A standard error is at most sqrt(2 / projections) of the mean of squares; 5 are allowed."""
    count = 100
    parts = [
        trace.attribute(llama, IDS, lambda logits, i=i: token_losses(logits)[i]) for i in range(TOKENS - 1)
    ]
    a = trace.attribute(llama, IDS, token_losses, projections=count, seed=1)
    for layer in range(LAYERS):
        expected = sum(attribution.scores(layer) ** 2 for attribution in parts)
        assert ((a.scores(layer) ** 2 - expected).abs() <= 5 * (2 / count) ** 0.5 * expected + 1e-24).all()


def test_slopes_of_the_small_model_of_our_own():
    """The slopes of a receiver's edges add up to 0 in a model with a score_mod, too."""
    model = ga.model.load_trained()[0].double()
    a = trace.attribute(model, IDS, last_loss)
    assert a.layers == [0, 1]
    for layer in a.layers:
        by_row = torch.zeros(len(a.scores(layer)), TOKENS, dtype=torch.float64)
        by_row.index_add_(1, a.edge_index(layer)[1], a.scores(layer, "slope"))
        assert by_row.abs().max() <= 1e-12 < a.scores(layer, "slope").abs().max()
    assert all(p.grad is None for p in model.parameters())


def test_keep_takes_the_largest(llama):
    """``keep`` takes a count or a share, keeps what must stay, and the model runs along its graph."""
    a = trace.attribute(llama, IDS, lambda logits: token_losses(logits).sum())
    sizes = torch.stack([a.scores(layer, "slope").abs() for layer in a.layers])
    pruned_graphs = a.keep(40, at_least=0, sinks=0)
    assert pruned_graphs.count == 40
    tables = torch.stack([pruned_graphs(layer, 0, TOKENS).mask() for layer in a.layers])
    src, dst = a.edge_index(0)
    is_kept = tables[:, :, dst, src]
    assert sizes[is_kept].min() >= sizes[~is_kept].max()
    with ga.use_graph(llama, pruned_graphs), torch.no_grad():
        loss = last_loss(llama(IDS, use_cache=False).logits)
    # The two sum at most 6 terms in different orders.
    assert abs(loss - gated_metric(llama, tables.double())) <= 1e-12
    smallest = a.keep(0, at_least=2, sinks=1)
    for layer in a.layers:
        table = smallest(layer, 0, TOKENS).mask()
        assert table[..., 0].all()
        assert (table.sum(-1) == torch.tensor([1, 2, 2, 2, 2, 2])).all()
    assert a.keep(1.0).share == 1.0


def test_top_is_over_all_layers_and_heads(llama):
    """``top`` returns the largest absolute effects."""
    a = trace.attribute(llama, IDS, last_loss)
    all_scores = torch.cat([a.scores(layer).flatten() for layer in a.layers])
    expected = all_scores[all_scores.abs().argsort(descending=True)[:7]]
    assert [effect.change for effect in a.top(7)] == expected.tolist()


def test_wrong_arguments_are_named(llama):
    """Each error is one sentence."""
    with pytest.raises(TypeError, match=r"differentiable scalar or vector, .* and shape \[1, 6, 16\]"):
        trace.attribute(llama, IDS, lambda logits: logits)
    with pytest.raises(ValueError, match="must hold a MessagePassingAttention, got Linear"):
        trace.attribute(torch.nn.Linear(2, 2), IDS, last_loss)
    with (
        ga.trace.intervene(llama, trace.mute((0, 1))),
        pytest.raises(ValueError, match="of some edges are changed"),
    ):
        trace.attribute(llama, IDS, last_loss)
    with pytest.raises(ValueError, match="edges must be one graph over the tokens"):
        trace.attribute(llama, IDS, last_loss, edges=patterns.causal(5))
    a = trace.attribute(llama, IDS, last_loss)
    with pytest.raises(ValueError, match=r"amount must be a fraction \(0.0 .. 1.0\) .* got 1.5"):
        a.keep(1.5)
    with pytest.raises(ValueError, match=r"layer must be one of \[0, 1\], got 2"):
        a.scores(2)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_effects_do_not_depend_on_the_receivers_at_once(llama, order, monkeypatch):
    """They are the same for four receivers at a time and all at once, with edges in any order."""
    edge_index = patterns.full(TOKENS).edge_index
    edges = convert.from_edge_index(edge_index[:, list(range(edge_index.shape[1]))[order]], TOKENS, TOKENS)
    attribution = trace.attribute(llama, IDS, token_losses, edges)
    monkeypatch.setattr(edge_attribution, "RECEIVERS_PER_CHUNK", 4)
    small_chunks = trace.attribute(llama, IDS, token_losses, edges)
    for layer in range(LAYERS):
        assert_exact(small_chunks.scores(layer), attribution.scores(layer))
