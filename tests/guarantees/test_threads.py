"""A graph or model gives the same bits in eight concurrent threads as in one."""

import sys
import threading
from functools import partial

import pytest
import torch
from support.extras import needs

from gnn_attention import attend, patterns
from gnn_attention.interpret import trace
from gnn_attention.model import Config, LanguageModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
]

THREADS = 8
SIZES = {"vocabulary_size": 20, "width": 12, "num_layers": 2, "num_heads": 4, "head_dim": 3, "mlp_width": 16}


def draw_numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_tokens(thread, count):
    return torch.randint(20, (2, count), generator=torch.Generator().manual_seed(thread))


def append_gradients(out, inputs):
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def make_attend(case):
    """Return calls of several backends on one new graph, which each prepares at its first use."""
    graph = patterns.window(40, 3 + case) | patterns.sinks(40, 2)
    backends = ("auto", "tiles", "rows", "dense", "reference")

    def call(thread):
        qkv = [draw_numbers(seed, 1, 4, 40, 8).requires_grad_() for seed in range(3)]
        out = append_gradients(attend(*qkv, graph, backend=backends[thread % len(backends)]), qkv)
        return [*out, graph.edge_index, graph.mask(), graph.in_degree(), (graph @ graph).edge_index]

    return call


def make_recording(case):
    """Return calls that record a model, some with an edge cut, or that record and use it at the same time."""
    model = LanguageModel(Config(**SIZES)).eval()
    graph = patterns.causal(10)

    def call(thread):
        if thread % 2 and case % 2:
            return [model(draw_tokens(thread, 10), graph).detach()]
        interventions = [trace.cut([(0, 1)], layers=0)] if thread % 2 else []
        run = trace.record(model, draw_tokens(thread, 10), graph, interventions=interventions)
        return [x.detach() for x in (run.output, *(layer.weights() for layer in run.layers), *run.states)]

    return call


def make_use_graph(case):
    """Return calls of ``use_graph`` on other graphs; layers are recomputed in the backward pass."""
    hf_models, huggingface = needs("support.hf_models"), needs("gnn_attention.huggingface")
    model = hf_models.build("llama").model.train()
    model.set_attn_implementation("gnn_attention")
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def call(thread):
        with huggingface.use_graph(model, patterns.window(12, 1 + (thread + case) % 4)):
            out = model(draw_tokens(thread, 12), use_cache=False).last_hidden_state
            inputs = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return append_gradients(out, inputs)

    return call


MAKERS = [make_attend, make_recording, make_use_graph]


def run_concurrently(calls):
    """Start calls at the same moment, each in its thread, and return their results or exceptions."""
    start, results = threading.Barrier(len(calls)), {}

    def run(number):
        start.wait()
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [results[number] for number in range(len(calls))]


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("make", MAKERS)
def test_threads_at_once_give_what_they_give_alone(make, case):
    torch.manual_seed(case)
    call = make(case)
    truth = [call(thread) for thread in range(THREADS)]
    torch.manual_seed(case)
    shared_call = make(case)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds between switches, so that threads interleave often
    try:
        results = run_concurrently([partial(shared_call, thread) for thread in range(THREADS)])
    finally:
        sys.setswitchinterval(interval)
    for result, expected in zip(results, truth, strict=True):
        assert not isinstance(result, Exception), result
        assert all(map(torch.equal, result, expected))


def test_a_second_thread_is_refused_an_intervene_context():
    """If the second thread waited for the first, which may wait for it, both would hang."""
    model = LanguageModel(Config(**SIZES)).eval()
    with trace.intervene(model, trace.mute()):
        (error,) = run_concurrently([lambda: trace.record(model, draw_tokens(0, 3))])
        assert isinstance(error, NotImplementedError)
        assert "another thread intervenes in this module" in str(error)
    assert len(trace.record(model, draw_tokens(0, 3)).layers) == 2
