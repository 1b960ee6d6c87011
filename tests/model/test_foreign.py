"""Layers made from the attention of other models equal it.

Hooks record the input, mask and output of each attention module in a forward pass of a tiny model in float64
with random weights, biases and norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.bounds import assert_exact, error
from support.extras import needs
from support.refusals import assert_refusals
from torch import Tensor, nn

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.model import foreign
from gnn_attention.verify.measure import FLOAT64_RTOL

hf_models = needs("support.hf_models")
# SENDERS are the tokens of another text, in cross-attention.
TOKENS, SENDERS = hf_models.TOKENS, 7


@pytest.fixture(autouse=True)
def keep_float64(monkeypatch):
    hf_models.keep_float64(monkeypatch)


def states(length: int, width: int = 32) -> Tensor:
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(length)).double()


@dataclass(frozen=True)
class Case:
    """A family of ``hf_models``, changes to its config, and paths to attentions and, in them, to outputs."""

    family: str
    parts: dict[str, str] = field(default_factory=lambda: {"self": "model.layers.{}.self_attn"})
    changes: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    def make(self) -> nn.Module:
        """Return the model in float64, with large parameters of attention and random biases and norms."""
        model = hf_models.build64(self.family, **self.changes)
        for name, parameter in model.named_parameters():
            if "attn" in name.lower() or "attention" in name.lower():
                spread = 1.5 if "relative" in name else 1.5 / 32**0.5 if parameter.dim() == 2 else 0.4
                is_norm = "norm" in name.lower() and name.endswith("weight")
                parameter.data = torch.randn_like(parameter) * spread + float(is_norm)
        for rotary in (module for name, module in model.named_modules() if name.endswith("rotary_emb")):
            with_exact_angles(rotary)
        return model

    def inputs(self) -> dict[str, Tensor]:
        options = {"encoder_hidden_states": states(SENDERS).repeat(hf_models.BATCH, 1, 1)}
        arguments: dict[str, Tensor] = hf_models.inputs(self.family)
        return arguments | (options if "add_cross_attention" in self.changes else {})


def with_exact_angles(rotary: Any) -> None:
    """Compute default frequencies in float64, since those of the module are rounded to float32."""
    parameters = rotary.config.rope_parameters
    nested = parameters if "rope_type" not in parameters else {"": parameters}
    for kind, settings in nested.items():
        name = f"{kind}_inv_freq".lstrip("_")
        powers = torch.arange(len(getattr(rotary, name)), dtype=torch.float64) / len(getattr(rotary, name))
        if settings["rope_type"] == "default":
            setattr(rotary, name, settings["rope_theta"] ** -powers)


OF_LLAMA = {"head_dim": 6}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LLAMA3_ROPE = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 32}
YARN_ROPE = ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 16}
LATENT_YARN = YARN_ROPE | {"mscale": 0.5, "mscale_all_dim": 1.0}
LOCAL, GLOBAL = ({"rope_type": "default", "rope_theta": theta} for theta in (100.0, 5000.0))
BY_LAYER = {"sliding_attention": LOCAL, "full_attention": GLOBAL}
HALVES = {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}
GPT2_CROSS = {"add_cross_attention": True, "scale_attn_by_inverse_layer_idx": True}
BERT_CROSS = {"is_decoder": True, "add_cross_attention": True}
GPT2, BERT = {"self": "transformer.h.{}.attn"}, {"encoder": "bert.encoder.layer.{}.attention"}
T5 = {
    "encoder": "encoder.block.{}.layer.0.SelfAttention",
    "decoder": "decoder.block.{}.layer.0.SelfAttention",
    "cross": "decoder.block.{}.layer.1.EncDecAttention",
}
WHISPER = {
    "encoder": "model.encoder.layers.{}.self_attn",
    "decoder": "model.decoder.layers.{}.self_attn",
    "cross": "model.decoder.layers.{}.encoder_attn",
}
CASES = {
    "gpt2": Case("gpt2", GPT2),
    "gpt2, cross": Case("gpt2", GPT2 | {"cross": "transformer.h.{}.crossattention"}, GPT2_CROSS),
    "opt": Case("opt", {"decoder": "model.decoder.layers.{}.self_attn"}),
    "bert": Case("bert", BERT, output="output.dense"),
    "bert, cross": Case(
        "bert", BERT | {"cross": "bert.encoder.layer.{}.crossattention"}, BERT_CROSS, "output.dense"
    ),
    "vit": Case("vit", {"self": "layers.{}.attention"}),
    "t5": Case("t5", T5, {"d_kv": 6}),
    "whisper": Case("whisper", WHISPER),
    "llama": Case("llama", changes=OF_LLAMA | {"attention_bias": True}),
    "llama, scaled rotation": Case("llama", changes=OF_LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn": Case("llama", changes={"rope_parameters": YARN_ROPE}),
    "mistral": Case("mistral"),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "gemma": Case("gemma", changes={"num_key_value_heads": 1}),
    "gemma2": Case("gemma2", changes={"query_pre_attn_scalar": 3}),
    "gemma3": Case("gemma3", changes={"query_pre_attn_scalar": 3, "rope_parameters": BY_LAYER}),
    "deepseek": Case("deepseek_v3"),
    "deepseek, halves": Case("deepseek_v3", changes=HALVES),
    "deepseek, yarn": Case("deepseek_v3", changes={"rope_parameters": LATENT_YARN}),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def record_calls(case: Case, model: nn.Module) -> dict[tuple[str, int], dict[str, Any]]:
    """Record the states, the graph of the mask and the update of each attention module."""
    calls: dict[tuple[str, int], dict[str, Any]] = {site: {} for site in list_sites(case)}
    for (part, layer), call in calls.items():
        module = model.get_submodule(case.parts[part].format(layer))

        def record_inputs(module, args, kwargs, call=call, part=part):
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            arguments = {**arguments.get("kwargs", {}), **arguments}
            x_dst, mask = arguments["hidden_states"], arguments.get("attention_mask", arguments.get("mask"))
            options = (arguments.get(name) for name in ("key_value_states", "encoder_hidden_states"))
            x_src = next((candidate for candidate in options if candidate is not None), x_dst)
            full = patterns.cross(x_dst.shape[1], x_src.shape[1])
            graph = full if mask is None or part == "cross" else ga.convert.from_mask(mask[0, 0] == 0)
            call |= {"x_dst": x_dst, "x_src": x_src, "graph": graph}

        def record_update(module, args, output, call=call):
            call["update"] = output[0] if isinstance(output, tuple) else output

        module.register_forward_pre_hook(record_inputs, with_kwargs=True)
        module.get_submodule(case.output).register_forward_hook(record_update)
    with torch.no_grad():
        model(**case.inputs())
    return calls


def list_sites(case: Case) -> list[tuple[str, int]]:
    """Return the part and layer of each attention module."""
    return [(part, layer) for part in case.parts for layer in range(2)]


def largest_error(case: Case) -> float:
    """Return the largest error of all parts and layers, relative to the largest update."""
    model, errors = case.make(), []
    layers = {site: foreign.layer_of(model, site[1], site[0]) for site in list_sites(case)}
    calls = record_calls(case, model)
    for site, layer in layers.items():
        call = calls[site]
        with torch.no_grad():
            update = layer((call["x_src"], call["x_dst"]), call["graph"])
        errors.append(error(update, call["update"]) / float(call["update"].abs().max()))
    return max(errors)


@each_case
def test_equals_the_models_arithmetic_in_float64(case):
    assert largest_error(case) <= FLOAT64_RTOL


@pytest.mark.parametrize("name", ["gpt2", "deepseek"])
def test_weights_are_copies(name):
    """The parameters share no memory with the model, and training them gives the model no gradients."""
    case = CASES[name]
    model = case.make()
    layer = foreign.layer_of(model, 0, next(iter(case.parts)))
    storages = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    assert not storages & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())
    layer(states(TOKENS), patterns.causal(TOKENS)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_score_mods_of_gemma2_and_t5():
    model = CASES["gemma2"].make()
    assert foreign.score_mod_of(model, 0) == ga.score_mods.softcap(2.0)
    model = CASES["t5"].make()
    with pytest.raises(ValueError, match="T5 keeps its relative position bias in layer 0: pass"):
        foreign.score_mod_of(model.encoder.block[1].layer[0].SelfAttention)
    assert foreign.score_mod_of(model.decoder.block[1].layer[1].EncDecAttention) is None
    assert foreign.score_mod_of(model.encoder.block[0].layer[0].SelfAttention).table.shape == (4, 25)


def test_a_layer_is_found_in_whatever_holds_it():
    """The argument may be the model, a module around it, a layer of it, or the attention itself."""
    lm = hf_models.build64("llama")
    parent = lm.model.layers[1]
    for model, layer in ((nn.Sequential(lm), 1), (lm.model.layers, 1), (parent, None), (parent.self_attn, 0)):
        heads = foreign.heads_of(model, layer)
        assert torch.equal(heads.W_V.mT.flatten(0, 1), parent.self_attn.v_proj.weight)


def test_torch_attention_wherever_it_stands():
    """torch's attention is found in the encoder, the decoder and the cross-attention of nn.Transformer."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 3, 20, dropout=0.0, batch_first=True).double().eval()
    encoder, decoder = model.encoder.layers[1], model.decoder.layers[1]
    parts = {"encoder": encoder.self_attn, "decoder": decoder.self_attn, "cross": decoder.multihead_attn}
    x, y = states(TOKENS, 16).double(), states(SENDERS, 16).double()
    for part, attention in parts.items():
        nn.init.normal_(attention.in_proj_bias)
        expected, _ = attention(x, y, y, need_weights=False)
        for layer in (foreign.layer_of(model, 1, part), foreign.layer_of(attention)):
            assert_exact(layer((y, x), patterns.cross(TOKENS, SENDERS)), expected)
    # Apart from "cross", a decoder has only one part, so its name may be left out.
    assert torch.equal(foreign.heads_of(model.decoder, 1).W_V, foreign.heads_of(decoder.self_attn).W_V)


class Adapted(nn.Linear):
    """A layer that computes more than its weight and bias."""

    def forward(self, x):
        return super().forward(x) + 1


def make_changed(name: str, path: str, change: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    def make():
        model = CASES[name].make()
        change(model.get_submodule(path))
        return model

    return make


adapter = make_changed("llama", "model.layers.0.self_attn", lambda x: setattr(x, "k_proj", Adapted(32, 12)))
DYNAMIC_ROPE = ROPE | {"rope_type": "dynamic"}
dynamic_llama = make_changed("llama", "", lambda x: setattr(x.config, "rope_parameters", DYNAMIC_ROPE))


def make(name: str) -> Callable[[], nn.Module]:
    return lambda: CASES[name].make()


REFUSED = [
    (lambda: "gpt2", (0,), TypeError, r"model must be a Module, got"),
    (lambda: nn.Linear(2, 2), (), NotImplementedError, "Linear has no .* it has none. Known: torch.*GPT-2"),
    (make("gpt2"), (), ValueError, "pass layer=...: the model has 2 layers"),
    (make("gpt2"), (2,), IndexError, "layer must be in 0 .. 1, got 2"),
    (make("gpt2"), (0, "cross"), ValueError, "part must be one of 'self', got 'cross'"),
    (make("t5"), (0,), ValueError, "the model has several parts: pass part=..., one of encoder, decoder,"),
    (adapter, (0,), ValueError, r"k_proj of LlamaAttention must be a plain nn\.Linear, got .*Adapted; merge"),
    (dynamic_llama, (0,), NotImplementedError, "rope_type 'dynamic' depends on the length;"),
    (lambda: make("llama, yarn")().model.layers[0].self_attn, (), ValueError, "rope_type 'yarn' keeps its"),
]


def test_what_is_refused():
    def read(model, arguments):
        return lambda: foreign.heads_of(model(), *arguments)

    assert_refusals((read(model, arguments), error, match) for model, arguments, error, match in REFUSED)
