"""The mask of a Hugging Face model as a token graph, made once for all layers of a forward pass.

transformers gives a mask function the sizes and positions of a call and a predicate ``(b, h, dst, src) ->
bool`` on absolute positions, and passes its result to every layer, unread. Here that is a :class:`LazyMask`,
whose graph evaluates the predicate as any other rule: no tensor of tokens x tokens is made. Graphs of
predicates without tensors inside (causal, a window) are cached across forward passes. Senders that the model
chose itself narrow the graph: nothing is as large as receivers x senders, unless that many were chosen.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention import convert
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.convert.masks import additive_edges
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.rules import Rule, combine, map_pairs, map_tokens
from gnn_attention.huggingface import _alignment as alignment
from gnn_attention.huggingface._alignment import CACHED, Known, Place
from gnn_attention.huggingface._overrides import ACTIVE, Override, module_name
from gnn_attention.huggingface._programs import Arguments
from gnn_attention.selectors._choice import tokens_of, within

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LazyMask:
    """A mask ``[B, 1, dst, src]``, as a place with its graph, that any operation of torch makes a tensor.

    ``overrides`` are the blocks in force when it was made, for a layer that is recomputed.
    """

    place: Place
    device: torch.device
    overrides: tuple[Override, ...]

    dtype = torch.bool
    ndim = 4

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LazyMask, lambda x: x.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def shape(self) -> torch.Size:
        own = self.place.own
        return torch.Size((self.place.batch, 1, own.num_dst, own.num_src))

    def dense(self) -> Bool[Tensor, "batch one dst src"]:
        return self.place.own.mask(self.device).expand(self.shape).as_subclass(DenseMask)

    def contiguous(self) -> LazyMask:
        return self

    def to(self, *where: Any, **how: Any) -> Any:
        """Itself on any device; a tensor for another dtype than bool."""
        dtypes = [x for x in (*where, *how.values()) if isinstance(x, torch.dtype)]
        return self if dtypes in ([], [torch.bool]) else self.dense().to(*where, **how)

    def dim(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]


class DenseMask(torch.Tensor):
    """A bool mask that raises where attention written for a mask of 0 and -inf adds it to logits."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_arithmetic = func.__name__.strip("_") in ARITHMETIC  # first: ``x.dtype`` comes here too
        if is_arithmetic and any(isinstance(x, cls) and x.dtype == torch.bool for x in args):
            # not TypeError, which Python replaces for an operator
            reason = "(not through AttentionInterface) as if it were one of 0 and -inf: use 'eager' for it"
            raise NotImplementedError(f"a part of this model computes with the attention mask {reason}")
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        is_number = isinstance(result, cls) and result.dtype != torch.bool
        return result.as_subclass(torch.Tensor) if is_number else result


ARITHMETIC = {*"add radd iadd sub rsub isub mul rmul imul div truediv baddbmm neg".split()}  # noqa: SIM905


@not_compiled
def lazy_mask(slots: tuple[Any, ...], function: Any, tokens: Any, scalars: bool, device: Any) -> LazyMask:
    """The mask of transformers' ``function`` for ``slots``: (batch, dst, src, first dst, first src).

    ``tokens`` is the 2-D mask of padding; ``scalars``: the function takes single numbers (torch.vmap).
    """
    batch, num_dst, num_src, *first = slots
    at = int(first[0]), int(first[1])  # copies: a static cache counts on in the same tensor
    left, padding = (None, None) if tokens is None else _padding(tokens, at[1], num_src)
    is_known = alignment.recipe(function) is not None
    # A compiled program knows no padding, and must not meet a cache.
    if is_known and padding is None:
        own = _of_positions(Known.of(function), num_dst, num_src, at)
    else:
        is_mapped, samples = scalars and not is_known, None if is_known or batch == 1 else batch
        rule = partial(_on_device, partial(map_pairs, function) if is_mapped else function, at, device)
        own = _placed_at(TokenGraph.from_rule(rule, num_dst, num_src, batch=samples), at)
    if padding is not None:
        both = own.edges.contains, alignment.sends_token(padding)
        edges = RuleEdges(partial(combine, operator.and_, both))
        own = replace(own, edges=edges, batch=own.batch or (batch if len(padding) > 1 else None))
    place = Place(own, batch, padding, left, cached=is_known and padding is None and left is None)
    return LazyMask(place, device, ACTIVE.get())


@lru_cache(maxsize=CACHED)
def _of_positions(known: Known, num_dst: int, num_src: int, at: tuple[int, int]) -> TokenGraph:
    rule = partial(map_tokens, known.thing, *at) if any(at) else known.thing
    return _placed_at(TokenGraph.from_rule(rule, num_dst, num_src), at)


def _placed_at(graph: TokenGraph, at: tuple[int, int]) -> TokenGraph:
    return replace(graph, dst_offset=at[0], src_offset=at[1], name="the model's mask")


def _on_device(function: Rule, at: tuple[int, int], device: Any, b: Any, h: Any, dst: Any, src: Any) -> Any:
    """The predicate at absolute positions, on the device of its tables."""
    ends = (x.to(device) for x in (b, h, dst, src))
    return map_tokens(function, *at, *ends).to(dst.device)


def _padding(tokens: Tensor, first_src: int, num_src: int) -> tuple[Tensor | None, Tensor | None]:
    """Slots before a sample's first token, and which senders are tokens; None for no padding."""
    slots = first_src + num_src
    tokens = tokens.to(torch.bool)[:, :slots]
    # False beyond the end of the 2-D mask
    tokens = torch.nn.functional.pad(tokens, (0, slots - tokens.shape[1]))
    first, padding = tokens.to(torch.uint8).argmax(1).cpu(), _drop_equal_samples(tokens[:, first_src:])
    return _drop_equal_samples(first) if bool(first.any()) else None, None if bool(padding.all()) else padding


def _drop_equal_samples(table: Tensor) -> Tensor:
    return table[:1] if bool((table == table[:1]).all()) else table


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (key, what was made of it)


def once(tensor: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """``make()``, once for a key and the numbers of a tensor: the layers of a model share it.

    A write through NumPy or ``.data``, which leaves the version of the tensor as it was, is not seen.
    """
    if tensor.is_inference():  # it has no version
        return make()
    key = (tensor._version, key)
    known = _made.get(tensor)  # type: ignore[no-untyped-call]
    if known is None or known[0] != key:
        _made[tensor] = known = (key, make())
    made: T = known[1]
    return made


def of_tensor(mask: Tensor, num_dst: int, num_src: int) -> tuple[TokenGraph, Float[Tensor, "..."] | None]:
    """The graph of a mask ``[B or 1, heads or 1, dst or 1, src]``, and the numbers that it adds to logits.

    Bool: True is an edge, as for SDPA. Float: -inf and the lowest number of its dtype are non-edges. Read
    once. TypeError for other dtypes, ValueError for other axes, NaN, +inf, a float mask of 0s and 1s.
    """
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"attention_mask must be bool (attend) or float (added to logits), got {mask.dtype}")
    if mask.dim() != 4 or mask.shape[2] not in (1, num_dst) or mask.shape[3] < num_src:
        sizes = f"{num_dst} receivers and {num_src} senders, got {list(mask.shape)}"
        raise ValueError(f"attention_mask must be [batch, heads, dst, src] for {sizes}")
    table = mask[..., :num_src].expand(-1, -1, num_dst, -1)
    graph, adds = once(mask, (num_dst, num_src), partial(_read, table.detach()))
    return graph, table.masked_fill(~additive_edges(table.detach()), 0.0) if adds else None


def _read(table: Tensor) -> tuple[TokenGraph, bool]:
    """The graph, and whether there are other numbers than 0 on its edges."""
    edges = table if table.dtype == torch.bool else additive_edges(table)
    adds = table.is_floating_point() and bool((table.masked_select(edges) != 0).any())
    return convert.from_mask(
        _drop_equal_samples(_drop_equal_samples(edges).transpose(0, 1)).transpose(0, 1)
    ), adds


def restrict_to_selection(call: Arguments, place: Place) -> Place:
    """The place with the edges alone whose senders the model chose itself; as it is where it chose none.

    DeepSeek's sparse attention and its kin pass ``indices [batch, dst, K]`` to their attention function,
    MiniMax M3 ``block_indices [batch, key/value heads, dst, K]``, -1 = none. NotImplementedError for others.
    """
    given = [name for name in ("indices", "block_indices") if call.others.get(name) is not None]
    if not given:
        return place
    selection, blocks = call.others[given[0]], given[0] == "block_indices"
    own, heads = place.own, call.q.shape[1]
    size = getattr(getattr(call.module, "indexer", None), "block_size", None) if blocks else None
    shape: list[Any] = list(selection.shape) if isinstance(selection, Tensor) else [type(selection).__name__]
    fits = len(given) == 1 and len(shape) == (4 if blocks else 3) and shape[-2] == own.num_dst
    if not fits or (blocks and (heads % shape[1] or not isinstance(size, int))):
        what = (
            f"{module_name(call.module)} passes {' and '.join(given)} of {shape} for {own.num_dst} receivers"
        )
        axes = "[batch, groups of heads, dst, K] and an indexer.block_size" if blocks else "[batch, dst, K]"
        raise NotImplementedError(f"{what} and {heads} heads, expected one selection {axes}: use 'eager'")
    if blocks and place.left is not None:
        what = "its indexer counts blocks and scores from the padding on the left on, with any attention"
        advice = "pad on the right, or give it one sample at a time"
        warnings.warn(
            f"{module_name(call.module)}: {what}, so results depend on the padding: {advice}", stacklevel=3
        )
    return place.along(once(selection, Known.of(own), partial(_within, own, selection, size, heads)))


@not_compiled
def _within(own: TokenGraph, selection: Tensor, block_size: int | None, heads: int) -> TokenGraph:
    index = selection.detach()[:, None] if block_size is None else selection.detach()
    if (groups := own.heads or index.shape[1]) > 1:
        index = index.repeat_interleave((heads if groups > 1 else 1) // index.shape[1], dim=1)
    index = within(own, index) if block_size is None else tokens_of(index, block_size, own)
    graph = TokenGraph.from_indices(index, own.num_src, coalesce=True, name="chosen")
    return replace(graph, dst_offset=own.dst_offset, src_offset=own.src_offset)
