"""Where other models store their attention weights: one row for each class of attention module.

A row says how heads are made of a module's attributes, and what acts on a logit between scale and softmax. A
scale other than ``1 / sqrt(head_dim)`` (T5 has none, Gemma 2 its own) goes into ``W_Q``, ``b_Q`` or the norm.
"""

import math
from collections.abc import Callable, Iterable, Mapping
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

# kinds of rotary scaling whose frequencies do not depend on the length
LENGTH_FREE = ("linear", "llama3", "yarn")


class Found(NamedTuple):
    """An attention module, the rotary embedding around it, and the first such module of its stack."""

    attention: Any
    rotary_embedding: Any
    first: Any


@dataclass(frozen=True)
class Family:
    name: str
    heads: Callable[[Found], StandardHeads | LatentHeads]
    score_mod: Callable[[Found], ScoreMod | None] = lambda found: None


def family_of(module: nn.Module) -> Family | None:
    """The row of an attention module of torch or transformers itself, None for any other module."""
    if isinstance(module, nn.MultiheadAttention):
        return FAMILIES["MultiheadAttention"]
    kind = type(module)
    return FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


# the weight [out, in] and the bias of ``x W^T + b``
_Projection = tuple[Tensor, Tensor | None]


def _separate(
    found: Found,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    sizes: tuple[str, str] = ("head_dim", "scaling"),
    turned: bool = False,
    norm_offset: float | None = None,
) -> StandardHeads:
    """By the names of its parts; q_norm and k_norm multiply by ``norm_offset`` plus their weight."""
    attention = found.attention
    projections = tuple(_projection(attention, name) for name in names)
    head_dim, scale = attrgetter(*sizes)(attention)
    rotary, stretch = _rotary(found) if turned else (None, 1.0)
    if norm_offset is None:
        return _heads(projections, head_dim, scale * stretch, rotary)
    heads = _heads(projections, head_dim, head_dim**-0.5, rotary)
    heads.q_norm = _norm(attention.q_norm, norm_offset, scale * stretch * math.sqrt(head_dim))
    heads.k_norm = _norm(attention.k_norm, norm_offset, 1.0)
    return heads


def _gpt2(found: Found) -> StandardHeads:
    attention = found.attention
    packed = _projection(attention, "c_attn")
    if attention.is_cross_attention:
        q, (k, v) = _projection(attention, "q_attn"), _split(packed, 2)
    else:
        q, k, v = _split(packed, 3)
    return _heads((q, k, v, _projection(attention, "c_proj")), attention.head_dim, attention.scaling, None)


def _heads(projections: Iterable[Any], head_dim: int, scale: float, rotary: Rotary | None) -> StandardHeads:
    """Heads of copies, with the part of ``scale`` that is not ``1 / sqrt(head_dim)`` in the queries."""
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V), (W_O, b_O) = projections
    W_Q, b_Q = _times(W_Q, scale * math.sqrt(head_dim)), _times(b_Q, scale * math.sqrt(head_dim))
    sizes = {"num_heads": len(W_Q) // head_dim, "num_kv_heads": len(W_K) // head_dim}
    tensors = W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O
    return StandardHeads.from_arrays(*tensors, layout="column", rotary=rotary, **sizes)


def _projection(attention: Any, path: str) -> _Projection:
    """The weight and bias of a plain linear map; ValueError for one that does more than its weight says."""
    layer = attrgetter(path)(attention)
    kind = type(layer)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return layer.weight.T, layer.bias
    if not isinstance(layer, nn.Linear) or kind.forward is not nn.Linear.forward:
        got = f"{kind.__module__}.{kind.__name__}; merge adapters into the weights or dequantise them first"
        raise ValueError(f"{path} of {type(attention).__name__} must be a plain nn.Linear, got {got}")
    return layer.weight, layer.bias


def _split(packed: _Projection, parts: int) -> list[_Projection]:
    weight, bias = packed
    biases = [None] * parts if bias is None else bias.chunk(parts)
    return list(zip(weight.chunk(parts), biases, strict=True))


def _times(tensor: Any, factor: float) -> Any:
    """The same tensor where the factor is 1, so that weights come over bit by bit."""
    return tensor if tensor is None or math.isclose(factor, 1.0, rel_tol=1e-12) else tensor * factor


def _norm(norm: Any, offset: float, factor: float) -> nn.RMSNorm:
    weight = (norm.weight + offset) * factor
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    made = nn.RMSNorm(len(weight), eps=eps, device="meta")
    made.weight = nn.Parameter(weight.clone())
    return made


def _rotary(found: Found, interleaved: bool = False) -> tuple[Rotary, float]:
    """The rotation, and the factor that its stretching puts on a logit (YaRN stretches q and k)."""
    config, prefix = found.attention.config, ""
    given: Mapping[str, Any] = config.rope_parameters
    # Gemma 3: other frequencies for local than for global layers
    if all(isinstance(value, Mapping) for value in given.values()):
        layer_type = config.layer_types[found.attention.layer_idx]
        given, prefix = given[layer_type], f"{layer_type}_"
    kind = given.get("rope_type", "default")
    if kind == "default":
        return Rotary(float(given["rope_theta"]), interleaved), 1.0
    if kind not in LENGTH_FREE:
        raise NotImplementedError(f"rope_type {kind!r} depends on the length; known: default, {LENGTH_FREE}")
    embedding = found.rotary_embedding
    if embedding is None:
        place = "outside the attention module: give the whole model and layer"
        raise ValueError(f"rope_type {kind!r} keeps its frequencies {place}")
    frequencies = tuple(getattr(embedding, f"{prefix}inv_freq").double().tolist())
    stretch = float(getattr(embedding, f"{prefix}attention_scaling")) ** 2
    return Rotary(interleaved=interleaved, frequencies=frequencies), stretch


def _t5_bias(found: Found) -> ScoreMod | None:
    """The bias of each distance: of the first layer of a list, and None in cross-attention."""
    attention, first = found.attention, found.first
    if attention.is_decoder and not attention.is_causal:
        return None
    if not first.has_relative_attention_bias:
        place = "in the first layer alone: give the whole model and layer"
        raise ValueError(f"T5 keeps its relative position bias {place}")
    # farther distances share the bucket of this one
    reach = int(first.relative_attention_max_distance)
    bias = first.compute_bias(reach + 1, reach + 1)[0].detach()
    # senders after the receiver, the farthest first; senders before it
    ahead, behind = bias[:, 0].flip(-1), bias[:, :, 0]
    return relative_bias(torch.cat([ahead, behind[:, 1:]], dim=-1))


def _softcap(found: Found) -> ScoreMod | None:
    cap = found.attention.attn_logit_softcapping
    return None if cap is None else softcap(float(cap))


def _latent(found: Found) -> LatentHeads:
    attention = found.attention
    rotary, stretch = _rotary(found, bool(attention.config.rope_interleave))
    names = "hidden_size num_heads qk_nope_head_dim qk_rope_head_dim kv_lora_rank v_head_dim q_lora_rank"
    sizes = attrgetter(*names.split())(attention)
    _, num_heads, content_dim, rotary_dim, latent_dim, value_dim, query_dim = sizes
    W_DQ, b_DQ = (None, None) if query_dim is None else _projection(attention, "q_a_proj")
    up, _ = _projection(attention, "q_proj" if query_dim is None else "q_b_proj")
    W_UQ, W_QR = torch.split(_by_head(up, num_heads), [content_dim, rotary_dim], dim=-1)
    down, b_down = _projection(attention, "kv_a_proj_with_mqa")
    W_DKV, W_KR = torch.split(down.T, [latent_dim, rotary_dim], dim=-1)
    b_DKV, b_KR = (None, None) if b_down is None else torch.split(b_down, [latent_dim, rotary_dim])
    up, _ = _projection(attention, "kv_b_proj")
    W_UK, W_UV = torch.split(_by_head(up, num_heads), [content_dim, value_dim], dim=-1)
    W_O, b_O = _projection(attention, "o_proj")
    factor = attention.scaling * math.sqrt(attention.qk_head_dim)
    state = {"W_UQ": _times(W_UQ, factor), "W_QR": _times(W_QR, factor * stretch)}
    state |= {"W_DQ": None if W_DQ is None else W_DQ.T, "b_DQ": b_DQ, "b_DKV": b_DKV, "b_KR": b_KR}
    state |= {"W_DKV": W_DKV, "W_KR": W_KR, "W_UK": W_UK, "W_UV": W_UV, "b_O": b_O}
    state |= {
        "W_O": W_O.T.reshape(num_heads, value_dim, -1),
        "kv_norm.weight": attention.kv_a_layernorm.weight,
    }
    state |= {} if query_dim is None else {"q_norm.weight": attention.q_a_layernorm.weight}
    eps = attention.kv_a_layernorm.variance_epsilon
    options: dict[str, Any] = {"bias": b_O is not None, "rotary": rotary, "eps": eps}
    # no random numbers are drawn
    with torch.device("meta"):
        heads = LatentHeads(*sizes, **options)
    layout = torch.contiguous_format
    copies = {name: x.detach().clone(memory_format=layout) for name, x in state.items() if x is not None}
    heads.load_state_dict(copies, assign=True)
    return heads


def _by_head(weight: Tensor, num_heads: int) -> Tensor:
    """[heads * out, in] -> [heads, in, out]."""
    return weight.reshape(num_heads, -1, weight.shape[1]).mT


_from_mha = StandardHeads.from_mha
_BERT = ("self.query", "self.key", "self.value", "output.dense")
_bert = partial(_separate, names=_BERT, sizes=("self.attention_head_size", "self.scaling"))
_t5 = partial(_separate, names=("q", "k", "v", "o"), sizes=("key_value_proj_dim", "scaling"))
_llama = partial(_separate, turned=True)
_opt = partial(_separate, names=("q_proj", "k_proj", "v_proj", "out_proj"))

FAMILIES: Mapping[str, Family] = {
    "MultiheadAttention": Family("torch.nn.MultiheadAttention", lambda x: _from_mha(x.attention)),
    "GPT2Attention": Family("GPT-2", _gpt2),
    "OPTAttention": Family("OPT", _opt),
    "BertAttention": Family("BERT", _bert),
    "ViTAttention": Family("ViT", _separate),
    "T5Attention": Family("T5", _t5, _t5_bias),
    "WhisperAttention": Family("Whisper", _opt),
    "LlamaAttention": Family("Llama", _llama),
    "MistralAttention": Family("Mistral", _llama),
    "Qwen2Attention": Family("Qwen2", _llama),
    "Qwen3Attention": Family("Qwen3", partial(_llama, norm_offset=0.0)),
    "GemmaAttention": Family("Gemma", _llama),
    "Gemma2Attention": Family("Gemma 2", _llama, _softcap),
    "Gemma3Attention": Family("Gemma 3", partial(_llama, norm_offset=1.0)),
    "DeepseekV3Attention": Family("DeepSeek-V3", _latent),
}
