"""Graphs that depend on data: largest logits, nearest points, hashes, clusters, vertical lines.

Data are tensors ``[n, ...]``, ``[heads, n, ...]`` or ``[batch, heads, n, ...]``; the graph differs
by head or sample if the data do. Nothing is learned here: a graph has no gradient, so learned data
such as the logits of an indexer or centroids must be trained elsewhere. Ties go to the earlier
position, and -inf is never chosen. The module ``blocks`` selects whole blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import any_of, compute, dst, look_up, src
from gnn_attention.patterns import _choice, _data
from gnn_attention.patterns._builder import builder

__all__ = ["clusters", "lsh", "nearest", "routing", "shared_bucket", "top_k", "vertical_slash"]


@builder()
def top_k(logits: Tensor, k: int, causal: bool = True) -> TokenGraph:
    """Each token attends to the ``k`` senders with the largest logits in its row.

    ``logits`` are ``[..., dst, src]``; the edges satisfy ``src <= dst`` unless ``causal=False``.
    The causal in-degree is ``min(dst + 1, k)`` if no logit is -inf. DeepSeek sparse attention
    (DeepSeek-V3.2) selects by the logits of its indexer, with one graph for all heads. Raises
    TypeError or ValueError for other data.

    >>> top_k(torch.tensor([[0.0, 9.0, 9.0], [1.0, 2.0, 9.0], [3.0, 1.0, 2.0]]), 2).edge_index.tolist()
    [[0, 0, 1, 0, 2], [0, 1, 1, 2, 2]]
    """
    values, sizes = _data.expand_axes("logits", logits, "dst src")
    num_dst, num_src = values.shape[-2:]
    if causal:
        future = torch.ones(num_dst, num_src, dtype=torch.bool, device="cpu").triu(1)
        values = values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(future, -torch.inf)
    senders = _choice.select_largest(values, k).sort(dim=-1).values
    return TokenGraph.from_indices(_data.drop_axes(senders, sizes), num_src)


@builder()
def nearest(points: Tensor, k: int, causal: bool = True, loops: bool = True) -> TokenGraph:
    """Each token attends to the ``k`` tokens nearest to it, itself included.

    The distance between ``points [..., n, dim]`` is Euclidean, in float64. The edges satisfy
    ``src <= dst`` unless ``causal=False``, which is the usual k-nearest-neighbour graph. The in-degree
    is ``min(k, dst + 1)``, or ``min(k, n)`` if not causal. ``loops=False`` selects k other tokens,
    as ``knn_graph(loop=False)`` in torch_geometric does. Distances are computed for a chunk of receivers
    at a time, so memory does not grow with ``n^2``. Raises TypeError or ValueError for other data.

    >>> nearest(torch.tensor([[0.0], [5.0], [1.0], [4.0]]), 2, causal=False).edge_index.tolist()
    [[0, 2, 1, 3, 0, 2, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    values, sizes = _data.expand_axes("points", points, "n dim")
    points, n = values.double(), values.shape[-2]

    def compute_closeness(rows: tuple[int, int]) -> Tensor:
        # The mode that uses a matrix product would lose small distances to cancellation.
        mode = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(points[..., slice(*rows), :], points, compute_mode=mode)
        dst, src = torch.arange(*rows, device="cpu").unsqueeze(-1), torch.arange(n, device="cpu")
        is_excluded = ((src > dst) & causal) | ((src == dst) & (not loops))
        return -distance.masked_fill(is_excluded, torch.inf)

    senders = _choice.select_largest_by_rows(compute_closeness, n, points[..., 0].numel(), k, stable=True)
    return TokenGraph.from_indices(_data.drop_axes(senders.sort(dim=-1).values, sizes), n)


@builder()
def shared_bucket(buckets: Tensor | Sequence[Any], causal: bool = True) -> TokenGraph:
    """Tokens that share a bucket in some round attend to each other.

    ``buckets`` are ``[..., rounds, n]``. The edges are ``src != dst`` with
    ``bucket(r, src) = bucket(r, dst)`` for some round r, and ``src <= dst`` unless
    ``causal=False``. Only a token without other in-edges has a self loop. Source: Reformer (Kitaev
    et al. 2020, arXiv 2001.04451, section 2, "Multi-round LSH attention" and "Causal masking for
    shared-QK attention"), whose queries and keys are the same vectors.

    >>> shared_bucket(torch.tensor([[0, 1, 0, 0], [5, 6, 7, 6]])).edge_index.tolist()
    [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 3, 3]]
    """
    labels, sizes = _data.expand_integers("buckets", buckets, "rounds n")
    is_first = _is_first_occurrence(labels)
    is_last = _is_first_occurrence(labels.flip(-1)).flip(-1)
    is_alone = _data.drop_axes((is_first if causal else is_first & is_last).all(dim=-2), sizes)
    is_shared = any_of(_data.has_same_label(_data.drop_axes(x, sizes)) for x in labels.unbind(2))
    rule = (is_shared & (dst != src)) | (look_up(is_alone, dst) & (dst == src))
    return TokenGraph.from_rule(rules.drop_future(rule, causal), labels.shape[-1], **sizes)


@builder(num_buckets=2, rounds=1)
def lsh(vectors: Tensor, num_buckets: int, rounds: int = 1, causal: bool = True, seed: int = 0) -> TokenGraph:
    """Tokens whose vectors point in similar directions attend to each other.

    The graph is :func:`shared_bucket` of the hashes of ``vectors [..., n, dim]``.
    The hash of a vector x is the index of the largest entry of ``[x R, -x R]``, where
    ``R [heads, dim, rounds, num_buckets / 2]`` has normal entries, drawn with ``seed``. Source: the
    angular hashing of Reformer (Kitaev et al. 2020, arXiv 2001.04451, section 2). Hugging Face's
    Reformer draws the same R if ``hash_seed=seed``. ``num_buckets`` must be even.

    >>> lsh(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [3.0, 0.0]]), 2).edge_index.t().tolist()
    [[0, 0], [0, 1], [2, 2], [0, 3], [1, 3]]
    """
    values, sizes = _data.expand_axes("vectors", vectors, "n dim")
    if num_buckets % 2:
        raise ValueError(f"num_buckets must be even, for the two ends of each direction, got {num_buckets}")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (values.shape[1], values.shape[-1], rounds, num_buckets // 2)
    directions = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    products = torch.einsum("bhnd,hdrk->bhrnk", values.float(), directions)
    buckets = _data.drop_axes(torch.cat([products, -products], dim=-1).argmax(dim=-1), sizes)
    return TokenGraph.from_rule(shared_bucket(buckets, causal).rule, values.shape[2], **sizes)


@builder()
def clusters(
    dst_labels: Tensor | Sequence[Any], src_labels: Tensor | Sequence[Any] | None = None, causal: bool = True
) -> TokenGraph:
    """Each token attends to the tokens of its cluster.

    The edges are ``label(src) = label(dst)``, and ``src <= dst`` unless ``causal=False``. Labels
    are ``[..., n]``. ``src_labels`` are the labels of the senders if keys are clustered apart
    from queries; by default they are ``dst_labels``. Each token is in exactly one cluster, as in
    k-means, and clusters may have any size. In :func:`routing` all clusters have the same size.

    >>> clusters(torch.tensor([3, 8, 3, 8])).edge_index.tolist()
    [[0, 1, 0, 2, 1, 3], [0, 1, 2, 2, 3, 3]]
    """
    labels, sizes = _data.expand_integers("dst_labels", dst_labels, "n")
    senders = labels if src_labels is None else _data.expand_integers("src_labels", src_labels, "n")[0]
    if labels.shape[:2] != senders.shape[:2]:
        raise ValueError(
            f"dst_labels and src_labels must agree in batch and heads, got {list(labels.shape)} and "
            f"{list(senders.shape)} as [batch, heads, n]"
        )
    rule = _data.has_same_label(_data.drop_axes(labels, sizes), _data.drop_axes(senders, sizes))
    return TokenGraph.from_rule(rules.drop_future(rule, causal), labels.shape[-1], senders.shape[-1], **sizes)


@builder()
def routing(q: Tensor, k: Tensor, centroids: Tensor, w: int, causal: bool = True) -> TokenGraph:
    """For each centroid, the ``w`` closest queries attend to the ``w`` closest keys.

    ``q, k`` are ``[..., n, dim]``, ``centroids`` are ``[clusters, dim]`` or ``[heads, clusters, dim]``.
    Closeness is the dot product. A token may be in several clusters, or in none and thus isolated. The
    edges satisfy ``src <= dst`` unless ``causal=False``. Source: Routing Transformer (Roy et al. 2020,
    arXiv 2003.05997), with ``w`` about ``n / clusters``, layer-normalised vectors, and ``q = k`` if causal.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    >>> routing(x, x, torch.eye(2), 2).edge_index.t().tolist()
    [[0, 0], [1, 1], [0, 2], [2, 2], [1, 3], [3, 3]]
    """
    queries, keys, sizes = _data.expand_queries_and_keys(q, k)
    centres, _ = _data.expand_axes("centroids", centroids, "clusters dim")
    dim = keys.shape[-1]
    if centres.shape[-1] != dim or len(centres) != 1 or centres.shape[1] not in (1, keys.shape[1]):
        raise ValueError(
            f"centroids must be [clusters, {dim}] or [heads, clusters, {dim}], got {list(centroids.shape)}"
        )
    dst_masks, src_masks = (_choice.is_largest(centres @ x.mT, w).unbind(2) for x in (queries, keys))
    rule = any_of(
        look_up(_data.drop_axes(dst_mask, sizes), dst) & look_up(_data.drop_axes(src_mask, sizes), src)
        for dst_mask, src_mask in zip(dst_masks, src_masks, strict=True)
    )
    return TokenGraph.from_rule(rules.drop_future(rule, causal), queries.shape[-2], keys.shape[-2], **sizes)


@builder()
def vertical_slash(n: int, columns: Sequence[Any], slashes: Sequence[Any]) -> TokenGraph:
    """Every token attends to chosen columns and to tokens at chosen distances.

    The edges are ``src <= dst and (src in columns or dst - src in slashes)``; distance 0 is the
    self loop. ``columns`` and ``slashes`` are lists of indices ``0 .. n - 1`` for all heads, or of
    one list for each head. Source: MInference (Jiang et al. 2024, arXiv 2407.02490), which
    estimates them for each head from the attention of the last 64 queries. Raises IndexError for
    other indices.

    >>> vertical_slash(5, [0], [0, 2]).in_degree().tolist()
    [1, 2, 2, 3, 3]
    """
    is_column = _indices_to_mask("columns", columns, n)
    is_slash = _indices_to_mask("slashes", slashes, n)
    heads = {len(mask) for mask in (is_column, is_slash) if mask.dim() == 2}
    if len(heads) > 1 or 0 in heads:
        raise ValueError(f"columns and slashes must have equally many heads, at least 1, got {sorted(heads)}")
    # A negative distance is looked up as 0; the causal condition drops such pairs.
    rule = look_up(is_column, src) | look_up(is_slash, compute(torch.clamp, dst - src, 0))
    return TokenGraph.from_rule((src <= dst) & rule, n, heads=max(heads, default=None))


def _is_first_occurrence(labels: Tensor) -> Tensor:
    """Return for each label whether it has no earlier copy in its row."""
    sorted_labels, order = labels.sort(dim=-1, stable=True)
    is_first = torch.ones_like(sorted_labels, dtype=torch.bool)
    is_first[..., 1:] = sorted_labels[..., 1:] != sorted_labels[..., :-1]
    return torch.zeros_like(is_first).scatter(-1, order, is_first)


def _indices_to_mask(name: str, indices: Sequence[Any], n: int) -> Tensor:
    """Return a mask that is True at ``positions``: ``[n]``, or ``[heads, n]`` for a list of lists."""
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    if not isinstance(indices, Sequence) or isinstance(indices, str):
        raise TypeError(f"{name} must be a list of positions, or a list of lists, got {quote(indices)}")
    if indices and all(isinstance(row, (Sequence, Tensor)) for row in indices):
        return torch.stack([_indices_to_mask(name, row, n) for row in indices])
    return _data.index_to_mask(_operands.check_positions(name, indices, n), n)
