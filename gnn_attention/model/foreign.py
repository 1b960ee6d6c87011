"""Attention layers of other models as heads on a graph: torch's own attention and families of transformers.

:func:`heads_of` makes heads of a layer's weights; :func:`score_mod_of` is what acts on a logit after the
scale (T5's relative position bias, Gemma 2's softcap); :func:`layer_of` is both: on the graph of the model's
mask it equals the model's own attention, output projection included. Nothing here imports transformers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

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
PARTS = ("encoder", "decoder", "self", "cross")
# what families call their cross-attention
CROSS = ("EncDecAttention", "crossattention", "encoder_attn", "multihead_attn")


def heads_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> AnyHeads:
    """The attention weights of one layer as heads, copied: training either side leaves the other alone.

    :class:`StandardHeads` for every family but DeepSeek-V3, which gets :class:`LatentHeads`, with the rotary
    positions, norms, biases and groups of the model; a scale other than ``1 / sqrt(head_dim)`` is folded into
    the queries. The layer is more than its heads where :func:`score_mod_of` is not None.

    Args:
        model: a model that holds a known kind of attention, or such an attention module itself.
        layer: which block of the model, from 0; not needed where there is one.
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
    return cast("AnyHeads", _read("heads", *_find(model, layer, part)))


def score_mod_of(model: nn.Module, layer: int | None = None, part: str | None = None) -> ScoreMod | None:
    """What acts on the logits of that layer between scale and softmax, a copy; None for most families.

    T5: ``score_mods.relative_bias``, the first layer's in every layer, none in cross-attention. Gemma 2:
    ``score_mods.softcap``. Arguments and errors are those of :func:`heads_of`.
    """
    return cast("ScoreMod | None", _read("score_mod", *_find(model, layer, part)))


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


class _Place(NamedTuple):
    part: str
    stack: str  # the name of its list of layers
    number: int  # in that
    family: Family
    attention: Any


def _find(model: nn.Module, layer: int | None, part: str | None) -> tuple[Family, Found]:
    checks.instance("model", model, nn.Module)
    part = None if part is None else checks.choice("part", part, PARTS)
    if own := family_of(model):
        if layer not in (None, 0) or part is not None:
            advice = "give it without layer and part, or the model around it"
            raise ValueError(f"model is one {type(model).__name__}: {advice}")
        return own, Found(model, None, (model,))
    if not (places := list(_places(model))):
        raise NotImplementedError(_unknown(model))
    stack = _one_stack(model, [place for place in places if place.part == _part(places, part)])
    chosen = _one_layer(stack, layer)
    owner = model.get_submodule(chosen.stack.rpartition(".")[0]) if chosen.stack else None
    return chosen.family, Found(chosen.attention, owner, tuple(place.attention for place in stack))


def _places(model: nn.Module) -> Iterator[_Place]:
    strays = 0
    for name, module in model.named_modules():
        if not (family := family_of(module)):
            continue
        pieces = name.split(".")
        stack = next((piece for piece in pieces if piece in PARTS[:2]), "self")
        part = "cross" if pieces[-1] in CROSS else stack
        depth = _depth_of_list(model, pieces)
        # in no list of layers: numbered in the order of the model
        if depth is None:
            yield _Place(part, "", strays, family, module)
            strays += 1
        else:
            yield _Place(part, ".".join(pieces[:depth]), int(pieces[depth]), family, module)


def _depth_of_list(model: nn.Module, pieces: list[str]) -> int | None:
    """The index, in a dotted name, of the outermost number of a ModuleList."""
    module: Any = model
    for depth, piece in enumerate(pieces):
        if isinstance(module, nn.ModuleList):
            return depth
        module = getattr(module, piece)
    return None


def _part(places: list[_Place], part: str | None) -> str:
    there = list(dict.fromkeys(place.part for place in places))
    if part is not None:
        return checks.choice("part", part, there)
    first, *others = [other for other in there if other != "cross"] or there
    if others:
        raise ValueError(f"the model attends in several parts: give part, one of {', '.join(there)}")
    return first


def _one_stack(model: nn.Module, places: list[_Place]) -> list[_Place]:
    stacks = list(dict.fromkeys(place.stack for place in places))
    if len(stacks) > 1:
        example = f"give one, such as model.get_submodule({stacks[0].rpartition('.')[0]!r})"
        raise ValueError(f"{type(model).__name__} has several lists of layers, {stacks}: {example}")
    return sorted(places, key=lambda place: place.number)


def _one_layer(stack: list[_Place], layer: int | None) -> _Place:
    numbers = [place.number for place in stack]
    if layer is None and len(stack) > 1:
        raise ValueError(f"give layer, one of {numbers}: the model has {len(stack)} layers with attention")
    number = numbers[0] if layer is None else checks.position("layer", layer)
    if number not in numbers:
        raise IndexError(f"layer must be one of {numbers}, got {number}")
    if (count := numbers.count(number)) > 1:
        raise ValueError(f"layer {number} holds {count} attention modules: give the one you mean as model")
    return stack[numbers.index(number)]


def _unknown(model: nn.Module) -> str:
    names = {type(module).__name__ for module in model.modules()}
    kinds = ", ".join(sorted(name for name in names if "attention" in name.lower()))
    seen = f"; its attention is of the kind {kinds}" if kinds else ", which seems to have no attention"
    known = ", ".join(family.name for family in FAMILIES.values())
    others = "For others use StandardHeads.from_arrays"
    return f"{type(model).__name__} is of no known family{seen}. Known: {known}. {others}"


@torch.no_grad()
def _read(what: str, family: Family, found: Found) -> Any:
    try:
        return getattr(family, what)(found)
    # another version of transformers
    except AttributeError as error:
        kind = f"{family.name}: {type(found.attention).__module__}.{type(found.attention).__name__}"
        reason = f"is built otherwise than transformers 5.23 has it: {error}"
        raise NotImplementedError(f"{kind} {reason}") from error
