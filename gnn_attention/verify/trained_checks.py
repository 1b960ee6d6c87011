"""The same layer checks on trained weights: the shipped model reading the sentence of seed S1.13.

Random weights make flat weights; a trained head is peaked, and its rounding errors are those of real use. Every layer of the
model is checked on the states that it really meets, in every form, on every backend, with its learned relative bias.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import relative_bias
from gnn_attention.verify.check import DTYPES, FORMS, Check, Settings, alone, bound, verdict, worst
from gnn_attention.verify.layer_checks import layer_truth, plain_names
from gnn_attention.verify.measure import Truth, exactly, gradients_of
from gnn_attention.verify.refusals import refused

__all__ = ["SENTENCE", "TOKENS", "trained_checks"]

SENTENCE = "Llamas do not output words"  # seed S1.13
# of the sentence, by the vocabulary that ships: so verify needs no tokenizer
TOKENS = (76, 333, 109, 390, 568, 363, 868, 749, 308, 268, 636)


@dataclass(frozen=True, eq=False)
class _TrainedCase:
    """One layer of the trained model in one form and dtype, on its states for the sentence."""

    settings: Settings
    layer: int
    form: str
    dtype: torch.dtype
    graph: TokenGraph
    state: Tensor
    block: Any

    @cached_property
    def heads(self) -> Any:
        return FORMS[self.form](copy.deepcopy(self.block.attention.heads)).to(self.dtype)

    @cached_property
    def table(self) -> Tensor:
        learned: Tensor = self.block.attention.score_mod.table.detach()
        return learned.to(self.dtype)

    @cached_property
    def direction(self) -> Tensor:
        rng = torch.Generator().manual_seed(self.settings.seed)
        return torch.randn(self.state.shape, generator=rng, dtype=torch.float64).to(self.dtype)

    @cached_property
    def truth(self) -> Truth:
        n, reach = self.graph.num_dst, self.table.shape[1] // 2
        distance = torch.tensor([[i - j for j in range(n)] for i in range(n)])
        added = self.table[:, distance.clamp(-reach, reach) + reach].unsqueeze(0)
        mask = torch.tensor([[j <= i for j in range(n)] for i in range(n)]).view(1, 1, n, n)
        x = self.state.to(self.dtype)
        device = self.settings.device

        def dense(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
            return logits + added.to(logits)

        return layer_truth(self.heads, x, x, self.direction, mask.expand(1, len(self.table), n, n), device, None, dense)

    def run(self, backend: Backend | None) -> Mapping[str, Any]:
        device = self.settings.device
        x_src, x_dst = (self.state.to(device, self.dtype, copy=True).requires_grad_() for _ in range(2))
        layer = MessagePassingAttention(self.heads.to(device), relative_bias(self.table.to(device)), backend=backend)
        out = layer((x_src, x_dst), self.graph)
        inputs = {"x_src": x_src, "x_dst": x_dst} | plain_names(self.heads)
        return verdict(out, gradients_of(out, self.direction.to(device), inputs), self.truth.for_backend(backend))


def trained_checks(settings: Settings) -> Iterator[Check]:
    """Layers x forms x dtypes x backends on the sentence, then whole logits on every backend."""
    trained, _ = model.load_trained()
    tokens = torch.tensor([TOKENS])
    graph = patterns.causal(tokens.shape[1])
    ways: list[Backend | None] = [*([None] if settings.walk else []), *settings.backends]
    with torch.no_grad():
        states = copy.deepcopy(trained).double().states(tokens)
    for dtype in settings.dtypes:
        for number, block in enumerate(trained.blocks):
            with torch.no_grad():
                state = _normed(block, states[2 * number])
            for form in settings.forms:
                case = _TrainedCase(settings, number, form, DTYPES[dtype], graph, state, block)
                for way in ways:
                    name = "walk" if way is None else way.name
                    title, run = f"layer {number}, {form}, {SENTENCE!r}", bound(case.run, way)
                    both, forward = (
                        {"layer": str(number), "form": form, "direction": direction}
                        for direction in ("forward and gradients", "forward alone")
                    )
                    yield Check("trained", name, dtype, title, run, True, both, _skipped(settings, dtype, way))
                    title = f"{title}, forward alone"
                    yield Check("trained", name, dtype, title, alone(run), False, forward, _skipped(settings, dtype, way))
    for way in ways:
        name = "walk" if way is None else way.name
        run, factors = bound(_logits_agree, settings, trained, tokens, way), {"layer": "logits"}
        skipped = _skipped(settings, "float64", way)
        yield Check("trained", name, "float64", f"logits of {SENTENCE!r}", run, factors=factors, skipped=skipped)


def _skipped(settings: Settings, dtype: str, way: Backend | None) -> str | None:
    """Why a backend cannot hold the model's relative bias."""
    return None if way is None else refused(way, settings.device, DTYPES[dtype], "relative bias")


def _normed(block: Any, state: Tensor) -> Tensor:
    """What the attention of a block is given, in float64."""
    normed: Tensor = copy.deepcopy(block).double().attention_norm(state)
    return normed


def _logits_agree(settings: Settings, trained: Any, tokens: Tensor, way: Backend | None) -> Mapping[str, Any]:
    """Whole logits of the trained model in float64: this backend against torch's own attention between the projections."""
    own = copy.deepcopy(trained).double().to(settings.device)
    own.backend = way
    with torch.no_grad():
        found = own(tokens.to(settings.device)).cpu()
        wanted = _plain_logits(copy.deepcopy(trained).double(), tokens)
    return worst([("the whole model", exactly("logits", found, wanted))])


def _plain_logits(trained: Any, tokens: Tensor) -> Tensor:
    """The model written out with masked softmax over T x T, for the whole stack."""
    n = tokens.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    state = trained.embedding(tokens)
    for block in trained.blocks:
        x, heads, table = block.attention_norm(state), block.attention.heads, block.attention.score_mod.table
        reach = table.shape[1] // 2
        distance = (torch.arange(n).view(-1, 1) - torch.arange(n)).clamp(-reach, reach) + reach
        for h in range(heads.num_heads):
            logits = (x @ heads.W_Q[h]) @ (x @ heads.W_K[h]).mT * heads.head_dim**-0.5 + table[h, distance]
            weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
            state = state + weights @ (x @ heads.W_V[h]) @ heads.W_O[h]
        state = state + block.mlp(block.mlp_norm(state))
    logits_out: Tensor = trained.unembedding(trained.norm(state))
    return logits_out
