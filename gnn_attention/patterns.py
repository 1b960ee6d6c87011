"""The zoo: builders of token graphs, one short function for each.

Every builder takes sizes and returns a :class:`TokenGraph`; the docstring states its set of edges exactly. Builders are
causal (``src <= dst``) unless their definition says otherwise; ``causal=False`` asks for the other. Rules are functions of
this module bound by ``functools.partial``, so that graphs can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from gnn_attention import _checks, _rules
from gnn_attention._shapes import Tensor
from gnn_attention.graph import TokenGraph

__all__ = [
    "causal",
    "cross",
    "dilated",
    "documents",
    "full",
    "global_tokens",
    "no_self",
    "prefix",
    "sinks",
    "strict_causal",
    "tree",
    "window",
]


def full(n: int) -> TokenGraph:
    """Everyone hears everyone: all ``n^2`` pairs. The encoder's graph (Vaswani et al. 2017, arXiv 1706.03762).

    >>> full(5).num_edges
    25
    """
    return TokenGraph.from_rule(_rules.everyone, n, name=f"full({n})")


def cross(num_dst: int, num_src: int) -> TokenGraph:
    """Every receiver hears every sender of another sequence: all ``num_dst * num_src`` pairs, a bipartite graph.

    Cross-attention (Vaswani et al. 2017, section 3.2.3); seed S0.3.

    >>> print(cross(2, 3))
    cross(2, 3): mask[dst, src] and who hears whom
    0 ■ ■ ■   0 <- 0 1 2
    1 ■ ■ ■   1 <- 0 1 2
    """
    return TokenGraph.from_rule(_rules.everyone, num_dst, num_src, name=f"cross({num_dst}, {num_src})")


def causal(n: int) -> TokenGraph:
    """A token hears itself and all before it: ``src <= dst``, ``n (n + 1) / 2`` edges. The decoder's graph (Vaswani et al. 2017).

    >>> print(causal(3))
    causal(3): mask[dst, src] and who hears whom
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 ■ ■ ■   2 <- 0 1 2
    """
    return TokenGraph.from_rule(_rules.causal, n, name=f"causal({n})")


def strict_causal(n: int) -> TokenGraph:
    """A token hears all before it, not itself: ``src < dst``. Token 0 hears nobody and receives exactly 0.

    >>> strict_causal(4).in_degree().tolist()
    [0, 1, 2, 3]
    """
    return TokenGraph.from_rule(_strict_causal, n, name=f"strict_causal({n})")


def no_self(n: int) -> TokenGraph:
    """Everyone hears everyone else: ``src != dst``, ``n (n - 1)`` edges (the sum over j != i of seed S3.6).

    >>> no_self(4).in_degree().tolist()
    [3, 3, 3, 3]
    """
    return TokenGraph.from_rule(_no_self, n, name=f"no_self({n})")


def window(n: int, w: int, causal: bool = True) -> TokenGraph:
    """A token hears the last ``w`` tokens, itself included: ``dst - w < src <= dst``, in-degree ``min(dst + 1, w)``.

    ``causal=False``: ``|dst - src| < w``, up to ``2 w - 1`` senders. Others count differently: attention-gym's
    ``sliding_window(w)`` and flash-attention's ``(w, 0)`` hear ``w + 1`` tokens; Hugging Face's ``sliding_window=w`` is this one.
    Child et al. 2019 (arXiv 1904.10509); Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.

    >>> print(window(4, 2))
    window(4, 2): mask[dst, src] and who hears whom
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 · ■ ■ ·   2 <- 1 2
    3 · · ■ ■   3 <- 2 3
    """
    rule = partial(_window if causal else _window_both, _checks.size("w", w))
    return TokenGraph.from_rule(rule, n, name=_named("window", causal, n, w))


def dilated(n: int, w: int, dilation: int, causal: bool = True) -> TokenGraph:
    """A token hears ``w`` tokens at steps of ``dilation``, itself first: ``src = dst - dilation * k``, ``0 <= k < w``.

    In-degree ``min(dst // dilation + 1, w)``; ``causal=False`` takes both signs of k. attention-gym's version bounds the
    distance instead of the number. Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1, "Dilated Sliding Window".

    >>> print(dilated(5, 2, 2))
    dilated(5, 2, 2): mask[dst, src] and who hears whom
    0 ■ · · · ·   0 <- 0
    1 · ■ · · ·   1 <- 1
    2 ■ · ■ · ·   2 <- 0 2
    3 · ■ · ■ ·   3 <- 1 3
    4 · · ■ · ■   4 <- 2 4
    """
    w, step = _checks.size("w", w), _checks.size("dilation", dilation, 1)
    rule = partial(_dilated if causal else _dilated_both, w, step)
    return TokenGraph.from_rule(rule, n, name=_named("dilated", causal, n, w, dilation))


def prefix(n: int, p: int) -> TokenGraph:
    """The first ``p`` tokens hear each other, the rest is causal: ``src < p or src <= dst``. Not causal inside the prefix.

    The prefix language model (Raffel et al. 2020, arXiv 1910.10683, section 3.2.1).

    >>> print(prefix(4, 2))
    prefix(4, 2): mask[dst, src] and who hears whom
    0 ■ ■ · ·   0 <- 0 1
    1 ■ ■ · ·   1 <- 0 1
    2 ■ ■ ■ ·   2 <- 0 1 2
    3 ■ ■ ■ ■   3 <- 0 1 2 3
    """
    return TokenGraph.from_rule(partial(_prefix, _checks.size("p", p)), n, name=f"prefix({n}, {p})")


def documents(lengths: Sequence[int], causal: bool = True) -> TokenGraph:
    """Packed documents: a token hears its own document only, ``doc(src) = doc(dst)`` and ``src <= dst``.

    ``lengths`` are the documents' sizes in order (0 allowed); ``causal=False`` drops the second condition. The disjoint sum
    of graphs, as in torch_geometric's batches.

    >>> print(documents([2, 1]))
    documents([2, 1]): mask[dst, src] and who hears whom
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 · · ■   2 <- 2
    """
    if not isinstance(lengths, Iterable):
        raise TypeError(f"lengths must be a sequence of sizes, got {lengths!r}; one document is documents([{lengths!r}])")
    sizes = [_checks.size("each of lengths", length) for length in lengths]
    number, size = torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, dtype=torch.int64, device="cpu")
    owner = torch.repeat_interleave(number, size)
    shown = sizes if len(sizes) <= 6 else f"[{len(sizes)} lengths]"
    rule = partial(_same_document if causal else _same_document_both, owner)
    return TokenGraph.from_rule(rule, len(owner), name=_named("documents", causal, shown))


def sinks(n: int, s: int, causal: bool = True) -> TokenGraph:
    """Everyone hears the first ``s`` tokens: ``src < s and src <= dst``; ``causal=False`` drops the second condition.

    ``window(n, w) | sinks(n, 4)`` is StreamingLLM (Xiao et al. 2024, arXiv 2309.17453, section 3).

    >>> sinks(5, 2).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    rule = partial(_sinks if causal else _sinks_both, _checks.size("s", s))
    return TokenGraph.from_rule(rule, n, name=_named("sinks", causal, n, s))


def global_tokens(n: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """Chosen tokens G hear all and are heard by all: ``src in G or dst in G``, and ``src <= dst`` unless ``causal=False``.

    ``tokens``: their positions, or a number m for the first m. Longformer's global attention (Beltagy et al. 2020,
    arXiv 2004.05150, section 3.1) is ``causal=False``. IndexError for a position outside ``0 .. n - 1``.

    >>> print(global_tokens(4, [1]))
    global_tokens(4, [1]): mask[dst, src] and who hears whom
    0 · · · ·   0 <- nobody
    1 ■ ■ · ·   1 <- 0 1
    2 · ■ · ·   2 <- 1
    3 · ■ · ·   3 <- 1
    """
    n = _checks.size("n", n)
    chosen = (
        [_position("each of tokens", t) for t in tokens]
        if isinstance(tokens, Iterable)
        else list(range(_checks.size("tokens", tokens)))
    )
    outside = [token for token in chosen if not 0 <= token < n]
    if outside:
        raise IndexError(f"tokens must be positions in 0 .. {n - 1}, got {outside[0]}")
    is_global = torch.zeros(n, dtype=torch.bool, device="cpu")
    is_global[chosen] = True
    shown = (chosen if len(chosen) <= 6 else f"[{len(chosen)} tokens]") if isinstance(tokens, Iterable) else tokens
    rule = partial(_global if causal else _global_both, is_global)
    return TokenGraph.from_rule(rule, n, name=_named("global_tokens", causal, n, shown))


def tree(parents: Sequence[int], causal: bool = True) -> TokenGraph:
    """A token hears itself and its ancestors: ``src`` on the path from ``dst`` to its root. In-degree = depth + 1.

    ``parents[i]`` is the parent of token i, -1 for a root. ``causal=False`` adds the reverse: a token hears its descendants
    too. Tree attention of speculative decoding: Miao et al. 2024, SpecInfer (arXiv 2305.09781), section 4.2.
    Raises IndexError for a parent outside ``-1 .. n - 1`` and ValueError for a cycle.

    >>> print(tree([-1, 0, 0, 1]))
    tree([-1, 0, 0, 1]): mask[dst, src] and who hears whom
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 ■ · ■ ·   2 <- 0 2
    3 ■ ■ · ■   3 <- 0 1 3
    """
    parents = [_position(f"parents[{child}]", parent) for child, parent in enumerate(parents)]
    enter, leave = _visits(parents)
    shown = parents if len(parents) <= 8 else f"[{len(parents)} parents]"
    rule = partial(_ancestors if causal else _ancestors_both, enter, leave)
    return TokenGraph.from_rule(rule, len(parents), name=_named("tree", causal, shown))


# -- rules ------------------------------------------------------------------------------------------------------------


def _strict_causal(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src < dst


def _no_self(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src != dst


def _window(w: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & (dst - src < w)


def _window_both(w: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst - src).abs() < w


def _dilated(w: int, step: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & (dst - src < w * step) & ((dst - src) % step == 0)


def _dilated_both(w: int, step: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return ((dst - src).abs() < w * step) & ((dst - src) % step == 0)


def _prefix(p: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src < p) | (src <= dst)


def _same_document_both(owner: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    table = owner.to(dst.device)
    return table[dst] == table[src]


def _same_document(owner: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return _same_document_both(owner, b, h, dst, src) & (src <= dst)


def _sinks(s: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src < s) & (src <= dst)


def _sinks_both(s: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src < s) & (dst >= 0)


def _global_both(is_global: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    table = is_global.to(dst.device)
    return table[dst] | table[src]


def _global(is_global: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return _global_both(is_global, b, h, dst, src) & (src <= dst)


def _ancestors(enter: Tensor, leave: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    first, last = enter.to(dst.device), leave.to(dst.device)
    return (first[src] <= first[dst]) & (first[dst] < last[src])


def _ancestors_both(enter: Tensor, leave: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return _ancestors(enter, leave, b, h, dst, src) | _ancestors(enter, leave, b, h, src, dst)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _named(word: str, causal: bool, *arguments: object) -> str:
    return f"{word}({', '.join(map(str, arguments))}{'' if causal else ', causal=False'})"


def _position(name: str, value: object) -> int:
    return _checks.size(name, value, -(2**63))


def _visits(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Depth-first visit times: token a is an ancestor of (or is) token t iff ``enter[a] <= enter[t] < leave[a]``."""
    children: list[list[int]] = [[] for _ in parents]
    for child, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise IndexError(f"parents[{child}] must be -1 (a root) or in 0 .. {len(parents) - 1}, got {parent}")
        if parent >= 0:
            children[parent].append(child)
    enter, leave, clock = [-1] * len(parents), [-1] * len(parents), 0
    stack = [(root, False) for root, parent in enumerate(parents) if parent < 0]
    while stack:
        node, done = stack.pop()
        if done:
            leave[node] = clock
            continue
        enter[node], clock = clock, clock + 1
        stack.append((node, True))
        stack += [(child, False) for child in children[node]]
    if -1 in enter:
        raise ValueError(f"parents must form a forest, but token {enter.index(-1)} is on or below a cycle")
    return tuple(torch.tensor(times, dtype=torch.int64, device="cpu") for times in (enter, leave))  # type: ignore[return-value]
