"""Templates of heads against loops over tokens and TransformerLens' published dense formulas, written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor

from gnn_attention import MessagePassingAttention, StandardHeads, algebra, convert, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.circuits.templates import (
    TEMPLATES,
    detect,
    duplicate_token,
    induction,
    match,
    previous_token,
)
from gnn_attention.model import language_model as lm

TOKENS = {
    "all different": torch.arange(7),
    "all the same": torch.full((6,), 3),
    "said twice": torch.tensor([4, 9, 2, 7, 4, 9, 2, 7]),
    "mixed": torch.tensor([5, 5, 1, 5, 1, 1, 0, 5]),
    "one": torch.tensor([3]),
    "negative": torch.tensor([-1, -2, -1, -2, -2]),
    "bytes, and none is less than 0": torch.tensor([3, 0, 255, 7, 0, 255], dtype=torch.uint8),
    "several": torch.tensor([[1, 2, 1, 2, 3], [0, 0, 0, 1, 0], [4, 3, 2, 1, 0]]),
}
each_tokens = pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
# By loops over pairs, from the texts: dst hears src if ...
MEANT = {
    "previous_token": lambda t, dst, src: src == dst - 1,
    "duplicate_token": lambda t, dst, src: src < dst and t[src] == t[dst],
    "induction": lambda t, dst, src: 1 <= src <= dst and t[src - 1] == t[dst],
}


def by_loops(name: str, tokens: Tensor) -> Tensor:
    t = tokens.tolist()
    return torch.tensor([[bool(MEANT[name](t, dst, src)) for src in range(len(t))] for dst in range(len(t))])


def transformer_lens(name: str, tokens: Tensor) -> Tensor:
    if name == "previous_token":
        return torch.ones(len(tokens) - 1).diag(-1)
    same = (tokens[None] == tokens[:, None]).float()
    same.fill_diagonal_(0)
    same = same.tril()
    if name == "duplicate_token":
        return same
    rolled = torch.roll(same, shifts=1, dims=1)
    rolled[:, 0] = 0
    return rolled.tril()


@each_tokens
@pytest.mark.parametrize("name", TEMPLATES)
def test_edges(name, tokens):
    graph = TEMPLATES[name](tokens)
    rows = tokens.reshape(-1, tokens.shape[-1])
    assert graph.num_dst == graph.num_src == rows.shape[1]
    assert graph.heads is None
    assert graph.batch == (None if tokens.dim() == 1 or name == "previous_token" else len(rows))
    for sample, row in enumerate(rows):
        mask = graph.select(sample if graph.batch else 0).mask()
        assert torch.equal(mask, by_loops(name, row))
        assert torch.equal(mask.float(), transformer_lens(name, row))


def test_induction_is_a_duplicate_and_a_step_on():
    tokens = TOKENS["said twice"]
    steps = previous_token(tokens)  # 4 hears 3
    assert (induction(tokens) @ steps).mask().equal(duplicate_token(tokens).mask())


GRAPHS = {
    "causal": patterns.causal(6),
    "window": patterns.window(6, 3),
    "strict, 0 deaf": patterns.strict_causal(6),
    "per head": algebra.per_head(patterns.causal(6), patterns.window(6, 2), patterns.strict_causal(6)),
}


class TestMatch:
    tokens = torch.tensor([[5, 5, 1, 5, 1, 1], [0, 3, 0, 3, 2, 0]])

    def run(self, graph: Any) -> trace.Run:
        torch.manual_seed(0)
        layer = MessagePassingAttention(StandardHeads(8, 3, head_dim=4).double())
        x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return trace.record(layer, x, graph)

    @pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_against_dense_formulas(self, graph, name):
        run = self.run(graph)
        weights = run.layers[0].dense(run.layers[0].weights()).detach()  # [B, H, dst, src]
        wanted = torch.stack([by_loops(name, row) for row in self.tokens]).double()
        template = TEMPLATES[name](self.tokens)
        means, muls, losses = [], [], []
        for head in range(3):
            given = [
                (weights[b, head, dst] @ wanted[b, dst])
                for b in range(2)
                for dst in range(6)
                if wanted[b, dst].any()
            ]
            means.append(torch.stack(given).mean())
            muls.append(
                torch.stack(
                    [(weights[b, head] * wanted[b]).sum() / weights[b, head].sum() for b in range(2)]
                ).mean()
            )
            losses.append(
                torch.stack([1 - (weights[b, head] - wanted[b]).abs().mean() * 6 for b in range(2)]).mean()
            )
        for measure, expected in (("mean", means), ("mul", muls), ("abs", losses)):
            assert_exact(match(run, template, measure), torch.stack(expected)[None])

    def test_a_graph_that_is_the_template_matches_in_full(self):
        template = previous_token(self.tokens)
        run = self.run(template)
        assert match(run, template).tolist() == [[1.0] * 3]
        assert match(run, template, "mul").tolist() == [[1.0] * 3]
        assert match(run, template, "abs").tolist() == [[1.0] * 3]

    def test_an_edge_that_carried_nothing_counts_nothing(self):
        """Cut, muted, or not in the graph."""
        layer = MessagePassingAttention(StandardHeads(8, 3, head_dim=4).double())
        x, template = torch.ones(1, 4, 8, dtype=torch.float64), previous_token(torch.arange(4))
        even = match(trace.record(layer, x, patterns.causal(4)), template)[0, 0].item()
        assert_exact(even, (1 / 2 + 1 / 3 + 1 / 4) / 3)
        cut = match(trace.record(layer, x, patterns.causal(4), surgery=trace.cut([(1, 2)])), template)[0, 0]
        assert_exact(cut, (1 / 2 + 1 / 4) / 3)
        muted = match(
            trace.record(layer, x, patterns.causal(4), surgery=trace.mute([(1, 2)], heads=1)), template
        )[0]
        assert_exact(muted.tolist(), [even, (1 / 2 + 1 / 4) / 3, even])
        assert match(trace.record(layer, x, patterns.window(4, 1)), template).tolist() == [[0.0] * 3]
        assert match(trace.record(layer, x, patterns.window(4, 1)), template, "abs")[0, 0] == 1 - (4 + 3) / 4

    def test_nobody_hears_and_nothing_is_wanted(self):
        layer, x = MessagePassingAttention(StandardHeads(8, 3, head_dim=4)), torch.ones(1, 4, 8)
        deaf = patterns.causal(4) - patterns.causal(4)
        for measure in ("mean", "mul"):
            assert match(trace.record(layer, x, deaf), previous_token(torch.arange(4)), measure).tolist() == [
                [0.0] * 3
            ]
            assert match(trace.record(layer, x, patterns.causal(4)), deaf, measure).tolist() == [[0.0] * 3]

    def test_a_template_by_head(self):
        run = self.run(patterns.causal(6))
        parts = [previous_token(self.tokens), patterns.window(6, 1), patterns.sinks(6, 1)]
        together = match(run, algebra.per_head(*parts))[0]
        assert_exact(together.tolist(), [match(run, part)[0, head].item() for head, part in enumerate(parts)])

    def test_some_layers_of_a_run(self):
        model, _ = lm.load_trained()
        tokens = torch.arange(20)[None]
        with torch.no_grad():
            run = trace.record(model, tokens)
        assert torch.equal(
            match(run, previous_token(tokens))[1:], match(run.layers[1:], previous_token(tokens))
        )

    def test_refusals(self):
        run = self.run(patterns.causal(6))
        with pytest.raises(ValueError, match="measure must be one of 'mean', 'mul', 'abs', got 'sum'"):
            match(run, previous_token(self.tokens), "sum")
        for template in (
            patterns.causal(5),
            induction(self.tokens[:1].repeat(3, 1)),
            algebra.per_head(*[patterns.causal(6)] * 2),
        ):
            with pytest.raises(
                ValueError, match="template must be over the tokens, samples and heads of LayerTrace"
            ):
                match(run, template)
        with pytest.raises(ValueError, match=r"run must hold layers with one number of heads, got no layers"):
            match([], patterns.causal(6))
        other = trace.record(
            MessagePassingAttention(StandardHeads(8, 2)), torch.ones(2, 6, 8), patterns.causal(6)
        )
        with pytest.raises(ValueError, match=r"run must hold layers with one number of heads, got \[2, 3\]"):
            match([*run.layers, *other.layers], patterns.causal(6))


@pytest.fixture(scope="module")
def trained() -> lm.LanguageModel:
    return lm.load_trained()[0].double()


class TestDetect:
    def said_twice(self, length: int, samples: int) -> Tensor:
        """Distinct tokens, so that an equal token is one of the other copy."""
        generator = torch.Generator().manual_seed(3)
        first = torch.stack([torch.randperm(1024, generator=generator)[:length] for _ in range(samples)])
        return torch.cat([first, first], dim=1)

    def test_agrees_with_induction_scores(self, trained, monkeypatch):
        tokens = self.said_twice(24, 4)
        monkeypatch.setattr(lm, "_random_tokens", lambda *_: tokens[:, :24])
        by_distance = lm.induction_scores(trained, length=24, samples=4)
        assert_exact(detect(trained, tokens, "induction"), by_distance)

    def test_agrees_with_previous_token_scores(self, trained, monkeypatch):
        tokens = self.said_twice(24, 4)
        monkeypatch.setattr(lm, "_random_tokens", lambda *_: tokens)
        by_distance = lm.previous_token_scores(trained, length=48, samples=4)
        assert_exact(detect(trained, tokens, "previous_token"), by_distance)

    def test_the_heads_of_the_trained_model(self, trained):
        """Its induction head in layer 1 and its previous-token head in layer 0 stand out."""
        tokens = self.said_twice(48, 4)
        for name, layer in (("induction", 1), ("previous_token", 0)):
            scores = detect(trained, tokens, name)
            best = scores.argmax().item()
            assert best // 4 == layer
            assert scores.flatten()[best] > 0.4

    def test_over_another_graph(self, trained):
        """Where the window does not reach the first copy, there is no induction."""
        tokens = self.said_twice(24, 2)
        assert detect(trained, tokens, "induction", patterns.window(48, 23)).max() == 0
        assert detect(trained, tokens, "induction", patterns.window(48, 24)).max() > 0.3

    def test_a_graph_a_function_and_one_sequence(self, trained):
        tokens = self.said_twice(12, 1)
        expected = detect(trained, tokens, "induction")
        assert torch.equal(detect(trained, tokens[0], "induction"), expected)
        assert torch.equal(detect(trained, tokens, induction), expected)
        assert torch.equal(detect(trained, tokens, induction(tokens[0])), expected)
        listed = convert.from_edge_index(induction(tokens[0]).edge_index, 24)
        assert_exact(detect(trained, tokens, listed), expected)

    def test_refusals(self, trained):
        tokens = torch.arange(6)
        with pytest.raises(
            ValueError,
            match="template must be one of 'previous_token', 'duplicate_token', 'induction', got 'copy'",
        ):
            detect(trained, tokens, "copy")
        with pytest.raises(TypeError, match="template must be or return a TokenGraph, got SimpleNamespace"):
            detect(trained, tokens, lambda _: SimpleNamespace())
        for wrong in (tokens.float(), [1, 2], tokens > 2):
            with pytest.raises(TypeError, match="tokens must be an integer tensor"):
                detect(trained, wrong, "induction")
        for wrong in (torch.zeros(2, 2, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"tokens must be \[T\] or \[B, T\] and not empty"):
                induction(wrong)
