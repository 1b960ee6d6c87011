"""Layers and models on the tokens of a rank: outputs and gradients of one process."""

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


def models(rank, world):
    """Return outputs and gradients of a model, and of a layer with rotary heads and grouped keys."""
    torch.manual_seed(0)
    graph = patterns.window(19, 6) | patterns.sinks(19, 2)
    mine = distributed.local(graph, "zigzag")
    model = ga.model.LanguageModel(SIZES).double()
    heads = ga.StandardHeads(16, 4, num_kv_heads=2, rotary=ga.rotary.Rotary()).double()
    layer = ga.MessagePassingAttention(heads, backend="auto")
    tokens, x = torch.randint(40, (2, 19)), torch.randn(2, 19, 16, dtype=torch.float64)

    def gradients(output, of):
        of.zero_grad()
        (output * torch.linspace(1, 2, 19, dtype=torch.float64).view(-1, 1)[at]).sum().backward()
        return [parameter.grad.clone() for parameter in of.parameters()]

    at = slice(None)
    wholes = [(model(tokens, graph), model), (layer(x, graph), layer)]
    want = [(output.detach(), gradients(output, of)) for output, of in wholes]
    at = mine.partition.dst.tokens(rank)
    parts = [(model(tokens[:, at], mine), model), (layer(x[:, at], mine), layer)]
    errors = []
    for (output, of), (whole, grads) in zip(parts, want, strict=True):
        found = gradients(output, of)
        for gradient in found:
            torch.distributed.all_reduce(gradient)
        errors += [ranks.share([output.detach()], [whole[:, at]], [whole]), ranks.share(found, grads)]
    return max(errors)


@pytest.mark.slow
def test_models_and_layers_run_on_ranks():
    """With ``local(graph)`` in the graph's place; gradients are summed over ranks."""
    assert max(ranks.run(3, models)) <= 1


def idle(rank, world):
    """Gradients under DDP where a rank has no tokens, or no edges, against those of one process."""
    torch.manual_seed(0)
    errors, model = [], ga.model.LanguageModel(SIZES).double()
    single = copy.deepcopy(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for graph in (patterns.causal(2), patterns.documents([3, 1, 1]), patterns.causal(5) - patterns.causal(5)):
        tokens, mine = torch.randint(40, (2, graph.num_dst)), distributed.local(graph)
        local_inputs = distributed.scatter(tokens, mine.partition, -1)
        for module, graphs, x in ((single, graph, tokens), (parallel, mine, local_inputs)):
            module.zero_grad()
            module(x, graphs).square().sum().backward()
        result = [parameter.grad * world for parameter in model.parameters()]
        expected = [torch.zeros_like(w) if w.grad is None else w.grad for w in single.parameters()]
        errors.append(ranks.share(result, expected))
    return max(errors)


@pytest.mark.slow
def test_a_rank_without_edges_takes_part_in_ddp():
    """A learned table of distances has gradients of 0 there, not none: DDP waits for them."""
    assert max(ranks.run(3, idle)) <= 1


def compiled(rank, world):
    """The error of a compiled layer and of its gradient, and what fullgraph=True says."""
    torch.manual_seed(0)
    x, outcomes = torch.randn(2, 19, 16, dtype=torch.float64), []
    layer = ga.MessagePassingAttention(ga.StandardHeads(16, 4), backend="auto").double()
    for function in (layer, torch.compile(layer, backend="eager")):
        mine = distributed.local(patterns.window(19, 6))
        local_inputs = distributed.scatter(x, mine.partition)
        leaf = local_inputs.clone().requires_grad_()
        out = function(leaf, mine)
        out.square().sum().backward()
        outcomes.append((out.detach(), leaf.grad))
    torch.compiler.reset()
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(local_inputs, mine)
    except Exception as error:
        refusal = str(error)
    return max(ranks.share([result], [expected]) for expected, result in zip(*outcomes, strict=True)), refusal


@pytest.mark.slow
def test_a_layer_is_compiled_around_its_attention():
    """The graph has a break, which fullgraph=True refuses."""
    for error, refusal in ranks.run(2, compiled, deadline=120.0):
        assert error <= 1
        assert re.search("function run .* was wrapped with `torch.compiler.disable`", refusal)


def gathers(rank, world):
    """gather undoes scatter, and its gradient is the sum of all ranks', in float32 at least."""
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
    """1 + 2^-8 + 2^-8 of three ranks, where 1 + 2^-8 is 1 in bfloat16."""
    assert ranks.run(3, gathers) == [(True, [1 + 2**-7])] * 3


def views(rank, world):
    """What a rank's part of a graph does not support, and its repr."""
    graph, x, y = patterns.causal(6), torch.ones(1, 1, 3, 4), torch.zeros(6, 2)
    mine, bias = distributed.local(graph), torch.zeros(1)
    partition = mine.partition
    layer = ga.MessagePassingAttention(ga.StandardHeads(4, 1), backend="message_passing")
    path_error, whole_error = "the message-passing path need", "graph must be the TokenGraph of all tokens"
    bias_error, group_error = "a per-edge bias, .* need one process", "or a DeviceMesh, got .to"
    assert_refusals(
        [
            (lambda: layer(torch.zeros(1, 3, 4), mine), NotImplementedError, path_error),
            (lambda: mine | mine, NotImplementedError, "change the whole graph and call distributed.local"),
            (lambda: ga.attend(x, x, x, mine, bias=bias), NotImplementedError, bias_error),
            (lambda: distributed.local(mine), TypeError, whole_error),
            (lambda: distributed.scatter(y[:5], partition), ValueError, "x must have 6 tokens on axis -2"),
            (lambda: distributed.gather(y[:5], partition), ValueError, "rank 0: .* have the rank's 3 tokens"),
            (lambda: distributed.scatter([0.0], partition), TypeError, "x must be a Tensor, got .* list"),
            (lambda: distributed.scatter(y, partition, axis=7), IndexError, r"axis must be in -2 .. 1"),
            (lambda: distributed.scatter(y, partition, side="left"), ValueError, "side must be one of"),
            (lambda: distributed.local(graph, group="tokens"), TypeError, group_error),
        ]
    )
    return repr(mine)


@pytest.mark.slow
def test_a_rank_graph_raises_what_it_does_not_support():
    names = [f"RankGraph(causal(6): rank {rank} of 2, 3 local src -> 3 local dst)" for rank in range(2)]
    assert ranks.run(2, views) == names
