"""Turn the mask of a Hugging Face model into a token graph, once for all layers of a forward pass.

transformers calls a mask function with the sizes and positions of a call and with a predicate
``(b, h, dst, src) -> bool``, and passes the result to every layer unread. Here the result is a
:class:`LazyMask`, whose graph evaluates the predicate like any other rule, without a tensor of
tokens x tokens. Graphs of predicates without tensors (causal, a window) are cached across forward
passes. If a model selects senders itself, they restrict the graph, also without such a tensor.
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
from gnn_attention.convert.masks import find_additive_edges
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.rules import Rule, combine, map_pairs, map_tokens
from gnn_attention.huggingface import _alignment as alignment
from gnn_attention.huggingface._alignment import CACHE_SIZE, CacheKey, CallLayout
from gnn_attention.huggingface._contexts import ACTIVE_CONTEXTS, GraphContext, module_name
from gnn_attention.huggingface._programs import Arguments
from gnn_attention.selectors._choice import expand_blocks, keep_edges

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LazyMask:
    """A mask ``[B, 1, dst, src]`` stored as a graph, which any torch function turns into a tensor.

    ``contexts`` were active when the mask was built; a layer that is recomputed uses them again.
    """

    layout: CallLayout
    device: torch.device
    contexts: tuple[GraphContext, ...]

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
        graph = self.layout.graph
        return torch.Size((self.layout.batch, 1, graph.num_dst, graph.num_src))

    def dense(self) -> Bool[Tensor, "batch one dst src"]:
        return self.layout.graph.mask(self.device).expand(self.shape).as_subclass(DenseMask)

    def contiguous(self) -> LazyMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``self`` for any device, but a tensor for a dtype other than bool."""
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        return self if dtypes in ([], [torch.bool]) else self.dense().to(*args, **kwargs)

    def dim(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]


class DenseMask(torch.Tensor):
    """A bool mask that raises an error when a model adds it to logits like a mask of 0 and -inf."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The name is tested first, because `x.dtype` in the next line calls this method again.
        is_arithmetic = func.__name__.strip("_") in ARITHMETIC
        if is_arithmetic and any(isinstance(x, cls) and x.dtype == torch.bool for x in args):
            # Python would replace a TypeError from an operator with one of its own.
            raise NotImplementedError(
                "this model computes with the bool mask as if it were one of 0 and -inf: use 'eager'"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        is_numeric = isinstance(result, cls) and result.dtype != torch.bool
        return result.as_subclass(torch.Tensor) if is_numeric else result


ARITHMETIC = {*"add radd iadd sub rsub isub mul rmul imul div truediv baddbmm neg".split()}  # noqa: SIM905


@not_compiled
def build_lazy_mask(frame: Any, predicate: Any, mask_2d: Any, use_vmap: bool, device: Any) -> LazyMask:
    """Build a mask. ``mask_2d`` is False at padding; with ``use_vmap`` a predicate accepts one pair."""
    batch, num_dst, num_src, dst_offset, src_offset = frame
    # A static cache passes its offsets as tensors and changes them later, so they are copied.
    offsets = (int(dst_offset), int(src_offset))
    left_padding, is_token = (None, None) if mask_2d is None else _read_padding(mask_2d, offsets[1], num_src)
    has_key = alignment.structural_key(predicate) is not None
    # Without padding, calls with equal predicates share one graph, and so its plan.
    if has_key and is_token is None:
        graph = _cached_graph(CacheKey.of(predicate), num_dst, num_src, offsets)
    else:
        graph_batch = None if has_key or batch == 1 else batch
        function = partial(map_pairs, predicate) if use_vmap and not has_key else predicate
        rule = partial(_is_edge_on_device, function, offsets, device)
        graph = _with_offsets(TokenGraph.from_rule(rule, num_dst, num_src, batch=graph_batch), offsets)
    if is_token is not None:
        rules = (graph.edges.contains, alignment.token_sender_rule(is_token))
        edges = RuleEdges(partial(combine, operator.and_, rules))
        graph = replace(graph, edges=edges, batch=graph.batch or (batch if len(is_token) > 1 else None))
    is_cached = has_key and is_token is None and left_padding is None
    layout = CallLayout(graph, batch, is_token, left_padding, is_cached)
    return LazyMask(layout, device, ACTIVE_CONTEXTS.get())


@lru_cache(maxsize=CACHE_SIZE)
def _cached_graph(predicate: CacheKey, num_dst: int, num_src: int, offsets: tuple[int, int]) -> TokenGraph:
    rule = partial(map_tokens, predicate.value, *offsets) if any(offsets) else predicate.value
    return _with_offsets(TokenGraph.from_rule(rule, num_dst, num_src), offsets)


def _with_offsets(graph: TokenGraph, offsets: tuple[int, int]) -> TokenGraph:
    return replace(graph, dst_offset=offsets[0], src_offset=offsets[1], name="the model's mask")


def _is_edge_on_device(rule: Rule, offsets: Any, device: Any, b: Any, h: Any, dst: Any, src: Any) -> Any:
    # The rule may read tables on the device of the model.
    indices = (x.to(device) for x in (b, h, dst, src))
    return map_tokens(rule, *offsets, *indices).to(dst.device)


def _read_padding(mask_2d: Tensor, src_offset: int, num_src: int) -> tuple[Tensor | None, Tensor | None]:
    """Return ``left_padding`` and ``is_token`` as in :class:`CallLayout`."""
    num_slots = src_offset + num_src
    mask_2d = mask_2d.to(torch.bool)[:, :num_slots]
    # Slots beyond the end of the 2-D mask hold no tokens.
    mask_2d = torch.nn.functional.pad(mask_2d, (0, num_slots - mask_2d.shape[1]))
    num_left = mask_2d.to(torch.uint8).argmax(1).cpu()
    is_token = _merge_equal_samples(mask_2d[:, src_offset:])
    left_padding = _merge_equal_samples(num_left) if bool(num_left.any()) else None
    return left_padding, None if bool(is_token.all()) else is_token


def _merge_equal_samples(x: Tensor) -> Tensor:
    return x[:1] if bool((x == x[:1]).all()) else x


_results: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (key, result)


def compute_once(tensor: Tensor, key: Hashable, compute: Callable[[], T]) -> T:
    """Return ``compute()``, cached with a tensor until the tensor or the key changes."""
    # Inference tensors have no version. Writes through NumPy or `.data` do not change the version.
    if tensor.is_inference():
        return compute()
    key = (tensor._version, key)
    entry = _results.get(tensor)  # type: ignore[no-untyped-call]
    if entry is None or entry[0] != key:
        _results[tensor] = entry = (key, compute())
    result: T = entry[1]
    return result


def graph_of_mask(mask: Tensor, num_dst: int, num_src: int) -> tuple[TokenGraph, Float[Tensor, "..."] | None]:
    """Return the graph of a mask ``[B or 1, heads or 1, dst or 1, src]`` and the bias that it adds.

    In a bool mask True is an edge, as in SDPA; in a float mask -inf and the lowest number of its
    dtype are non-edges. Raises TypeError for other dtypes, and ValueError for other axes, NaN and +inf.
    """
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"attention_mask must be bool (attend) or float (added to logits), got {mask.dtype}")
    if mask.dim() != 4 or mask.shape[2] not in (1, num_dst) or mask.shape[3] < num_src:
        shape = list(mask.shape)
        raise ValueError(f"attention_mask must be [batch, heads, {num_dst}, {num_src}], got {shape}")
    table = mask[..., :num_src].expand(-1, -1, num_dst, -1)
    graph, has_bias = compute_once(mask, (num_dst, num_src), partial(_read_table, table.detach()))
    return graph, table.masked_fill(~find_additive_edges(table.detach()), 0.0) if has_bias else None


def _read_table(table: Tensor) -> tuple[TokenGraph, bool]:
    edges = table if table.dtype == torch.bool else find_additive_edges(table)
    has_bias = table.is_floating_point() and bool((table.masked_select(edges) != 0).any())
    edges = _merge_equal_samples(edges).transpose(0, 1)
    return convert.from_mask(_merge_equal_samples(edges).transpose(0, 1)), has_bias


def restrict_to_selection(call: Arguments, layout: CallLayout) -> CallLayout:
    """Return the layout with only the senders that the model selected itself, if it selected any.

    DeepSeek's sparse attention and similar ones pass ``indices [batch, dst, K]``, and MiniMax M3
    passes ``block_indices [batch, key/value heads, dst, K]``; -1 means no sender. Raises
    NotImplementedError for other selections.
    """
    names = [name for name in ("indices", "block_indices") if call.others.get(name) is not None]
    if not names:
        return layout
    selection = call.others[names[0]]
    has_blocks = names[0] == "block_indices"
    graph, num_heads = layout.graph, call.q.shape[1]
    label = module_name(call.module)
    block_size = getattr(getattr(call.module, "indexer", None), "block_size", None) if has_blocks else None
    shape: list[Any] = list(selection.shape) if isinstance(selection, Tensor) else [type(selection).__name__]
    fits = len(names) == 1 and len(shape) == (4 if has_blocks else 3) and shape[-2] == graph.num_dst
    if not fits or (has_blocks and (num_heads % shape[1] or not isinstance(block_size, int))):
        raise NotImplementedError(
            f"{label} passes {' and '.join(names)} of {shape} for {graph.num_dst} receivers and {num_heads} "
            "heads, expected indices [batch, dst, K], or block_indices [batch, groups, dst, K] with an "
            "indexer.block_size: use 'eager'"
        )
    if has_blocks and layout.left_padding is not None:
        warnings.warn(
            f"{label}: its indexer counts padding on the left, so results depend on it: pad on the "
            "right, or pass one sample at a time",
            stacklevel=3,
        )
    build = partial(_graph_of_selection, graph, selection, block_size, num_heads)
    return layout.with_graph(compute_once(selection, CacheKey.of(graph), build))


@not_compiled
def _graph_of_selection(graph: TokenGraph, selection: Tensor, size: int | None, num_heads: int) -> TokenGraph:
    index = selection.detach()[:, None] if size is None else selection.detach()
    if (groups := graph.heads or index.shape[1]) > 1:
        index = index.repeat_interleave((num_heads if groups > 1 else 1) // index.shape[1], dim=1)
    index = keep_edges(graph, index) if size is None else expand_blocks(index, size, graph)
    selected = TokenGraph.from_indices(index, graph.num_src, coalesce=True, name="chosen")
    return replace(selected, dst_offset=graph.dst_offset, src_offset=graph.src_offset)
