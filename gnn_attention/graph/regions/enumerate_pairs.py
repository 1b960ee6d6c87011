"""Evaluate a rule on all pairs, a bounded number of pairs at a time."""

import math
from functools import partial

import torch

from gnn_attention._support import single_pairs
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.rules import Rule, Shape, map_pairs

# A rule is evaluated on this many pairs at a time: 4 MiB in int64.
MAX_PAIRS_PER_CHUNK = 2**19
# Up to this number of pairs it is fastest to visit all of them.
MAX_ENUMERATED_PAIRS = 2**18


def has_few_pairs(shape: Shape) -> bool:
    return math.prod(shape) <= MAX_ENUMERATED_PAIRS


def evaluate(rule: Rule, name: str, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Evaluate a rule on pairs; TypeError unless it returns a bool tensor that broadcasts to their shape."""
    is_edge = single_pairs.call_on_tensors(f"the rule of {name}", rule, b, h, dst, src)
    if not isinstance(is_edge, Tensor) or is_edge.dtype != torch.bool:
        kind = f"{is_edge.dtype} tensor" if isinstance(is_edge, Tensor) else type(is_edge).__name__
        raise TypeError(f"the rule of {name} must return a bool tensor, got a {kind}")
    # torch.broadcast_shapes would import sympy.
    shape = list(torch.broadcast_tensors(b, h, dst, src)[0].shape)  # type: ignore[no-untyped-call]
    is_compatible = all(n in (1, m) for n, m in zip(is_edge.shape[::-1], shape[::-1], strict=False))
    if is_edge.dim() > len(shape) or not is_compatible:
        actual = list(is_edge.shape)
        raise TypeError(f"the rule of {name} must return a shape that broadcasts to {shape}, got {actual}")
    return is_edge


def fit_rule(rule: Rule, name: str) -> Rule:
    """Return the rule, mapped over pairs if it needs scalars; errors of the rule propagate."""
    if not single_pairs.broadcasts(rule) and single_pairs.call_in_thread(_needs_single_pairs, rule, name):
        return partial(map_pairs, rule)
    b = h = torch.zeros(1, 1, dtype=torch.int64)
    dst, src = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    evaluate(rule, name, b, h, dst, src)
    return rule


def _needs_single_pairs(rule: Rule, name: str) -> bool | None:
    pair = [torch.zeros(1, 1, 1, 1, dtype=torch.int64) for _ in range(4)]
    evaluate_pair = lambda function: evaluate(function, name, *pair).expand(1, 1, 1, 1)  # noqa: E731
    return single_pairs.needs_single_pairs(evaluate_pair, rule, pair)


def dense_mask(rule: Rule, name: str, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """Return the mask ``[batch, heads, num_dst, num_src]``, evaluated in chunks of rows."""
    batch, heads, num_dst, num_src = shape
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    chunk_size = max(1, MAX_PAIRS_PER_CHUNK // max(1, batch * heads * num_src))
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    src = torch.arange(num_src, device=device)
    for start in range(0, num_dst if num_src else 0, chunk_size):
        dst = torch.arange(start, min(start + chunk_size, num_dst), device=device).view(-1, 1)
        mask[:, :, start : start + chunk_size] = evaluate(rule, name, b, h, dst, src)
    return mask
