"""A part of a model in its place: what is replaced, what stays the model's, and what an audit of it sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnn_attention import MessagePassingAttention, StandardHeads, patterns
from gnn_attention.interpret.audit import PartOf, audit

T, WIDTH = 6, 4
WINDOW, CAUSAL = patterns.window(T, 2), patterns.causal(T)
X = torch.randn(1, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A layer that is given its graph and a scale, as transformers gives its layers masks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MessagePassingAttention(StandardHeads(WIDTH, 2), backend="dense")

    def forward(self, flag: int, state: Tensor, graph, scale: Tensor | None = None) -> tuple[Tensor, str]:
        return state + self.attention(state, graph) * (1.0 if scale is None else scale[:, None, None]), "more"


class Model(nn.Module):
    def __init__(self, *graphs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.graphs = nn.ModuleList(Layer() for _ in graphs), graphs
        self.never = nn.Identity()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer, graph in zip(self.layers, self.graphs, strict=True):
            x, _ = layer(1, state=x, graph=graph, scale=scale)
        return x


def model(*graphs):
    return Model(*graphs).double()


def test_the_states_are_the_callers_and_all_else_is_the_models():
    """The second layer, called with its graph and its scale; the first one's output is thrown away."""
    whole, states = model(WINDOW, CAUSAL), torch.randn(3, T, WIDTH, dtype=torch.float64)
    scale = torch.tensor([0.5], dtype=torch.float64)
    expected, _ = whole.layers[1](1, states, CAUSAL, scale.expand(3))
    got, _ = PartOf(whole, "layers.1", x=X, scale=scale)(states)
    assert torch.equal(got, expected)
    assert not torch.equal(got, whole.layers[1](1, states, WINDOW, scale.expand(3))[0])


def test_a_part_shows_what_the_next_layer_hides():
    """Before a causal layer a window of 2 and one of 3 look alike; as a part each is exact."""
    for window in (WINDOW, patterns.window(T, 3)):
        whole = model(window, CAUSAL)
        assert audit(whole, [WINDOW, CAUSAL], (T, WIDTH)).exact
        for name, graph in (("layers.0", window), ("layers.1", CAUSAL)):
            verdict = audit(PartOf(whole, name, x=X), graph, (T, WIDTH))
            assert (verdict.exact, verdict.layers) == (True, 1)
    leaks = audit(PartOf(whole, "layers.0", x=X), WINDOW, (T, WIDTH)).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(src, src + 2) for src in range(T - 2)}
    assert {leak.layer for leak in leaks} == {"attention"}


def test_refusals():
    whole = model(WINDOW)
    for name in ("", "layers.7"):
        with pytest.raises(ValueError, match=rf"part of Model, such as \['layers', 'layers.0'.*got '{name}"):
            PartOf(whole, name, x=X)
    with pytest.raises(ValueError, match="Model does not call 'never' on these inputs"):
        PartOf(whole, "never", x=X)(X)
    part = PartOf(whole, "layers.0", x=X)
    with pytest.raises(ValueError, match=r"must be \[1, 6, 4\], as 'layers.0' is given, got \[1, 6, 5\]"):
        part(torch.zeros(1, T, WIDTH + 1))
    # no hook stays after an error, and the same object serves the next valid call
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in whole.modules())
    assert part(X)[0].shape == (1, T, WIDTH)
