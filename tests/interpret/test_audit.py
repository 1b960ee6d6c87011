"""The audit finds planted leaks, passes clean modules, and leaves everything unchanged."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from support.covering import thin
from support.extras import needs
from support.refusals import assert_refusals
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention.interpret.audit import audit
from gnn_attention.verify.measure import FLOAT64_RTOL

T, WIDTH = 8, 4
SHAPE = (T, WIDTH)
CAUSAL = patterns.causal(T)
DOCUMENTS = patterns.documents([3, 5])
LOOPS, WINDOW = patterns.self_loops(T), patterns.window(T, 3)


class Attention(nn.Module):
    """A short single-head attention, whose mask or softmax may be wrong."""

    def __init__(self, mask: Tensor, weights: str = "masked softmax") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights, self.mask = weights, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.mT
        if self.weights == "masked softmax":
            weights = logits.masked_fill(~self.mask, -torch.inf).softmax(-1)
        else:
            weights = logits.softmax(-2) * self.mask
        return self.out(weights @ v)


class Block(nn.Module):
    """Attention and an MLP with residuals; ``self.norm`` may mix tokens."""

    def __init__(self, mask: Tensor, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention = norm or nn.Identity(), Attention(mask)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Linear(nn.Module):
    """``y[dst] = sum_src M[dst, src] x[src] W``: information flows exactly along M."""

    def __init__(self, flows: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.flows, self.W = flows * torch.randn(flows.shape), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.flows @ x @ self.W


class Apply(nn.Module):
    """A module that calls a function, which may call another module."""

    def __init__(self, function, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.inner is None else self.function(self.inner, x)


def over_time_axis(inner, drop=0):
    """Run a module of ``[B, width, T]`` on ``[B, T, width]``; ``drop`` cuts off what its padding added."""
    return Apply(lambda module, x: module(x.mT).mT[:, : x.shape[1]] if drop else module(x.mT).mT, inner)


ENCODER_LAYER = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True).eval()


def leak_pairs(verdict):
    return {(leak.src, leak.dst) for leak in verdict.leaks}


def extra_pairs(flows, graph):
    """Return the pairs of a mask that are neither edges nor self loops."""
    extra = flows & ~graph.mask() & ~torch.eye(*flows.shape, dtype=torch.bool)
    return {(src, dst) for dst, src in extra.nonzero().tolist()}


ALL = torch.ones(T, T, dtype=torch.bool)
AHEAD = extra_pairs(ALL, CAUSAL)
BEFORE = CAUSAL.mask()
NEXT = {(dst + 1, dst) for dst in range(T - 1)}
FLIPPED = {(T - 1 - dst, dst) for dst in range(T)}
BATCH_NORM = "BatchNorm over time"
PLANTED = {
    "mask off by one": (Attention(ALL.tril(1)), CAUSAL, extra_pairs(ALL.tril(1), CAUSAL)),
    "mask transposed": (Attention(BEFORE.T), CAUSAL, extra_pairs(BEFORE.T, CAUSAL)),
    "documents crossing": (Attention(BEFORE), DOCUMENTS, extra_pairs(BEFORE, DOCUMENTS)),
    "softmax over receivers": (Attention(BEFORE, "softmax over receivers"), CAUSAL, AHEAD),
    "convolution": (over_time_axis(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), CAUSAL, NEXT),
    BATCH_NORM: (over_time_axis(nn.BatchNorm1d(WIDTH)), CAUSAL, AHEAD),
    "GRU both ways": (nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), CAUSAL, AHEAD),
    "writes into its input": (Apply(lambda x: x.add_(x.flip(1))), LOOPS, FLIPPED),
    "one pair": (Linear(BEFORE | (torch.arange(T * T).view(T, T) == 2 * T + 6)), CAUSAL, {(6, 2)}),
}
# How the verdict describes the difference between the two graphs.
REMARKS = {
    "mask transposed": "the second is the first transposed",
    "mask off by one": "the first is the second without its edges from later tokens (src > dst)",
    "documents crossing": "the second has 3 more senders per receiver from receiver 3 on",
    BATCH_NORM: "samples of a batch influence one another",
}


@pytest.mark.parametrize("name", PLANTED)
def test_finds_exactly_the_planted_leaks(name):
    module, graph, expected = PLANTED[name]
    verdict = audit(module, graph, (T, 3 if isinstance(module, Linear) else WIDTH))
    assert leak_pairs(verdict) == expected
    assert not verdict.ok
    assert not verdict.exact
    assert {leak.witnesses[:2] for leak in verdict.leaks} == {("jacobian", "perturbation")}
    assert verdict.crosses_samples == (name == BATCH_NORM)
    assert str(verdict).startswith(f"{graph.name}, 1 layer: {len(expected)} leak")
    assert REMARKS.get(name, "") in str(verdict)


CLEAN = {
    "blocks": (nn.Sequential(Block(DOCUMENTS.mask()), Block(DOCUMENTS.mask())), DOCUMENTS, None),
    "causal convolution": (over_time_axis(nn.Conv1d(WIDTH, WIDTH, 3, padding=2), 2), WINDOW, None),
    "GRU": (nn.GRU(WIDTH, WIDTH, batch_first=True), CAUSAL, None),
    "TransformerEncoderLayer": (ENCODER_LAYER, CAUSAL, lambda module, x: module(x, src_mask=~BEFORE)),
    "torch_geometric": (GCNConv(WIDTH, WIDTH), patterns.watts_strogatz(T, 2, 0.5), None),
}


@pytest.mark.parametrize("name", CLEAN)
def test_passes_clean_modules(name):
    module, graph, call = CLEAN[name]
    verdict = audit(module, graph, SHAPE, call=call)
    assert verdict.exact, verdict
    assert verdict.flow == verdict.allowed == (graph | LOOPS)
    assert "exact" in str(verdict)


BACKENDS = ["message_passing", "reference", "dense", "tiles", "rows", "mixed", "auto"]
FORMS = [lambda h: h, FactoredHeads.of, MergedHeads.of]
NARROW = [patterns.window(T, 3) - LOOPS, patterns.tree([-1, 0, 0, 1, 1, 2, 2, 5]).T]


@pytest.mark.parametrize(("backend", "form", "graph"), thin(product(BACKENDS, FORMS, NARROW)))
def test_our_layer_is_exact_on_every_backend(backend, form, graph):
    """A pair that is not an edge carries nothing, not even a NaN (docs/semantics.md, 3)."""
    layer = MessagePassingAttention(form(StandardHeads(WIDTH, 2, bias=True)), backend=backend)
    verdict = audit(layer, graph, SHAPE)
    assert verdict.exact, verdict
    assert verdict.poisoned == ()


@pytest.mark.parametrize("seed", range(3))
def test_flow_is_the_sparsity_of_the_module(seed):
    """For any flow M and any declared graph D the leaks are M - D, the unused pairs D - M."""
    rates = torch.tensor([0.1, 0.04])[:, None, None]
    flows, allowed = torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(seed)) < rates
    graph = ga.convert.from_mask(allowed)
    if seed % 3 == 0:  # There is one leak among many clean pairs.
        flows, leak = allowed.clone(), (~allowed).nonzero()[seed]
        flows[*leak] = True
    verdict = audit(Linear(flows), graph, (30, 3))
    unused = allowed & ~flows & ~torch.eye(30, dtype=torch.bool)
    assert torch.equal(verdict.flow.mask(), flows)
    assert leak_pairs(verdict) == extra_pairs(flows, graph)
    assert set(verdict.unused) == {(src, dst) for dst, src in unused.nonzero().tolist()}


def test_each_detector_sees_what_another_cannot():
    # The position of the largest number scales the sequence, which is information without a derivative.
    module = Apply(lambda x: x * (1 + x.argmax(1, keepdim=True)))
    assert {leak.witnesses for leak in audit(module, LOOPS, (T, 1)).leaks} == {("perturbation",)}
    # The output depends on a term of 1e-30, although adding it to 1 changes nothing.
    small = torch.zeros(T, T)
    small[2, 5] = 1e-30
    verdict = audit(Apply(lambda x: x + small.double() @ x), LOOPS, SHAPE)
    (leak,) = verdict.leaks
    assert (leak.src, leak.dst, leak.witnesses) == (5, 2, ("jacobian", "nan"))
    assert 0 < leak.size < 1e-28
    # No gradient can follow the path of this leak.
    verdict = audit(nn.Sequential(Block(BEFORE), Apply(lambda x: x.detach().flip(1))), CAUSAL, SHAPE)
    assert {leak.witnesses[0] for leak in verdict.leaks} == {"perturbation"}
    assert {leak.layer for leak in verdict.leaks} == {"1"}
    # torch's dense attention multiplies a masked NaN by zero, which transfers no information.
    module, graph, call = CLEAN["TransformerEncoderLayer"]
    verdict = audit(module, graph, SHAPE, call=call)
    assert verdict.exact
    assert set(verdict.poisoned) == {(src, dst) for src in range(T) for dst in range(src)}
    assert "only NaN crosses 28 pairs, first 1 -> 0" in str(verdict)


def gate_next(is_open: Tensor, x: Tensor) -> Tensor:
    """Return each token's next state (cyclically) where its gate is open, else 0."""
    return torch.where(is_open, x.roll(-1, 1), 0.0)


def test_a_leak_behind_a_gate_is_found_at_inputs_that_open_it():
    gate = Apply(lambda x: x + gate_next(x.roll(-1, 1) > 5, x))
    module = nn.Sequential(gate, Block(BEFORE))
    assert audit(module, CAUSAL, SHAPE).exact  # Random inputs do not open the gate.
    closed, open_at_3 = torch.zeros(1, *SHAPE), torch.zeros(1, *SHAPE)
    open_at_3[0, 3] = 6.0
    for inputs in (torch.cat([closed, open_at_3]), [closed, open_at_3.float()]):
        (leak,) = audit(module, CAUSAL, SHAPE, inputs=inputs).leaks
        assert (leak.src, leak.dst, leak.path, leak.layer) == (3, 2, (3, 2), "0")
        assert leak.witnesses[:2] == ("jacobian", "perturbation")
    assert audit(module, CAUSAL, SHAPE, inputs=closed).exact
    word = nn.Embedding(10_000, WIDTH)
    module = Apply(lambda e, ids: e(ids) + gate_next((ids.roll(-1, 1) == 7)[..., None], e(ids)), word)
    assert audit(module, LOOPS, (T,)).ok
    text = torch.tensor([[1, 2, 3, 7, 5, 6, 1, 2]])
    assert leak_pairs(audit(module, LOOPS, (T,), inputs=text)) == {(3, 2)}


def test_an_fft_needs_a_tolerance_and_tokens_are_the_second_axis():
    kernel = torch.randn(T, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def convolve(x):
        transformed = torch.fft.rfft(x, 2 * T, dim=1) * torch.fft.rfft(kernel, 2 * T, dim=0)
        return torch.fft.irfft(transformed, 2 * T, dim=1)[:, :T]

    assert audit(Apply(convolve), CAUSAL, SHAPE, tolerance=FLOAT64_RTOL).exact
    assert not audit(Apply(convolve), CAUSAL, SHAPE).ok
    assert "[T, B, width]" in str(audit(nn.GRU(WIDTH, WIDTH), CAUSAL, SHAPE))


def test_layers_are_counted_or_passed():
    """Two layers of a window of 3 reach 5 tokens. The audit counts our layers; others need ``layers``."""
    window = patterns.window(T, 3)
    blocks = nn.Sequential(Block(window.mask()), Block(window.mask()))
    shallow = audit(blocks, window, SHAPE)
    assert leak_pairs(shallow) == extra_pairs((window**2).mask(), window)
    deep = audit(blocks, window, SHAPE, layers=2)
    assert (deep.exact, deep.allowed) == (True, patterns.window(T, 5))
    verdict = audit(nn.Sequential(Block(patterns.window(T, 2).mask()), blocks[1]), window, SHAPE, layers=2)
    assert (verdict.ok, verdict.exact) == (True, False)
    assert set(verdict.unused) == {(src, src + 4) for src in range(T - 4)}
    assert "no leak, 4 of 22 allowed pairs unused" in str(verdict)
    assert "the first unused pair: 0 -> 2 -> 4" in str(verdict)
    model = ga.model.LanguageModel(ga.model.Config(16, 8, 3, 2, 4, 8)).eval()
    verdict = audit(model, window, (T,))
    assert (verdict.layers, verdict.exact) == (3, True)


def test_the_path_of_a_leak_and_the_module_where_it_enters():
    window, wide = patterns.window(12, 2), patterns.window(12, 3)
    model = nn.Sequential(Block(window.mask()), Block(wide.mask()), Block(window.mask()))
    verdict = audit(model, window, (12, WIDTH), layers=3)
    assert leak_pairs(verdict) == {(src, src + 4) for src in range(8)}
    assert all(leak.path == (src, src + 1, src + 3, src + 4) for leak in verdict.leaks for src in [leak.src])
    text = "0 -> 4 through 0 -> 1 -> 3 -> 4, comes in at 1.attention (seen by jacobian,"
    assert str(verdict.leaks[0]).startswith(text)
    # The innermost module is named, not its block or a later module.
    mixing = nn.Sequential(Block(BEFORE), Block(BEFORE, nn.LayerNorm([T, WIDTH])))
    assert {leak.layer for leak in audit(mixing, CAUSAL, SHAPE).leaks} == {"1.norm"}
    # If every block is too wide, a path with one undeclared hop is cheaper than one with two.
    verdict = audit(nn.Sequential(*(Block(wide.mask()) for _ in range(3))), window, (12, WIDTH), layers=3)
    (path,) = [leak.path for leak in verdict.leaks if (leak.src, leak.dst) == (0, 4)]
    assert sorted(b - a for a, b in pairwise(path)) == [1, 1, 2]


def test_attention_is_the_only_step_between_tokens():
    """The Jacobian of every other part of a model is block-diagonal (seed S4.3)."""
    model, _ = ga.model.load_trained()
    parts = (model.norm, model.unembedding, *model.blocks[0].children())
    for part in set(parts) - {model.layers[0]}:
        assert audit(part, patterns.self_loops(6), (6, model.config.width)).exact
    assert audit(model.blocks[1], patterns.window(6, 2), (6, model.config.width)).exact


def test_graphs_of_other_shapes():
    """The audit supports cross-attention and graphs that vary by head."""
    layer, queries = MessagePassingAttention(StandardHeads(WIDTH, 2), backend="dense"), torch.randn(3, WIDTH)

    def call_along(graph):
        return lambda module, x: module((x, queries.to(x).expand(len(x), -1, -1)), graph)

    cross, shifted = patterns.cross(3, 5), patterns.causal(5).rows(0, 3)
    assert audit(layer, cross, (5, WIDTH), call=call_along(cross)).exact
    leaks = leak_pairs(audit(layer, shifted, (5, WIDTH), call=call_along(cross)))
    assert leaks == extra_pairs(cross.mask(), shifted)
    by_head = ga.algebra.per_head(patterns.window(T, 2), patterns.sinks(T, 1))
    verdict = audit(layer, by_head, SHAPE)
    assert (verdict.exact, verdict.allowed) == (True, patterns.window(T, 2) | patterns.sinks(T, 1) | LOOPS)


class Tokens(nn.Module):
    """Token and position embeddings and a block; the last id may scale all outputs."""

    def __init__(self, mask: Tensor, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.place = nn.Embedding(20, WIDTH, padding_idx=0), nn.Embedding(T, WIDTH)
        self.block, self.scaled = Block(mask), scaled

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        state = self.word(ids) + self.place(torch.arange(ids.shape[1]))
        return {"hidden": state, "logits": self.block(state) * (1 + self.scaled * ids[:, -1:, None])}


def test_token_ids_are_audited_from_their_embedding():
    """The embedding of the ids is passed by name or as a module, or it is the only one."""
    module = Tokens(BEFORE)
    for embedding in ("word", module.word):
        assert audit(module, CAUSAL, (T,), embedding=embedding).exact
    assert audit(nn.Embedding(20, WIDTH), LOOPS, (T,)).exact
    assert leak_pairs(audit(Tokens(ALL), CAUSAL, (T,), embedding="word")) == AHEAD
    # An id that acts without its embedding has no gradient.
    verdict = audit(Tokens(BEFORE, scaled=True), CAUSAL, (T,), embedding="word")
    assert leak_pairs(verdict) == {(T - 1, dst) for dst in range(T - 1)}
    assert not any("jacobian" in leak.witnesses for leak in verdict.leaks)


def test_the_module_is_left_untouched():
    module = nn.Sequential(over_time_axis(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    module(torch.randn(3, T, WIDTH)).sum().backward()
    tensors, gradients = copy.deepcopy(module.state_dict()), [p.grad.clone() for p in module.parameters()]
    state = torch.get_rng_state()
    with torch.no_grad():
        audit(module, CAUSAL, SHAPE)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all(torch.equal(value, tensors[name]) for name, value in module.state_dict().items())
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, gradient)
    with torch.inference_mode():
        module, graph, expected = PLANTED["mask off by one"]
        assert leak_pairs(audit(module, graph, SHAPE)) == expected
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_kernel_of_one_dtype_is_audited_in_it():
    module = Apply(lambda x: Attention(BEFORE)(x))
    with pytest.raises(RuntimeError, match="same dtype"):
        audit(module, CAUSAL, SHAPE)
    assert audit(module, CAUSAL, SHAPE, dtype=torch.float32).exact


def test_random_numbers_are_the_same_in_every_pass():
    """A pass holds one sample if the caller asks for that, or if copies of an input would differ."""

    def count_passes(module, graph, samples=32):
        passes = []
        verdict = audit(module, graph, SHAPE, samples=samples, watch=lambda *counts: passes.append(counts))
        assert [count for count, _ in passes] == list(range(1, len(passes) + 1))
        return verdict, len(passes)

    verdict, passes = count_passes(nn.Sequential(Block(BEFORE), nn.Dropout(0.3)).train(), CAUSAL)
    assert verdict.ok
    module, graph, _ = PLANTED["documents crossing"]
    (batch, batch_passes), (single, single_passes) = (count_passes(module, graph, n) for n in (32, 1))
    assert batch.leaks == count_passes(module, graph)[0].leaks
    assert leak_pairs(single) == leak_pairs(batch)
    # Single samples need four passes for each token at each of two inputs.
    assert min(passes, single_passes) >= 8 * T > batch_passes


def test_use_graph_holds_for_the_copy_that_is_audited():
    """Afterwards, the override of ``use_graph`` is unchanged."""
    needs("transformers")
    importlib.import_module("gnn_attention.huggingface")
    model = importlib.import_module("support.hf_models").build("llama")
    graph = patterns.window(12, 3) | patterns.sinks(12, 1)
    model.set_attn_implementation("gnn_attention")
    with ga.use_graph(model, graph):
        (override,) = importlib.import_module("gnn_attention.huggingface._contexts").ACTIVE_CONTEXTS.get()
        state = dict(override.names), dict(override.layer_indices)
        assert audit(model, graph, (12,), layers=2).exact
        assert (override.names, override.layer_indices) == state
    unreached = (patterns.causal(12) - graph @ graph).edge_index
    leaks = audit(model, graph, (12,), layers=2).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == set(map(tuple, unreached.T.tolist()))


ENDLESS, IDS = nn.Identity(), {"module": Tokens(BEFORE), "input_shape": (T,)}
ENDLESS.endless = (x for x in ())
OUR_LAYER = MessagePassingAttention(StandardHeads(4, 1))
THREE = Apply(lambda x: x[:, :3])
WRONG = [
    ({"input_shape": (7, 4)}, ValueError, r"input_shape must be .* with T = 8, got \(7, 4\)"),
    ({"graph": patterns.causal(5000)}, ValueError, "1 to 4096 tokens"),
    ({"graph": ga.algebra.per_sample(CAUSAL, LOOPS)}, ValueError, r"varies by sample: audit graph\.select"),
    ({"module": THREE, "graph": patterns.cross(3, 8), "layers": 2}, ValueError, "layers must be 1 for"),
    ({"module": nn.Flatten()}, ValueError, r"floating states \[B, dst, ...\].*got shape \[1, 32\]"),
    ({"module": Apply(lambda x: x.log())}, ValueError, "returns NaN or inf .* first at receiver"),
    ({"module": OUR_LAYER, "graph": [CAUSAL]}, ValueError, "takes one g, got a list of graphs"),
    ({"tolerance": -1.0}, ValueError, "tolerance must be a fraction"),
    ({"dtype": torch.float16}, ValueError, "torch.float64 or torch.float32, got torch.float16"),
    ({"module": ENDLESS}, NotImplementedError, "Identity cannot be copied"),
    ({"inputs": torch.zeros(SHAPE)}, ValueError, r"floating states in tensors \[B, .*8, 4.*shape \[8, 4\]"),
    ({"inputs": torch.zeros(1, *SHAPE).long()}, ValueError, "must be floating states in .*got .*int64"),
    ({**IDS, "embedding": "word", "inputs": torch.zeros(1, T)}, ValueError, "integer token ids in .*float32"),
    ({**IDS, "embedding": "word", "inputs": torch.full((1, T), -1)}, IndexError, "got -1 .. -1"),
    ({**IDS, "module": nn.Linear(3, 3)}, ValueError, "the module has 0 embeddings"),
    (IDS, ValueError, r"2 embeddings .'word', 'place'.*: pass embedding='name'"),
    ({**IDS, "embedding": "place"}, ValueError, "not called with the token ids"),
]


def test_errors():
    defaults = {"module": nn.Identity(), "graph": CAUSAL, "input_shape": SHAPE}
    assert_refusals((partial(audit, **defaults | options), error, match) for options, error, match in WRONG)
