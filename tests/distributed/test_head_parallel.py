"""Heads on several ranks compute what one process computes, and checkpoints load at any world size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.refusals import assert_refusals
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gnn_attention as ga
from gnn_attention import distributed, patterns, score_mods
from gnn_attention.cache import KeyValueCache
from gnn_attention.distributed.head_parallel import HeadwiseParallel, shard_heads
from gnn_attention.model import Config, LanguageModel
from gnn_attention.rotary import Rotary

TOKENS, WIDTH = 9, 8
PLAIN = patterns.window(TOKENS, 4) - patterns.window(TOKENS, 1)
BY_HEAD = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= h), TOKENS, heads=4, name="reach h"
)
BY_HALF = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (h < 2), TOKENS, heads=4)
SIZES = Config(vocabulary_size=40, width=16, num_heads=4, head_dim=4, mlp_width=32, reach=3)


def standard(**options: Any) -> ga.StandardHeads:
    heads = ga.StandardHeads(WIDTH, 4, head_dim=6, value_dim=3, **options)
    # Biases and norms would otherwise be 0 and 1.
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    return heads


def latent() -> ga.LatentHeads:
    return ga.LatentHeads(WIDTH, 4, content_dim=3, rotary_dim=2, latent_dim=5, query_dim=6, bias=True)


def layer(heads: nn.Module, *arguments: Any, **options: Any) -> ga.MessagePassingAttention:
    return ga.MessagePassingAttention(heads, *arguments, **{"backend": "auto", **options})


def biased_layer(*arguments: Any, kv: int = 4, **options: Any) -> ga.MessagePassingAttention:
    return layer(standard(bias=True, num_kv_heads=kv), *arguments, **options)


def relative_bias() -> score_mods.RelativeBias:
    mod = score_mods.RelativeBias(4, 2)
    nn.init.normal_(mod.table)
    return mod


def softcap_and_bias() -> score_mods.chain:
    return score_mods.chain(score_mods.softcap(2.0), relative_bias())


ALIBI = score_mods.alibi(score_mods.alibi_slopes(4))
LAYERS: dict[str, tuple[Callable[[], ga.MessagePassingAttention], ga.TokenGraph]] = {
    "standard": (biased_layer, PLAIN),
    "standard, message passing": (lambda: biased_layer(backend="message_passing"), PLAIN),
    "2 groups": (lambda: biased_layer(kv=2), PLAIN),
    "norms and rotary": (lambda: layer(standard(num_kv_heads=2, qk_norm=True, rotary=Rotary())), PLAIN),
    "factored": (lambda: layer(ga.FactoredHeads.of(standard(bias=True, num_kv_heads=2))), PLAIN),
    "factored, senders": (lambda: layer(ga.FactoredHeads.of(standard(bias=True), side="sender")), PLAIN),
    "merged": (lambda: layer(ga.MergedHeads.of(standard(bias=True))), PLAIN),
    "latent": (lambda: layer(latent()), PLAIN),
    "chain": (lambda: layer(standard(), softcap_and_bias()), PLAIN),
    "graphs by head": (lambda: layer(standard(num_kv_heads=2), relative_bias()), BY_HEAD),
    "learned bias, isolated heads": (lambda: layer(standard(), relative_bias(), backend="tiles"), BY_HALF),
    "dropout, graphs by head": (lambda: layer(standard(), ALIBI, dropout=0.4), BY_HEAD),
}


def run_layer(
    layer: ga.MessagePassingAttention, graph: ga.TokenGraph, bias_heads: int | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return output, weights, and gradients of inputs and parameters; each call draws the same numbers."""
    torch.manual_seed(3)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    has_list = graph.heads is None
    bias = torch.randn(bias_heads, graph.num_edges, requires_grad=True) if has_list and bias_heads else None
    y = layer(x, graph, bias, return_attention_weights=True) if has_list else layer(x, graph)
    outputs = [y[0], y[1][1]] if has_list else [y]
    loss = sum((out * torch.randn(out.shape)).sum() for out in outputs)
    loss.backward()  # type: ignore[union-attr]
    input_grads = [x.grad] if bias is None else [x.grad, bias.grad]
    return [out.detach() for out in (*outputs, *input_grads)], {
        name: full_tensor(parameter.grad) for name, parameter in layer.named_parameters()
    }


def full_tensor(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_pair(name: str) -> tuple[ga.MessagePassingAttention, ga.MessagePassingAttention]:
    """Return the same layer twice."""
    layers = []
    for _ in range(2):
        torch.manual_seed(5)
        layers.append(LAYERS[name][0]())
    return layers[0], layers[1]


def compare_layers(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """Return the error of each case as a share of the allowed error."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    mesh, errors = init_device_mesh("cpu", (world_size,)), {}
    for number, name in enumerate(names):
        single, sharded = build_pair(name)
        shard_heads(sharded, mesh)
        bias_heads = (None, 4, 1)[number % 3]
        expected, result = (run_layer(module, LAYERS[name][1], bias_heads) for module in (single, sharded))
        assert expected[1].keys() == result[1].keys()
        outputs = ranks.share(result[0], expected[0])
        errors[name] = max(outputs, ranks.share([*result[1].values()], [*expected[1].values()]))
    return errors


@pytest.mark.slow
def test_layers_are_those_of_one_process() -> None:
    for errors in ranks.run(2, compare_layers, list(LAYERS)):
        assert not {name: error for name, error in errors.items() if not error <= 1}


def run_tokens(
    layer: ga.MessagePassingAttention, graph: ga.TokenGraph, tokens: DeviceMesh | None
) -> list[torch.Tensor]:
    """Return the output and all gradients; each rank of the mesh ``tokens`` computes its own tokens."""
    torch.manual_seed(3)
    x, weights = torch.randn(2, TOKENS, WIDTH, requires_grad=True), torch.randn(2, TOKENS, WIDTH)
    local_inputs = [x, weights]
    if tokens is not None:
        local_inputs = [distributed.scatter(a, graph.partition, group=tokens) for a in local_inputs]
    y = layer(local_inputs[0], graph)
    (y * local_inputs[1]).sum().backward()
    gradients = [x.grad, *(full_tensor(parameter.grad) for parameter in layer.parameters())]
    if tokens is not None:
        y = distributed.gather(y, graph.partition, group=tokens)
        for gradient in gradients:
            torch.distributed.all_reduce(gradient, group=tokens.get_group())
    return [y.detach(), *gradients]


def compare_with_tokens(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """Return the errors of layers whose tokens are on 2 ranks and whose heads on world_size / 2."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    mesh, errors = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("tokens", "heads")), {}
    for name in names:
        (single, sharded), graph = build_pair(name), LAYERS[name][1]
        shard_heads(sharded, mesh["heads"])
        local_graph = distributed.local(graph, "zigzag", mesh["tokens"])
        expected, result = run_tokens(single, graph, None), run_tokens(sharded, local_graph, mesh["tokens"])
        errors[name] = max(ranks.share(result[:1], expected[:1]), ranks.share(result[1:], expected[1:]))
    return errors


HYBRID_LAYERS = ["norms and rotary", "learned bias, isolated heads", "dropout, graphs by head"]


@pytest.mark.slow
def test_tokens_and_heads_together_are_one_process() -> None:
    for errors in ranks.run(4, compare_with_tokens, HYBRID_LAYERS):
        assert not {name: error for name, error in errors.items() if not error <= 1}


def compare_models(rank: int, world_size: int) -> tuple[float, dict[str, list[int]]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    single, sharded = LanguageModel(SIZES), LanguageModel(SIZES)
    for block in single.layers:
        nn.init.normal_(block.score_mod.table)
    sharded.load_state_dict(single.state_dict())
    mesh = init_device_mesh("cpu", (world_size,))
    shard_heads(sharded, mesh)
    mlp_styles = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
    parallelize_module(sharded, mesh, mlp_styles)
    tokens, graph = torch.randint(40, (2, TOKENS)), patterns.window(TOKENS, 4)
    for model in (single, sharded):
        torch.manual_seed(2)
        logits = model(tokens, graph)
        (logits * torch.randn(logits.shape)).sum().backward()
    cache = KeyValueCache(graph, SIZES.num_layers)
    decoder_logits = torch.cat([sharded.proceed(part, cache) for part in tokens.split(4, dim=1)], dim=1)
    expected, result = single(tokens, graph), sharded(tokens, graph)
    pairs = [(expected, result), (expected, decoder_logits)]
    pairs += zip(single.listen(tokens, graph), sharded.listen(tokens, graph), strict=True)
    gradients = [[full_tensor(p.grad) for p in model.parameters()] for model in (sharded, single)]
    dtensors = {name: part for name, part in sharded.named_parameters() if isinstance(part, DTensor)}
    outputs = max(ranks.share([result.detach()], [expected.detach()]) for expected, result in pairs)
    sizes = {name: list(part.to_local().shape) for name, part in dtensors.items()}
    return max(outputs, ranks.share(*gradients)), sizes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_is_that_of_one_process_and_each_rank_has_its_part(world_size: int) -> None:
    for largest_error, sizes in ranks.run(world_size, compare_models):
        assert largest_error <= 1
        assert sizes["blocks.1.attention.heads.W_K"] == [4 // world_size, 16, 4]
        assert sizes["blocks.0.mlp.0.weight"] == [32 // world_size, 16]
        assert sizes["blocks.0.mlp.2.weight"] == [16, 32 // world_size]


def save_or_load(rank: int, world_size: int, folder: str, action: str) -> dict[str, torch.Tensor]:
    """Save a model, or load the saved state into another model, and return its whole state."""
    torch.manual_seed(1 if action == "save" else 2)
    model = LanguageModel(SIZES)
    shard_heads(model, init_device_mesh("cpu", (world_size,)))
    state = get_model_state_dict(model)
    if action == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
    return {name: full_tensor(part).clone() for name, part in model.state_dict().items()}


@pytest.mark.slow
def test_checkpoints_load_at_another_world_size_and_in_one_process(tmp_path: Path) -> None:
    state = ranks.run(2, save_or_load, str(tmp_path), "save")[0]
    for loaded_state in ranks.run(4, save_or_load, str(tmp_path), "load"):
        assert state.keys() == loaded_state.keys()
        assert all(torch.equal(part, loaded_state[name]) for name, part in state.items())
    local_state = LanguageModel(SIZES).state_dict()
    with warnings.catch_warnings():
        # torch warns that there is no process group.
        warnings.simplefilter("ignore")
        dcp.load(local_state, checkpoint_id=str(tmp_path))
    assert all(torch.equal(part, local_state[name]) for name, part in state.items())


def check_refusals(rank: int, world_size: int) -> list[int]:
    mesh, x = init_device_mesh("cpu", (world_size,)), torch.zeros(1, TOKENS, 8)
    mesh_2d = init_device_mesh("cpu", (world_size, 1))
    sharded, linear, odd = layer(ga.StandardHeads(8, 4)), nn.Linear(2, 2), layer(ga.StandardHeads(9, 3))
    gqa, arrays = ga.StandardHeads(12, 12, num_kv_heads=3), torch.randn(3, 4, 8, 2)
    concat = ga.StandardHeads.from_arrays(*arrays)
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, TOKENS, heads=3)
    shard_heads(sharded, mesh)
    style = HeadwiseParallel()
    assert_refusals(
        [
            (lambda: shard_heads(linear, mesh), ValueError, "model must have a MessagePassingAttention"),
            (lambda: shard_heads(odd, mesh), ValueError, "must be a multiple of the 2 ranks, got 3"),
            (lambda: shard_heads(layer(gqa), mesh), ValueError, "num_kv_heads must be a multiple .*, got 3"),
            (lambda: shard_heads(layer(concat), mesh), ValueError, "heads without W_O are concatenated"),
            (lambda: shard_heads(layer(odd.heads), mesh_2d), ValueError, "mesh must have one axis, got 2"),
            (lambda: shard_heads(sharded, mesh), ValueError, "sharded already"),
            (lambda: parallelize_module(linear, mesh, style), TypeError, "Attention, got Linear"),
            (lambda: sharded(x, graph), ValueError, "must have the layer's 4 heads or none, got"),
            (sharded.reset_parameters, NotImplementedError, "cannot draw parameters"),
        ]
    )
    # After the errors, a valid call still runs.
    return list(sharded(x, PLAIN).shape)


@pytest.mark.slow
def test_wrong_calls_raise_on_every_rank() -> None:
    assert ranks.run(2, check_refusals) == [[1, TOKENS, 8]] * 2
