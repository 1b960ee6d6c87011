"""The mask of a Hugging Face model as a token graph: made when it is asked for, once for all layers of a forward pass.

transformers hands a mask function the sizes and positions of a call and a predicate ``(b, h, dst, src) -> bool`` on absolute
positions, and passes whatever that function returns to every layer, unread. Here that is a :class:`LazyMask`. The graph made
from it asks the predicate as any other rule is asked: on ranges, tiles or edges, so no tensor of tokens x tokens is made.

A predicate of transformers' own without tensors inside (causal, a window, bidirectional) says all there is to know in its code
and constants: its graph is kept across forward passes, with all that was planned for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention import convert, patterns
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import ask
from gnn_attention.graph.intervals.values import Span
from gnn_attention.graph.rules import Rule
from gnn_attention.huggingface._alignment import KEPT, Known, Place, framed, is_token, recipe, shifted

__all__ = ["LazyMask", "of_tensor", "unmasked"]


@dataclass(frozen=True, eq=False)
class LazyMask:
    """What the mask function returns: a mask ``[B, 1, dst, src]`` that nobody has written down yet.

    ``function`` is the predicate on absolute positions, ``tokens`` the 2-D mask of padding over all slots from 0 on, bool
    ``[B, slots]`` or None; ``scalars``: the predicate wants single numbers (torch.vmap). ``uses``: the graphs in force when it
    was made, for they must hold when a layer is computed a second time, too. Any tensor operation on it writes it down.
    """

    function: Callable[..., Tensor]
    batch: int
    num_dst: int
    num_src: int
    dst_offset: int = 0
    src_offset: int = 0
    tokens: Bool[Tensor, "batch slots"] | None = None
    scalars: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    uses: tuple[Any, ...] = ()
    _places: list[Place] = field(default_factory=list)

    dtype = torch.bool
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """``[B, 1, dst, src]``."""
        return torch.Size((self.batch, 1, self.num_dst, self.num_src))

    @property
    def place(self) -> Place:
        """The graph and where it stands; worked out once."""
        if not self._places:
            self._places.append(_place(self))
        return self._places[0]

    def dense(self) -> Bool[Tensor, "batch one dst src"]:
        """The mask as a tensor, for who cannot do without: True = edge."""
        return self.place.own.mask(self.device).expand(self.shape).as_subclass(Written)

    def contiguous(self) -> LazyMask:
        """It has no layout."""
        return self

    def to(self, *where: Any, **how: Any) -> Any:
        """It goes to any device as it is; as numbers it is written down."""
        asked = [x for x in (*where, *how.values()) if isinstance(x, torch.dtype)]
        return self if asked in ([], [torch.bool]) else self.dense().to(*where, **how)

    def dim(self) -> int:
        """Four axes."""
        return 4

    def size(self, axis: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, index: Any) -> Tensor:
        """A part, written down."""
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        """Any other method of a tensor is that of the mask written down."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch is given the mask written down."""
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Sizes and positions."""
        return f"LazyMask({list(self.shape)}, dst from {self.dst_offset}, src from {self.src_offset})"


class Written(torch.Tensor):
    """A mask written down. As truths it is a tensor like any other; to add it to logits, which would mean +1, is refused.

    Attention that does so is none of transformers' interface: it was written for eager's mask, of 0 and -inf.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """NotImplementedError for arithmetic; what is no mask any more is a plain tensor."""
        if func.__name__.strip("_") in ARITHMETIC and any(isinstance(x, cls) and x.dtype == torch.bool for x in args):
            raise NotImplementedError(  # a TypeError would be taken for that of an operator, without these words
                "a part of this model computes with the attention mask as if it were one of 0 and -inf: its attention does "
                "not go through transformers' AttentionInterface: use 'eager' for it"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result if not isinstance(result, cls) or result.dtype == torch.bool else result.as_subclass(torch.Tensor)


ARITHMETIC = {"add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "baddbmm", "neg"}


# -- its graph --------------------------------------------------------------------------------------------------------


@not_compiled
def _place(mask: LazyMask) -> Place:
    tokens = _over_slots(mask)
    left = None if tokens is None else _left(tokens)
    heard = None if tokens is None else _collapsed(tokens[:, mask.src_offset :])
    heard = None if heard is None or bool(heard.all()) else heard
    sizes, known = (mask.num_dst, mask.num_src, mask.dst_offset, mask.src_offset), recipe(mask.function) is not None
    if known and heard is None:
        return Place(_of_positions(Known(mask.function), *sizes), mask.batch, None, left, kept=True)
    function = partial(_one_by_one, mask.function) if mask.scalars and not known else mask.function
    rule = partial(_of_slots, function, heard, mask.dst_offset, mask.src_offset, mask.device)
    varies = mask.batch > 1 and (not known or (heard is not None and len(heard) > 1))
    return Place(framed(rule, *sizes, batch=mask.batch if varies else None), mask.batch, heard, left)


def _over_slots(mask: LazyMask) -> Tensor | None:
    """The 2-D mask over the slots ``0 .. src_offset + num_src - 1``; slots that it does not reach hold no token."""
    if mask.tokens is None:
        return None
    slots = mask.src_offset + mask.num_src
    tokens = mask.tokens.to(torch.bool)[:, :slots]
    return torch.nn.functional.pad(tokens, (0, slots - tokens.shape[1]))


def _left(tokens: Tensor) -> Tensor | None:
    first = tokens.to(torch.uint8).argmax(1).cpu()
    return _collapsed(first) if bool(first.any()) else None


def _collapsed(table: Tensor) -> Tensor:
    """One row for all samples where all rows are equal."""
    return table[:1] if bool((table == table[:1]).all()) else table


@lru_cache(maxsize=KEPT)
def _of_positions(known: Known, num_dst: int, num_src: int, dst_offset: int, src_offset: int) -> TokenGraph:
    """The graph of a predicate that depends on positions alone."""
    rule = partial(shifted, known.thing, dst_offset, src_offset) if dst_offset or src_offset else known.thing
    return framed(rule, num_dst, num_src, dst_offset, src_offset)


def _of_slots(
    function: Rule,
    heard: Tensor | None,
    first: int,
    start: int,
    device: torch.device,
    b: Tensor,
    h: Tensor,
    dst: Tensor,
    src: Tensor,
) -> Tensor:
    """The predicate at absolute positions, asked where its tables live, and no padding."""
    where = dst.device
    if not isinstance(dst, Span):
        b, h, dst, src = (x.to(device) for x in (b, h, dst, src))
    edge = shifted(function, first, start, b, h, dst, src)
    return (edge if heard is None else edge & is_token(heard, b, h, dst, src)).to(where)


def _one_by_one(function: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A predicate written for single numbers, on all pairs at once.

    In a thread of its own: a graph is worked out with function transforms switched off (``_compile.eagerly``), vmap among them.
    """
    if isinstance(dst, Span):
        return ask(function, b, h, dst, src)
    ends = torch.broadcast_tensors(b, h, dst, src)  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1) as thread:
        edge = thread.submit(_mapped, function, [end.reshape(-1) for end in ends]).result()
    return edge.expand(ends[0].numel()).view(ends[0].shape)


def _mapped(function: Rule, ends: list[Tensor]) -> Tensor:
    with TransformGetItemToIndex():
        edge: Tensor = torch.vmap(function)(*ends)
    return edge


# -- other masks ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=KEPT)
def unmasked(causal: bool, num_dst: int, num_src: int) -> TokenGraph:
    """The graph of a call without a mask: the past, or everyone."""
    return patterns.causal(num_dst) if causal else patterns.cross(num_dst, num_src)


_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> its version, the sizes, and what was read from it


def of_tensor(mask: Tensor, num_dst: int, num_src: int) -> tuple[TokenGraph, Float[Tensor, "..."] | None]:
    """The graph of a mask ``[B or 1, heads or 1, dst or 1, src]`` and the numbers that it adds to the logits of its edges.

    Bool: True is an edge, as for SDPA. Float: -inf and the lowest number of its dtype are non-edges. Read once for all layers
    that are given the same tensor. Raises TypeError (neither bool nor float) or ValueError (other axes, NaN, +inf, or a float
    mask of zeros and ones, which would add 1 to logits).
    """
    version = None if mask.is_inference() else (mask._version, num_dst, num_src)
    known = _tables.get(mask)  # type: ignore[no-untyped-call]
    if known is None or version is None or known[0] != version:
        table = _checked(mask, num_dst, num_src)
        edges = table if table.dtype == torch.bool else _edges(table.detach())
        adds = table.is_floating_point() and bool((table.detach().masked_select(edges) != 0).any())
        graph = convert.from_mask(_same_for_all(edges))
        _tables[mask] = known = (version, graph, adds)
    _, graph, adds = known
    return graph, _added(_checked(mask, num_dst, num_src)) if adds else None


def _checked(mask: Tensor, num_dst: int, num_src: int) -> Tensor:
    """The part over the senders that are there, for each receiver."""
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"attention_mask must be bool (True = attend) or float (added to logits), got {mask.dtype}")
    if mask.dim() != 4 or mask.shape[2] not in (1, num_dst) or mask.shape[3] < num_src:
        raise ValueError(
            f"attention_mask must be [batch, heads, dst, src] for {num_dst} receivers and {num_src} senders, "
            f"got {list(mask.shape)}"
        )
    return mask[..., :num_src].expand(-1, -1, num_dst, -1)


def _edges(table: Tensor) -> Tensor:
    """Where an additive mask has edges: above the lowest number of its dtype, or of the half it may have been."""
    if bool(table.isnan().any()) or bool((table == torch.inf).any()):
        raise ValueError("attention_mask holds NaN or +inf; an additive mask holds 0.0, finite numbers and -inf")
    if bool(((table == 0) | (table == 1)).all()) and bool((table == 1).any()):
        raise ValueError("attention_mask is a float mask of zeros and ones, which would add 1 to logits: use mask.bool()")
    lowest = max(torch.finfo(table.dtype).min, torch.finfo(torch.bfloat16).min)
    return (table > lowest) & (table != torch.finfo(torch.float16).min)


def _added(table: Tensor) -> Tensor:
    return table.masked_fill(~_edges(table.detach()), 0.0)


def _same_for_all(edges: Tensor) -> Tensor:
    """Without the axes along which nothing differs."""
    edges = edges[:1] if bool((edges == edges[:1]).all()) else edges
    return edges[:, :1] if bool((edges == edges[:, :1]).all()) else edges
