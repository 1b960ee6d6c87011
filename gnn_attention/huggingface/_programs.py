"""Attention of Hugging Face models inside a program of one piece: ``fullgraph=True`` and ``torch.export``.

There the edges are numbers that nobody knows yet (transformers reads packed documents off the positions), and
no step may leave the program to make a plan of them. The mask is made as a table for all pairs, as torch's
own attention has it, and attention is the formula over all pairs, or SDPA where that holds the call.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support.dynamo import constant
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.convert.masks import is_above_lowest
from gnn_attention.huggingface._overrides import OPEN, module_name
from gnn_attention.score_mods import softcap

UNSUPPORTED = ("cache", "cu_seq_lens_q", "indices", "block_indices")


class Arguments(NamedTuple):
    """The arguments of one call; ``dropout`` is 0 outside of training, ``is_causal`` None where unknown.

    ``mask`` is what the mask function gave, a tensor, or None; ``others`` are keyword arguments that some
    models pass.
    """

    module: nn.Module
    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    mask: Any
    scale: float
    dropout: float
    is_causal: bool | None
    cap: float | None
    position_bias: Tensor | None
    sinks: Float[Tensor, " heads"] | None
    others: dict[str, Any]


def is_whole() -> bool:
    """True in a program that may not be left; one of several pieces leaves for our kernels."""
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_exporting() or not torch.compiler.is_dynamo_compiling() or _has_one_piece()


@constant
def _has_one_piece() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loads the compiler

    return bool(InstructionTranslator.current_tx().one_graph)


def attention(
    call: Arguments,
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst src"] | None]:
    """The output, and the weights for ``output_attentions``.

    NotImplementedError for :data:`UNSUPPORTED`, and inside of a block of ``use_graph`` or ``attending``.
    """
    if OPEN:
        raise NotImplementedError(
            "use_graph and attending hold in no program of one piece: compile without fullgraph=True"
        )
    passed = [name for name in UNSUPPORTED if call.others.get(name) is not None]
    if passed:
        raise NotImplementedError(
            f"{module_name(call.module)} passes {passed[0]} in a program of one piece, which knows no edges: "
            "compile without fullgraph=True"
        )
    edge, numbers = _edges(call)
    added = [table for table in (call.position_bias, numbers) if table is not None]
    wants_weights = bool(call.others.get("output_attentions"))
    if wants_weights or added or call.cap is not None or call.sinks is not None:
        out, weights = _by_formula(call, edge, added)
        return out, weights if wants_weights else None
    heard = None if edge is None else edge.any(-1, keepdim=True)
    mask = None if edge is None or heard is None else edge | ~heard
    grouped = call.q.shape[1] != call.k.shape[1]
    out = functional.scaled_dot_product_attention(
        call.q, call.k, call.v, mask, call.dropout, scale=call.scale, enable_gqa=grouped
    )
    return out if heard is None else out.masked_fill(~heard, 0.0), None


def _edges(call: Arguments) -> tuple[Bool[Tensor, "..."] | None, Tensor | None]:
    """Where the mask has edges, None for all pairs, and the numbers that it adds."""
    num_dst, num_src = call.q.shape[2], call.k.shape[2]
    if call.mask is None:
        is_full = num_dst == 1 or not call.is_causal
        pairs = torch.ones(1, 1, num_dst, num_src, dtype=torch.bool, device=call.q.device)
        return None if is_full else pairs.tril(), None
    mask = call.mask[..., :num_src]
    if mask.dtype == torch.bool:
        return mask, None
    edge = is_above_lowest(mask)
    return edge, mask.masked_fill(~edge, 0.0)


def _by_formula(call: Arguments, edge: Tensor | None, added: list[Tensor]) -> tuple[Tensor, Tensor]:
    wide, heads = edge_softmax.accumulation_dtype(call.q.dtype), call.q.shape[1]
    k, v = (edge_softmax.per_query_head(x.to(wide), heads) for x in (call.k, call.v))
    logits = call.q.to(wide) @ k.mT * call.scale
    logits = logits if call.cap is None else softcap(call.cap)(logits, *[torch.tensor(0)] * 4)
    for table in added:
        logits = logits + table[..., : k.shape[2]].to(wide)
    logits = logits if edge is None else logits.masked_fill(~edge, -torch.inf)
    sinks = None if call.sinks is None else call.sinks.to(wide).view(1, -1, 1, 1)
    weights, _ = edge_softmax.row_softmax(logits, sinks)
    out = (functional.dropout(weights, call.dropout) if call.dropout else weights) @ v
    return out.to(call.q.dtype), weights.to(call.q.dtype)
