"""Compute the truth (dense float64 attention by the sources' formulas) and the yardstick (SDPA).

Nothing here uses the library's own arithmetic. The masked softmax is ``M exp(l) / sum M exp(l)``
(source S4.6 of docs/sources.md). Standard heads compute ``sum_h A_h (x W_V_h) W_O_h + b_O``
(S0.1 to S0.4), merged ones ``sum_h A_h (x W_M_h)`` with ``l = x W_P x^T / sqrt(d_k)`` (S0.6, S0.9).
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from gnn_attention._support.shapes import Tensor

# A function that takes the logits [B, H, dst, src] and returns new ones.
Modify = Callable[[Tensor], Tensor]


def masked_softmax(logits: Tensor, mask: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Compute ``M exp(l) / (sum_j M exp(l) + exp(sink))`` ``[B, H, dst, src]``; rows without edges are 0."""
    if not logits.shape[-1]:
        return logits
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    shift = torch.maximum(logits.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True), sink).detach()
    shift = shift.masked_fill(shift.isinf(), 0.0)
    mass = mask * (logits - shift).masked_fill(~mask, 0.0).exp()
    total = mass.sum(-1, keepdim=True) + (sink - shift).exp()
    return mass / total.masked_fill(total == 0, 1.0)


def sparsemax(logits: Tensor, mask: Tensor) -> Tensor:
    """Compute ``max(l - t, 0)``; t, from the sorted row, makes its sum 1 (arXiv 1602.02068, algorithm 1)."""
    descending = logits.masked_fill(~mask, -torch.inf).sort(-1, descending=True).values
    sums, rank = descending.cumsum(-1), torch.arange(1, 1 + logits.shape[-1], device=logits.device)
    size = (1 + rank * descending > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, (size - 1).clamp(min=0)) - 1) / size
    return (logits - threshold).clamp(min=0).masked_fill(~mask, 0.0)


NORMALISERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparsemax": sparsemax,
    "sigmoid": lambda logits, mask: mask / (1 + (-logits).exp()),
    "silu": lambda logits, mask: mask * logits / (1 + (-logits).exp()),
    "gelu": lambda logits, mask: mask * logits * (1 + torch.erf(logits / 2**0.5)) / 2,
    "relu": lambda logits, mask: mask * logits.clamp(min=0),
    "relu2": lambda logits, mask: mask * logits.clamp(min=0) ** 2,
    "identity": lambda logits, mask: mask * logits,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None = None,
    sink_logits: Tensor | None = None,
    factors: Tensor | None = None,  # Dropout multiplies the weights by these.
    normaliser: str = "softmax",
    edge_values: Tensor | None = None,
) -> Tensor:
    """Compute dense attention ``[B, Hq, dst, Dv]``; ``edge_values [Hq, Dv, dst, src]`` add to the values."""
    logits = torch.einsum("bhid,bhjd->bhij", q, per_query_head(k, q)) * scale
    logits = logits if modify is None else modify(logits)
    normalise = NORMALISERS.get(normaliser)
    weights = normalise(logits, mask) if normalise else masked_softmax(logits, mask, sink_logits)
    weights = weights if factors is None else weights * factors.to(weights.dtype)
    out = torch.einsum("bhij,bhjv->bhiv", weights, per_query_head(v, q))
    return out if edge_values is None else out + torch.einsum("bhij,hvij->bhiv", weights, edge_values)


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values: query head h uses key/value head ``h // (Hq // Hkv)``."""
    return x[:, [h // (q.shape[1] // x.shape[1]) for h in range(q.shape[1])]]


def layer(
    weights: Mapping[str, Tensor],
    x_src: Tensor,
    x_dst: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None = None,
) -> Tensor:
    """Compute a layer of standard heads ("W_Q", ...) or merged heads ("pattern", "message")."""

    def linear(letter: str, x: Tensor) -> Tensor:
        y = torch.einsum("bid,hde->bhie", x, weights[f"W_{letter}"])
        return y + weights.get(f"b_{letter}", y.new_zeros(1, 1)).unsqueeze(1)

    def append_one(x: Tensor, width: int) -> Tensor:
        # A 1 is appended to each state if ``width`` includes a row or column of biases.
        return pad(x, (0, width - x.shape[-1]), value=1.0)

    W_O, b_O = weights.get("W_O"), weights.get("b_O")
    if "pattern" in weights:
        # Each pattern is multiplied by the states themselves, and messages need no output matrix.
        pattern, message = weights["pattern"], weights["message"]
        q = torch.einsum("bid,hde->bhie", append_one(x_dst, pattern.shape[1]), pattern)
        k = append_one(x_src, pattern.shape[2]).unsqueeze(1)
        v = torch.einsum("bjd,hde->bhje", append_one(x_src, message.shape[1]), message)
    else:
        q, k, v = linear("Q", x_dst), linear("K", x_src), linear("V", x_src)
    z = attention(q, k, v, mask, scale, modify)
    update = z.sum(1) if W_O is None else torch.einsum("bhiv,hvd->bid", z, W_O)
    return update if b_O is None else update + b_O.reshape(-1, b_O.shape[-1]).sum(0)


def lse(logits: Tensor, mask: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Compute the log-sum-exp of each receiver's logits and sink, or 0 for an isolated receiver."""
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    logits = torch.cat([logits.masked_fill(~mask, -torch.inf), sink.expand(*logits.shape[:3], 1)], -1)
    has_edges = mask.any(-1, keepdim=True)
    return logits.masked_fill(~has_edges, 0.0).logsumexp(-1) * has_edges.squeeze(-1)


def reorder_channels(seed: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Permute the channels, which changes only roundings; ``seed=0`` keeps the order."""
    if not seed:
        return q, k
    order = torch.randperm(q.shape[3], generator=torch.Generator().manual_seed(seed)).to(q.device)
    return q[..., order], k[..., order]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    fused: bool = False,
    seed: int = 0,
) -> Tensor:
    """Call torch's SDPA in the dtype of q with an additive mask; a sink is one more key with value 0.

    ``seed`` selects an order of the channels: the error on one input depends on luck, so several orders are
    tried. ``fused`` pads keys and values to equal widths and detaches the mask, because only then does SDPA
    run its fused kernel. That kernel recomputes the weights from lse, so its gradients have larger errors.
    """
    q, k = reorder_channels(seed, q, k)
    shape = *q.shape[:3], k.shape[2]
    attn_mask = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    attn_mask = attn_mask if bias is None else attn_mask + bias.to(q.dtype)
    if sink_logits is not None:
        sink = sink_logits.to(q.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        if fused:
            # The fused kernel computes no gradient for a mask, so the sink logit becomes a channel
            # of q. In k, this channel is 1 for the last key and 0 for all other keys.
            sink_channel = pad(k.new_ones(*k.shape[:2], 1, 1), (0, 0, k.shape[2] - 1, 0))
            q, k = torch.cat([q, sink / scale], dim=-1), torch.cat([k, sink_channel], dim=-1)
            sink = torch.zeros_like(sink)
        attn_mask = torch.cat([attn_mask, sink], dim=-1)
    value_dim = v.shape[3]
    if fused:
        width = max(k.shape[3], value_dim)
        q, k, v = (pad(x, (0, width - x.shape[3])) for x in (q, k, v))
        attn_mask = attn_mask.detach()
    # Kernels differ on rows without edges, so let these attend to all keys and return 0 for them.
    is_isolated = ~mask.any(-1, keepdim=True)
    attn_mask = torch.where(is_isolated, 0.0, attn_mask)
    # SDPA does not run fused kernels on channels that are not contiguous.
    q, k, v = (x.contiguous() for x in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=is_grouped)
    return torch.where(is_isolated, 0.0, out)[..., :value_dim]
