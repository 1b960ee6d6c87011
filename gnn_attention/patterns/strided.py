"""Strided and fixed patterns: the factorised sets of the Sparse Transformer, apart and united."""

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph, rules, text
from gnn_attention.patterns._symbols import dst, head, src

__all__ = ["sparse_fixed", "sparse_strided", "strides", "summary_tokens"]


def strides(n: int, stride: int, causal: bool = True) -> TokenGraph:
    """Each token attends to every ``stride``-th token before it, itself first.

    ``(dst - src) % stride = 0`` and ``src <= dst``. In-degree ``dst // stride + 1``; ``causal=False`` drops
    the second condition. The second set of strided attention in the Sparse Transformer (Child et al. 2019,
    arXiv 1904.10509); its first set is ``band(n, stride, 0)``.

    >>> strides(5, 2).in_degree().tolist()
    [1, 1, 2, 2, 3]
    """
    n, stride = checks.size("n", n), checks.size("stride", stride, 1)
    rule = rules.past((dst - src) % stride == 0, causal)
    return TokenGraph.from_rule(rule, n, name=text.call("strides", causal, n, stride))


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
    n = checks.size("n", n)
    stride, c = _stride_and_c(stride, c)
    rule = rules.past((src % stride >= stride - c) & (dst >= 0), causal)
    return TokenGraph.from_rule(rule, n, name=text.call("summary_tokens", causal, n, stride, c))


def sparse_strided(n: int, stride: int, heads: int | None = None, causal: bool = True) -> TokenGraph:
    """Strided attention: the last ``stride`` tokens, and every ``stride``-th before them.

    ``|dst - src| <= stride or (dst - src) % stride = 0``, and ``src <= dst`` unless ``causal=False``. Causal
    in-degree ``min(dst + 1, stride) + dst // stride``; two layers reach everything. With ``heads`` the sets
    are apart: even heads take the first, ``band(n, stride, 0)``, odd heads the second,
    ``strides(n, stride)``. The authors' code gives the first set one token less; the union is the same. Child
    et al. 2019, Sparse Transformer (arXiv 1904.10509), two-dimensional factorised attention.

    >>> sparse_strided(6, 2).in_degree().tolist()
    [1, 2, 3, 3, 4, 4]
    """
    n, stride = checks.size("n", n), checks.size("stride", stride, 1)
    near, every = abs(dst - src) <= stride, (dst - src) % stride == 0
    by_head = ((head % 2 == 0) & near) | ((head % 2 == 1) & every)
    rule = rules.past(near | every if heads is None else by_head, causal)
    name = text.call("sparse_strided", causal, n, stride, heads=(heads, None))
    return TokenGraph.from_rule(rule, n, heads=heads, name=name)


def sparse_fixed(n: int, stride: int, c: int, heads: int | None = None, causal: bool = True) -> TokenGraph:
    """Each token attends to its chunk of ``stride`` and the last ``c`` tokens of every chunk.

    ``src // stride = dst // stride or src % stride >= stride - c``, and ``src <= dst`` unless
    ``causal=False``. Causal in-degree ``dst % stride + 1 + (dst // stride) c``; two layers reach everything.
    With ``heads``, head h attends to its own chunk and the h-th ``c`` tokens from each chunk's end (again
    from the end after ``stride // c`` heads), as in the authors' code. Child et al. 2019, Sparse Transformer
    (arXiv 1904.10509), two-dimensional factorised attention. Raises ValueError unless ``1 <= c <= stride``.

    >>> sparse_fixed(6, 3, 1).in_degree().tolist()
    [1, 2, 3, 2, 3, 4]
    """
    n = checks.size("n", n)
    stride, c = _stride_and_c(stride, c)
    # counted from the end of a chunk, where head h begins
    first = 0 if heads is None else head % (stride // c) * c
    place = src % stride + first
    rule = (src // stride == dst // stride) | ((place >= stride - c) & (place < stride))
    name = text.call("sparse_fixed", causal, n, stride, c, heads=(heads, None))
    return TokenGraph.from_rule(rules.past(rule, causal), n, heads=heads, name=name)


def _stride_and_c(stride: int, c: int) -> tuple[int, int]:
    stride, c = checks.size("stride", stride, 1), checks.size("c", c, 1)
    if c > stride:
        raise ValueError(f"c must be at most stride = {stride}, the length of a chunk, got {c}")
    return stride, c
