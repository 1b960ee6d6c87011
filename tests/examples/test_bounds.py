"""The bound on influence equals a derivative if no term is overestimated, and is never below one."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

import gnn_attention as ga
from benchmarks import influence_bound as bench
from examples.bounds import influence_bound
from gnn_attention import model as lm
from gnn_attention import patterns

TOKENS = torch.tensor([[0, 1]])


def make_model(name, **sizes):
    """Return a small model of transformers in float64."""
    return needs("support.hf_models").build64(name, "gnn_attention", **sizes).requires_grad_(False)


def scalar_model(**weights):
    """Return a model of width 1 without norms and MLP, in which every derivative is one number."""
    model = lm.LanguageModel(lm.Config(2, 1, 1, 1, 1, 1)).double().requires_grad_(False)
    for block in model.blocks:
        block.attention_norm, block.mlp_norm = torch.nn.Identity(), torch.nn.Identity()
        for parameter in block.mlp.parameters():
            parameter.zero_()
        for name, weight in weights.items():
            getattr(block.attention.heads, name).fill_(weight)
    model.embedding.weight.copy_(torch.tensor([[1.5], [0.5]]))
    return model


def test_bound_of_one_number_is_its_derivative():
    """The bound of 0 -> 1, whose terms are positive, is the derivative; at token 1 absolute values add up."""
    a, b, query, key, value, out = 1.5, 0.5, 0.7, 1.1, 0.9, 1.3
    bound = influence_bound(scalar_model(W_Q=query, W_K=key, W_V=value, W_O=out), TOKENS)
    w = torch.tensor([b * query * key * a, b * query * key * b], dtype=torch.float64).softmax(0)
    z = float(w[0]) * value * a + float(w[1]) * value * b
    edge = w[0] * (value * out + b * query * key * (value * a - z) * out)
    of_query = query * sum(w[i] * key * x * (value * x - z) for i, x in enumerate((a, b))) * out
    loop = w[1] * (value * out + b * query * key * abs(value * b - z) * out)
    expected = torch.tensor([[1 + value * out, 0.0], [edge, 1 + loop + of_query]], dtype=torch.float64)
    assert_exact(bound, expected)


def random_model():
    torch.manual_seed(0)
    model = lm.LanguageModel(lm.Config(20, 16, 3, 2, 4, 24)).double().requires_grad_(False)
    for block in model.blocks:
        block.attention.heads.W_Q.mul_(4)
    model.embedding.weight.mul_(0.01)
    return model, torch.arange(12).view(1, 12)


@pytest.mark.parametrize("graph", [patterns.window(12, 3) | patterns.sinks(12, 1), patterns.no_self(12)])
def test_bound_holds_where_walks_lead_and_is_zero_elsewhere(graph):
    """The bound holds in a random model of three layers with large logits and states that norms enlarge."""
    model, tokens = random_model()
    bound, norms = influence_bound(model, tokens, graph), bench.exact_norms(model, tokens, graph)
    adjacency = (graph | patterns.self_loops(12)).mask().double()
    assert torch.equal(bound > 0, adjacency @ adjacency @ adjacency > 0)
    assert bool((norms <= bound).all())
    assert bool((norms > 0).eq(bound > 0).all())


@pytest.mark.parametrize(
    ("name", "stack", "sizes"),
    [("llama", "model.layers", {"num_hidden_layers": 3}), ("gpt2", "transformer.h", {"n_layer": 3})],
    ids=["llama", "gpt2"],
)
def test_bound_of_transformers_over_a_graph(name, stack, sizes):
    """The bound holds for grouped heads with rotary positions (Llama), LayerNorm and biases (GPT-2)."""
    model, ids = make_model(name, **sizes), torch.arange(9).view(1, 9)
    first, last = model.get_submodule(stack)[0], model.get_submodule(stack)[-1]
    states = []
    with ga.use_graph(model, patterns.window(9, 3)):
        bound = influence_bound(model, ids)
        with first.register_forward_pre_hook(lambda *args: states.append(args[1][0])):
            model(ids, use_cache=False)
        x = states[0].repeat(16, 1, 1).requires_grad_()
        input_hook = first.register_forward_pre_hook(lambda module, args: (x, *args[1:]))
        output_hook = last.register_forward_hook(lambda *args: states.append(args[2]))
        with input_hook, output_hook:
            model(ids.expand(16, 9), use_cache=False)
    out = states[1] if isinstance(states[1], torch.Tensor) else states[1][0]
    rows = [torch.autograd.grad(row.diagonal().sum(), x, retain_graph=True)[0] for row in out.unbind(1)]
    norms = torch.stack([torch.linalg.matrix_norm(row.transpose(0, 1), 2) for row in rows])
    assert bool((norms <= bound).all())
    assert torch.equal(bound > 0, norms > 0)


def test_what_has_no_such_blocks_is_refused():
    """Norms of queries, other modules, several sequences and padding are refused."""
    ids = torch.arange(6).view(1, 6)
    with pytest.raises(NotImplementedError, match="influence_bound"):
        influence_bound(make_model("qwen3"), ids)
    layer = lm.Block(lm.Config(4, 4, 1, 1, 4, 4)).attention
    with pytest.raises(NotImplementedError, match="blocks unlike those of Llama"):
        influence_bound(layer, torch.zeros(3, 4), patterns.causal(3))
    with pytest.raises(ValueError, match="one sequence"):
        influence_bound(make_model("llama"), ids.repeat(2, 1))
    with pytest.raises(ValueError, match="without padding on its left"):
        influence_bound(make_model("llama"), ids, attention_mask=(ids > 1).long())
