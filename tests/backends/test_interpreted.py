"""The tests in the folder ``interpreted`` run kernels in Triton's interpreter, in a process of their own.

A kernel is made for one mode, so TRITON_INTERPRET must be set before Python starts.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.extras import needs

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "interpreted"


def run_test_files(record, *options, seconds=900):
    """Return the test files with a test that passed; raise AssertionError with the output if one failed."""
    needs("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"]
    command += ["-p", "no:cacheprovider", f"--junit-xml={record}", str(FOLDER), *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    settings = {"cwd": ROOT, "env": os.environ | env, "timeout": seconds, "errors": "replace"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"pytest ended with {result.returncode}:\n{output[-8000:]}"
    # A process that dies with code 0 leaves no record.
    cases = ElementTree.parse(record).getroot().iter("testcase")
    return {case.get("classname").rsplit(".", 1)[-1] for case in cases if case.find("skipped") is None}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], pytest.param(["-m", "slow"], marks=pytest.mark.nightly)], ids=str)
def test_kernels_interpreted(options, tmp_path):
    """Some test of every file runs and passes; the nightly parameter runs the longer sweeps."""
    file_names = run_test_files(tmp_path / "record.xml", *options, seconds=3600)
    assert file_names == {file.stem for file in FOLDER.glob("test_*.py")}
