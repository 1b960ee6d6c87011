"""Run Hugging Face models on token graphs.

Importing this module registers an attention function and a mask function under the name ``"gnn_attention"``.
(Without a mask function transformers would pass no mask, and padding and windows would be lost.) Then

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="gnn_attention")

or ``model.set_attn_implementation("gnn_attention")`` computes the same as before, along the edges of the
model's own mask. ``with ga.use_graph(model, graph):`` changes these edges, also in ``generate()``.

This supports grouped heads, a scale, softcap, sinks, a bias per pair, dropout, values wider or
narrower than keys, cross-attention, the model's own masks, its selections of senders or blocks, and
all caches except paged caches. An unsupported argument raises an error that names it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attend, run_and_merge
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface import _contexts, _masks, _programs
from gnn_attention.huggingface._alignment import CACHE_SIZE, CacheKey, CallLayout
from gnn_attention.huggingface._contexts import GraphContext, GraphFunction, InterventionContext, module_name
from gnn_attention.huggingface._masks import LazyMask, graph_of_mask
from gnn_attention.huggingface._programs import Arguments
from gnn_attention.score_mods import ScoreMod, chain, softcap

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    message = f"install transformers 5.21 or newer ({error}): pip install 'gnn_attention[hf]'"
    raise ModuleNotFoundError(message) from None

BackendFunction = Callable[[nn.Module], str | Backend]
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
    """Return a lazy mask with positions, which all layers with this kind of mask share.

    If ``generate`` has prepared a mask (for a static cache), that ``attention_mask`` is returned. A
    full-graph program (``fullgraph=True``, ``torch.export``) gets a tensor, as in torch's own
    attention.
    """
    frame = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    if not _programs.is_full_graph():
        return _masks.build_lazy_mask(frame, mask_function, attention_mask, use_vmap, torch.device(device))
    options: dict[str, Any] = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device}
    dense_mask: Tensor = sdpa_mask(*frame, mask_function, attention_mask, **options)
    return dense_mask


def attending(backend: str | Backend | BackendFunction) -> AbstractContextManager[None]:
    """Compute the attention of Hugging Face models with a backend, inside a ``with`` statement.

    ``backend`` is a backend, its name, or a function of the attention module that returns one.

    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> with attending("reference"):
    ...     attention(nn.Module(), x, x, x, None, scaling=0.0, is_causal=True)[0][0, 1, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    return _contexts.set_variable(_backend, backend)


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
    """Compute attention on the graph of the mask. Models call this function through transformers.

    Also returns the weights if the model passes ``output_attentions`` on. GPT-2 and OPT do not: see
    ``trace.record(model, ids).layers[i]["attn.hook_pattern"]``. Ignores arguments that change
    nothing here: the mask already contains ``sliding_window``. Raises NotImplementedError for
    unsupported arguments, and ValueError without a mask if the module does not say whether it is
    causal.
    """
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and sinks.numel() != query.shape[1]:
        raise NotImplementedError(f"{module_name(module)} passes a sink for each receiver: use 'eager'")
    sinks = None if sinks is None else sinks.reshape(-1)
    device_type = query.device.type
    # SDPA also casts its inputs under autocast.
    if len({query.dtype, key.dtype, value.dtype}) > 1 and torch.is_autocast_enabled(device_type):
        query, key, value = (x.to(torch.get_autocast_dtype(device_type)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scale, Tensor):
        query, scale = query * scale, 1.0
    options: dict[str, Any] = {"scale": scale, "dropout": float(dropout or 0.0) if module.training else 0.0}
    options["is_causal"] = getattr(module, "is_causal", None) if is_causal is None else is_causal
    options |= {"cap": softcap, "position_bias": position_bias, "sinks": sinks}
    call = Arguments(module, query, key, value, attention_mask, others, **options)
    out, weights = _programs.attend_all_pairs(call) if _programs.is_full_graph() else _attend_on_graph(call)
    return out.transpose(1, 2).contiguous(), weights


@not_compiled
def _attend_on_graph(call: Arguments) -> tuple[Tensor, Tensor | None]:
    if call.others.get("cache") is not None:
        raise NotImplementedError(f"{module_name(call.module)} passes cache, a paged cache: use 'eager'")
    layout, contexts, mask_bias = _align_call(call)
    layout = _masks.restrict_to_selection(call, layout)
    graph = layout.graph
    positions = call.others.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == graph.num_dst:
        warn = partial(_warn_about_packing, call.module, layout, positions)
        _masks.compute_once(positions, CacheKey.of(graph), warn)
    options: dict[str, Any] = {"scale": call.scale, "dropout": call.dropout, "sink_logits": call.sinks}
    # All models apply softcap before they add a bias.
    score_mods: list[ScoreMod] = [] if call.cap is None else [softcap(call.cap)]
    biases = [bias[..., : graph.num_src] for bias in (call.position_bias, mask_bias) if bias is not None]
    score_mods += [partial(_add_bias, bias, graph.dst_offset, graph.src_offset) for bias in biases]
    options["score_mod"] = chain(*score_mods) if len(score_mods) > 1 else next(iter(score_mods), None)
    options["backend"] = _choose_backend(call, layout, contexts)
    if not call.others.get("output_attentions"):
        return attend(call.q, call.k, call.v, graph, **options), None
    out, info = attend(call.q, call.k, call.v, graph, return_info=True, **options)
    return out, info.weight_matrix().to(out.dtype)


def _add_bias(
    bias: Tensor, dst_offset: int, src_offset: int, score: Tensor, b: Any, h: Any, dst: Tensor, src: Tensor
) -> Tensor:
    # Axes of size 1 broadcast.
    indices = (b, h, dst - dst_offset, src - src_offset)
    index = tuple(i for i, size in zip(indices, bias.shape, strict=True) if size > 1)
    return score + bias.squeeze()[index].to(score.dtype)


def _align_call(call: Arguments) -> tuple[CallLayout, list[GraphContext], Tensor | None]:
    """Return the layout of a call, the contexts that apply to it, and the bias of its mask."""
    module, mask = call.module, call.mask
    num_dst, num_src = call.q.shape[2], call.k.shape[2]
    name = module_name(module)
    has_positions = isinstance(mask, LazyMask)
    if has_positions:
        shape = list(mask.shape[2:])
        if shape != [num_dst, num_src]:
            raise ValueError(
                f"{name} has {num_dst} receivers and {num_src} senders, but its mask has {shape}: "
                "some senders have no position; use 'eager'"
            )
        layout, contexts, bias = mask.layout, mask.contexts, None
    else:
        graph, bias = (_default_graph(call), None) if mask is None else graph_of_mask(mask, num_dst, num_src)
        layout = CallLayout(graph, call.q.shape[0], is_cached=True)
        contexts = _contexts.find_contexts(module)
    if call.others.get("cu_seq_lens_q") is not None:
        documents = _build_cached(patterns.documents, _document_lengths(call), causal=False)
        layout = layout.restrict(documents, False, name)
    contexts = [context for context in contexts if context.is_self_attention(module)]
    for context in contexts:
        context.num_calls += 1
        if not has_positions:
            context.check_tensor_mask(module, layout.graph, mask is not None)
        layout = context.apply(module, layout, call.q.shape[1])
    return layout, contexts, bias


def _choose_backend(call: Arguments, layout: CallLayout, contexts: list[GraphContext]) -> str | Backend:
    """Return the active backend, wrapped by interventions and by the recorder of a trace."""
    module = call.module
    choice = _backend.get()
    backend: str | Backend = choice if isinstance(choice, (str, Backend)) else choice(module)
    parts: list[Any] = [(layout, ())]
    interventions = [c for c in contexts if isinstance(c, InterventionContext) and c.intervention.change]
    for context in interventions:
        if context.covers(module):
            change = partial(context.intervention.change, context.layer_index(module))
            split = partial(context.split, module, call.q.shape[1])
            parts = context.intervention.split_edges(parts, split, change)
    # With padding on the left this is a tensor with one position for each sample.
    first_position = layout.graph.src_offset - (0 if layout.left_padding is None else layout.left_padding)
    graphs = [(part.graph, partial(_change_values, changes, first_position)) for part, changes in parts]
    if len(graphs) > 1:
        backend = Backend("changed messages", partial(_run_parts, graphs, backend))
    wrap = _contexts.BACKEND_WRAPPER.get()
    return backend if wrap is None else wrap(module, backend, graphs[1:], layout)


def _change_values(changes: Sequence[Callable[..., Tensor]], first_position: Any, v: Tensor) -> Tensor:
    return reduce(lambda values, change: change(first_position, values), changes, v)


def _run_parts(graphs: list[Any], backend: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    calls = [dataclasses.replace(call, graph=graph, v=change(call.v)) for graph, change in graphs]
    return run_and_merge(call, calls, backend)


def _warn_about_packing(module: nn.Module, layout: CallLayout, positions: Int[Tensor, "batch dst"]) -> None:
    """Warn if positions begin again at a token that attends to the token before it."""
    graph = layout.graph
    # `previous` is the receiver before a restart, and `src` is the same token as a sender.
    sample, previous = (positions[:, 1:] <= positions[:, :-1]).nonzero().unbind(1)
    src = previous + graph.dst_offset - graph.src_offset
    are_tokens = (src >= 0) & (src + 1 < graph.num_src)
    if layout.is_token is not None:
        is_token = layout.is_token.to(src.device)
        are_tokens &= is_token[sample % len(is_token), (src + 1).clamp(0, graph.num_src - 1)]
    sample, previous, src = sample[are_tokens], previous[are_tokens], src[are_tokens]
    if not len(sample):
        return
    leaks = graph.edges.contains(sample, torch.zeros_like(src), previous + 1, src).expand(src.shape).nonzero()
    if len(leaks):
        leak = leaks[0]
        warnings.warn(
            f"{module_name(module)}: position_ids begin again (sample {int(sample[leak])}, token "
            f"{int(previous[leak]) + 1}) at a token that attends to the one before: packed documents are not "
            "separated; pass attention_mask=None and use_cache=False, or use_graph with patterns.documents",
            stacklevel=2,
        )


def _document_lengths(call: Arguments) -> tuple[int, ...]:
    """Return the lengths of the documents that ``cu_seq_lens_q`` packs into one row."""
    cu_seq_lens = (call.others.get(f"cu_seq_lens_{side}") for side in "qk")
    ends, key_ends = ([] if x is None else torch.as_tensor(x).tolist() for x in cu_seq_lens)
    lengths = tuple(stop - start for start, stop in pairwise(ends))
    batch, num_dst, num_src = len(call.q), call.q.shape[2], call.k.shape[2]
    if batch > 1 or key_ends not in ([], ends) or ends[0] or not ends[-1] == num_dst == num_src:
        raise NotImplementedError(
            f"{module_name(call.module)} passes cu_seq_lens_q {ends} for {batch} rows of {num_dst} receivers "
            f"and {num_src} senders: pack all documents into one row, from 0 to its end, with use_cache=False"
        )
    return lengths


@lru_cache(maxsize=CACHE_SIZE)
def _build_cached(build: Callable[..., TokenGraph], *sizes: Any, **options: Any) -> TokenGraph:
    return build(*sizes, **options)


def _default_graph(call: Arguments) -> TokenGraph:
    name = module_name(call.module)
    num_dst, num_src = call.q.shape[2], call.k.shape[2]
    # A single receiver is the newest token, which attends to all of the cache.
    is_causal = False if num_dst == 1 else call.is_causal
    if is_causal is None:
        raise ValueError(f"{name} got no mask and does not say whether it is causal: pass is_causal")
    if is_causal and num_dst != num_src:
        raise ValueError(
            f"{name} is causal and has {num_dst} receivers and {num_src} senders, but got no mask: "
            "pass attention_mask"
        )
    builder, sizes = (patterns.causal, [num_dst]) if is_causal else (patterns.cross, [num_dst, num_src])
    return _build_cached(builder, *sizes)


def use_graph(
    model: nn.Module, graph_or_function: TokenGraph | GraphFunction, replace: bool = False
) -> AbstractContextManager[None]:
    """Restrict the attention of a Hugging Face model to a graph, inside a ``with`` statement.

    Args:
        model: a model whose attention is ``"gnn_attention"``, or a part of one (an encoder, a layer).
            All of its self-attention follows the graph; cross-attention is unchanged.
        graph_or_function: a :class:`TokenGraph` at least as long as the longest sequence. Shorter
            ones use its first tokens, and a decoding step the rows of new tokens. Positions count
            from the first token after padding, or from the start of a row of packed documents. A
            function ``(layer, head, length)`` returns a graph for the length so far, or None for
            the model's own. Modules without ``layer_idx`` are numbered in the order of their calls.
        replace: whether the graph replaces the mask of the model (windows, causality, packing)
            instead of restricting it. Padding and empty slots of a cache stay masked.

    Contexts nest: an inner graph restricts the outer graph, or replaces it. A context affects only
    the thread that entered it. A layer that gradient checkpointing recomputes keeps its first
    graph.

    Raises ValueError if a part uses another attention, NotImplementedError if it cannot be changed,
    TypeError for anything but a graph or function. In the context, calls raise ValueError if a
    graph is too short, or replaces a mask and needs senders that a sliding cache has dropped.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> from gnn_attention import patterns
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8)
    >>> sizes |= dict(num_hidden_layers=1, num_attention_heads=1)
    >>> model = LlamaModel(LlamaConfig(**sizes, attn_implementation="gnn_attention")).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with torch.no_grad(), use_graph(model, patterns.self_loops(64)):
    ...     alone = model(tokens).last_hidden_state
    >>> # float32 makes about 60 rounding errors in numbers of at most 8 ** 0.5
    >>> last = model(tokens[:, 2:]).last_hidden_state
    >>> torch.allclose(alone[:, 2:], last, rtol=0, atol=60 * 2**-24 * 8**0.5)
    True
    """
    if not isinstance(graph_or_function, TokenGraph):
        if not callable(graph_or_function):
            kind = type(graph_or_function).__name__
            raise TypeError(f"graph_or_function must be a TokenGraph or f(layer, head, length), got {kind}")
        checks.check_signature("graph_or_function", graph_or_function, "layer", "head", "length")
    checks.instance("model", model, nn.Module)
    return _contexts.activate(GraphContext(model, graph_or_function, bool(replace)))


AttentionInterface.register(_contexts.NAME, attention)
AttentionMaskInterface.register(_contexts.NAME, mask)
