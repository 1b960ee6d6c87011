"""Trees over tokens: speculative decoding, prompts that share prefixes, documents in sections."""

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["family", "hierarchical_document", "prefix_tree", "tree", "tree_decoding"]


@builder()
def tree(parents: Sequence[int], causal: bool = True) -> TokenGraph:
    """Each token attends to itself and its ancestors: ``src`` on the path from ``dst`` to its root.

    In-degree = depth + 1. ``parents[i]`` is the parent of token i, -1 for a root. ``causal=False`` adds the
    reverse: each token attends to its descendants too. Tree attention of speculative decoding: Miao et al.
    2024, SpecInfer (arXiv 2305.09781). Raises IndexError for a parent outside ``-1 .. n - 1`` and ValueError
    for a cycle.

    >>> print(tree([-1, 0, 0, 1]))
    tree([-1, 0, 0, 1]): mask[dst, src] and in-edges
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 ■ · ■ ·   2 <- 0 2
    3 ■ ■ · ■   3 <- 0 1 3
    """
    enter, leave = _visits(parents)
    above = _above(enter, leave)
    rule = above if causal else partial(rules.combine, operator.or_, (above, partial(rules.transpose, above)))
    return TokenGraph.from_rule(rule, len(enter))


@builder()
def tree_decoding(prompt: int, parents: Sequence[int]) -> TokenGraph:
    """Tree attention after a prompt.

    ``prompt`` causal tokens, then a tree that attends to the whole prompt and its own ancestors. ``parents``
    number the tree's tokens from 0, -1 for those that follow the prompt directly; the token i of the tree is
    the node ``prompt + i`` and has in-degree ``prompt + depth + 1``. The step of a decoder, all drafted
    tokens over prompt and tree, is ``.rows(prompt, prompt + len(parents))``. Together it is one ``tree``,
    with the prompt as its trunk. SpecInfer (Miao et al. 2024, arXiv 2305.09781); Medusa (Cai et al. 2024,
    arXiv 2401.10774), whose tree has one root, the token that is already certain. Errors as in ``tree``.

    >>> tree_decoding(2, [-1, 0, 0]).in_degree().tolist()
    [1, 2, 3, 4, 4]
    """
    enter, leave = (times + prompt for times in _visits(parents))
    n, trunk = prompt + len(enter), torch.arange(prompt, device="cpu")
    rule = _above(torch.cat([trunk, enter]), torch.cat([torch.full_like(trunk, n), leave]))
    return TokenGraph.from_rule(rule, n)


@builder()
def prefix_tree(lengths: Sequence[int], parents: Sequence[int]) -> TokenGraph:
    """Each token attends to its segment up to itself, and to the whole of each segment above.

    ``lengths`` are the segments' sizes in order, ``parents[k]`` the segment that segment k continues, -1 for
    none. So every path from a root down is one causal sequence, and what paths have in common stands there
    once: several answers to several prompts, few-shot prompts, tree search. Causal if parents stand before
    their children. ``shared_prefix`` is its smallest case, ``documents`` its roots alone, ``tree`` its
    segments of one token. DeFT (Yao et al. 2025, arXiv 2404.00242) computes it at decoding. Errors as in
    ``tree``; ValueError unless there is a parent for each segment.

    >>> prefix_tree([2, 1, 2], [-1, 0, 0]).in_degree().tolist()
    [1, 2, 3, 3, 4]
    """
    sizes, visits = checks.sizes("lengths", lengths), _visits(parents)
    if len(sizes) != len(visits[0]):
        wanted = f"a segment (or -1) for each of the {len(sizes)} lengths"
        raise ValueError(f"parents must name {wanted}, got {len(visits[0])}")
    enter, leave = (times.repeat_interleave(_data.table(sizes)) for times in visits)
    return TokenGraph.from_rule(_above(enter, leave), len(enter))


@builder()
def family(parents: Sequence[int]) -> TokenGraph:
    """Each token attends to itself, its parent, its children and its siblings.

    Symmetric; the roots of a forest count as siblings. ``parent(src) = parent(dst)`` or ``src = parent(dst)``
    or ``dst = parent(src)``: in-degree = children + siblings with itself + 1 for a parent. Information
    crosses one tree of depth D >= 1 in at most 2 D - 1 layers: up to the children of the common ancestor,
    across, down (2 D + 1 from tree to tree). The relation of ``hierarchical_document``. Errors of ``tree``.

    >>> family([-1, 0, 0, 1]).in_degree().tolist()
    [3, 4, 3, 2]
    """
    _visits(parents)  # refuses what is no forest
    table = _data.table(list(parents))
    of_dst, of_src = look_up(table, dst), look_up(table, src)
    return TokenGraph.from_rule((of_src == of_dst) | (of_dst == src) | (of_src == dst), len(table))


@builder()
def hierarchical_document(sections: Sequence[Sequence[int]]) -> TokenGraph:
    """A document in sections and sentences, each headed by an anchor token.

    Tokens attend to parent, children and siblings. ``sections[s][t]`` is the number of words in sentence t of
    section s. The tokens stand as document anchor, then for each section its anchor, then for each sentence
    its anchor and its words. A word attends to its sentence (words and anchor); a sentence anchor its words,
    the sentence anchors of its section and the section's anchor; a section anchor its sentences' anchors, all
    section anchors and the document's anchor; that one all section anchors. Every token attends to itself.
    Any word reaches any other in 5 layers. HDT, the Hierarchical Document Transformer (He et al. 2024, arXiv
    2407.08330).

    >>> hierarchical_document([[1], [2]]).in_degree().tolist()
    [3, 4, 3, 2, 4, 4, 3, 3]
    """
    checks.check_order("sections", sections)
    if not isinstance(sections, Iterable):
        raise TypeError(f"sections must be a list of lists of sentence lengths, got {quote(sections)}")
    document = [checks.sizes(f"sections[{number}]", section) for number, section in enumerate(sections)]
    parents = [-1]
    for sentences in document:
        section = len(parents)
        parents.append(0)
        for words in sentences:
            parents += [section] + [len(parents)] * words
    return family(parents)


def _above(enter: Tensor, leave: Tensor) -> Any:
    """Those of the segments above, and the past of the own one."""
    first_of_dst, first_of_src = look_up(enter, dst), look_up(enter, src)
    above = (first_of_src < first_of_dst) & (first_of_dst < look_up(leave, src))
    return above | ((first_of_src == first_of_dst) & (src <= dst))


def _visits(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Depth-first times: token a is t or an ancestor iff ``enter[a] <= enter[t] < leave[a]``."""
    parents = checks.integers("parents", parents, "positions (-1 for a root)")
    children: list[list[int]] = [[] for _ in parents]
    for child, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            wanted = f"-1 (a root) or in 0 .. {len(parents) - 1}"
            raise IndexError(f"parents[{child}] must be {wanted}, got {parent}")
        if parent >= 0:
            children[parent].append(child)
    order: list[int] = []
    stack = [root for root, parent in enumerate(parents) if parent < 0]
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]]
    if unvisited := set(range(len(parents))) - set(order):
        raise ValueError(f"parents must form a forest, but token {min(unvisited)} is on or below a cycle")
    sizes = [1] * len(parents)
    for node in reversed(order):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    enter = _data.table(order).argsort()
    return enter, enter + _data.table(sizes)
