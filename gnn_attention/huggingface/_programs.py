"""Compute the attention of Hugging Face models under ``fullgraph=True`` and ``torch.export``.

Such a program has no graph break in which a token graph could be planned, and its edges are unknown
during tracing. So the mask is a dense tensor, and attention is SDPA or a softmax over all senders.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support.dynamo import constant
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.convert.masks import is_above_lowest
from gnn_attention.huggingface._contexts import OPEN_CONTEXTS, module_name
from gnn_attention.score_mods import softcap

UNSUPPORTED_ARGUMENTS = ("cache", "cu_seq_lens_q", "indices", "block_indices")


class Arguments(NamedTuple):
    """The arguments of one attention call; ``others`` are keywords that only some models pass."""

    module: nn.Module
    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    mask: Any
    others: dict[str, Any]
    scale: float
    dropout: float
    is_causal: bool | None
    cap: float | None
    position_bias: Tensor | None
    sinks: Float[Tensor, " heads"] | None


def is_full_graph() -> bool:
    """Return whether this code is traced into a program without graph breaks."""
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_exporting() or not torch.compiler.is_dynamo_compiling() or _has_one_graph()


@constant
def _has_one_graph() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loads the compiler

    return bool(InstructionTranslator.current_tx().one_graph)


def attend_all_pairs(
    call: Arguments,
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst src"] | None]:
    """Return the output, and the weights if ``output_attentions`` is set."""
    if OPEN_CONTEXTS:
        raise NotImplementedError("use_graph and attending need graph breaks: compile without fullgraph=True")
    for name in UNSUPPORTED_ARGUMENTS:
        if call.others.get(name) is not None:
            raise NotImplementedError(
                f"{module_name(call.module)} passes {name}, which is unsupported with "
                "fullgraph=True: compile without it"
            )
    is_edge, mask_bias = _read_mask(call)
    biases = [bias for bias in (call.position_bias, mask_bias) if bias is not None]
    needs_weights = bool(call.others.get("output_attentions"))
    if needs_weights or biases or call.cap is not None or call.sinks is not None:
        out, weights = _attend_densely(call, is_edge, biases)
        return out, weights if needs_weights else None
    # SDPA may return NaN for receivers without edges, so they get all edges and their output is set to 0.
    has_edges = None if is_edge is None else is_edge.any(-1, keepdim=True)
    mask = None if is_edge is None or has_edges is None else is_edge | ~has_edges
    is_grouped = call.q.shape[1] != call.k.shape[1]
    out = functional.scaled_dot_product_attention(
        call.q, call.k, call.v, mask, call.dropout, scale=call.scale, enable_gqa=is_grouped
    )
    return out if has_edges is None else out.masked_fill(~has_edges, 0.0), None


def _read_mask(call: Arguments) -> tuple[Bool[Tensor, "..."] | None, Tensor | None]:
    """Return where the mask has edges (None: everywhere), and the numbers that it adds to logits."""
    num_dst, num_src = call.q.shape[2], call.k.shape[2]
    if call.mask is None:
        is_full = num_dst == 1 or not call.is_causal
        all_pairs = torch.ones(1, 1, num_dst, num_src, dtype=torch.bool, device=call.q.device)
        return None if is_full else all_pairs.tril(), None
    mask = call.mask[..., :num_src]
    if mask.dtype == torch.bool:
        return mask, None
    is_edge = is_above_lowest(mask)
    return is_edge, mask.masked_fill(~is_edge, 0.0)


def _attend_densely(call: Arguments, is_edge: Tensor | None, biases: list[Tensor]) -> tuple[Tensor, Tensor]:
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    k, v = (edge_softmax.per_query_head(x.to(dtype), call.q.shape[1]) for x in (call.k, call.v))
    logits = call.q.to(dtype) @ k.mT * call.scale
    logits = logits if call.cap is None else softcap(call.cap)(logits, *[torch.tensor(0)] * 4)
    for bias in biases:
        logits = logits + bias[..., : k.shape[2]].to(dtype)
    logits = logits if is_edge is None else logits.masked_fill(~is_edge, -torch.inf)
    sinks = None if call.sinks is None else call.sinks.to(dtype).view(1, -1, 1, 1)
    weights, _ = edge_softmax.row_softmax(logits, sinks)
    out = (functional.dropout(weights, call.dropout) if call.dropout else weights) @ v
    return out.to(call.q.dtype), weights.to(call.q.dtype)
