"""Published sizes against transformers' modules, and the command ``gnn-attention cost``."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from support.extras import needs
from torch import nn

from gnn_attention import MergedHeads, cost, patterns
from gnn_attention import model as lm
from gnn_attention.__main__ import main
from gnn_attention.cost import Sizes

# folder and classes of transformers, and width, layers, heads, key/value heads where its defaults are others
PUBLISHED: dict[str, tuple[str, str, str, str]] = {
    "gpt-2": ("gpt2", "GPT2Attention", "GPT2Config", ""),
    "llama-3-8b": ("llama", "LlamaAttention", "LlamaConfig", "4096 32 32 8"),
    "llama-3-70b": ("llama", "LlamaAttention", "LlamaConfig", "8192 80 64 8"),
    "mistral-7b": ("mistral", "MistralAttention", "MistralConfig", ""),
    "qwen-2.5-7b": ("qwen2", "Qwen2Attention", "Qwen2Config", "3584 28 28 4"),
    "qwen-3-8b": ("qwen3", "Qwen3Attention", "Qwen3Config", "4096 36 32 8"),
    "gemma-2-2b": ("gemma2", "Gemma2Attention", "Gemma2Config", ""),
    "gemma-3-4b": ("gemma3", "Gemma3Attention", "Gemma3TextConfig", "2560 34 8 4"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Attention", "DeepseekV3Config", ""),
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def published(name: str) -> tuple[type[nn.Module], Any]:
    """The attention of a model in transformers, and its configuration."""
    folder, attention, configuration, numbers = PUBLISHED[name]
    sizes = dict(zip(SIZES, map(int, numbers.split()), strict=False))
    if name == "gemma-3-4b":
        sizes["sliding_window"] = 1024
    transformers = needs("transformers")
    module = needs(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(module, attention), getattr(transformers, configuration)(**sizes)


class TestConfigs:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_sizes_are_those_of_transformers(self, name):
        """Parameters of a layer, layers, windows, rotation and heads of transformers' modules."""
        kind, given = published(name)
        with torch.device("meta"):
            layer = kind(given, layer_idx=0)
        model = cost.config(name)
        form = "standard" if isinstance(model.heads, Sizes) else "latent"
        assert cost.rates(form, model.heads).parameters == sum(p.numel() for p in layer.parameters())
        assert model.layers == given.num_hidden_layers
        assert model.rotary == (name != "gpt-2")
        kinds = getattr(given, "layer_types", None) or []
        every = model.layers if name == "mistral-7b" and not kinds else 0
        windows = every or kinds.count("sliding_attention")
        assert model.window_layers == windows
        assert model.window == (given.sliding_window if windows else None)
        if isinstance(heads := model.heads, Sizes):
            # the same parameters could be split into heads otherwise
            assert (heads.width, heads.num_heads) == (given.hidden_size, given.num_attention_heads)
            assert heads.num_kv_heads == getattr(given, "num_key_value_heads", given.num_attention_heads)
            head_dim = getattr(given, "head_dim", None) or heads.width // heads.num_heads
            assert heads.head_dim == heads.value_dim == head_dim

    def test_the_shipped_model(self):
        trained, _ = lm.load_trained()
        shipped, config = cost.config("shipped"), trained.config
        assert shipped.layers == config.num_layers
        assert shipped.heads == Sizes.of(config.width, config.num_heads, config.head_dim)
        parameters = sum(p.numel() for layer in trained.layers for p in layer.heads.parameters())
        assert cost.of_config("shipped", 9)["standard"].parameters == parameters
        assert shipped.mergeable
        MergedHeads.of(trained.layers[0].heads)  # it is

    def test_unknown_names(self):
        assert cost.config("Llama-3-8B") is cost.CONFIGS["llama-3-8b"]
        with pytest.raises(ValueError, match="no configuration 'xyz'; there are shipped, transformer-base"):
            cost.config("xyz")

    def test_layers_of_two_kinds(self):
        """Gemma 3: of 34 layers every sixth is without a window."""
        found = cost.of_config("gemma-3-4b", 3000)["standard"]
        assert found.cache["key, value"] == (29 * 1024 + 5 * 3000) * 2 * 4 * 256 * 2

    def test_latent_attention(self):
        """DeepSeek-V3: 576 numbers of a token for 128 heads, against 128 (192 + 128)."""
        costs = cost.of_config("deepseek-v3", 8192)
        assert costs["latent"].cache_per_token == {"latent, rotated key": 61 * 576 * 2}
        assert costs["expanded"].cache_per_token == {"key, value": 61 * 128 * (192 + 128) * 2}
        assert costs["latent"].parameters == costs["expanded"].parameters == 61 * 187_107_328


class TestCommand:
    def out(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["cost", *arguments]) == 0
        return capsys.readouterr().out

    @pytest.mark.parametrize("name", cost.CONFIGS)
    def test_a_report_fits_into_100_columns(self, name, capsys):
        out = self.out(capsys, "--config", name, "--tokens", "5000")
        assert out.startswith(f"{name}: ")
        assert max(map(len, out.splitlines())) <= 100
        rows = {line.split("  ")[1].strip(): line for line in out.splitlines() if line.startswith("  ")}
        for label in ("logits", "weighting", "parameters of one layer", "activations of the pass"):
            assert label in rows
        mergeable = ("shipped", "transformer-base", "gpt-2", "deepseek-v3")
        assert ("and cannot be cached" in out) == (name not in mergeable)

    def test_the_seeds_numbers_are_in_it(self, capsys):
        """S1.5, S1.12, S4.15, and the caches of a token."""
        out = self.out(capsys, "--config", "llama-3-8b", "--tokens", "8192")
        numbers = "16,777,216|1,048,576 multiply-accumulates|41,943,040|1,073,741,824|33,558,528|128 KiB"
        shapes = "W_Q 32 x [4096, 128], W_K 8 x [4096, 128], W_V 8 x [4096, 128], W_O 32 x [128, 4096]"
        for text in (*numbers.split("|"), shapes, "W_P 32 x [4096, 4096], W_M 32 x [4096, 4096]"):
            assert text in out
        assert self.out(capsys) == out  # the default

    def test_numbers_are_those_of_the_json(self, capsys):
        found = json.loads(self.out(capsys, "--config", "gemma-2-2b", "--tokens", "6000", "--json"))
        costs = cost.of_config("gemma-2-2b", 6000)
        names = ["window(6000, 4096)", "causal(6000)", "full(6000)"]
        assert found["layers"] == [{"graph": name, "layers": 13} for name in names[:2]]
        for form, each in costs.items():
            assert found["forms"][form]["macs"]["total"] == each.macs.total
            assert found["forms"][form]["step"]["logits"] == each.step.logits
            assert found["forms"][form]["cache"] == each.cache
        assert [graph["name"] for graph in found["graphs"]] == names
        assert found["graphs"][0]["of_causal"] == cost.of_graph(patterns.window(6000, 4096)).of_causal
        assert math.isclose(found["graphs"][2]["of_full"], 1.0)

    def test_a_graph_of_ones_own(self, capsys):
        """Its tokens are the graph's, and causal and full are in the table too."""
        out = self.out(capsys, "--config", "shipped", "--graph", "window(512, 64) | sinks(512, 4)")
        rows = [line for line in out.splitlines() if "%" in line and line.rstrip().endswith(("k", "M"))]
        graphs = (patterns.window(512, 64) | patterns.sinks(512, 4), patterns.causal(512))
        edges = [cost.of_graph(graph).edges for graph in graphs]
        assert [f"{count:,}" in row for count, row in zip(edges, rows, strict=False)] == [True, True]
        assert "decoding caches 68 of 512 senders" in " ".join(out.split())
        share = f"{100 * edges[0] / edges[1]:.3g} % of the edges of the causal graph"
        assert share in " ".join(out.split())

    def test_a_graph_without_its_size(self, capsys):
        """The tokens of --tokens are filled in."""
        arguments = ["--config", "shipped", "--graph", "window(40) | sinks(4)", "--json", "--tokens", "300"]
        (layers,) = json.loads(self.out(capsys, *arguments))["layers"]
        assert layers == {"graph": "window(300, 40) | sinks(300, 4)", "layers": 2}

    def test_given_sizes(self, capsys):
        arguments = "--width 24 --heads 6 --head-dim 5 --kv-heads 2 --layers 3 --tokens 9 --dtype float64"
        found = json.loads(self.out(capsys, *arguments.split(), "--json"))
        expected = cost.of_form("merged", 24, 6, 5, num_kv_heads=2, tokens=9, dtype=torch.float64) * 3
        assert found["forms"]["merged"]["macs"]["total"] == expected.macs.total
        assert found["forms"]["merged"]["cache"] == expected.cache

    def test_ranks(self, capsys):
        """The halo of a window: 63 ranks receive 4095 senders of 8 heads, 128 + 128 numbers of 2 bytes."""
        arguments = ["--ranks", "64", "--tokens", "300000", "--graph", "window(4096)"]
        arguments += ["--partition", "contiguous"]
        (found,) = json.loads(self.out(capsys, *arguments, "--json"))["plans"]
        assert found["halo_bytes"] == 63 * 4095 * 8 * (128 + 128) * 2
        assert sum(rank["edges"] for rank in found["ranks"]) == 32 * patterns.window(300_000, 4096).num_edges
        assert found["layers"] == 32
        out = self.out(capsys, *arguments)
        assert max(map(len, out.splitlines())) <= 100
        for text in ("on 64 ranks, contiguous", f"{found['halo_bytes']:,}", "(most / mean): edges 1.0"):
            assert text in out

    def test_wrong_arguments_are_named(self, capsys):
        wrong = {
            "--partition metis needs --ranks": ["--partition", "metis"],
            "world_size must be at least 1, got 0": ["--ranks", "0"],
            "did you mean 'llama-3-8b'": ["--config", "llama-3-8"],
            "--heads 4 needs --width": ["--heads", "4"],
            "--kv-heads 4 needs --width": ["--config", "gpt-2", "--kv-heads", "4"],
            "--width 64 needs --heads": ["--width", "64"],
            "give --config or --width, not both": ["--config", "gpt-2", "--width", "64"],
            "has 64 receivers; leave --tokens out": ["--graph", "causal(64)", "--tokens", "63"],
            "there is no builder 'windw'": ["--graph", "windw(64, 8)"],
            "tokens must be at least 1, got 0": ["--tokens", "0"],
            "expected a folder that exists": ["--json", "/nowhere/at/all.json"],
        }
        for message, arguments in wrong.items():
            assert main(["cost", *arguments]) == 2
            assert message in capsys.readouterr().err
