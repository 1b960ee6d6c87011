"""Local and strided attention on a line of tokens: windows, chunks, segments, strides, sinks."""

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

    The edges are ``dst - w < src <= dst`` and the in-degree is ``min(dst + 1, w)``; ``causal=False`` means
    ``|dst - src| < w`` and up to ``2 w - 1`` senders. Hugging Face's ``sliding_window=w`` is this graph,
    but attention-gym's ``sliding_window(w)`` and flash-attention's ``(w, 0)`` attend to ``w + 1`` tokens.
    Sources: Child et al. 2019 (arXiv 1904.10509); Beltagy et al. 2020 (arXiv 2004.05150, section 3.1).

    >>> print(window(4, 2))
    window(4, 2): mask[dst, src] and in-edges
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 · ■ ■ ·   2 <- 1 2
    3 · · ■ ■   3 <- 2 3
    """
    return TokenGraph.from_rule(_is_in_band(w - 1, 0 if causal else w - 1), n)


@builder(dilation=1)
def dilated(n: int, w: int, dilation: int, causal: bool = True) -> TokenGraph:
    """Each token attends to ``w`` tokens that are ``dilation`` apart, the last of which is itself.

    The edges are ``src = dst - dilation * k`` for ``0 <= k < w``, and the in-degree is
    ``min(dst // dilation + 1, w)``; ``causal=False`` allows ``|k| < w``. Source: Beltagy et al.
    2020, Longformer (arXiv 2004.05150), section 3.1, "Dilated Sliding Window".

    >>> dilated(5, 2, 2).in_degree().tolist()
    [1, 1, 2, 2, 2]
    """
    reach = w * dilation - 1
    return TokenGraph.from_rule(_is_in_band(reach, 0 if causal else reach, dilation), n)


@builder(dilation=1)
def band(n: int, left: int, right: int, dilation: int = 1) -> TokenGraph:
    """Each token attends to the ``left`` tokens before it, itself, and the ``right`` tokens after it.

    The edges are ``-right <= dst - src <= left``. With ``dilation`` only multiples of it
    are distances: ``(dst - src) % dilation = 0``. With ``dilation=1`` the in-degree is
    ``min(dst, left) + 1 + min(n - 1 - dst, right)``. The windows of other libraries are:

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
    return TokenGraph.from_rule(_is_in_band(left, right, dilation), n)


@builder(chunk=1)
def chunked(n: int, chunk: int, before: int = 0, after: int = 0, causal: bool = True) -> TokenGraph:
    """Each token attends to its chunk, to ``before`` chunks before it and to ``after`` chunks after it.

    The edges are ``-after <= c(dst) - c(src) <= before`` with ``c(i) = i // chunk``, and
    ``src <= dst`` unless ``causal=False``; in a causal graph ``after`` has no effect. The causal
    in-degree is ``dst % chunk + 1 + min(dst // chunk, before) * chunk``. ``chunked(n, chunk)`` is
    the chunked attention of Llama 4 (``chunked_overlay`` in Hugging Face); ``chunked(n, chunk, 1)``
    is Reformer's local attention in a decoder (Kitaev et al. 2020, arXiv 2001.04451).

    >>> chunked(6, 2, before=1).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    gap = dst // chunk - src // chunk
    return TokenGraph.from_rule(rules.drop_future((gap <= before) & (gap >= -after), causal), n)


@builder(segment=1)
def segment_recurrence(n: int, segment: int, memory: int) -> TokenGraph:
    """Each token attends to its segment so far and the ``memory`` tokens before the segment.

    The edges are ``start(dst) - memory <= src <= dst``, where i's segment of ``segment`` tokens
    begins at ``start(i)``. The in-degree is ``min(dst, dst % segment + memory) + 1``. Source:
    Transformer-XL (Dai et al. 2019, arXiv 1901.02860). The one-dimensional local attention of Image
    Transformer (Parmar et al. 2018, arXiv 1802.05751) is the same graph: a query block has
    ``segment`` tokens and ``memory`` tokens before it.

    >>> segment_recurrence(6, 2, 1).in_degree().tolist()
    [1, 2, 2, 3, 2, 3]
    """
    return TokenGraph.from_rule((src <= dst) & (src >= dst // segment * segment - memory), n)


@builder()
def sink_window(n: int, w: int, s: int = 4) -> TokenGraph:
    """Each token attends to the first ``s`` tokens and the last ``w``, itself included.

    The edges are ``src <= dst and (src < s or dst - src < w)`` and the in-degree is ``min(dst + 1, s + w)``.
    The senders are the keys in a cache of ``s + w`` tokens. The graph is ``window(n, w) | sinks(n, s)``.
    Sources: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2), whose code has
    ``start_size = s`` and ``recent_size = w``, and the Λ-shaped mask of LM-Infinite (Han et al.
    2023, arXiv 2308.16137), whose code has ``global_branch = s`` and ``local_branch = w``.

    >>> sink_window(6, 2, 1).in_degree().tolist()
    [1, 2, 3, 3, 3, 3]
    """
    return TokenGraph.from_rule((src <= dst) & ((src < s) | (dst - src < w)), n)


@builder(heads=1)
def duo_attention(n: int, heads: int, retrieval: Iterable[int], w: int, s: int = 4) -> TokenGraph:
    """The ``retrieval`` heads have the graph ``causal(n)``, all other heads ``sink_window(n, w, s)``.

    ``retrieval`` lists the indices of the retrieval heads, which DuoAttention (Xiao et al. 2024, arXiv
    2410.10819) finds by optimisation. If heads share keys, DuoAttention decides for each group of
    heads, so list all heads of a group. Raises IndexError for a head outside ``0 .. heads - 1``.

    >>> duo_attention(9, 3, [1], 2, 1).in_degree().tolist()
    [[1, 2, 3, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 3, 3, 3, 3, 3, 3]]
    """
    indices = _operands.check_positions("retrieval", retrieval, heads, "head indices", any_order=True)
    is_retrieval = look_up(_data.index_to_mask(indices, heads), head)
    rule = (src <= dst) & ((src < s) | (dst - src < w) | is_retrieval)
    return TokenGraph.from_rule(rule, n, heads=heads)


@builder(stride=1)
def strides(n: int, stride: int, causal: bool = True) -> TokenGraph:
    """Each token attends to itself and to every ``stride``-th token before it.

    The edges are ``(dst - src) % stride = 0`` and ``src <= dst``, and the in-degree is ``dst // stride + 1``;
    ``causal=False`` drops the second condition. Source: the second set of strided attention in
    Sparse Transformer (Child et al. 2019, arXiv 1904.10509); the first is ``band(n, stride, 0)``.

    >>> strides(5, 2).in_degree().tolist()
    [1, 1, 2, 2, 3]
    """
    return TokenGraph.from_rule(rules.drop_future((dst - src) % stride == 0, causal), n)


@builder(stride=1, c=1)
def summary_tokens(n: int, stride: int, c: int, causal: bool = True) -> TokenGraph:
    """Each token attends to the last ``c`` tokens of every chunk of ``stride`` tokens.

    The edges are ``src % stride >= stride - c`` and ``src <= dst``; ``causal=False`` drops the second
    condition. The in-degree is ``(dst // stride) * c + max(0, dst % stride + 1 + c - stride)``.
    Tokens before the first summary are isolated and receive exactly 0. Source: the second set of
    fixed attention in the Sparse Transformer (Child et al. 2019, arXiv 1904.10509), whose first set
    is ``chunked(n, stride)``. Raises ValueError unless ``1 <= c <= stride``.

    >>> summary_tokens(5, 2, 1).in_degree().tolist()
    [0, 1, 1, 2, 2]
    """
    if c > stride:
        raise ValueError(f"c must be at most stride = {stride}, the length of a chunk, got {c}")
    return TokenGraph.from_rule(rules.drop_future((src % stride >= stride - c) & (dst >= 0), causal), n)


@builder(stride=1)
def sparse_strided(n: int, stride: int, causal: bool = True) -> TokenGraph:
    """Each token attends to itself, the ``stride`` tokens before it, and every ``stride``-th earlier token.

    The edges are ``|dst - src| <= stride or (dst - src) % stride = 0``, and ``src <= dst`` unless
    ``causal=False``. The causal in-degree is ``min(dst + 1, stride) + dst // stride``, and two layers reach
    every token. ``algebra.per_head(band(n, stride, 0), strides(n, stride))`` has one set in each
    head. Source: strided attention of the Sparse Transformer (Child et al. 2019, arXiv 1904.10509).

    >>> sparse_strided(6, 2).in_degree().tolist()
    [1, 2, 3, 3, 4, 4]
    """
    rule = (abs(dst - src) <= stride) | ((dst - src) % stride == 0)
    return TokenGraph.from_rule(rules.drop_future(rule, causal), n)


@builder(stride=1, c=1)
def sparse_fixed(n: int, stride: int, c: int, causal: bool = True) -> TokenGraph:
    """Each token attends to its chunk of ``stride`` tokens and to the last ``c`` tokens of every chunk.

    The edges are ``src // stride = dst // stride or src % stride >= stride - c``, and ``src <= dst``
    unless ``causal=False``. The causal in-degree is ``dst % stride + 1 + (dst // stride) * c``, and
    two layers reach every token. Source: fixed attention of the Sparse Transformer (Child et al.
    2019, arXiv 1904.10509). Raises ValueError unless ``1 <= c <= stride``.

    >>> sparse_fixed(6, 3, 1).in_degree().tolist()
    [1, 2, 3, 2, 3, 4]
    """
    return chunked(n, stride, causal=causal) | summary_tokens(n, stride, c, causal)


def _is_in_band(left: int, right: int, step: int = 1) -> Any:
    rule = (dst - src <= left) & (src - dst <= right)
    return rule if step == 1 else rule & ((dst - src) % step == 0)
