"""What holds for all tests."""

import gc


def pytest_collection_finish(session):
    """What was collected lives to the end: without the collector's looking at it, again and again, tests take a sixth less."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    """What is still there at the end is cleared away as ever."""
    gc.unfreeze()
