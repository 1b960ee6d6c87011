"""Functions that choose the largest scores of each receiver; a score of -inf is never chosen."""

from collections.abc import Callable, Iterator

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor

# A chunk has at most this many scores (4 MiB in float32), unless one receiver has more.
SCORES_PER_CHUNK = 2**20


def split_rows(num_dst: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of chunks of receivers. Scoring one receiver needs ``width`` numbers."""
    step = max(1, SCORES_PER_CHUNK // max(1, width))
    for start in range(0, max(1, num_dst), step):
        yield start, min(start + step, num_dst)


def select_largest_by_rows(
    compute_scores: Callable[[tuple[int, int]], Tensor],
    num_dst: int,
    width: int,
    count: int,
    stable: bool = False,
) -> Int[Tensor, "batch heads dst k"]:
    """Apply :func:`select_largest` by chunks; ``compute_scores((start, stop))`` scores one chunk."""
    chunks = split_rows(num_dst, width)
    return torch.cat([select_largest(compute_scores(rows), count, stable) for rows in chunks], dim=2).int()


def select_largest(scores: Tensor, count: int, stable: bool = True) -> Int[Tensor, "... k"]:
    """Return the indices of the ``count`` largest scores of each row, with -1 for a score of -inf.

    Ties go to the earlier index; ``stable=False`` breaks them arbitrarily, which is faster.
    """
    count = min(count, scores.shape[-1])
    if stable:
        values, indices = (x[..., :count] for x in scores.sort(dim=-1, descending=True, stable=True))
    else:
        values, indices = scores.topk(count, dim=-1)
    return torch.where(values > -torch.inf, indices, -1)


def is_largest(scores: Tensor, count: int) -> Bool[Tensor, "..."]:
    """Return for each score whether :func:`select_largest` chooses it."""
    indices = select_largest(scores, count).clamp(min=0)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True) & (scores > -torch.inf)
