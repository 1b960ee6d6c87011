"""The auditor: it finds what is planted, passes what is clean, and leaves everything as it was."""

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
from gnn_attention.interpret.audit.probe_groups import groups
from gnn_attention.interpret.audit.runner import Runner, isolated
from gnn_attention.verify.measure import EXACT

T, WIDTH = 8, 4
CAUSAL = patterns.causal(T)
DOCUMENTS = patterns.documents([3, 5])


class Attention(nn.Module):
    """Single-head attention of eight lines, whose mask and softmax can be got wrong."""

    def __init__(self, mask: Tensor, weights: str = "masked softmax", width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
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
        self.norm = norm or nn.Identity()
        self.attention, self.mlp = (
            Attention(mask),
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)),
        )

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


class OverTime(nn.Module):
    def __init__(self, inner: nn.Module, drop: int = 0) -> None:
        super().__init__()
        self.inner, self.drop = inner, drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.mT).mT
        return y[:, : y.shape[1] - self.drop]


class Linear(nn.Module):
    """``y[dst] = sum_src M[dst, src] x[src] W``: information flows exactly along M."""

    def __init__(self, flows: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.flows, self.W = flows * torch.randn(flows.shape), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.flows @ x @ self.W


class Reads(nn.Module):
    """A module made of a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def encoder(layers=2, **options):
    """Torch's own encoder, in eval mode."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def with_mask(mask):
    """How torch's encoder is told of a mask: True = blocked."""
    return lambda module, x: module(x, mask=~mask)


def pairs(verdict):
    """The leaks as a set of (src, dst)."""
    return {(leak.src, leak.dst) for leak in verdict.leaks}


def off_graph(flows, graph):
    """The pairs of a mask that are neither edges nor self loops."""
    extra = flows & ~graph.mask() & ~torch.eye(len(flows), dtype=torch.bool)
    return {(src, dst) for dst, src in extra.nonzero().tolist()}


EVERYONE = torch.ones(T, T, dtype=torch.bool)
NO_PADDING = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (src >= 2), T, name="causal without padding"
)
PLANTED = {
    "mask off by one": (Attention(EVERYONE.tril(1)), CAUSAL, off_graph(EVERYONE.tril(1), CAUSAL)),
    "mask transposed": (Attention(CAUSAL.mask().T), CAUSAL, off_graph(CAUSAL.mask().T, CAUSAL)),
    "mask forgotten": (Attention(EVERYONE), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "padding seen": (Attention(CAUSAL.mask()), NO_PADDING, {(src, dst) for src in range(2) for dst in range(src + 1, T)}),
    "documents crossing": (Attention(CAUSAL.mask()), DOCUMENTS, off_graph(CAUSAL.mask(), DOCUMENTS)),
    "normaliser hears all": (Attention(CAUSAL.mask(), "softmax, then mask"), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "softmax over receivers": (Attention(CAUSAL.mask(), "softmax over receivers"), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "convolution sees the future": (OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), CAUSAL, {(d + 1, d) for d in range(T - 1)}),
    "BatchNorm over time": (OverTime(nn.BatchNorm1d(WIDTH)), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "LayerNorm over tokens": (nn.LayerNorm([T, WIDTH]), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "GRU both ways": (nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), CAUSAL, off_graph(EVERYONE, CAUSAL)),
    "one pair": (Linear(CAUSAL.mask() | (torch.arange(T * T).view(T, T) == 2 * T + 6)), CAUSAL, {(6, 2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_finds_exactly_what_is_planted(name):
    """Every planted leak by its pair, and no other; the reverse graph would have hidden none of them."""
    module, graph, expected = PLANTED[name]
    verdict = audit(module, graph, (T, 3 if isinstance(module, Linear) else WIDTH))
    assert pairs(verdict) == expected
    assert not verdict.ok
    assert not verdict.exact
    assert {leak.witnesses[:2] for leak in verdict.leaks} == {("jacobian", "perturbation")}
    assert verdict.crosses_samples == (name == "BatchNorm over time")
    assert str(verdict).startswith(f"{graph.name}, 1 layer: {len(expected)} leak")


CLEAN = {
    "attention": (Attention(CAUSAL.mask()), CAUSAL, None),
    "documents": (Attention(DOCUMENTS.mask()), DOCUMENTS, None),
    "blocks": (Model(Block(CAUSAL.mask()), Block(CAUSAL.mask())), CAUSAL, None),
    "BatchNorm in eval mode": (OverTime(nn.BatchNorm1d(WIDTH)).eval(), patterns.self_loops(T), None),
    "LayerNorm": (nn.LayerNorm(WIDTH), patterns.self_loops(T), None),
    "causal convolution": (
        OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=2), drop=2),
        patterns.window(T, 3),
        None,
    ),
    "GRU": (nn.GRU(WIDTH, WIDTH, batch_first=True), CAUSAL, None),
    "LSTM": (nn.LSTM(WIDTH, WIDTH, batch_first=True), CAUSAL, None),
    "TransformerEncoder": (encoder(), CAUSAL, with_mask(CAUSAL.mask())),
    "TransformerEncoder, norm first": (encoder(norm_first=True), DOCUMENTS, with_mask(DOCUMENTS.mask())),
    "MultiheadAttention": (
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        CAUSAL,
        lambda module, x: module(x, x, x, attn_mask=~CAUSAL.mask()),
    ),
    "torch_geometric": (GCNConv(WIDTH, WIDTH), patterns.watts_strogatz(T, 2, 0.5), None),
}


@pytest.mark.parametrize("name", CLEAN)
def test_passes_what_is_clean(name):
    """Information flows along every allowed pair, and nowhere else."""
    module, graph, call = CLEAN[name]
    verdict = audit(module, graph, (T, WIDTH), call=call)
    assert verdict.exact, verdict
    assert verdict.flow == verdict.allowed == (graph | patterns.self_loops(T))
    assert "exact" in str(verdict)


@pytest.mark.parametrize(
    ("way", "form", "graph"),
    covering.pairwise(
        way=[None, "reference", "dense", "tiles", "rows", "mixed", "auto"],
        form=[lambda h: h, FactoredHeads.of, MergedHeads.of],
        graph=[patterns.window(T, 3) - patterns.self_loops(T), patterns.tree([-1, 0, 0, 1, 1, 2, 2, 5]).T],
    ),
)
def test_our_layer_is_exact_on_every_backend(way, form, graph):
    """A non-edge carries nothing, not even a NaN: docs/guide.md, semantics 3, from outside."""
    layer = MessagePassingAttention(form(StandardHeads(WIDTH, 2, bias=True)), backend=way)
    verdict = audit(layer, graph, (T, WIDTH))
    assert verdict.exact, verdict
    assert verdict.poisoned == ()


@pytest.mark.parametrize("seed", range(6))
def test_flow_is_the_sparsity_of_the_module(seed):
    """Any flow beside any declared graph: by theorem the leaks are M - D, the unused pairs D - M."""
    generator = torch.Generator().manual_seed(seed)
    flows, allowed = (
        torch.rand(2, 30, 30, generator=generator) < torch.tensor([0.1, 0.04])[:, None, None]
    ).unbind()
    graph = ga.convert.from_mask(allowed)
    if seed % 3 == 0:  # one leak among many clean pairs, which groups of receivers must not hide
        flows, leak = allowed.clone(), (~allowed).nonzero()[seed]
        flows[*leak] = True
    verdict = audit(Linear(flows), graph, (30, 3))
    others = ~torch.eye(30, dtype=torch.bool)
    assert torch.equal(verdict.flow.mask(), flows)
    assert pairs(verdict) == off_graph(flows, graph)
    assert set(verdict.unused) == {(src, dst) for dst, src in (allowed & ~flows & others).nonzero().tolist()}


def test_two_influences_do_not_cancel():
    module = Linear(torch.zeros(8, 8))
    module.flows[1, 5], module.flows[2, 5] = 1.0, -1.0
    with isolated(module):
        runner = Runner(module, lambda module, x: module(x), (8, 3), 8, None, 32, 0)
        (answer,) = runner.gradients(runner.draw(0), torch.ones(1, 8, dtype=torch.bool), 0)
    assert answer[5] > 1e-3
    assert answer.count_nonzero() == 1
    assert pairs(audit(module, patterns.self_loops(8), (8, 3))) == {(5, 1), (5, 2)}


def test_cotangents_are_not_the_inputs():
    module = Reads(lambda x: x / x.norm(dim=-1, keepdim=True))
    with isolated(module):
        runner = Runner(module, lambda module, x: module(x), (8, 3), 8, None, 1, 0)
        (answer,) = runner.gradients(runner.draw(0), torch.ones(1, 8, dtype=torch.bool), 0)
    assert answer.min() > 1e-3


def test_a_detached_layer_is_no_error():
    """A leak whose way no gradient can follow is told without one."""
    model = Model(Block(CAUSAL.mask()), Reads(lambda x: x.detach().flip(1)))
    verdict = audit(model, CAUSAL, (T, WIDTH))
    assert {leak.witnesses[0] for leak in verdict.leaks} == {"perturbation"}
    assert {leak.layer for leak in verdict.leaks} == {"blocks.1"}


def test_far_fewer_passes_than_receivers():
    graph = patterns.window(256, 8)
    verdict = audit(Linear(graph.mask()), graph, (256, 3), witnesses=["jacobian"])
    assert verdict.exact
    assert verdict.probes < 2 * 40
    assert verdict.backward_passes <= 4
    causal = audit(Linear(patterns.causal(64).mask()), patterns.causal(64), (64, 3), witnesses=["jacobian"])
    assert (causal.exact, causal.probes, causal.backward_passes) == (True, 128, 4)


@pytest.mark.parametrize(
    "graph",
    [
        patterns.window(40, 4),
        patterns.documents([5] * 8),
        patterns.self_loops(33),
        patterns.sinks(40, 1),
        patterns.cross(5, 9),
        patterns.expander(48, 2, causal=False),
        patterns.strict_causal(7),
    ],
    ids=lambda graph: graph.name,
)
def test_every_pair_is_looked_at_on_its_own(graph):
    """The definition of the groups: for each (dst, src) one with dst in it and no other who may hear src."""
    heard = graph.mask()
    settled = torch.zeros_like(heard)
    family = groups(heard)
    for group in family:
        others = group.int() @ heard.int() - heard.int()
        settled |= (others == 0) & group[:, None]
    assert bool(settled.all())
    assert len(family) <= graph.num_dst
    assert len(family) >= int(heard.sum(0).max())


def test_perturbation_sees_what_has_no_gradient():
    """Where the largest number stands in the sequence scales all of it: no derivative, but information."""
    module = Reads(lambda x: x * (1 + x.argmax(1, keepdim=True)))
    assert audit(module, patterns.self_loops(T), (T, 1), witnesses=["jacobian"]).exact
    verdict = audit(module, patterns.self_loops(T), (T, 1))
    assert verdict.leaks
    assert {leak.witnesses for leak in verdict.leaks} == {("perturbation",)}


def test_a_leak_too_small_for_perturbation_has_a_gradient():
    """1e-30 is lost beside 1, and yet it is a dependence."""
    small = torch.zeros(T, T)
    small[2, 5] = 1e-30
    verdict = audit(Reads(lambda x: x + small.double() @ x), patterns.self_loops(T), (T, WIDTH))
    (leak,) = verdict.leaks
    assert (leak.src, leak.dst, leak.witnesses) == (5, 2, ("jacobian", "nan"))
    assert 0 < leak.size < 1e-28
    assert "tolerance" in str(verdict)


def test_an_fft_needs_a_tolerance():
    """A causal convolution by FFT is causal up to rounding: exactly zero it is not."""
    kernel = torch.randn(T, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def by_fft(x):
        return torch.fft.irfft(
            torch.fft.rfft(x, 2 * T, dim=1) * torch.fft.rfft(kernel, 2 * T, dim=0), 2 * T, dim=1
        )[:, :T]

    assert audit(Reads(by_fft), CAUSAL, (T, WIDTH), tolerance=EXACT).exact
    assert not audit(Reads(by_fft), CAUSAL, (T, WIDTH)).ok


def test_nan_alone_is_no_leak():
    """Torch's dense attention multiplies a masked NaN by zero; that is told apart from information."""
    module, graph, call = CLEAN["TransformerEncoder"]
    verdict = audit(module, graph, (T, WIDTH), call=call)
    assert verdict.exact
    assert set(verdict.poisoned) == {(src, dst) for src in range(T) for dst in range(src)}
    assert "NaN alone crosses 28 pairs, first 1 -> 0" in str(verdict)


def test_samples_that_influence_one_another():
    """BatchNorm for each token is local in time, and mixes samples; so does a GRU that takes time first."""
    verdict = audit(nn.BatchNorm1d(T), patterns.self_loops(T), (T, WIDTH))
    assert verdict.crosses_samples
    assert not verdict.leaks
    assert not verdict.ok
    assert "samples influence one another" in str(verdict)
    time_first = nn.GRU(WIDTH, WIDTH)
    assert "[T, B, width]" in str(audit(time_first, CAUSAL, (T, WIDTH)))

    def turned(module, x):
        return module(x.transpose(0, 1))[0].transpose(0, 1)

    assert audit(time_first, CAUSAL, (T, WIDTH), call=turned).exact
    assert audit(nn.BatchNorm1d(T).eval(), patterns.self_loops(T), (T, WIDTH)).exact


def test_layers_are_counted_or_given():
    """Two layers of a window of 3 reach 5 tokens; counted for our layers, given for others."""
    window = patterns.window(T, 3)
    blocks = Model(Block(window.mask()), Block(window.mask()))
    shallow = audit(blocks, window, (T, WIDTH))
    assert pairs(shallow) == off_graph((window**2).mask(), window)
    assert "the module seems to have 2 layers: if each may use the graph nothing leaks, say layers=2" in str(
        shallow
    )
    deep = audit(blocks, window, (T, WIDTH), layers=2)
    assert deep.exact
    assert deep.allowed == patterns.window(T, 5)
    assert audit(blocks, window, (T, WIDTH), layers=3).unused[0] == (0, 5)
    model = ga.model.LanguageModel(ga.model.Config(16, 8, 3, 2, 4, 8)).eval()
    verdict = audit(model, window, (T,))
    assert (verdict.layers, verdict.exact) == (3, True)


def test_a_graph_for_each_layer():
    """Layer 1 hears its document, layer 2 token 3: the order matters."""
    hub = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src == 3) & (dst >= 3), T, name="hub")
    first, second = patterns.documents([4, 4]), hub | patterns.self_loops(T)
    model = Model(Block(first.mask()), Block(second.mask()))
    assert audit(model, [first, second], (T, WIDTH)).exact
    assert audit(model, [first, second], (T, WIDTH)).layers == 2
    assert not audit(model, [second, first], (T, WIDTH)).exact


def test_the_way_of_a_leak_and_where_it_comes_in():
    window, wide = patterns.window(12, 2), patterns.window(12, 3)
    model = Model(Block(window.mask()), Block(wide.mask()), Block(window.mask()))
    verdict = audit(model, window, (12, WIDTH), layers=3)
    assert pairs(verdict) == {(src, src + 4) for src in range(8)}
    assert {leak.layer for leak in verdict.leaks} == {"blocks.1.attention"}
    for leak in verdict.leaks:
        src = leak.src
        assert leak.path == (src, src + 1, src + 3, src + 4)
    assert str(verdict.leaks[0]) == (
        "0 -> 4 through 0 -> 1 -> 3 -> 4, comes in at blocks.1.attention (seen by jacobian, perturbation, nan)"
    )


def test_a_way_keeps_to_the_graph_as_long_as_it_can():
    wide = Block(patterns.window(12, 3).mask())
    verdict = audit(
        Model(wide, copy.deepcopy(wide), copy.deepcopy(wide)), patterns.window(12, 2), (12, WIDTH), layers=3
    )
    (path,) = [leak.path for leak in verdict.leaks if (leak.src, leak.dst) == (0, 4)]
    assert sorted(b - a for a, b in pairwise(path)) == [1, 1, 2]


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm([T, WIDTH]), OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))],
    ids=["norm", "convolution"],
)
def test_the_innermost_part_is_named(norm):
    """Not the block, nor what comes after: the part that was given clean states and returned others."""
    model = Model(Block(CAUSAL.mask()), Block(CAUSAL.mask(), norm))
    verdict = audit(model, CAUSAL, (T, WIDTH))
    assert {leak.layer for leak in verdict.leaks} == {"blocks.1.norm"}
    assert "say layers" not in str(verdict)
    assert {leak.layer for leak in audit(nn.Sequential(nn.Identity(), norm), CAUSAL, (T, WIDTH)).leaks} == {
        "1"
    }


def test_our_models_leak_is_named():
    """A language model over a wider graph than was declared."""
    model = ga.model.LanguageModel(ga.model.Config(16, 8, 2, 2, 4, 8))
    verdict = audit(
        model, patterns.window(T, 2), (T,), call=lambda module, ids: module(ids, patterns.window(T, 3))
    )
    assert {(leak.src, leak.dst): leak.layer for leak in verdict.leaks}[0, 3] == "blocks.0.attention"
    assert {leak.path for leak in verdict.leaks if (leak.src, leak.dst) == (0, 4)} == {(0, 2, 4)}


def test_attention_is_the_only_step_between_tokens():
    """Seed S4.3: the Jacobian of every other part of a model is block-diagonal."""
    model, _ = ga.model.load_trained()
    local = [
        part
        for part in (model.norm, model.unembedding, *model.blocks[0].children())
        if part is not model.layers[0]
    ]
    assert len(local) == 5
    for part in local:
        assert audit(part, patterns.self_loops(6), (6, model.config.width)).exact
    assert audit(model.blocks[1], patterns.window(6, 2), (6, model.config.width)).exact


def test_unused_pairs_and_their_ways():
    window = patterns.window(T, 3)
    verdict = audit(
        Model(Block(patterns.window(T, 2).mask()), Block(window.mask())), window, (T, WIDTH), layers=2
    )
    assert verdict.ok
    assert not verdict.exact
    assert set(verdict.unused) == {(src, src + 4) for src in range(T - 4)}
    assert verdict.way(0, 4) == [0, 2, 4]
    assert verdict.way(4, 0) is None
    assert "no leak, 4 of 22 allowed pairs unused" in str(verdict)
    assert "unused, first: 0 -> 2 -> 4" in str(verdict)


def test_graphs_of_other_shapes():
    """Cross-attention, decoding rows and graphs that differ by head."""
    cross = patterns.cross(3, 5)
    queries = torch.randn(3, WIDTH)
    layer = MessagePassingAttention(StandardHeads(WIDTH, 2), backend="dense")

    def attends(graph):
        def call(module, x):
            return module((x, queries.to(x).expand(len(x), -1, -1)), graph)

        return call

    assert audit(layer, cross, (5, WIDTH), call=attends(cross)).exact
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src == dst + 1, 3, 5)
    verdict = audit(layer, graph, (5, WIDTH), call=attends(cross))
    assert pairs(verdict) == {(src, dst) for dst in range(3) for src in range(5)} - {(1, 0), (2, 1), (3, 2)}
    assert audit(layer, graph, (5, WIDTH), call=attends(graph)).way(1, 0) == [1, 0]
    by_head = ga.algebra.per_head(patterns.window(T, 2), patterns.sinks(T, 1))
    verdict = audit(layer, by_head, (T, WIDTH))
    assert verdict.exact
    assert verdict.allowed == patterns.window(T, 2) | patterns.sinks(T, 1) | patterns.self_loops(T)


class TwoTables(nn.Module):
    """The sum of two embeddings of the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, WIDTH), nn.Embedding(12, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


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
    """The one that is given the ids is found; it can be named too, or be given."""
    module = Tokens(CAUSAL.mask())
    for embedding in (None, "word", module.word):
        assert audit(module, CAUSAL, (T,), embedding=embedding).exact
    assert pairs(audit(Tokens(EVERYONE), CAUSAL, (T,))) == off_graph(EVERYONE, CAUSAL)


def test_an_id_speaks_for_itself():
    leaks = audit(Tokens(CAUSAL.mask(), scaled=True), CAUSAL, (T,)).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(T - 1, dst) for dst in range(T - 1)}
    assert not any("jacobian" in leak.witnesses for leak in leaks)


def test_no_hook_stays_on_the_embedding():
    """One left there would go on placing old states."""
    module = Tokens(CAUSAL.mask())
    with isolated(module):
        runner = Runner(module, lambda module, ids: module(ids), (T,), T, "word", 32, 0)
        runner.run(runner.draw(0))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in runner.module.modules())


def test_which_embedding_is_asked_for():
    """Two embeddings of the same ids: neither alone is the input."""
    with pytest.raises(
        ValueError, match=r"2 of the module's embeddings \['first', 'second'\].*embedding='name'"
    ):
        audit(TwoTables(), CAUSAL, (T,))
    with pytest.raises(ValueError, match="0 of the module's embeddings"):
        audit(nn.Linear(3, 3), CAUSAL, (T,))
    with pytest.raises(
        ValueError, match="embedding must be a submodule of the module, or its name, got 'words'"
    ):
        audit(Tokens(CAUSAL.mask()), CAUSAL, (T,), embedding="words")
    with pytest.raises(ValueError, match="Embedding was not called with the token ids"):
        audit(Tokens(CAUSAL.mask()), CAUSAL, (T,), embedding="place")


def test_the_module_is_left_untouched():
    module = nn.Sequential(OverTime(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    module(torch.randn(3, T, WIDTH)).sum().backward()
    before = copy.deepcopy(module)
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    state = torch.get_rng_state()
    with torch.no_grad():
        audit(module, CAUSAL, (T, WIDTH))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    for (name, value), other in zip(module.state_dict().items(), before.state_dict().values(), strict=True):
        assert value.dtype == other.dtype, name
        assert torch.equal(value, other), name
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, gradient)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_gradients_are_on_whatever_the_caller_did():
    """Under no_grad and inference_mode the same verdict."""
    module, graph, expected = PLANTED["mask off by one"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            verdict = audit(module, graph, (T, WIDTH))
        assert {leak.witnesses for leak in verdict.leaks} == {("jacobian", "perturbation", "nan")}
        assert pairs(verdict) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype):
    """The copy is in float64, masks that are plain attributes included."""
    module = Attention(CAUSAL.mask()).to(dtype)
    module.table = torch.zeros(T, T, dtype=dtype)
    assert audit(module, CAUSAL, (T, WIDTH)).exact
    assert module.table.dtype == module.qkv.weight.dtype == dtype


def test_a_module_may_write_into_its_input():
    """It writes into a copy, and what it wrote is followed."""
    assert audit(Reads(lambda x: x.mul_(2)), patterns.self_loops(T), (T, WIDTH)).exact
    leaks = audit(Reads(lambda x: x.add_(x.flip(1))), patterns.self_loops(T), (T, WIDTH)).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(T - 1 - dst, dst) for dst in range(T)}


def test_in_float32_where_a_kernel_has_no_more():
    """Zero is zero in any dtype."""

    def single(x):
        if x.dtype != torch.float32:
            raise RuntimeError("no such kernel")
        return Attention(CAUSAL.mask())(x)

    with pytest.raises(RuntimeError, match="no such kernel"):
        audit(Reads(single), CAUSAL, (T, WIDTH))
    assert audit(Reads(single), CAUSAL, (T, WIDTH), dtype=torch.float32).exact


def test_dropout_in_training_leaks_nothing():
    """A module that draws random numbers is run one sample at a time, with the same numbers each time."""
    module = nn.Sequential(Block(CAUSAL.mask()), nn.Dropout(0.3)).train()
    verdict = audit(module, CAUSAL, (T, 4))
    assert verdict.ok
    assert verdict.backward_passes == verdict.probes


def test_the_same_seed_gives_the_same_verdict():
    """And one sample at a time the same as many together."""
    module, graph, _ = PLANTED["documents crossing"]
    together, again, alone = (audit(module, graph, (T, WIDTH), samples=samples) for samples in (32, 32, 1))
    assert together.leaks == again.leaks
    assert pairs(alone) == pairs(together)
    assert alone.backward_passes >= alone.probes > together.backward_passes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mask transposed", "the second is the first transposed"),
        ("mask off by one", "the first is the second with the edges src <= dst alone"),
        ("documents crossing", "the second has 3 more senders per receiver from receiver 3 on"),
        ("BatchNorm over time", "samples of a batch influence one another"),
    ],
)
def test_the_text_helps_to_find_the_mistake(name, words):
    """The difference of the two graphs, in words."""
    module, graph, _ = PLANTED[name]
    assert words in str(audit(module, graph, (T, WIDTH)))


def test_json():
    """Everything but the graphs, whose names stand for them."""
    module, graph, _ = PLANTED["one pair"]
    record = json.loads(audit(module, graph, (T, 3)).to_json())
    assert (record["exact"], record["ok"], record["layers"], record["graphs"]) == (
        False,
        False,
        1,
        [graph.name],
    )
    (leak,) = record["leaks"]
    assert (leak["src"], leak["dst"]) == (6, 2)
    assert leak["path"] == [6, 2]
    assert leak["layer"] == "Linear"
    assert record["unused"] == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            (nn.Identity(), CAUSAL, (7, 4)),
            ValueError,
            r"input_shape must be .* with T = 8, the senders of .*; got \(7, 4\)",
        ),
        ((nn.Identity(), CAUSAL, ()), ValueError, "input_shape must be"),
        ((lambda x: x, CAUSAL, (8, 4)), TypeError, "module must be a torch.nn.Module, got function"),
        ((nn.Identity(), "causal", (8, 4)), TypeError, "graph must be a TokenGraph"),
        ((nn.Identity(), [], (8, 4)), TypeError, "graph must be a TokenGraph"),
        ((nn.Identity(), patterns.causal(5000), (5000, 4)), ValueError, "1 to 4096 tokens"),
        ((nn.Identity(), [CAUSAL, patterns.causal(9)], (8, 4)), ValueError, "of the same tokens"),
        (
            (Reads(lambda x: x[:, :3]), patterns.cross(3, 8), (8, 4), 2),
            ValueError,
            "layers must be 1 where senders are not the receivers",
        ),
        ((nn.Identity(), CAUSAL, (8, 4), 0), ValueError, "layers must be at least 1, got 0"),
        (
            (nn.Flatten(), CAUSAL, (8, 4)),
            ValueError,
            r"must return floating states \[B, dst, ...\].*got shape \[1, 32\]",
        ),
        ((Reads(lambda x: None), CAUSAL, (8, 4)), ValueError, "got NoneType"),
        (
            (Reads(lambda x: x.log()), CAUSAL, (8, 4)),
            ValueError,
            "returns NaN or inf for finite inputs, first at receiver",
        ),
        (
            (MessagePassingAttention(StandardHeads(4, 1)), [CAUSAL], (8, 4)),
            ValueError,
            "takes one g, got a list of graphs",
        ),
    ],
)
def test_errors(arguments, error, words):
    """Each names what came, what was expected and what to do."""
    with pytest.raises(error, match=words):
        audit(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"witnesses": ["nan"]}, ValueError, "NaN alone proves nothing"),
        ({"witnesses": ["gradient"]}, ValueError, "witnesses must be one of 'jacobian'"),
        ({"samples": 0}, ValueError, "samples must be at least 1"),
        ({"tolerance": -1.0}, ValueError, "tolerance must be a share"),
        (
            {"dtype": torch.float16},
            ValueError,
            "dtype must be torch.float64 or torch.float32, got torch.float16",
        ),
    ],
)
def test_wrong_options(options, error, words):
    """Before anything is run."""
    with pytest.raises(error, match=words):
        audit(nn.Identity(), CAUSAL, (8, 4), **options)


def test_what_cannot_be_copied_is_refused_by_name():
    """A generator, for example, cannot be."""
    module = nn.Identity()
    module.endless = (x for x in ())
    with pytest.raises(NotImplementedError, match="Identity cannot be copied"):
        audit(module, CAUSAL, (8, 4))


def test_the_fixture_fails_with_the_verdict():
    """What a test of a leaky model prints, and that a clean one gets its verdict."""
    audited = pytest_plugin._audited
    module, graph, _ = PLANTED["mask off by one"]
    with pytest.raises(pytest.fail.Exception, match="7 leaks"):
        audited(module, graph, (T, WIDTH))
    assert audited(Attention(CAUSAL.mask()), CAUSAL, (T, WIDTH)).exact
    narrow = Attention(patterns.window(T, 2).mask())
    assert audited(narrow, CAUSAL, (T, WIDTH)).unused
    with pytest.raises(pytest.fail.Exception, match="allowed pairs unused"):
        audited(narrow, CAUSAL, (T, WIDTH), exact=True)


@pytest.mark.slow
def test_the_fixture_in_a_run_of_pytest(tmp_path):
    """In somebody else's project."""
    (tmp_path / "test_them.py").write_text(
        "import torch\nfrom gnn_attention import patterns\n\n"
        "def test_clean(audited):\n    audited(torch.nn.Identity(), patterns.causal(6), (6, 3))\n\n"
        "def test_leaky(audited):\n    audited(torch.nn.LayerNorm([6, 3]), patterns.causal(6), (6, 3))\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "gnn_attention.interpret.audit.pytest_plugin",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    assert "causal(6), 1 layer: 15 leaks" in done.stdout


class TestCommand:
    """``gnn-attention audit``."""

    def test_the_trained_model_is_exact(self, capsys):
        assert main(["audit", "window(12, 3) | sinks(12, 1)"]) == 0
        assert capsys.readouterr().out.startswith("window(12, 3) | sinks(12, 1), 2 layers: exact")

    def test_a_leak_is_exit_code_1(self, capsys, tmp_path):
        assert main(["audit", "window(10, 2)", "--run-over", "window(10, 3)", "--json"]) == 1
        printed = capsys.readouterr()
        assert json.loads(printed.out)["ok"] is False
        assert "leaks" in printed.err
        file = tmp_path / "verdict.json"
        assert (
            main(["audit", "window(10, 2)", "--run-over", "causal(10)", "--layers", "9", "--json", str(file)])
            == 0
        )
        assert json.loads(file.read_text())["exact"] is True

    def test_a_model_of_ones_own(self, tmp_path, capsys):
        model, vocabulary = ga.model.load_trained()
        ga.model.save(tmp_path / "mine.safetensors", model, vocabulary, {})
        assert main(["audit", "causal(6)", "--model", str(tmp_path / "mine.safetensors")]) == 0

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["wndow(8, 2)"], "wndow"),
            (["causal(600)"], "at most 512 tokens"),
            (["causal(6)", "--model", "no_such_file"], "no_such_file"),
            (["causal(6)", "--json", "no/such/file"], "expected a folder that exists"),
            (["causal(6)", "--run-over", "causal(7)"], "does not fit"),
        ],
    )
    def test_wrong_arguments(self, arguments, words, capsys):
        assert main(["audit", *arguments]) == 2
        assert words in capsys.readouterr().err


def family_models():
    """The module ``hf_models``, which needs transformers, and this library's attention registered."""
    needs("transformers")
    importlib.import_module("gnn_attention.huggingface")
    return importlib.import_module("support.hf_models")


def hugging_face(name):
    """A tiny model with random weights."""
    transformers = needs("transformers")
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 50,
    }
    configs = {
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32
        ),
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=1),
        "mistral": lambda: transformers.MistralConfig(**small, num_key_value_heads=1, sliding_window=3),
        "bert": lambda: transformers.BertConfig(**small),
    }
    torch.manual_seed(0)
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    return kind.from_config(configs[name]()).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graph", "layers"),
    [
        ("gpt2", CAUSAL, None),
        ("llama", CAUSAL, None),
        ("mistral", patterns.window(T, 3), 2),
        ("bert", patterns.full(T), None),
    ],
)
def test_hugging_face_models_are_exact(name, graph, layers):
    assert audit(hugging_face(name), graph, (T,), layers).exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hugging_face_padding(name):
    valid = torch.arange(T) >= 2

    def padded(module, ids):
        return module(ids, attention_mask=valid.long().expand(len(ids), -1))

    model = hugging_face(name)
    receivers = ga.TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & ((src >= 2) | (dst < 2)), T, name="left padding"
    )
    assert audit(model, receivers, (T,), call=padded).ok
    assert pairs(audit(model, receivers, (T,))) == {(src, dst) for src in range(2) for dst in range(2, T)}


@pytest.mark.slow
def test_a_custom_attention_registered_without_its_mask_function():
    """The trap of notes on transformers: the mask is silently None, and padding is heard."""
    transformers = needs("transformers")

    def plain(module, query, key, value, attention_mask, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = attention_mask is None
        y = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal)
        return y.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("audited_trap", plain)
    model = hugging_face("llama")
    valid = torch.arange(T) >= 2
    graph = ga.TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & ((src >= 2) | (dst < 2)), T, name="left padding"
    )

    def padded(module, ids):
        return module(ids, attention_mask=valid.long().expand(len(ids), -1))

    assert audit(model, graph, (T,), call=padded).ok
    model.set_attn_implementation("audited_trap")
    verdict = audit(model, graph, (T,), call=padded)
    assert pairs(verdict) == {(src, dst) for src in range(2) for dst in range(2, T)}
    assert {leak.layer for leak in verdict.leaks} == {"model.layers.0.self_attn"}


@pytest.mark.slow
def test_the_text_models_of_many_families():
    families = family_models()
    found = {}
    for name in [name for name, family in families.FAMILIES.items() if family.inputs == "text"]:
        graph = patterns.full(12) if "Masked" in families.FAMILIES[name].model else patterns.causal(12)
        experts = name in ("gpt_oss", "deepseek_v3", "mixtral")  # their grouped products have no float64
        found[name] = audit(
            families.build(name), graph, (12,), dtype=torch.float32 if experts else torch.float64
        )
    assert len(found) >= 20
    assert [name for name, verdict in found.items() if not verdict.ok] == []
    narrow = {name for name, verdict in found.items() if verdict.unused}
    assert narrow == {
        "mistral",
        "phi3",
    }  # two layers of a window of 5 reach 9 tokens: 3 + 2 + 1 pairs are further
    assert {found[name].unused for name in narrow} == {
        tuple((src, dst) for dst in range(9, 12) for src in range(dst - 8))
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert"])
def test_a_graph_put_into_a_hugging_face_model(name):
    families = family_models()
    model, graph = families.build(name), patterns.window(12, 3) | patterns.sinks(12, 1)
    model.set_attn_implementation("gnn_attention")

    def within(module, ids):
        with ga.use_graph(module, graph):
            return module(ids)

    verdict = audit(model, graph, (12,), layers=2, call=within)
    assert verdict.exact, verdict
    assert verdict.poisoned == ()
    own = audit(model, patterns.full(12) if name == "bert" else patterns.causal(12), (12,))
    assert own.exact
    assert own.poisoned == ()


def test_a_block_of_use_graph_holds_for_the_copy_that_is_audited():
    """And for it alone while it is audited: what the block knows is as it was afterwards."""
    families = family_models()
    model, graph = families.build("llama"), patterns.window(12, 3) | patterns.sinks(12, 1)
    model.set_attn_implementation("gnn_attention")
    with ga.use_graph(model, graph):
        (use,) = _overrides.uses_now()
        known = dict(use.names), dict(use.numbers)
        assert audit(model, graph, (12,), layers=2, witnesses="jacobian").exact
        assert (use.names, use.numbers) == known
    leaks = audit(model, graph, (12,), layers=2, witnesses="jacobian").leaks
    beyond = (patterns.causal(12) - graph @ graph).edge_index.T.tolist()
    assert {(leak.src, leak.dst) for leak in leaks} == set(map(tuple, beyond))
