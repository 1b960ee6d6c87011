"""The command ``python -m benchmarks``, the suite of graphs, and the processes of measurements."""

import mmap
import os

import pytest

from benchmarks import graphs, process
from benchmarks.__main__ import main
from gnn_attention.verify.measure import EXACT
from tests.guarantees.gpu_record import RECORDS

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured


class TestGraphs:
    @pytest.mark.parametrize("case", graphs.GRAPHS)
    def test_a_case_counts_right(self, case):
        """The same numbers as visiting every pair."""
        row = graphs.measure(case, 600)
        mask = graphs.GRAPHS[case](600).mask()
        assert (row["case"], row["tokens"], row["edges"]) == (case, 600, int(mask.sum()))
        tiles = [mask[i : i + 128, j : j + 128] for i in range(0, 600, 128) for j in range(0, 600, 128)]
        assert row["full_tiles"] == sum(bool(tile.all()) for tile in tiles)
        assert row["partial_tiles"] == sum(bool(tile.any()) and not bool(tile.all()) for tile in tiles)
        assert row["total_s"] == pytest.approx(row["build_s"] + row["count_s"] + row["tile_s"], rel=EXACT)


class TestCommand:
    @pytest.mark.parametrize("suite", [[], ["attention"], ["graphs"], ["training"]])
    def test_a_missing_folder_is_said_before_anything_is_measured(self, suite, capsys, tmp_path):
        assert main([*suite, "--json", str(tmp_path / "missing" / "record.json")]) == 2
        assert "expected a folder that exists" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["graphs", "--quick"], "--quick belongs to attention, not to graphs"),
            (["attention", "--tokens", "5"], "--tokens belongs to training and graphs, not to attention"),
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
    @pytest.mark.parametrize("path", sorted(RECORDS.glob("*-bench-*.json")), ids=lambda path: path.stem)
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
