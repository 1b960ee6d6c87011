"""Layers and models that run on each rank's tokens have the outputs and gradients of one process."""

import copy
import re

import pytest
import torch
from support import ranks
from support.refusals import assert_refusals

import gnn_attention as ga
from gnn_attention import distributed, patterns
from gnn_attention.distributed import partition as partitions

SIZES = ga.model.Config(40, width=16, num_heads=2, head_dim=8, mlp_width=16)


def compare_models(rank, world):
    """Return the largest share of the allowed error, in a model and in a layer with rotary heads."""
    torch.manual_seed(0)
    graph = patterns.window(19, 6) | patterns.sinks(19, 2)
    local_graph = distributed.local(graph, "zigzag")
    model = ga.model.LanguageModel(SIZES).double()
    heads = ga.StandardHeads(16, 4, num_kv_heads=2, rotary=ga.rotary.Rotary()).double()
    layer = ga.MessagePassingAttention(heads, backend="auto")
    tokens, x = torch.randint(40, (2, 19)), torch.randn(2, 19, 16, dtype=torch.float64)

    def compute_gradients(output, module):
        module.zero_grad()
        (output * torch.linspace(1, 2, 19, dtype=torch.float64).view(-1, 1)[rows]).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    rows = slice(None)
    single_runs = [(model(tokens, graph), model), (layer(x, graph), layer)]
    expected = [(output.detach(), compute_gradients(output, module)) for output, module in single_runs]
    rows = local_graph.partition.dst.tokens(rank)
    local_runs = [(model(tokens[:, rows], local_graph), model), (layer(x[:, rows], local_graph), layer)]
    errors = []
    for (output, module), (full, full_grads) in zip(local_runs, expected, strict=True):
        grads = compute_gradients(output, module)
        for gradient in grads:
            torch.distributed.all_reduce(gradient)
        errors += [ranks.share([output.detach()], [full[:, rows]], [full]), ranks.share(grads, full_grads)]
    return max(errors)


@pytest.mark.slow
def test_models_and_layers_run_on_ranks():
    """They take ``local(graph)`` for the graph; gradients summed over ranks are those of one process."""
    assert max(ranks.run(3, compare_models)) <= 1


def compare_ddp(rank, world):
    """Compare gradients under DDP, where a rank has no tokens or no edges, with those of one process."""
    torch.manual_seed(0)
    errors, model = [], ga.model.LanguageModel(SIZES).double()
    single = copy.deepcopy(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for graph in (patterns.causal(2), patterns.documents([3, 1, 1]), patterns.causal(5) - patterns.causal(5)):
        tokens, local_graph = torch.randint(40, (2, graph.num_dst)), distributed.local(graph)
        local_inputs = distributed.scatter(tokens, local_graph.partition, -1)
        for module, graphs, x in ((single, graph, tokens), (parallel, local_graph, local_inputs)):
            module.zero_grad()
            module(x, graphs).square().sum().backward()
        result = [parameter.grad * world for parameter in model.parameters()]
        expected = [torch.zeros_like(w) if w.grad is None else w.grad for w in single.parameters()]
        errors.append(ranks.share(result, expected))
    return max(errors)


@pytest.mark.slow
def test_a_rank_without_edges_takes_part_in_ddp():
    """There, position biases have gradients of 0 and not None, because DDP waits for all gradients."""
    assert max(ranks.run(3, compare_ddp)) <= 1


def compare_compiled(rank, world):
    """Return the error of a compiled layer and of its gradient, and the message of fullgraph=True."""
    torch.manual_seed(0)
    x, outcomes = torch.randn(2, 19, 16, dtype=torch.float64), []
    layer = ga.MessagePassingAttention(ga.StandardHeads(16, 4), backend="auto").double()
    for function in (layer, torch.compile(layer, backend="eager")):
        local_graph = distributed.local(patterns.window(19, 6))
        local_inputs = distributed.scatter(x, local_graph.partition)
        leaf = local_inputs.clone().requires_grad_()
        out = function(leaf, local_graph)
        out.square().sum().backward()
        outcomes.append((out.detach(), leaf.grad))
    torch.compiler.reset()
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(local_inputs, local_graph)
    except Exception as error:
        refusal = str(error)
    return max(ranks.share([result], [expected]) for expected, result in zip(*outcomes, strict=True)), refusal


@pytest.mark.slow
def test_a_layer_is_compiled_around_its_attention():
    """torch.compile breaks its graph at the attention, which fullgraph=True refuses."""
    for error, refusal in ranks.run(2, compare_compiled, deadline=120.0):
        assert error <= 1
        assert re.search("function run .* was wrapped with `torch.compiler.disable`", refusal)


def check_gather(rank, world):
    """Return whether gather undoes scatter, and the values of the gradient of gather."""
    x = torch.arange(22.0).view(1, 11, 2).bfloat16()
    partition = partitions.zigzag(patterns.causal(11), world)
    local_rows = distributed.scatter(x, partition).requires_grad_()
    full = distributed.gather(local_rows, partition)
    (full * (1.0, 2**-8, 2**-8)[rank]).sum().backward()
    vector = distributed.scatter(x[0, :, 0], partition, axis=0)
    flat = distributed.gather(vector, partition, axis=0)
    return torch.equal(full, x) and torch.equal(flat, x[0, :, 0]), local_rows.grad.unique().tolist()


@pytest.mark.slow
def test_gather_undoes_scatter():
    """The gradient sums 1 + 2^-8 + 2^-8 of three ranks in float32, as 1 + 2^-8 is 1 in bfloat16."""
    assert ranks.run(3, check_gather) == [(True, [1 + 2**-7])] * 3


def check_refusals(rank, world):
    """Assert the errors of a rank's part of a graph, and return its repr."""
    graph, x, y = patterns.causal(6), torch.ones(1, 1, 3, 4), torch.zeros(6, 2)
    local, bias = distributed.local(graph), torch.zeros(1)
    partition = local.partition
    layer = ga.MessagePassingAttention(ga.StandardHeads(4, 1), backend="message_passing")
    path_error, whole_error = "the message-passing path need", "graph must be the TokenGraph of all tokens"
    bias_error, group_error = "a per-edge bias, .* need one process", "or a DeviceMesh, got .to"
    assert_refusals(
        [
            (lambda: layer(torch.zeros(1, 3, 4), local), NotImplementedError, path_error),
            (lambda: local | local, NotImplementedError, "change the whole graph and call distributed.local"),
            (lambda: ga.attend(x, x, x, local, bias=bias), NotImplementedError, bias_error),
            (lambda: distributed.local(local), TypeError, whole_error),
            (lambda: distributed.scatter(y[:5], partition), ValueError, "x must have 6 tokens on axis -2"),
            (lambda: distributed.gather(y[:5], partition), ValueError, "rank 0: .* have the rank's 3 tokens"),
            (lambda: distributed.scatter([0.0], partition), TypeError, "x must be a Tensor, got .* list"),
            (lambda: distributed.scatter(y, partition, axis=7), IndexError, r"axis must be in -2 .. 1"),
            (lambda: distributed.scatter(y, partition, side="left"), ValueError, "side must be one of"),
            (lambda: distributed.local(graph, group="tokens"), TypeError, group_error),
        ]
    )
    return repr(local)


@pytest.mark.slow
def test_a_rank_graph_raises_what_it_does_not_support():
    names = [f"RankGraph(causal(6): rank {rank} of 2, 3 local src -> 3 local dst)" for rank in range(2)]
    assert ranks.run(2, check_refusals) == names
