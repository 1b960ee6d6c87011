"""The suite ``gpu`` on a CPU: every method right or refused, wrong ones caught, a record is carried on."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.extras import needs

from benchmarks.__main__ import main
from benchmarks.checked import Checked, in_edges_of, sampled_receivers
from benchmarks.gpu import calibrate, machine, measuring, methods, running, table, targets, workloads
from benchmarks.gpu.machine import Ceilings, Watch
from benchmarks.gpu.measuring import FAR_BEHIND, Bench, Pace
from benchmarks.gpu.methods import AGAIN, OURS
from benchmarks.gpu.running import TRIAL
from benchmarks.gpu.workloads import PASSES, WORKLOADS
from benchmarks.methods import AUTO, Method, Prepared
from benchmarks.records import case_of
from gnn_attention import attend, convert, patterns
from gnn_attention._support import progress
from gnn_attention.backends import cost_model
from gnn_attention.backends.gpu import devices
from gnn_attention.backends.gpu.devices import PRESETS
from gnn_attention.verify.measure import EXACT

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

CPU = torch.device("cpu")
ROOMY = Ceilings(1e12, 1e12, 1e12, 1e12, 1e12, "no kernel")


@pytest.fixture(autouse=True)
def _no_measured_constants(tmp_path, monkeypatch):
    """The presets, whatever this machine's file says; ceilings that take no time."""
    monkeypatch.setenv(cost_model.VARIABLE, str(tmp_path / "costs.json"))
    monkeypatch.setattr(machine, "ceilings", lambda device: ROOMY)
    devices._measured.cache_clear()
    yield
    devices._measured.cache_clear()


def bench(name, **changed):
    """A workload, tiny, on the CPU."""
    workload = replace(WORKLOADS[name], **changed)
    return Bench(workload, Watch(CPU), ROOMY, PRESETS["H200"], Pace(0.0, 1, 1, 1), quick=True)


class TestWorkloads:
    @pytest.mark.parametrize("degree", [1, 7, 50.5, 95.25])
    def test_scattered_senders_are_different_and_as_many_as_wanted(self, degree):
        graph = workloads.scattered(96, degree)
        assert graph.num_edges == int(graph.mask().sum()) == len(torch.unique(graph.edge_index, dim=1).T)
        # A share degree % 1 of 96 receivers has one more, drawn: deviation at most 0.5 / sqrt(96) = 0.051, of
        # which 0.2 is four.
        assert graph.in_degree().double().mean() == pytest.approx(degree, abs=0.2)
        assert graph.in_degree().max() - graph.in_degree().min() == (degree % 1 > 0)


class TestChecked:
    def test_the_truth_is_about_all_in_edges_of_some_receivers(self):
        graph, rows = workloads.scattered(200, 5), torch.tensor([0, 3, 150])
        _, senders, mask = in_edges_of(graph, rows)
        assert torch.equal(mask[0, 0], graph.mask()[rows][:, senders])

    @pytest.mark.parametrize(
        "spoil", [lambda x: x * 1.2, lambda x: x.where(torch.arange(96).view(-1, 1) != 95, torch.nan)]
    )
    def test_a_wrong_method_is_not_timed(self, spoil):
        found = bench("window131k")
        rows = sampled_receivers(96, 96)
        assert 95 in rows

        def prepare(problem):
            return Prepared(lambda q, k, v: spoil(attend(q, k, v, problem.graph)))

        cases = found.cases(Method("spoilt", prepare))
        assert [case["status"] for case in cases][1] == "wrong"
        assert "seconds" not in cases[1]

    @pytest.mark.parametrize(
        ("off", "ours", "status"), [(3e-2, False, "measured"), (3e-2, True, "wrong"), (9, False, "wrong")]
    )
    def test_a_peer_that_is_less_exact_is_timed_and_says_so(self, off, ours, status):
        """It sums in the short dtype, say; what computes something else is not timed."""

        def prepare(problem):
            return Prepared(lambda q, k, v: attend(q, k, v, problem.graph) * (1 + off))

        for case in bench("window131k").cases(Method("rough", prepare, ours=ours)):
            assert case["status"] == status
            assert ("seconds" in case) == (status == "measured")
            assert case["reason"].startswith("error ")
        record = made_up(window131k__rough=1.0)
        record["cases"][0]["reason"] = "error 4.5 of SDPA's own (allowed 2)"
        assert "| less exact: error 4.5 of SDPA's own (allowed 2) |" in table.report(record)

    def test_a_gradient_for_senders_without_a_sampled_edge_is_wrong(self):
        """However small, and though the output is right."""
        workload = replace(WORKLOADS["window131k"], heads=2, dim=16)
        problem = workload.problem(patterns.window(600, 9), CPU)
        sample = Checked(problem)
        right = Prepared(lambda q, k, v: attend(q, k, v, problem.graph))
        leaking = Prepared(lambda q, k, v: attend(q, k, v, problem.graph) + 1e-12 * (q.sum() + k.sum()))
        assert sample.verdict(right, backward=True).passed
        assert sample.verdict(leaking, backward=False).passed
        assert not sample.verdict(leaking, backward=True).passed


class TestMethods:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_every_method_is_measured_or_says_why_not(self, name):
        """All that runs here is right; both passes of each have a case, with a prediction if there is one."""
        found = bench(name)
        for method in methods.methods_of(WORKLOADS[name].peers, with_peers=True):
            cases = found.cases(method)
            assert [case["pass"] for case in cases] == list(PASSES)
            for case in cases:
                if case["status"] != "measured":
                    assert case["status"] in ("missing", "refused")
                    assert case["reason"]
                    continue
                assert case["seconds"] > 0
                assert case["p10"] <= case["seconds"] <= case["p90"]
                assert ("output_error" in case) == method.same
                assert ("takes" in case) == (method.name in (AUTO, AGAIN))
                estimated = case["method"] in (AUTO, AGAIN) or method.estimate in found.expected["forward"]
                assert ("predicted_s" in case) == estimated
        assert cases[0]["method"] == AGAIN

    @pytest.mark.slow
    def test_what_is_missing_or_fails_is_a_case(self, monkeypatch):
        found = bench("random131k")
        dense = OURS["dense"]
        assert found.cases(Method("a", dense.prepare, modules=("no_such_module",)))[0]["status"] == "missing"
        failed = found.cases(Method("b", lambda problem: Prepared(_raise(ValueError("no\nmore")))))
        assert [case["reason"] for case in failed] == ["ValueError: no"] * 2
        out_of_memory = Method("c", lambda problem: Prepared(_raise(torch.OutOfMemoryError("Tried"))))
        assert found.cases(out_of_memory)[0]["status"] == "out of memory"
        monkeypatch.setattr(found, "_free", lambda: 1000.0)
        greedy = Method("d", dense.prepare, bytes_needed=lambda problem, both: 2.0**31)
        assert found.cases(greedy)[0]["reason"] == "about 2.0 GiB needed, 0.0 GiB are free"
        monkeypatch.setattr(measuring, "LONG", 0.0)
        monkeypatch.setattr(measuring, "FAR", 0.5)
        behind = found.cases(replace(dense, bytes_needed=None))[0]
        assert behind["status"] == "far behind"
        assert "times that of the best: not timed" in behind["reason"]


def _raise(error):
    def raising(*arguments, **named):
        raise error

    return raising


class TestPeers:
    def test_anemoi_is_given_edges_by_receiver_and_their_order_by_sender(self, monkeypatch):
        """A stand-in that reads both, as its kernels do, is right forward and backward."""
        stub = SimpleNamespace(graph_transformer_attention_conv=transformer_conv)
        monkeypatch.setitem(sys.modules, methods.ANEMOI_MODULE, stub)
        workload = replace(WORKLOADS["random131k"].tiny(), dtype=torch.float64)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
        scattered = workloads.scattered(14, 5)
        # no receiver or sender may be taken for its neighbour: edges in any order, the last token without any
        graph = convert.from_edge_index(scattered.edge_index[:, order], 15, 15)
        problem = workload.problem(graph, CPU)
        assert Checked(problem).verdict(methods._anemoi(problem), backward=True).passed

    def test_anemoi_refuses_what_it_cannot_compute(self):
        workload = WORKLOADS["random131k"].tiny()
        problem = workload.problem(workload.graph(), CPU)
        assert (
            methods.PEERS[workloads.ANEMOI].unsupported_reason(problem) == "its operators are for CUDA alone"
        )
        for samples, dtype, reason in (
            (1, torch.bfloat16, None),
            (2, torch.bfloat16, "it takes one sample, got 2"),
            (1, torch.float64, "it computes in float32 and shorter"),
        ):
            q = OnCuda(samples, dtype)
            assert methods._anemoi_refusal(SimpleNamespace(inputs=[q])) == reason
        edges, numbers = problem.graph.num_edges, problem.heads * problem.dim
        assert methods._anemoi_bytes(problem, True) == 2 * methods._anemoi_bytes(problem, False)
        assert methods._anemoi_bytes(problem, False) == 2 * edges * numbers

    def test_anemois_own_kernel_is_right_where_it_is_carried(self):
        """Interpreted, in a process that may."""
        program = f"""
import importlib, torch
from benchmarks.checked import Checked
from benchmarks.gpu import methods
from benchmarks.gpu.workloads import WORKLOADS
kernel = importlib.import_module({methods.ANEMOI_MODULE!r})
for operator in (kernel.graph_transformer_attention, kernel.graph_transformer_attention_backward):
    operator.register_kernel("cpu")(operator._init_fn)
workload = WORKLOADS["random131k"].tiny()
problem = workload.problem(workload.graph(12), torch.device("cpu"))
assert Checked(problem).verdict(methods._anemoi(problem), backward=True).passed
"""
        if methods.PEERS[workloads.ANEMOI].missing() is not None:
            assert "CI" not in os.environ, "run python -m benchmarks.gpu_peers"
            pytest.skip("python -m benchmarks.gpu_peers brings it")
        run_interpreted(program)

    def test_pyg_compiled_is_what_it_is_uncompiled(self, monkeypatch):
        needs("torch_geometric")
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        workload = replace(WORKLOADS["random131k"].tiny(), dtype=torch.float64)
        problem = workload.problem(workload.graph(), CPU)
        assert (
            methods.PEERS[workloads.PYG_COMPILED].unsupported_reason(problem)
            == "it is compiled for a GPU here"
        )
        assert Checked(problem).verdict(methods._pyg_compiled(problem), backward=True).passed


@dataclass(frozen=True)
class OnCuda:
    """Stands for a tensor."""

    samples: int
    dtype: torch.dtype
    device = torch.device("cuda")

    def __len__(self):
        return self.samples


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


def run_interpreted(program):
    """By a process of this Python; numpy must be old enough for its interpreter."""
    found = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=os.environ | found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class TestRunning:
    NAMES = ("random131k", "documents131k")

    @pytest.mark.slow
    def test_a_record_is_written_as_it_goes_and_carried_on(self, tmp_path, monkeypatch):
        """A budget that is spent leaves the rest waiting; what is done, and what failed, is not run again."""
        file, ran = tmp_path / "record.json", []
        cases = Bench.cases
        note = lambda self, method: ran.append((self.workload.name, method.name)) or cases(self, method)  # noqa: E731
        monkeypatch.setattr(Bench, "cases", note)
        keep = running.keeper(str(file))
        clock = iter(range(1000))
        with monkeypatch.context() as slow:
            slow.setattr(running, "time", SimpleNamespace(monotonic=lambda: next(clock)))
            first = running.run_gpu(self.NAMES, "cpu", True, budget=1.5, keep=keep)
        names = sorted(self.NAMES, key=list(WORKLOADS).index)
        due = [(name, method) for name in names for method in _methods(name)]
        assert (len(first["cases"]), first["waiting"]) == (2, len(due) - 1)
        full = running.run_gpu(self.NAMES, "cpu", True, resume=file, keep=keep)
        assert json.loads(file.read_text(encoding="utf-8")) == full
        assert ran == due
        assert (full["waiting"], len(full["runs"]), full["measurement"]) == (0, 2, False)
        again = running.run_gpu(self.NAMES, "cpu", True, resume=file)
        assert again["cases"] == full["cases"]

    def test_a_lost_device_stops_the_run_and_is_passed_over_afterwards(self, tmp_path, monkeypatch):
        file, cases = tmp_path / "record.json", Bench.cases

        def lost(self, method):
            if method.name == "dense":
                raise measuring.LostDeviceError("gone")
            return cases(self, method)

        monkeypatch.setattr(Bench, "cases", lost)
        found = running.run_gpu(["random131k"], "cpu", True, keep=running.keeper(str(file)))
        assert found["stopped"] == "dense on random131k took the device with it: gone"
        assert [case["method"] for case in found["cases"]] == [AUTO, AUTO, "dense", "dense"]
        on = running.run_gpu(["random131k"], "cpu", True, resume=file)
        assert "stopped" not in on
        assert case_of(on, "random131k", "dense", "forward")["status"] == "failed"
        assert on["waiting"] == 0

    def test_records_of_elsewhere_are_not_carried_on(self, tmp_path):
        file = tmp_path / "record.json"
        found = running.run_gpu(["random131k"], "cpu", True, budget=1e-9)
        file.write_text(json.dumps({**found, "torch": "1.0"}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"was made with another torch \('1.0', here .*\): begin a new"):
            running.run_gpu(["random131k"], "cpu", True, resume=file)
        file.write_text('{"bench": "attention"}', encoding="utf-8")
        with pytest.raises(ValueError, match="holds no record of the benchmarks"):
            running.run_gpu(["random131k"], "cpu", True, resume=file)


def _methods(name):
    return [method.name for method in methods.methods_of(WORKLOADS[name].peers, with_peers=True)]


class TestCommand:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "needs a GPU, and torch finds none for --device cuda; --device cpu --quick is a trial"),
            (["--device", "cpu"], "is a trial of the benchmark, not a measurement: give --quick too"),
            (["--device", "cpu", "--quick", "--budget", "0"], "--budget must be above 0 seconds, got 0.0"),
            (["--device", "cpu", "--quick", "--calibrate"], "--calibrate needs measurements on a GPU"),
        ],
    )
    def test_wrong_options_end_with_code_2(self, arguments, message, capsys):
        assert main(["gpu", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_a_trial_writes_record_report_and_pictures(self, tmp_path, capsys, monkeypatch):
        needs("matplotlib")
        monkeypatch.setattr(progress, "EVERY", 0.001)
        file = tmp_path / "record.json"
        arguments = ["--device", "cpu", "--quick", "--workloads", "bigbird131k", "--json", str(file)]
        arguments += ["--plots", str(tmp_path)]
        assert main(["gpu", *arguments]) == 0
        shown = capsys.readouterr()
        assert "A trial of the benchmark on a CPU: its numbers are no measurement." in shown.out
        methods = len(_methods("bigbird131k"))
        assert f"benchmarks gpu: {methods - 1} of {methods} cases, " in shown.err
        assert "(BigBird of blocks, 131k: auto again)" in shown.err
        record = json.loads(file.read_text(encoding="utf-8"))
        assert {row["met"] for row in record["targets"]} == {None}
        for name in _methods("bigbird131k")[:-1]:
            assert f"\n| {name} " in shown.out
        assert {path.name for path in tmp_path.glob("*.svg")} == {"gpu-times.svg", "gpu-shares.svg"}


def test_marks_and_gathers_are_those_of_the_device_that_was_asked_for(monkeypatch):
    """Not of the current one, on which CUDA's events and Triton's launches are unless told otherwise."""
    needs("triton")
    from benchmarks.gpu import gather_kernel

    seen, second = [], torch.device("cuda:1")

    @contextlib.contextmanager
    def device_of(x):
        seen.append("enter")
        yield
        seen.append("leave")

    launches = type(
        "Launches", (), {"__getitem__": lambda self, grid: lambda *given, **more: seen.append(grid)}
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=seen.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("its stream", device))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(gather_kernel, "_sums", launches())
    Watch(second).mark()
    gather_kernel.sums(torch.zeros(64, 16), torch.arange(64))
    assert seen == [("its stream", second), "enter", (1,), "leave"]


@pytest.mark.parametrize(("seconds", "calls", "samples"), [(3.0, 5, 2), (7.0, 2, 1), (70.0, 1, 0)])
def test_a_method_of_seconds_is_called_less_and_less(seconds, calls, samples, monkeypatch):
    """Compared, then measured twice, once, or never: one that is hopeless forward is not tried backward."""
    found, made = bench("random131k"), []
    found.pace = Pace()
    clock = SimpleNamespace(perf_counter=lambda: seconds * len(made))
    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "PASSES", PASSES if samples == 0 else PASSES[:1])

    def prepare(problem):
        return Prepared(lambda q, k, v: made.append(1) or attend(q, k, v, problem.graph))

    cases = found.cases(Method("slow", prepare))
    assert len(made) == calls
    if samples:
        assert [(case["seconds"], case["samples"]) for case in cases] == [(seconds, samples)]
    else:
        assert {(case["status"], case["reason"]) for case in cases} == {
            (FAR_BEHIND, "its first call took 70 s: not timed")
        }


def test_masks_are_made_once_for_both_passes():
    found, made = bench("random131k"), []

    def prepare(problem):
        made.append(1)
        return Prepared(lambda q, k, v: attend(q, k, v, problem.graph))

    assert [case["status"] for case in found.cases(Method("once", prepare))] == ["measured"] * 2
    assert len(made) == 1


def test_a_method_that_dies_twice_with_its_process_has_failed(tmp_path, monkeypatch):
    """Nothing that is written before it is measured again, and the rest goes on."""
    file, cases = tmp_path / "record.json", Bench.cases

    def dying(self, method):
        if method.name == "dense":
            raise KeyboardInterrupt
        return cases(self, method)

    monkeypatch.setattr(Bench, "cases", dying)
    for number in range(2):
        with pytest.raises(KeyboardInterrupt):
            running.run_gpu(
                ["random131k"], "cpu", True, resume=file if number else None, keep=running.keeper(str(file))
            )
    found = running.run_gpu(["random131k"], "cpu", True, resume=file)
    assert case_of(found, "random131k", "dense", "backward")["reason"] == "begun twice without a result"
    assert found["waiting"] == 0


def test_a_slow_method_takes_few_samples():
    """Ten to a hundred within half a second; of a minute's call two, and no more to warm up."""
    assert [Pace().samples(seconds) for seconds in (1e-9, 0.01, 0.4, 0.6, 60.0)] == [100, 50, 10, 2, 2]
    assert TRIAL.samples(60.0) == 1
    bench, calls = object.__new__(Bench), []
    bench.pace, bench.watch = (
        Pace(slow=0.5),
        SimpleNamespace(wait=lambda: None, seconds=lambda start, stop: stop),
    )
    for seconds, expected in ((0.1, 3), (9.0, 1)):
        calls.clear()
        assert bench._warm(lambda n, marks, s=seconds: calls.append(n) or marks.append((0, s))) == seconds
        assert len(calls) == expected


def made_up(**seconds):
    """A measurement of workloads: milliseconds of each method, forward; backward takes twice as long."""
    about = {"edges": 32_000_000, "tokens": 10**6, "batch": 1, "heads": 8, "dim": 64, "dtype": "bfloat16"}
    same = {"p10": 0.1, "p90": 0.2, "status": "measured", "share": 0.815, "first_s": 1.0, "ours": True}
    same |= {"predicted_s": 0.01, "limit": "gather", "visited": {"flops": 1e9, "misses": 43e9, "passed": 1e9}}
    cases = []
    for (place, milliseconds), (times, which) in product(seconds.items(), enumerate(PASSES, 1)):
        workload, method = place.split("__")
        found = {"seconds": times * milliseconds / 1e3, "bytes": 1024**3 + times * 8 * 10**6 * 4}
        found |= {"takes": "triton"} if method == "auto" else {}
        found |= {"workload": workload, "method": method.replace("_", " "), "pass": which}
        cases.append({**same, **found})
    names = dict.fromkeys(case["workload"] for case in cases)
    record = {"measurement": True, "quick": False, "device": "NVIDIA H200", "driver": "1", "torch": "2.11"}
    record |= {"bench": "gpu", "schema": 1, "cuda": "13.0", "dirty": False, "sources": {}, "runs": []}
    record |= {"date": "2026-12-01T00:00:00", "commit": "abcdef0123456789", "triton": "3.6", "cache": 60e6}
    record |= {"waiting": 0, "cases": cases, "constants": asdict(PRESETS["H200"])}
    record["ceilings"] = asdict(replace(ROOMY, copy=4.3e12, products=7e14))
    record["workloads"] = [{**about, "workload": name, "title": WORKLOADS[name].title} for name in names]
    return {**record, "targets": targets.judged(record)}


RECORD = made_up(
    random1m__auto=16.0, random1m__auto_again=20.0, random1m__triton_rows=15.0, barabasi1m__auto=24.0
)
DENSE = made_up(causal8k__auto=1.7, causal8k__SDPA_flash=3.0, causal8k__SDPA_cuDNN=1.69)


def met(record, workload, which, measure):
    return next(
        (row["value"], row["met"])
        for row in record["targets"]
        if (row["workload"], row["pass"], row["measure"]) == (workload, which, measure)
    )


def test_targets_are_judged_by_what_was_measured():
    assert met(RECORD, "random1m", "forward", "share") == (pytest.approx(0.815, rel=EXACT), True)
    assert met(RECORD, "random1m", "forward", "faster") == (None, None)  # torch.sparse did not run
    assert met(RECORD, "barabasi1m", "forward", "share") == (pytest.approx(0.815, rel=EXACT), False)
    assert met(RECORD, "barabasi1m", "forward", "growth") == (pytest.approx(1.5, rel=EXACT), False)
    # of the fastest kernel that ran
    assert met(DENSE, "causal8k", "forward", "time") == (pytest.approx(1.7 / 1.69, rel=EXACT), True)
    assert {row["met"] for row in targets.judged({**RECORD, "measurement": False})} == {None}
    # whatever the device: each share is one of its own ceilings
    assert {row["measure"] for row in RECORD["targets"]} <= {"share", "time", "faster", "growth", "beyond"}
    other = {**RECORD, "targets": targets.judged({**RECORD, "device": "NVIDIA H100 80GB HBM3"})}
    assert other["targets"] == RECORD["targets"]


def test_floors_are_those_of_the_ceilings_that_were_measured():
    """Twice as fast a device has half the floor; what is timed at twice its floor reaches a half of it."""
    for name, ceiling in (("causal8k", "products"), ("random131k", "cache_rows")):
        found = bench(name)
        floors = found.about()["floors_ms"]
        faster = replace(ROOMY, **{ceiling: 2 * getattr(ROOMY, ceiling)})
        found.ceilings = faster
        for which in PASSES:
            assert found.floor(which) * 1e3 == pytest.approx(floors[which] / 2, rel=EXACT)
    problem = bench("causal8k").problem
    expected = problem.flops("forward") / ROOMY.products
    assert bench("causal8k").floor("forward") == pytest.approx(expected, rel=EXACT)


def test_constants_come_from_what_was_reached():
    """Rates are the ceilings; 43 GB at 4.3 TB/s are 10 ms: the median of the shares, less 10 us."""
    found = calibrate.calibrated(RECORD)
    assert (found.name, found.copy, found.half, found.cache_bytes) == ("NVIDIA H200", 4.3e12, 7e14, 60e6)
    assert found.measured == "2026-12-01, commit abcdef0123"
    shares = sorted(10 / (milliseconds - 0.01) for milliseconds in (16.0, 20.0, 15.0, 24.0))
    assert found.gather == pytest.approx((shares[1] + shares[2]) / 2, rel=EXACT)
    assert (found.sdpa, found.windows) == (PRESETS["H200"].sdpa, PRESETS["H200"].windows)


def test_the_report_says_everything():
    found = table.report(RECORD)
    for words in ["NVIDIA H200, driver 1", "copies 4.3 TB/s", "noise 25.0 % / 25.0 %", "takes triton"]:
        assert words in found
    assert "| NO " in found
    (row,) = (line for line in table.table(DENSE).splitlines() if "causal, 8k" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][-2:] == ["1.76x / 1.76x", "0.994x / 0.994x"]
