"""The command ``python -m benchmarks``, and the processes of measurements."""

import mmap
import os

import pytest

from benchmarks import process
from benchmarks.__main__ import main
from tests.guarantees.gpu_record import RECORDS

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured


class TestCommand:
    @pytest.mark.parametrize("suite", [[], ["attention"], ["training"]])
    def test_a_missing_folder_is_said_before_anything_is_measured(self, suite, capsys, tmp_path):
        assert main([*suite, "--json", str(tmp_path / "missing" / "record.json")]) == 2
        assert "expected a folder that exists" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["training", "--quick"], "--quick belongs to attention, not to training"),
            (["attention", "--tokens", "5"], "--tokens belongs to training, not to attention"),
            (["training", "--steps", "0"], "steps must be at least 1, got 0"),
            (["training", "--tokens", "3"], "length must be at least 8, got 3"),
            (["--workloads", "b,z"], "there is no workload 'z'; give letters (a, b, "),
            (["--memory", "0"], "--memory must be above 0 GiB, got 0.0"),
            (["--plots", "no/such/folder"], "--plots no/such/folder: expected a folder that exists"),
            (["table"], "table needs the file of a record"),
            (["table", "no.json"], "no.json holds no record of the benchmarks"),
        ],
    )
    def test_wrong_options(self, arguments, message, capsys):
        assert main([*arguments]) == 2
        assert message in capsys.readouterr().err


class TestRecords:
    @pytest.mark.parametrize("path", sorted(RECORDS.glob("*-bench-[!g]*.json")), ids=lambda path: path.stem)
    def test_old_records_are_shown(self, path, capsys):
        assert main(["table", str(path)]) == 0
        assert "threads" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestProcesses:
    @pytest.mark.parametrize(
        ("signal", "said"), [(9, "killed by SIGKILL, most likely out of memory"), (15, "killed by SIGTERM")]
    )
    def test_a_fork_that_is_killed_says_by_what(self, signal, said):
        with pytest.raises(RuntimeError, match=f"^{said}$"):
            process.in_a_fork(lambda: os.kill(os.getpid(), signal))

    def test_a_process_that_fails_says_its_last_line(self):
        with pytest.raises(
            RuntimeError,
            match=r"^loads\({'s': 'no JSON'}\) failed: json.decoder.JSONDecodeError: Expecting value",
        ):
            process.in_a_process("json", "loads", {"s": "no JSON"})

    def test_a_process_returns_what_was_worked_out(self):
        """With its own variables."""
        assert process.in_a_process("json", "loads", {"s": "[2.5, 3]"}) == [2.5, 3]
        assert process.in_a_process("os", "getenv", {"key": "A_VARIABLE"}, {"A_VARIABLE": "seen"}) == "seen"

    def test_the_peak_is_the_peak(self):
        """100 MB that are written and freed (mapped: freed memory of the C library is resident already)."""
        before = process.forget_peak()
        with mmap.mmap(-1, 100 * 2**20) as block:
            for _ in range(100):
                block.write(b"x" * 2**20)
        assert 95 < process.peak() - before < 130
        assert process.forget_peak() - before < 30
        assert process.peak() - before < 30
