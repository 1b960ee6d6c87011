"""Malformed calls of ``attend``, of backends and of what a call can tell."""

# mypy: disable-error-code="arg-type"
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from examples.pairwise import weigh
from gnn_attention import edge_softmax, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend, explain
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.backends import dense as dense_backend
from gnn_attention.convert import from_mask
from gnn_attention.graph import TokenGraph
from gnn_attention.patterns import causal, window
from tests.guarantees.malformed.case import Case, Of, Subject

Attributes = Any


def _tensors() -> Attributes:
    """Four query heads in two groups, five tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, dim, generator=generator) for heads, dim in ((4, 3), (2, 3), (2, 6)))
    return SimpleNamespace(q=q, k=k, v=v, graph=window(5, 2))


def _run(o: Attributes, **changed: Any) -> Any:
    return attend(**{"q": o.q, "k": o.k, "v": o.v, "graph": o.graph, **changed})


def _formula(o: Attributes) -> Any:
    """The same window by a dense softmax in float64."""
    q, (k, v) = o.q.double(), (x.double().repeat_interleave(2, dim=1) for x in (o.k, o.v))
    place = torch.arange(5)
    distance = place.unsqueeze(1) - place
    logits = (q @ k.mT / 3**0.5).masked_fill((distance < 0) | (distance > 1), -torch.inf)
    return logits.softmax(-1) @ v


CALL = Subject("attend", _tensors, _run, _formula, compiled=True)
META = torch.device("meta")


def _per_head(o: Attributes) -> TokenGraph:
    graph: TokenGraph = from_mask(
        torch.ones(4, 5, 5, dtype=torch.bool).tril() & torch.eye(5, dtype=torch.bool)
    )
    return graph


def _of_tensors() -> list[Case]:
    of = Of(CALL)

    return [
        of.value(r"^q must be \[B", r"\[4, 5, 3\]", lambda o: _run(o, q=o.q[0])),
        of.value(r"^k must be \[B", r"\[1, 2, 2, 5, 3\]", lambda o: _run(o, k=o.k[None])),
        of.type("^v must be a float tensor", "got list", lambda o: _run(o, v=o.v.tolist())),
        of.type("^q must be a float tensor", "got ndarray", lambda o: _run(o, q=o.q.numpy())),
        of.type("^q must be a float tensor", "torch.int64", lambda o: _run(o, q=o.q.long())),
        of.type("^v must be a float tensor", "complex64", lambda o: _run(o, v=o.v + 0j)),
        of.type("^k must be a float tensor", "torch.bool", lambda o: _run(o, k=o.k > 0)),
        of.value("^k must be like q", "torch.float64", lambda o: _run(o, k=o.k.double())),
        of.value("^v must be like q", "torch.float16", lambda o: _run(o, v=o.v.half())),
        of.value("^k must be like q", "on meta", lambda o: _run(o, k=o.k.to(META))),
        of.value("q and k must agree", r"2, 2, 5, 2\]", lambda o: _run(o, k=o.k[..., :2])),
        of.value(
            "q and k must agree", r"\[3, 2, 5, 3\]", lambda o: _run(o, k=o.k[[0, 1, 0]], v=o.v[[0, 1, 0]])
        ),
        of.value("heads of q", "got 3 and 2", lambda o: _run(o, q=o.q[:, :3])),
        of.value("heads of k", "got 4 and 0", lambda o: _run(o, k=o.k[:, :0], v=o.v[:, :0])),
        of.value("k and v must agree", r"\[2, 2, 4, 6\]", lambda o: _run(o, v=o.v[:, :, :4])),
        of.value("^q must have", r"\[2, 4, 5, 0\]", lambda o: _run(o, q=o.q[..., :0], k=o.k[..., :0])),
    ]


def _of_graphs() -> list[Case]:
    of = Of(CALL)

    return [
        of.type("^graph must be a TokenGraph", "got NoneType", lambda o: _run(o, graph=None)),
        of.type("^graph must", "got Tensor", lambda o: _run(o, graph=torch.ones(5, 5).bool())),
        of.type("^graph must", "got str", lambda o: _run(o, graph="causal(5)")),
        of.value("does not fit q", r"window\(6, 2\)", lambda o: _run(o, graph=window(6, 2))),
        of.value("does not fit q", "5 receivers", lambda o: _run(o, graph=o.graph.rows(0, 4))),
        of.value("but q has heads 4", "differs by heads", lambda o: _run(o, graph=_by_heads(3))),
        of.value("but q has batch 2", "differs by batch", lambda o: _run(o, graph=_by_batch(3))),
    ]


def _by_heads(heads: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 5, heads=heads)


def _by_batch(batch: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + b <= dst, 5, batch=batch)


def _of_additions() -> list[Case]:
    of = Of(CALL)

    return [
        of.value("^bias must", r"\[1, 2, 4, 9\]", lambda o: _run(o, bias=torch.ones(1, 2, 4, 9))),
        of.value("^bias must", r"got \[5, 5\]", lambda o: _run(o, bias=torch.ones(5, 5))),
        of.value("^bias must", r"got \[8\]", lambda o: _run(o, bias=torch.ones(8))),
        of.type("^bias must", "got list", lambda o: _run(o, bias=[0.0] * 9)),
        of.type("^bias must", "torch.int64", lambda o: _run(o, bias=torch.ones(9).long())),
        of.value("^bias must", "got meta", lambda o: _run(o, bias=torch.ones(9, device=META))),
        of.value("no single edge list", "head", lambda o: _run(o, graph=_by_heads(4), bias=o.q[0, 0, 0])),
        of.value("^sink_logits must", r"got \[3\]", lambda o: _run(o, sink_logits=torch.ones(3))),
        of.value("^sink_logits must", r"got \[2, 4\]", lambda o: _run(o, sink_logits=torch.ones(2, 4))),
        of.type("^sink_logits must", "got float", lambda o: _run(o, sink_logits=1.0)),
        of.value("^sink_logits must", "got meta", lambda o: _run(o, sink_logits=torch.ones(4, device=META))),
        of.value("^dropout must", "got 1.0", lambda o: _run(o, dropout=1.0)),
        of.value("^dropout must", "got -0.1", lambda o: _run(o, dropout=-0.1)),
        of.value("^dropout must", "got nan", lambda o: _run(o, dropout=float("nan"))),
        of.value("^dropout must", "got True", lambda o: _run(o, dropout=True)),
        of.value("^dropout must", "got '0.1'", lambda o: _run(o, dropout="0.1")),
        of.type("^scale must", "got Tensor", lambda o: _run(o, scale=torch.tensor(0.5))),
        of.type("^scale must", "got str", lambda o: _run(o, scale="0.5")),
        of.type("^scale must", "got bool", lambda o: _run(o, scale=True)),
        of.value("^scale must be finite", "got inf", lambda o: _run(o, scale=float("inf"))),
        of.value("^scale must be finite", "got nan", lambda o: _run(o, scale=float("nan"))),
    ]


def _with(mod: Any) -> Any:
    return lambda o: _run(o, score_mod=mod)


def _of_score_mods() -> list[Case]:
    of, six = Of(CALL), "score, b, h, dst, src, more"
    return [
        of.type("^score_mod must", "got float", _with(2.0)),
        of.type("^score_mod must", r"of \(score, b\)", _with(lambda score, b: score)),
        of.type("^score_mod must", six, _with(lambda score, b, h, dst, src, more: score)),
        of.type("^score_mod must", "NoneType", _with(lambda score, b, h, dst, src: None)),
        of.type("^score_mod must", "bool tensor", _with(lambda score, b, h, dst, src: src <= dst)),
        of.type("^score_mod must", "int64 tensor", _with(lambda score, b, h, dst, src: dst - src)),
        of.value("^score_mod must", r"got \[1, ", _with(lambda score, b, h, dst, src: score[None])),
        of.value("^score_mod must", "got ", _with(lambda score, b, h, dst, src: score[..., 1:])),
    ]


def _of_backends() -> list[Case]:
    of = Of(CALL)

    def own(run: Any) -> Backend:
        return Backend("own", run)

    return [
        of.value("^backend must be one of 'auto', 'dense'", "got 'fast'", lambda o: _run(o, backend="fast")),
        of.type("^backend must", "got int", lambda o: _run(o, backend=3)),
        of.type("^backend must", "got NoneType", lambda o: _run(o, backend=None)),
        of.type("^backend must", "got function", lambda o: _run(o, backend=dense_backend.run)),
        Of(CALL).refused("varlen", "window", lambda o: _run(o, backend="varlen"), RefusalError),
        of.type("^backend 'own'", "Tensor", lambda o: _run(o, backend=own(lambda call: call.q))),
        of.value(
            "^backend 'own'", r"\[2, 4, 5, 3\]", lambda o: _run(o, backend=own(lambda call: (call.q, None)))
        ),
    ]


def _info(o: Attributes) -> Any:
    return _run(o, return_info=True)[1]


def _weights(o: Attributes) -> Tensor:
    """Of the edge 0 -> 0: token 0 attends to itself alone."""
    weights: Tensor = _info(o).weights(torch.tensor([0]))
    return weights


INFO = Subject("info.weights", _tensors, _weights, lambda o: torch.ones(2, 4, 1))
OWN = Subject("Backend", _tensors, lambda o: _run(o, backend=Backend("own", dense_backend.run)), _formula)
EXPLAINED = Subject("explain", lambda: None, lambda _: explain(causal(64), 2, 8).choice, lambda _: "dense")


def _asking(edges: Any) -> Any:
    return lambda o: _info(o).weights(edges)


def _of_info() -> list[Case]:
    of = Of(INFO)
    return [
        of.type("^edges must be integers", "torch.float32", _asking(torch.ones(2))),
        of.type("^edges must be integers", "torch.bool", _asking(torch.ones(9).bool())),
        of.index(r"^edges must be positions in 0 \.\. 8", r"0 \.\. 9", _asking(torch.tensor([0, 9]))),
        of.value("0 -> 3 is no edge", "window", _asking(torch.tensor([[0], [3]]))),
        of.value("must have shape", r"got \[3, 2\]", _asking(torch.tensor([[0, 0], [0, 1], [1, 1]]))),
        of.type("must be a tensor", "got list", _asking([(0, 0)])),
    ]


def _of_table() -> list[Case]:
    def backend(argument: str, came: str, *given: Any, **named: Any) -> Case:
        return Of(OWN).type(argument, came, lambda o: Backend(*given, **named))

    def explained(error: type[BaseException], argument: str, came: str, *given: Any, **named: Any) -> Case:
        return Case(EXPLAINED, error, argument, came, lambda _: explain(*given, **named))

    return [
        backend("^name of a Backend", "got 3 of type int", 3, dense_backend.run),
        backend("^run of a Backend", "got None", "own", None),
        backend(
            "^unsupported_reason of a Backend", "got 'no'", "own", dense_backend.run, unsupported_reason="no"
        ),
        backend("^bytes_needed of a Backend", "got 5", "own", dense_backend.run, bytes_needed=5),
        explained(TypeError, "^graph must", "got 3 of type int", 3, 2, 8),
        explained(ValueError, "^heads must", "got 0", causal(4), 0, 8),
        explained(TypeError, "^dim must", "got 0.5", causal(4), 2, 0.5),
        explained(ValueError, "^device must", "got 'abacus'", causal(4), 2, 8, device="abacus"),
        explained(TypeError, "^dtype must", "got 'float32'", causal(4), 2, 8, dtype="float32"),
    ]


LOGITS, DST = torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 0, 2])
SOFTMAX = Subject(
    "edge_softmax.softmax",
    lambda: None,
    lambda _: edge_softmax.softmax(LOGITS, DST, 3)[0],
    lambda _: torch.tensor([0.5, 0.5, 1.0]),
)
LOGIT = Subject(
    "edge_softmax.logit",
    lambda: None,
    lambda _: edge_softmax.logit(LOGITS, LOGITS, 0.5),
    lambda _: torch.tensor(12.5),
)
ONE, LSE = torch.ones(2, 1), torch.zeros(2)
MERGE = Subject(
    "edge_softmax.merge",
    lambda: None,
    lambda _: edge_softmax.merge(ONE, LSE, 3 * ONE, LSE)[0],
    lambda _: 2 * ONE,
)
OUT, HAS_EDGES = torch.ones(1, 1, 1, 1), torch.ones(1, dtype=torch.bool)
SINKS = Subject(
    "edge_softmax.add_sinks",
    lambda: None,
    lambda _: edge_softmax.add_sinks(OUT, torch.zeros(1, 1, 1), torch.zeros(1), HAS_EDGES)[0],
    lambda _: OUT / 2,
)
MODS = Subject("score_mods", lambda: None, lambda _: score_mods.alibi_slopes(4)[0], lambda _: 0.25)


def _of_edges() -> list[Case]:
    def softmax(error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(SOFTMAX, error, argument, came, lambda _: edge_softmax.softmax(*given))

    def merge(error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(MERGE, error, argument, came, lambda _: edge_softmax.merge(*given))

    def sinks(error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(SINKS, error, argument, came, lambda _: edge_softmax.add_sinks(*given))

    return [
        softmax(TypeError, "^logits must", "torch.int64", DST, DST, 3),
        softmax(TypeError, "^logits must", "got list", [0.0], DST, 3),
        softmax(TypeError, "^dst must be int64", "torch.float32", LOGITS, LOGITS, 3),
        softmax(ValueError, "^dst must be", r"\[2\], \[3\]", LOGITS, DST[:2], 3),
        softmax(IndexError, "^dst must be receivers in 0 .. 1", r"0 \.\. 2", LOGITS, DST, 2),
        softmax(IndexError, "^dst must be receivers", r"-1 \.\. 1", LOGITS, DST - 1, 3),
        softmax(TypeError, "^num_dst must", "got 3.0", LOGITS, DST, 3.0),
        softmax(ValueError, "^sink_logits must", r"got \[2\]", LOGITS, DST, 3, torch.ones(2)),
        Of(LOGIT).value("q_dst and k_src", "3 and 2", lambda _: edge_softmax.logit(LOGITS, LOGITS[:2], 1.0)),
        Of(LOGIT).value(
            "q_dst and k_src",
            r"\[3, 1\]",
            lambda _: edge_softmax.logit(torch.ones(2, 1), torch.ones(3, 1), 1.0),
        ),
        Of(LOGIT).type("^scale must", "got '1'", lambda _: edge_softmax.logit(LOGITS, LOGITS, "1")),
        merge(ValueError, "^lse_a must", r"\[3\]", ONE, torch.zeros(3), ONE, LSE),
        merge(ValueError, "^out_b must", r"\[2, 2\]", ONE, LSE, torch.ones(2, 2), LSE),
        merge(TypeError, "^lse_b must", "got int", ONE, LSE, ONE, 0),
        sinks(
            ValueError,
            "^sink_logits must",
            r"got \[2\]",
            OUT,
            torch.zeros(1, 1, 1),
            torch.zeros(2),
            HAS_EDGES,
        ),
        sinks(
            TypeError,
            "^has_in_edges must",
            "torch.float32",
            OUT,
            torch.zeros(1, 1, 1),
            torch.zeros(1),
            HAS_EDGES.float(),
        ),
        Of(LOGIT).value(
            "^num_heads must", "got 3", lambda _: edge_softmax.per_query_head(torch.ones(1, 2, 1), 3)
        ),
        Of(SOFTMAX).value(
            "^lse must", r"\[1, 3\]", lambda _: edge_softmax.weights_from_lse(LOGITS, DST, torch.ones(1, 3))
        ),
        Of(SOFTMAX).value("^normaliser must", "'hard'", lambda _: weigh(LOGITS, DST, 3, "hard")),
    ]


def _of_mods() -> list[Case]:
    of = Of(MODS)

    return [
        of.value("^num_heads must", "got 0", lambda _: score_mods.alibi_slopes(0)),
        of.value("^cap must", "got 0.0", lambda _: score_mods.softcap(0.0)),
        of.type("^cap must", "got '30'", lambda _: score_mods.softcap("30")),
        of.type("^slopes must", "got 0.5", lambda _: score_mods.alibi(0.5)),
        of.value(
            "^multiplicity must", r"\[1, 2, 2\]", lambda _: score_mods.log_multiplicity(torch.ones(1, 2, 2))
        ),
        of.type("^multiplicity must", "got list", lambda _: score_mods.log_multiplicity([1.0])),
        of.value("^table must", r"\[2, 4\]", lambda _: score_mods.relative_bias(torch.ones(2, 4))),
        of.type("^table must", "got list", lambda _: score_mods.relative_bias([[1.0]])),
        of.value("^reach must", "got -1", lambda _: score_mods.RelativeBias(2, -1)),
        of.type("^every link must", "got str", lambda _: score_mods.chain(score_mods.softcap(1.0), "alibi")),
    ]


def cases() -> list[Case]:
    found = [*_of_tensors(), *_of_graphs(), *_of_additions(), *_of_score_mods(), *_of_backends()]
    found += [*_of_info(), *_of_table(), *_of_edges(), *_of_mods()]
    return found
