"""Layers of foreign models against the models themselves: their own forward pass is run, and each attention
module's input and output are caught on the way. Tiny models of drawn weights, sharpened so that a wrong
scale, bias, norm or turn shows.

In float32 the judge is the error of transformers' eager attention. In float64 eager stops at float32
precision (softmax, norms and angles are computed in it), so there the modules run with an attention, norms
and angles of this file, in plain float64.
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
from torch import Tensor, nn
from torch.nn.utils import parametrize

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, TokenGraph, patterns
from gnn_attention.model import foreign
from gnn_attention.model._foreign_families import FAMILIES
from gnn_attention.verify.measure import EXACT

transformers = needs("transformers")
ALL_MASK_ATTENTION_FUNCTIONS = needs("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS

TOKENS, OTHERS = 9, 7  # receivers, and senders of another text


def sizes(text: str) -> dict[str, Any]:
    """Whole numbers by name: ``"width=8 heads=2"``."""
    return {name: int(value) for name, value in (item.split("=") for item in text.split())}


QWEN2 = sizes("hidden_size=32 intermediate_size=40 num_hidden_layers=2 num_attention_heads=4 vocab_size=50")
QWEN2 |= sizes("num_key_value_heads=2 max_position_embeddings=64 pad_token_id=0")
LLAMA = QWEN2 | {"head_dim": 6}
LATENT = QWEN2 | sizes("num_key_value_heads=4 q_lora_rank=20 kv_lora_rank=12 qk_rope_head_dim=4")
LATENT |= sizes("qk_nope_head_dim=6 v_head_dim=5 first_k_dense_replace=2")
TURNS = {"rope_theta": 10000.0, "factor": 4.0}
LLAMA3_TURNS = TURNS | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_TURNS |= {"original_max_position_embeddings": 32}
YARN_TURNS = TURNS | {"rope_type": "yarn", "original_max_position_embeddings": 16}


def causal(layer: int, num_dst: int, num_src: int) -> TokenGraph:
    return patterns.causal(num_dst)


def everyone(layer: int, num_dst: int, num_src: int) -> TokenGraph:
    return patterns.cross(num_dst, num_src)


def window_first(layer: int, num_dst: int, num_src: int) -> TokenGraph:
    """Gemma's layers: a window, then everything before."""
    return patterns.window(num_dst, 4) if layer == 0 else patterns.causal(num_dst)


def ids(length: int = TOKENS) -> Tensor:
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(length))


def states(length: int, width: int = 32) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True)
class Case:
    """A tiny model, what goes in, and for each part the path of its attention and the graph that the model's
    mask is.
    """

    config: str
    sizes: dict[str, Any]
    parts: dict[str, tuple[str, Callable[[int, int, int], TokenGraph]]]
    model: str = ""
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": ids()})
    output: str = ""  # the module below the attention whose output is the update, where it is another
    positions: bool = False  # turned by position: no merged form

    def made(self, dtype: torch.dtype) -> nn.Module:
        """The model, its attention sharpened, its biases and norms drawn."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model or self.config.replace("Config", "Model"))
        config = getattr(transformers, self.config)(**self.sizes)
        config._attn_implementation = "eager"
        model = kind(config).eval()
        for name, parameter in model.named_parameters():
            if "attn" in name.lower() or "attention" in name.lower():
                spread = 1.5 if "relative" in name else 1.5 / 32**0.5 if parameter.dim() == 2 else 0.4
                is_norm = "norm" in name.lower() and name.endswith("weight")
                parameter.data = torch.randn_like(parameter) * spread + float(is_norm)
        return model.to(dtype)


BERT = sizes("hidden_size=32 intermediate_size=40 num_hidden_layers=2 num_attention_heads=4 vocab_size=50")
GPT2 = sizes("n_embd=32 n_head=4 n_layer=2 vocab_size=50 n_positions=32 bos_token_id=1 eos_token_id=2")
T5 = sizes("d_model=32 d_kv=6 d_ff=40 num_layers=2 num_heads=4 vocab_size=50")
T5 |= sizes("relative_attention_num_buckets=8 relative_attention_max_distance=6")
WHISPER = sizes("d_model=32 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 vocab_size=50")
WHISPER |= sizes("decoder_attention_heads=4 encoder_ffn_dim=40 decoder_ffn_dim=40 num_mel_bins=8")
WHISPER |= sizes("pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=3")
WHISPER |= {"max_target_positions": 16, "max_source_positions": OTHERS, "begin_suppress_tokens": None}
SELF = {"self": ("layers.{}.self_attn", causal)}

SELF_OF_2 = {"self": (SELF["self"][0], window_first)}
WINDOWS = {"self": (SELF["self"][0], lambda layer, dst, src: patterns.window(dst, 4))}
GPT2_CROSS = GPT2 | {"add_cross_attention": True, "scale_attn_by_inverse_layer_idx": True}
BERT_CROSS = BERT | {"is_decoder": True, "add_cross_attention": True}
OPT = BERT | sizes("ffn_dim=40 max_position_embeddings=32 word_embed_proj_dim=32")
GEMMA2 = LLAMA | {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0, "sliding_window": 4}
GEMMA3 = LLAMA | {"query_pre_attn_scalar": 3, "sliding_window": 4}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"]}
LOCAL, GLOBAL = ({"rope_type": "default", "rope_theta": theta} for theta in (100.0, 5000.0))
GEMMA3 |= {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL}}
HALVES = LATENT | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}
LATENT_YARN = LATENT | {"rope_parameters": YARN_TURNS | {"mscale": 0.5, "mscale_all_dim": 1.0}}
T5_PARTS = {
    "encoder": ("encoder.block.{}.layer.0.SelfAttention", everyone),
    "decoder": ("decoder.block.{}.layer.0.SelfAttention", causal),
    "cross": ("decoder.block.{}.layer.1.EncDecAttention", everyone),
}
WHISPER_PARTS = {
    "encoder": ("encoder.layers.{}.self_attn", everyone),
    "decoder": ("decoder.layers.{}.self_attn", causal),
    "cross": ("decoder.layers.{}.encoder_attn", everyone),
}
BERT_PARTS = {
    "encoder": ("encoder.layer.{}.attention", causal),
    "cross": ("encoder.layer.{}.crossattention", everyone),
}
GPT2_PARTS = {"self": ("h.{}.attn", causal), "cross": ("h.{}.crossattention", everyone)}


OF_TWO = {"input_ids": ids(), "encoder_hidden_states": states(OTHERS)}
OF_PAIRS = {"input_ids": ids(OTHERS), "decoder_input_ids": ids()}
OF_PICTURES = {"pixel_values": states(8, 8).unsqueeze(1)}
OF_SOUND = {"input_features": states(8, 2 * OTHERS), "decoder_input_ids": ids()}


def rotated(config: str, config_sizes: dict[str, Any], parts: dict[str, Any] = SELF, **rope: Any) -> Case:
    turns = {"rope_parameters": rope["rope"]} if rope else {}
    return Case(config, config_sizes | turns, parts, positions=True)


VIT = BERT | sizes("image_size=8 patch_size=4 num_channels=1")
ENCODER = {"encoder": ("encoder.layer.{}.attention", everyone)}
CASES = {
    "gpt2": Case("GPT2Config", GPT2, {"self": ("h.{}.attn", causal)}),
    "gpt2, cross": Case("GPT2Config", GPT2_CROSS, GPT2_PARTS, inputs=OF_TWO),
    "opt": Case("OPTConfig", OPT, {"decoder": ("decoder.layers.{}.self_attn", causal)}),
    "bert": Case("BertConfig", BERT, ENCODER, output="output.dense"),
    "bert, cross": Case("BertConfig", BERT_CROSS, BERT_PARTS, inputs=OF_TWO, output="output.dense"),
    "vit": Case("ViTConfig", VIT, {"self": ("layers.{}.attention", everyone)}, inputs=OF_PICTURES),
    "t5": Case("T5Config", T5, T5_PARTS, inputs=OF_PAIRS),
    "whisper": Case("WhisperConfig", WHISPER, WHISPER_PARTS, inputs=OF_SOUND),
    "llama": rotated("LlamaConfig", LLAMA),
    "llama, biases": rotated("LlamaConfig", LLAMA | {"attention_bias": True}),
    "llama, scaled turns": rotated("LlamaConfig", LLAMA, rope=LLAMA3_TURNS),
    "llama, linear": rotated("LlamaConfig", LLAMA, rope=TURNS | {"rope_type": "linear"}),
    "llama, yarn": rotated("LlamaConfig", LLAMA, rope=YARN_TURNS),
    "mistral": rotated("MistralConfig", LLAMA | {"sliding_window": 4}, WINDOWS),
    "qwen2": rotated("Qwen2Config", QWEN2),
    "qwen3": rotated("Qwen3Config", LLAMA),
    "gemma": rotated("GemmaConfig", LLAMA | {"num_key_value_heads": 1}),
    "gemma2": rotated("Gemma2Config", GEMMA2, SELF_OF_2),
    "gemma3": rotated("Gemma3TextConfig", GEMMA3, SELF_OF_2),
    "deepseek": rotated("DeepseekV3Config", LATENT),
    "deepseek, halves": rotated("DeepseekV3Config", HALVES),
    "deepseek, yarn": rotated("DeepseekV3Config", LATENT_YARN),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PLAIN = {name: case for name, case in CASES.items() if not case.positions}


@dataclass
class Seen:
    """One call of an attention module: states of receivers and senders, and the update."""

    x_dst: Tensor
    x_src: Tensor
    update: Tensor


def watch(case: Case, model: nn.Module, dtype: torch.dtype) -> dict[tuple[str, int], Seen]:
    """The model's forward pass, seen from each of its attention modules."""
    calls: dict[tuple[str, int], dict[str, Tensor]] = {}
    for part, (path, _) in case.parts.items():
        for layer in range(2):
            call = calls[part, layer] = {}
            module = model.get_submodule(path.format(layer))

            def before(module, args, kwargs, call=call):
                given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
                given = {**given.get("kwargs", {}), **given}
                call["x_dst"] = given["hidden_states"]
                others = (given.get(name) for name in ("key_value_states", "encoder_hidden_states"))
                call["x_src"] = next((other for other in others if other is not None), given["hidden_states"])

            def after(module, args, output, call=call):
                call["update"] = output[0] if isinstance(output, tuple) else output

            module.register_forward_pre_hook(before, with_kwargs=True)
            module.get_submodule(case.output).register_forward_hook(after)
    with torch.no_grad():
        model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in case.inputs.items()})
    return {place: Seen(**call) for place, call in calls.items()}


def plain_attention(module, query, key, value, mask, scaling, softcap=None, position_bias=None, **others):
    """Attention in the dtype it is given, softmax included, with whatever the families ask of it."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)

    logits = query @ key.mT * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if position_bias is None else logits + position_bias
    logits = logits if mask is None else logits + mask
    return (torch.softmax(logits, dim=-1) @ value).transpose(1, 2), None


transformers.AttentionInterface.register("plain_float64", plain_attention)
transformers.AttentionMaskInterface.register("plain_float64", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class ExactTurns(nn.Module):
    """Angles in float64."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.turns = {}
        parameters = rotary.config.rope_parameters
        nested = parameters if "rope_type" not in parameters else {None: parameters}
        for kind, given in nested.items():
            prefix = f"{kind}_" if kind else ""
            frequencies = getattr(rotary, f"{prefix}inv_freq").double()
            if given["rope_type"] == "default":
                powers = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
                frequencies = given["rope_theta"] ** -powers
            self.turns[kind] = frequencies, getattr(rotary, f"{prefix}attention_scaling")

    def forward(self, x, position_ids, layer_type=None):
        frequencies, stretch = self.turns[layer_type]
        angles = (position_ids.unsqueeze(-1).double() * frequencies).repeat(1, 1, 2)
        return angles.cos() * stretch, angles.sin() * stretch


class ExactNorm(nn.Module):
    """RMSNorm without a detour through float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        gemma = "Gemma" in type(norm).__name__
        self.weight, self.eps = norm.weight + gemma, norm.eps if gemma else norm.variance_epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def made_exact(model: nn.Module) -> nn.Module:
    """The same model with attention, attention norms and angles in float64 throughout."""
    model.config._attn_implementation = "plain_float64"
    for module in list(model.modules()):
        if hasattr(module, "config") and not isinstance(module, ExactTurns):
            module.config._attn_implementation = "plain_float64"
        for name in ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"):
            if getattr(module, name, None) is not None:
                setattr(module, name, ExactNorm(getattr(module, name)))
    if hasattr(model, "rotary_emb"):
        model.rotary_emb = ExactTurns(model.rotary_emb)
    return model


def places(case: Case) -> list[tuple[str, int]]:
    return [(part, layer) for part in case.parts for layer in range(2)]


def worst(case: Case, dtype: torch.dtype, change: Callable[[Any], Any] = lambda layer: layer) -> float:
    """The largest error over all parts and layers, relative to the largest update."""
    model, found = case.made(dtype), []
    layers = {place: change(foreign.layer_of(model, place[1], place[0])) for place in places(case)}
    seen = watch(case, made_exact(model) if dtype == torch.float64 else model, dtype)
    for (part, number), layer in layers.items():
        one = seen[part, number]
        graph = case.parts[part][1](number, one.x_dst.shape[1], one.x_src.shape[1])
        with torch.no_grad():
            found.append(error(layer((one.x_src, one.x_dst), graph), one.update))
    return max(found)


@each_case
def test_equals_the_models_arithmetic_in_float64(case):
    assert worst(case, torch.float64) <= EXACT


def test_every_family_has_a_case():
    """Each row of the table is run by some case above (torch's own below)."""
    seen = {"MultiheadAttention"}
    for case in CASES.values():
        seen |= {type(module).__name__ for module in case.made(torch.float32).modules()}
    assert set(FAMILIES) <= seen


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_factored_and_merged_forms_follow(case):
    """Without rotary positions all three forms hold every family, its scale folded in."""
    for form in (FactoredHeads.of, MergedHeads.of, lambda heads: MergedHeads.of(heads, side="sender")):

        def reformed(layer, form=form):
            return MessagePassingAttention(form(layer.heads), layer.score_mod, backend="auto")

        assert worst(case, torch.float64, reformed) <= EXACT


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "qwen3", "deepseek"])
def test_weights_are_copies(name):
    """Neither side sees the other's training: no memory is shared, gradients stay where they belong."""
    case = CASES[name]
    model = case.made(torch.float32)
    part = next(iter(case.parts))
    layer = foreign.layer_of(model, 0, part)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    assert not own & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())
    x, graph = states(TOKENS), patterns.causal(TOKENS)
    before = layer(x, graph)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(layer(x, graph), before)
    before.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_score_mod_of_gemma2_is_its_softcap():
    model = CASES["gemma2"].made(torch.float32)
    assert foreign.score_mod_of(model, 0) == ga.score_mods.softcap(2.0)
    model.layers[0].self_attn.attn_logit_softcapping = None
    assert foreign.score_mod_of(model, 0) is None


def test_a_layer_is_found_in_whatever_holds_it():
    """The model, a model around it, the layer's attention itself."""
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    wanted = lm.model.layers[1].self_attn.v_proj.weight
    alone = lm.model.layers[1]
    for model, layer in ((nn.Sequential(lm), 1), (lm.model.layers, 1), (alone, None), (alone.self_attn, 0)):
        heads = foreign.heads_of(model, layer)
        assert torch.equal(heads.W_V.mT.flatten(0, 1), wanted)


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


def test_weights_as_they_act():
    """A parametrised projection counts by its effective weight."""
    model = CASES["llama"].made(torch.float32)
    attention = model.layers[0].self_attn

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(attention.q_proj, "weight", Doubled())
    heads = foreign.heads_of(model, 0)
    assert torch.equal(heads.W_Q[0], 2 * attention.q_proj.parametrizations.weight.original[:6].T)
    assert heads.W_Q.is_leaf


class Adapted(nn.Linear):
    """Does more than its weight says."""

    def forward(self, x):
        return super().forward(x) + 1


class LlamaAttention(nn.Module):
    """Not the one of transformers."""


def with_changed(name: str, path: str, change: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    def made():
        model = CASES[name].made(torch.float32)
        change(model.get_submodule(path))
        return model

    return made


adapted = with_changed("llama", "layers.0.self_attn", lambda x: setattr(x, "k_proj", Adapted(32, 12)))
older = with_changed("opt", "decoder.layers.0.self_attn", lambda x: delattr(x, "out_proj"))


def dynamic(kind: str) -> Callable[[], nn.Module]:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    return with_changed("llama", "", lambda x: setattr(x.config, "rope_parameters", rope))


def made(name: str) -> Callable[[], nn.Module]:
    return lambda: CASES[name].made(torch.float32)


def gpt_neo() -> nn.Module:
    few = sizes("hidden_size=16 num_layers=1 num_heads=2 vocab_size=50")
    return transformers.GPTNeoModel(transformers.GPTNeoConfig(**few, attention_types=[[["global"], 1]]))


REFUSED = [
    (lambda: "gpt2", (0,), TypeError, r"model must be a Module, got"),
    (gpt_neo, (0,), NotImplementedError, r"GPTNeoModel is .* of the kind .* Known: torch.*, GPT-2, OPT,"),
    (lambda: nn.Linear(2, 2), (), NotImplementedError, "Linear is of no known family, which seems to have"),
    (LlamaAttention, (), NotImplementedError, "LlamaAttention is of no known family"),
    (made("gpt2"), (), ValueError, "give layer, one of \\[0, 1\\]: the model has 2 layers"),
    (made("gpt2"), (2,), IndexError, "layer must be one of \\[0, 1\\], got 2"),
    (made("gpt2"), (-1,), IndexError, "layer must be one of \\[0, 1\\], got -1"),
    (made("gpt2"), (1.0,), TypeError, r"layer must be an integer, got 1\.0"),
    (made("gpt2"), (0, "middle"), ValueError, "part must be one of 'encoder', 'decoder', 'self', 'cross',"),
    (made("gpt2"), (0, "cross"), ValueError, "part must be one of 'self', got 'cross'"),
    (made("t5"), (0,), ValueError, "attends in several parts: give part, one of encoder, decoder,"),
    (lambda: made("gpt2")().h[0].attn, (1,), ValueError, "model is one GPT2Attention: give it without layer"),
    (lambda: nn.ModuleDict({"a": made("gpt2")(), "b": made("llama")()}), (0,), ValueError, r"ModuleDict has"),
    (lambda: nn.ModuleList([made("gpt2")()]), (0,), ValueError, "layer 0 holds 2 attention modules: give"),
    (adapted, (0,), ValueError, r"k_proj of LlamaAttention must be a plain nn\.Linear, got .*Adapted; merge"),
    (older, (0,), NotImplementedError, r"OPT: transformers\..*OPTAttention is built otherwise than"),
    (dynamic("dynamic"), (0,), NotImplementedError, "rope_type 'dynamic' turns otherwise at another length;"),
    (dynamic("longrope"), (0,), NotImplementedError, "rope_type 'longrope' turns otherwise"),
    (lambda: made("llama, yarn")().layers[0].self_attn, (), ValueError, "rope_type 'yarn' keeps its"),
]


@pytest.mark.parametrize(("model", "arguments", "error", "match"), REFUSED)
def test_what_is_refused(model, arguments, error, match):
    with pytest.raises(error, match=match):
        foreign.heads_of(model(), *arguments)


def test_a_lonely_t5_layer_has_lost_its_bias():
    model = CASES["t5"].made(torch.float32)
    with pytest.raises(ValueError, match="T5 keeps its relative position bias in the first layer alone"):
        foreign.score_mod_of(model.encoder.block[1].layer[0].SelfAttention)
    assert foreign.score_mod_of(model.decoder.block[1].layer[1].EncDecAttention) is None
    assert foreign.score_mod_of(model.encoder.block[0].layer[0].SelfAttention).table.shape == (4, 13)
