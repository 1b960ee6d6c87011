"""The arithmetic of one edge: logit, softmax over in-edges, and how partial results are merged.

Over every edge ``src -> dst`` of a head: a *logit* ``q_dst . k_src * scale``; over the in-edges of a
receiver: the softmax, which gives *weights* and the logarithm of their normaliser (``lse``). Tensors have
edges on their last axis (``[..., E]``), with an index ``dst [E]``. Everything is done in the dtype that comes
in: callers bring float32 or better. The public functions raise TypeError, ValueError or IndexError by name
for arguments that do not fit together.
"""

from __future__ import annotations

import torch

from gnn_attention._support import edge_checks
from gnn_attention._support.shapes import Bool, Float, Int, Tensor

__all__ = ["accumulation_dtype", "logit", "per_query_head", "softmax", "weights_from_lse"]
__all__ += ["add_sinks", "merge"]

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
    edge_checks.groups(x, num_heads)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def logit(
    q_dst: Float[Tensor, "... dim"], k_src: Float[Tensor, "... dim"], scale: float
) -> Float[Tensor, "..."]:
    """``q . k * scale`` for each edge: how well the receiver's query fits the sender's key.

    >>> logit(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), scale=0.5)
    tensor(5.5000)
    """
    edge_checks.ends(q_dst, k_src, scale)
    return (q_dst * k_src).sum(-1) * scale


def softmax(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    sink_logits: Float[Tensor, "..."] | None = None,
    check: bool = True,
) -> tuple[Float[Tensor, "... edges"], Float[Tensor, "... dst"]]:
    """Weights ``w_e = exp(l_e) / sum over e' with the same dst of exp(l_e')``, and lse, the log of that sum.

    A receiver without in-edges, or whose logits are all -inf, has weights 0 and lse -inf. ``sink_logits``
    (broadcastable to the leading axes) is one more logit in every sum, without a weight of its own; a
    receiver without in-edges has none either (docs/semantics.md, 2). ``check=False`` is for the edges of a
    graph, which fit together.

    >>> weights, lse = softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 0, 2]), num_dst=3)
    >>> weights.tolist(), [round(v, 4) for v in lse.tolist()]
    ([0.5, 0.5, 1.0], [0.6931, -inf, 5.0])
    """
    if check:
        edge_checks.edges("logits", logits, dst, num_dst)
        if sink_logits is not None:
            edge_checks.sinks(sink_logits, logits)
    # A program that is compiled or transformed must not depend on numbers, nor a GPU wait for them.
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    traced = traced or torch._C._are_functorch_transforms_active() or type(logits) is not Tensor
    has_numbers = not traced and logits.device.type == "cpu" and logits.numel() > 0
    if sink_logits is None and has_numbers and within_reach(logits):
        # Along its first axis torch sums rows in a third of the time of any other.
        mass = logits.transpose(0, -1).exp()
        precise = mass.double()
        total = precise.new_zeros(num_dst, *mass.shape[1:]).index_add_(0, dst, precise)
        weights = mass / total.index_select(0, dst).to(mass.dtype)
        return weights.transpose(0, -1), total.to(mass.dtype).log().transpose(0, -1)
    index = dst.expand(logits.shape)
    top = logits.new_full((*logits.shape[:-1], num_dst), -torch.inf)
    top = top.scatter_reduce(-1, index, logits.detach(), "amax")
    if sink_logits is not None:
        sink = sink_logits.unsqueeze(-1).to(logits.dtype).expand(top.shape)
        top = torch.maximum(top, sink.detach())
    # a receiver's own logits decide, so that its result does not depend on those of others
    top = top.masked_fill((top.abs() <= REACH) | (top == -torch.inf), 0.0)
    mass = (logits - top.gather(-1, index)).exp()
    # Equal numbers, added one after the other, are all rounded in one direction. MPS has no float64.
    wide = mass.dtype if mass.device.type == "mps" else torch.float64
    total = torch.zeros_like(top, dtype=wide).index_add(-1, dst, mass.to(wide)).to(mass.dtype)
    nothing = total == 0
    if sink_logits is not None:
        has_in_edges = torch.zeros(num_dst, dtype=torch.bool, device=dst.device).index_fill(0, dst, True)
        total = total + (sink - top).exp()
        nothing = (total == 0) | ~has_in_edges
    total = total.masked_fill(nothing, 1.0)
    lse = (top + total.log()).masked_fill(nothing, -torch.inf)
    # the gradient of this look-up is a sum, in float64 too
    return mass / total.to(wide).gather(-1, index).to(mass.dtype), lse


def row_softmax(
    logits: Float[Tensor, "... dst src"], sinks: Float[Tensor, "... dst one"] | None = None
) -> tuple[Float[Tensor, "... dst src"], Float[Tensor, "... dst"]]:
    """Weights and lse over the last axis; a row that is -inf throughout has weights 0 and lse -inf.

    ``sinks`` are one more column of logits, which has no weight of its own.
    """
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    lse = logits.logsumexp(-1)
    nothing = (lse == -torch.inf).unsqueeze(-1)
    # not exp(logit - lse), which has the rounding of a large lse
    weights = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (weights if sinks is None else weights[..., :-1]), lse


def within_reach(logits: Tensor) -> bool:
    """Whether exp of all is far from both ends of float32, so that none is shifted (NaN and inf are not)."""
    low, high = logits.aminmax()
    return low.item() >= -REACH and high.item() <= REACH


def weights_from_lse(
    logits: Float[Tensor, "... edges"], dst: Int[Tensor, " edges"], lse: Float[Tensor, "... dst"]
) -> Float[Tensor, "... edges"]:
    """Weights of chosen edges from a finished softmax: ``exp(logit - lse[dst])``, 0 where lse is -inf."""
    edge_checks.axes(logits=(logits, "... edges"), lse=(lse, "... dst"))
    edge_checks.edges("logits", logits, dst, lse.shape[-1])
    base = lse.gather(-1, dst.expand(logits.shape))
    return (logits - base.masked_fill(base == -torch.inf, 0.0)).exp().masked_fill(base == -torch.inf, 0.0)


def add_sinks(
    out: Float[Tensor, "batch heads dst dim"],
    lse: Float[Tensor, "batch heads dst"],
    sink_logits: Float[Tensor, " heads"],
    has_in_edges: Bool[Tensor, "..."],
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """A result with one more logit for each head, without a value: ``lse' = log(e^lse + e^sink)``.

    The output shrinks by ``e^(lse - lse')``. A receiver without in-edges (``has_in_edges`` broadcasts to lse)
    stays at 0 and -inf (docs/semantics.md, 2).

    >>> has_in_edges, lse = torch.tensor([True, False]), torch.tensor([[[0.0, -torch.inf]]])
    >>> out, lse = add_sinks(torch.ones(1, 1, 2, 1), lse, torch.zeros(1), has_in_edges)
    >>> out.flatten().tolist(), [round(v, 4) for v in lse.flatten().tolist()]
    ([0.5, 0.0], [0.6931, -inf])
    """
    edge_checks.axes(
        out=(out, "batch heads dst dim"), lse=(lse, "batch heads dst"), sink_logits=(sink_logits, "heads")
    )
    edge_checks.receivers(has_in_edges, lse)
    sinks = sink_logits.to(lse.dtype).view(1, -1, 1).expand(lse.shape).masked_fill(~has_in_edges, -torch.inf)
    (share, _), lse = shares(lse, sinks)
    return (out * share.unsqueeze(-1)).to(out.dtype), lse


def merge(
    out_a: Float[Tensor, "... dst dim"],
    lse_a: Float[Tensor, "... dst"],
    out_b: Float[Tensor, "... dst dim"],
    lse_b: Float[Tensor, "... dst"],
) -> tuple[Float[Tensor, "... dst dim"], Float[Tensor, "... dst"]]:
    """One result from two over disjoint sets of in-edges: each is weighted by its share of ``e^a + e^b``.

    >>> out, lse = merge(torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[3.0]]), torch.zeros(1))
    >>> out.item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    outs, lses = "... dst dim", "... dst"
    edge_checks.axes(out_a=(out_a, outs), lse_a=(lse_a, lses), out_b=(out_b, outs), lse_b=(lse_b, lses))
    (share_a, share_b), lse = shares(lse_a, lse_b)
    return out_a * share_a.unsqueeze(-1) + out_b * share_b.unsqueeze(-1), lse


def shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Float[Tensor, "two ..."], Float[Tensor, "..."]]:
    """The shares of two parts in ``e^a + e^b``, and the logarithm of that sum: the rule of every merge.

    Where both are -inf, shares are 0 and the logarithm is -inf. Shares sum to 1 but for a rounding;
    ``e^(a - total)`` would have the rounding of a large total, and a receiver with all its weight on one part
    would get a difference as large as that in its gradient, which is 0 in truth. They are a softmax, whose
    derivative knows both: a sigmoid's share near 1 hides the other.
    """
    nothing = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    # logaddexp has no derivative where both are -inf
    a, b = lse_a.masked_fill(nothing, 0.0), lse_b.masked_fill(nothing, 0.0)
    share = torch.stack([a, b]).softmax(0).masked_fill(nothing, 0.0)
    return share, torch.logaddexp(a, b).masked_fill(nothing, -torch.inf)
