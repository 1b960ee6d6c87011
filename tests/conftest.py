"""What holds for all tests."""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # processes beside each other share the processors: one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session):
    """What was collected lives to the end: the garbage collector spent a sixth of the time on looking at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    """What is still there at the end is cleared away as ever."""
    gc.unfreeze()
