"""support/ranks.py: results by rank, failures with their traceback, no waiting for ever."""

import os
import time

import pytest
import torch
from support import ranks
from torch import distributed


def summed(rank, world_size, x):
    """Every rank adds its number."""
    y = x + rank
    distributed.all_reduce(y)
    return rank, y


def fails_on_one(rank, world_size):
    """Rank 1 raises, the others wait for it."""
    if rank == 1:
        raise ValueError("rank one has had enough")
    distributed.barrier()


def sleeps(rank, world_size):
    """Nobody is ever done."""
    time.sleep(100)


def dies(rank, world_size):
    """Rank 0 is gone without a word."""
    if rank == 0:
        os._exit(3)


def test_results_come_by_rank():
    """1 + 2 + 3 for the three ranks' x + rank."""
    assert ranks.run(3, summed, torch.tensor(1.0)) == [(rank, torch.tensor(6.0)) for rank in range(3)]


def test_a_failure_is_told_with_its_traceback_and_soon():
    """The others, who wait, are not waited for."""
    start = time.monotonic()
    with pytest.raises(ranks.RanksError, match=r"rank 1:[\s\S]*rank one has had enough"):
        ranks.run(2, fails_on_one, deadline=60)
    assert time.monotonic() - start < 30


def test_the_deadline_holds():
    """And it says so."""
    with pytest.raises(ranks.RanksError, match=r"not done after 1 seconds[\s\S]*rank 0"):
        ranks.run(2, sleeps, deadline=1)


def test_a_silent_death_is_seen():
    """By its exit code."""
    with pytest.raises(ranks.RanksError, match="exit code 3"):
        ranks.run(2, dies)
