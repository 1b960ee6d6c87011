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
from gnn_attention.huggingface._overrides import blocks, named
from gnn_attention.score_mods import softcap

UNSUPPORTED = ("cache", "cu_seq_lens_q", "indices", "block_indices")


class Arguments(NamedTuple):
    """The arguments of one call; ``dropout`` is 0 outside of training.

    ``tensors`` are query, key and value. ``mask`` is what the mask function gave, a tensor, or None.
    ``others`` are keyword arguments that some models pass.
    """

    module: nn.Module
    tensors: tuple[Tensor, ...]
    mask: Any
    scaling: float | Tensor | None
    dropout: float
    is_causal: bool | None
    cap: float | None
    position_bias: Tensor | None
    sinks: Tensor | None
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
    given: Arguments,
) -> tuple[Float[Tensor, "batch dst heads value_dim"], Float[Tensor, "batch heads dst src"] | None]:
    """The output, and the weights for ``output_attentions``.

    NotImplementedError for :data:`UNSUPPORTED`, and inside of a block of ``use_graph`` or ``attending``.
    """
    (query, key, value), mask, dropout = given.tensors, given.mask, given.dropout
    if blocks.entered:
        raise NotImplementedError(
            "use_graph and attending hold in no program of one piece (fullgraph=True or torch.export): "
            "compile the model without fullgraph=True"
        )
    passed = [name for name in UNSUPPORTED if given.others.get(name) is not None]
    if passed:
        raise NotImplementedError(
            f"{named(given.module)} passes {passed[0]} in a program of one piece (fullgraph=True or "
            "torch.export), which knows no edges: compile it without fullgraph=True"
        )
    if mask is None and query.shape[2] > 1:
        causal = getattr(given.module, "is_causal", None) if given.is_causal is None else given.is_causal
        pairs = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = pairs.tril() if causal else None
    scale = query.shape[-1] ** -0.5 if given.scaling is None else given.scaling
    if isinstance(scale, Tensor):
        query, scale = query * scale, 1.0
    edge, numbers = _edges(mask, key.shape[2])
    wanted = bool(given.others.get("output_attentions"))
    cap, sinks, tables = given.cap, given.sinks, (given.position_bias, numbers)
    if not wanted and all(x is None for x in (cap, sinks, *tables)):
        return _by_sdpa(query, key, value, edge, scale, dropout).transpose(1, 2).contiguous(), None
    wide, heads = edge_softmax.accumulation_dtype(query.dtype), query.shape[1]
    k, v = (edge_softmax.per_query_head(x.to(wide), heads) for x in (key, value))
    logits = query.to(wide) @ k.mT * scale
    logits = logits if cap is None else softcap(cap)(logits, *[torch.tensor(0)] * 4)
    for table in tables:
        logits = logits if table is None else logits + table[..., : key.shape[2]].to(wide)
    if edge is not None:
        logits = logits.masked_fill(~edge, -torch.inf)
    if sinks is not None:
        nothing = (logits == -torch.inf).all(-1, keepdim=True)
        sinks = sinks.to(wide).view(1, -1, 1, 1).expand(*logits.shape[:3], 1).masked_fill(nothing, -torch.inf)
    weights, _ = edge_softmax.row_softmax(logits, sinks)
    out = (functional.dropout(weights, dropout) if dropout else weights) @ v
    out = out.to(query.dtype).transpose(1, 2).contiguous()
    return out, weights.to(query.dtype) if wanted else None


def _edges(mask: Tensor | None, num_src: int) -> tuple[Bool[Tensor, "..."] | None, Tensor | None]:
    """Where the mask has edges, and the numbers that it adds."""
    if mask is None:
        return None, None
    mask = mask[..., :num_src]
    if mask.dtype == torch.bool:
        return mask, None
    edge = is_above_lowest(mask)
    return edge, mask.masked_fill(~edge, 0.0)


def _by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, edge: Tensor | None, scale: float, dropout: float
) -> Float[Tensor, "batch heads dst value_dim"]:
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if edge is None:
        return functional.scaled_dot_product_attention(q, k, v, **options)
    heard = edge.any(-1, keepdim=True)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=edge | ~heard, **options)
    return out.masked_fill(~heard, 0.0)
