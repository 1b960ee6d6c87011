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

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.neighbours import keys_of
from gnn_attention.graph.regions.quadtree import Boxes
from gnn_attention.graph.rules import Rule

JOINS = (rules.or_, rules.and_, rules.minus, rules.xor)


class SplitRule(NamedTuple):
    """``rule`` is the same as another for all pairs but these: distinct, by receiver, then sender."""

    rule: Rule
    src: Int[Tensor, " pairs"]
    dst: Int[Tensor, " pairs"]


def split_edge_lists(
    rule: Rule, num_dst: int, num_src: int, chosen: Bool[Tensor, " strips"] | None = None, height: int = 1
) -> SplitRule | None:
    """The rule without its lists, and their pairs among these tokens; None if it has none.

    Only the pairs of the ``chosen`` strips of ``height`` receivers each, if that is given.
    """
    rule, keys = _without_lists(rule, num_dst, num_src)
    if not keys:
        return None
    key = torch.cat(keys)
    key = key[(key >= 0) & (key < num_dst * num_src)]
    key = torch.unique(key if chosen is None else key[chosen[key // (num_src * height)]])
    return SplitRule(rule, key % max(num_src, 1), key // max(num_src, 1))


def _without_lists(rule: Rule, num_dst: int, num_src: int) -> tuple[Rule, list[Tensor]]:
    """The rule without lists, and their keys."""
    if not isinstance(rule, partial):
        return rule, []
    # for more senders the keys would be those of other pairs
    listed = keys_of(rule)
    if listed is not None and num_src <= listed[1]:
        dst, src = listed[0] // max(listed[1], 1), listed[0] % max(listed[1], 1)
        inside = src < num_src
        return rules.no_pair, [dst[inside] * num_src + src[inside]]
    if rule.func in JOINS:
        left, of_left = _without_lists(rule.args[0], num_dst, num_src)
        right, of_right = _without_lists(rule.args[1], num_dst, num_src)
        return partial(rule.func, left, right), of_left + of_right
    if rule.func is rules.transposed:
        inner, keys = _without_lists(rule.args[0], num_src, num_dst)
        width = max(num_dst, 1)
        return partial(rule.func, inner), [key % width * num_src + key // width for key in keys]
    if rule.func is rules.shifted:
        start = rule.args[1]
        inner, keys = _without_lists(rule.args[0], num_dst + start, num_src)
        return partial(rule.func, inner, start), [key - start * num_src for key in keys]
    if rule.func in (rules.not_, rules.pinned):
        inner, keys = _without_lists(rule.args[0], num_dst, num_src)
        return partial(rule.func, inner, *rule.args[1:]), keys
    return rule, []


def split_by_box(split: SplitRule, boxes: Boxes) -> tuple[SplitRule, Int[Tensor, " pairs"]] | None:
    """The listed pairs inside the boxes, by sample and head, and the box of each.

    None if the boxes are not tiles of one grid, among which the box of a pair is looked up.
    """
    height, width = int(boxes.height.max()), int(boxes.width.max())
    top, left = int(boxes.dst[0]) % height, int(boxes.src[0]) % width
    last_dst, last_src = boxes.dst + boxes.height - 1, boxes.src + boxes.width - 1
    rows, columns = int(last_dst.max()) // height + 3, int(last_src.max()) // width + 3

    def cells(sample: Tensor | int, dst: Tensor, src: Tensor) -> Tensor:
        return (sample * rows + (dst - top) // height + 1) * columns + (src - left) // width + 1

    sample = boxes.batch * (int(boxes.head.max()) + 1) + boxes.head
    first = cells(sample, boxes.dst, boxes.src)
    keys, order = first.sort()
    if not torch.equal(first, cells(sample, last_dst, last_src)) or not bool((keys[1:] > keys[:-1]).all()):
        return None
    found = []
    for number in torch.unique(sample).tolist():
        key = cells(number, split.dst, split.src)
        place = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
        box = order[place]
        inside = (keys[place] == key) & (split.dst >= boxes.dst[box]) & (split.src >= boxes.src[box])
        inside &= (split.dst <= last_dst[box]) & (split.src <= last_src[box])
        found.append((split.src[inside], split.dst[inside], box[inside]))
    src, dst, box = (torch.cat(parts) for parts in zip(*found, strict=True))
    return SplitRule(split.rule, src, dst), box
