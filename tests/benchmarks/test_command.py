"""The command ``gnn-attention bench``, its suites, the suite of graphs, and the processes that measurements run in."""

import json
import mmap
import os
import time

import pytest

from benchmarks import graphs, process
from gnn_attention import bench
from gnn_attention.__main__ import main
from gnn_attention.verify.measure import EXACT

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

    def test_both_makers_of_a_block_mask_keep_the_same_tiles(self):
        ours, theirs = (graphs.measure_block_mask(who, 2048) for who in ("gnn_attention", "create_block_mask"))
        assert ours["tiles"] == theirs["tiles"] == sum(min(row + 1, 9) for row in range(16))

    @pytest.mark.nightly
    def test_a_million_tokens_stay_within_their_limits(self, tmp_path):
        """``gnn-attention bench graphs``: structured graphs below 500 MB (time is shown, not tested: machines differ)."""
        file = tmp_path / "record.json"
        assert main(["bench", "graphs", "--json", str(file)]) == 0
        record = json.loads(file.read_text(encoding="utf-8"))
        assert [row["case"] for row in record["results"]] == list(graphs.GRAPHS)
        structured = [row for row in record["results"] if not row["case"].startswith("listed")]
        assert max(row["memory_mb"] for row in structured) < 500
        ours, theirs = record["peers"][-2:]
        assert ours["tiles"] == theirs["tiles"]
        assert ours["memory_mb"] < theirs["memory_mb"] / 10

    def test_the_table_has_a_line_for_each(self, capsys, monkeypatch):
        monkeypatch.setattr(graphs, "_in_a_process", lambda function, **arguments: getattr(graphs, function)(**arguments))
        assert main(["bench", "graphs", "--tokens", "500", "--no-peers"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines[1:]] == list(graphs.GRAPHS)

    @pytest.mark.slow
    def test_each_case_in_a_process_of_its_own(self):
        """A million tokens stay below 500 MB there."""
        row = graphs._in_a_process("measure", case="causal", n=1_000_000)
        assert row["edges"] == 1_000_000 * 1_000_001 // 2
        assert row["memory_mb"] < 500


class TestCommand:
    @pytest.mark.parametrize("tokens", ["0", "-3"])
    def test_wrong_sizes(self, tokens, capsys):
        assert main(["bench", "graphs", "--tokens", tokens]) == 2
        assert "tokens must be at least 1" in capsys.readouterr().err

    @pytest.mark.parametrize("suite", [[], ["attention"], ["graphs"], ["training"]])
    def test_a_missing_folder_is_said_before_anything_is_measured(self, suite, capsys, tmp_path):
        assert main(["bench", *suite, "--json", str(tmp_path / "missing" / "record.json")]) == 2
        assert "expected a folder that exists" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["graphs", "--quick"], "--quick belongs to bench attention and gpu, not to bench graphs"),
            (["attention", "--tokens", "5"], "--tokens belongs to bench training and graphs, not to bench attention"),
            (["training", "--steps", "0"], "steps must be at least 1, got 0"),
            (["training", "--tokens", "3"], "length must be at least 8, got 3"),
            (["--workloads", "b,z"], "there is no workload 'z'; give letters (a, b, "),
            (["--memory", "0"], "--memory must be above 0 GiB, got 0.0"),
            (["--plots", "no/such/folder"], "--plots no/such/folder: expected a folder that exists"),
            (
                ["graphs", "--calibrate"],
                "with --calibrate the suite must be one of 'attention', 'gpu', 'calibrate', got 'graphs'",
            ),
        ],
    )
    def test_wrong_options(self, arguments, message, capsys):
        assert main(["bench", *arguments]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "suite"),
        [
            ([], "attention"),
            (["attention"], "attention"),
            (["graphs"], "graphs"),
            (["training"], "training"),
            (["--calibrate"], "calibrate"),
        ],
    )
    def test_every_suite_is_reached(self, arguments, suite, capsys, monkeypatch):
        made = bench.Suite(
            "", bench.SUITES[suite].options, lambda args, shown: {"suite": suite}, lambda record: f"text of {record}"
        )
        monkeypatch.setitem(bench.SUITES, suite, made)
        assert main(["bench", *arguments]) == 0
        assert capsys.readouterr().out == f"text of {{'suite': '{suite}'}}\n"
        assert main(["bench", *arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"suite": suite}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestProcesses:
    def test_a_fork_returns_what_was_worked_out(self):
        parent = os.getpid()
        assert process.in_a_fork(lambda: [os.getpid() != parent, 2.5]) == [True, 2.5]

    def test_a_fork_that_raises_says_what(self):
        with pytest.raises(RuntimeError, match=r"^ValueError: no such thing$"):
            process.in_a_fork(lambda: _raise("no such thing\nand more"))

    @pytest.mark.parametrize(("signal", "said"), [(9, "killed by SIGKILL, most likely out of memory"), (15, "killed by SIGTERM")])
    def test_a_fork_that_is_killed_says_by_what(self, signal, said):
        with pytest.raises(RuntimeError, match=f"^{said}$"):
            process.in_a_fork(lambda: os.kill(os.getpid(), signal))

    def test_a_fork_that_hangs_is_ended(self):
        with pytest.raises(RuntimeError, match="killed by SIGALRM"):
            process.in_a_fork(lambda: time.sleep(30), timeout=1)

    def test_a_process_that_fails_says_its_last_line(self):
        with pytest.raises(
            RuntimeError, match=r"^loads\({'s': 'no JSON'}\) failed: json.decoder.JSONDecodeError: Expecting value"
        ):
            process.in_a_process("json", "loads", {"s": "no JSON"})

    def test_a_process_returns_what_was_worked_out(self):
        """With its own variables."""
        assert process.in_a_process("json", "loads", {"s": "[2.5, 3]"}) == [2.5, 3]
        assert process.in_a_process("os", "getenv", {"key": "A_VARIABLE"}, {"A_VARIABLE": "seen"}) == "seen"

    def test_the_peak_is_the_peak(self):
        """100 MB that are written and freed count, and are forgotten when asked.

        They are mapped: what the C library has kept of freed memory is resident already and would not count.
        """
        before = process.forget_peak()
        with mmap.mmap(-1, 100 * 2**20) as block:
            for _ in range(100):
                block.write(b"x" * 2**20)
        assert 95 < process.peak() - before < 130
        assert process.forget_peak() - before < 30
        assert process.peak() - before < 30

    @pytest.mark.parametrize(("allocator", "value"), [("default", "0"), ("thp", "1")])
    def test_the_environment_of_a_child(self, allocator, value):
        """It starts with one thread: a fork of a process with workers would hang."""
        variables = process.environment(allocator)
        assert variables["THP_MEM_ALLOC_ENABLE"] == value
        assert (variables["OMP_PROC_BIND"], variables["OMP_PLACES"], variables["OMP_NUM_THREADS"]) == ("true", "cores", "1")

    def test_the_machine_is_described(self):
        said = process.record_of_the_machine()
        assert said["versions"]["torch"].startswith("2.")
        assert said["cores"] == os.cpu_count()
        assert json.dumps(said)


def _raise(message):
    raise ValueError(message)
