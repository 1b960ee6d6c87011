"""Trees over tokens: speculative decoding, prompts that share prefixes, documents in sections."""

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["family", "hierarchical_document", "prefix_tree", "tree", "tree_decoding"]


@builder()
def tree(parents: Sequence[int], causal: bool = True) -> TokenGraph:
    """Each token attends to itself and its ancestors, the path from ``dst`` to its root.

    The in-degree is depth + 1. ``parents[i]`` is the parent of token i, -1 for a root. ``causal=False`` adds
    the descendants. Source: the tree attention of speculative decoding (Miao et al. 2024, SpecInfer, arXiv
    2305.09781). Raises IndexError for a parent outside ``-1 .. n - 1``, and ValueError for a cycle.

    >>> print(tree([-1, 0, 0, 1]))
    tree([-1, 0, 0, 1]): mask[dst, src] and in-edges
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 ■ · ■ ·   2 <- 0 2
    3 ■ ■ · ■   3 <- 0 1 3
    """
    enter, leave = _visit_times(parents)
    rule = _is_above(enter, leave)
    if not causal:
        rule = partial(rules.combine, operator.or_, (rule, partial(rules.transpose, rule)))
    return TokenGraph.from_rule(rule, len(enter))


@builder()
def tree_decoding(prompt: int, parents: Sequence[int]) -> TokenGraph:
    """The tokens of a tree attend to their ancestors and to the whole prompt before the tree.

    The prompt is causal and has ``prompt`` tokens. ``parents[i]`` is the parent of token i of the tree, or
    -1 if this token follows the prompt directly. Token i of the tree is node ``prompt + i`` and has
    in-degree ``prompt + depth + 1``. The whole graph is a ``tree`` with the prompt as its trunk;
    the decoding step of all drafted tokens is ``.rows(prompt, prompt + len(parents))``. Sources:
    SpecInfer (Miao et al. 2024, arXiv 2305.09781); Medusa (Cai et al. 2024, arXiv 2401.10774),
    whose tree has one root, a token that is already decided. Raises the errors of ``tree``.

    >>> tree_decoding(2, [-1, 0, 0]).in_degree().tolist()
    [1, 2, 3, 4, 4]
    """
    enter, leave = (times + prompt for times in _visit_times(parents))
    n = prompt + len(enter)
    trunk = torch.arange(prompt, device="cpu")
    rule = _is_above(torch.cat([trunk, enter]), torch.cat([torch.full_like(trunk, n), leave]))
    return TokenGraph.from_rule(rule, n)


@builder()
def prefix_tree(lengths: Sequence[int], parents: Sequence[int]) -> TokenGraph:
    """Each token attends to its segment up to itself, and to the whole of each ancestor segment.

    ``lengths`` are the sizes of the segments in order, and ``parents[k]`` is the segment that
    segment k continues, -1 for none. So every path from a root down is one causal sequence,
    and parts that paths share are stored once, as for several answers to several prompts,
    few-shot prompts and tree search. The graph is causal if parents come before their children.
    ``shared_prefix`` is the simplest case, ``documents`` has only roots, and ``tree`` has segments
    of one token. Source: DeFT (Yao et al. 2025, arXiv 2404.00242), for decoding. Raises the errors
    of ``tree``, and ValueError unless there is a parent for each segment.

    >>> prefix_tree([2, 1, 2], [-1, 0, 0]).in_degree().tolist()
    [1, 2, 3, 3, 4]
    """
    sizes = checks.sizes("lengths", lengths)
    enter, leave = _visit_times(parents)
    if len(sizes) != len(enter):
        raise ValueError(f"parents must hold an entry for each of the {len(sizes)} lengths, got {len(enter)}")
    enter, leave = (times.repeat_interleave(_data.int64_tensor(sizes)) for times in (enter, leave))
    return TokenGraph.from_rule(_is_above(enter, leave), len(enter))


@builder()
def family(parents: Sequence[int]) -> TokenGraph:
    """Each token attends to itself, its parent, its children and its siblings.

    The edges are ``parent(src) = parent(dst)`` or ``src = parent(dst)`` or ``dst = parent(src)``;
    the roots of a forest are siblings. The graph is symmetric. The in-degree is the number of
    children and siblings (with the token itself), plus 1 for a parent. Messages cross a tree of
    depth D >= 1 in at most 2 D - 1 layers: up to the children of the common ancestor, across, and
    down; from tree to tree they need 2 D + 1. ``hierarchical_document`` is such a graph. Raises the
    errors of ``tree``.

    >>> family([-1, 0, 0, 1]).in_degree().tolist()
    [3, 4, 3, 2]
    """
    # The times are not needed, but their computation raises an error unless the parents form a forest.
    _visit_times(parents)
    parent_index = _data.int64_tensor(list(parents))
    dst_parent, src_parent = look_up(parent_index, dst), look_up(parent_index, src)
    rule = (src_parent == dst_parent) | (dst_parent == src) | (src_parent == dst)
    return TokenGraph.from_rule(rule, len(parent_index))


@builder()
def hierarchical_document(sections: Sequence[Sequence[int]]) -> TokenGraph:
    """In a document with anchors, tokens attend to their parent, children and siblings.

    ``sections[s][t]`` is the number of words in sentence t of section s. The tokens are the
    document's anchor, then for each section its anchor, then for each sentence its anchor and its
    words. A word attends to the words and the anchor of its sentence. A sentence anchor attends to
    its words, the sentence anchors of its section and the section's anchor. A section anchor
    attends to the anchors of its sentences, all section anchors and the document's anchor, which
    attends to all section anchors. Every token attends to itself. Any word reaches any other in 5
    layers. Source: HDT (He et al. 2024, arXiv 2407.08330).

    >>> hierarchical_document([[1], [2]]).in_degree().tolist()
    [3, 4, 3, 2, 4, 4, 3, 3]
    """
    checks.check_order("sections", sections)
    if not isinstance(sections, Iterable):
        raise TypeError(f"sections must be a list of lists of sentence lengths, got {checks.quote(sections)}")
    document = [checks.sizes(f"sections[{index}]", section) for index, section in enumerate(sections)]
    parents = [-1]
    for sentences in document:
        section = len(parents)
        parents.append(0)
        for num_words in sentences:
            parents += [section] + [len(parents)] * num_words
    return family(parents)


def _is_above(enter: Tensor, leave: Tensor) -> Any:
    """Return the rule that the sender is in an ancestor segment, or not later in the same segment."""
    dst_enter, src_enter = look_up(enter, dst), look_up(enter, src)
    is_ancestor = (src_enter < dst_enter) & (dst_enter < look_up(leave, src))
    return is_ancestor | ((src_enter == dst_enter) & (src <= dst))


def _visit_times(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return times ``enter`` and ``leave``: a is t or above t iff ``enter[a] <= enter[t] < leave[a]``."""
    parents = checks.integers("parents", parents, "positions (-1 for a root)")
    n = len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for child, parent in enumerate(parents):
        if not -1 <= parent < n:
            raise IndexError(f"parents[{child}] must be -1 (a root) or in 0 .. {n - 1}, got {parent}")
        if parent >= 0:
            children[parent].append(child)
    preorder: list[int] = []
    stack = [root for root, parent in enumerate(parents) if parent < 0]
    while stack:
        preorder.append(stack.pop())
        stack += children[preorder[-1]]
    if unvisited := set(range(n)) - set(preorder):
        raise ValueError(f"parents must form a forest, but token {min(unvisited)} is on or below a cycle")
    subtree_sizes = [1] * n
    for node in reversed(preorder):
        if parents[node] >= 0:
            subtree_sizes[parents[node]] += subtree_sizes[node]
    enter = _data.int64_tensor(preorder).argsort()
    return enter, enter + _data.int64_tensor(subtree_sizes)
