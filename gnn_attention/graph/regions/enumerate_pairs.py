"""All pairs of a rule visited, a bounded number at a time: the mask of a rule."""

import math
from functools import partial

import torch

from gnn_attention._support import single_pairs
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.rules import Rule, Shape, map_pairs

# 4 MiB of the int64 numbers that a rule computes
CELLS_AT_ONCE = 2**19
# pairs up to which visiting all of them is the quickest way
FEW = 2**18


def has_few_pairs(shape: Shape) -> bool:
    return math.prod(shape) <= FEW


def evaluate(rule: Rule, name: str, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """The rule's answer; TypeError naming it where that is no bool tensor, or where it does not broadcast."""
    edge = single_pairs.call_on_tensors(f"the rule of {name}", rule, b, h, dst, src)
    if not isinstance(edge, Tensor) or edge.dtype != torch.bool:
        got = f"{edge.dtype} tensor" if isinstance(edge, Tensor) else type(edge).__name__
        raise TypeError(f"the rule of {name} must return a bool tensor, got a {got}")
    # not torch.broadcast_shapes, which would import sympy
    pairs = list(torch.broadcast_tensors(b, h, dst, src)[0].shape)  # type: ignore[no-untyped-call]
    fits = all(n in (1, m) for n, m in zip(edge.shape[::-1], pairs[::-1], strict=False))
    if edge.dim() > len(pairs) or not fits:
        shape = list(edge.shape)
        raise TypeError(f"the rule of {name} must return a shape that broadcasts to {pairs}, got {shape}")
    return edge


def fit_rule(rule: Rule, name: str) -> Rule:
    """The rule, or :func:`map_pairs` of it if it needs single numbers; raises the rule's own errors."""
    is_known = single_pairs.broadcasts(rule)
    if not is_known and single_pairs.call_in_thread(_needs_single_pairs, rule, name):
        return partial(map_pairs, rule)
    zeros = (torch.zeros(size, dtype=torch.int64) for size in ((1, 1), (1, 1), (3, 1), (7,)))
    evaluate(rule, name, *zeros)
    return rule


def _needs_single_pairs(rule: Rule, name: str) -> bool | None:
    ends = [torch.zeros(1, 1, 1, 1, dtype=torch.int64) for _ in range(4)]
    answers = lambda function: evaluate(function, name, *ends).expand(1, 1, 1, 1)  # noqa: E731
    return single_pairs.needs_single_pairs(answers, rule, ends)


def dense(rule: Rule, name: str, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """The mask ``[batch, heads, num_dst, num_src]``, evaluated some rows at a time."""
    batch, heads, num_dst, num_src = shape
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    step = max(1, CELLS_AT_ONCE // max(1, batch * heads * num_src))
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    src = torch.arange(num_src, device=device)
    for start in range(0, num_dst if num_src else 0, step):
        dst = torch.arange(start, min(start + step, num_dst), device=device).view(-1, 1)
        mask[:, :, start : start + step] = evaluate(rule, name, b, h, dst, src)
    return mask
