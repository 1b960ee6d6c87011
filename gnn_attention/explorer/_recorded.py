"""One run of a Hugging Face model as a page shows it: q, k, v and the output matrix of every layer.

The model computes as it does, with ``attn_implementation="gnn_attention"``: what its attention is given there
is recorded. Its other parts stay behind, so the page shows what a cut changes in a layer, not in later ones.
"""

from __future__ import annotations

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
from gnn_attention.explorer._pack import (
    EACH_ITS_OWN,
    Source,
    Words,
    bits,
    check_length,
    check_weight,
    encode_tensor,
)
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import LayerTrace, record

Layers = int | Iterable[int] | None


def from_pretrained(name: str) -> tuple[nn.Module, Any]:
    """A model and its tokenizer by name or from a folder; OSError or ValueError where there is none."""
    model = AutoModel.from_pretrained(name, attn_implementation=huggingface.NAME).eval()
    return model, AutoTokenizer.from_pretrained(name)


def record_source(
    words: Words, model: nn.Module, tokenizer: Any = None, name: str | None = None, layers: Layers = None
) -> Source:
    """What the attention of a text model did in one run over the text; the model is left as it was."""
    tokens = _tokens(words, tokenizer)
    check_length(tokens)
    traces = _traces(model, torch.tensor([[token for token, _ in tokens]]), layers)
    shown = [_layer(trace) for trace in traces]
    width = (shown[0]["output"] or shown[0]["messages"])["shape"][-1]
    name = name or Path(getattr(model, "name_or_path", "")).name or type(model).__name__
    packed = {"kind": "record", "name": name, "width": width, "layers": shown}
    check_weight(packed, "take fewer layers (layers=[0, 1], --layers 0 1) or a shorter text")
    return Source(tokens, packed, _union_of_calls([trace.call for trace in traces]))


def _tokens(words: Words, tokenizer: Any) -> list[tuple[int, str]]:
    # ids and their texts, as they stand in the text where the tokenizer knows
    if not isinstance(words, str):
        return [(token, str(token) if tokenizer is None else tokenizer.decode([token])) for token in words]
    if tokenizer is None:
        raise TypeError("a text needs the model's tokenizer: give model=(model, tokenizer), or token ids")
    found = tokenizer(words, return_offsets_mapping=bool(getattr(tokenizer, "is_fast", False)))
    ids = found["input_ids"]
    spans = found.get("offset_mapping") or [(0, 0)] * len(ids)
    texts = [words[start:stop] for start, stop in spans]
    return [(token, text or tokenizer.decode([token])) for token, text in zip(ids, texts, strict=True)]


@torch.no_grad()
def _traces(model: nn.Module, ids: Tensor, layers: Layers) -> Sequence[LayerTrace]:
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if not hasattr(config, "_attn_implementation"):
        expected = "a Hugging Face text model or a LanguageModel with its vocabulary"
        raise TypeError(f"model must be {expected}, got {kind}")
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{kind} has an encoder and a decoder: give one, model.get_encoder()")
    if layers is not None:
        layers = checks.sizes("layers", layers if isinstance(layers, Iterable) else [layers])
    if layers is not None and (not layers or max(layers) >= config.num_hidden_layers):
        most = config.num_hidden_layers - 1
        raise IndexError(f"layers must be some of 0 .. {most}, the model's, got {layers}")
    ids = ids.to(next(model.parameters()).device)
    with _route_attention(model):
        found = record(model, input_ids=ids, use_cache=False, layers=layers).layers
    if len(found) != (config.num_hidden_layers if layers is None else len(set(layers))):
        got = f"makes {len(found)} calls of transformers' attention in {config.num_hidden_layers} layers"
        raise NotImplementedError(f"{kind} {got}: the page shows one for each layer")
    return sorted(found, key=lambda trace: trace.number)


@contextmanager
def _route_attention(model: Any) -> Iterator[None]:
    # the model attends through this library, in eval mode; afterwards as before
    before, training = model.config._attn_implementation, [(part, part.training) for part in model.modules()]
    model.eval()
    model.set_attn_implementation(huggingface.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for part, mode in training:
            part.training = mode


def _layer(trace: LayerTrace) -> dict[str, Any]:
    # of W_O and the messages, the smaller
    call, number = trace.call, trace.number
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not tensor.isfinite().all():
            raise ValueError(f"{name} of layer {number} has non-finite numbers: there is nothing to show")
    W_O, b_O = trace.heads.W_O.detach(), trace.heads.b_O
    values = edge_softmax.per_query_head(call.v.double(), len(W_O))[0]
    as_messages = call.v.shape[2] < call.v.shape[3]
    return {
        "number": number,
        "q": encode_tensor(call.q[0]),
        "k": encode_tensor(call.k[0]),
        "v": encode_tensor(call.v[0]),
        "output": None if as_messages else encode_tensor(W_O),
        "messages": encode_tensor(values @ W_O.to(values)) if as_messages else None,
        "outputBias": None if b_O is None else encode_tensor(b_O),
        "bias": None if call.score_mod is None else encode_tensor(_bias(call)),
        "sinks": None if call.sink_logits is None else encode_tensor(call.sink_logits),
        "scale": call.scale,
        "mask": bits(_mask(call)),
    }


def _bias(call: AttentionCall) -> Float[Tensor, "heads dst src"]:
    # what the score_mod makes of the logit of every pair, less what it was
    keys = edge_softmax.per_query_head(call.k.double(), call.q.shape[1])
    plain = call.scale * call.q.double() @ keys.mT
    dst, src = torch.meshgrid(torch.arange(plain.shape[2]), torch.arange(plain.shape[3]), indexing="ij")
    changed = call.apply_score_mod(plain, dst.to(plain.device), src.to(plain.device))
    return torch.nan_to_num(changed - plain, neginf=-1e30)[0]


def _mask(call: AttentionCall) -> Bool[Tensor, "tokens tokens"]:
    if call.graph.heads is not None:
        raise NotImplementedError(f"{call.graph!r} differs by head, and a page has one graph for a layer")
    return call.graph.mask().view(call.graph.num_dst, call.graph.num_src)


def _union_of_calls(calls: list[AttentionCall]) -> TokenGraph:
    masks, graph = [_mask(call) for call in calls], calls[0].graph
    same = all(torch.equal(mask, masks[0]) for mask in masks)
    if same and graph.batch is None:
        return graph
    union = torch.stack(masks).any(0)
    edges = union.nonzero().mT.flip(0)
    return TokenGraph.from_edges(edges, len(union), name="edges" if same else EACH_ITS_OWN)
