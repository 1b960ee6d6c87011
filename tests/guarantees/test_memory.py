"""F12: calls keep to their memory, what cannot fit is refused by name, and planted faults are seen."""

from dataclasses import replace

import pytest
import torch

from gnn_attention import patterns
from gnn_attention._support import memory as support_memory
from gnn_attention.backends import BACKENDS
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from tests.guarantees import memory, peaks, refusals
from tests.guarantees.allocations import allocated
from tests.guarantees.guarantee import no_progress
from tests.guarantees.memory import CELLS, GUARANTEE, case, measure

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def test_it_holds_in_the_quick_cases(monkeypatch):
    """On fewer tokens than in the guarantee, whose slow cases are as long as it."""
    monkeypatch.setattr(peaks, "SIZES", (512, 512))
    found = measure(GUARANTEE.quick, no_progress)
    assert found.holds, found
    assert found.value.startswith("1 calls took at most 0.")
    assert found.value.endswith("2 refused and 1 answered, 0 failures")


def test_every_cell_is_a_case_and_every_backend_of_a_cpu_is_met():
    assert GUARANTEE.full == len(CELLS) == len(set(CELLS))
    assert {cell for cell in CELLS if isinstance(cell, peaks.Cell)} == set(peaks.CELLS)
    assert {cell.name for cell in CELLS if isinstance(cell, memory.Refused)} == set(refusals.REFUSED)
    assert {cell.name for cell in CELLS if isinstance(cell, memory.Answered)} == set(refusals.ANSWERED)
    first = [case(number)[0] for number in range(80)]
    assert {cell.backend for cell in first if isinstance(cell, peaks.Cell)} >= set(peaks.WAYS) - {
        peaks.REFERENCE
    }


def test_a_peak_is_what_is_held_at_a_time():
    """Two tensors one after the other are not two at a time."""
    one_by_one = allocated(lambda: [torch.ones(10_000).sum().item() for _ in range(5)])
    together = allocated(lambda: [torch.ones(10_000) for _ in range(5)])
    assert 40_000 <= one_by_one.peak < 50_000
    assert 200_000 <= together.peak < 210_000
    assert one_by_one.largest == together.largest == 40_000
    raised = allocated(lambda: torch.ones(3).view(2))
    assert isinstance(raised.error, RuntimeError)


def test_the_teaching_walk_makes_the_tensor_that_no_backend_makes():
    """A message for each edge: the measure sees it."""
    graph, heads = patterns.window(512, 64), StandardHeads(32, 4)
    x = torch.randn(1, 512, 32)
    for backend, made in (("message_passing", True), ("rows", False), ("tiles", False)):
        layer = MessagePassingAttention(heads, backend=backend)
        layer(x, graph)
        found = allocated(lambda layer=layer: layer(x, graph))
        assert (found.largest >= graph.num_edges * 32 * 4) == made, backend


ROWS = BACKENDS["rows"]


def greedy_rows(call):
    src, dst = call.graph.edge_index
    messages = call.v[:, :, src] + 0 * call.q[:, :, dst]
    out, lse = ROWS.run(call)
    return out + 0 * messages.sum(), lse


def test_a_tensor_of_all_messages_is_seen(monkeypatch):
    monkeypatch.setattr(peaks, "SIZES", (256, 256))
    assert peaks.measured(peaks.Cell("rows", "window", "plain"), 0).piece < 0.1
    monkeypatch.setitem(BACKENDS, "rows", replace(ROWS, run=greedy_rows))
    found = peaks.measured(peaks.Cell("rows", "window", "plain"), 0)
    assert found.piece >= 1
    assert found.forward > 1
    seen = memory._Seen()
    seen.one(peaks.Cell("rows", "window", "plain"), 0, "case 0: rows")
    assert len(seen.failures) == 2
    assert "forward" in seen.failures[0]
    assert "of E H C numbers" in seen.failures[1]


def test_what_raises_is_a_failure(monkeypatch):
    def broken(cell, seed):
        raise RuntimeError("planted")

    monkeypatch.setattr(peaks, "measured", broken)
    assert measure(2, no_progress).failures == ("case 0: auto, window, plain, seed 0: RuntimeError: planted",)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("the mask of a million tokens", "RuntimeError: "),
        ("the list of half a trillion edges", "RuntimeError: "),
        ("the in-degrees of a trillion tokens", "RuntimeError: "),
    ],
)
def test_a_guard_that_sleeps_is_seen(monkeypatch, name, said):
    """A raw error from below is no refusal."""
    assert refusals.refused(name) is None
    monkeypatch.setattr(support_memory, "shortage", lambda needed: None)
    assert refusals.refused(name).startswith(said)
