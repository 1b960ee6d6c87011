"""Copy attention layers from torch and transformers models, to run them on a graph.

:func:`heads_of` copies the parameters of a layer into heads. :func:`score_mod_of` returns the
function that changes its logits (T5's relative position bias, Gemma 2's softcap). :func:`layer_of`
combines them into a layer. On the graph of the model's mask, the layer computes the model's
attention, including the output projection. This module does not import transformers.
"""

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention.backends import Backend
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.standard import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model._foreign_families import FAMILIES, AttentionModules, Family, find_family
from gnn_attention.score_mods import ScoreMod

__all__ = ["heads_of", "layer_of", "score_mod_of"]

AnyHeads = StandardHeads | LatentHeads
CROSS_ATTENTION_NAMES = ("EncDecAttention", "crossattention", "encoder_attn", "multihead_attn")


def heads_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> AnyHeads:
    """Copy the attention parameters of one layer into heads.

    The heads are :class:`LatentHeads` for DeepSeek-V3 and :class:`StandardHeads` otherwise, with
    the rotary positions, norms, biases and key/value heads of the model. W_Q and b_Q, or the query
    norm, absorb a scale other than ``1 / sqrt(head_dim)``. Use the heads with the score_mod of
    :func:`score_mod_of`.

    Args:
        model: a model that contains a known kind of attention, or such an attention module itself.
        layer: index among the attention modules of the part, needed if there are several.
        part: "encoder", "decoder", "cross", or "self" in other models. None selects the only one but "cross".

    Raises:
        NotImplementedError: the family is unknown, or its rotary frequencies depend on the sequence length.
        ValueError, IndexError, TypeError: there is no such ``layer`` or ``part``, or a projection is
            not a plain linear map (adapters, quantized weights).

    Sources: the attention modules of transformers 5, ``models/*/modeling_*.py``; S2.1 of
    docs/sources.md.

    >>> heads_of(nn.MultiheadAttention(8, num_heads=2))
    StandardHeads(8, num_heads=2, head_dim=4)
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=3)
    >>> torch.equal(heads_of(encoder, layer=2).b_V.flatten(), encoder.layers[2].self_attn.in_proj_bias[16:])
    True
    """
    family, modules = _find_attention(model, layer, part)
    with torch.no_grad():
        return family.copy_heads(modules)


def score_mod_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> ScoreMod | None:
    """Return the score_mod that a layer applies to its logits, or None, as for most families.

    For T5 it is a ``relative_bias`` with the first layer's biases, but None in cross-attention.
    For Gemma 2 it is a ``softcap``. Arguments and errors are those of :func:`heads_of`.
    """
    family, modules = _find_attention(model, layer, part)
    with torch.no_grad():
        return family.make_score_mod(modules)


def layer_of(
    model: nn.Module,
    layer: int | None = None,
    part: str | None = None,
    backend: str | Backend | None = "auto",
) -> MessagePassingAttention:
    """Make an attention layer from :func:`heads_of` and :func:`score_mod_of`, without dropout.

    On the graph of the model's mask, its update equals the attention output of the model. In
    cross-attention its input is ``(x_src, x_dst)``. Arguments and errors are those of
    :func:`heads_of`.

    >>> layer_of(nn.MultiheadAttention(8, num_heads=2))
    MessagePassingAttention(standard, heads=2, head_dim=4, backend='auto')
    """
    heads = heads_of(model, layer, part)
    return MessagePassingAttention(heads, score_mod_of(model, layer, part), backend=backend)


def _find_attention(model: nn.Module, layer: int | None, part: str | None) -> tuple[Family, AttentionModules]:
    checks.instance("model", model, nn.Module)
    all_modules = dict(model.named_modules())
    families = {name: family for name, module in all_modules.items() if (family := find_family(module))}
    if not families:
        class_names = {type(module).__name__ for module in all_modules.values()}
        attention_names = [name for name in sorted(class_names) if "attention" in name.lower()]
        raise NotImplementedError(
            f"{type(model).__name__} has no attention module of a known family; it has "
            f"{', '.join(attention_names) or 'none'}. Known: {', '.join(x.name for x in FAMILIES.values())}. "
            "For others use StandardHeads.from_arrays"
        )
    parts = list(dict.fromkeys(map(_get_part, families)))
    if part is None:
        part, *other_parts = [name for name in parts if name != "cross"] or parts
        if other_parts:
            raise ValueError(f"the model has several parts: pass part=..., one of {', '.join(parts)}")
    checks.choice("part", part, parts)
    module_names = [name for name in families if _get_part(name) == part]
    if layer is None and len(module_names) > 1:
        raise ValueError(f"pass layer=...: the model has {len(module_names)} layers with attention")
    name = module_names[checks.index("layer", layer or 0, len(module_names))]
    # The rotary embedding is that of the innermost enclosing module that has one.
    rotary_embedding = None
    outer_name = name
    while outer_name and rotary_embedding is None:
        outer_name = outer_name.rpartition(".")[0]
        rotary_embedding = getattr(all_modules[outer_name], "rotary_emb", None)
    return families[name], AttentionModules(all_modules[name], rotary_embedding, all_modules[module_names[0]])


def _get_part(module_name: str) -> str:
    path = module_name.split(".")
    if path[-1] in CROSS_ATTENTION_NAMES:
        return "cross"
    return next((part for part in path if part in ("encoder", "decoder")), "self")
