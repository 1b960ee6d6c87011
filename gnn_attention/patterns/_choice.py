"""The largest scores of each receiver, chosen for builders and for selectors; never one that is -inf."""

from collections.abc import Callable, Iterator

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor

# 4 MiB of float32
SCORES_AT_ONCE = 2**20


def row_blocks(num_dst: int, width: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of successive receivers, one of which takes ``width`` numbers; one block at least."""
    step = max(1, SCORES_AT_ONCE // max(1, width))
    yield from ((start, min(start + step, num_dst)) for start in range(0, max(1, num_dst), step))


def top_rows(
    scores_of: Callable[[tuple[int, int]], Tensor],
    num_dst: int,
    width: int,
    count: int,
    first_of_equals: bool = False,
) -> Int[Tensor, "batch heads dst most"]:
    """The :func:`largest` of ``scores_of(rows) [batch, heads, rows, pairs]``, some receivers at a time.

    ``width`` is how many numbers those of one receiver take.
    """
    parts = [largest(scores_of(rows), count, first_of_equals) for rows in row_blocks(num_dst, width)]
    return torch.cat(parts, dim=2).int()


def largest(scores: Tensor, count: int, first_of_equals: bool = True) -> Int[Tensor, "... most"]:
    """The places of the ``count`` largest of each row, -1 for one that is -inf.

    Among equal numbers the first ones are chosen, or any, which takes less time.
    """
    count = min(count, scores.shape[-1])
    if first_of_equals:
        values, places = (x[..., :count] for x in scores.sort(dim=-1, descending=True, stable=True))
    else:
        values, places = scores.topk(count, dim=-1)
    return torch.where(values > -torch.inf, places, -1)


def are_largest(scores: Tensor, count: int) -> Bool[Tensor, "..."]:
    """Whether each number is one of the :func:`largest` of its row."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(-1, largest(scores, count).clamp(min=0), True) & (scores > -torch.inf)
