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

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edge_list import SIGNED
from gnn_attention.huggingface import _overrides, _programs
from gnn_attention.huggingface._alignment import Origin, Place
from gnn_attention.huggingface._masks import LazyMask, lazy_mask, of_tensor, unmasked
from gnn_attention.huggingface._overrides import NAME, GraphFunction, Use, blocks, named
from gnn_attention.huggingface._programs import Arguments
from gnn_attention.huggingface._selections import narrowed
from gnn_attention.huggingface.surgery import changing
from gnn_attention.score_mods import ScoreMod, chain, softcap

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    message = f"this needs transformers 5.21 or newer ({error}): pip install 'gnn_attention[hf]'"
    raise ModuleNotFoundError(message) from None

BackendFunction = Callable[[nn.Module], str | Backend]
_backend: ContextVar[str | Backend | BackendFunction] = ContextVar(
    "gnn_attention.huggingface.backend", default="auto"
)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
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
    sizes, offsets = (batch_size, q_length, kv_length), (q_offset, kv_offset)
    if not _programs.is_whole():
        return lazy_mask(sizes, offsets, mask_function, attention_mask, use_vmap, torch.device(device))
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    table: Tensor = sdpa_mask(
        *sizes, *offsets, mask_function, attention_mask, **skips, use_vmap=use_vmap, device=device
    )
    return table


@contextmanager
def attending(backend: str | Backend | BackendFunction) -> Iterator[None]:
    """A block in which the attention of Hugging Face models is computed by a backend, or its name.

    A function of the attention module returns the backend of that module.

    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> with attending("reference"):
    ...     attention(nn.Module(), x, x, x, None, scaling=0.0, is_causal=True)[0][0, 1, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    token = _backend.set(backend)
    try:
        with blocks.entering():
            yield
    finally:
        _backend.reset(token)


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
    whether it is causal), RuntimeError (the mask function is not registered under this name).
    """
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and sinks.numel() != query.shape[1]:
        what = "passes a sink for each receiver"
        raise NotImplementedError(f"{named(module)} {what}: unsupported, use 'eager'")
    whole = _programs.is_whole()
    if whole:
        query, key, value = _in_one_dtype((query, key, value))
    dropout = float(dropout or 0.0) if module.training else 0.0
    tensors: tuple[Tensor, ...] = query, key, value
    given = Arguments(
        module, tensors, attention_mask, scaling, dropout, is_causal, softcap, position_bias, sinks, others
    )
    return _programs.attention(given) if whole else _attention(given)


@not_compiled
def _attention(given: Arguments) -> tuple[Tensor, Tensor | None]:
    module, mask, sinks, others = given.module, given.mask, given.sinks, given.others
    if others.get("cache") is not None:
        what = "passes cache, a paged cache (continuous batching)"
        raise NotImplementedError(f"{named(module)} {what}: unsupported, use 'eager'")
    query, key, value = _in_one_dtype(given.tensors)
    heads, scaling = query.shape[1], given.scaling
    place, uses, numbers = _placed(given)
    place = narrowed(module, place, heads, others)
    if isinstance(mask, LazyMask) and not mask.checked:
        mask.checked.append(True)
        _warn_of_packing(module, place.own, mask.tokens, others.get("position_ids"))
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    backend = _backend.get()
    backend = backend if isinstance(backend, (str, Backend)) else backend(module)
    options: dict[str, Any] = {"scale": scaling, "dropout": given.dropout}
    options["score_mod"] = _score_mod(place.own, given.cap, given.position_bias, numbers)
    options["sink_logits"] = None if sinks is None else sinks.reshape(-1)
    options["backend"] = changing(uses, module, place, heads, backend)
    if not others.get("output_attentions"):
        out: Tensor = attend(query, key, value, place.own, **options)
        return out.transpose(1, 2).contiguous(), None
    out, info = attend(query, key, value, place.own, return_info=True, **options)
    return out.transpose(1, 2).contiguous(), info.weight_matrix().to(out.dtype)


def backend_now() -> str | Backend | BackendFunction:
    """What :func:`attending` set in this context."""
    return _backend.get()


def _in_one_dtype(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under autocast q, k and v may differ in dtype, which SDPA makes one."""
    kind = tensors[0].device.type
    if len({x.dtype for x in tensors}) > 1 and torch.is_autocast_enabled(kind):
        return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    return tensors


def _score_mod(graph: TokenGraph, cap: float | None, *tables: Tensor | None) -> ScoreMod | None:
    """Softcap first, then the numbers that are added, as all models do."""
    first = (graph.dst_offset, graph.src_offset)
    links: list[ScoreMod] = [] if cap is None else [softcap(cap)]
    links += [partial(_added, table[..., : graph.num_src], first) for table in tables if table is not None]
    return None if not links else links[0] if len(links) == 1 else chain(*links)


def _added(table: Tensor, first: Origin, score: Tensor, b: Any, h: Any, dst: Tensor, src: Tensor) -> Tensor:
    """``score + table[b, h, dst, src]`` for a table from the ``first`` positions on; size 1 broadcasts."""
    ends = (b, h, dst - first[0], src - first[1])
    at = tuple(end for end, size in zip(ends, table.shape, strict=True) if size > 1)
    return score + table.squeeze()[at].to(score.dtype)


def _placed(given: Arguments) -> tuple[Place, list[Use], Tensor | None]:
    """The place of a call under the graphs in force, those that cover it, and numbers that its mask adds."""
    module, mask, (query, key, _) = given.module, given.mask, given.tensors
    sizes, numbers = (query.shape[2], key.shape[2]), None
    if isinstance(mask, LazyMask):
        if tuple(mask.shape[2:]) != sizes:
            got = "{} receivers and {} senders, but its mask has {} and {}".format(*sizes, *mask.shape[2:])
            reason = "it attends to senders of its own making, which have no position; use 'eager'"
            raise ValueError(f"{named(module)} has {got}: {reason}")
        place, uses = mask.place, mask.uses
    else:
        if mask is None:
            own = _without_mask(module, *sizes, given.is_causal)
        else:
            own, numbers = of_tensor(mask, *sizes)
        place, uses = Place(own, query.shape[0], cached=True), _overrides.uses_for(module)
    if given.others.get("cu_seq_lens_q") is not None:
        place = place.within_documents(_lengths(given))
    covering = [use for use in uses if use.covers(module)]
    for use in covering:
        use.calls[0] += 1
        if not isinstance(mask, LazyMask):
            use.check(module, *sizes, masked=mask is not None)
        place = use.place(module, place, query.shape[1])
    return place, covering, numbers


def _warn_of_packing(module: nn.Module, graph: TokenGraph, tokens: Tensor | None, positions: Any) -> None:
    """Where positions begin again and a token attends to the one before, documents are not separated."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != graph.num_dst:
        return
    sample, dst = (positions[:, 1:] <= positions[:, :-1]).nonzero().unbind(1)
    dst = dst + 1
    slot = dst + graph.dst_offset
    before = slot - 1 - graph.src_offset
    there = before >= 0
    if tokens is not None:  # a mask may end before the slots do, and no slot beyond it is a token
        ends = (0, graph.dst_offset + graph.num_dst)
        mask = torch.nn.functional.pad(tokens.to(slot.device, torch.bool), ends)
        there &= mask[sample % len(mask), slot]
    sample, dst, before = sample[there], dst[there], before[there]
    if len(dst) and len(
        leaks := graph.rule(sample, torch.zeros_like(dst), dst, before).expand(dst.shape).nonzero()
    ):
        first = f"(sample {int(sample[leaks[0]])}, token {int(dst[leaks[0]])})"
        what = f"position_ids begin again {first}, but that token attends to the one before it"
        advice = "pass attention_mask=None and use_cache=False, or use_graph with patterns.documents(lengths)"
        warnings.warn(f"{named(module)}: {what}: packed documents are not separated; {advice}", stacklevel=2)


def _lengths(given: Arguments) -> tuple[int, ...]:
    """The lengths of the documents between which ``cu_seq_lens_q`` divides the tokens of one row."""
    (query, key, _), module = given.tensors, given.module
    bounds = [given.others.get(f"cu_seq_lens_{end}") for end in "qk"]
    starts = [torch.as_tensor(x) for x in bounds if x is not None]
    if not all(x.dtype in SIGNED and x.dim() == 1 for x in starts):
        raise TypeError(f"{named(module)}: cu_seq_lens_q and _k must be lists of integers, got {bounds}")
    ends, *of_keys = (x.tolist() for x in starts)
    lengths = tuple(stop - start for start, stop in pairwise(ends))
    fits = ends[:1] == [0] and sum(lengths) == query.shape[2] == key.shape[2] and min(lengths) >= 0
    if len(query) > 1 or not fits or of_keys not in ([], [ends]):
        rows = f"{len(query)} rows of {query.shape[2]} receivers and {key.shape[2]} senders"
        raise NotImplementedError(
            f"{named(module)} passes cu_seq_lens_q {ends} for {rows}, which must divide one row "
            "into documents, from 0 to its length, and be cu_seq_lens_k, too: pack all documents into one "
            "row without a cache (use_cache=False), or leave cu_seq_lens_q out and pad"
        )
    return lengths


def _without_mask(module: nn.Module, num_dst: int, num_src: int, is_causal: bool | None) -> TokenGraph:
    name = named(module)
    if AttentionMaskInterface._global_mapping.get(NAME) is not mask:
        reason = f"the mask function of {NAME!r} is not registered, so padding and windows would be lost"
        advice = f"AttentionMaskInterface.register({NAME!r}, gnn_attention.huggingface.mask)"
        raise RuntimeError(f"no mask came to {name}: {reason}; {advice}")
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if num_dst == 1:  # the newest token attends to all of the cache
        causal = False
    if causal is None:
        reason = "came with no mask and does not say whether it is causal"
        raise ValueError(f"{name} {reason}: pass is_causal, or set it on the module")
    if causal and num_dst != num_src:
        sizes = f"is causal and came with no mask, but has {num_dst} receivers and {num_src} senders"
        raise ValueError(f"{name} {sizes}: pass attention_mask [batch, heads, dst, src]")
    return unmasked(bool(causal), num_dst, num_src)


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
        checks.takes("graph_or_function", graph_or_function, "layer", "head", "length")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a Hugging Face model or a part of one, got {type(model).__name__}")
    _overrides.check_routed(model)
    names = {id(module): name for name, module in model.named_modules()}
    return _overrides.in_force(Use(model, graph_or_function, bool(replace), names))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
