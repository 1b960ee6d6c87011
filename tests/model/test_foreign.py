"""Layers of foreign models against the models themselves: their own forward pass is run, and each attention
module's input, mask and output are caught on the way. Tiny models whose weights, biases and norms are drawn,
in float64, which transformers' eager attention then does not leave.
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
from gnn_attention.verify.measure import EXACT

hf_models = needs("support.hf_models")
TOKENS, OTHERS = hf_models.TOKENS, 7  # receivers, and senders of another text


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    hf_models.keep_float64(monkeypatch)


def states(length: int, width: int = 32) -> Tensor:
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(length)).double()


@dataclass(frozen=True)
class Case:
    """A family of ``hf_models`` with changes of its config, and the path of each part's attention."""

    family: str
    parts: dict[str, str] = field(default_factory=lambda: {"self": "model.layers.{}.self_attn"})
    changes: dict[str, Any] = field(default_factory=dict)
    output: str = ""  # the module below the attention whose output is the update, where it is another

    def made(self) -> nn.Module:
        """The model in float64, its attention sharpened, its biases and norms drawn."""
        model = hf_models.built(self.family, **self.changes)
        for name, parameter in model.named_parameters():
            if "attn" in name.lower() or "attention" in name.lower():
                spread = 1.5 if "relative" in name else 1.5 / 32**0.5 if parameter.dim() == 2 else 0.4
                is_norm = "norm" in name.lower() and name.endswith("weight")
                parameter.data = torch.randn_like(parameter) * spread + float(is_norm)
        for rotary in (module for name, module in model.named_modules() if name.endswith("rotary_emb")):
            with_exact_angles(rotary)
        return model

    def inputs(self) -> dict[str, Tensor]:
        others = {"encoder_hidden_states": states(OTHERS).repeat(hf_models.BATCH, 1, 1)}
        given: dict[str, Tensor] = hf_models.inputs(self.family)
        return given | (others if "add_cross_attention" in self.changes else {})


def with_exact_angles(rotary: Any) -> None:
    """Frequencies of the default kind as powers in float64, not those rounded to float32."""
    parameters = rotary.config.rope_parameters
    nested = parameters if "rope_type" not in parameters else {"": parameters}
    for kind, given in nested.items():
        name = f"{kind}_inv_freq".lstrip("_")
        powers = torch.arange(len(getattr(rotary, name)), dtype=torch.float64) / len(getattr(rotary, name))
        if given["rope_type"] == "default":
            setattr(rotary, name, given["rope_theta"] ** -powers)


OF_LLAMA = {"head_dim": 6}
TURNS = {"rope_theta": 10000.0, "factor": 4.0}
LLAMA3_TURNS = TURNS | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_TURNS |= {"original_max_position_embeddings": 32}
YARN_TURNS = TURNS | {"rope_type": "yarn", "original_max_position_embeddings": 16}
LATENT_YARN = YARN_TURNS | {"mscale": 0.5, "mscale_all_dim": 1.0}
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
    "llama, scaled turns": Case("llama", changes=OF_LLAMA | {"rope_parameters": LLAMA3_TURNS}),
    "llama, yarn": Case("llama", changes={"rope_parameters": YARN_TURNS}),
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


def watch(case: Case, model: nn.Module) -> dict[tuple[str, int], dict[str, Any]]:
    """Of each attention module: states of receivers and senders, the graph of its mask, the update."""
    calls: dict[tuple[str, int], dict[str, Any]] = {place: {} for place in places(case)}
    for (part, layer), call in calls.items():
        module = model.get_submodule(case.parts[part].format(layer))

        def before(module, args, kwargs, call=call, part=part):
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            given = {**given.get("kwargs", {}), **given}
            x_dst, mask = given["hidden_states"], given.get("attention_mask", given.get("mask"))
            others = (given.get(name) for name in ("key_value_states", "encoder_hidden_states"))
            x_src = next((other for other in others if other is not None), x_dst)
            every = patterns.cross(x_dst.shape[1], x_src.shape[1])
            graph = every if mask is None or part == "cross" else ga.convert.from_mask(mask[0, 0] == 0)
            call |= {"x_dst": x_dst, "x_src": x_src, "graph": graph}

        def after(module, args, output, call=call):
            call["update"] = output[0] if isinstance(output, tuple) else output

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.get_submodule(case.output).register_forward_hook(after)
    with torch.no_grad():
        model(**case.inputs())
    return calls


def places(case: Case) -> list[tuple[str, int]]:
    return [(part, layer) for part in case.parts for layer in range(2)]


def worst(case: Case) -> float:
    """The largest error over all parts and layers, relative to the largest update."""
    model, found = case.made(), []
    layers = {place: foreign.layer_of(model, place[1], place[0]) for place in places(case)}
    seen = watch(case, model)
    for place, layer in layers.items():
        one = seen[place]
        with torch.no_grad():
            update = layer((one["x_src"], one["x_dst"]), one["graph"])
        found.append(error(update, one["update"]) / float(one["update"].abs().max()))
    return max(found)


@each_case
def test_equals_the_models_arithmetic_in_float64(case):
    assert worst(case) <= EXACT


@pytest.mark.parametrize("name", ["gpt2", "deepseek"])
def test_weights_are_copies(name):
    """Neither side sees the other's training: no memory is shared, gradients stay where they belong."""
    case = CASES[name]
    model = case.made()
    layer = foreign.layer_of(model, 0, next(iter(case.parts)))
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    assert not own & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())
    layer(states(TOKENS), patterns.causal(TOKENS)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_score_mods_of_gemma2_and_t5():
    model = CASES["gemma2"].made()
    assert foreign.score_mod_of(model, 0) == ga.score_mods.softcap(2.0)
    model = CASES["t5"].made()
    with pytest.raises(ValueError, match="T5 keeps its relative position bias in the first layer: give"):
        foreign.score_mod_of(model.encoder.block[1].layer[0].SelfAttention)
    assert foreign.score_mod_of(model.decoder.block[1].layer[1].EncDecAttention) is None
    assert foreign.score_mod_of(model.encoder.block[0].layer[0].SelfAttention).table.shape == (4, 25)


def test_a_layer_is_found_in_whatever_holds_it():
    """The model, a model around it, the layer's attention itself."""
    lm = hf_models.built("llama")
    alone = lm.model.layers[1]
    for model, layer in ((nn.Sequential(lm), 1), (lm.model.layers, 1), (alone, None), (alone.self_attn, 0)):
        heads = foreign.heads_of(model, layer)
        assert torch.equal(heads.W_V.mT.flatten(0, 1), alone.self_attn.v_proj.weight)


def test_torch_attention_wherever_it_stands():
    """Encoder, decoder and cross-attention of nn.Transformer."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 3, 20, dropout=0.0, batch_first=True).double().eval()
    encoder, decoder = model.encoder.layers[1], model.decoder.layers[1]
    parts = {"encoder": encoder.self_attn, "decoder": decoder.self_attn, "cross": decoder.multihead_attn}
    x, y = states(TOKENS, 16).double(), states(OTHERS, 16).double()
    for part, attention in parts.items():
        nn.init.normal_(attention.in_proj_bias)
        wanted, _ = attention(x, y, y, need_weights=False)
        for layer in (foreign.layer_of(model, 1, part), foreign.layer_of(attention)):
            assert_exact(layer((y, x), patterns.cross(TOKENS, OTHERS)), wanted)
    # "cross" aside there is one part
    assert torch.equal(foreign.heads_of(model.decoder, 1).W_V, foreign.heads_of(decoder.self_attn).W_V)


class Adapted(nn.Linear):
    """Does more than its weight says."""

    def forward(self, x):
        return super().forward(x) + 1


def with_changed(name: str, path: str, change: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    def made():
        model = CASES[name].made()
        change(model.get_submodule(path))
        return model

    return made


adapted = with_changed("llama", "model.layers.0.self_attn", lambda x: setattr(x, "k_proj", Adapted(32, 12)))
TURNED = TURNS | {"rope_type": "dynamic"}
dynamic = with_changed("llama", "", lambda x: setattr(x.config, "rope_parameters", TURNED))


def made(name: str) -> Callable[[], nn.Module]:
    return lambda: CASES[name].made()


REFUSED = [
    (lambda: "gpt2", (0,), TypeError, r"model must be a Module, got"),
    (lambda: nn.Linear(2, 2), (), NotImplementedError, "Linear is of no .* Known: torch.*, GPT-2, OPT,"),
    (made("gpt2"), (), ValueError, "give layer: the model has 2 layers"),
    (made("gpt2"), (2,), IndexError, "layer must be in 0 .. 1, got 2"),
    (made("gpt2"), (0, "cross"), ValueError, "part must be one of 'self', got 'cross'"),
    (made("t5"), (0,), ValueError, "attends in several parts: give part, one of encoder, decoder,"),
    (adapted, (0,), ValueError, r"k_proj of LlamaAttention must be a plain nn\.Linear, got .*Adapted; merge"),
    (dynamic, (0,), NotImplementedError, "rope_type 'dynamic' depends on the length;"),
    (lambda: made("llama, yarn")().model.layers[0].self_attn, (), ValueError, "rope_type 'yarn' keeps its"),
]


def test_what_is_refused():
    def reading(model, arguments):
        return lambda: foreign.heads_of(model(), *arguments)

    assert_refusals((reading(model, given), error, match) for model, given, error, match in REFUSED)
