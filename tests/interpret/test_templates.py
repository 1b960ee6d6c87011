"""Compare templates of heads with loops over tokens and dense formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import randn
from torch import Tensor, nn

from gnn_attention import MessagePassingAttention, StandardHeads, algebra, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.circuits.templates import TEMPLATES, detect, induction, previous_token

TOKENS = {
    "repeated": torch.tensor([4, 9, 2, 7, 4, 9, 2, 7]),
    "one": torch.tensor([3]),
    "negative": torch.tensor([-1, -2, -1, -2, -2]),
    "bytes, and none is less than 0": torch.tensor([3, 0, 255, 7, 0, 255], dtype=torch.uint8),
    "several": torch.tensor([[1, 2, 1, 2, 3], [0, 0, 0, 1, 0], [4, 3, 2, 1, 0]]),
}
# Whether src -> dst is an edge, by definition.
DEFINITIONS = {
    "previous_token": lambda t, dst, src: src == dst - 1,
    "duplicate_token": lambda t, dst, src: src < dst and t[src] == t[dst],
    "induction": lambda t, dst, src: 1 <= src <= dst and t[src - 1] == t[dst],
}
CAUSAL = patterns.causal(4)


def loop_mask(name: str, tokens: Tensor) -> Tensor:
    t = tokens.tolist()
    is_edge, n = DEFINITIONS[name], len(t)
    return torch.tensor([[bool(is_edge(t, dst, src)) for src in range(n)] for dst in range(n)])


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
        assert torch.equal(mask, loop_mask(name, row))


GRAPHS = {
    "causal": patterns.causal(6),
    "window": patterns.window(6, 3),
    "strict, 0 isolated": patterns.strict_causal(6),
    "per head": algebra.per_head(patterns.causal(6), patterns.window(6, 2), patterns.strict_causal(6)),
}


class Layers(nn.Module):
    """Layers with these numbers of heads, which ignore the tokens and read fixed states."""

    def __init__(self, graph: Any, x: Tensor, *num_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        forms = (StandardHeads(8, count, head_dim=4).double() for count in num_heads or (3,))
        self.layers = nn.ModuleList(MessagePassingAttention(heads) for heads in forms)
        self.graph, self.x = graph, x

    def forward(self, tokens: Tensor) -> list[Tensor]:
        return [layer(self.x, self.graph) for layer in self.layers]


class TestDetect:
    tokens = torch.tensor([[5, 5, 1, 5, 1, 1], [0, 3, 0, 3, 2, 0]])
    x = randn(2, 6, 8, seed=1)

    @pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_against_dense_formulas(self, graph, name):
        """A loop computes the mean over the receivers that have in-edges in the template."""
        model = Layers(graph, self.x)
        call = trace.record(model, self.tokens).layers[0]
        weights = call.dense(call.weights()).detach()  # [B, H, dst, src]
        templates = torch.stack([loop_mask(name, row) for row in self.tokens]).double()
        expected = []
        for head in range(3):
            pairs = zip(weights[:, head], templates, strict=True)
            rows = [w[dst] @ t[dst] for w, t in pairs for dst in range(6) if t[dst].any()]
            expected.append(torch.stack(rows).mean())
        assert_exact(detect(model, self.tokens, name), torch.stack(expected)[None])

    def test_absent_edges_count_nothing(self):
        """An edge that is cut or not in the graph has weight 0, a muted edge keeps its weight."""
        tokens, ones = torch.arange(4), torch.ones(1, 4, 8, dtype=torch.float64)
        model = Layers(CAUSAL, ones)
        full_score, cut_score = (1 / 2 + 1 / 3 + 1 / 4) / 3, (1 / 2 + 1 / 4) / 3
        assert_exact(detect(model, tokens, previous_token)[0].tolist(), [full_score] * 3)
        with trace.intervene(model, trace.cut([(1, 2)])):
            assert_exact(detect(model, tokens, previous_token)[0].tolist(), [cut_score] * 3)
        with trace.intervene(model, trace.mute([(1, 2)], heads=1)):
            assert_exact(detect(model, tokens, previous_token)[0].tolist(), [full_score] * 3)
        no_edges = CAUSAL - CAUSAL
        for graph in (patterns.window(4, 1), no_edges):
            assert detect(Layers(graph, ones), tokens, previous_token).tolist() == [[0.0] * 3]
        assert detect(model, tokens, lambda _: no_edges).tolist() == [[0.0] * 3]

    def test_refusals(self):
        causal, tokens = patterns.causal(6), self.tokens
        model = Layers(causal, self.x)
        names = "'previous_token', 'duplicate_token', 'induction'"
        fit = "template must have the tokens, samples and heads of LayerTrace"
        cases = [
            (model, tokens, "copy", ValueError, f"template must be one of {names}, got 'copy'"),
            (model, tokens, lambda _: 3, TypeError, "template must be a TokenGraph, got 3"),
            (model, tokens.float(), "induction", TypeError, "tokens must be an integer tensor"),
            (model, torch.zeros(0).long(), "induction", ValueError, "tokens must .* and not be empty"),
            (model, tokens, lambda _: patterns.causal(5), ValueError, fit),
            (model, tokens[:1].repeat(3, 1), induction, ValueError, fit),
            (model, tokens, lambda _: algebra.per_head(causal, causal), ValueError, fit),
            (Layers(causal, self.x, 3, 2), tokens, induction, ValueError, r"layers, got \[2, 3\]"),
        ]
        assert_refusals((partial(detect, *args), error, match) for *args, error, match in cases)
