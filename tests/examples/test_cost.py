"""Published sizes are those of transformers' configurations, and ``examples.cost`` prints them."""

import json

import pytest
import torch
from support.extras import needs

from examples import cost as program
from examples.cost import MODELS
from gnn_attention import cost, patterns
from gnn_attention import model as lm

# A class of transformers is followed by width, layers, heads and key/value heads that are not its defaults.
PUBLISHED = {
    "gpt-2": ("GPT2Config", ""),
    "llama-3-8b": ("LlamaConfig", "4096 32 32 8"),
    "llama-3-70b": ("LlamaConfig", "8192 80 64 8"),
    "mistral-7b": ("MistralConfig", ""),
    "qwen-2.5-7b": ("Qwen2Config", "3584 28 28 4"),
    "qwen-3-8b": ("Qwen3Config", "4096 36 32 8"),
    "gemma-2-2b": ("Gemma2Config", ""),
    "gemma-3-4b": ("Gemma3TextConfig", "2560 34 8 4"),
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_transformers(name):
    kind, numbers = PUBLISHED[name]
    sizes = dict(zip(SIZES, map(int, numbers.split()), strict=False))
    given = getattr(needs("transformers"), kind)(**sizes)
    model = MODELS[name]
    heads = given.num_attention_heads, getattr(given, "num_key_value_heads", given.num_attention_heads)
    assert (model.width, model.layers) == (given.hidden_size, given.num_hidden_layers)
    assert (model.heads, model.kv_heads) == heads
    assert model.head_dim == (getattr(given, "head_dim", None) or given.hidden_size // heads[0])
    kinds = getattr(given, "layer_types", None) or []
    windows = kinds.count("sliding_attention") or (model.layers if name == "mistral-7b" else 0)
    assert model.window_layers == windows
    # The default window of Gemma 3 is that of another size.
    if name != "gemma-3-4b":
        assert model.window == (given.sliding_window if windows else None)


def test_the_shipped_model():
    trained, _ = lm.load_trained()
    model, config = MODELS["shipped"], trained.config
    sizes = (config.num_layers, config.width, config.num_heads, config.num_heads, config.head_dim)
    assert model[1:6] == sizes
    parameters = sum(p.numel() for layer in trained.layers for p in layer.heads.parameters())
    sums = program.count_model(model, program.graphs_of(model, 9))
    assert sums["standard"]["parameters"] == parameters


def test_layers_of_two_kinds():
    """In Gemma 3, 5 of 34 layers have no window, so they cache all tokens."""
    model = MODELS["gemma-3-4b"]
    sums = program.count_model(model, program.graphs_of(model, 3000))
    assert sums["standard"]["cache, key, value (bytes)"] == (29 * 1024 + 5 * 3000) * 2 * 4 * 256 * 2


def test_the_numbers_of_a_graph(capsys):
    """Table and JSON have the numbers of ``analyse.cost``, for both layers together."""
    arguments = ["--model", "shipped", "--graph", "window(40) | sinks(4)", "--tokens", "300"]
    assert program.main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert program.main(arguments) == 0
    output = capsys.readouterr().out
    graph = patterns.window(300, 40) | patterns.sinks(300, 4)
    for form, counts in record["forms"].items():
        one = cost.of_form(form, 128, 4, graph=graph, dtype=torch.bfloat16)
        assert counts["multiply-accumulates"] == 2 * one.macs.total
        assert counts["activations (bytes)"] == 2 * one.activations
        assert f"{2 * one.macs.total:,}" in output
    assert f"{graph.name}, in 2 layers: {graph.num_edges:,} edges" in output
    assert "decoding caches 44 of 300 senders" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "windw(64, 8)"], "there is no builder 'windw'"),
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--json", "/nowhere/at/all.json"], "expected a folder that exists"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert program.main(arguments) == 2
    assert message in capsys.readouterr().err
