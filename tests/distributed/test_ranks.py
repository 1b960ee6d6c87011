"""support/ranks.py: results by rank; a failure, a death or a missed deadline of one rank is an error."""

import os
import time

import pytest
import torch
from support import ranks
from torch import distributed


def total(rank, world_size, x):
    y = x + rank
    distributed.all_reduce(y)
    return rank, y


def fails(rank, world_size, how):
    """Rank 1 fails, the others wait for it."""
    if rank == 1 and how == "raises":
        raise ValueError("rank one raised")
    if rank == 1 and how == "dies":
        os._exit(3)
    time.sleep(100)


def test_results_come_by_rank():
    """1 + 2 + 3 for the three ranks' x + rank."""
    assert ranks.run(3, total, torch.tensor(1.0)) == [(rank, torch.tensor(6.0)) for rank in range(3)]


@pytest.mark.parametrize(
    ("how", "deadline", "message"),
    [
        ("raises", 60, r"rank 1:[\s\S]*rank one raised"),
        ("dies", 60, "exit code 3"),
        ("sleeps", 1, r"not done after 1 seconds[\s\S]*rank 0"),
    ],
)
def test_a_failure_ends_all(how, deadline, message):
    start = time.monotonic()
    with pytest.raises(ranks.RanksError, match=message):
        ranks.run(2, fails, how, deadline=deadline)
    assert time.monotonic() - start < 30
