"""The truth: dense attention in float64, from the formulas of the sources, and the yardstick, torch's SDPA.

Nothing here uses the library's own arithmetic. The masked softmax is ``M exp(l) / sum M exp(l)`` (seed S4.6),
the layer is ``sum_h A_h (x W_V_h) W_O_h + b_O`` (S0.1 to S0.4), or ``sum_h A_h (x W_M_h)`` with
``l = x W_P x^T / sqrt(d_k)`` (S0.6, S0.9).
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from gnn_attention._support.shapes import Tensor

Modify = Callable[[Tensor], Tensor]  # logits [B, H, dst, src] -> logits, all heads and positions at once


def masked_softmax(logits: Tensor, mask: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """``M exp(l) / (sum_j M exp(l) + exp(sink))`` along rows of ``[B, H, dst, src]``, 0 without edges."""
    if not logits.shape[-1]:
        return logits
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    top = torch.maximum(logits.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True), sink).detach()
    top = top.masked_fill(top.isinf(), 0.0)
    mass = mask * (logits - top).masked_fill(~mask, 0.0).exp()
    total = mass.sum(-1, keepdim=True) + (sink - top).exp()
    return mass / total.masked_fill(total == 0, 1.0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None = None,
    sink_logits: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Dense attention ``[B, Hq, dst, Dv]``; ``factors`` (those of dropout) multiply the weights."""
    logits = torch.einsum("bhid,bhjd->bhij", q, per_query_head(k, q)) * scale
    weights = masked_softmax(logits if modify is None else modify(logits), mask, sink_logits)
    weights = weights if factors is None else weights * factors.to(weights.dtype)
    return torch.einsum("bhij,bhjv->bhiv", weights, per_query_head(v, q))


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of q: key/value head ``h // g`` serves query head h."""
    return x[:, [h // (q.shape[1] // x.shape[1]) for h in range(q.shape[1])]]


def layer(
    weights: Mapping[str, Tensor],
    x_src: Tensor,
    x_dst: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None = None,
) -> Tensor:
    """A layer from its named weights: standard (``W_Q``, ...) or merged (``pattern``, ``message``)."""

    def linear(letter: str, x: Tensor) -> Tensor:
        y, bias = torch.einsum("bid,hde->bhie", x, weights[f"W_{letter}"]), weights.get(f"b_{letter}")
        return y if bias is None else y + bias.unsqueeze(1)

    W_O, b_O = weights.get("W_O"), weights.get("b_O")
    if "pattern" in weights:
        # patterns are compared with states, and messages are in model space already
        pattern, message = weights["pattern"], weights["message"]
        q = torch.einsum("bid,hde->bhie", _with_ones(x_dst, pattern.shape[1]), pattern)
        k = _with_ones(x_src, pattern.shape[2]).unsqueeze(1)
        v = torch.einsum("bjd,hde->bhje", _with_ones(x_src, message.shape[1]), message)
    else:
        q, k, v = linear("Q", x_dst), linear("K", x_src), linear("V", x_src)
    z = attention(q, k, v, mask, scale, modify)
    update = z.sum(1) if W_O is None else torch.einsum("bhiv,hvd->bid", z, W_O)
    return update if b_O is None else update + b_O.reshape(-1, b_O.shape[-1]).sum(0)


def _with_ones(x: Tensor, width: int) -> Tensor:
    """``x``, or ``[x, 1]`` where merged matrices have biases as a last row or column."""
    return pad(x, (0, width - x.shape[-1]), value=1.0)


def lse(logits: Tensor, mask: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """The logarithm of the sum of ``exp(logit)`` over edges, and the sink; 0 for an isolated row."""
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    logits = torch.cat([logits.masked_fill(~mask, -torch.inf), sink.expand(*logits.shape[:3], 1)], -1)
    attends = mask.any(-1, keepdim=True)
    return logits.masked_fill(~attends, 0.0).logsumexp(-1) * attends.squeeze(-1)


def reorder_channels(number: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The same logits, but other roundings: channels in another order, for number 0 in theirs."""
    if not number:
        return q, k
    order = torch.randperm(q.shape[3], generator=torch.Generator().manual_seed(number)).to(q.device)
    return q[..., order], k[..., order]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    added: Tensor | None = None,
    sink_logits: Tensor | None = None,
    widened: bool = False,
    number: int = 0,
) -> Tensor:
    """Torch's SDPA in the dtype of q with an additive mask; a sink is one more key with a zero value.

    Its largest error on one small input is partly luck; the largest over a few orders of the channels, by
    ``number``, is a fair yardstick. ``widened`` gives keys and values equally many channels (the further ones
    0), and a mask that learns as it is: only then does SDPA run its fused kernel. Its gradients have larger
    roundings, since it computes the weights again from lse: a yardstick for backends that do so too alone.
    """
    q, k = reorder_channels(number, q, k)
    shape = *q.shape[:3], k.shape[2]
    additive = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    additive = additive if added is None else additive + added.to(q.dtype)
    if sink_logits is not None:
        column = sink_logits.to(q.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        if widened:
            # the fused kernel gives a mask no gradient: the logit is a channel, 1 in the last key alone
            channel = pad(k.new_ones(*k.shape[:2], 1, 1), (0, 0, k.shape[2] - 1, 0))
            q, k = torch.cat([q, column / scale], dim=-1), torch.cat([k, channel], dim=-1)
            column = torch.zeros_like(column)
        additive = torch.cat([additive, column], dim=-1)
    value_dim, wide = v.shape[3], max(k.shape[3], v.shape[3])
    if widened:
        q, k, v = (pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
        additive = additive.detach()
    isolated = ~mask.any(-1, keepdim=True)
    # kernels differ on an empty row
    additive = torch.where(isolated, 0.0, additive)
    # SDPA leaves its fused kernels where channels are not contiguous
    q, k, v = (x.contiguous() for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=additive, scale=scale, enable_gqa=grouped)
    return torch.where(isolated, 0.0, out)[..., :value_dim]
