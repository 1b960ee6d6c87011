"""The truth: dense attention in float64, written straight from the formulas of the source texts, and the
yardstick, SDPA.

Nothing here uses the library's own arithmetic. The masked softmax is ``M exp(l) / sum M exp(l)`` (seed S4.6),
the layer is ``sum_h A_h (x W_V_h) W_O_h + b_O`` (S0.1 to S0.4), or ``sum_h A_h (x W_M_h)`` with
``l = x W_P x^T / sqrt(d_k)`` (S0.6, S0.9). The yardstick is torch's own ``scaled_dot_product_attention`` in
the dtype under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from gnn_attention._support.shapes import Tensor

Modify = Callable[[Tensor], Tensor]  # logits [B, H, dst, src] -> logits, all heads and positions at once


def masked_softmax(logits: Tensor, mask: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """``M exp(l) / (sum_j M exp(l) + exp(sink))`` over the last axis, 0 where M has no 1;
    ``logits [B, H, dst, src]``.
    """
    if not logits.shape[-1]:
        return logits
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    top = torch.maximum(logits.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True), sink).detach()
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    mass = mask * (logits - top).masked_fill(~mask, 0.0).exp()
    total = mass.sum(-1, keepdim=True) + (sink - top).exp()
    return mass / torch.where(total == 0, torch.ones_like(total), total)


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
    """Dense attention ``[B, Hq, dst, Dv]``: the weights of :func:`attention_weights` times v."""
    weights = attention_weights(q, k, mask, scale, modify, sink_logits, factors)
    return torch.einsum("bhij,bhjv->bhiv", weights, per_query_head(v, q))


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None = None,
    sink_logits: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The softmax of the logits ``[B, Hq, dst, src]``, times ``factors`` (those of dropout)."""
    logits = torch.einsum("bhid,bhjd->bhij", q, per_query_head(k, q)) * scale
    weights = masked_softmax(logits if modify is None else modify(logits), mask, sink_logits)
    return weights if factors is None else weights * factors.to(weights.dtype)


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
    """A whole attention layer from its named weights: standard (``W_Q``, ...) or merged (``pattern``,
    ``message``).
    """
    b_O = weights.get("b_O")
    bias = 0.0 if b_O is None else b_O.reshape(-1, b_O.shape[-1]).sum(0)
    updates = [_head(weights, h, x_src, x_dst, mask, scale, modify) for h in range(_heads(weights))]
    return torch.stack(updates).sum(0) + bias


def _heads(weights: Mapping[str, Tensor]) -> int:
    return int(weights["pattern" if "pattern" in weights else "W_Q"].shape[0])


def _head(
    weights: Mapping[str, Tensor],
    h: int,
    x_src: Tensor,
    x_dst: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify | None,
) -> Tensor:
    if "pattern" in weights:
        pattern, message = weights["pattern"][h], weights["message"][h]
        left, right = _fitted(x_dst, pattern.shape[0]), _fitted(x_src, pattern.shape[1])
        logits = torch.einsum("bid,de,bje->bij", left, pattern, right) * scale
        messages = _fitted(x_src, message.shape[0]) @ message
    else:
        group = weights["W_Q"].shape[0] // weights["W_K"].shape[0]
        q, k = _linear(weights, "Q", h, x_dst), _linear(weights, "K", h // group, x_src)
        logits = torch.einsum("bid,bjd->bij", q, k) * scale
        messages = _linear(weights, "V", h // group, x_src) @ weights["W_O"][h]
    every = logits.unsqueeze(1).expand(-1, _heads(weights), -1, -1)
    logits = (every if modify is None else modify(every))[:, h : h + 1]
    own_mask = mask[:, h : h + 1] if mask.shape[1] > 1 else mask
    return masked_softmax(logits, own_mask)[:, 0] @ messages


def _linear(weights: Mapping[str, Tensor], letter: str, head: int, x: Tensor) -> Tensor:
    product = x @ weights[f"W_{letter}"][head]
    bias = weights.get(f"b_{letter}")
    return product if bias is None else product + bias[head]


def _fitted(x: Tensor, width: int) -> Tensor:
    """``x``, or ``[x, 1]`` for matrices that carry their biases as a last row or column."""
    return x if x.shape[-1] == width else functional.pad(x, (0, 1), value=1.0)


@dataclass(frozen=True, eq=False)
class Order:
    """A reshuffling of samples, receivers, senders and channels: the same problem, but other roundings.

    SDPA's largest error on one small input is partly luck; the largest over a few orders is a fair yardstick.
    ``widened`` says that keys and values are given equally many channels (the further ones 0), and a mask
    that learns as it is: SDPA runs its fused kernel then, which it does for no others. That kernel's
    gradients have larger roundings, since it computes the weights again from lse: a yardstick for backends
    that do so too, and for no other.
    """

    sample: Tensor
    dst: Tensor
    src: Tensor
    dim: Tensor
    widened: bool

    @staticmethod
    def draw(
        number: int, batch: int, dst: int, src: int, dim: int, device: str, widened: bool = False
    ) -> Order:
        """Order 0 is as given; the others are random."""
        rng = torch.Generator().manual_seed(number)
        sizes = (batch, dst, src, dim)
        sample, q, k, channel = (
            (torch.randperm(n, generator=rng) if number else torch.arange(n)).to(device) for n in sizes
        )
        return Order(sample, q, k, channel, widened)

    def pairs(self, table: Tensor) -> Tensor:
        """``[B or 1, H, dst, src]`` in this order."""
        table = table if table.shape[0] == 1 else table[self.sample]
        return table[:, :, self.dst][..., self.src]

    def restored(self, out: Tensor, axis: int) -> Tensor:
        """A result over samples and receivers (on ``axis``) back in the order given."""
        return out[self.sample.argsort()].index_select(axis, self.dst.argsort())


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    added: Tensor | None = None,
    sink_logits: Tensor | None = None,
    widened: bool = False,
) -> Tensor:
    """The yardstick: torch's SDPA in the dtype of q with an additive mask; a sink is one more key with a zero
    value.
    """
    additive = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    additive = additive.expand(*q.shape[:3], k.shape[2])
    additive = additive if added is None else additive + added.to(q.dtype)
    if sink_logits is not None:
        column = sink_logits.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        if widened:
            q, k, column = _with_sink_channel(q, k, column / scale)
        additive = torch.cat([additive, column], dim=-1)
    value_dim, wide = v.shape[3], max(k.shape[3], v.shape[3])
    if widened:
        q, k, v = (functional.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
        additive = additive.detach()
    isolated = ~mask.any(-1, keepdim=True)
    # kernels differ on an empty row
    additive = torch.where(isolated, torch.zeros_like(additive), additive)
    grouped = q.shape[1] != k.shape[1]
    # SDPA leaves its fused kernels where channels are not contiguous
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=additive, scale=scale, enable_gqa=grouped
    )
    return torch.where(isolated, torch.zeros_like(out), out)[..., :value_dim]


def _with_sink_channel(q: Tensor, k: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logit of the sink, the last key, moved from the mask into one more channel: in q its logit, in k 1
    for that key alone.

    So the fused kernel, which gives a mask no gradient, gives one to the sinks.
    """
    channel = functional.pad(k.new_ones(*k.shape[:2], 1, 1), (0, 0, k.shape[2] - 1, 0))
    return torch.cat([q, column], dim=-1), torch.cat([k, channel], dim=-1), torch.zeros_like(column)


def sdpa_lse_error(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> float:
    """How far lse is off in SDPA's fused kernel for CPUs, in the dtype of q; 0 on other devices.

    In half types that kernel takes a quick exp, right to 2^-14, where vectors are whole: keys are padded to
    64, which holds any.
    """
    if q.device.type != "cpu":
        return 0.0
    group, more = q.shape[1] // k.shape[1], -k.shape[2] % 64
    q, k = q.detach(), functional.pad(k.detach(), (0, 0, 0, more)).repeat_interleave(group, 1)
    additive = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    additive = functional.pad(additive, (0, more), value=-torch.inf)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, k, attn_mask=additive, scale=scale
    )[1]
    logits = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * scale
    off = found.double() - (logits + additive.double()).logsumexp(-1)
    return float(off[mask.any(-1)].abs().max()) if mask.any() else 0.0


def reordered_sdpa(
    order: Order,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    added: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """:func:`sdpa` computed in another order, the result in the order given."""
    q = q[order.sample][:, :, order.dst][..., order.dim]
    k = k[order.sample][:, :, order.src][..., order.dim]
    v = v[order.sample][:, :, order.src]
    added = None if added is None else order.pairs(added)
    return order.restored(sdpa(q, k, v, order.pairs(mask), scale, added, sink_logits, order.widened), axis=2)


def reordered_attention(
    order: Order,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    modify: Modify,
    sink_logits: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """:func:`attention` with samples and channels in another order (``modify`` knows positions: tokens
    stay).
    """
    sample, back = order.sample, order.sample.argsort()

    def moved(logits: Tensor) -> Tensor:
        return modify(logits[back])[sample]

    q, k, v = q[sample][..., order.dim], k[sample][..., order.dim], v[sample]
    factors = None if factors is None else factors[sample]
    return attention(q, k, v, mask[sample], scale, moved, sink_logits, factors)[back]
