"""The kernels in Triton's interpreter: the folder ``interpreted``, in a process of its own (a kernel is made
for one mode).
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


def interpreted(folder, record, *options, seconds=900):
    """``{test: "passed" | "skipped"}`` of a folder under the interpreter; AssertionError with what it said if
    anything failed.

    A process that dies, or finds no test, is a failure too.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
    ]
    command += ["-p", "no:cacheprovider", f"--junit-xml={record}", str(folder), *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | ours,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    said = f"pytest {folder} ended with {done.returncode}:\n" + (done.stdout + done.stderr)[-8000:]
    assert done.returncode == 0, said
    assert record.exists(), said
    found = outcomes(record)
    assert found, said
    return found


def outcomes(record):
    """Of a JUnit file: ``{"file::test": "passed" | "skipped"}``."""
    cases = ElementTree.parse(record).getroot().iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": "passed"
        if case.find("skipped") is None
        else "skipped"
        for case in cases
    }


def files_that_passed(found):
    """The test files of which something passed."""
    return {name.split("::")[0].rsplit(".", 1)[-1] for name, outcome in found.items() if outcome == "passed"}


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    """A quick selection of every file; none is skipped as a whole."""
    needs("triton")
    found = interpreted(FOLDER, tmp_path / "record.xml")
    assert files_that_passed(found) == {file.stem for file in FOLDER.glob("test_*.py")}


@pytest.mark.nightly
def test_kernels_interpreted_at_length(tmp_path):
    """The longer sweeps of those files."""
    needs("triton")
    assert interpreted(FOLDER, tmp_path / "record.xml", "-m", "slow", seconds=3600)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param("import os\ndef test_it():\n    os._exit(0)\n", "ended with 0", marks=pytest.mark.slow),
        pytest.param("x = 1\n", "ended with 5", marks=pytest.mark.slow),
        pytest.param(
            "import os\ndef test_it():\n    assert os.environ['TRITON_INTERPRET'] == '2'\n",
            "assert '1' == '2'",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a death", "no test", "a failure"],
)
def test_the_harness_fails_with_what_was_said(tmp_path, body, said):
    """No failure, death or empty run of the other process passes for success."""
    (tmp_path / "test_one.py").write_text(body, encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        interpreted(tmp_path, tmp_path / "record.xml")
