"""A table of where other models store attention parameters, with a row for each attention class.

The functions of a row copy the heads of a module and make its score_mod. If the module's scale is
not ``1 / sqrt(head_dim)``, as in T5 and Gemma 2, the ratio multiplies W_Q and b_Q, or the norm of
the queries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention._support.shapes import Tensor
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.standard import StandardHeads
from gnn_attention.rotary import Rotary
from gnn_attention.score_mods import ScoreMod, relative_bias, softcap

# With these types of rotary scaling, the frequencies do not depend on the sequence length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class AttentionModules(NamedTuple):
    """An attention module, the rotary embedding that it uses, and the first attention of its stack."""

    attention: Any
    rotary_embedding: Any
    first_attention: Any


@dataclass(frozen=True)
class Family:
    name: str
    copy_heads: Callable[[AttentionModules], StandardHeads | LatentHeads]
    make_score_mod: Callable[[AttentionModules], ScoreMod | None] = lambda modules: None


def find_family(module: nn.Module) -> Family | None:
    """Return the row of an attention module of torch or transformers, else None."""
    if isinstance(module, nn.MultiheadAttention):
        return FAMILIES["MultiheadAttention"]
    cls = type(module)
    return FAMILIES.get(cls.__name__) if cls.__module__.startswith("transformers.models.") else None


# A projection ``x W^T + b`` has a matrix W [out, in] and a bias b, which may be None.
_Projection = tuple[Tensor, Tensor | None]


def _copy_heads(
    modules: AttentionModules,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    sizes: tuple[str, str] = ("head_dim", "scaling"),
    has_rotary: bool = False,
    norm_offset: float | None = None,
) -> StandardHeads:
    """Copy heads from four projections; a norm multiplies by ``norm_offset`` plus its parameter."""
    attention = modules.attention
    projections = [_read_projection(attention, name) for name in names]
    head_dim, scale = attrgetter(*sizes)(attention)
    rotary, logit_factor = _make_rotary(modules) if has_rotary else (None, 1.0)
    if norm_offset is None:
        return _make_heads(projections, head_dim, scale * logit_factor, rotary)
    heads = _make_heads(projections, head_dim, head_dim**-0.5, rotary)
    heads.q_norm = _copy_norm(attention.q_norm, norm_offset, scale * logit_factor * math.sqrt(head_dim))
    heads.k_norm = _copy_norm(attention.k_norm, norm_offset, 1.0)
    return heads


def _copy_gpt2_heads(modules: AttentionModules) -> StandardHeads:
    attention = modules.attention
    c_attn = _read_projection(attention, "c_attn")
    if attention.is_cross_attention:
        q, (k, v) = _read_projection(attention, "q_attn"), _split_projection(c_attn, 2)
    else:
        q, k, v = _split_projection(c_attn, 3)
    projections = [q, k, v, _read_projection(attention, "c_proj")]
    return _make_heads(projections, attention.head_dim, attention.scaling, None)


def _make_heads(projections: list[Any], head_dim: int, scale: float, rotary: Rotary | None) -> StandardHeads:
    """Copy four projections into heads, with W_Q multiplied so that logits have this ``scale``."""
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V), (W_O, b_O) = projections
    factor = scale * math.sqrt(head_dim)
    biases = {"b_Q": _multiply(b_Q, factor), "b_K": b_K, "b_V": b_V, "b_O": b_O}
    sizes = {"num_heads": len(W_Q) // head_dim, "num_kv_heads": len(W_K) // head_dim}
    options: dict[str, Any] = {"layout": "column", "rotary": rotary, **sizes}
    return StandardHeads.from_arrays(_multiply(W_Q, factor), W_K, W_V, W_O, **biases, **options)


def _read_projection(attention: Any, path: str) -> _Projection:
    """Return W and b of a linear module; ValueError for a module that computes anything else."""
    module = attrgetter(path)(attention)
    cls = type(module)
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return module.weight.T, module.bias
    if not isinstance(module, nn.Linear) or cls.forward is not nn.Linear.forward:
        raise ValueError(
            f"{path} of {type(attention).__name__} must be a plain nn.Linear, got "
            f"{cls.__module__}.{cls.__name__}; merge adapters into the weights or dequantize them first"
        )
    return module.weight, module.bias


def _split_projection(projection: _Projection, num_parts: int) -> list[_Projection]:
    weight, bias = projection
    biases = [None] * num_parts if bias is None else bias.chunk(num_parts)
    return list(zip(weight.chunk(num_parts), biases, strict=True))


def _multiply(tensor: Any, factor: float) -> Any:
    """Multiply by a factor; a factor that is 1 up to rounding changes no bit."""
    return tensor if tensor is None or math.isclose(factor, 1.0, rel_tol=1e-12) else tensor * factor


def _copy_norm(norm: Any, offset: float, factor: float) -> nn.RMSNorm:
    weight = (norm.weight + offset) * factor
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    copy = nn.RMSNorm(len(weight), eps=eps, device="meta")
    copy.weight = nn.Parameter(weight.clone())
    return copy


def _make_rotary(modules: AttentionModules, interleaved: bool = False) -> tuple[Rotary, float]:
    """Return the rotation, and the factor by which YaRN's scaling of q and k multiplies logits."""
    config = modules.attention.config
    prefix = ""
    parameters: Mapping[str, Any] = config.rope_parameters
    # The local and the global layers of Gemma 3 have different frequencies.
    if all(isinstance(value, Mapping) for value in parameters.values()):
        layer_type = config.layer_types[modules.attention.layer_idx]
        parameters, prefix = parameters[layer_type], f"{layer_type}_"
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return Rotary(float(parameters["rope_theta"]), interleaved), 1.0
    if kind not in ROPE_TYPES:
        raise NotImplementedError(f"rope_type {kind!r} depends on the length; known: {', '.join(ROPE_TYPES)}")
    rotary_embedding = modules.rotary_embedding
    if rotary_embedding is None:
        raise ValueError(
            f"rope_type {kind!r} keeps its frequencies outside the module: pass the whole model and layer=..."
        )
    frequencies = tuple(getattr(rotary_embedding, f"{prefix}inv_freq").double().tolist())
    logit_factor = float(getattr(rotary_embedding, f"{prefix}attention_scaling")) ** 2
    return Rotary(interleaved=interleaved, frequencies=frequencies), logit_factor


def _make_t5_bias(modules: AttentionModules) -> ScoreMod | None:
    """Return the first layer's bias for each distance, or None for cross-attention."""
    attention, first_attention = modules.attention, modules.first_attention
    if attention.is_decoder and not attention.is_causal:
        return None
    if not first_attention.has_relative_attention_bias:
        raise ValueError("T5 keeps its relative position bias in layer 0: pass the whole model and layer=...")
    # All distances of at least `max_distance` share one bias.
    max_distance = int(first_attention.relative_attention_max_distance)
    bias = first_attention.compute_bias(max_distance + 1, max_distance + 1)[0].detach()
    # The distances ascend from the farthest sender after the receiver to the farthest before it.
    bias_after, bias_before = bias[:, 0].flip(-1), bias[:, :, 0]
    return relative_bias(torch.cat([bias_after, bias_before[:, 1:]], dim=-1))


def _make_softcap(modules: AttentionModules) -> ScoreMod | None:
    cap = modules.attention.attn_logit_softcapping
    return None if cap is None else softcap(float(cap))


def _copy_latent_heads(modules: AttentionModules) -> LatentHeads:
    attention = modules.attention
    rotary, logit_factor = _make_rotary(modules, bool(attention.config.rope_interleave))
    size_names = "hidden_size num_heads qk_nope_head_dim qk_rope_head_dim kv_lora_rank v_head_dim q_lora_rank"
    sizes = attrgetter(*size_names.split())(attention)
    _, num_heads, content_dim, rotary_dim, latent_dim, value_dim, query_dim = sizes
    W_DQ, b_DQ = (None, None) if query_dim is None else _read_projection(attention, "q_a_proj")
    q_up, _ = _read_projection(attention, "q_proj" if query_dim is None else "q_b_proj")
    W_UQ, W_QR = torch.split(_split_by_head(q_up, num_heads), [content_dim, rotary_dim], dim=-1)
    kv_down, b_down = _read_projection(attention, "kv_a_proj_with_mqa")
    W_DKV, W_KR = torch.split(kv_down.T, [latent_dim, rotary_dim], dim=-1)
    b_DKV, b_KR = (None, None) if b_down is None else torch.split(b_down, [latent_dim, rotary_dim])
    kv_up, _ = _read_projection(attention, "kv_b_proj")
    W_UK, W_UV = torch.split(_split_by_head(kv_up, num_heads), [content_dim, value_dim], dim=-1)
    W_O, b_O = _read_projection(attention, "o_proj")
    factor = attention.scaling * math.sqrt(attention.qk_head_dim)
    state = {"W_UQ": _multiply(W_UQ, factor), "W_QR": _multiply(W_QR, factor * logit_factor)}
    state |= {"W_DQ": None if W_DQ is None else W_DQ.T, "b_DQ": b_DQ, "b_DKV": b_DKV, "b_KR": b_KR}
    state |= {"W_DKV": W_DKV, "W_KR": W_KR, "W_UK": W_UK, "W_UV": W_UV, "b_O": b_O}
    norm = attention.kv_a_layernorm
    state |= {"W_O": W_O.T.reshape(num_heads, value_dim, -1), "kv_norm.weight": norm.weight}
    if query_dim is not None:
        state["q_norm.weight"] = attention.q_a_layernorm.weight
    options: dict[str, Any] = {"bias": b_O is not None, "rotary": rotary, "eps": norm.variance_epsilon}
    # On the meta device the constructor draws no random numbers.
    with torch.device("meta"):
        heads = LatentHeads(*sizes, **options)
    contiguous = torch.contiguous_format
    state = {name: x.detach().clone(memory_format=contiguous) for name, x in state.items() if x is not None}
    heads.load_state_dict(state, assign=True)
    return heads


def _split_by_head(weight: Tensor, num_heads: int) -> Tensor:
    """Convert [heads * out, in] to [heads, in, out]."""
    return weight.reshape(num_heads, -1, weight.shape[1]).mT


_BERT_NAMES = ("self.query", "self.key", "self.value", "output.dense")
_copy_bert_heads = partial(_copy_heads, names=_BERT_NAMES, sizes=("self.attention_head_size", "self.scaling"))
_copy_t5_heads = partial(_copy_heads, names=("q", "k", "v", "o"), sizes=("key_value_proj_dim", "scaling"))
_copy_llama_heads = partial(_copy_heads, has_rotary=True)
_copy_opt_heads = partial(_copy_heads, names=("q_proj", "k_proj", "v_proj", "out_proj"))

FAMILIES: Mapping[str, Family] = {
    "MultiheadAttention": Family(
        "torch.nn.MultiheadAttention", lambda modules: StandardHeads.from_mha(modules.attention)
    ),
    "GPT2Attention": Family("GPT-2", _copy_gpt2_heads),
    "OPTAttention": Family("OPT", _copy_opt_heads),
    "BertAttention": Family("BERT", _copy_bert_heads),
    "ViTAttention": Family("ViT", _copy_heads),
    "T5Attention": Family("T5", _copy_t5_heads, _make_t5_bias),
    "WhisperAttention": Family("Whisper", _copy_opt_heads),
    "LlamaAttention": Family("Llama", _copy_llama_heads),
    "MistralAttention": Family("Mistral", _copy_llama_heads),
    "Qwen2Attention": Family("Qwen2", _copy_llama_heads),
    "Qwen3Attention": Family("Qwen3", partial(_copy_llama_heads, norm_offset=0.0)),
    "GemmaAttention": Family("Gemma", _copy_llama_heads),
    "Gemma2Attention": Family("Gemma 2", _copy_llama_heads, _make_softcap),
    "Gemma3Attention": Family("Gemma 3", partial(_copy_llama_heads, norm_offset=1.0)),
    "DeepseekV3Attention": Family("DeepSeek-V3", _copy_latent_heads),
}
