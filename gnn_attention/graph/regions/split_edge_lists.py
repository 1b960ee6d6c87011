"""A rule made with lists of edges, as a rule without lists and the pairs about which the two may differ.

With an empty list in the place of each, ``R_0``, a rule ``R`` is the same for all pairs that no list holds,
so ``|R| = |R_0| + sum over listed pairs of (R - R_0)``: a structured rule is counted by boxes, and scattered
pairs, which would break every box, one by one. This is read off the functions of ``rules`` that operators and
methods of graphs bind; inside other functions a list stays.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.rules import Rule

JOINS = (rules.or_, rules.and_, rules.minus, rules.xor)


class SplitRule(NamedTuple):
    """``rule`` is the same as another for all pairs but these: distinct, by receiver, then sender."""

    rule: Rule
    src: Int[Tensor, " pairs"]
    dst: Int[Tensor, " pairs"]


def split_edge_lists(rule: Rule, num_dst: int, num_src: int) -> SplitRule | None:
    """The rule without its lists, and their pairs among these tokens; None if it has none."""
    rule, keys = _without_lists(rule, num_dst, num_src)
    if not keys:
        return None
    key = keys[0] if len(keys) == 1 else torch.cat(keys)
    key = torch.unique(key[(key >= 0) & (key < num_dst * num_src)])
    return SplitRule(rule, key % max(num_src, 1), key // max(num_src, 1))


def _without_lists(rule: Rule, num_dst: int, num_src: int) -> tuple[Rule, list[Tensor]]:
    if not isinstance(rule, partial):
        return rule, []
    # for more senders the keys would be those of other pairs
    if rule.func is rules.is_listed and num_src <= rule.args[1]:
        return rules.no_pair, [_renumber(rule.args[0][:-1], rule.args[1], num_src)]
    if rule.func in JOINS:
        left, of_left = _without_lists(rule.args[0], num_dst, num_src)
        right, of_right = _without_lists(rule.args[1], num_dst, num_src)
        return partial(rule.func, left, right), of_left + of_right
    if rule.func is rules.transposed:
        inner, keys = _without_lists(rule.args[0], num_src, num_dst)
        width = max(num_dst, 1)
        return partial(rule.func, inner), [key % width * num_src + key // width for key in keys]
    if rule.func is rules.shifted:
        inner, keys = _without_lists(rule.args[0], num_dst + rule.args[1], num_src)
        return partial(rule.func, inner, rule.args[1]), [key - rule.args[1] * num_src for key in keys]
    if rule.func in (rules.not_, rules.pinned):
        inner, keys = _without_lists(rule.args[0], num_dst, num_src)
        return partial(rule.func, inner, *rule.args[1:]), keys
    return rule, []


def _renumber(keys: Tensor, width: int, num_src: int) -> Tensor:
    """Keys ``dst * width + src`` for another number of senders, without the pairs beyond it."""
    if width == num_src:
        return keys
    dst, src = keys // max(width, 1), keys % max(width, 1)
    inside = src < num_src
    return dst[inside] * num_src + src[inside]
