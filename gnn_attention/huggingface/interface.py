"""Hugging Face models on token graphs: ``attn_implementation="gnn_attention"``, and :func:`use_graph`.

Importing this module registers the attention function and the mask function under the name
``"gnn_attention"``. (Without the latter no mask would come: padding and windows would be lost.) Then

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="gnn_attention")

or ``model.set_attn_implementation("gnn_attention")`` computes the same as before, along the edges of the
model's own graph, and ``with ga.use_graph(model, graph):`` changes that graph, in ``generate()`` too.

Supported: grouped heads, a scale, softcap, sinks, a bias for pairs, dropout, values of another width,
cross-attention, masks of the model's own, senders or blocks of them that the model chose, any cache of
transformers. What is unsupported raises by name.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attend, attended_in_parts
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface import _overrides, _programs
from gnn_attention.huggingface._alignment import CACHED, Known, Place
from gnn_attention.huggingface._masks import LazyMask, lazy_mask, of_tensor, once, restrict_to_selection
from gnn_attention.huggingface._overrides import (
    NAME,
    GraphFunction,
    InterventionBlock,
    Override,
    module_name,
)
from gnn_attention.huggingface._programs import Arguments
from gnn_attention.score_mods import ScoreMod, chain, softcap

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    message = f"this needs transformers 5.21 or newer ({error}): pip install 'gnn_attention[hf]'"
    raise ModuleNotFoundError(message) from None

BackendOf = Callable[[nn.Module], str | Backend]
_backend: ContextVar[Any] = ContextVar("gnn_attention.huggingface.backend", default="auto")


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> LazyMask | Tensor:
    """The mask function: the model's mask as a rule with its position, for all layers of a kind.

    A mask that ``generate`` prepared (for a static cache) comes back as ``attention_mask`` and is returned.
    In a program of one piece (``fullgraph=True``, ``torch.export``) it is a tensor, as torch's own attention
    has it.
    """
    slots = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    if not _programs.is_whole():
        return lazy_mask(slots, mask_function, attention_mask, use_vmap, torch.device(device))
    options: dict[str, Any] = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device}
    table: Tensor = sdpa_mask(*slots, mask_function, attention_mask, **options)
    return table


def attending(backend: str | Backend | BackendOf) -> AbstractContextManager[None]:
    """A block in which the attention of Hugging Face models is computed by a backend, or its name.

    A function of the attention module returns the backend of that module.

    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> with attending("reference"):
    ...     attention(nn.Module(), x, x, x, None, scaling=0.0, is_causal=True)[0][0, 1, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    return _overrides.block(_backend, backend)


def attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads dst dim"],
    key: Float[Tensor, "batch kv_heads src dim"],
    value: Float[Tensor, "batch kv_heads src value_dim"],
    attention_mask: LazyMask | Tensor | None,
    scaling: float | Tensor | None = None,
    dropout: float | None = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "batch dst heads value_dim"], Float[Tensor, "batch heads dst src"] | None]:
    """The attention function: one call of ``attend`` on the graph of the mask.

    Also returns the weights for ``output_attentions`` where the model passes it on. GPT-2 and OPT do not, and
    have empty ``attentions``; ``trace.record(model, ids).layers[i]["attn.hook_pattern"]`` has the weights.
    Keyword arguments of transformers that change nothing here are ignored (``sliding_window``, for instance,
    which is in the mask).

    Raises NotImplementedError (an unsupported argument), ValueError (no mask, and the module does not say
    whether it is causal).
    """
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and sinks.numel() != query.shape[1]:
        raise NotImplementedError(f"{module_name(module)} passes a sink for each receiver: use 'eager'")
    sinks = None if sinks is None else sinks.reshape(-1)
    kind = query.device.type
    if len({query.dtype, key.dtype, value.dtype}) > 1 and torch.is_autocast_enabled(kind):
        # as SDPA does
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scale, Tensor):
        query, scale = query * scale, 1.0
    dropout = float(dropout or 0.0) if module.training else 0.0
    is_causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    tensors = (query, key, value, attention_mask)
    call = Arguments(module, *tensors, scale, dropout, is_causal, softcap, position_bias, sinks, others)
    out, weights = _programs.attention(call) if _programs.is_whole() else _along_graph(call)
    return out.transpose(1, 2).contiguous(), weights


@not_compiled
def _along_graph(call: Arguments) -> tuple[Tensor, Tensor | None]:
    if call.others.get("cache") is not None:
        raise NotImplementedError(f"{module_name(call.module)} passes cache, a paged cache: use 'eager'")
    place, overrides, numbers = _locate_call(call)
    place = restrict_to_selection(call, place)
    positions = call.others.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == place.own.num_dst:
        once(positions, Known.of(place.own), partial(_warn_of_packing, call.module, place, positions))
    options: dict[str, Any] = {"scale": call.scale, "dropout": call.dropout, "sink_logits": call.sinks}
    options["score_mod"] = _score_mod(place.own, call.cap, call.position_bias, numbers)
    options["backend"] = _backend_of(call, place, overrides)
    if not call.others.get("output_attentions"):
        return attend(call.q, call.k, call.v, place.own, **options), None
    out, info = attend(call.q, call.k, call.v, place.own, return_info=True, **options)
    return out, info.weight_matrix().to(out.dtype)


def _score_mod(graph: TokenGraph, cap: float | None, *tables: Tensor | None) -> ScoreMod | None:
    """Softcap first, then the numbers that are added, as all models do."""
    first = (graph.dst_offset, graph.src_offset)
    links: list[ScoreMod] = [] if cap is None else [softcap(cap)]
    links += [
        partial(_add_mask_numbers, table[..., : graph.num_src], first)
        for table in tables
        if table is not None
    ]
    return None if not links else links[0] if len(links) == 1 else chain(*links)


def _add_mask_numbers(
    table: Tensor, first: tuple[int, int], score: Tensor, b: Any, h: Any, dst: Tensor, src: Tensor
) -> Tensor:
    """``score + table[b, h, dst, src]`` for a table from the ``first`` positions on; size 1 broadcasts."""
    ends = (b, h, dst - first[0], src - first[1])
    at = tuple(end for end, size in zip(ends, table.shape, strict=True) if size > 1)
    return score + table.squeeze()[at].to(score.dtype)


def _locate_call(call: Arguments) -> tuple[Place, list[Override], Tensor | None]:
    """The place of a call, the blocks that cover it, whose graphs it has, and numbers that its mask adds."""
    module, mask, num_dst, num_src = call.module, call.mask, call.q.shape[2], call.k.shape[2]
    numbers, has_positions = None, isinstance(mask, LazyMask)
    if has_positions:
        if tuple(mask.shape[2:]) != (num_dst, num_src):
            got = f"{num_dst} receivers and {num_src} senders, but its mask has {list(mask.shape[2:])}"
            raise ValueError(f"{module_name(module)} has {got}: senders without a position; use 'eager'")
        place, overrides = mask.place, mask.overrides
    else:
        own, numbers = (_without_mask(call), None) if mask is None else of_tensor(mask, num_dst, num_src)
        place, overrides = Place(own, call.q.shape[0], cached=True), _overrides.overrides_of(module)
    if call.others.get("cu_seq_lens_q") is not None:
        place = place.under(
            _pattern(patterns.documents, _lengths(call), causal=False), False, module_name(module)
        )
    covering = [override for override in overrides if override.covers(module)]
    for override in covering:
        override.num_calls += 1
        if not has_positions:
            override.check_unplaced(module, place.own, mask is not None)
        place = override.place(module, place, call.q.shape[1])
    return place, covering, numbers


def _backend_of(call: Arguments, place: Place, overrides: list[Override]) -> str | Backend:
    """The backend in force for a call, with the messages changed that the overrides change, and watched."""
    chosen = _backend.get()
    backend = chosen if isinstance(chosen, (str, Backend)) else chosen(call.module)
    parts: list[Any] = [(place, ())]
    for block in overrides:
        if isinstance(block, InterventionBlock) and block.intervention.change and block.holds_in(call.module):
            change = partial(block.intervention.change, block.layer_of(call.module))
            split = partial(block.split, call.module, call.q.shape[1])
            parts = block.intervention.split_edges(parts, split, change)
    # Where samples have padding on the left, this is a tensor with a position for each.
    first = place.own.src_offset - (0 if place.left is None else place.left)
    changed = [(part.own, partial(_values, changes, first)) for part, changes in parts]
    if len(changed) > 1:
        backend = Backend("changed messages", partial(_run_changed, changed, backend))
    watch = _overrides.WATCH.get()
    return backend if watch is None else watch(call.module, backend, changed[1:], place)


def _values(changes: Sequence[Callable[[Any, Tensor], Tensor]], first: Any, v: Tensor) -> Tensor:
    for change in changes:
        v = change(first, v)
    return v


def _run_changed(parts: list[Any], inner: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    divided = [dataclasses.replace(call, graph=graph, v=values(call.v)) for graph, values in parts]
    return attended_in_parts(call, divided, inner)


def _warn_of_packing(module: nn.Module, place: Place, positions: Int[Tensor, "batch dst"]) -> None:
    """Warn where positions begin again at a token that attends to the one before: documents are mixed."""
    own = place.own
    sample, before = (positions[:, 1:] <= positions[:, :-1]).nonzero().unbind(1)
    # the sender that is the token before
    src = before + own.dst_offset - own.src_offset
    are_tokens = (src >= 0) & (src + 1 < own.num_src)
    if place.padding is not None:
        padding = place.padding.to(src.device)
        are_tokens &= padding[sample % len(padding), (src + 1).clamp(0, own.num_src - 1)]
    sample, before, src = sample[are_tokens], before[are_tokens], src[are_tokens]
    if not len(sample):
        return
    leaks = own.edges.contains(sample, torch.zeros_like(src), before + 1, src).expand(src.shape).nonzero()
    if len(leaks):
        first = f"(sample {int(sample[leaks[0]])}, token {int(before[leaks[0]]) + 1})"
        what = f"position_ids begin again {first}, but that token attends to the one before it"
        advice = "pass attention_mask=None and use_cache=False, or use_graph with patterns.documents(lengths)"
        warnings.warn(
            f"{module_name(module)}: {what}: packed documents are not separated; {advice}", stacklevel=2
        )


def _lengths(call: Arguments) -> tuple[int, ...]:
    """The lengths of the documents between which ``cu_seq_lens_q`` divides the tokens of one row."""
    bounds = (call.others.get(f"cu_seq_lens_{end}") for end in "qk")
    ends, of_keys = ([] if x is None else torch.as_tensor(x).tolist() for x in bounds)
    lengths = tuple(stop - start for start, stop in pairwise(ends))
    rows, num_dst, num_src = len(call.q), call.q.shape[2], call.k.shape[2]
    if rows > 1 or of_keys not in ([], ends) or ends[0] or not ends[-1] == num_dst == num_src:
        raise NotImplementedError(
            f"{module_name(call.module)} passes cu_seq_lens_q {ends} for {rows} rows of {num_dst} receivers "
            f"and {num_src} senders: pack all documents into one row, from 0 to its length, "
            "with use_cache=False"
        )
    return lengths


@lru_cache(maxsize=CACHED)  # the same graph in every layer and forward pass
def _pattern(build: Callable[..., TokenGraph], *sizes: Any, **options: Any) -> TokenGraph:
    return build(*sizes, **options)


def _without_mask(call: Arguments) -> TokenGraph:
    name, num_dst, num_src = module_name(call.module), call.q.shape[2], call.k.shape[2]
    is_causal = False if num_dst == 1 else call.is_causal  # the newest token attends to all of the cache
    if is_causal is None:
        raise ValueError(f"{name} came with no mask and does not say whether it is causal: pass is_causal")
    if is_causal and num_dst != num_src:
        sizes = f"{num_dst} receivers and {num_src} senders"
        raise ValueError(f"{name} is causal and came with no mask, but has {sizes}: pass attention_mask")
    return _pattern(patterns.causal, num_dst) if is_causal else _pattern(patterns.cross, num_dst, num_src)


def use_graph(
    model: nn.Module, graph_or_function: TokenGraph | GraphFunction, replace: bool = False
) -> AbstractContextManager[None]:
    """A block in which a Hugging Face model attends along the edges of its own mask that ``graph`` has, too.

    Args:
        model: a model whose attention is ``"gnn_attention"``, or a part of one (an encoder, a layer): all
            self-attention in it takes the graph; cross-attention is unchanged.
        graph_or_function: the :class:`TokenGraph` of whole sequences, as long as the longest or longer:
            shorter ones take its first tokens, a decoding step its later rows. Positions count a sample's own
            tokens, not the padding on its left; those of packed documents count from the start of the row.
            Or a function ``(layer, head, length)``, which returns a graph, or None for the model's own.
            ``length`` is that of the sequence so far; modules without ``layer_idx`` are numbered in the order
            of the calls.
        replace: the graph alone decides, whatever the model's mask says (windows, causality, packing).
            Padding and empty slots of a cache stay masked.

    Blocks nest: the inner one is intersected with the outer one, or replaces it. A block counts in the thread
    (context) that entered it. A layer that gradient checkpointing recomputes has its first graph.

    Raises ValueError where the attention of a part is another, NotImplementedError where it cannot be
    exchanged, TypeError for what is neither a graph nor a function; in the block ValueError for a graph that
    is too short or that, replacing the model's, attends to senders which a sliding cache has dropped.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> from gnn_attention import patterns
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8)
    >>> sizes |= dict(num_hidden_layers=1, num_attention_heads=1)
    >>> model = LlamaModel(LlamaConfig(**sizes, attn_implementation="gnn_attention")).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with torch.no_grad(), use_graph(model, patterns.self_loops(64)):
    ...     alone = model(tokens).last_hidden_state
    >>> # in float32: some 60 roundings of numbers of at most 8 ** 0.5
    >>> last = model(tokens[:, 2:]).last_hidden_state
    >>> torch.allclose(alone[:, 2:], last, rtol=0, atol=60 * 2**-24 * 8**0.5)
    True
    """
    if not isinstance(graph_or_function, TokenGraph):
        if not callable(graph_or_function):
            got = f"(layer, head, length) -> TokenGraph or None, got {type(graph_or_function).__name__}"
            raise TypeError(f"graph_or_function must be a TokenGraph or a function {got}")
        checks.check_signature("graph_or_function", graph_or_function, "layer", "head", "length")
    checks.instance("model", model, nn.Module)
    return _overrides.in_force(Override(model, graph_or_function, bool(replace)))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
