"""One object in eight threads at once; each mend of what that uncovered; and faults that are seen."""

import threading
import time
import warnings

import pytest
import torch
from support.extras import needs

from gnn_attention import LazyHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention._support import locks
from gnn_attention.interpret import trace
from gnn_attention.model import Config, LanguageModel
from tests.guarantees import threads
from tests.guarantees.together import Shared

needs("transformers")

from gnn_attention.huggingface import _overrides  # noqa: E402

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def in_a_thread(work):
    """What a call in another thread returns or raises."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


class Faulty:
    """An object with state for each call: what a thread leaves there, another finds."""

    def __init__(self):
        self.last = None

    def __call__(self, thread):
        self.last = thread
        time.sleep(0.002)
        return [torch.tensor(self.last)]


FAULTS = {
    "state of a call": lambda rng: Shared(Faulty()),
    "NaN": lambda rng: Shared(lambda thread: [torch.tensor(torch.nan)]),
    "an error": lambda rng: Shared(lambda thread: [torch.zeros(2)[thread]]),
    "a change of the object": lambda rng: (
        lambda seen: Shared(lambda t: [seen.append(t) or torch.ones(1)], lambda: list(seen))
    )([]),
    "a filter of warnings": lambda rng: Shared(
        lambda t: [warnings.filterwarnings("ignore", f"{t}") or torch.ones(1)]
    ),
    "a maker that fails": lambda rng: 1 / 0,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(monkeypatch, fault):
    monkeypatch.setattr(threads, "KINDS", {fault: FAULTS[fault]})
    with warnings.catch_warnings():
        measured = threads.measure(1, lambda text: None)
    assert not measured.holds
    assert measured.failures[0].startswith(f"case 0, {fault}: ")


def test_a_kind_that_cannot_run_is_skipped(monkeypatch):
    def missing(rng):
        raise ImportError("no transformers")

    monkeypatch.setattr(threads, "KINDS", {"use_graph": missing})
    measured = threads.measure(1, lambda text: None)
    assert (measured.failures, measured.skipped) == ((), ("case 0, use_graph: no transformers",))


def test_a_call_that_hangs_is_reported(monkeypatch):
    stop = threading.Event()
    monkeypatch.setattr(threads, "PATIENCE", 0.05)
    assert threads.together([lambda: stop.wait(30) and []]) == ["did not end"]
    stop.set()


def test_lazy_heads_become_what_they_are_when_they_are_whole(monkeypatch):
    """A thread that comes while another draws the parameters waits for them."""
    layer, drawing = MessagePassingAttention(LazyHeads(2, 4)), threading.Event()
    drawn = StandardHeads.reset_parameters

    def slowly(heads):
        drawing.set()
        time.sleep(0.05)
        drawn(heads)

    monkeypatch.setattr(StandardHeads, "reset_parameters", slowly)
    first = threading.Thread(target=layer, args=(torch.ones(3, 8), patterns.causal(3)))
    first.start()
    drawing.wait(10)
    at_once = layer(torch.ones(3, 8), patterns.causal(3))
    first.join()
    assert type(layer.heads) is StandardHeads
    assert torch.equal(at_once, layer(torch.ones(3, 8), patterns.causal(3)))


def test_heads_that_met_meanwhile_are_left_as_they_are():
    heads = LazyHeads(2, 4)
    heads.meet(8, 8)
    before = heads.W_Q.clone()
    LazyHeads.meet(heads, 5, 5)
    assert torch.equal(heads.W_Q, before)


def small_model():
    sizes = Config(vocabulary_size=9, width=8, num_layers=1, num_heads=2, head_dim=4, mlp_width=8)
    return LanguageModel(sizes).eval()


def test_a_recording_holds_what_its_own_thread_computed():
    model, tokens = small_model(), torch.tensor([[1, 2, 3]])
    others = []

    def meanwhile(module, inputs):
        if not others:
            others.append(None)
            others[0] = in_a_thread(lambda: model(tokens.flip(1)))

    expected = model(tokens.flip(1))
    model.blocks[0].mlp.register_forward_pre_hook(meanwhile)
    run = trace.record(model, tokens)
    assert torch.equal(others[0], expected)
    assert (len(run.layers), len(run.states)) == (1, 3)


def test_recordings_of_one_module_wait_for_each_other():
    """The second would have left the first's recorder behind as the layer's backend."""
    model, tokens, inside = small_model(), torch.tensor([[1, 2, 3]]), threading.Event()
    before = model.blocks[0].attention.backend
    model.blocks[0].mlp.register_forward_pre_hook(lambda module, inputs: inside.set() or time.sleep(0.05))
    first = threading.Thread(target=trace.record, args=(model, tokens))
    first.start()
    inside.wait(10)
    run = trace.record(model, tokens)
    first.join()
    assert len(run.layers) == 1
    assert model.blocks[0].attention.backend == before


def test_a_second_thread_is_refused_an_operate_block():
    model, tokens = small_model(), torch.tensor([[1, 2, 3]])
    with trace.operate(model, trace.mute()), trace.operate(model, trace.cut([(0, 1)])):
        second = trace.operate(model, trace.mute())
        for work in (lambda: trace.record(model, tokens), second.__enter__):
            found = in_a_thread(work)
            assert isinstance(found, NotImplementedError)
            assert "another thread is in an operate block" in str(found)
    assert len(trace.record(model, tokens).layers) == 1
    assert not locks._owners


def test_layers_computed_again_use_the_graph_of_their_own_thread(monkeypatch):
    """Without a mask that carries them: the uses of the last forward pass of any thread were taken."""
    module, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    mine, theirs = (_overrides.Use(model, patterns.window(4, w), False, {}) for w in (1, 2))

    def forward(use):
        with _overrides.in_force(use):
            use.calls[0] = 1
            return _overrides.uses_for(module)

    assert forward(mine) == (mine,)
    assert in_a_thread(lambda: forward(theirs)) == (theirs,)
    mine.open[0] = theirs.open[0] = True
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    assert _overrides.uses_for(module) == (mine,)
    assert in_a_thread(lambda: _overrides.uses_for(module)) == (theirs,)  # a thread of torch's own: the last


def test_filters_of_warnings_are_changed_by_one_thread_at_a_time():
    before, inside = list(warnings.filters), threading.Event()

    def hold():
        with locks.ignored("one"):
            inside.set()
            time.sleep(0.05)

    first = threading.Thread(target=hold)
    first.start()
    inside.wait(10)
    with locks.ignored("another"):
        assert not first.is_alive() or "one" not in str(warnings.filters)
    first.join()
    assert list(warnings.filters) == before
