"""The run of a GPU, without one: its plan, archive, processes and workloads, and two rehearsals on a CPU."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.extras import needs

from benchmarks import gpu_run
from benchmarks.checked import Checked
from benchmarks.gpu import machine, methods, outcome, processes, running, table, targets
from benchmarks.gpu.measuring import Bench, Pace
from benchmarks.gpu.processes import FINISHED, GONE, Group, Lines
from benchmarks.gpu.workloads import ANEMOI, PASSES, WORKLOADS, bytes_of
from benchmarks.methods import AUTO, Method, Prepared
from gnn_attention import attend, convert
from gnn_attention.verify import Check
from gnn_attention.verify.measure import EXACT
from tests.guarantees import gpu_core

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
CEILINGS = machine.Ceilings(copy=1e12, products=1e12)
PACE = Pace(budget=0.0, fewest=1, most=1, warm=1)


def bench(name):
    """A workload, tiny, on the CPU."""
    return Bench(WORKLOADS[name].tiny(), machine.Watch(CPU), CEILINGS, PACE)


class TestPlan:
    @pytest.fixture
    def calls(self, capsys, monkeypatch):
        """Of each call: its seconds, and the parts as (second of the end, name, seconds)."""
        needed = pytest.fail  # no device is asked for, and no process is begun
        monkeypatch.setattr(torch.cuda, "is_available", lambda: needed("asks for a device"))
        monkeypatch.setattr(subprocess, "Popen", lambda *a, **b: needed("begins a process"))
        assert gpu_run.main(["--plan"]) == 0
        calls = capsys.readouterr().out.strip().split("\n\n")
        part = re.compile(r"^ +(\d+) s  (.+), (\d+) s$", re.MULTILINE)
        return [
            (int(re.search(r"(\d+) s", call)[1]), [(int(e), n, int(s)) for e, n, s in part.findall(call)])
            for call in calls
        ]

    def test_each_call_ends_40_s_before_its_time_is_up(self, calls):
        assert [seconds for seconds, parts in calls] == [470, 180, 180]
        for seconds, parts in calls:
            # ends are sums, each rounded
            assert parts[-1][0] == pytest.approx(sum(s for _, _, s in parts), abs=len(parts))
            assert parts[-1][0] <= seconds - 40

    def test_two_calls_do_everything_and_a_repair_leaves_the_core(self, calls):
        first, second, repair = ([name for _, name, _ in parts] for _, parts in calls)
        assert first[:2] == repair
        assert f"{len(gpu_core.core_checks('cuda')) - 1} checks in 16 processes" in repair[0]
        measured = [name.partition(":")[0] for name in first + second if name.partition(":")[0] in WORKLOADS]
        assert measured == list(WORKLOADS)
        assert measured[:4] == ["random1m", "narrow1m", "clusters", "mesh"]


class TestArchive:
    def test_what_is_packed_is_carried_on(self, tmp_path):
        first, second = tmp_path / "1", tmp_path / "2"
        first.mkdir()
        second.mkdir()
        (first / "core.a.jsonl").write_text("{}")
        (first / outcome.PLACE).write_text("{}")
        # what a death left half written
        (first / ".0123.part").write_text("half")
        outcome.pack(first, tmp_path / "1.tar.gz")
        outcome.unpack(tmp_path / "1.tar.gz", second)
        assert {file.name: file.read_text() for file in second.iterdir()} == {
            "core.a.jsonl": "{}",
            outcome.PLACE: "{}",
        }
        (first / outcome.PLACE).unlink()
        outcome.pack(first, tmp_path / "1.tar.gz")
        with pytest.raises(ValueError, match="holds nothing of an earlier call"):
            outcome.unpack(tmp_path / "1.tar.gz", second)

    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "no tar"])
    def test_of_a_damaged_one_nothing_is_taken(self, tmp_path, damage):
        archive, out = tmp_path / "all.tar.gz", tmp_path / "out"
        out.mkdir()
        (tmp_path / outcome.PLACE).write_bytes(os.urandom(5000))
        outcome.pack(tmp_path, archive)
        data = archive.read_bytes()
        texts = {"empty": b"", "cut": data[: len(data) // 2], "no tar": gzip.compress(b"text" * 999)}
        archive.write_bytes(texts.get(damage, b""))
        if damage == "missing":
            archive.unlink()
        with pytest.raises(ValueError, match=r"--earlier: .*all\.tar\.gz cannot be read"):
            outcome.unpack(archive, out)
        assert not list(out.iterdir())


NUMBERS = 12
OUT_OF_MEMORY = {"passed": False, "message": "AcceleratorError: CUDA error: out of memory"}
LOST = {"passed": False, "message": "RuntimeError: Triton Error [CUDA]: an illegal memory access"}


def check_outcome(kind, number):
    """What check ``number`` of a group of this kind does."""
    if kind == "dies" and number in (3, 4, 5, 6):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "is lost" and number in (1, 3, 5):
        return LOST
    return {"passed": True}


def made(kind, run=check_outcome):
    """The checks of a group: the even ones of one backend, the odd ones of another."""
    return [
        Check("made", ("even", "odd")[n % 2], "float32", str(n), lambda n=n: run(kind, n))
        for n in range(NUMBERS)
    ]


def group_of(tmp_path, kind):
    """Its process is this file."""
    file = tmp_path / f"{kind}.jsonl"
    return Group(
        kind, file, made(kind), lambda until: processes.python(__file__, kind, str(file), str(until))
    )


def messages(file):
    """The message of each check that failed, by its number."""
    results = Lines.read(file).results.values()
    return {int(result.name): result.message for result in results if not result.passed}


class TestProcesses:
    @pytest.fixture(autouse=True)
    def _as_root(self, monkeypatch):
        """Processes find this checkout."""
        folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))

    def test_three_deaths_leave_out_the_checks_of_a_backend(self, tmp_path):
        groups = [group_of(tmp_path, kind) for kind in ("dies", "is lost")]
        processes.run_groups(groups, 2, time.time() + 600, log=lambda text: None)
        died, lost = (messages(group.file) for group in groups)
        assert died == dict.fromkeys((3, 4, 5, 6), "its process ended with -9")
        assert len(Lines.read(groups[0].file).results) == NUMBERS
        # a device that is lost fails one check; the next process has another context
        assert lost == dict.fromkeys((1, 3, 5), LOST["message"])
        left_out = [check.name for check in groups[1].checks if Lines.read(groups[1].file).leaves_out(check)]
        assert left_out == ["1", "3", "5", "7", "9", "11"]
        assert {int(result.name) for result in Lines.read(groups[1].file).results.values()} == {
            *range(0, NUMBERS, 2),
            *(1, 3, 5),
        }
        # a call that carries on begins them
        processes.forget_deaths(groups[1].file)
        processes.run_groups(groups, 2, time.time() + 600, log=lambda text: None)
        assert messages(groups[1].file) == lost
        assert len(Lines.read(groups[1].file).results) == NUMBERS

    def test_a_process_that_ends_before_its_first_check_is_begun_three_times(self, tmp_path):
        started = []

        def command(until):
            started.append(until)
            return processes.python("-c", "raise SystemExit(1)")

        group = Group("broken", tmp_path / "broken.jsonl", made(""), command)
        processes.run_groups([group], 2, time.time() + 600, log=lambda text: None)
        assert (len(started), Lines.read(group.file).results) == (3, {})

    def test_what_a_file_holds_is_not_run_again_and_a_cut_line_is_nothing(self, tmp_path):
        file, ran = tmp_path / "made.jsonl", []

        def run(kind, number):
            ran.append(number)
            return LOST if number == 4 else {"passed": True}

        file.write_text('{"begin": "made: 0 [even, float32]"}\n' * 2 + '{"group": "ma')
        with file.open("a") as text:
            text.write("\n")
        assert processes.run_checks(made("", run), file, time.time() + 60) == GONE
        assert processes.run_checks(made("", run), file, time.time() + 60) == FINISHED
        assert ran == list(range(1, NUMBERS))
        assert messages(file) == {0: "begun twice without a result", 4: LOST["message"]}

    def test_out_of_memory_beside_others_is_tried_again_alone(self, tmp_path):
        file = tmp_path / "made.jsonl"
        answers = [OUT_OF_MEMORY, {"passed": True, "message": "enough"}, OUT_OF_MEMORY, OUT_OF_MEMORY]
        checks = made("", lambda kind, number: answers.pop(0))[:2]
        for number in range(2):
            assert processes.run_checks(checks[number:], file, time.time() + 60) == FINISHED
        group = Group("alone", file, checks, lambda until: [], alone=True)
        assert [check.name for check in group.waiting] == ["0"]
        assert processes.run_checks(checks, file, time.time() + 60, alone=True) == FINISHED
        (failed,) = messages(file).values()
        assert failed.startswith("run again alone: memory was short beside others. AcceleratorError")

    def test_memory_without_values_is_nan(self):
        lucky = torch.ones(1000)
        del lucky
        with processes.uninitialised_memory_is_nan():
            assert torch.empty(1000).isnan().all()


class TestWorkloads:
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_every_method_is_right_or_says_why_it_is_not_run(self, name, tmp_path, monkeypatch):
        """A peer that is not there is a row of the table."""
        monkeypatch.setitem(sys.modules, methods.ANEMOI_MODULE, None)
        file = tmp_path / outcome.BENCH
        assert running.run_workloads(file, [name], "cpu", True, time.time() + 600) == running.DONE
        record = json.loads(file.read_text())
        statuses = {case["method"]: case["status"] for case in record["cases"]}
        assert len(record["cases"]) == len(PASSES) * len(statuses)
        assert all(case["status"] == "measured" or case["reason"] for case in record["cases"])
        assert set(statuses.values()) <= {"measured", "missing", "refused"}
        assert statuses[AUTO] == statuses["rows"] == statuses[methods.AGAIN] == "measured"
        if ANEMOI in statuses:
            assert statuses[ANEMOI] == "missing"
            assert re.search(rf"\| {ANEMOI} .*missing: not there: ", table.report(record))
            assert statuses["PyG TransformerConv"] == statuses["torch.sparse"] == "measured"

    def test_a_workload_that_cannot_be_built_leaves_the_others(self, tmp_path, monkeypatch):
        """It is no death of the process: each of its methods has failed, and the report says why."""

        def fail(n):
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")

        monkeypatch.setitem(WORKLOADS, "mesh", replace(WORKLOADS["mesh"], build=fail))
        file = tmp_path / outcome.BENCH
        code = running.run_workloads(file, ["mesh", "fill8", "causal8k"], "cpu", True, time.time() + 600)
        record = json.loads(file.read_text())
        statuses = {case["workload"]: set() for case in record["cases"]}
        for case in record["cases"]:
            statuses[case["workload"]].add(case["status"])
        assert (code, statuses["mesh"]) == (running.DONE, {"failed"})
        assert statuses["fill8"] == {"measured", "refused"}
        assert "mesh: the workload cannot be built: OutOfMemoryError: tried to alloc" in table.report(record)
        assert running.run_workloads(file, ["mesh", "clusters"], "cpu", True, time.time() - 9) == running.LATE
        record = json.loads(file.read_text())
        record["due"].append("clusters")
        assert "clusters: not begun, no time was left" in table.report(record)

    @pytest.mark.parametrize(
        ("name", "tokens", "receivers", "senders", "degree"),
        [
            ("random1m", 300, 300, 300, 32),
            ("narrow1m", 300, 300, 300, 8),
            ("clusters", 4500, 4500, 4500, 492),
            ("mesh", 40_320, 192 * 210, 640 * 847, 25),
            ("chosen32k", 300, 300, 300, 64),
        ],
    )
    def test_graphs_have_distinct_edges_of_the_degree_that_they_promise(
        self, name, tokens, receivers, senders, degree
    ):
        graph = WORKLOADS[name].graph(tokens)
        src, dst = graph.edge_index
        assert (graph.num_dst, graph.num_src) == (receivers, senders)
        assert torch.equal(torch.bincount(dst), torch.full((receivers,), degree))
        assert len(torch.unique(dst * senders + src)) == receivers * degree
        assert 0 <= int(src.min()) <= int(src.max()) < senders
        if name == "clusters":
            inside = (src // 2048 == dst // 2048)[dst < 4096]  # the last community is moved to the end
            assert inside.double().mean() == pytest.approx(0.9, abs=0.01)

    def test_anemoi_is_given_edges_by_receiver_and_their_order_by_sender(self, monkeypatch):
        """A stand-in that reads both, as its kernels do, is right on a bipartite graph."""
        stub = SimpleNamespace(graph_transformer_attention_conv=transformer_conv)
        monkeypatch.setitem(sys.modules, methods.ANEMOI_MODULE, stub)
        workload = replace(WORKLOADS["mesh"].tiny(), dtype=torch.float64)
        edges = workload.graph(30).edge_index
        order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))
        # the last receiver and the last sender have no edge
        graph = convert.from_edge_index(edges[:, order], int(edges[1].max()) + 2, int(edges[0].max()) + 2)
        problem = workload.problem(graph, CPU)
        assert Checked(problem).verdict(methods._anemoi(problem), backward=True).passed

    @pytest.mark.parametrize(("factor", "status"), [(-1.0, "wrong"), (1.2, "wrong"), (1.0, "measured")])
    def test_a_method_that_is_wrong_is_not_timed(self, factor, status):
        def prepare(problem):
            return Prepared(lambda q, k, v: factor * attend(q, k, v, problem.graph))

        for case in bench("window131k").cases(Method("changed", prepare, ours=True)):
            assert (case["status"], "seconds" in case) == (status, status == "measured")

    def test_too_little_memory_and_a_slow_first_call_are_said_with_their_number(self, monkeypatch):
        tried = bench("random1m")
        monkeypatch.setattr(tried.watch, "on_gpu", True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**32))
        greedy = replace(methods.OURS["rows"], bytes_needed=lambda problem, both: 2.0**31)
        assert tried.cases(greedy)[0]["reason"] == "about 2.0 GiB needed, 1.0 GiB are free"
        tried = bench("random1m")
        tried.pace = replace(PACE, slowest=-1.0)
        assert [case["status"] for case in tried.cases(methods.OURS["rows"])] == ["slow", "slow"]

    def test_targets_and_the_table_follow_from_what_was_measured(self):
        """Of a record with times of 8 ms for auto and 10 for anemoi, at floors of 6 ms."""
        about = bench("random1m").about()
        cases = [
            {"workload": "random1m", "method": method, "pass": which, "status": "measured", "ours": ours}
            | {"seconds": seconds, "share": 6e-3 / seconds, "bytes": 1e9, "takes": "rows"}
            for method, ours, seconds in ((AUTO, True, 8e-3), (ANEMOI, False, 10e-3))
            for which in PASSES
        ]
        record = {"measurement": True, "workloads": [about], "cases": cases}
        rows = {(row["measure"], row["against"]): row for row in targets.judged(record)}
        assert rows["share", ""]["value"] == pytest.approx(0.75, rel=EXACT)
        assert rows["faster", ANEMOI]["value"] == pytest.approx(1.25, rel=EXACT)
        assert (rows["share", ""]["met"], rows["faster", ANEMOI]["met"]) == (True, True)
        assert rows["faster", targets.PYG_ANY]["met"] is None
        row = [cell.strip() for cell in table.table(record).splitlines()[-1].strip("|").split("|")]
        assert row == ["in-degree 32, 1M", "3,072", "rows", "8 / 8", "1 / 1", "75 % / 75 %", "1.25x / 1.25x"]

    def test_a_floor_is_the_bytes_of_the_edges_at_the_measured_rate(self):
        """Of 8 heads of 64 in bfloat16: a row of 1 KB for a key, one for a value, 4 bytes of an index."""
        workload = replace(WORKLOADS["random1m"], tokens=100)
        tried = Bench(workload, machine.Watch(CPU), CEILINGS, PACE)
        assert bytes_of(tried.problem, "forward") == 4 * 100 * 1024 + 3200 * 2052
        tried.gathers = 1e9
        assert tried.floor("backward") == pytest.approx(2 * (409_600 + 6_566_400) / 1e9, rel=EXACT)


class Tree:
    """A copy of the project with some lines changed, in which the run is rehearsed."""

    COPIED = ("gnn_attention", "benchmarks", "examples", "tests/__init__.py", "tests/guarantees")
    BACKENDS = ("benchmarks/gpu_run.py", '("rows", "dense", "reference", gpu_core.MESSAGE_PASSING)')
    # few checks and processes, so that a rehearsal takes a minute
    FEWER = (
        ("benchmarks/gpu_run.py", '("random1m", "mesh", "chosen32k", "fill8")', '("fill8",)'),
        ("benchmarks/gpu_run.py", "check.skipped is None", 'check.dtype in ("bfloat16", "float32")'),
    )

    def __init__(self, folder, *changes):
        self.folder = folder
        for name in self.COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        for name, line, changed in (*self.FEWER, *changes):
            text = (folder / name).read_text()
            assert text.count(line) == 1, (name, line)
            (folder / name).write_text(text.replace(line, changed))

    def call(self, number, *options):
        """Begin a call of the run, with the archive ``NUMBER.tar.gz``."""
        archive = self.folder / f"{number}.tar.gz"
        command = ["-m", "benchmarks.gpu_run", "--trial", "--jobs", "2", "--archive", str(archive)]
        command += ["--out", str(self.folder / str(number)), *map(str, options)]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(self.folder)}
        with (self.folder / f"{number}.log").open("wb") as log:
            return subprocess.Popen(
                processes.python(*command),
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def verdicts(self, number):
        """What came of each check and each method in a call."""
        out = self.folder / str(number)
        checks = {result.name: result.passed for result in outcome.results(out)}
        record = running.read_bench(out / outcome.BENCH) or {"cases": []}
        return checks | {
            (case["workload"], case["method"], case["pass"]): case["status"] for case in record["cases"]
        }


class TestRehearsal:
    @pytest.fixture(autouse=True)
    def _interpreter(self):
        needs("triton")

    def test_killed_in_the_middle_it_is_carried_on_to_the_same_end(self, tmp_path):
        """What stands in the archive is not run again, and nothing is lost."""
        tree = Tree(tmp_path, (*Tree.BACKENDS, '("dense", "reference")'))
        assert tree.call("whole").wait(600) == 0
        killed = tree.call("killed")
        while killed.poll() is None and len(tree.verdicts("killed")) < 8:
            time.sleep(0.2)
        os.killpg(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        before = tree.verdicts("killed")
        outcome.pack(tmp_path / "killed", tmp_path / "killed.tar.gz")
        assert tree.call("on", "--earlier", tmp_path / "killed.tar.gz").wait(600) == 0
        after = tree.verdicts("on")
        assert set(after.values()) <= {True, "measured", "missing", "refused"}
        assert after == tree.verdicts("whole")
        assert before.items() <= after.items()
        for file in (tmp_path / "on").glob("core.*.jsonl"):
            written = [line for line in file.read_text().splitlines() if "begin" not in line]
            assert len(written) == len(Lines.read(file).results)

    def test_a_wrong_sign_is_named_by_cell(self, tmp_path):
        right = "tl.sum(query * key, 3) * scale, edge, ok & there"
        kernel = "gnn_attention/backends/gpu/kernels/_row_passes.py"
        tree = Tree(tmp_path, (*Tree.BACKENDS, '("rows", "dense")'), (kernel, right, f"-{right}"))
        assert tree.call("wrong").wait(600) == 1
        summary = (tmp_path / "wrong" / "summary.txt").read_text()
        cell = re.compile(r"^(\w+ \w+): \d+ of \d+ checks, (all passed|\d+ FAILED)", re.MULTILINE)
        cells = dict(cell.findall(summary))
        assert cells["dense bfloat16"] == cells["dense float32"] == "all passed"
        assert cells["rows bfloat16"].endswith("FAILED")
        assert re.search(r"FAILED large: .* \[rows, bfloat16\]", summary)
        assert re.search(r"\| rows +\| .*wrong: error ", summary)


def transformer_conv(query, key, value, edges, csc, reverse):
    """Attention along edges whose senders are listed by receiver; the lists by sender must agree."""
    (row, colptr), (rowptr, edge_ids, edge_dst) = csc, reverse
    dst = torch.arange(len(query)).repeat_interleave(colptr.diff())
    assert torch.equal(dst, edge_dst)
    src = torch.arange(len(key)).repeat_interleave(rowptr.diff())
    assert torch.equal(src, row[edge_ids])
    logits = (query[dst] * (key[row] + edges)).sum(-1) * query.shape[-1] ** -0.5
    mask = torch.zeros(len(query), len(key), dtype=torch.bool)
    mask[dst, row] = True
    dense = logits.new_full((len(query), len(key), logits.shape[1]), -torch.inf)
    weights = dense.index_put((dst, row), logits).softmax(1).masked_fill(~mask.any(1).view(-1, 1, 1), 0.0)
    return torch.einsum("ijh,jhd->ihd", weights, value)


if __name__ == "__main__":
    kind, file, until = sys.argv[1:]
    sys.exit(processes.run_checks(made(kind), Path(file), float(until)))
