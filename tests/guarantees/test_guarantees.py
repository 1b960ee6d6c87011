"""Every guarantee holds in a few cases and detects a planted fault, and the command writes a record."""

import dataclasses
import json
import subprocess

import pytest
import torch

from gnn_attention.backends import BACKENDS
from gnn_attention.cache import KeyValueCache
from tests.guarantees import endurance, environment
from tests.guarantees.__main__ import main
from tests.guarantees.draws import Draw
from tests.guarantees.equality import compare
from tests.guarantees.guarantee import Verdict
from tests.guarantees.registry import GUARANTEES

# torch's compiler instantiates autograd.Function, which torch itself calls deprecated.
ignore_deprecation = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@ignore_deprecation
@pytest.mark.slow
@pytest.mark.parametrize("name", GUARANTEES)
def test_the_quick_count_holds(name):
    outcome = GUARANTEES[name].measure(GUARANTEES[name].quick, print)
    assert outcome.holds, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GUARANTEES if name != "F12"])
def test_nothing_measured_does_not_hold(name):
    assert not GUARANTEES[name].measure(0, print).holds


# ---- planted faults


class HalfGradient(torch.autograd.Function):
    """Return the input unchanged, but halve its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def attend_by_masked_sdpa(call):
    """Attend as a dense kernel in which a masked NaN still spoils the output, as 0 times NaN."""
    mask = call.graph.mask().expand(*call.q.shape[:3], call.k.shape[2])
    k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], dim=1) for x in (call.k, call.v))
    logits = (call.q @ k.mT * call.scale).masked_fill(~mask, torch.finfo(v.dtype).min)
    return logits.softmax(-1) @ v, ROWS.run(call)[1]


def store_messages(call):
    """Compute a message for each edge, which no backend needs to store."""
    (src, dst), (out, lse) = call.graph.edge_index, ROWS.run(call)
    return out + 0 * (call.v[:, :, src] + 0 * call.q[:, :, dst]).sum(), lse


ROWS = BACKENDS["rows"]


def change_output(change):
    """Return a run of ``rows`` whose output is changed."""

    def run(call):
        out, lse = ROWS.run(call)
        return change(out), lse

    return run


def differ_when_compiled(out):
    return out * 1.001 if torch.compiler.is_compiling() else out


def add_roundings(out):
    """Return numbers with needless further roundings."""
    for factor in (1.1, 1.3, 0.7, 1.7):
        out = out * factor / factor
    return out


FAULTS = {
    "F1: a wrong number": ("F1", 4, change_output(lambda out: out * 1.01), ", rows: output"),
    "F1: an exception": ("F1", 4, lambda call: call.no_such_attribute, ", rows: AttributeError"),
    "F1: a NaN": ("F1", 4, change_output(lambda out: out * torch.nan), ", rows: output"),
    "F1: a wrong gradient": ("F1", 4, change_output(HalfGradient.apply), ", rows: gradient"),
    "F2: float64 lost on the way": (
        "F2",
        6,
        change_output(lambda out: out.float().to(out.dtype)),
        ", rows: output",
    ),
    "F3: more roundings": ("F3", 6, change_output(add_roundings), ", rows: mean error"),
    "F4: a NaN that spreads": ("F4", 12, attend_by_masked_sdpa, ", rows: strangers changed: out"),
    "F4: a NaN that is lost": ("F4", 12, change_output(torch.nan_to_num), "that attend to it are finite"),
    "F6: a wrong derivative": ("F6", 2, change_output(HalfGradient.apply), ", rows: GradcheckError"),
    "F7: a graph break": ("F7", 2, lambda call: torch._dynamo.graph_break() or ROWS.run(call), "Unsupported"),
    "F7: another program": (
        "F7",
        2,
        change_output(differ_when_compiled),
        "AssertionError: Tensor-likes are not close",
    ),
    "F8: chance": ("F8", 1, change_output(lambda out: out + 1e-6 * torch.rand(())), "rows: repeats: out"),
    "F8: threads": (
        "F8",
        1,
        change_output(lambda out: out + torch.get_num_threads()),
        "rows: numbers of threads: out",
    ),
    "F12: all messages": ("F12", 5, store_messages, "of E H C in a tensor"),
}


@ignore_deprecation
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_backend_is_noticed(fault, monkeypatch):
    name, count, run, message = FAULTS[fault]
    monkeypatch.setitem(BACKENDS, "rows", dataclasses.replace(ROWS, run=run))
    failures = GUARANTEES[name].measure(count, print).failures
    assert any(message in failure for failure in failures), failures


@pytest.mark.slow
def test_a_chunk_that_is_stored_backwards_is_noticed(monkeypatch):
    append = KeyValueCache.append
    monkeypatch.setattr(
        KeyValueCache, "append", lambda cache, k, v, layer=0: append(cache, k.flip(2), v, layer)
    )
    failures = GUARANTEES["F9"].measure(6, print).failures
    assert any("times the error that is allowed" in failure for failure in failures)


@pytest.mark.slow
def test_memory_that_grows_and_wrong_work_are_noticed():
    leaks = []
    outcome = endurance.soak(0, {"a leak": lambda rng: leaks.append(b"x" * 2**24)})
    assert any(failure.startswith("memory grew from ") for failure in endurance.judge(outcome))
    outcome = endurance.soak(0, {"work": lambda rng: 1 / 0}) | {"memory": 8 * [1.0]}
    assert endurance.judge(outcome)[0] == "round 0, work: ZeroDivisionError: division by zero"


# The faults were shares of a merge that did not sum to 1, a sink's share without a derivative, halves that were
# rounded twice, and in three draws a wrong yardstick.
PAST_FAULTS = (911, 1212, 1993, 2111, 2366, 3480, 922, 3293, 3417, 4037, 1713, 6937)


@pytest.mark.slow
@pytest.mark.parametrize("number", PAST_FAULTS)
def test_draws_that_were_wrong(number):
    assert compare([Draw(number)], print).failures == []


# ---- the command


@pytest.fixture
def two_guarantees(monkeypatch):
    """Replace all guarantees by F1, which holds, and F2, which fails."""
    outcomes = {"F1": Verdict("0 of 10 differ"), "F2": Verdict("1 of 10 differs", ("case 3: off by 2",))}
    for name in list(GUARANTEES):
        if name not in outcomes:
            monkeypatch.delitem(GUARANTEES, name)
            continue
        stub = dataclasses.replace(GUARANTEES[name], measure=lambda count, tell, name=name: outcomes[name])
        monkeypatch.setitem(GUARANTEES, name, stub)


def test_the_command_writes_a_record(two_guarantees, tmp_path, capsys):
    file = tmp_path / "record.json"
    assert main(["--json", str(file), "--count", "3"]) == 1
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["environment"]["torch"] == torch.__version__
    assert [(row["name"], row["holds"], row["full"]) for row in record["guarantees"]] == [
        ("F1", True, False),
        ("F2", False, False),
    ]
    text = capsys.readouterr().out
    assert "FAILS  F2: in float64" in text
    assert "failed: case 3: off by 2" in text
    assert text.endswith("2 guarantees, 1 FAILED\n")
    assert main(["F1"]) == 0


def test_a_record_names_the_commit_and_whether_files_differ(tmp_path, monkeypatch):
    """A copy without a repository, even inside another one, gets its commit from the environment."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GNN_ATTENTION_COMMIT", raising=False)

    def find_commit():
        facts = environment.environment("cpu")
        return facts["commit"] and len(facts["commit"]), facts["dirty"]

    assert find_commit() == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    assert find_commit() == (40, False)
    (tmp_path / "gnn_attention").mkdir()
    (tmp_path / "gnn_attention" / "new.py").touch()
    assert find_commit() == (40, True)
    monkeypatch.setenv("GNN_ATTENTION_COMMIT", "0123abcd")
    assert find_commit() == (8, None)
