"""Attention layers of other models as heads on a graph: torch's own attention and families of transformers.

:func:`heads_of` makes heads of a layer's weights; :func:`score_mod_of` is what acts on a logit after the
scale (T5's relative position bias, Gemma 2's softcap); :func:`layer_of` is both: on the graph of the model's
mask it equals the model's own attention, output projection included. Nothing here imports transformers.
"""

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention.backends import Backend
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.standard import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model._foreign_families import FAMILIES, Family, Found, family_of
from gnn_attention.score_mods import ScoreMod

__all__ = ["heads_of", "layer_of", "score_mod_of"]

AnyHeads = StandardHeads | LatentHeads
# what families call their cross-attention
CROSS = ("EncDecAttention", "crossattention", "encoder_attn", "multihead_attn")


def heads_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> AnyHeads:
    """The attention weights of one layer as heads, copied: training either side leaves the other alone.

    :class:`StandardHeads` for every family but DeepSeek-V3, which gets :class:`LatentHeads`, with the rotary
    positions, norms, biases and groups of the model; a scale other than ``1 / sqrt(head_dim)`` is folded into
    the queries. The layer is more than its heads where :func:`score_mod_of` is not None.

    Args:
        model: a model that holds a known kind of attention, or such an attention module itself.
        layer: which of the attention modules of this part, from 0 in the order of ``model.modules()``; not
            needed where there is one.
        part: "encoder", "decoder", "self" (neither) or "cross"; not needed where only one is not "cross".

    Raises:
        NotImplementedError: an unknown family, or rotary frequencies that depend on the length of the text.
        ValueError, IndexError, TypeError: a ``layer`` or ``part`` that the model does not have, or
            projections that are no plain linear maps (adapters, quantised weights).

    Sources: the attention modules of transformers 5, ``models/*/modeling_*.py``; seeds S2.1 (layouts).

    >>> attention = nn.MultiheadAttention(8, num_heads=2)
    >>> heads_of(attention)
    StandardHeads(8, num_heads=2, head_dim=4)
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=3)
    >>> torch.equal(heads_of(encoder, layer=2).b_V.flatten(), encoder.layers[2].self_attn.in_proj_bias[16:])
    True
    """
    family, found = _find(model, layer, part)
    with torch.no_grad():
        return family.heads(found)


def score_mod_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> ScoreMod | None:
    """What acts on the logits of that layer between scale and softmax, a copy; None for most families.

    T5: ``score_mods.relative_bias``, the first layer's in every layer, none in cross-attention. Gemma 2:
    ``score_mods.softcap``. Arguments and errors are those of :func:`heads_of`.
    """
    family, found = _find(model, layer, part)
    with torch.no_grad():
        return family.score_mod(found)


def layer_of(
    model: nn.Module,
    layer: int | None = None,
    part: str | None = None,
    backend: str | Backend | None = "auto",
) -> MessagePassingAttention:
    """The attention of that layer for any graph, :func:`heads_of` with :func:`score_mod_of`, without dropout.

    On the graph of the model's mask the update equals the model's attention output. Cross-attention takes
    ``(x_src, x_dst)``. Arguments and errors are those of :func:`heads_of`.

    >>> layer_of(nn.MultiheadAttention(8, num_heads=2))
    MessagePassingAttention(standard, heads=2, head_dim=4, backend='auto')
    """
    heads = heads_of(model, layer, part)
    return MessagePassingAttention(heads, score_mod_of(model, layer, part), backend=backend)


def _find(model: nn.Module, layer: int | None, part: str | None) -> tuple[Family, Found]:
    checks.instance("model", model, nn.Module)
    named = list(model.named_modules())
    modules = [(name, module, family) for name, module in named if (family := family_of(module))]
    if not modules:
        kinds = sorted({type(x).__name__ for _, x in named if "attention" in type(x).__name__.lower()})
        known = ", ".join(family.name for family in FAMILIES.values())
        what = f"{type(model).__name__} is of no known family, its attention is {kinds or 'not there'}"
        raise NotImplementedError(f"{what}. Known: {known}. For others use StandardHeads.from_arrays")
    parts = list(dict.fromkeys(_part_of(name) for name, *_ in modules))
    if part is None:
        part, *others = [other for other in parts if other != "cross"] or parts
        if others:
            raise ValueError(f"the model attends in several parts: give part, one of {', '.join(parts)}")
    checks.choice("part", part, parts)
    chosen = [found for found in modules if _part_of(found[0]) == part]
    if layer is None and len(chosen) > 1:
        raise ValueError(f"give layer: the model has {len(chosen)} layers with attention")
    name, attention, family = chosen[checks.index("layer", layer or 0, len(chosen))]
    # That of the innermost module around the attention which has one.
    embedding = None
    while name and embedding is None:
        name = name.rpartition(".")[0]
        embedding = getattr(model.get_submodule(name), "rotary_emb", None)
    return family, Found(attention, embedding, chosen[0][1])


def _part_of(name: str) -> str:
    pieces = name.split(".")
    if pieces[-1] in CROSS:
        return "cross"
    return next((piece for piece in pieces if piece in ("encoder", "decoder")), "self")
