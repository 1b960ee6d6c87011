"""Build graphs from attention masks: bool masks of both conventions, and additive masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.convert.formats import kind_error, read_sparse_entries
from gnn_attention.graph import TokenGraph, edge_list, rules


def from_mask(mask: Tensor, meaning: str | None = None) -> Any:
    """Build a graph from a mask ``[dst, src]``, ``[heads, dst, src]`` or ``[batch, heads, dst, src]``.

    ``meaning`` is "attend" (True = edge, as in SDPA; the default for bool), "masked" (True = no edge, as
    in ``nn.MultiheadAttention``) or "additive" (the default for float). In an additive mask -inf and
    the lowest number of the dtype, or of a half dtype that it was cast from, mean no edge. Returns a
    :class:`TokenGraph`, or ``(graph, bias)`` if an additive mask has numbers other than 0; the bias is
    ``[E]``, ``[heads, E]`` or ``[batch, heads, E]`` in ``graph.edge_index`` order. A leading axis of size
    1 broadcasts. Missing entries of a sparse bool tensor are False. torch's causal biases are allowed.

    Raises TypeError for other objects, and for a dtype that does not fit the meaning. Raises
    ValueError for NaN or +inf, a wrong number of axes, 0 heads or samples, and a bias on edges that
    vary by head or sample. A float mask may be an adjacency if it excludes no pair and has only
    ones, or zeros and positive numbers; without a meaning, it also raises ValueError.

    >>> from_mask(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    # Most floats of one byte have no -inf.
    is_float = isinstance(mask, Tensor) and mask.is_floating_point() and mask.itemsize > 1
    if not isinstance(mask, Tensor) or not (is_float or mask.dtype == torch.bool):
        raise kind_error("mask must be a bool or float tensor", mask)
    if type(mask).__module__ == "torch.nn.attention.bias" and hasattr(mask, "variant"):
        checks.choice("meaning", meaning or "attend", ("attend",))
        bias: Any = mask
        return patterns.causal_aligned(bias.seq_len_q, bias.seq_len_kv, bias.variant.name.lower())
    mask = edge_list.unwrap_tensor("mask", mask, (torch.strided, *edge_list.SPARSE_LAYOUTS))
    if not 2 <= mask.dim() <= 4 or 0 in mask.shape[:-2]:
        raise ValueError(
            "mask must be [dst, src], [heads, dst, src] or [batch, heads, dst, src], heads and batch "
            f"at least 1, got {list(mask.shape)}"
        )
    convention = meaning or ("additive" if is_float else "attend")
    checks.choice("meaning", convention, ("attend", "masked", "additive"))
    if (convention == "additive") != is_float:
        raise TypeError(f"meaning={convention!r} does not fit {mask.dtype}: only float masks are additive")
    if mask.layout in edge_list.SPARSE_LAYOUTS:
        if convention == "additive":
            raise ValueError(
                "a sparse float mask does not say whether a missing entry is an edge: use from_pyg(mask, "
                "weight=True) for an adjacency, mask.to_dense() for an additive mask"
            )
        if mask.dim() == 2:
            edges, is_edge = read_sparse_entries("mask", mask)
            num_dst, num_src = mask.shape
            graph = TokenGraph.from_edges(edges[:, is_edge], num_dst, num_src, coalesce=True, name="mask")
            return graph if convention == "attend" else ~graph
        mask = mask.to_dense()
    mask = mask[(None,) * (4 - mask.dim())]
    cpu_mask = mask.detach().cpu()
    if convention == "additive":
        edges = find_additive_edges(cpu_mask)
        if meaning is None:
            _refuse_adjacency(cpu_mask)
        return _from_additive(mask, edges)
    return _from_bool_mask(cpu_mask if convention == "attend" else ~cpu_mask)


def find_additive_edges(mask: Tensor) -> Tensor:
    if mask.isnan().any() or (mask == torch.inf).any():
        raise ValueError("an additive mask holds 0.0, finite numbers and -inf; this one holds NaN or +inf")
    return is_above_lowest(mask)


def is_above_lowest(mask: Tensor) -> Tensor:
    """Return True where a mask is above the lowest number of its dtype, or of a half dtype before a cast."""
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return (mask > lowest) & (mask != torch.finfo(torch.float16).min)


def _refuse_adjacency(mask: Tensor) -> None:
    resembles_adjacency = (mask == 0).any() or (mask == 1).all()
    if (mask > 0).any() and resembles_adjacency and is_above_lowest(mask).all():
        raise ValueError(
            "a float mask with zeros and positive numbers is ambiguous: if 0 is not an edge, pass mask != 0 "
            "or use from_scipy(mask.numpy(), rows='dst', weight=True); if the numbers are added to "
            "logits, pass meaning='additive'"
        )


def _from_additive(mask: Tensor, is_edge: Tensor) -> TokenGraph | tuple[TokenGraph, Tensor]:
    if not (mask.detach().cpu().masked_select(is_edge) != 0).any():
        return _from_bool_mask(is_edge)
    if not (is_edge == is_edge[:1, :1]).all():
        raise ValueError(
            "this additive mask holds a bias, and its edges vary by head or sample: "
            "pass a score_mod and a bool mask instead"
        )
    graph = _from_bool_mask(is_edge[:1, :1])
    src, dst = graph.edges_on(mask.device)
    bias: Float[Tensor, "batch heads edges"] = mask[:, :, dst, src]
    bias = bias[0] if bias.shape[0] == 1 else bias
    return graph, bias[0] if bias.shape[:-1] == (1,) else bias


def _from_bool_mask(mask: Tensor) -> TokenGraph:
    batch, num_heads, num_dst, num_src = mask.shape
    if batch == num_heads == 1:
        dst, src = mask[0, 0].nonzero(as_tuple=True)
        return TokenGraph.from_edges(torch.stack([src, dst]), num_dst, num_src, name="mask")
    # The rule broadcasts an axis of size 1, so the graph does not vary along it.
    rule = partial(rules.look_up_blocks, mask.clone() if batch > 1 else mask[0].clone(), 1, 1)
    sizes = {"heads": num_heads if num_heads > 1 else None, "batch": batch if batch > 1 else None}
    return TokenGraph.from_rule(rule, num_dst, num_src, name="mask", **sizes)
