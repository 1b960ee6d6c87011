"""The graph of an attention mask, in every reading that masks have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.convert.formats import sparse_entries, wrong_kind
from gnn_attention.graph import TokenGraph, edge_list, rules


def from_mask(mask: Tensor, meaning: str | None = None) -> Any:
    """The graph of an attention mask ``[dst, src]``, ``[heads, dst, src]`` or ``[batch, heads, dst, src]``.

    ``meaning``: "attend" (True = edge, as in SDPA; the default for bool), "masked" (True = no edge, as in
    ``nn.MultiheadAttention``) or "additive" (the default for float: -inf and the lowest number of the dtype,
    or of a half dtype it was widened from, are non-edges). Returns a :class:`TokenGraph`, or ``(graph,
    bias)`` if an additive mask holds finite numbers other than 0: bias ``[E]``, ``[heads, E]`` or ``[batch,
    heads, E]`` in the order of ``graph.edge_index``. A leading axis of size 1 is the same for all. A sparse
    bool tensor is a mask whose missing entries are False; torch's ``causal_upper_left`` and
    ``causal_lower_right`` are the masks that SDPA reads in them.

    Raises TypeError (another kind of object, a dtype that does not fit the meaning) and ValueError (NaN or
    +inf, a wrong number of axes, a bias on a mask whose edges differ by head or sample, a tensor without
    elements; without a meaning, a float mask that holds zeros and positive numbers and excludes no pair,
    which may be an adjacency).

    >>> from_mask(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    # numbers of one byte have no -inf
    is_float = isinstance(mask, Tensor) and mask.is_floating_point() and mask.itemsize > 1
    if not isinstance(mask, Tensor) or not (is_float or mask.dtype == torch.bool):
        raise wrong_kind("mask must be a bool or float tensor", mask)
    if type(mask).__module__ == "torch.nn.attention.bias" and hasattr(mask, "variant"):
        checks.choice("meaning", meaning or "attend", ("attend",))
        bias: Any = mask
        return patterns.causal_aligned(bias.seq_len_q, bias.seq_len_kv, bias.variant.name.lower())
    mask = edge_list.unwrap_tensor("mask", mask, (torch.strided, *edge_list.SPARSE_LAYOUTS))
    if not 2 <= mask.dim() <= 4 or 0 in mask.shape[:-2]:
        expected = "[dst, src], [heads, dst, src] or [batch, heads, dst, src], heads and batch at least 1"
        raise ValueError(f"mask must be {expected}, got {list(mask.shape)}")
    natural = "additive" if is_float else "attend"
    read_as = checks.choice("meaning", meaning or natural, ("attend", "masked", "additive"))
    if (read_as == "additive") != is_float:
        raise TypeError(
            f"meaning={read_as!r} does not fit a {mask.dtype} mask: additive masks alone are float"
        )
    if mask.layout in edge_list.SPARSE_LAYOUTS:
        if read_as == "additive":
            ways = "from_pyg(mask, weight=True) takes an adjacency, mask.to_dense() is an additive mask"
            raise ValueError(f"a sparse float mask does not say whether a missing entry is an edge: {ways}")
        if mask.dim() == 2:
            edges, values = sparse_entries("mask", mask)
            num_dst, num_src = mask.shape
            graph = TokenGraph.from_edges(edges[:, values], num_dst, num_src, coalesce=True, name="mask")
            return graph if read_as == "attend" else ~graph
        mask = mask.to_dense()
    mask = mask[(None,) * (4 - mask.dim())]
    table = mask.detach().cpu()
    if read_as == "additive":
        edges = additive_edges(table)
        if meaning is None:
            _refuse_adjacency(table)
        return _from_additive(mask, edges)
    return _from_table(table if read_as == "attend" else ~table)


def additive_edges(mask: Tensor) -> Tensor:
    """Where an additive mask has edges: above the lowest number of its dtype, or of a narrower one."""
    if mask.isnan().any() or (mask == torch.inf).any():
        raise ValueError("an additive mask holds 0.0, finite numbers and -inf; this one holds NaN or +inf")
    return is_above_lowest(mask)


def is_above_lowest(mask: Tensor) -> Tensor:
    """Where a number is above the lowest one of its dtype, and of the half dtypes it may have been."""
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return (mask > lowest) & (mask != torch.finfo(torch.float16).min)


def _refuse_adjacency(mask: Tensor) -> None:
    has_zeros_or_ones_alone = (mask == 0).any() or (mask == 1).all()
    if (mask > 0).any() and has_zeros_or_ones_alone and is_above_lowest(mask).all():
        adjacency = "mask != 0, or from_scipy(mask.numpy(), rows='dst', weight=True), if 0 is no edge"
        additive = "meaning='additive' if the numbers are added to logits"
        raise ValueError(
            f"a float mask with zeros and positive numbers is ambiguous: {adjacency}; {additive}"
        )


def _from_additive(mask: Tensor, edges: Tensor) -> TokenGraph | tuple[TokenGraph, Tensor]:
    if not (mask.detach().cpu().masked_select(edges) != 0).any():
        return _from_table(edges)
    if not (edges == edges[:1, :1]).all():
        reason = "holds numbers, and its edges differ by head or sample"
        raise ValueError(f"this additive mask {reason}: give a score_mod and a bool mask instead")
    graph = _from_table(edges[:1, :1])
    src, dst = graph.edges_on(mask.device)
    bias: Float[Tensor, "batch heads edges"] = mask[:, :, dst, src]
    bias = bias[0] if bias.shape[0] == 1 else bias
    return graph, bias[0] if bias.shape[:-1] == (1,) else bias


def _from_table(mask: Tensor) -> TokenGraph:
    batch, heads, num_dst, num_src = mask.shape
    if batch == heads == 1:
        dst, src = mask[0, 0].nonzero(as_tuple=True)
        return TokenGraph.from_edges(torch.stack([src, dst]), num_dst, num_src, name="mask")
    # an axis of size 1 is the same for all
    rule = partial(rules.look_up_blocks, mask.clone() if batch > 1 else mask[0].clone(), 1, 1)
    varies = {"heads": heads if heads > 1 else None, "batch": batch if batch > 1 else None}
    return TokenGraph.from_rule(rule, num_dst, num_src, name="mask", **varies)
