"""A part of a model in its place: what is replaced, what stays the model's, and what an audit of it sees."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gnn_attention import MessagePassingAttention, StandardHeads, patterns
from gnn_attention.interpret.audit import PartOf, audit

T, WIDTH = 6, 4
WINDOW, CAUSAL = patterns.window(T, 2), patterns.causal(T)


class Layer(nn.Module):
    """A layer that is told its graph, and by how much to scale, as transformers tells its layers of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MessagePassingAttention(StandardHeads(WIDTH, 2), backend="dense")

    def forward(self, flag: int, state: Tensor, graph, scale: Tensor | None = None) -> tuple[Tensor, str]:
        return state + self.attention(state, graph) * (1.0 if scale is None else scale[:, None, None]), "more"


class Model(nn.Module):
    """Two layers, a narrow one and a wide one in whose shadow it stands."""

    def __init__(self, *graphs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.graphs = nn.ModuleList(Layer() for _ in graphs), graphs

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer, graph in zip(self.layers, self.graphs, strict=True):
            x, _ = layer(1, state=x, graph=graph, scale=scale)
        return x


def model(*graphs):
    """In float64, that numbers can be compared."""
    return Model(*graphs).double()


X = torch.randn(1, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_states_are_the_callers_and_all_else_is_the_models():
    """The second layer, called with its graph and its scale; the first one's output is thrown away."""
    whole, states = model(WINDOW, CAUSAL), torch.randn(3, T, WIDTH, dtype=torch.float64)
    scale = torch.tensor([0.5], dtype=torch.float64)
    expected, _ = whole.layers[1](1, states, CAUSAL, scale.expand(3))
    got, _ = PartOf(whole, "layers.1", x=X, scale=scale)(states)
    assert torch.equal(got, expected)
    assert not torch.equal(got, whole.layers[1](1, states, WINDOW, scale.expand(3))[0])


def test_other_hooks_see_what_the_part_gets():
    """Those that were there before, too: the audit watches by hooks."""
    whole, met = model(WINDOW), []
    whole.layers[0].attention.register_forward_pre_hook(lambda _, given: met.append(given[0]))
    PartOf(whole, "layers.0.attention", x=X)(X + 1)
    assert torch.equal(met[0], X + 1)


def test_inputs_of_one_sample_are_repeated_and_change_their_dtype():
    """Floating ones only; what is no tensor stays as it is."""
    met = {}

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, **given):
            met.update(given)
            return self.part(torch.zeros(len(given["ids"]), T, WIDTH))

    given = {"ids": torch.ones(1, T, dtype=torch.long), "x": torch.zeros(1, 2), "flag": "yes"}
    PartOf(Asks(), "part", **given)(torch.zeros(5, T, WIDTH).double())
    assert (met["ids"].shape, met["ids"].dtype) == ((5, T), torch.long)
    assert (met["x"].shape, met["x"].dtype) == ((5, 2), torch.float64)
    assert met["flag"] == "yes"


def test_only_the_first_call_is_replaced():
    """A part that is called twice runs on the model's own states the second time."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.met = nn.Identity(), []

        def forward(self, x):
            self.met.append(self.part(x))
            self.met.append(self.part(2 * x))
            return x

    twice = Twice()
    PartOf(twice, "part", x=torch.ones(1, T, WIDTH))(torch.zeros(1, T, WIDTH))
    assert [float(x.mean()) for x in twice.met] == [0.0, 2.0]


def test_no_hook_stays():
    """Not even after an error."""
    whole = model(WINDOW, CAUSAL)
    for states in (torch.zeros(1, T, WIDTH).double(), torch.zeros(1, T, WIDTH + 1).double()):
        try:
            PartOf(whole, "layers.1", x=X)(states)
        except ValueError:
            continue
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in whole.modules())


def test_a_layer_comes_out_of_the_shadow_of_the_next():
    for window in (WINDOW, patterns.window(T, 3)):
        whole = model(window, CAUSAL)
        assert audit(whole, [WINDOW, CAUSAL], (T, WIDTH)).exact
        for name, graph in (("layers.0", window), ("layers.1", CAUSAL)):
            verdict = audit(PartOf(whole, name, x=X), graph, (T, WIDTH))
            assert (verdict.exact, verdict.layers) == (True, 1)
    leaks = audit(PartOf(whole, "layers.0", x=X), WINDOW, (T, WIDTH)).leaks
    assert {(leak.src, leak.dst) for leak in leaks} == {(src, src + 2) for src in range(T - 2)}
    assert {leak.layer for leak in leaks} == {"attention"}
    assert "comes in at attention" in str(leaks[0])


def test_the_model_is_left_as_it_was():
    """The audit works on a copy of the whole."""
    whole = model(WINDOW, CAUSAL).float()
    before = copy.deepcopy(whole.state_dict())
    audit(PartOf(whole, "layers.0", x=X), WINDOW, (T, WIDTH))
    assert all(
        torch.equal(value, before[name]) and value.dtype == torch.float32
        for name, value in whole.state_dict().items()
    )


@pytest.mark.parametrize("name", ["", "layers.7", "attention"])
def test_a_part_that_is_none(name):
    """The message tells what names look like."""
    with pytest.raises(
        ValueError,
        match=r"part must be the name of a part of Model, such as \['layers', 'layers.0'.*got '" + name,
    ):
        PartOf(model(WINDOW), name, x=X)


def test_a_part_that_is_not_called_or_gets_other_states():
    """Both are named; the same object serves the next valid call."""
    whole = model(WINDOW)
    whole.never = nn.Identity()
    with pytest.raises(ValueError, match="Model does not call 'never' on these inputs"):
        PartOf(whole, "never", x=X)(X)
    part = PartOf(whole, "layers.0", x=X)
    with pytest.raises(
        ValueError, match=r"states must be as 'layers.0' is given them, \[1, 6, 4\], got \[1, 6, 5\]"
    ):
        part(torch.zeros(1, T, WIDTH + 1))
    with pytest.raises(ValueError, match=r"as 'word' is given them, None, got \[1, 6, 4\]"):
        PartOf(Named(), "word", ids=torch.zeros(1, T, dtype=torch.long))(X)
    assert part(X)[0].shape == (1, T, WIDTH)


class Named(nn.Module):
    """A model of ids, whose embedding is given no states."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(3, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids)
