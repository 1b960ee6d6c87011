"""Local and strided attention on a line of tokens: windows, chunks, segments, sinks and a window, strides."""

from collections.abc import Iterable
from typing import Any

from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import dst, head, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["band", "chunked", "dilated", "duo_attention", "segment_recurrence", "sink_window"]
__all__ += ["sparse_fixed", "sparse_strided", "strides", "summary_tokens", "window"]


@builder()
def window(n: int, w: int, causal: bool = True) -> TokenGraph:
    """Each token attends to the last ``w`` tokens, itself included.

    ``dst - w < src <= dst``, in-degree ``min(dst + 1, w)``. ``causal=False``: ``|dst - src| < w``, up to
    ``2 w - 1`` senders. Others count differently: attention-gym's ``sliding_window(w)`` and flash-attention's
    ``(w, 0)`` attend to ``w + 1`` tokens; Hugging Face's ``sliding_window=w`` is this one. Child et al. 2019
    (arXiv 1904.10509); Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.

    >>> print(window(4, 2))
    window(4, 2): mask[dst, src] and in-edges
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 · ■ ■ ·   2 <- 1 2
    3 · · ■ ■   3 <- 2 3
    """
    return TokenGraph.from_rule(_band(w - 1, 0 if causal else w - 1), n)


@builder(dilation=1)
def dilated(n: int, w: int, dilation: int, causal: bool = True) -> TokenGraph:
    """Each token attends to ``w`` tokens at steps of ``dilation``, itself first.

    ``src = dst - dilation * k``, ``0 <= k < w``. In-degree ``min(dst // dilation + 1, w)``; ``causal=False``
    takes both signs of k. Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1, "Dilated Sliding
    Window".

    >>> dilated(5, 2, 2).in_degree().tolist()
    [1, 1, 2, 2, 2]
    """
    reach = w * dilation - 1
    return TokenGraph.from_rule(_band(reach, 0 if causal else reach, dilation), n)


@builder(dilation=1)
def band(n: int, left: int, right: int, dilation: int = 1) -> TokenGraph:
    """A window by distance: ``-right <= dst - src <= left``.

    With a ``dilation``, those whose distance is a multiple of it: ``(dst - src) % dilation = 0``. In-degree
    without it: ``min(dst, left) + 1 + min(n - 1 - dst, right)``. Others' windows, w as they count it:

    =================================================  ==========================================
    flash-attention ``window_size=(left, right)``      ``band(n, left, right)``
    attention-gym ``generate_sliding_window(w)``       ``band(n, w, 0)``
    attention-gym ``generate_dilated_sliding_window``  ``band(n, w, w, dilation)``
    Hugging Face ``sliding_window=w``                  ``band(n, w - 1, 0)``, our ``window(n, w)``
    Hugging Face, bidirectional                        ``band(n, w, w)``
    Longformer ``attention_window=w`` (even)           ``band(n, w // 2, w // 2)``
    Sparse Transformer's first set, stride l           ``band(n, l, 0)``, its code ``band(n, l - 1, 0)``
    =================================================  ==========================================

    >>> band(5, 2, 1).in_degree().tolist()
    [2, 3, 4, 4, 3]
    """
    return TokenGraph.from_rule(_band(left, right, dilation), n)


@builder(chunk=1)
def chunked(n: int, chunk: int, before: int = 0, after: int = 0, causal: bool = True) -> TokenGraph:
    """Each token attends to its chunk of ``chunk`` tokens, and to neighbouring chunks.

    ``-after <= c(dst) - c(src) <= before``. ``c(i) = i // chunk``, and ``src <= dst`` unless
    ``causal=False``; without it ``after`` adds nothing. Causal in-degree with ``after=0``:
    ``dst % chunk + 1 + min(dst // chunk, before) chunk``. ``chunked(n, chunk)`` is Llama 4's chunked
    attention (Hugging Face's ``chunked_overlay``); ``chunked(n, chunk, 1)`` is Reformer's local attention in
    a decoder (Kitaev et al. 2020, arXiv 2001.04451).

    >>> chunked(6, 2, before=1).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    gap = dst // chunk - src // chunk
    return TokenGraph.from_rule(rules.drop_future((gap <= before) & (gap >= -after), causal), n)


@builder(segment=1)
def segment_recurrence(n: int, segment: int, memory: int) -> TokenGraph:
    """Each token attends to its segment so far and the ``memory`` tokens before the segment.

    ``start(dst) - memory <= src <= dst``. ``start(i)`` is the first token of i's segment of ``segment``
    tokens; in-degree ``min(dst, dst % segment + memory) + 1``. Transformer-XL (Dai et al. 2019, arXiv
    1901.02860). Image Transformer's local attention in one dimension, query blocks of ``segment`` and
    ``memory`` further positions (Parmar et al. 2018, arXiv 1802.05751), is the same graph.

    >>> segment_recurrence(6, 2, 1).in_degree().tolist()
    [1, 2, 2, 3, 2, 3]
    """
    return TokenGraph.from_rule((src <= dst) & (src >= dst // segment * segment - memory), n)


@builder()
def sink_window(n: int, w: int, s: int = 4) -> TokenGraph:
    """Each token attends to the first ``s`` tokens and the last ``w``, itself included.

    ``src <= dst and (src < s or dst - src < w)``. In-degree ``min(dst + 1, s + w)``: the keys that a cache of
    fixed size still holds, and ``window(n, w) | sinks(n, s)``. StreamingLLM (Xiao et al. 2023, arXiv
    2309.17453, section 3.2; in its code ``start_size = s``, ``recent_size = w``) and the Λ-shaped mask of
    LM-Infinite (Han et al. 2023, arXiv 2308.16137; in its code ``global_branch = s``, ``local_branch = w``).

    >>> sink_window(6, 2, 1).in_degree().tolist()
    [1, 2, 3, 3, 3, 3]
    """
    return TokenGraph.from_rule((src <= dst) & ((src < s) | (dst - src < w)), n)


@builder(heads=1)
def duo_attention(n: int, heads: int, retrieval: Iterable[int], w: int, s: int = 4) -> TokenGraph:
    """A graph for each head: the ``retrieval`` heads are causal, the others ``sink_window(n, w, s)``.

    ``retrieval`` lists head numbers. DuoAttention (Xiao et al. 2024, arXiv 2410.10819) finds the retrieval
    heads by optimisation; with grouped queries it decides by group, so list all heads of a group. IndexError
    for a head outside ``0 .. heads - 1``.

    >>> duo_attention(9, 3, [1], 2, 1).in_degree().tolist()
    [[1, 2, 3, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 3, 3, 3, 3, 3, 3]]
    """
    chosen = _operands.positions("retrieval", retrieval, heads, "head numbers", any_order=True)
    attended = (src < s) | (dst - src < w) | look_up(_data.mark_positions(chosen, heads), head)
    return TokenGraph.from_rule((src <= dst) & attended, n, heads=heads)


@builder(stride=1)
def strides(n: int, stride: int, causal: bool = True) -> TokenGraph:
    """Each token attends to every ``stride``-th token before it, itself first.

    ``(dst - src) % stride = 0`` and ``src <= dst``. In-degree ``dst // stride + 1``; ``causal=False`` drops
    the second condition. The second set of strided attention in the Sparse Transformer (Child et al. 2019,
    arXiv 1904.10509); its first set is ``band(n, stride, 0)``.

    >>> strides(5, 2).in_degree().tolist()
    [1, 1, 2, 2, 3]
    """
    return TokenGraph.from_rule(rules.drop_future((dst - src) % stride == 0, causal), n)


@builder(stride=1, c=1)
def summary_tokens(n: int, stride: int, c: int, causal: bool = True) -> TokenGraph:
    """Each token attends to the last ``c`` tokens of every chunk of ``stride``.

    ``src % stride >= stride - c`` and ``src <= dst``. In-degree
    ``(dst // stride) c + max(0, dst % stride + 1 + c - stride)``; ``causal=False`` drops the second
    condition. The second set of fixed attention in the Sparse Transformer (Child et al. 2019, arXiv
    1904.10509), whose first set is ``chunked(n, stride)``. Alone it leaves the tokens before the first
    summary isolated: they receive exactly 0. Raises ValueError unless ``1 <= c <= stride``.

    >>> summary_tokens(5, 2, 1).in_degree().tolist()
    [0, 1, 1, 2, 2]
    """
    if c > stride:
        raise ValueError(f"c must be at most stride = {stride}, the length of a chunk, got {c}")
    return TokenGraph.from_rule(rules.drop_future((src % stride >= stride - c) & (dst >= 0), causal), n)


@builder(stride=1)
def sparse_strided(n: int, stride: int, causal: bool = True) -> TokenGraph:
    """Strided attention: the last ``stride`` tokens, and every ``stride``-th before them.

    ``|dst - src| <= stride or (dst - src) % stride = 0``, and ``src <= dst`` unless ``causal=False``. Causal
    in-degree ``min(dst + 1, stride) + dst // stride``; two layers reach everything. Heads that take the two
    sets in turn are ``algebra.per_head(band(n, stride, 0), strides(n, stride), ...)``. Child et al. 2019,
    Sparse Transformer (arXiv 1904.10509), two-dimensional factorised attention.

    >>> sparse_strided(6, 2).in_degree().tolist()
    [1, 2, 3, 3, 4, 4]
    """
    near = abs(dst - src) <= stride
    return TokenGraph.from_rule(rules.drop_future(near | ((dst - src) % stride == 0), causal), n)


@builder(stride=1, c=1)
def sparse_fixed(n: int, stride: int, c: int, causal: bool = True) -> TokenGraph:
    """Each token attends to its chunk of ``stride`` and the last ``c`` tokens of every chunk.

    ``src // stride = dst // stride or src % stride >= stride - c``, and ``src <= dst`` unless
    ``causal=False``. Causal in-degree ``dst % stride + 1 + (dst // stride) c``; two layers reach everything.
    Child et al. 2019, Sparse Transformer (arXiv 1904.10509), two-dimensional factorised attention. Raises
    ValueError unless ``1 <= c <= stride``.

    >>> sparse_fixed(6, 3, 1).in_degree().tolist()
    [1, 2, 3, 2, 3, 4]
    """
    return chunked(n, stride, causal=causal) | summary_tokens(n, stride, c, causal)


def _band(left: int, right: int, step: int = 1) -> Any:
    near = (dst - src <= left) & (src - dst <= right)
    return near if step == 1 else near & ((dst - src) % step == 0)
