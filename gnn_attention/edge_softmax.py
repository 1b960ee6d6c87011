"""The arithmetic of edges: logits, the softmax over in-edges, and the merge of partial results.

An edge ``src -> dst`` of a head has the score ``q_dst . k_src * scale``, which is its *logit* unless a
score_mod or bias changes it. The softmax over the in-edges of a receiver turns logits into *weights* and
returns the logarithm of their normaliser (``lse``). The last axis of a tensor ``[..., E]`` runs over edges
with receivers ``dst [E]``. Results have the dtype of the inputs, which should be float32 or better.
"""

from __future__ import annotations

import torch

from gnn_attention._support import edge_checks
from gnn_attention._support.autograd import has_forward_derivative
from gnn_attention._support.shapes import Bool, Float, Int, Tensor

__all__ = ["accumulation_dtype", "add_sinks", "logit", "merge", "per_query_head"]
__all__ += ["softmax", "weights_from_lse"]

# exp(8) and exp(-8) are far from the limits of float32, so logits from -8 to 8 need no shift.
SAFE_LOGIT = 8.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum values of ``dtype``: float64 for float64, otherwise float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head of ``x [batch, kv_heads, ...]`` for the query heads that share it.

    With ``g = heads / kv_heads``, key/value head h serves query heads ``h * g .. h * g + g - 1``.

    >>> per_query_head(torch.tensor([[[10], [20]]]), 4).flatten().tolist()
    [10, 10, 20, 20]
    """
    edge_checks.query_heads(x, num_heads)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def logit(
    q_dst: Float[Tensor, "... dim"], k_src: Float[Tensor, "... dim"], scale: float
) -> Float[Tensor, "..."]:
    """Compute ``q . k * scale`` for each edge: how well the query matches the sender's key.

    >>> logit(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), scale=0.5)
    tensor(5.5000)
    """
    edge_checks.logit_inputs(q_dst, k_src, scale)
    return (q_dst * k_src).sum(-1) * scale


def softmax(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    sink_logits: Float[Tensor, "..."] | None = None,
    check: bool = True,
) -> tuple[Float[Tensor, "... edges"], Float[Tensor, "... dst"]]:
    """Compute the weights ``w_e = exp(l_e) / sum of exp(l_e') over e' with the same dst``, and lse.

    ``lse`` is the log of the sum. A receiver without in-edges, or with logits of -inf only, has
    weights 0 and lse -inf. ``exp(sink_logits)``, broadcast over the leading axes, is added to the
    sum of each receiver that has in-edges, but gets no weight (docs/semantics.md, 2).
    ``check=False`` skips the checks, for arguments that come from a graph.

    >>> weights, lse = softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 0, 2]), num_dst=3)
    >>> weights.tolist(), [round(v, 4) for v in lse.tolist()]
    ([0.5, 0.5, 1.0], [0.6931, -inf, 5.0])
    """
    if check:
        edge_checks.edges("logits", logits, dst, num_dst)
        if sink_logits is not None:
            edge_checks.sinks(sink_logits, logits)
    # A traced program must not branch on values, and reading one makes the CPU wait for a GPU.
    is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    is_traced = is_traced or torch._C._are_functorch_transforms_active() or type(logits) is not Tensor
    can_read_values = not is_traced and logits.device.type == "cpu" and logits.numel() > 0
    if sink_logits is None and can_read_values and needs_no_shift(logits):
        # torch sums along the first axis three times as fast as along any other.
        mass = logits.transpose(0, -1).exp()
        mass64 = mass.double()
        total = mass64.new_zeros(num_dst, *mass.shape[1:]).index_add_(0, dst, mass64)
        weights = mass / total.index_select(0, dst).to(mass.dtype)
        return weights.transpose(0, -1), total.to(mass.dtype).log().transpose(0, -1)
    index = dst.expand(logits.shape)
    shift = logits.new_full((*logits.shape[:-1], num_dst), -torch.inf)
    shift = shift.scatter_reduce(-1, index, logits.detach(), "amax")
    if sink_logits is not None:
        sink = sink_logits.unsqueeze(-1).to(logits.dtype).expand(shift.shape)
        shift = torch.maximum(shift, sink.detach())
    # Each receiver has its own shift, so that its result does not depend on other receivers.
    shift = shift.masked_fill((shift.abs() <= SAFE_LOGIT) | (shift == -torch.inf), 0.0)
    mass = (logits - shift.gather(-1, index)).exp()
    # In float32 the rounding errors of many equal terms accumulate. MPS has no float64.
    sum_dtype = mass.dtype if mass.device.type == "mps" else torch.float64
    total = torch.zeros_like(shift, dtype=sum_dtype).index_add(-1, dst, mass.to(sum_dtype)).to(mass.dtype)
    is_empty = total == 0
    if sink_logits is not None:
        has_in_edges = torch.zeros(num_dst, dtype=torch.bool, device=dst.device).index_fill(0, dst, True)
        total = total + (sink - shift).exp()
        is_empty = (total == 0) | ~has_in_edges
    total = total.masked_fill(is_empty, 1.0)
    lse = (shift + total.log()).masked_fill(is_empty, -torch.inf)
    # The backward of gather is a sum, which must also be in float64.
    return mass / total.to(sum_dtype).gather(-1, index).to(mass.dtype), lse


def row_softmax(
    logits: Float[Tensor, "... dst src"], sinks: Float[Tensor, "... dst one"] | None = None
) -> tuple[Float[Tensor, "... dst src"], Float[Tensor, "... dst"]]:
    """Compute weights and lse over the last axis and ``sinks``; rows of -inf get 0 and -inf."""
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    lse = logits.logsumexp(-1)
    is_empty = (lse == -torch.inf).unsqueeze(-1)
    logits = logits.masked_fill(is_empty, 0.0)
    if has_forward_derivative([logits]):
        # torch changes the tangents of its own functions in place, which breaks their backward pass.
        weights, lse = _softmax_and_log_sum(logits, -1)
        lse = lse.masked_fill(is_empty.squeeze(-1), -torch.inf)
    else:
        # exp(logit - lse) would have the rounding error of a large lse.
        weights = logits.softmax(-1)
    weights = weights.masked_fill(is_empty, 0.0)
    return (weights if sinks is None else weights[..., :-1]), lse


def needs_no_shift(logits: Tensor) -> bool:
    """Return True if all logits are from -8 to 8, where exp is safe; False for NaN and inf."""
    low, high = logits.aminmax()
    return low.item() >= -SAFE_LOGIT and high.item() <= SAFE_LOGIT


def weights_from_lse(
    logits: Float[Tensor, "... edges"], dst: Int[Tensor, " edges"], lse: Float[Tensor, "... dst"]
) -> Float[Tensor, "... edges"]:
    """Compute the weight ``exp(logit - lse[dst])`` of each edge, or 0 where lse is -inf."""
    edge_checks.axes(logits=(logits, "... edges"), lse=(lse, "... dst"))
    edge_checks.edges("logits", logits, dst, lse.shape[-1])
    edge_lse = lse.gather(-1, dst.expand(logits.shape))
    is_empty = edge_lse == -torch.inf
    return (logits - edge_lse.masked_fill(is_empty, 0.0)).exp().masked_fill(is_empty, 0.0)


def add_sinks(
    out: Float[Tensor, "batch heads dst dim"],
    lse: Float[Tensor, "batch heads dst"],
    sink_logits: Float[Tensor, " heads"],
    has_in_edges: Bool[Tensor, "..."],
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """Add each head's sink logit to the softmax of a result: ``lse' = log(e^lse + e^sink)``.

    The output is scaled by ``e^(lse - lse')``. Where ``has_in_edges`` (broadcastable to lse) is
    False, the output stays 0 and lse stays -inf (docs/semantics.md, 2).

    >>> has_in_edges, lse = torch.tensor([True, False]), torch.tensor([[[0.0, -torch.inf]]])
    >>> out, lse = add_sinks(torch.ones(1, 1, 2, 1), lse, torch.zeros(1), has_in_edges)
    >>> out.flatten().tolist(), [round(v, 4) for v in lse.flatten().tolist()]
    ([0.5, 0.0], [0.6931, -inf])
    """
    edge_checks.axes(
        out=(out, "batch heads dst dim"), lse=(lse, "batch heads dst"), sink_logits=(sink_logits, "heads")
    )
    edge_checks.in_edge_mask(has_in_edges, lse)
    sinks = sink_logits.to(lse.dtype).view(1, -1, 1).expand(lse.shape).masked_fill(~has_in_edges, -torch.inf)
    (weight, _), lse = merge_weights(lse, sinks)
    return (out * weight.unsqueeze(-1)).to(out.dtype), lse


def merge(
    out_a: Float[Tensor, "... dst dim"],
    lse_a: Float[Tensor, "... dst"],
    out_b: Float[Tensor, "... dst dim"],
    lse_b: Float[Tensor, "... dst"],
) -> tuple[Float[Tensor, "... dst dim"], Float[Tensor, "... dst"]]:
    """Merge the results for two disjoint sets of in-edges, weighted by ``e^lse_a`` and ``e^lse_b``.

    >>> out, lse = merge(torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[3.0]]), torch.zeros(1))
    >>> out.item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    out_axes, lse_axes = "... dst dim", "... dst"
    edge_checks.axes(
        out_a=(out_a, out_axes), lse_a=(lse_a, lse_axes), out_b=(out_b, out_axes), lse_b=(lse_b, lse_axes)
    )
    (weight_a, weight_b), lse = merge_weights(lse_a, lse_b)
    return out_a * weight_a.unsqueeze(-1) + out_b * weight_b.unsqueeze(-1), lse


def merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Float[Tensor, "two ..."], Tensor]:
    """Compute the weights of two results in :func:`merge`, and the log of ``e^lse_a + e^lse_b``.

    Where both are -inf, the weights are 0 and the log is -inf. They are a softmax, so they sum to 1
    up to one rounding. ``e^(lse - log_sum)`` would have the rounding error of a large log_sum. So
    would its gradient, which should be 0 where one side has all the weight. With a sigmoid, a
    weight that is rounded to 1 would have derivative 0, and the other weight would be lost.
    """
    is_empty = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    # The sum has no derivative where both are -inf, and logaddexp no second one where one of them is.
    weight, log_sum = _softmax_and_log_sum(torch.stack([lse_a, lse_b]).masked_fill(is_empty, 0.0), 0)
    return weight.masked_fill(is_empty, 0.0), log_sum.masked_fill(is_empty, -torch.inf)


def _softmax_and_log_sum(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    shift = logits.amax(dim, keepdim=True).detach()
    shift = shift.masked_fill(shift.isinf(), 0.0)
    mass = (logits - shift).exp()
    total = mass.sum(dim, keepdim=True)
    return mass / total, (shift + total.log()).squeeze(dim)
