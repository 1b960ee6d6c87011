"""A graph as packed documents, which variable-length kernels and one rectangle for each document compute."""

from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.kernel_formats import Varlen, to_varlen


def packing(graph: TokenGraph) -> Varlen | None:
    """The graph as packed documents with one window for all of them, or None; cached.

    >>> from gnn_attention import patterns
    >>> packing(patterns.documents([2, 3])).cu_seqlens.tolist()
    [0, 2, 5]
    """
    return memoized(_packing, graph)


def _packing(graph: TokenGraph) -> Varlen | None:
    square = graph.num_dst == graph.num_src > 0
    if graph.listed_edges is not None or not square or graph.has_empty_rows:
        return None
    try:
        return to_varlen(graph)
    except ValueError:
        return None
