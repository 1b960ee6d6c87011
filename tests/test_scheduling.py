"""How the tests themselves are spread over processes."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
def pytest_xdist_make_scheduler(config, log):
    from support.scheduling import ByFile
    return ByFile(config, log)
"""
DYING = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test(number):
    if number == 1:
        os._exit(3)
    assert number != 3
"""


@pytest.mark.slow
def test_a_test_that_ends_its_process_has_failed_and_the_others_of_its_file_are_run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(Path(__file__).parent)))
    (tmp_path / "test_dying.py").write_text(DYING)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "test_dying.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert found.stdout.count("FAILED test_dying.py::test[1]") == 1
    assert found.stdout.count("FAILED test_dying.py::test[3]") == 1
    assert "2 failed, 2 passed" in found.stdout
