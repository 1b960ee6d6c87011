"""By what tests judge a difference: the declared rule, or a bound that follows from the arithmetic.

The rule (``gnn_attention.verify.measure``): in float64 a difference of at most 1e-12 of the largest number; in any other dtype an
error against float64 of at most 2 times that of SDPA in the same dtype (gradients: 3 times). Where a result is a plain sum, the
bound is that of summation. No test has a tolerance of its own: processors round differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gnn_attention.verify import oracle
from gnn_attention.verify.measure import EXACT, Truth, gradients_of, judge, summation_bound, worst_errors

__all__ = ["assert_exact", "assert_rule", "assert_sum", "attention_truth", "error"]

ORDERS = 8  # of the tokens, over which SDPA's largest error is taken


def error(found, true):
    """The largest absolute difference of tensors, numbers or lists of tensors; NaN where one is. Equal infinities are equal."""
    differences = [_difference(_wide(a), _wide(b)) for a, b in _pairs(found, true)]
    together = torch.cat(differences) if differences else torch.zeros(0)
    return float(together.max()) if together.numel() else 0.0


def assert_exact(found, true, largest=None):
    """Two float64 results of one formula: they differ by at most 1e-12 of the largest number.

    Tensors, numbers, or lists of tensors (gradients of several inputs), which share the largest number. ``largest``: where the
    results are small differences of larger numbers, the largest of those.
    """
    for a, b in _pairs(found, true):
        assert torch.as_tensor(a).shape == torch.as_tensor(b).shape
        assert not isinstance(a, torch.Tensor) or a.dtype in (torch.float64, torch.int64), f"{a.dtype}: use assert_rule"
    largest = max((_largest(b) for _, b in _pairs(found, true)), default=0.0) if largest is None else largest
    off = error(found, true)
    assert off <= EXACT * largest, f"off by {off:.3g}, allowed are {EXACT * largest:.3g}: {EXACT:g} of the largest, {largest:.3g}"


def assert_sum(found, true, terms, magnitude, dtype=torch.float32):
    """A plain sum of ``terms`` terms in ``dtype``, whose absolute values sum to at most ``magnitude``.

    ``|found - true| <= n u / (1 - n u) sum |term|`` in any order, ``u = eps / 2`` (Higham, Accuracy and Stability of Numerical
    Algorithms, section 4.2). A product of each term before it is added counts as one term more.
    """
    off, allowed = error(found, true), summation_bound(terms, magnitude, dtype)
    assert off <= allowed, f"off by {off:.3g}, allowed are {allowed:.3g} for a sum of {terms} terms in {dtype}"


def assert_rule(out, gradients, truth):
    """The rule of ``verify``: at most 2 times SDPA's error, 3 times for gradients; ``gradients`` may be {}."""
    found = judge(out, gradients, truth)
    assert found.passed, f"output {found.output:.3g} (allowed 2), gradients {found.gradient:.3g} (allowed 3) of SDPA's errors"


def attention_truth(
    q, k, v, graph, direction=None, scale=None, modify: oracle.Modify | None = None, sink_logits=None, added=None
) -> Truth:
    """Dense attention in float64 on these (rounded) inputs, and SDPA's errors in their dtype over 8 orders of the tokens.

    Gradients are those of ``(out * direction).sum()`` with respect to "q", "k", "v" (direction None: of ``out.sum()``). ``added``
    is a table that broadcasts to ``[B, H, dst, src]``; ``modify`` acts on float64 logits and needs inputs in float64.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = _mask_of(graph, q, k)
    direction = torch.ones(*q.shape[:3], v.shape[3], dtype=q.dtype) if direction is None else direction
    table = None if added is None else added.expand(mask.shape)

    def change(logits):
        logits = logits if table is None else logits + table.to(logits.dtype)
        return logits if modify is None else modify(logits)

    wide = _leaves(torch.float64, q=q, k=k, v=v)
    sinks = None if sink_logits is None else sink_logits.detach().double()
    out = oracle.attention(wide["q"], wide["k"], wide["v"], mask, scale, change, sinks)
    gradients = gradients_of(out, direction.double(), wide)
    if q.dtype == torch.float64:
        return Truth(out.detach(), gradients, {})
    assert modify is None, "SDPA takes a table alone: give added"
    plain, fused = (
        worst_errors(_baseline(q, k, v, direction, mask, scale, table, sink_logits, widened), out, gradients)
        for widened in (False, True)
    )
    return Truth(out.detach(), gradients, plain, fused)


def _baseline(
    q, k, v, direction, mask, scale, table, sinks, widened
) -> Iterable[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    for number in range(ORDERS):
        leaves = _leaves(q.dtype, q=q, k=k, v=v)
        order = oracle.Order.draw(number, q.shape[0], q.shape[2], k.shape[2], q.shape[3], "cpu", widened)
        out = oracle.reordered_sdpa(order, leaves["q"], leaves["k"], leaves["v"], mask, scale, table, sinks)
        yield out, gradients_of(out, direction, leaves)


def _leaves(dtype, **tensors):
    return {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in tensors.items()}


def _mask_of(graph, q, k):
    mask = graph if isinstance(graph, torch.Tensor) else graph.mask()
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _pairs(found, true):
    if isinstance(found, (list, tuple)) or isinstance(true, (list, tuple)):
        return list(zip(found, true, strict=True))
    return [(found, true)]


def _wide(x):
    return torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else torch.float64).detach().cpu().double()


def _difference(a, b):
    return torch.where(a == b, 0.0, (a - b).abs()).flatten()


def _largest(x):
    x = _wide(x)
    x = x[~x.isinf()]
    return float(x.abs().max()) if x.numel() else 0.0
