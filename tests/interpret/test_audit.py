"""The audit: it finds what is planted, passes what is clean, and leaves everything as it was."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from support import covering
from support.extras import needs
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention.__main__ import main
from gnn_attention.huggingface import _overrides
from gnn_attention.interpret.audit import audit, pytest_plugin
from gnn_attention.interpret.audit.detectors import groups_of
from gnn_attention.interpret.audit.runner import Runner, isolated, other_ids
from gnn_attention.verify.measure import EXACT

T, WIDTH = 8, 4
SHAPE = (T, WIDTH)
CAUSAL = patterns.causal(T)
DOCUMENTS = patterns.documents([3, 5])
LOOPS = patterns.self_loops(T)


class Attention(nn.Module):
    """Single-head attention of eight lines, whose mask and softmax can be got wrong."""

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
            weights = logits.softmax(-1 if self.weights == "softmax, then mask" else -2) * self.mask
        return self.out(weights @ v)


class Block(nn.Module):
    """Attention and an MLP with residuals; ``self.norm`` may mix what it must not."""

    def __init__(self, mask: Tensor, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention = norm or nn.Identity(), Attention(mask)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Linear(nn.Module):
    """``y[dst] = sum_src M[dst, src] x[src] W``: information flows exactly along M."""

    def __init__(self, flows: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.flows, self.W = flows * torch.randn(flows.shape), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.flows @ x @ self.W


class Reads(nn.Module):
    """A module made of a function, and perhaps of another module that the function calls."""

    def __init__(self, function, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.inner is None else self.function(self.inner, x)


def over_time(inner, drop=0):
    """A module of ``[B, width, T]`` on ``[B, T, width]``, without the last ``drop`` that a padding added."""
    return Reads(lambda module, x: module(x.mT).mT[:, : x.shape[1]] if drop else module(x.mT).mT, inner)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def with_mask(mask):
    # True = blocked
    return lambda module, x: module(x, mask=~mask)


def pairs(verdict):
    """The leaks as a set of (src, dst)."""
    return {(leak.src, leak.dst) for leak in verdict.leaks}


def off_graph(flows, graph):
    """The pairs of a mask that are neither edges nor self loops."""
    extra = flows & ~graph.mask() & ~torch.eye(len(flows), dtype=torch.bool)
    return {(src, dst) for dst, src in extra.nonzero().tolist()}


ALL = torch.ones(T, T, dtype=torch.bool)
AHEAD = off_graph(ALL, CAUSAL)
BEFORE = CAUSAL.mask()
UNPADDED = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (src >= 2), T, name="unpadded")
NEXT = {(dst + 1, dst) for dst in range(T - 1)}
BATCH_NORM = "BatchNorm over time"
PLANTED = {
    "mask off by one": (Attention(ALL.tril(1)), CAUSAL, off_graph(ALL.tril(1), CAUSAL)),
    "mask transposed": (Attention(BEFORE.T), CAUSAL, off_graph(BEFORE.T, CAUSAL)),
    "mask forgotten": (Attention(ALL), CAUSAL, AHEAD),
    "padding seen": (Attention(BEFORE), UNPADDED, {(s, d) for s in range(2) for d in range(s + 1, T)}),
    "documents crossing": (Attention(BEFORE), DOCUMENTS, off_graph(BEFORE, DOCUMENTS)),
    "normaliser over all": (Attention(BEFORE, "softmax, then mask"), CAUSAL, AHEAD),
    "softmax over receivers": (Attention(BEFORE, "softmax over receivers"), CAUSAL, AHEAD),
    "convolution": (over_time(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), CAUSAL, NEXT),
    BATCH_NORM: (over_time(nn.BatchNorm1d(WIDTH)), CAUSAL, AHEAD),
    "LayerNorm over tokens": (nn.LayerNorm([T, WIDTH]), CAUSAL, AHEAD),
    "GRU both ways": (nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), CAUSAL, AHEAD),
    "one pair": (Linear(BEFORE | (torch.arange(T * T).view(T, T) == 2 * T + 6)), CAUSAL, {(6, 2)}),
}
# the difference of the two graphs in words
WORDS = {
    "mask transposed": "the second is the first transposed",
    "mask off by one": "the first is the second with the edges src <= dst alone",
    "documents crossing": "the second has 3 more senders per receiver from receiver 3 on",
    BATCH_NORM: "samples of a batch influence one another",
}


@pytest.mark.parametrize("name", PLANTED)
def test_finds_exactly_what_is_planted(name):
    module, graph, expected = PLANTED[name]
    verdict = audit(module, graph, (T, 3 if isinstance(module, Linear) else WIDTH))
    assert pairs(verdict) == expected
    assert not verdict.ok
    assert not verdict.exact
    assert {leak.witnesses[:2] for leak in verdict.leaks} == {("jacobian", "perturbation")}
    assert verdict.crosses_samples == (name == BATCH_NORM)
    assert str(verdict).startswith(f"{graph.name}, 1 layer: {len(expected)} leak")
    assert WORDS.get(name, "") in str(verdict)


CLEAN = {
    "attention": (Attention(BEFORE), CAUSAL, None),
    "documents": (Attention(DOCUMENTS.mask()), DOCUMENTS, None),
    "blocks": (Model(Block(BEFORE), Block(BEFORE)), CAUSAL, None),
    "BatchNorm in eval mode": (over_time(nn.BatchNorm1d(WIDTH)).eval(), LOOPS, None),
    "BatchNorm of each token": (nn.BatchNorm1d(T).eval(), LOOPS, None),
    "LayerNorm": (nn.LayerNorm(WIDTH), LOOPS, None),
    "causal convolution": (over_time(nn.Conv1d(WIDTH, WIDTH, 3, padding=2), 2), patterns.window(T, 3), None),
    "GRU": (nn.GRU(WIDTH, WIDTH, batch_first=True), CAUSAL, None),
    "LSTM": (nn.LSTM(WIDTH, WIDTH, batch_first=True), CAUSAL, None),
    "TransformerEncoder": (encoder(), CAUSAL, with_mask(BEFORE)),
    "norm first": (encoder(norm_first=True), DOCUMENTS, with_mask(DOCUMENTS.mask())),
    "MultiheadAttention": (
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        CAUSAL,
        lambda module, x: module(x, x, x, attn_mask=~BEFORE),
    ),
    "torch_geometric": (GCNConv(WIDTH, WIDTH), patterns.watts_strogatz(T, 2, 0.5), None),
    "writes into its input": (Reads(lambda x: x.mul_(2)), LOOPS, None),
}


@pytest.mark.parametrize("name", CLEAN)
def test_passes_what_is_clean(name):
    module, graph, call = CLEAN[name]
    verdict = audit(module, graph, SHAPE, call=call)
    assert verdict.exact, verdict
    assert verdict.flow == verdict.allowed == (graph | LOOPS)
    assert "exact" in str(verdict)


@pytest.mark.parametrize(
    ("backend", "form", "graph"),
    covering.pairwise(
        backend=[None, "reference", "dense", "tiles", "rows", "mixed", "auto"],
        form=[lambda h: h, FactoredHeads.of, MergedHeads.of],
        graph=[patterns.window(T, 3) - LOOPS, patterns.tree([-1, 0, 0, 1, 1, 2, 2, 5]).T],
    ),
)
def test_our_layer_is_exact_on_every_backend(backend, form, graph):
    """A non-edge carries nothing, not even a NaN: docs/guide.md, semantics 3, from outside."""
    layer = MessagePassingAttention(form(StandardHeads(WIDTH, 2, bias=True)), backend=backend)
    verdict = audit(layer, graph, SHAPE)
    assert verdict.exact, verdict
    assert verdict.poisoned == ()


@pytest.mark.parametrize("seed", range(6))
def test_flow_is_the_sparsity_of_the_module(seed):
    """For any flow M and any declared graph D the leaks are M - D, the unused pairs D - M."""
    rates = torch.tensor([0.1, 0.04])[:, None, None]
    flows, allowed = torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(seed)) < rates
    graph = ga.convert.from_mask(allowed)
    if seed % 3 == 0:  # one leak among many clean pairs, which groups of receivers must not hide
        flows, leak = allowed.clone(), (~allowed).nonzero()[seed]
        flows[*leak] = True
    verdict = audit(Linear(flows), graph, (30, 3))
    unused = allowed & ~flows & ~torch.eye(30, dtype=torch.bool)
    assert torch.equal(verdict.flow.mask(), flows)
    assert pairs(verdict) == off_graph(flows, graph)
    assert set(verdict.unused) == {(src, dst) for dst, src in unused.nonzero().tolist()}


def gradients(module, samples):
    with isolated(module):
        runner = Runner(module, lambda module, x: module(x), (8, 3), 8, None, samples, 0)
        return runner.gradients(runner.draw(0), torch.ones(1, 8, dtype=torch.bool), 0)[0]


def test_influences_do_not_cancel_in_a_cotangent():
    # opposite signs, which a cotangent of ones would add up to 0
    module = Linear(torch.zeros(8, 8))
    module.flows[1, 5], module.flows[2, 5] = 1.0, -1.0
    found = gradients(module, 32)
    assert found[5] > 1e-3
    assert found.count_nonzero() == 1
    assert pairs(audit(module, LOOPS, (8, 3))) == {(5, 1), (5, 2)}
    # a gradient that is orthogonal to the input, and so to cotangents drawn like inputs
    assert gradients(Reads(lambda x: x / x.norm(dim=-1, keepdim=True)), 1).min() > 1e-3


def test_far_fewer_passes_than_receivers():
    graph = patterns.window(256, 8)
    verdict = audit(Linear(graph.mask()), graph, (256, 3), witnesses=["jacobian"])
    assert verdict.exact
    assert verdict.probes < 2 * 40
    assert verdict.backward_passes <= 4
    causal = audit(Linear(patterns.causal(64).mask()), patterns.causal(64), (64, 3), witnesses=["jacobian"])
    assert (causal.exact, causal.probes, causal.backward_passes) == (True, 128, 4)


GROUPED = [patterns.window(40, 4), patterns.documents([5] * 8), patterns.self_loops(33)]
GROUPED += [patterns.sinks(40, 1), patterns.cross(5, 9), patterns.expander(48, 2, causal=False)]


@pytest.mark.parametrize("graph", GROUPED, ids=lambda graph: graph.name)
def test_every_pair_is_isolated_by_a_group(graph):
    """For each (dst, src) one group with dst in it and no other member that attends to src."""
    allowed = graph.mask()
    settled, family = torch.zeros_like(allowed), groups_of(allowed)
    for group in family:
        others = group.int() @ allowed.int() - allowed.int()
        settled |= (others == 0) & group[:, None]
    assert bool(settled.all())
    assert int(allowed.sum(0).max()) <= len(family) <= graph.num_dst


def test_each_detector_sees_what_another_cannot():
    # where the largest number stands scales the whole sequence: no derivative, but information
    module = Reads(lambda x: x * (1 + x.argmax(1, keepdim=True)))
    assert audit(module, LOOPS, (T, 1), witnesses=["jacobian"]).exact
    assert {leak.witnesses for leak in audit(module, LOOPS, (T, 1)).leaks} == {("perturbation",)}
    # 1e-30 is lost next to 1, and yet it is a dependence
    small = torch.zeros(T, T)
    small[2, 5] = 1e-30
    verdict = audit(Reads(lambda x: x + small.double() @ x), LOOPS, SHAPE)
    (leak,) = verdict.leaks
    assert (leak.src, leak.dst, leak.witnesses) == (5, 2, ("jacobian", "nan"))
    assert 0 < leak.size < 1e-28
    assert "tolerance" in str(verdict)
    # a leak whose path no gradient can follow
    verdict = audit(Model(Block(BEFORE), Reads(lambda x: x.detach().flip(1))), CAUSAL, SHAPE)
    assert {leak.witnesses[0] for leak in verdict.leaks} == {"perturbation"}
    assert {leak.layer for leak in verdict.leaks} == {"blocks.1"}
    # torch's dense attention multiplies a masked NaN by zero: no information
    module, graph, call = CLEAN["TransformerEncoder"]
    verdict = audit(module, graph, SHAPE, call=call)
    assert verdict.exact
    assert set(verdict.poisoned) == {(src, dst) for src in range(T) for dst in range(src)}
    assert "NaN alone crosses 28 pairs, first 1 -> 0" in str(verdict)


def test_an_fft_needs_a_tolerance():
    kernel = torch.randn(T, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def by_fft(x):
        transformed = torch.fft.rfft(x, 2 * T, dim=1) * torch.fft.rfft(kernel, 2 * T, dim=0)
        return torch.fft.irfft(transformed, 2 * T, dim=1)[:, :T]

    assert audit(Reads(by_fft), CAUSAL, SHAPE, tolerance=EXACT).exact
    assert not audit(Reads(by_fft), CAUSAL, SHAPE).ok


def test_samples_that_influence_one_another():
    verdict = audit(nn.BatchNorm1d(T), LOOPS, SHAPE)
    assert verdict.crosses_samples
    assert not verdict.leaks
    assert not verdict.ok
    assert "samples influence one another" in str(verdict)
    time_first = nn.GRU(WIDTH, WIDTH)
    assert "[T, B, width]" in str(audit(time_first, CAUSAL, SHAPE))
    transposed = audit(time_first, CAUSAL, SHAPE, call=lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1))
    assert transposed.exact


def test_layers_are_counted_or_given():
    """Two layers of a window of 3 reach 5 tokens; counted for our layers, given for others."""
    window = patterns.window(T, 3)
    blocks = Model(Block(window.mask()), Block(window.mask()))
    shallow = audit(blocks, window, SHAPE)
    assert pairs(shallow) == off_graph((window**2).mask(), window)
    seems = "the module seems to have 2 layers: if each may use the graph nothing leaks, say layers=2"
    assert seems in str(shallow)
    deep = audit(blocks, window, SHAPE, layers=2)
    assert deep.exact
    assert deep.allowed == patterns.window(T, 5)
    assert audit(blocks, window, SHAPE, layers=3).unused[0] == (0, 5)
    model = ga.model.LanguageModel(ga.model.Config(16, 8, 3, 2, 4, 8)).eval()
    verdict = audit(model, window, (T,))
    assert (verdict.layers, verdict.exact) == (3, True)


def test_the_path_of_a_leak_and_where_it_comes_in():
    window, wide = patterns.window(12, 2), patterns.window(12, 3)
    model = Model(Block(window.mask()), Block(wide.mask()), Block(window.mask()))
    verdict = audit(model, window, (12, WIDTH), layers=3)
    assert pairs(verdict) == {(src, src + 4) for src in range(8)}
    for leak in verdict.leaks:
        src = leak.src
        assert leak.path == (src, src + 1, src + 3, src + 4)
    text = "0 -> 4 through 0 -> 1 -> 3 -> 4, comes in at blocks.1.attention (seen by jacobian,"
    assert str(verdict.leaks[0]).startswith(text)
    # where every block is too wide, one undeclared hop and two edges rather than two undeclared hops
    verdict = audit(Model(*(Block(wide.mask()) for _ in range(3))), window, (12, WIDTH), layers=3)
    (path,) = [leak.path for leak in verdict.leaks if (leak.src, leak.dst) == (0, 4)]
    assert sorted(b - a for a, b in pairwise(path)) == [1, 1, 2]


@pytest.mark.parametrize("name", ["LayerNorm over tokens", "convolution"])
def test_the_innermost_part_is_named(name):
    """Not the block, nor what comes after: the part that was given clean states and returned others."""
    norm = PLANTED[name][0]
    verdict = audit(Model(Block(BEFORE), Block(BEFORE, norm)), CAUSAL, SHAPE)
    names = {leak.layer for leak in verdict.leaks}
    assert names <= {"blocks.1.norm", "blocks.1.norm.inner"}
    assert len(names) == 1
    assert "say layers" not in str(verdict)
    alone = audit(nn.Sequential(nn.Identity(), nn.LayerNorm([T, WIDTH])), CAUSAL, SHAPE)
    assert {leak.layer for leak in alone.leaks} == {"1"}


def test_attention_is_the_only_step_between_tokens():
    """Seed S4.3: the Jacobian of every other part of a model is block-diagonal."""
    model, _ = ga.model.load_trained()
    parts = (model.norm, model.unembedding, *model.blocks[0].children())
    local = [part for part in parts if part is not model.layers[0]]
    assert len(local) == 5
    for part in local:
        assert audit(part, patterns.self_loops(6), (6, model.config.width)).exact
    assert audit(model.blocks[1], patterns.window(6, 2), (6, model.config.width)).exact


def test_unused_pairs_and_their_paths():
    window = patterns.window(T, 3)
    model = Model(Block(patterns.window(T, 2).mask()), Block(window.mask()))
    verdict = audit(model, window, SHAPE, layers=2)
    assert verdict.ok
    assert not verdict.exact
    assert set(verdict.unused) == {(src, src + 4) for src in range(T - 4)}
    assert (verdict.way(0, 4), verdict.way(4, 0)) == ([0, 2, 4], None)
    assert "no leak, 4 of 22 allowed pairs unused" in str(verdict)
    assert "unused, first: 0 -> 2 -> 4" in str(verdict)


def test_graphs_of_other_shapes():
    """Cross-attention, decoding rows and graphs that differ by head."""
    cross = patterns.cross(3, 5)
    queries = torch.randn(3, WIDTH)
    layer = MessagePassingAttention(StandardHeads(WIDTH, 2), backend="dense")

    def along(graph):
        return lambda module, x: module((x, queries.to(x).expand(len(x), -1, -1)), graph)

    assert audit(layer, cross, (5, WIDTH), call=along(cross)).exact
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src == dst + 1, 3, 5)
    verdict = audit(layer, graph, (5, WIDTH), call=along(cross))
    assert pairs(verdict) == {(src, dst) for dst in range(3) for src in range(5)} - {(1, 0), (2, 1), (3, 2)}
    assert audit(layer, graph, (5, WIDTH), call=along(graph)).way(1, 0) == [1, 0]
    by_head = ga.algebra.per_head(patterns.window(T, 2), patterns.sinks(T, 1))
    verdict = audit(layer, by_head, SHAPE)
    assert verdict.exact
    assert verdict.allowed == patterns.window(T, 2) | patterns.sinks(T, 1) | LOOPS


class Tokens(nn.Module):
    """Token and position embeddings and a block; the last id itself may scale all outputs."""

    def __init__(self, mask: Tensor, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.place = nn.Embedding(20, WIDTH, padding_idx=0), nn.Embedding(T, WIDTH)
        self.block, self.scaled = Block(mask), scaled

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        state = self.word(ids) + self.place(torch.arange(ids.shape[1]))
        scale = 1 + ids[:, -1:, None] if self.scaled else 1
        return {"hidden": state, "logits": self.block(state) * scale}


def test_token_ids_are_audited_from_their_embedding():
    """The table that gets the ids is found; it can be named too, or be given. No hook stays."""
    module = Tokens(BEFORE)
    for embedding in (None, "word", module.word):
        assert audit(module, CAUSAL, (T,), embedding=embedding).exact
    assert pairs(audit(Tokens(ALL), CAUSAL, (T,))) == AHEAD
    with isolated(module):
        runner = Runner(module, lambda module, ids: module(ids), (T,), T, "word", 32, 0)
        runner.run(runner.draw(0))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in runner.module.modules())
    # another id is another, and not the padding's
    table, ids = nn.Embedding(3, WIDTH, padding_idx=0), torch.arange(3)
    assert other_ids(ids, table).tolist() == [1, 2, 1]
    # what the last id decides without its embedding has no gradient
    leaks = audit(Tokens(BEFORE, scaled=True), CAUSAL, (T,)).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(T - 1, dst) for dst in range(T - 1)}
    assert not any("jacobian" in leak.witnesses for leak in leaks)


def test_the_module_is_left_untouched():
    module = nn.Sequential(over_time(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    module(torch.randn(3, T, WIDTH)).sum().backward()
    before, gradients = copy.deepcopy(module), [parameter.grad.clone() for parameter in module.parameters()]
    state = torch.get_rng_state()
    with torch.no_grad():
        audit(module, CAUSAL, SHAPE)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    for (name, value), other in zip(module.state_dict().items(), before.state_dict().values(), strict=True):
        assert value.dtype == other.dtype, name
        assert torch.equal(value, other), name
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, gradient)
    with torch.inference_mode():
        module, graph, expected = PLANTED["mask off by one"]
        assert pairs(audit(module, graph, SHAPE, witnesses="jacobian")) == expected
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_dtypes():
    """The copy is in float64, plain attributes included; in float32 where a kernel needs it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module = Attention(BEFORE).to(dtype)
        module.table = torch.zeros(T, T, dtype=dtype)
        assert audit(module, CAUSAL, SHAPE).exact
        assert module.table.dtype == module.qkv.weight.dtype == dtype

    def single(x):
        if x.dtype != torch.float32:
            raise RuntimeError("no such kernel")
        return Attention(BEFORE)(x)

    with pytest.raises(RuntimeError, match="no such kernel"):
        audit(Reads(single), CAUSAL, SHAPE)
    assert audit(Reads(single), CAUSAL, SHAPE, dtype=torch.float32).exact


def test_what_a_module_writes_into_its_input_is_followed():
    leaks = audit(Reads(lambda x: x.add_(x.flip(1))), LOOPS, SHAPE).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(T - 1 - dst, dst) for dst in range(T)}


def test_random_numbers_are_the_same_in_every_pass():
    verdict = audit(nn.Sequential(Block(BEFORE), nn.Dropout(0.3)).train(), CAUSAL, SHAPE)
    assert verdict.ok
    assert verdict.backward_passes == verdict.probes
    module, graph, _ = PLANTED["documents crossing"]
    together, again, alone = (audit(module, graph, SHAPE, samples=samples) for samples in (32, 32, 1))
    assert together.leaks == again.leaks
    assert pairs(alone) == pairs(together)
    assert alone.backward_passes >= alone.probes > together.backward_passes


class TwoTables(nn.Module):
    """The sum of two embeddings of the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, WIDTH), nn.Embedding(12, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


ENDLESS, IDS = nn.Identity(), {"input_shape": (T,)}
ENDLESS.endless = (x for x in ())
OUR_LAYER = MessagePassingAttention(StandardHeads(4, 1))
THREE = Reads(lambda x: x[:, :3])
WRONG = [
    ({"input_shape": (7, 4)}, ValueError, r"input_shape must be .* T of .*causal\(8\).*; got \(7, 4\)"),
    ({"input_shape": ()}, ValueError, "input_shape must be"),
    ({"module": lambda x: x}, TypeError, "module must be a Module, got .* of type function"),
    ({"graph": "causal"}, TypeError, "graph must be a TokenGraph"),
    ({"graph": []}, TypeError, "graph must be a TokenGraph"),
    ({"graph": patterns.causal(5000)}, ValueError, "1 to 4096 tokens"),
    ({"graph": [CAUSAL, patterns.causal(9)]}, ValueError, "of the same tokens"),
    ({"graph": ga.algebra.per_sample(CAUSAL, LOOPS)}, ValueError, "differs by sample: audit one of them"),
    ({"module": THREE, "graph": patterns.cross(3, 8), "layers": 2}, ValueError, "layers must be 1 for"),
    ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
    ({"module": nn.Flatten()}, ValueError, r"floating states \[B, dst, ...\].*got shape \[1, 32\]"),
    ({"module": Reads(lambda x: None)}, ValueError, "got NoneType"),
    ({"module": Reads(lambda x: x.log())}, ValueError, "returns NaN or inf .* first at receiver"),
    ({"module": OUR_LAYER, "graph": [CAUSAL]}, ValueError, "takes one g, got a list of graphs"),
    ({"call": 3}, TypeError, "call must be a function"),
    ({"witnesses": ["nan"]}, ValueError, "NaN alone proves nothing"),
    ({"witnesses": ["gradient"]}, ValueError, "witnesses must be one of 'jacobian'"),
    ({"samples": 0}, ValueError, "samples must be at least 1"),
    ({"tolerance": -1.0}, ValueError, "tolerance must be a share"),
    ({"dtype": torch.float16}, ValueError, "torch.float64 or torch.float32, got torch.float16"),
    ({"module": ENDLESS}, NotImplementedError, "Identity cannot be copied"),
    ({"module": TwoTables(), **IDS}, ValueError, r"2 of .* \['first', 'second'\].*embedding='name'"),
    ({"module": nn.Linear(3, 3), **IDS}, ValueError, "0 of the module's embeddings"),
    ({"module": Tokens(BEFORE), **IDS, "embedding": "words"}, ValueError, "or its name, got 'words'"),
    ({"module": Tokens(BEFORE), **IDS, "embedding": "block"}, ValueError, "embedding must have a weight"),
    ({"module": Tokens(BEFORE), **IDS, "embedding": "place"}, ValueError, "not called with the token ids"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG)
def test_errors(options, error, match):
    with pytest.raises(error, match=match):
        audit(**{"module": nn.Identity(), "graph": CAUSAL, "input_shape": SHAPE} | options)


@pytest.mark.slow
def test_the_fixture_in_a_run_of_pytest(tmp_path):
    (tmp_path / "test_them.py").write_text(
        "import torch\nfrom gnn_attention import patterns\nmodule, inputs = torch.nn.Identity(), (6, 3)\n\n"
        "def test_unused(audited):\n    audited(module, patterns.causal(6), inputs)\n\n"
        "def test_exact(audited):\n    audited(module, patterns.causal(6), inputs, exact=True)\n\n"
        "def test_leaky(audited):\n    audited(torch.nn.LayerNorm([6, 3]), patterns.causal(6), inputs)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", pytest_plugin.__name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "2 failed, 1 passed" in done.stdout
    assert "15 of 15 allowed pairs unused" in done.stdout
    assert "causal(6), 1 layer: 15 leaks" in done.stdout


class TestCommand:
    """``gnn-attention audit``."""

    def test_exit_code_and_json(self, capsys, tmp_path):
        assert main(["audit", "window(12, 3) | sinks(12, 1)"]) == 0
        assert capsys.readouterr().out.startswith("window(12, 3) | sinks(12, 1), 2 layers: exact")
        assert main(["audit", "window(10, 2)", "--run-over", "window(10, 3)", "--json"]) == 1
        printed = capsys.readouterr()
        record = json.loads(printed.out)
        assert (record["ok"], record["exact"], record["layers"]) == (False, False, 2)
        assert {(leak["src"], leak["dst"], tuple(leak["path"])) for leak in record["leaks"]} >= {
            (0, 3, (0, 1, 3))
        }
        assert "leaks" in printed.err
        file = tmp_path / "verdict.json"
        deep = ["--run-over", "causal(10)", "--layers", "9", "--json", str(file)]
        assert main(["audit", "window(10, 2)", *deep]) == 0
        assert json.loads(file.read_text())["exact"] is True
        ga.model.save(tmp_path / "mine.safetensors", *ga.model.load_trained(), {})
        assert main(["audit", "causal(6)", "--model", str(tmp_path / "mine.safetensors")]) == 0

    def test_wrong_arguments(self, capsys):
        for arguments, words in (
            (["wndow(8, 2)"], "wndow"),
            (["causal(600)"], "at most 512 tokens"),
            (["causal(6)", "--model", "no_such_file"], "no_such_file"),
            (["causal(6)", "--json", "no/such/file"], "expected a folder that exists"),
            (["causal(6)", "--run-over", "causal(7)"], "does not fit"),
        ):
            assert main(["audit", *arguments]) == 2
            assert words in capsys.readouterr().err


def test_a_block_of_use_graph_holds_for_the_copy_that_is_audited():
    """And for it alone while it is audited: what the block knows is as it was afterwards."""
    needs("transformers")
    importlib.import_module("gnn_attention.huggingface")
    model = importlib.import_module("support.hf_models").build("llama")
    graph = patterns.window(12, 3) | patterns.sinks(12, 1)
    model.set_attn_implementation("gnn_attention")
    with ga.use_graph(model, graph):
        (use,) = _overrides.uses_now()
        known = dict(use.names), dict(use.numbers)
        assert audit(model, graph, (12,), layers=2, witnesses="jacobian").exact
        assert (use.names, use.numbers) == known
    beyond = (patterns.causal(12) - graph @ graph).edge_index.T.tolist()
    assert pairs(audit(model, graph, (12,), layers=2, witnesses="jacobian")) == set(map(tuple, beyond))
