"""Functions that choose the largest scores of each receiver; a score of -inf is never chosen."""

from collections.abc import Callable, Iterator

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor

# A chunk has at most this many scores (4 MiB in float32), unless one receiver has more.
SCORES_PER_CHUNK = 2**20


def split_rows(num_dst: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of chunks of receivers. Scoring one receiver needs ``row_size`` numbers."""
    rows_per_chunk = max(1, SCORES_PER_CHUNK // max(1, row_size))
    for start in range(0, max(1, num_dst), rows_per_chunk):
        yield start, min(start + rows_per_chunk, num_dst)


def select_largest_by_rows(
    compute_scores: Callable[[tuple[int, int]], Tensor],
    num_dst: int,
    row_size: int,
    k: int,
    stable: bool = False,
) -> Int[Tensor, "batch heads dst k"]:
    """Apply :func:`select_largest` by chunks; ``compute_scores((start, stop))`` scores one chunk."""
    chunks = split_rows(num_dst, row_size)
    return torch.cat([select_largest(compute_scores(rows), k, stable) for rows in chunks], dim=2).int()


def select_largest(scores: Tensor, k: int, stable: bool = True) -> Int[Tensor, "... k"]:
    """Return the indices of the ``k`` largest scores of each row, with -1 for a score of -inf.

    Ties go to the earlier index; ``stable=False`` breaks them arbitrarily, which is faster.
    """
    k = min(k, scores.shape[-1])
    if stable:
        values, indices = (x[..., :k] for x in scores.sort(dim=-1, descending=True, stable=True))
    else:
        values, indices = scores.topk(k, dim=-1)
    return torch.where(values > -torch.inf, indices, -1)


def is_largest(scores: Tensor, k: int) -> Bool[Tensor, "..."]:
    """Return for each score whether :func:`select_largest` chooses it."""
    indices = select_largest(scores, k).clamp(min=0)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True) & (scores > -torch.inf)
