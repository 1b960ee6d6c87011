"""Graphs that depend on the data.

Largest logits, nearest points, hashing, clusters, chosen columns and diagonals. The data come as tensors
``[n, ...]``, ``[heads, n, ...]`` or ``[batch, heads, n, ...]``; the graph then differs by head or sample as
they do. Nothing is learnt here: a graph holds no gradient, and what a model trains (an indexer, centroids)
goes in as its numbers. Among equal numbers the earlier position wins; what is -inf is never chosen.
``blocks`` selects whole blocks.
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
    """Each token attends to the ``k`` senders of its largest logits.

    ``src <= dst`` unless ``causal=False``. ``logits [..., dst, src]``; in-degree ``min(dst + 1, k)`` where
    none is -inf. DeepSeek sparse attention (DeepSeek-V3.2) takes the causally masked logits of its indexer,
    one graph for all heads. TypeError or ValueError for other data.

    >>> top_k(torch.tensor([[0.0, 9.0, 9.0], [1.0, 2.0, 9.0], [3.0, 1.0, 2.0]]), 2).edge_index.tolist()
    [[0, 0, 1, 0, 2], [0, 1, 1, 2, 2]]
    """
    values, sizes = _data.all_axes("logits", logits, "dst src")
    num_dst, num_src = values.shape[-2:]
    if causal:
        future = torch.ones(num_dst, num_src, dtype=torch.bool, device="cpu").triu(1)
        values = values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(future, -torch.inf)
    senders = _choice.largest(values, k).sort(dim=-1).values
    return TokenGraph.from_indices(_data.own_axes(senders, sizes), num_src)


@builder()
def nearest(points: Tensor, k: int, causal: bool = True, loops: bool = True) -> TokenGraph:
    """Each token attends to the ``k`` tokens nearest to it, itself included.

    ``src <= dst`` unless ``causal=False``. ``points [..., n, dim]``, Euclidean distance in float64; in-degree
    ``min(k, dst + 1)``, or ``min(k, n)``. ``loops=False`` looks for k others instead, as torch_geometric's
    ``knn_graph(loop=False)`` does. Graphs of nearest neighbours are ``causal=False`` in general. Distances
    are taken some rows at a time. TypeError or ValueError for other data.

    >>> nearest(torch.tensor([[0.0], [5.0], [1.0], [4.0]]), 2, causal=False).edge_index.tolist()
    [[0, 2, 1, 3, 0, 2, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    values, sizes = _data.all_axes("points", points, "n dim")
    points, n = values.double(), values.shape[-2]

    def closeness(rows: tuple[int, int]) -> Tensor:
        mode = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(points[..., slice(*rows), :], points, compute_mode=mode)
        dst, src = torch.arange(*rows, device="cpu").unsqueeze(-1), torch.arange(n, device="cpu")
        hidden = ((src > dst) & causal) | ((src == dst) & (not loops))
        return -distance.masked_fill(hidden, torch.inf)

    senders = _choice.top_rows(closeness, n, points[..., 0].numel(), k, first_of_equals=True)
    return TokenGraph.from_indices(_data.own_axes(senders.sort(dim=-1).values, sizes), n)


@builder()
def shared_bucket(buckets: Tensor | Sequence[Any], causal: bool = True) -> TokenGraph:
    """Tokens that share a bucket in some round attend to each other.

    Each token attends to itself only if it would have no in-edges. ``buckets [..., rounds, n]``:
    ``bucket(r, src) = bucket(r, dst)`` for some round r, ``src != dst``, and ``src <= dst`` unless
    ``causal=False``; else the self loop alone. Reformer (Kitaev et al. 2020, arXiv 2001.04451, section 2,
    "Multi-round LSH attention" and "Causal masking for shared-QK attention"), where queries and keys are the
    same vectors.

    >>> shared_bucket(torch.tensor([[0, 1, 0, 0], [5, 6, 7, 6]])).edge_index.tolist()
    [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 3, 3]]
    """
    labels, sizes = _data.whole_numbers("buckets", buckets, "rounds n")
    first, last = _first_of_each(labels), _first_of_each(labels.flip(-1)).flip(-1)
    alone = _data.own_axes((first if causal else first & last).all(dim=-2), sizes)
    shared = any_of(_data.same(_data.own_axes(labels[:, :, r], sizes)) for r in range(labels.shape[2]))
    rule = (shared & (dst != src)) | (look_up(alone, dst) & (dst == src))
    return TokenGraph.from_rule(rules.drop_future(rule, causal), labels.shape[-1], **sizes)


@builder(num_buckets=2, rounds=1)
def lsh(vectors: Tensor, num_buckets: int, rounds: int = 1, causal: bool = True, seed: int = 0) -> TokenGraph:
    """Tokens whose vectors point in similar directions attend to each other.

    :func:`shared_bucket` of their hashes. ``vectors [..., n, dim]``; the bucket of a vector x is the largest
    entry of ``[x R, -x R]``. ``R [heads, dim, rounds, num_buckets / 2]`` is normal and drawn from ``seed``:
    the angular hashing of Reformer (Kitaev et al. 2020, arXiv 2001.04451, section 2); Hugging Face's draws
    the same numbers for ``hash_seed``. ``num_buckets`` is even.

    >>> lsh(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [3.0, 0.0]]), 2).edge_index.t().tolist()
    [[0, 0], [0, 1], [2, 2], [0, 3], [1, 3]]
    """
    values, sizes = _data.all_axes("vectors", vectors, "n dim")
    if num_buckets % 2:
        raise ValueError(f"num_buckets must be even, for the two ends of each direction, got {num_buckets}")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (values.shape[1], values.shape[-1], rounds, num_buckets // 2)
    directions = torch.randn(shape, generator=generator, device="cpu")
    turned = torch.einsum("bhnd,hdrk->bhrnk", values.float(), directions)
    buckets = _data.own_axes(torch.cat([turned, -turned], dim=-1).argmax(dim=-1), sizes)
    return TokenGraph.from_rule(shared_bucket(buckets, causal).rule, values.shape[2], **sizes)


@builder()
def clusters(
    dst_labels: Tensor | Sequence[Any], src_labels: Tensor | Sequence[Any] | None = None, causal: bool = True
) -> TokenGraph:
    """Each token attends to the tokens of its cluster.

    ``label(src) = label(dst)``, and ``src <= dst`` unless ``causal=False``. Labels ``[..., n]``;
    ``src_labels`` where senders are clustered on their own (queries and keys), else the same. Each token in
    exactly one cluster, of any size: the nearest centroid of k-means. :func:`routing` is the balanced form.

    >>> clusters(torch.tensor([3, 8, 3, 8])).edge_index.tolist()
    [[0, 1, 0, 2, 1, 3], [0, 1, 2, 2, 3, 3]]
    """
    ours, sizes = _data.whole_numbers("dst_labels", dst_labels, "n")
    theirs, _ = (ours, sizes) if src_labels is None else _data.whole_numbers("src_labels", src_labels, "n")
    if ours.shape[:2] != theirs.shape[:2]:
        shapes = f"{list(ours.shape)} and {list(theirs.shape)}"
        raise ValueError(f"both labels must have the same heads and batch, got {shapes}")
    rule = rules.drop_future(_data.same(_data.own_axes(ours, sizes), _data.own_axes(theirs, sizes)), causal)
    return TokenGraph.from_rule(rule, ours.shape[-1], theirs.shape[-1], **sizes)


@builder()
def routing(q: Tensor, k: Tensor, centroids: Tensor, w: int, causal: bool = True) -> TokenGraph:
    """Each centroid's ``w`` closest queries attend to its ``w`` closest keys.

    ``q, k [..., n, dim]``, ``centroids [clusters, dim]`` or ``[heads, clusters, dim]``, closeness the dot
    product: a token may stand in several clusters or have no in-edges; ``src <= dst`` unless
    ``causal=False``. Routing Transformer (Roy et al. 2020, arXiv 2003.05997): w about ``n / clusters``,
    layer-normalised vectors, and ``q = k`` where causal.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    >>> routing(x, x, torch.eye(2), 2).edge_index.t().tolist()
    [[0, 0], [1, 1], [0, 2], [2, 2], [1, 3], [3, 3]]
    """
    queries, keys, sizes = _data.queries_and_keys(q, k)
    centres, _ = _data.all_axes("centroids", centroids, "clusters dim")
    samples, heads, _, dim = centres.shape
    if dim != keys.shape[-1] or samples != 1 or heads not in (1, keys.shape[1]):
        wanted = f"[clusters, {keys.shape[-1]}], or that for each head of q"
        raise ValueError(f"centroids must be {wanted}, got {list(centroids.shape)}")
    members = [_choice.are_largest(centres @ x.mT, w) for x in (queries, keys)]
    of_dst, of_src = ([_data.own_axes(table, sizes) for table in side.unbind(2)] for side in members)
    pairs = zip(of_dst, of_src, strict=True)
    together = any_of(look_up(attending, dst) & look_up(attended, src) for attending, attended in pairs)
    rule = rules.drop_future(together, causal)
    return TokenGraph.from_rule(rule, queries.shape[-2], keys.shape[-2], **sizes)


@builder()
def vertical_slash(n: int, columns: Sequence[Any], slashes: Sequence[Any]) -> TokenGraph:
    """Chosen columns that every token attends to, and chosen distances.

    ``src <= dst and (src in columns or dst - src in slashes)``. Each is a list of positions ``0 .. n - 1``
    for all heads, or a list of such lists, one for each head; distance 0 is the self loop. MInference (Jiang
    et al. 2024, arXiv 2407.02490), which finds them for each head from the attention of the last 64 queries.
    IndexError for a position outside.

    >>> vertical_slash(5, [0], [0, 2]).in_degree().tolist()
    [1, 2, 2, 3, 3]
    """
    chosen = [_positions("columns", columns, n), _positions("slashes", slashes, n)]
    heads = {len(table) for table in chosen if table.dim() == 2}
    if len(heads) > 1 or 0 in heads:
        wanted = "given for the same number of heads, at least 1"
        raise ValueError(f"columns and slashes must be {wanted}, got {sorted(heads)}")
    on_lines = look_up(chosen[0], src) | look_up(chosen[1], compute(torch.clamp, dst - src, 0))
    return TokenGraph.from_rule((src <= dst) & on_lines, n, heads=max(heads, default=None))


def _first_of_each(labels: Tensor) -> Tensor:
    ordered, place = labels.sort(dim=-1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.zeros_like(new).scatter(-1, place, new)


def _positions(name: str, positions: Sequence[Any], n: int) -> Tensor:
    """Bool ``[n]``, or ``[heads, n]`` for a list of lists: True at the given positions."""
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    if not isinstance(positions, Sequence) or isinstance(positions, str):
        raise TypeError(f"{name} must be a list of positions, or one for each head, got {quote(positions)}")
    if positions and all(isinstance(row, (Sequence, Tensor)) for row in positions):
        return torch.stack([_positions(name, row, n) for row in positions])
    return _data.mark_positions(_operands.positions(name, positions, n), n)
