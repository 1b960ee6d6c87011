"""``use_graph`` runs Hugging Face models on another graph than their own."""

# ruff: noqa: E402
import threading
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact, error
from support.extras import needs
from support.refusals import assert_refusals
from torch import nn

transformers = needs("transformers")

from support import hf_models
from support.hf_models import TOKENS, build64, generate, gradients, inputs, logits_of, result, some_graph

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS
from gnn_attention.huggingface import attending, use_graph

pytestmark = pytest.mark.usefixtures("wide")
MIN_CHANGE = 1e-3  # A mistake would change some number by more than this.


def enable_checkpointing(model, reentrant):
    """Recompute layers in training; the name of the method changed in transformers 5."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()


@pytest.mark.parametrize("has_future", [False, True])
def test_a_chosen_graph_stays_one_within_the_mask(llama, has_future):
    """The causal mask removes later senders from the lists; the logits are those of the mask."""
    heads, past = llama.config.num_attention_heads, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    scores = torch.rand(heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
    scores = scores if has_future else scores.masked_fill(~past, -1.0)
    best = scores.topk(4)
    graph = ga.TokenGraph.from_indices(best.indices.masked_fill(best.values < 0, -1), TOKENS)
    tokens, graphs = inputs("llama")["input_ids"], []

    def run(call):
        graphs.append(call.graph)
        return BACKENDS["rows"].run(call)

    expected = hf_models.run_sdpa(llama, tokens, (graph.mask() & past)[None])
    with use_graph(llama, graph), attending(replace(BACKENDS["rows"], run=run)):
        assert_exact(logits_of(llama, input_ids=tokens), expected)
    num_edges = int((graph.mask() & past).sum())
    assert [(g.num_edges, g.edges.has_structure) for g in graphs] == [(num_edges, False)] * len(graphs)
    assert graphs
    assert (num_edges < graph.num_edges) == has_future


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(llama, reentrant):
    """The mask of the forward pass serves the recomputation, outside the context too."""
    batch, graph = inputs("llama", "right"), patterns.window(TOKENS, 3)
    with use_graph(llama, graph):
        expected = gradients("llama", llama, batch, use_cache=False)
    enable_checkpointing(llama, reentrant)
    with use_graph(llama, graph):
        out = result("llama", llama, batch, use_cache=False)
    llama.zero_grad()
    hf_models.direction(out).backward()
    output = {k: p.grad for k, p in llama.named_parameters() if p.grad is not None}
    assert output.keys() == expected.keys()
    assert_exact(list(output.values()), list(expected.values()))


def test_a_checkpointed_layer_without_a_mask_is_not_recomputed_on_another_graph():
    """CLIP passes no mask that could hold the graph, so it refuses outside the context."""
    model, batch = build64("clip_vision", "gnn_attention"), inputs("clip_vision")
    graph = patterns.window(17, 3)
    with use_graph(model, graph):
        expected = gradients("clip_vision", model, batch)
    enable_checkpointing(model, False)
    with use_graph(model, graph):
        assert_exact(list(gradients("clip_vision", model, batch).values()), list(expected.values()))
        total = result("clip_vision", model, batch).sum()
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside it"):
        total.backward()


@pytest.mark.slow
def test_a_compiled_model_has_the_same_logits(llama, monkeypatch):
    """torch.compile breaks its program at the attention, and follows every context."""
    # The compiler would trace the patch that keeps float64; both round to float32 at the same places.
    monkeypatch.undo()
    batch = inputs("llama", "left")
    compiled = torch.compile(llama, backend="eager")
    for graph in (patterns.causal(64), patterns.self_loops(64), patterns.causal(64)):
        with use_graph(llama, graph):
            assert_exact(logits_of(compiled, **batch), logits_of(llama, **batch))


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_graph_is_the_same_as_its_mask(llama, is_listed, is_replacement):
    """The graph, a rule or a list of edges, restricts the model's own mask or replaces it."""
    graph = some_graph() | patterns.window(64, 2).T if is_replacement else some_graph()
    graph = ga.TokenGraph.from_edges(graph.edge_index, 64) if is_listed else graph
    tokens = inputs("llama")["input_ids"]
    expected = hf_models.run_sdpa(
        llama, tokens, hf_models.as_mask(graph if is_replacement else graph & patterns.causal(64))
    )
    with use_graph(llama, graph, replace=is_replacement):
        assert_exact(logits_of(llama, input_ids=tokens), expected)
    assert float((logits_of(llama, input_ids=tokens) - expected).abs().max()) > MIN_CHANGE


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_replacement", [False, True])
def test_padding_does_not_count(llama, pad, is_listed, is_replacement):
    """Positions count from the first token of a sample: alone and in a batch its logits are the same."""
    graph = patterns.full(64) if pad == "right" and is_replacement else some_graph(is_listed)
    batch = inputs("llama", pad)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with use_graph(llama, graph, replace=is_replacement):
        together = logits_of(llama, **batch, position_ids=positions)
        for sample, length in enumerate((TOKENS, 8, 5)):
            slots = slice(TOKENS - length, TOKENS) if pad == "left" else slice(length)
            single = logits_of(llama, input_ids=batch["input_ids"][sample : sample + 1, slots])
            sample_arguments = {name: x[sample : sample + 1] for name, x in batch.items()}
            padded = logits_of(llama, **sample_arguments, position_ids=positions[sample : sample + 1])
            assert_exact([together[sample, slots], padded[0, slots]], [single[0], single[0]])


@pytest.mark.parametrize(("name", "is_replacement"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_generation_follows_the_graph(name, is_replacement):
    """Dynamic and static caches give the same tokens as no cache, with padding on the left, too."""
    model, batch = build64(name), inputs(name, "left")
    model.set_attn_implementation("gnn_attention")
    with use_graph(model, some_graph(), replace=is_replacement):
        expected, scores = generate(model, batch, use_cache=False)
        for cache in (hf_models.CACHES["own"], hf_models.CACHES["static"]):
            output, output_scores = generate(model, batch, **cache)
            assert torch.equal(output, expected)
            assert_exact(output_scores, scores)
    assert float((generate(model, batch)[1] - scores).abs().max()) > MIN_CHANGE


def test_a_sliding_cache_without_the_senders_of_a_graph_is_named():
    """A graph of sinks that replaces a window cannot bring back keys that the cache has dropped."""
    model, batch = build64("mistral", "gnn_attention"), inputs("mistral")
    message = r"layer 0\): its cache has dropped the senders before 8, .* generate with use_cache=False"
    sinks = use_graph(model, patterns.sinks(64, 1) | patterns.window(64, 3), replace=True)
    with sinks, pytest.raises(ValueError, match=message):
        generate(model, batch)
    with use_graph(model, patterns.window(64, 3), replace=True):
        assert torch.equal(generate(model, batch)[0], generate(model, batch, use_cache=False)[0])


def test_a_function_gives_each_layer_and_head_its_graph(llama):
    """None stands for the model's own graph; the length is that of the sequence."""
    calls, tokens = [], inputs("llama")["input_ids"]

    def choose(layer, head, length):
        calls.append((layer, head, length))
        return None if layer == 1 else patterns.window(length, head + 1)

    with use_graph(llama, choose):
        output = logits_of(llama, input_ids=tokens)
    assert calls == [(layer, head, TOKENS) for layer in (0, 1) for head in range(4)]

    def add_mask(module, args, kwargs):
        return args, {**kwargs, "attention_mask": hf_models.by_head()}

    llama.model.layers[0].register_forward_pre_hook(add_mask, with_kwargs=True)
    assert_exact(output, hf_models.run_sdpa(llama, tokens, patterns.causal(TOKENS)))


def test_contexts_nest_and_end(llama):
    """An inner context is intersected with the outer one; both end with an exception."""
    batch, inner_graph = inputs("llama"), patterns.window(64, 2) | patterns.sinks(64, 1)
    logits = logits_of(llama, **batch)
    with use_graph(llama, patterns.window(64, 4)):
        outer = logits_of(llama, **batch)
        with use_graph(llama, inner_graph):
            nested = logits_of(llama, **batch)
        assert torch.equal(logits_of(llama, **batch), outer)
    intersection = patterns.window(64, 4) & inner_graph
    with use_graph(llama, intersection):
        assert_exact(nested, logits_of(llama, **batch))
    with pytest.raises(TypeError, match="int"), use_graph(llama, intersection):
        len(logits_of(llama, **batch).numel())
    assert torch.equal(logits_of(llama, **batch), logits)


@pytest.mark.parametrize("name", ["t5", "whisper"])
@torch.no_grad()
def test_cross_attention_is_unchanged(name):
    """The receivers of a decoder are not among the senders of its encoder."""
    model, batch, loops = build64(name, "gnn_attention"), inputs(name), patterns.self_loops(64)
    with use_graph(model, loops):
        expected = result(name, model, batch)
    with use_graph(model.get_encoder(), loops):
        assert error(result(name, model, batch), expected) > MIN_CHANGE / 10
        with use_graph(model.get_decoder(), loops):
            assert torch.equal(result(name, model, batch), expected)
    new_batch = {k: v.roll(1, 0) if k != "decoder_input_ids" else v for k, v in batch.items()}
    with use_graph(model, loops):
        assert error(result(name, model, new_batch), expected) > MIN_CHANGE / 10  # The encoder still counts.


def test_modules_without_a_mask_and_without_a_number():
    """The layers of CLIP are numbered in the order of calls, and have the graph alone."""
    model, batch, calls = build64("clip_vision", "gnn_attention"), inputs("clip_vision"), []
    expected = result("clip_vision", model, batch)
    with use_graph(model, lambda layer, head, length: calls.append((layer, head, length))):
        assert torch.equal(result("clip_vision", model, batch), expected)
    assert calls == [(layer, head, 17) for layer in (0, 1) for head in range(4)]
    with use_graph(model, patterns.self_loops(17)):
        out = model(**batch).last_hidden_state
        new_out = model(batch["pixel_values"].clone().index_fill_(3, torch.arange(4), 0.0)).last_hidden_state
    assert torch.equal(out[:, 2], new_out[:, 2])  # The second patch attends to itself alone.
    assert not torch.equal(out[:, 1], new_out[:, 1])


def gpt_neo():
    """Build a model for which set_attn_implementation only logs a warning."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]])
    model = transformers.GPTNeoModel(config)
    model.set_attn_implementation("gnn_attention")
    return model


WRONG_MODELS = [
    (lambda: "gpt2", TypeError, "model must be a Module, got"),
    (lambda: nn.Linear(2, 2), ValueError, "Linear has no part with a Hugging Face config"),
    (lambda: build64("llama"), ValueError, r"LlamaForCausalLM is 'eager': call model.set_attn_im"),
    (gpt_neo, NotImplementedError, "GPTNeoModel has attention of its own"),
]


def test_wrong_models_are_named(llama):
    def on_causal(build_model):
        return lambda: use_graph(build_model(), patterns.causal(64))

    assert_refusals((on_causal(build_model), error, message) for build_model, error, message in WRONG_MODELS)
    with pytest.raises(TypeError, match=r"graph_or_function must be a TokenGraph or .* got Tensor"):
        use_graph(llama, patterns.causal(64).mask())


CAUSAL = patterns.causal(64)
WRONG_GRAPHS = {
    "too short for a sequence of 12 tokens": (patterns.causal(8), {}),
    "must describe sequences from position 0": (CAUSAL.rows(8, 64), {}),
    "must return a TokenGraph or None, got str": (lambda *where: "window", {}),
    "cannot see padding": (CAUSAL, {"attention_mask": hf_models.as_mask(CAUSAL)}),
}


@pytest.mark.parametrize("message", WRONG_GRAPHS)
def test_wrong_graphs_are_named(llama, message):
    """After the error, the model serves the next call."""
    (graph, options), tokens = WRONG_GRAPHS[message], inputs("llama")["input_ids"]
    context = use_graph(llama, graph, replace=bool(options))
    with context, pytest.raises((TypeError, ValueError), match=message):
        logits_of(llama, input_ids=tokens, **options)
    assert logits_of(llama, input_ids=tokens).isfinite().all()


def test_a_context_in_which_nothing_was_computed_warns(llama, tmp_path):
    """The model may have run in another thread, which has its own contexts."""
    batch, outputs = inputs("llama"), []
    logits = logits_of(llama, **batch)
    thread = threading.Thread(target=lambda: outputs.append(logits_of(llama, **batch)))
    warns = pytest.warns(UserWarning, match="no self-attention of LlamaForCausalLM was computed")
    with warns, use_graph(llama, patterns.self_loops(64)):
        thread.start()
        thread.join()
    assert torch.equal(outputs[0], logits)
    # A model that was saved with this attention loads without the library.
    llama.save_pretrained(tmp_path)
    assert type(llama).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
