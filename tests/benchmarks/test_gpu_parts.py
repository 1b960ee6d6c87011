"""Parts of a GPU run that need no GPU: archives, plans, the sanitizer's words, peers."""

import gzip
import io
import json
import os
import stat
import tarfile
import zipfile
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_cache, gpu_peers
from benchmarks.gpu import archives, groups, outcome, phases, plan, rehearsal, sanitizer
from benchmarks.gpu.groups import Group, Lines
from benchmarks.gpu.phases import Run
from gnn_attention.verify import Check, Result, record
from gnn_attention.verify.measure import EXACT
from tests.guarantees.gpu_core import CORE_DTYPES, FORMS, core_checks

CLEAN = "========= COMPUTE-SANITIZER\n12 launches, 0 failed\n========= ERROR SUMMARY: 0 errors\n"
OUTSIDE = """========= Invalid __global__ write of size 4 bytes
=========     at _forward_kernel+0x2f0 in forward.py:12
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""
RACE = """========= Error: Race reported between Write access at senders_backward+0x1a0 and Read access at \
senders_backward+0x2b0 [24 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


class TestArchives:
    def test_what_is_packed_comes_back(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b.json").write_text("1")
        size = archives.pack(tmp_path, [tmp_path / "a" / "b.json"], tmp_path / "all.tar.gz")
        assert size == (tmp_path / "all.tar.gz").stat().st_size
        assert archives.members(tmp_path / "all.tar.gz") == {"a/b.json": b"1"}

    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "text", "checksum", "no tar"])
    def test_of_a_damaged_one_nothing_is_taken(self, tmp_path, damage):
        archive, folder = tmp_path / "kernels.tar.gz", tmp_path / "cache"
        kernel = tmp_path / "ABC"
        kernel.mkdir()
        (kernel / "k.cubin").write_bytes(os.urandom(5000))
        gpu_cache.packed(tmp_path, archive)
        data = archive.read_bytes()
        spoilt = {
            "empty": b"",
            "cut": data[: len(data) // 2],
            "flipped": data[:2000] + bytes([data[2000] ^ 255]) + data[2001:],
            "text": b"nothing of the kind",
            "checksum": data[:-8] + bytes(4) + data[-4:],
            "no tar": gzip.compress(b"nothing of the kind" * 99),
        }
        archive.write_bytes(spoilt.get(damage, b""))
        if damage == "missing":
            archive.unlink()
        with pytest.raises(ValueError, match=r"kernels\.tar\.gz cannot be read"):
            gpu_cache.unpacked(archive, folder)
        assert not folder.exists()

    def test_kernels_are_found_in_another_folder_and_nothing_else_is_written(self, tmp_path):
        kernel = tmp_path / "made" / "ABC234"
        kernel.mkdir(parents=True)
        (kernel / "k.cubin").write_bytes(b"code")
        (kernel / "k.ptx").write_bytes(b"text")
        (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": "/elsewhere/k.cubin"}}))
        archive, folder = tmp_path / "kernels.tar.gz", tmp_path / "there"
        gpu_cache.packed(tmp_path / "made", archive)
        assert gpu_cache.unpacked(archive, folder) == 1
        assert {file.name for file in folder.rglob("*.*")} == {"k.cubin", "__grp__k.json"}
        group = json.loads((folder / "ABC234" / "__grp__k.json").read_text())
        assert group == {"child_paths": {"k.cubin": str(folder / "ABC234" / "k.cubin")}}

    @pytest.mark.parametrize("name", ["../ABC/k.cubin", "ABC/run.sh", "/ABC/k.cubin", "ABC/../../k.json"])
    def test_an_archive_of_something_else_is_refused(self, tmp_path, name):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        (tmp_path / "odd.tar.gz").write_bytes(data.getvalue())
        with pytest.raises(ValueError, match="belongs to no kernel"):
            gpu_cache.unpacked(tmp_path / "odd.tar.gz", tmp_path / "cache")
        assert not (tmp_path / "cache").exists()


class TestCarrying:
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_call_goes_on_from_a_folder_or_its_archive(self, tmp_path, packed):
        first, second = tmp_path / "1", tmp_path / "2"
        first.mkdir()
        second.mkdir()
        (first / "core.a.jsonl").write_text("first")
        (first / "place.json").write_text("first")
        # what a death left half written
        (first / ".0123.part").write_text("half")
        (second / "place.json").write_text("second")
        outcome.pack(Run(first, "cpu", True, 1, 0.0), tmp_path / "1.tar.gz")
        outcome.carry(tmp_path / "1.tar.gz" if packed else first, second)
        found = {file.name: file.read_text() for file in second.iterdir()}
        assert found == {"core.a.jsonl": "first", "place.json": "second"}
        # a call that died before it had everything
        (first / "place.json").unlink()
        with pytest.raises(ValueError, match="holds nothing of an earlier call"):
            outcome.carry(first, second)


def group(phase, name, count, file, skipped=None):
    checks = [Check("attend", *name.split("."), str(n), dict, skipped=skipped) for n in range(count)]
    return Group(f"{phase} {name}", file, checks, lambda until: [])


class TestPlan:
    def test_compiling_counts_until_the_kernels_are_there(self, tmp_path, monkeypatch):
        known = {"triton-rows.float32": {"kernels": 40, "seconds": 36.0}}
        monkeypatch.setattr(plan, "measured_kernels", lambda: known)
        found = [group("core", "triton-rows.float32", 10, tmp_path / "a")]
        step = plan.checked_step("core", found, 1, ready=0)
        assert (step.groups, step.units, step.kernels) == (1, 10, 40)
        assert step.seconds == found[0].seconds == pytest.approx(36.0 + 10 * plan.CHECK, rel=EXACT)
        step = plan.checked_step("core", found, 1, ready=40)
        assert (step.kernels, step.seconds) == (0, pytest.approx(10 * plan.CHECK, rel=EXACT))

    def test_a_phase_lasts_as_its_longest_process_or_as_all_share_the_cores(self, tmp_path):
        found = [
            group("others", f"dense.{n}", count, tmp_path / str(n)) for n, count in enumerate((30, 10, 10))
        ]
        for jobs, checks in ((1, 50), (2, 30), (16, 30)):
            step = plan.checked_step("others", found, jobs, 0)
            assert step.seconds == pytest.approx(checks * plan.CHECK, rel=EXACT)

    def test_the_pace_is_what_checks_took_and_what_is_done_is_not_due(self, tmp_path):
        one = group("others", "dense.float32", 20, tmp_path / "a.jsonl")
        for check in one.checks[:5]:
            Lines(one.file).end(Result("attend", "dense", "float32", check.name, passed=True), 2.0)
        assert plan.checked_step("others", [one], 1, 0) == plan.Step("others", 1, 15, 0, 30.0)
        skipped = group("sanitizer", "triton-rows.memcheck", 3, tmp_path / "b", skipped="it is not installed")
        assert plan.checked_step("sanitizer", [skipped], 1, 0).seconds == 0

    def test_methods_that_are_done_are_not_due(self):
        step = plan.timed_step("bench", ["random131k"], False, [])
        done = [("random131k", "auto"), ("random131k", "triton rows")]
        later = plan.timed_step("bench", ["random131k"], False, done)
        assert later.units == step.units - 2
        assert step.seconds - later.seconds == pytest.approx(2 * plan.METHOD, rel=EXACT)

    def test_it_says_in_which_call_each_phase_ends(self):
        steps = [plan.Step("first", 1, 5, 0, 60.0), plan.Step("core", 13, 3563, 1412, 500.0)]
        lines = plan.plan(steps, 520).splitlines()
        assert [line.split() for line in lines[1:3]] == [
            ["first", "1", "5", "0", "60", "60", "1"],
            ["core", "13", "3563", "1412", "500", "560", "2"],
        ]
        assert lines[3] == "in all about 560 s: 2 calls of 520 s"


class TestSanitizer:
    @pytest.mark.parametrize(
        ("code", "output", "message"),
        [
            (0, CLEAN, ""),
            (0, CLEAN + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", ""),
            (1, CLEAN, "ended with 1: "),
            (0, OUTSIDE, "1 reports, in _forward_kernel: Invalid __global__ write of size 4 bytes"),
            (
                0,
                RACE,
                "1 reports, in a kernel without a name: Error: Race reported between Write access at send",
            ),
            (0, "12 launches, 0 failed", "no summary: 12 launches"),
            (255, "", "no summary: "),
        ],
    )
    def test_only_a_clean_end_passes(self, code, output, message):
        found = sanitizer.verdict_of(code, output)
        assert found["passed"] == (message == "")
        assert found["message"].startswith(message)

    @pytest.mark.parametrize(
        ("text", "passed", "message"), [(CLEAN, True, ""), (OUTSIDE, False, "1 reports, in _forward_kernel")]
    )
    def test_the_program_is_found_started_and_read(self, tmp_path, monkeypatch, text, passed, message):
        checks = pretended(tmp_path, monkeypatch, f"echo '{text}'")
        assert len(checks) == 2 * len(FORMS)
        result = checks[1]()
        assert (result.passed, result.skipped) == (passed, None)
        assert result.message.startswith(message)
        given = (tmp_path / "given").read_text()
        assert given.startswith("1 --tool racecheck ")
        assert given.rstrip().endswith("-m benchmarks.gpu.sanitizer --form triton-rows --device cpu --trial")

    def test_one_that_refuses_the_device_is_skipped(self, tmp_path, monkeypatch):
        checks = pretended(tmp_path, monkeypatch, "echo '========= Error: Device not supported'; exit 1")
        assert "does not take this device" in checks[0]().skipped

    def test_one_that_does_not_end_is_ended(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sanitizer, "SECONDS", 0.3)
        result = pretended(tmp_path, monkeypatch, "sleep 60")[0]()
        assert not result.passed
        assert "TimeoutExpired" in result.message

    def test_one_that_is_not_there_is_skipped_by_name(self, monkeypatch):
        monkeypatch.setattr(sanitizer, "program", lambda: None)
        results = [check() for check in sanitizer.sanitizer_checks("cpu")]
        assert {result.skipped for result in results} == {"compute-sanitizer is not installed"}
        assert len({(result.backend, result.name) for result in results}) == 2 * len(FORMS)

    def test_the_launches_are_a_dozen_of_the_core_in_both_precisions(self):
        for form in FORMS:
            found = sanitizer.chosen(form, "cuda", phases.TRIAL)
            assert len({check.label for check in found}) == sanitizer.LAUNCHES
            assert {check.group for check in found} == {"attend", "shapes"}
            assert {check.dtype for check in found} == set(sanitizer.DTYPES) <= set(CORE_DTYPES)
            assert all(check.with_gradients for check in found)


def pretended(folder, monkeypatch, script):
    """The checks with a sanitizer that notes what it is given and does as told."""
    file = folder / "bin" / "compute-sanitizer"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" > {folder}/given\n{script}\n')
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    return sanitizer.sanitizer_checks("cpu", trial=True)


class TestPhases:
    def test_far_offsets_have_a_process_of_their_own(self, tmp_path):
        """Each takes tens of gigabytes: three at once are more than a GPU has."""
        found = phases.groups_of(Run(tmp_path, "cuda", False, 16, 0.0), "core")
        assert [c.backend for c in found.pop("far").checks] == list(FORMS)
        assert set(found) == {f"{form}.{dtype}" for form in FORMS for dtype in CORE_DTYPES}
        assert {check.group for group in found.values() for check in group.checks} >= {"attend", "memory"}
        assert "far" not in {check.group for group in found.values() for check in group.checks}

    def test_a_rehearsal_skips_what_cannot_be_interpreted_and_says_why(self, tmp_path, monkeypatch):
        checks = [Check("attend", name, "float32", "causal", dict) for name in (*FORMS, "dense")]
        monkeypatch.setitem(phases.PHASES, "core", lambda run: checks)
        for reason in ("numpy is too new", None):
            monkeypatch.setattr(phases, "unable", lambda reason=reason: reason)
            found = phases.phase_checks(Run(tmp_path, "cpu", True, 1, 0.0), "core")
            assert [check.skipped for check in found] == [reason] * len(FORMS) + [None]


class TestRehearsal:
    def test_a_second_death_waits_until_the_check_of_the_first_has_ended(self, tmp_path):
        """It would have failed, though nothing is wrong with it."""
        lines = Lines(tmp_path / "core.a.jsonl")
        result = Result("attend", "dense", "float32", "0", passed=True)
        for expected in (True, False):
            lines.begin("attend: 0 [dense, float32]")
            assert rehearsal.ripe(tmp_path) is expected
        lines.end(result)
        assert rehearsal.ripe(tmp_path)
        record = {"cases": [], "begun": {"random131k: auto": 2}}
        (tmp_path / "bench.json").write_text(json.dumps(record))
        assert not rehearsal.ripe(tmp_path)
        case = {"workload": "random131k", "method": "auto", "pass": "forward", "status": "measured"}
        (tmp_path / "bench.json").write_text(json.dumps({**record, "cases": [case]}))
        assert rehearsal.ripe(tmp_path)
        assert rehearsal.verdicts(tmp_path) == {
            "core attend: 0 [dense, float32]": "passed",
            "bench random131k, auto, forward": "measured",
        }

    def test_the_fault_is_planted_in_a_line_that_is_there(self):
        file, right, faulty = rehearsal.FAULT
        text = (rehearsal.ROOT / file).read_text()
        assert text.count(right) == 1
        assert faulty not in text

    def test_what_is_left_is_found(self):
        assert (
            rehearsal._incomplete("core: 28 of 28 checks, 0 FAILED\nbench: 2 cases, 0 methods waiting")
            is None
        )
        assert rehearsal._incomplete("core: 27 of 28 checks, 0 FAILED").startswith("core: 27")
        assert rehearsal._incomplete("bench: 2 cases, 10 methods waiting").startswith("bench: 2")


class TestPeers:
    def test_one_file_of_the_wheel_is_carried_with_its_licence(self, tmp_path, capsys):
        wheel, out = tmp_path / "a-1-py3-none-any.whl", tmp_path / "peers"
        names = [gpu_peers.NEEDED, "a-1.dist-info/METADATA", "a-1.dist-info/licenses/LICENSE", "a/other.py"]
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, "text")
        assert gpu_peers.main(["--wheel", str(wheel), "--out", str(out)]) == 0
        written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
        assert written == {*names[:3], "SOURCE.txt"}
        for lacking in (names[:1], names[1:]):
            with zipfile.ZipFile(wheel, "w") as file:
                for name in lacking:
                    file.writestr(name, "text")
            assert gpu_peers.main(["--wheel", str(wheel), "--out", str(out)]) == 2
            assert "holds no anemoi/models/triton/gt.py with its licence" in capsys.readouterr().err


class TestRecord:
    @pytest.mark.slow
    def test_one_that_is_not_complete_says_so_and_does_not_stand(self, tmp_path):
        run, place = Run(tmp_path, "cuda", False, 1, 0.0), {"date": "2026-11-22T00:00:00+00:00"}
        place |= {"device": "A GPU", "cuda": "13.0", "torch": "2.11", "triton": "3.6", "interpreted": False}
        (tmp_path / "place.json").write_text(json.dumps(place | {"sources": record.sources()}))
        assert outcome.write_record(run) is None
        every = core_checks()
        for check in every[:-1]:
            result = replace(Result(check.group, check.backend, check.dtype, check.name, passed=True))
            Lines(tmp_path / "core.all.jsonl").end(result)
        file = outcome.write_record(run)
        assert file.name == "2026-11-22T0000-A-GPU.json"
        assert "0 failed, 0 skipped, 1 not started" in record.status(tmp_path)
        last = Result(every[-1].group, every[-1].backend, every[-1].dtype, every[-1].name, passed=True)
        Lines(tmp_path / "core.all.jsonl").end(last)
        assert outcome.write_record(run) == file
        assert "**verified on GPU**" in record.status(tmp_path)


def test_memory_that_a_check_leaves_is_given_back(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(1))
    for reserved, expected in ((2**29, 0), (2**31, 1)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved)
        groups._give_back()
        assert len(given) == expected
