"""By what tests judge a difference: the declared rule, or a bound that follows from the arithmetic.

The rule (``gnn_attention.verify.measure``): in float64 a difference of at most 1e-12 of the largest number;
in any other dtype an error against float64 of at most 2 times that of SDPA in the same dtype (gradients: 3
times). Where a result is a plain sum, the bound is that of summation. No test has a tolerance of its own:
processors round differently.
"""

from __future__ import annotations

import math

import torch

from gnn_attention.verify import oracle
from gnn_attention.verify.measure import EXACT, Truth, judge
from gnn_attention.verify.truth import Problem


def error(found, true):
    """The largest absolute difference of tensors, numbers or lists of tensors; NaN where one is."""
    differences = [_difference(_wide(a), _wide(b)) for a, b in _pairs(found, true)]
    together = torch.cat(differences) if differences else torch.zeros(0)
    return float(together.max()) if together.numel() else 0.0


def assert_exact(found, true, largest=None):
    """Two float64 results of one formula: they differ by at most 1e-12 of the largest number."""
    for a, b in _pairs(found, true):
        assert torch.as_tensor(a).shape == torch.as_tensor(b).shape
        assert not isinstance(a, torch.Tensor) or a.dtype in (torch.float64, torch.int64), (
            f"{a.dtype}: use assert_rule"
        )
    largest = max((_largest(b) for _, b in _pairs(found, true)), default=0.0) if largest is None else largest
    off = error(found, true)
    assert off <= EXACT * largest, (
        f"off by {off:.3g}, allowed are {EXACT * largest:.3g}: {EXACT:g} of the largest, {largest:.3g}"
    )


def assert_results(found, true):
    """Out, lse and gradients: out and lse each for itself; the gradients share the largest number."""
    assert_exact(found[0], true[0])
    assert_exact(found[1], true[1])
    assert_exact(found[2:], true[2:])


def summation_bound(terms, magnitude, dtype):
    """How far a sum of ``terms`` terms in ``dtype`` may be off in any order.

    ``n u / (1 - n u) sum |term|``, ``u = eps / 2``, where ``magnitude`` is the sum of absolute values.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.

    >>> summation_bound(1024, 1.0, torch.float32) == 2.0**-14 / (1 - 2.0**-14)
    True
    """
    share = terms * torch.finfo(dtype).eps / 2
    return magnitude * (share / (1 - share) if share < 1 else math.inf)


def assert_sum(found, true, terms, magnitude, dtype=torch.float32):
    """A plain sum of ``terms`` terms in ``dtype``, whose absolute values sum to at most ``magnitude``."""
    off, allowed = error(found, true), summation_bound(terms, magnitude, dtype)
    assert off <= allowed, (
        f"off by {off:.3g}, allowed are {allowed:.3g} for a sum of {terms} terms in {dtype}"
    )


def assert_rule(out, gradients, true: Truth):
    """The rule of ``verify``: at most 2 times SDPA's error, 3 times for gradients."""
    found = judge(out, gradients, true)
    off = f"output {found.output:.3g} (allowed 2), gradients {found.gradient or 0.0:.3g} (allowed 3)"
    assert found.passed, f"{off} of SDPA's errors"


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
    """Dense attention in float64 on these (rounded) inputs."""
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
    """Output and lse of the softmax over the edges of ``mask``, in float64; 0 and -inf without edges."""
    q, k, v = (x.double() for x in (q, k, v))
    logits, mask = scale * q @ oracle.per_query_head(k, q).mT, mask.expand(*q.shape[:3], k.shape[2])
    lse = oracle.lse(logits, mask).masked_fill(~mask.any(-1), -torch.inf)
    return oracle.attention(q, k, v, mask, scale), lse


def _pairs(found, true):
    if isinstance(found, (list, tuple)) or isinstance(true, (list, tuple)):
        return list(zip(found, true, strict=True))
    return [(found, true)]


def _wide(x):
    return (
        torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else torch.float64)
        .detach()
        .cpu()
        .double()
    )


def _difference(a, b):
    return torch.where(a == b, 0.0, (a - b).abs()).flatten()


def _largest(x):
    x = _wide(x)
    x = x[~x.isinf()]
    return float(x.abs().max()) if x.numel() else 0.0
