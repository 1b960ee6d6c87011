"""Templates of heads against loops over tokens and dense formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import drawn
from torch import Tensor

from gnn_attention import MessagePassingAttention, StandardHeads, algebra, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.circuits.templates import TEMPLATES, detect, induction, match, previous_token
from gnn_attention.model import language_model as lm

TOKENS = {
    "repeated": torch.tensor([4, 9, 2, 7, 4, 9, 2, 7]),
    "one": torch.tensor([3]),
    "negative": torch.tensor([-1, -2, -1, -2, -2]),
    "bytes, and none is less than 0": torch.tensor([3, 0, 255, 7, 0, 255], dtype=torch.uint8),
    "several": torch.tensor([[1, 2, 1, 2, 3], [0, 0, 0, 1, 0], [4, 3, 2, 1, 0]]),
}
# whether src is an in-edge of dst, from the texts
MEANT = {
    "previous_token": lambda t, dst, src: src == dst - 1,
    "duplicate_token": lambda t, dst, src: src < dst and t[src] == t[dst],
    "induction": lambda t, dst, src: 1 <= src <= dst and t[src - 1] == t[dst],
}
CAUSAL = patterns.causal(4)


def by_loops(name: str, tokens: Tensor) -> Tensor:
    t = tokens.tolist()
    return torch.tensor([[bool(MEANT[name](t, dst, src)) for src in range(len(t))] for dst in range(len(t))])


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
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


GRAPHS = {
    "causal": patterns.causal(6),
    "window": patterns.window(6, 3),
    "strict, 0 isolated": patterns.strict_causal(6),
    "per head": algebra.per_head(patterns.causal(6), patterns.window(6, 2), patterns.strict_causal(6)),
}


def recorded(graph: Any, x: Any = None, **options: Any) -> trace.Run:
    torch.manual_seed(0)
    layer = MessagePassingAttention(StandardHeads(8, 3, head_dim=4).double())
    return trace.record(layer, drawn(2, 6, 8, seed=1) if x is None else x, graph, **options)


class TestMatch:
    tokens = torch.tensor([[5, 5, 1, 5, 1, 1], [0, 3, 0, 3, 2, 0]])
    ones = torch.ones(1, 4, 8, dtype=torch.float64)

    @pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_against_dense_formulas(self, graph, name):
        """The mean over the receivers that have edges in the template, by a loop."""
        call = recorded(graph).layers[0]
        weights = call.dense(call.weights()).detach()  # [B, H, dst, src]
        wanted = torch.stack([by_loops(name, row) for row in self.tokens]).double()
        expected = []
        for head in range(3):
            pairs = zip(weights[:, head], wanted, strict=True)
            rows = [w[dst] @ t[dst] for w, t in pairs for dst in range(6) if t[dst].any()]
            expected.append(torch.stack(rows).mean())
        assert_exact(match([call], TEMPLATES[name](self.tokens)), torch.stack(expected)[None])

    def test_a_graph_that_is_the_template_matches_in_full(self):
        template = previous_token(self.tokens)
        assert match(recorded(template), template).tolist() == [[1.0] * 3]

    def test_an_edge_that_is_not_there_counts_nothing(self):
        """Cut, or not in the graph; a muted one keeps its weight."""
        template = previous_token(torch.arange(4))
        even, less = (1 / 2 + 1 / 3 + 1 / 4) / 3, (1 / 2 + 1 / 4) / 3
        assert_exact(match(recorded(CAUSAL, self.ones), template)[0, 0].item(), even)
        cut = recorded(CAUSAL, self.ones, surgery=trace.cut([(1, 2)]))
        assert_exact(match(cut, template)[0, 0].item(), less)
        muted = recorded(CAUSAL, self.ones, surgery=trace.mute([(1, 2)], heads=1))
        assert_exact(match(muted, template)[0].tolist(), [even] * 3)
        loops = recorded(patterns.window(4, 1), self.ones)
        assert match(loops, template).tolist() == [[0.0] * 3]
        none = CAUSAL - CAUSAL
        assert match(recorded(none, self.ones), template).tolist() == [[0.0] * 3]
        assert match(recorded(CAUSAL, self.ones), none).tolist() == [[0.0] * 3]

    def test_refusals(self):
        run, causal = recorded(patterns.causal(6)), patterns.causal(6)
        other = trace.record(MessagePassingAttention(StandardHeads(8, 2)), torch.ones(2, 6, 8), causal).layers
        fit = "template must fit tokens, samples and heads of LayerTrace"
        wrong = [
            (run, patterns.causal(5), fit),
            (run, induction(self.tokens[:1].repeat(3, 1)), fit),
            (run, algebra.per_head(causal, causal), fit),
            ([*run.layers, *other], causal, r"layers with one number of heads, got \[2, 3\]"),
        ]
        assert_refusals((partial(match, *given), ValueError, message) for *given, message in wrong)


def test_detect():
    """It matches a run on the tokens; templates go by name, or are functions."""
    model, tokens = lm.load_trained()[0], torch.arange(6).repeat(2)[None]
    wanted = match(trace.record(model, tokens), induction(tokens)).detach()
    for template in ("induction", induction):
        assert torch.equal(detect(model, tokens, template), wanted)
    names = "'previous_token', 'duplicate_token', 'induction'"
    wrong = [
        (tokens, "copy", ValueError, f"template must be one of {names}, got 'copy'"),
        (tokens, lambda _: 3, TypeError, "template must be a TokenGraph, got 3"),
        (tokens.float(), "induction", TypeError, "tokens must be an integer tensor"),
        (torch.zeros(0).long(), "induction", ValueError, r"tokens must be .* and not empty"),
    ]
    assert_refusals((partial(detect, model, *given), error, message) for *given, error, message in wrong)
