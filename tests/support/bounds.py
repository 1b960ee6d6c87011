"""Bounds by which tests judge differences: the declared rule, or a bound that follows from the arithmetic.

The rule (``gnn_attention.verify.measure``) allows in float64 a difference of 1e-12 of the largest number,
and in any other dtype an error of 2 times that of SDPA in the same dtype, or 3 times for gradients. The
bound of a sum is that of summation. No test has its own tolerance, because processors round differently.
"""

from __future__ import annotations

import math

import torch

from gnn_attention.verify import oracle
from gnn_attention.verify.measure import FLOAT64_RTOL, Truth, judge
from gnn_attention.verify.truth import Problem


def error(output, expected):
    """Return the largest absolute difference of tensors, numbers or lists of tensors; a NaN makes it NaN."""
    differences = [_difference(_as_float64(a), _as_float64(b)) for a, b in _pairs(output, expected)]
    return _max_or_zero(torch.cat(differences)) if differences else 0.0


def assert_exact(output, expected, largest=None):
    """Assert that two float64 results of one formula differ by at most 1e-12 of the largest number."""
    for a, b in _pairs(output, expected):
        assert torch.as_tensor(a).shape == torch.as_tensor(b).shape
        assert not isinstance(a, torch.Tensor) or a.dtype in (torch.float64, torch.int64), (
            f"{a.dtype}: use assert_rule"
        )
    if largest is None:
        largest = max((_largest(b) for _, b in _pairs(output, expected)), default=0.0)
    off = error(output, expected)
    assert off <= FLOAT64_RTOL * largest, (
        f"off by {off:.3g}, allowed are {FLOAT64_RTOL * largest:.3g}: "
        f"{FLOAT64_RTOL:g} of the largest, {largest:.3g}"
    )


def assert_results(output, expected):
    """Assert that out, lse and all gradients are exact; the gradients share their largest number."""
    assert_exact(output[0], expected[0])
    assert_exact(output[1], expected[1])
    assert_exact(output[2:], expected[2:])


def summation_bound(terms, magnitude, dtype):
    """Return the largest error of a sum of ``terms`` terms in ``dtype``, in any order.

    It is ``n u / (1 - n u) sum |term|`` with ``u = eps / 2``; ``magnitude`` is the sum of absolute values.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.

    >>> summation_bound(1024, 1.0, torch.float32) == 2.0**-14 / (1 - 2.0**-14)
    True
    """
    share = terms * torch.finfo(dtype).eps / 2
    return magnitude * (share / (1 - share) if share < 1 else math.inf)


def assert_sum(output, expected, terms, magnitude, dtype=torch.float32):
    """Assert that a sum of ``terms`` terms in ``dtype`` keeps to :func:`summation_bound`."""
    off, allowed = error(output, expected), summation_bound(terms, magnitude, dtype)
    assert off <= allowed, (
        f"off by {off:.3g}, allowed are {allowed:.3g} for a sum of {terms} terms in {dtype}"
    )


def assert_rule(out, gradients, truth: Truth):
    """Assert that an output has at most 2 times SDPA's error, and gradients 3 times."""
    outcome = judge(out, gradients, truth)
    assert outcome.passed, (
        f"the output has {outcome.output:.3g} times the error of SDPA (allowed 2), "
        f"and gradients have {outcome.gradient or 0.0:.3g} times (allowed 3)"
    )


def attention_truth(
    q,
    k,
    v,
    graph,
    direction=None,
    scale=None,
    modify: oracle.Modify | None = None,
    sink_logits=None,
    added=None,
) -> Truth:
    """Return the truth of dense attention in float64 on these inputs, which are rounded to their dtype."""
    mask = graph if isinstance(graph, torch.Tensor) else graph.mask()
    mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    direction = torch.ones(*q.shape[:3], v.shape[3], dtype=q.dtype) if direction is None else direction
    table = None if added is None else added.expand(mask.shape)

    def dense(inputs, logits):
        logits = logits if table is None else logits + table.to(logits.dtype)
        return logits if modify is None else modify(logits)

    inputs = {"q": q, "k": k, "v": v} | ({} if sink_logits is None else {"sink_logits": sink_logits})
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Problem(inputs, mask, direction, scale, dense, additive=modify is None).truth


def formula(q, k, v, mask, scale):
    """Return the output and lse of dense attention in float64; isolated receivers have 0 and -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    logits, mask = scale * q @ oracle.per_query_head(k, q).mT, mask.expand(*q.shape[:3], k.shape[2])
    lse = oracle.lse(logits, mask).masked_fill(~mask.any(-1), -torch.inf)
    return oracle.attention(q, k, v, mask, scale), lse


def _pairs(output, expected):
    if isinstance(output, (list, tuple)) or isinstance(expected, (list, tuple)):
        return list(zip(output, expected, strict=True))
    return [(output, expected)]


def _as_float64(x):
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)
    return x.detach().cpu().double()


def _difference(a, b):
    return torch.where(a == b, 0.0, (a - b).abs()).flatten()


def _largest(x):
    x = _as_float64(x)
    return _max_or_zero(x[~x.isinf()].abs())


def _max_or_zero(x):
    return float(x.max()) if x.numel() else 0.0
