"""Record one run of a Hugging Face model for a page: q, k, v and the output matrix of every layer.

The model runs with ``attn_implementation="gnn_attention"``, so that the inputs of attention are
recorded. Other modules are not recorded: the page shows how a cut changes its own layer, but not
later layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from gnn_attention import edge_softmax, huggingface
from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.explorer import _pack
from gnn_attention.explorer._pack import Source, Text, encode_tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import LayerTrace, record

Layers = int | Iterable[int] | None


def from_pretrained(name: str) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer by name or folder. Raises OSError or ValueError on failure."""
    model = AutoModel.from_pretrained(name, attn_implementation=huggingface.NAME).eval()
    return model, AutoTokenizer.from_pretrained(name)


def record_source(
    text: Text, model: nn.Module, tokenizer: Any = None, name: str | None = None, layers: Layers = None
) -> Source:
    """Record the attention of a text model in one run over a text; the model is left unchanged."""
    tokens = _tokenize(text, tokenizer)
    _pack.check_length(tokens)
    traces = _record_layers(model, torch.tensor([[token for token, _ in tokens]]), layers)
    encoded_layers = [_encode_layer(trace) for trace in traces]
    width = (encoded_layers[0]["output"] or encoded_layers[0]["messages"])["shape"][-1]
    name = name or Path(getattr(model, "name_or_path", "")).name or type(model).__name__
    encoded = {"kind": "record", "name": name, "width": width, "layers": encoded_layers}
    _pack.check_size(encoded, "use fewer layers (layers=[0, 1], --layers 0 1) or a shorter text")
    return Source(tokens, encoded, _merge_graphs([trace.call for trace in traces]))


def _tokenize(text: Text, tokenizer: Any) -> list[tuple[int, str]]:
    """Return the id and text of each token, cut from ``text`` if the tokenizer reports offsets."""
    if not isinstance(text, str):
        return [(token, str(token) if tokenizer is None else tokenizer.decode([token])) for token in text]
    if tokenizer is None:
        raise TypeError("text needs the model's tokenizer: pass model=(model, tokenizer), or token ids")
    encoding = tokenizer(text, return_offsets_mapping=bool(getattr(tokenizer, "is_fast", False)))
    ids = encoding["input_ids"]
    spans = encoding.get("offset_mapping") or [(0, 0)] * len(ids)
    texts = [text[start:stop] for start, stop in spans]
    return [(token, part or tokenizer.decode([token])) for token, part in zip(ids, texts, strict=True)]


@torch.no_grad()
def _record_layers(model: nn.Module, ids: Tensor, layers: Layers) -> Sequence[LayerTrace]:
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if not hasattr(config, "_attn_implementation"):
        raise TypeError(f"model must be a Hugging Face text model or a LanguageModel, got {kind}")
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{kind} has an encoder and a decoder: pass model.get_encoder()")
    if layers is not None:
        layers = checks.sizes("layers", layers if isinstance(layers, Iterable) else [layers])
    if layers is not None and (not layers or max(layers) >= config.num_hidden_layers):
        raise IndexError(f"layers must be in 0 .. {config.num_hidden_layers - 1}, got {layers}")
    ids = ids.to(next(model.parameters()).device)
    with _route_attention(model):
        traces = record(model, input_ids=ids, use_cache=False, layers=layers).layers
    if len(traces) != (total := config.num_hidden_layers if layers is None else len(set(layers))):
        raise NotImplementedError(f"{kind} must attend {total} times, once per layer, got {len(traces)}")
    return sorted(traces, key=lambda trace: trace.number)


@contextmanager
def _route_attention(model: Any) -> Iterator[None]:
    """Switch the model to this library's attention and to eval mode. Restore both on exit."""
    old_implementation = model.config._attn_implementation
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    model.set_attn_implementation(huggingface.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(old_implementation)
        for part, mode in modes:
            part.training = mode


def _encode_layer(trace: LayerTrace) -> dict[str, Any]:
    call = trace.call
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not tensor.isfinite().all():
            raise ValueError(f"{name} of layer {trace.number} has non-finite numbers: check the model")
    W_O, b_O = trace.heads.W_O.detach(), trace.heads.b_O
    values = edge_softmax.per_query_head(call.v.double(), len(W_O))[0]
    # If a text has fewer tokens than a value has channels, its messages take less space than W_O.
    stores_messages = call.v.shape[2] < call.v.shape[3]
    return {
        "number": trace.number,
        "q": encode_tensor(call.q[0]),
        "k": encode_tensor(call.k[0]),
        "v": encode_tensor(call.v[0]),
        "output": None if stores_messages else encode_tensor(W_O),
        "messages": encode_tensor(values @ W_O.to(values)) if stores_messages else None,
        "outputBias": None if b_O is None else encode_tensor(b_O),
        "bias": None if call.score_mod is None else encode_tensor(_compute_score_mod_bias(call)),
        "sinks": None if call.sink_logits is None else encode_tensor(call.sink_logits),
        "scale": call.scale,
        "mask": _pack.encode_mask(_to_mask(call)),
    }


def _compute_score_mod_bias(call: AttentionCall) -> Float[Tensor, "heads dst src"]:
    """Return what the score_mod adds to the score of every pair."""
    keys = edge_softmax.per_query_head(call.k.double(), call.q.shape[1])
    scores = call.scale * call.q.double() @ keys.mT
    dst, src = torch.meshgrid(torch.arange(scores.shape[2]), torch.arange(scores.shape[3]), indexing="ij")
    logits = call.apply_score_mod(scores, dst.to(scores.device), src.to(scores.device))
    return torch.nan_to_num(logits - scores, neginf=-1e30)[0]


def _to_mask(call: AttentionCall) -> Bool[Tensor, "tokens tokens"]:
    if call.graph.heads is not None:
        raise NotImplementedError(f"{call.graph!r} varies by head: a page shows one graph for each layer")
    return call.graph.mask().view(call.graph.num_dst, call.graph.num_src)


def _merge_graphs(calls: list[AttentionCall]) -> TokenGraph:
    graph = calls[0].graph
    masks = [_to_mask(call) for call in calls]
    is_same = all(torch.equal(mask, masks[0]) for mask in masks)
    if is_same and graph.batch is None:
        return graph
    union = torch.stack(masks).any(0)
    edges = union.nonzero().mT.flip(0)
    return TokenGraph.from_edges(edges, len(union), name="edges" if is_same else _pack.UNION_NAME)
