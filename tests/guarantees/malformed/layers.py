"""Malformed heads and layers."""

# mypy: disable-error-code="arg-type"
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from examples.pairwise import BothEnds, PairwiseMessages, StaticNodes
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.patterns import window
from gnn_attention.rotary import Rotary
from tests.guarantees.malformed.case import Case, Of, Subject

Error = type[BaseException]
Attributes = Any


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of_two(**options: Any) -> StandardHeads:
    """Two heads of four channels, the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return StandardHeads(8, 2, **options)


def update_of(heads: StandardHeads, x: Tensor, wanted: Tensor) -> Tensor:
    """The formula of attention for one sequence ``[T, 8]``, pairs as a mask, in float64."""
    found = torch.zeros(len(wanted), 8, dtype=torch.float64)
    assert heads.W_O is not None
    for W_Q, W_K, W_V, W_O in zip(heads.W_Q, heads.W_K, heads.W_V, heads.W_O, strict=True):
        q, k, v = (x.double() @ matrix.double() for matrix in (W_Q, W_K, W_V))
        found += (q @ k.mT * heads.scale).masked_fill(~wanted, -torch.inf).softmax(-1) @ v @ W_O.double()
    return found


def window_of(n: int) -> Tensor:
    """Every token attends to itself and the one before, read off the definition."""
    distance = torch.arange(n).unsqueeze(1) - torch.arange(n)
    return (distance == 0) | (distance == 1)


def _through_heads(heads: Any) -> Tensor:
    x = numbers(1, 5, 8)
    q, (k, v) = heads.receive(x), heads.send(x)
    out: Tensor = heads.collect(attend(q, k, v, window(5, 2), heads.scale))
    return out[0].detach()


HEADS = Subject(
    "heads",
    heads_of_two,
    _through_heads,
    lambda heads: update_of(heads, numbers(5, 8), window_of(5)).detach(),
)


def _of_heads() -> list[Case]:
    of = Of(HEADS)

    eye = torch.eye(4)[None]
    return [
        of.value("^width must", "got 0", lambda _: StandardHeads(0, 2)),
        of.type("^width must", "got '8'", lambda _: StandardHeads("8", 2)),
        of.value("give head_dim", "width 8 .* num_heads 3", lambda _: StandardHeads(8, 3)),
        of.type("^num_heads must", "got 2.5", lambda _: StandardHeads(8, 2.5)),
        of.value("num_kv_heads", "got 4 and 3", lambda _: StandardHeads(8, 4, num_kv_heads=3)),
        of.value("^head_dim must", "got -4", lambda _: StandardHeads(8, 2, head_dim=-4)),
        of.type("^rotary must", "got bool", lambda _: StandardHeads(8, 2, rotary=True)),
        of.value("head_dim must be even", "got 3", lambda _: StandardHeads(6, 2, rotary=Rotary())),
        of.value("^base must", "got 0.0", lambda _: Rotary(0.0)),
        of.type("^base must", "got '10000'", lambda _: Rotary("10000")),
        of.value("^x must", r"\[1, 5, 7\]", lambda heads: heads.receive(numbers(1, 5, 7))),
        of.value("^x must", "torch.float64", lambda heads: heads.send(numbers(1, 5, 8).double())),
        of.type("^x must", "got list", lambda heads: heads.receive([[0.0] * 8])),
        of.value("^layout must", "'rows'", lambda _: StandardHeads.from_arrays(eye, eye, eye, layout="rows")),
        of.type("^W_Q must", "torch.int64", lambda _: StandardHeads.from_arrays(eye.long(), eye, eye)),
        of.type("^W_K must", "got 'keys'", lambda _: StandardHeads.from_arrays(eye, "keys", eye)),
        of.value("W_Q and W_K", "4 and 3", lambda _: StandardHeads.from_arrays(eye, eye[..., :3], eye)),
        of.type("^attention must", "got Linear", lambda _: StandardHeads.from_mha(nn.Linear(2, 2))),
        of.type("FactoredHeads.of needs", "got Linear", lambda _: FactoredHeads.of(nn.Linear(2, 2))),
        of.value(
            "cannot hold rotary", "MergedHeads", lambda _: MergedHeads.of(heads_of_two(rotary=Rotary()))
        ),
        of.value("^side must", "got 'left'", lambda heads: MergedHeads.of(heads, side="left")),
        of.value("rotary_dim must be even", "got 3", lambda _: LatentHeads(8, 2, 4, 3, 6)),
        of.type("^rotary must", "got str", lambda _: LatentHeads(8, 2, 4, 2, 6, rotary="yes")),
        of.value("^num_heads must", "got 0", lambda _: LazyHeads(0, 4)),
    ]


def _layer(**options: Any) -> Attributes:
    return SimpleNamespace(
        layer=MessagePassingAttention(heads_of_two(), **options), x=numbers(5, 8), graph=window(5, 2)
    )


def _good_layer(o: Attributes) -> Tensor:
    out: Tensor = o.layer(o.x, o.graph).detach()
    return out


def _truth_of_layer(o: Attributes) -> Tensor:
    return update_of(o.layer.heads, o.x, window_of(5)).detach()


WALK = Subject("layer", _layer, _good_layer, _truth_of_layer, compiled=True)
AUTO = Subject(
    "layer with a backend", lambda: _layer(backend="auto"), _good_layer, _truth_of_layer, compiled=True
)
EDGES = [[0, 0, 1, 1, 2, 2, 3, 3, 4], [0, 1, 1, 2, 2, 3, 3, 4, 4]]  # the window as a list


def _of_states() -> list[Case]:
    of = Of(WALK)

    found = [
        of.value("^x must", r"got \[8\]", lambda o: o.layer(o.x[0], o.graph)),
        of.value("^x must", r"\[1, 1, 5, 8\]", lambda o: o.layer(o.x[None, None], o.graph)),
        of.value("^x must", r"\[1, 5, 6\]", lambda o: o.layer(o.x[:, :6], o.graph)),
        of.value("^x must", "torch.float64", lambda o: o.layer(o.x.double(), o.graph)),
        of.value("^x must", "torch.int64", lambda o: o.layer(o.x.long(), o.graph)),
        of.type("^x must", "got list|got float", lambda o: o.layer(o.x.tolist(), o.graph)),
        of.type("^x must", "Tensor, Tensor, Tensor", lambda o: o.layer((o.x, o.x, o.x), o.graph)),
        of.value("^x must", r"\[1, 5, 8\]", lambda o: o.layer((o.x, o.x[None]), o.graph)),
        of.type("needs one graph", "got none", lambda o: o.layer(o.x)),
        of.type(
            "needs one graph", "got both", lambda o: o.layer(o.x, o.graph, edge_index=torch.tensor(EDGES))
        ),
        of.value("does not fit x", r"window\(6, 2\)", lambda o: o.layer(o.x, window(6, 2))),
        of.type("expected a torch_geometric Data", "got 'causal", lambda o: o.layer(o.x, "causal(5)")),
        of.type(
            "expected a torch_geometric|^edge_index must",
            "torch.bool",
            lambda o: o.layer(o.x, torch.ones(5, 5).bool()),
        ),
        of.value("^bias must", r"got \[4\]", lambda o: o.layer(o.x, o.graph, bias=torch.ones(4))),
        of.type("^bias must", "got list", lambda o: o.layer(o.x, o.graph, bias=[0.0])),
    ]
    return [replace(one, subject=AUTO) if number % 2 else one for number, one in enumerate(found)]


def _listed(change: Any) -> Any:
    return lambda o: o.layer(o.x, change(torch.tensor(EDGES)))


def _of_lists() -> list[Case]:
    of, walk, shape = Of(AUTO), Of(WALK), r"^edge_index must have shape \[2, E\]"
    return [
        of.type("expected a torch_geometric", "torch.float32", _listed(lambda e: e.float())),
        of.value(shape, r"\[9, 2\]", _listed(lambda e: e.t())),
        of.value(shape, r"\[9\]", _listed(lambda e: e[0])),
        of.index(r"^edge_index\[0, 0\]", "= -1", _listed(lambda e: e - 1)),
        of.index(r"^edge_index\[0, 8\]", "= 5", _listed(lambda e: e + 1)),
        of.value(
            "^edge_index holds 1 duplicate",
            "stands at 0 and 9",
            _listed(lambda e: torch.cat([e, e[:, :1]], 1)),
        ),
        of.type("^edge_index must", "torch.uint8", _listed(lambda e: e.to(torch.uint8))),
        walk.type("expected a torch_geometric", "torch.float32", _listed(lambda e: e.float())),
        walk.index("^edge_index", "-1", _listed(lambda e: e - 1)),
        walk.value(shape, r"\[9, 2\]", _listed(lambda e: e.t())),
    ]


def _of_layers() -> list[Case]:
    of = Of(LAYERS)

    return [
        of.type("^heads must", "got int", lambda _: MessagePassingAttention(3)),
        of.type("^heads must", "got Linear", lambda _: MessagePassingAttention(nn.Linear(2, 2))),
        of.value("^dropout must", "got 2", lambda _: MessagePassingAttention(heads_of_two(), dropout=2)),
        of.type(
            "^score_mod must", "got float", lambda _: MessagePassingAttention(heads_of_two(), score_mod=1.0)
        ),
        of.value(
            "^backend must", "got 'fast'", lambda _: MessagePassingAttention(heads_of_two(), backend="fast")
        ),
        of.type("^backend must", "got int", lambda _: MessagePassingAttention(heads_of_two(), backend=3)),
        of.refused(
            "the message-passing path needs one edge list",
            "varies",
            lambda o: MessagePassingAttention(heads_of_two(), backend="message_passing")(
                o.x, TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 5, heads=2)
            ),
        ),
        of.type("^message must", "got None", lambda _: PairwiseMessages(None)),
        of.value(
            "^normaliser must", "'hard'", lambda _: PairwiseMessages(BothEnds(8, 4, 8), normaliser="hard")
        ),
        of.type("^messages must", "of type list", lambda _: StaticNodes(torch.eye(2), [[1.0]])),
        of.value("messages", r"\[3, 3\]", lambda _: StaticNodes(torch.eye(2), torch.eye(3))),
        of.value("^hidden must", "got 0", lambda _: BothEnds(8, 0, 8)),
    ]


LAYERS = Subject("a layer", _layer, _good_layer, _truth_of_layer)


def cases() -> list[Case]:
    return [*_of_heads(), *_of_states(), *_of_lists(), *_of_layers()]
