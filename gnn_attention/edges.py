"""The arithmetic of one edge, in the only place that has it.

Over every edge ``src -> dst`` of a head: a *logit* ``q_dst . k_src * scale``; over the in-edges of a
receiver: the softmax, which gives *weights* and their normaliser in logarithm (``lse``); and the rule by
    which two results over disjoint sets of
in-edges become one. Tensors hold edges on their last axis (``[..., E]``) beside an index ``dst [E]``.
Everything is done in the dtype that comes in: callers bring float32 or better. Each function raises
TypeError, ValueError or IndexError by name for arguments that do not fit together.
"""

from __future__ import annotations

import torch

from gnn_attention._support import edge_checks as check
from gnn_attention._support.shapes import Bool, Float, Int, Tensor

__all__ = [
    "accumulation_dtype",
    "add_sinks",
    "logit",
    "merge",
    "per_query_head",
    "sinks_alone",
    "softmax",
    "weights_from_lse",
]

REACH = 8.0  # of logits: exp(+-8) is far from both ends of float32, and the exponent has few roundings


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums: float64 stays, everything else becomes float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Grouped heads, of any dtype, ``[batch, kv_heads, ...]`` to ``[batch, heads, ...]``.

    Key/value head ``h`` serves the query heads ``h * g .. h * g + g - 1``, g = query heads per group.

    >>> per_query_head(torch.tensor([[[10], [20]]]), 4).flatten().tolist()
    [10, 10, 20, 20]
    """
    check.groups(x, num_heads)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def logit(
    q_dst: Float[Tensor, "... dim"], k_src: Float[Tensor, "... dim"], scale: float
) -> Float[Tensor, "..."]:
    """``q . k * scale`` for each edge: how well the receiver's query fits the sender's key.

    >>> logit(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), scale=0.5)
    tensor(5.5000)
    """
    check.ends(q_dst, k_src, scale)
    return (q_dst * k_src).sum(-1) * scale


def softmax(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    sink_logits: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "... edges"], Float[Tensor, "... dst"]]:
    """Softmax over the in-edges of each receiver:
    ``w_e = exp(l_e) / sum over e' with the same dst of exp(l_e')``.

    Returns the weights and ``lse [..., dst]``, the logarithm of that sum. A receiver without in-edges, or
    whose logits are all -inf, has weights 0 and lse -inf. ``sink_logits`` (broadcastable to the leading axes)
    is one more logit in every sum, without a weight of its own; a receiver without in-edges has none either
    (docs/guide.md, semantics 2).

    >>> weights, lse = softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 0, 2]), num_dst=3)
    >>> weights.tolist(), [round(v, 4) for v in lse.tolist()]
    ([0.5, 0.5, 1.0], [0.6931, -inf, 5.0])
    """
    check.edges("logits", logits, dst, num_dst)
    if sink_logits is not None:
        check.sinks(sink_logits, logits)
    heard = torch.zeros(num_dst, dtype=torch.bool, device=dst.device).index_fill(0, dst, True)
    mass, top, total = _masses(logits, dst, num_dst, sink_logits)
    nothing = (total == 0) | ~heard
    total = total.masked_fill(nothing, 1.0)
    lse = (top + total.log()).masked_fill(nothing, -torch.inf)
    return mass / total.gather(-1, dst.expand(logits.shape)), lse


def weights_of(
    logits: Float[Tensor, "... edges"], dst: Int[Tensor, " edges"], num_dst: int
) -> Float[Tensor, "... edges"]:
    """The weights of :func:`softmax` alone, for edges of a graph, which fit: nothing is checked."""
    if _all_small(logits):
        mass = logits.exp()
        return mass / mass.new_zeros(*mass.shape[:-1], num_dst).index_add(-1, dst, mass).index_select(-1, dst)
    mass, _, total = _masses(logits, dst, num_dst, None)
    return mass / total.masked_fill(total == 0, 1.0).gather(-1, dst.expand(logits.shape))


def _all_small(logits: Tensor) -> bool:
    """Whether exp of all is far from both ends of float32, so that none is shifted; False where numbers
    cannot be looked at.
    """
    seen_by_others = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if seen_by_others or torch._C._are_functorch_transforms_active() or type(logits) is not Tensor:
        return False
    if logits.device.type != "cpu" or not logits.numel():
        return False
    low, high = logits.detach().aminmax()
    return low.item() >= -REACH and high.item() <= REACH


def _masses(
    logits: Tensor, dst: Tensor, num_dst: int, sink_logits: Tensor | None
) -> tuple[Float[Tensor, "... edges"], Float[Tensor, "... dst"], Float[Tensor, "... dst"]]:
    """``exp(logit - top)`` of every edge, the sums of these, and ``top``: the largest logit of a receiver,
    unless it is small.
    """
    index = dst.expand(logits.shape)
    top = logits.new_full((*logits.shape[:-1], num_dst), -torch.inf)
    top = top.scatter_reduce(-1, index, logits.detach(), "amax")
    if sink_logits is not None:
        sink = sink_logits.unsqueeze(-1).to(logits.dtype).expand(top.shape)
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(
        (top.abs() <= REACH) | (top == -torch.inf), 0.0
    )  # alike, whatever other receivers attend to
    mass = (logits - top.gather(-1, index)).exp()
    total = torch.zeros_like(top).scatter_add(-1, index, mass)
    if sink_logits is not None:
        total = total + (sink - top).exp()
    return mass, top, total


def weights_from_lse(
    logits: Float[Tensor, "... edges"], dst: Int[Tensor, " edges"], lse: Float[Tensor, "... dst"]
) -> Float[Tensor, "... edges"]:
    """Weights of chosen edges from a finished softmax: ``exp(logit - lse[dst])``, 0 where nothing was
    heard.
    """
    check.normalisers(lse, logits)
    check.edges("logits", logits, dst, lse.shape[-1])
    base = lse.gather(-1, dst.expand(logits.shape))
    return (logits - base.masked_fill(base == -torch.inf, 0.0)).exp().masked_fill(base == -torch.inf, 0.0)


def add_sinks(
    out: Float[Tensor, "batch heads dst dim"],
    lse: Float[Tensor, "batch heads dst"],
    sink_logits: Float[Tensor, " heads"],
    heard: Bool[Tensor, "..."],
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """A result with one more logit for each head in its softmax, without a value:
    ``lse' = log(e^lse + e^sink)``.

    The output shrinks by ``e^(lse - lse')``. A receiver without in-edges, which is not ``heard``
    (broadcastable to lse), keeps 0 and -inf (docs/guide.md, semantics 2).

    >>> heard = torch.tensor([True, False])
    >>> out, lse = add_sinks(torch.ones(1, 1, 2, 1), torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1), heard)
    >>> out.flatten().tolist(), [round(v, 4) for v in lse.flatten().tolist()]
    ([0.5, 0.0], [0.6931, -inf])
    """
    check.result("out", out, "lse", lse)
    check.head_sinks(sink_logits, lse)
    check.heard(heard, lse)
    sinks = sink_logits.to(lse.dtype).view(1, -1, 1)
    nothing = ~heard | ((lse == -torch.inf) & (sinks == -torch.inf))
    share, _, lse = shares(lse, sinks.expand(lse.shape), nothing)
    return (out * share.unsqueeze(-1)).to(out.dtype), lse


def sinks_alone(
    lse: Float[Tensor, "batch heads dst"], sink_logits: Float[Tensor, " heads"], heard: Bool[Tensor, "..."]
) -> Float[Tensor, "batch heads dst"]:
    """``lse`` of a softmax that has sinks already: they are all there is for a ``heard`` receiver whose every
    logit is -inf.

    >>> heard = torch.tensor([True, False])
    >>> sinks_alone(torch.full((1, 1, 2), -torch.inf), torch.ones(1), heard).tolist()
    [[[1.0, -inf]]]
    """
    check.head_sinks(sink_logits, lse)
    check.heard(heard, lse)
    return torch.where((lse == -torch.inf) & heard, sink_logits.to(lse.dtype).unsqueeze(-1), lse)


def merge(
    out_a: Float[Tensor, "... dst dim"],
    lse_a: Float[Tensor, "... dst"],
    out_b: Float[Tensor, "... dst dim"],
    lse_b: Float[Tensor, "... dst"],
) -> tuple[Float[Tensor, "... dst dim"], Float[Tensor, "... dst"]]:
    """One result from two over disjoint sets of in-edges: ``lse = log(e^a + e^b)``, each part weighted by its
    share of that sum.

    >>> out, lse = merge(torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[3.0]]), torch.zeros(1))
    >>> out.item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    check.result("out_a", out_a, "lse_a", lse_a)
    check.result("out_b", out_b, "lse_b", lse_b)
    check.alike("out_b", out_b, "out_a", out_a)
    nothing = (lse_a == -torch.inf) & (lse_b == -torch.inf)  # there logaddexp has no derivative
    share_a, share_b, lse = shares(lse_a, lse_b, nothing)
    return out_a * share_a.unsqueeze(-1) + out_b * share_b.unsqueeze(-1), lse


def shares(a: Tensor, b: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``e^a`` and ``e^b`` as shares of their sum, and the logarithm of that; 0, 0 and -inf where there is
    ``nothing``.

    They sum to 1 but for a rounding: ``e^(a - log(e^a + e^b))`` would have the rounding of a large logarithm.
    A softmax, whose derivative knows both shares, for in that of a sigmoid a share near 1 hides the other.
    """
    a, b = (lse.masked_fill(nothing, 0.0) for lse in (a, b))
    share_a, share_b = torch.stack((a, b)).softmax(0).masked_fill(nothing, 0.0)
    return share_a, share_b, torch.logaddexp(a, b).masked_fill(nothing, -torch.inf)
