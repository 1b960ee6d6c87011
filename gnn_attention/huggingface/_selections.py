"""The graph of the senders that a Hugging Face model chose itself, within its mask.

DeepSeek's sparse attention and its kin pass ``indices [batch, dst, K]`` to their attention function, MiniMax
M3 ``block_indices [batch, key/value heads, dst, K]``, -1 = none. Numbers alone are compared: nothing here is
as large as receivers x senders, unless that many were chosen.
"""

import warnings
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface._alignment import Place
from gnn_attention.huggingface._overrides import named
from gnn_attention.selectors._choice import tokens_of, within

CHOICES = ("indices", "block_indices")
# selection -> its version, the graph that it was made within, and what came of it: layers may share one
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def narrowed(module: nn.Module, place: Place, heads: int, others: dict[str, Any]) -> Place:
    """The place with the edges that were chosen alone; as it is where nothing was.

    NotImplementedError for a selection that is not of one of the two forms.
    """
    given = [name for name in CHOICES if others.get(name) is not None]
    if not given:
        return place
    _check(module, place, heads, given, others)
    if given[0] == CHOICES[1] and place.left is not None:
        what = "its indexer counts blocks and scores from the padding on the left on, with any attention"
        advice = "pad on the right, or give it one sample at a time"
        warnings.warn(f"{named(module)}: {what}, so results depend on the padding: {advice}", stacklevel=3)
    selection = others[given[0]]
    version = None if selection.is_inference() else selection._version
    known = _known.get(selection)  # type: ignore[no-untyped-call]
    if known is None or version is None or known[:2] != (version, id(place.own)):
        found = _within(place.own, selection, _block_size(module) if given[0] == CHOICES[1] else None, heads)
        _known[selection] = known = (version, id(place.own), place.own, found)
    return replace(place, own=known[3], cached=False, _made={})


def _check(module: nn.Module, place: Place, heads: int, given: list[str], others: dict[str, Any]) -> None:
    selection, blocks = others[given[0]], given[0] == CHOICES[1]
    what, advice = f"{named(module)} passes {' and '.join(given)}", "unsupported, use 'eager'"
    axes, form = (4, "[batch, key/value heads, dst, K]") if blocks else (3, "[batch, dst, K]")
    got = list(selection.shape) if isinstance(selection, Tensor) else [type(selection).__name__]
    if len(got) != axes or got[-2] != place.own.num_dst:
        raise NotImplementedError(f"{what} of {got}, expected {form} integers: {advice}")
    if len(given) > 1 or (blocks and heads % got[1]):
        raise NotImplementedError(f"{what}, expected one selection for each group of {heads} heads: {advice}")
    if blocks and not isinstance(_block_size(module), int):
        size = "no indexer.block_size that says how large they are"
        raise NotImplementedError(f"{what}, but has {size}: {advice}")


def _block_size(module: nn.Module) -> Any:
    return getattr(getattr(module, "indexer", None), "block_size", None)


@not_compiled
def _within(own: TokenGraph, selection: Tensor, block_size: int | None, heads: int) -> TokenGraph:
    index = selection.detach()[:, None] if block_size is None else selection.detach()
    if (groups := own.heads or index.shape[1]) > 1:
        index = index.repeat_interleave((heads if groups > 1 else 1) // index.shape[1], dim=1)
    index = within(own, index) if block_size is None else tokens_of(index, block_size, own)
    graph = TokenGraph.from_indices(index, own.num_src, coalesce=True, name="chosen")
    return replace(graph, dst_offset=own.dst_offset, src_offset=own.src_offset)
