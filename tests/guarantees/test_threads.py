"""One graph or model in eight threads at once gives, bit for bit, what it gives alone."""

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


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(thread, count):
    return torch.randint(20, (2, count), generator=torch.Generator().manual_seed(thread))


def with_gradients(out, inputs):
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def of_a_call(case):
    """One new graph through several backends, forward and backward; each works it out at its first use."""
    graph = patterns.window(40, 3 + case) | patterns.sinks(40, 2)
    backends = ("auto", "tiles", "rows", "dense", "reference")

    def call(thread):
        qkv = [numbers(seed, 1, 4, 40, 8).requires_grad_() for seed in range(3)]
        out = with_gradients(attend(*qkv, graph, backend=backends[thread % len(backends)]), qkv)
        return [*out, graph.edge_index, graph.mask(), graph.in_degree(), (graph @ graph).edge_index]

    return call


def of_a_recorded_model(case):
    """All threads record a model, some with an edge cut; or some record it while others use it."""
    model, graph, all_record = LanguageModel(Config(**SIZES)).eval(), patterns.causal(10), case % 2 == 0

    def call(thread):
        if thread % 2 and not all_record:
            return [model(tokens(thread, 10), graph).detach()]
        intervention = [trace.cut([(0, 1)], layers=0)] if thread % 2 else []
        run = trace.record(model, tokens(thread, 10), graph, interventions=intervention)
        return [x.detach() for x in (run.output, *(layer.weights() for layer in run.layers), *run.states)]

    return call


def of_a_hugging_face_model(case):
    """``use_graph`` with another graph in each thread; layers are recomputed in the backward pass."""
    hf_models, huggingface = needs("support.hf_models"), needs("gnn_attention.huggingface")
    model = hf_models.build("llama").model.train()
    model.set_attn_implementation("gnn_attention")
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def call(thread):
        with huggingface.use_graph(model, patterns.window(12, 1 + (thread + case) % 4)):
            out = model(tokens(thread, 12), use_cache=False).last_hidden_state
            inputs = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return with_gradients(out, inputs)

    return call


KINDS = [of_a_call, of_a_recorded_model, of_a_hugging_face_model]


def at_once(calls):
    """What calls return that start at the same moment, each in its thread."""
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


def made(kind, case):
    torch.manual_seed(case)
    return kind(case)


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_threads_at_once_give_what_they_give_alone(kind, case):
    alone = made(kind, case)
    truth = [alone(thread) for thread in range(THREADS)]
    shared, interval = made(kind, case), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds: threads meet often
    try:
        results = at_once([partial(shared, thread) for thread in range(THREADS)])
    finally:
        sys.setswitchinterval(interval)
    for mine, expected in zip(results, truth, strict=True):
        assert not isinstance(mine, Exception), mine
        assert all(map(torch.equal, mine, expected))


def test_a_second_thread_is_refused_an_intervene_block():
    """It could wait for the first, which may wait for it."""
    model = LanguageModel(Config(**SIZES)).eval()
    with trace.intervene(model, trace.mute()):
        (error,) = at_once([lambda: trace.record(model, tokens(0, 3))])
        assert isinstance(error, NotImplementedError)
        assert "another thread intervenes in this module" in str(error)
    assert len(trace.record(model, tokens(0, 3)).layers) == 2
