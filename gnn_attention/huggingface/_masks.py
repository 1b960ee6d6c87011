"""The mask of a Hugging Face model as a token graph, made once for all layers of a forward pass.

transformers gives a mask function the sizes and positions of a call and a predicate ``(b, h, dst, src) ->
bool`` on absolute positions, and passes its result to every layer, unread. Here that is a :class:`LazyMask`,
whose graph evaluates the predicate as any other rule: no tensor of tokens x tokens is made. Graphs of
predicates without tensors inside (causal, a window) are cached across forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention import convert, patterns
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.convert.masks import additive_edges
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.values import Interval
from gnn_attention.graph.rules import Rule, map_pairs
from gnn_attention.huggingface import _alignment as alignment
from gnn_attention.huggingface._alignment import CACHED, Known, Origin, Place, framed
from gnn_attention.huggingface._overrides import uses_now


@dataclass(frozen=True, eq=False)
class LazyMask:
    """A mask ``[B, 1, dst, src]``, as a place with its graph, that any operation of torch makes a tensor.

    ``tokens`` is the 2-D mask of padding over all slots; ``uses``: the graphs in force when it was made, for
    a layer that is recomputed.
    """

    place: Place
    tokens: Bool[Tensor, "batch slots"] | None
    device: torch.device
    uses: tuple[Any, ...] = ()
    # not empty once a layer has looked at the positions
    checked: list[bool] = field(default_factory=list)

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

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

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
def lazy_mask(
    sizes: tuple[int, int, int],
    offsets: tuple[Any, Any],
    function: Any,
    tokens: Any,
    scalars: bool,
    device: Any,
) -> LazyMask:
    """The mask of transformers' ``function`` for ``(batch, dst, src)`` slots from these positions on.

    ``tokens``: the 2-D mask of padding, or a mask that was made before; ``scalars``: the function takes
    single numbers (torch.vmap). ValueError without a function.
    """
    if isinstance(tokens, LazyMask):
        return tokens
    if function is None:
        advice = "transformers 5.21 or newer gives it, pip install 'gnn_attention[hf]'"
        raise ValueError(f"mask_function is missing: {advice}")
    batch, num_dst, num_src = sizes
    at = int(offsets[0]), int(offsets[1])  # copies: a static cache counts on in the same tensor
    left, padding = (None, None) if tokens is None else _padding(tokens, at[1], num_src)
    known = alignment.recipe(function) is not None
    if known and padding is None:
        own = _of_positions(Known.of(function), num_dst, num_src, at)
    else:
        broadcast = partial(map_pairs, function) if scalars and not known else function
        rule = partial(_of_slots, broadcast, padding, at, device)
        varies = batch > 1 and (not known or (padding is not None and len(padding) > 1))
        own = framed(rule, num_dst, num_src, at, batch=batch if varies else None)
    place = Place(own, batch, padding, left, cached=known and padding is None)
    return LazyMask(place, tokens, device, uses_now())


def _padding(tokens: Tensor, first_src: int, num_src: int) -> tuple[Tensor | None, Tensor | None]:
    """Slots before a sample's first token, and which senders are tokens; None for no padding."""
    slots = first_src + num_src
    tokens = tokens.to(torch.bool)[:, :slots]
    # False beyond the end of the 2-D mask
    tokens = torch.nn.functional.pad(tokens, (0, slots - tokens.shape[1]))
    first, padding = tokens.to(torch.uint8).argmax(1).cpu(), _collapsed(tokens[:, first_src:])
    return _collapsed(first) if bool(first.any()) else None, None if bool(padding.all()) else padding


def _collapsed(table: Tensor) -> Tensor:
    return table[:1] if bool((table == table[:1]).all()) else table


@lru_cache(maxsize=CACHED)
def _of_positions(known: Known, num_dst: int, num_src: int, at: Origin) -> TokenGraph:
    rule = partial(alignment.shifted, known.thing, *at) if any(at) else known.thing
    return framed(rule, num_dst, num_src, at)


def _of_slots(
    function: Rule, padding: Tensor | None, at: Origin, device: Any, b: Any, h: Any, dst: Any, src: Any
) -> Tensor:
    """The predicate at absolute positions, on the device of its tables, without padding."""
    where = dst.device
    if not isinstance(dst, Interval):
        b, h, dst, src = (x.to(device) for x in (b, h, dst, src))
    edge = alignment.shifted(function, *at, b, h, dst, src)
    edge = edge if padding is None else edge & alignment.is_token(padding, b, h, dst, src)
    return edge.to(where)


@lru_cache(maxsize=CACHED)
def unmasked(causal: bool, num_dst: int, num_src: int) -> TokenGraph:
    return patterns.causal(num_dst) if causal else patterns.cross(num_dst, num_src)


# tensor -> its version and the sizes, its graph, and whether it adds numbers
_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def of_tensor(mask: Tensor, num_dst: int, num_src: int) -> tuple[TokenGraph, Float[Tensor, "..."] | None]:
    """The graph of a mask ``[B or 1, heads or 1, dst or 1, src]``, and the numbers that it adds to logits.

    Bool: True is an edge, as for SDPA. Float: -inf and the lowest number of its dtype are non-edges. Read
    once. TypeError for other dtypes, ValueError for other axes, NaN, +inf, a float mask of 0s and 1s.
    """
    version = None if mask.is_inference() else (mask._version, num_dst, num_src)
    known = _tables.get(mask)  # type: ignore[no-untyped-call]
    if known is None or version is None or known[0] != version:
        table = _checked(mask, num_dst, num_src)
        edges = table if table.dtype == torch.bool else additive_edges(table.detach())
        adds = table.is_floating_point() and bool((table.detach().masked_select(edges) != 0).any())
        graph = convert.from_mask(_collapsed(_collapsed(edges).transpose(0, 1)).transpose(0, 1))
        _tables[mask] = known = (version, graph, adds)
    _, graph, adds = known
    if not adds:
        return graph, None
    table = _checked(mask, num_dst, num_src)
    return graph, table.masked_fill(~additive_edges(table.detach()), 0.0)


def _checked(mask: Tensor, num_dst: int, num_src: int) -> Tensor:
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"attention_mask must be bool (attend) or float (added to logits), got {mask.dtype}")
    if mask.dim() != 4 or mask.shape[2] not in (1, num_dst) or mask.shape[3] < num_src:
        sizes = f"{num_dst} receivers and {num_src} senders, got {list(mask.shape)}"
        raise ValueError(f"attention_mask must be [batch, heads, dst, src] for {sizes}")
    return mask[..., :num_src].expand(-1, -1, num_dst, -1)
