"""Malformed calls of ``attend``, of backends and of what a call can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gnn_attention import edges, score_mods
from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend, explain
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.backends import dense as dense_backend
from gnn_attention.convert import from_mask
from gnn_attention.figures._malformed_case import Case, Subject
from gnn_attention.general import weigh
from gnn_attention.graph import TokenGraph
from gnn_attention.patterns import causal, window

__all__ = ["cases"]

Attributes = Any


def _tensors() -> Attributes:
    """Four query heads in two groups, five tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, dim, generator=generator) for heads, dim in ((4, 3), (2, 3), (2, 6)))
    return SimpleNamespace(q=q, k=k, v=v, graph=window(5, 2))


def _run(o: Attributes, **changed: Any) -> Any:
    return attend(**{"q": o.q, "k": o.k, "v": o.v, "graph": o.graph, **changed})


def _formula(o: Attributes) -> Tensor:
    """The same window by a dense softmax in float64."""
    q, (k, v) = o.q.double(), (x.double().repeat_interleave(2, dim=1) for x in (o.k, o.v))
    place = torch.arange(5)
    distance = place.unsqueeze(1) - place
    logits = (q @ k.mT / 3**0.5).masked_fill((distance < 0) | (distance > 1), -torch.inf)
    return logits.softmax(-1) @ v


CALL = Subject("attend", _tensors, _run, _formula, compiled=True)
META = torch.device("meta")


def _per_head(o: Attributes) -> TokenGraph:
    graph: TokenGraph = from_mask(torch.ones(4, 5, 5, dtype=torch.bool).tril() & torch.eye(5, dtype=torch.bool))
    return graph


def _of_tensors() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, bad: Any) -> Case:
        return Case(CALL, what, error, argument, came, bad)

    return [
        case("q of three axes", ValueError, r"^q must be \[B", r"\[4, 5, 3\]", lambda o: _run(o, q=o.q[0])),
        case("k of five axes", ValueError, r"^k must be \[B", r"\[1, 2, 2, 5, 3\]", lambda o: _run(o, k=o.k[None])),
        case("v a list", TypeError, "^v must be a float tensor", "got list", lambda o: _run(o, v=o.v.tolist())),
        case("q a numpy array", TypeError, "^q must be a float tensor", "got ndarray", lambda o: _run(o, q=o.q.numpy())),
        case("q of integers", TypeError, "^q must be a float tensor", "torch.int64", lambda o: _run(o, q=o.q.long())),
        case("v complex", TypeError, "^v must be a float tensor", "complex64", lambda o: _run(o, v=o.v + 0j)),
        case("k of bools", TypeError, "^k must be a float tensor", "torch.bool", lambda o: _run(o, k=o.k > 0)),
        case("k in float64", ValueError, "^k must be like q", "torch.float64", lambda o: _run(o, k=o.k.double())),
        case("v in half", ValueError, "^v must be like q", "torch.float16", lambda o: _run(o, v=o.v.half())),
        case("k on another device", ValueError, "^k must be like q", "on meta", lambda o: _run(o, k=o.k.to(META))),
        case("k of another width", ValueError, "q and k must agree", r"2, 2, 5, 2\]", lambda o: _run(o, k=o.k[..., :2])),
        case("k of other samples", ValueError, "q and k must agree", r"\[1, 2, 5, 3\]", lambda o: _run(o, k=o.k[:1], v=o.v[:1])),
        case("heads that do not group", ValueError, "heads of q", "got 3 and 2", lambda o: _run(o, q=o.q[:, :3])),
        case("k without heads", ValueError, "heads of k", "got 4 and 0", lambda o: _run(o, k=o.k[:, :0], v=o.v[:, :0])),
        case("v of fewer tokens", ValueError, "k and v must agree", r"\[2, 2, 4, 6\]", lambda o: _run(o, v=o.v[:, :, :4])),
        case("no channels", ValueError, "^q must have", r"\[2, 4, 5, 0\]", lambda o: _run(o, q=o.q[..., :0], k=o.k[..., :0])),
    ]


def _of_graphs() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, bad: Any) -> Case:
        return Case(CALL, what, error, argument, came, bad)

    return [
        case("no graph", TypeError, "^graph must be a TokenGraph", "got NoneType", lambda o: _run(o, graph=None)),
        case("a mask for a graph", TypeError, "^graph must", "got Tensor", lambda o: _run(o, graph=torch.ones(5, 5).bool())),
        case("a text for a graph", TypeError, "^graph must", "got str", lambda o: _run(o, graph="causal(5)")),
        case("a graph of more tokens", ValueError, "does not fit q", r"window\(6, 2\)", lambda o: _run(o, graph=window(6, 2))),
        case("some rows of a graph", ValueError, "does not fit q", "5 receivers", lambda o: _run(o, graph=o.graph.rows(0, 4))),
        case(
            "a graph of other heads", ValueError, "but q has heads 4", "differs by heads", lambda o: _run(o, graph=_by_heads(3))
        ),
        case(
            "a graph of other samples", ValueError, "but q has batch 2", "differs by batch", lambda o: _run(o, graph=_by_batch(3))
        ),
    ]


def _by_heads(heads: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 5, heads=heads)


def _by_batch(batch: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + b <= dst, 5, batch=batch)


def _of_additions() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, bad: Any) -> Case:
        return Case(CALL, what, error, argument, came, bad)

    return [
        case("a bias of four axes", ValueError, "^bias must", r"\[1, 2, 4, 9\]", lambda o: _run(o, bias=torch.ones(1, 2, 4, 9))),
        case("a bias for pairs", ValueError, "^bias must", r"got \[5, 5\]", lambda o: _run(o, bias=torch.ones(5, 5))),
        case("a bias of other edges", ValueError, "^bias must", r"got \[8\]", lambda o: _run(o, bias=torch.ones(8))),
        case("a bias list", TypeError, "^bias must", "got list", lambda o: _run(o, bias=[0.0] * 9)),
        case("a bias of integers", TypeError, "^bias must", "torch.int64", lambda o: _run(o, bias=torch.ones(9).long())),
        case("a bias elsewhere", ValueError, "^bias must", "got meta", lambda o: _run(o, bias=torch.ones(9, device=META))),
        case(
            "a bias where heads differ",
            ValueError,
            "no single edge list",
            "head",
            lambda o: _run(o, graph=_by_heads(4), bias=o.q[0, 0, 0]),
        ),
        case("too few sinks", ValueError, "^sink_logits must", r"got \[3\]", lambda o: _run(o, sink_logits=torch.ones(3))),
        case(
            "sinks by sample", ValueError, "^sink_logits must", r"got \[2, 4\]", lambda o: _run(o, sink_logits=torch.ones(2, 4))
        ),
        case("a sink number", TypeError, "^sink_logits must", "got float", lambda o: _run(o, sink_logits=1.0)),
        case(
            "sinks elsewhere",
            ValueError,
            "^sink_logits must",
            "got meta",
            lambda o: _run(o, sink_logits=torch.ones(4, device=META)),
        ),
        case("dropout of 1", ValueError, "^dropout must", "got 1.0", lambda o: _run(o, dropout=1.0)),
        case("dropout below 0", ValueError, "^dropout must", "got -0.1", lambda o: _run(o, dropout=-0.1)),
        case("dropout NaN", ValueError, "^dropout must", "got nan", lambda o: _run(o, dropout=float("nan"))),
        case("dropout True", ValueError, "^dropout must", "got True", lambda o: _run(o, dropout=True)),
        case("a dropout text", ValueError, "^dropout must", "got '0.1'", lambda o: _run(o, dropout="0.1")),
        case("a scale tensor", TypeError, "^scale must", "got Tensor", lambda o: _run(o, scale=torch.tensor(0.5))),
        case("a scale text", TypeError, "^scale must", "got str", lambda o: _run(o, scale="0.5")),
        case("scale True", TypeError, "^scale must", "got bool", lambda o: _run(o, scale=True)),
        case("infinite scale", ValueError, "^scale must be finite", "got inf", lambda o: _run(o, scale=float("inf"))),
        case("scale NaN", ValueError, "^scale must be finite", "got nan", lambda o: _run(o, scale=float("nan"))),
    ]


def _of_score_mods() -> list[Case]:
    def case(what: str, error: type[BaseException], came: str, mod: Any) -> Case:
        return Case(CALL, what, error, "score_mod", came, lambda o: _run(o, score_mod=mod))

    return [
        case("a number for a score_mod", TypeError, "got float", 2.0),
        case("a score_mod of two parameters", TypeError, r"function of \(score, b\)", lambda score, b: score),
        case(
            "a score_mod of six parameters",
            TypeError,
            r"function of \(score, b, h, dst, src, more\)",
            lambda score, b, h, dst, src, more: score,
        ),
        case("a score_mod that returns nothing", TypeError, "got a NoneType", lambda score, b, h, dst, src: None),
        case("a score_mod that returns a mask", TypeError, "bool tensor", lambda score, b, h, dst, src: src <= dst),
        case("a score_mod that returns positions", TypeError, "int64 tensor", lambda score, b, h, dst, src: dst - src),
        case("a score_mod of too many axes", ValueError, r"got \[1, ", lambda score, b, h, dst, src: score[None]),
        case("a score_mod that drops edges", ValueError, "got ", lambda score, b, h, dst, src: score[..., 1:]),
    ]


def _of_backends() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, bad: Any) -> Case:
        return Case(CALL, what, error, argument, came, bad)

    def own(run: Any) -> Backend:
        return Backend("own", run)

    return [
        case(
            "an unknown backend",
            ValueError,
            "^backend must be one of 'auto', 'dense'",
            "got 'fast'",
            lambda o: _run(o, backend="fast"),
        ),
        case("a number for a backend", TypeError, "^backend must", "got int", lambda o: _run(o, backend=3)),
        case("no backend", TypeError, "^backend must", "got NoneType", lambda o: _run(o, backend=None)),
        case(
            "a function for a backend", TypeError, "^backend must", "got function", lambda o: _run(o, backend=dense_backend.run)
        ),
        case(
            "a backend that cannot", RefusalError, "^backend 'varlen' cannot hold", "window", lambda o: _run(o, backend="varlen")
        ),
        case(
            "a backend that returns one tensor",
            TypeError,
            "^backend 'own'",
            "Tensor",
            lambda o: _run(o, backend=own(lambda call: call.q)),
        ),
        case(
            "a backend that returns other sizes",
            ValueError,
            "^backend 'own'",
            r"\[2, 4, 5, 3\]",
            lambda o: _run(o, backend=own(lambda call: (call.q, None))),
        ),
    ]


# -- beside attend ----------------------------------------------------------------------------------------------------


def _told(o: Attributes) -> Any:
    return _run(o, return_info=True)[1]


def _weights(o: Attributes) -> Tensor:
    """Of the edge 0 -> 0: token 0 hears itself alone."""
    weights: Tensor = _told(o).weights([[0], [0]] if False else torch.tensor([0]))
    return weights


INFO = Subject("info.weights", _tensors, _weights, lambda o: torch.ones(2, 4, 1))
OWN = Subject("Backend", _tensors, lambda o: _run(o, backend=Backend("own", dense_backend.run)), _formula)
EXPLAINED = Subject("explain", lambda: None, lambda _: explain(causal(64), 2, 8).choice, lambda _: "dense")


def _of_info() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, edges: Any) -> Case:
        return Case(INFO, what, error, argument, came, lambda o: _told(o).weights(edges))

    return [
        case("float positions", TypeError, "^edges must be integers", "torch.float32", torch.ones(2)),
        case("a mask of edges", TypeError, "^edges must be integers", "torch.bool", torch.ones(9, dtype=torch.bool)),
        case("a position that is none", IndexError, "^edges must be positions in 0 .. 8", "got 0 .. 9", torch.tensor([0, 9])),
        case("a pair that is no edge", ValueError, "0 -> 3 is no edge", "window", torch.tensor([[0], [3]])),
        case("pairs in rows", ValueError, "must have shape", r"got \[3, 2\]", torch.tensor([[0, 0], [0, 1], [1, 1]])),
        case("a list of pairs", TypeError, "must be a tensor", "got list", [(0, 0)]),
    ]


def _of_table() -> list[Case]:
    def backend(what: str, argument: str, came: str, *given: Any, **named: Any) -> Case:
        return Case(OWN, what, TypeError, argument, came, lambda o: Backend(*given, **named))

    def asked(what: str, error: type[BaseException], argument: str, came: str, *given: Any, **named: Any) -> Case:
        return Case(EXPLAINED, what, error, argument, came, lambda _: explain(*given, **named))

    return [
        backend("a number for a name", "^name of a Backend", "got 3 of type int", 3, dense_backend.run),
        backend("no function", "^run of a Backend", "got None", "own", None),
        backend("a refusal that is a text", "^refusal of a Backend", "got 'no'", "own", dense_backend.run, refusal="no"),
        backend("a number of bytes", "^bytes_needed of a Backend", "got 5", "own", dense_backend.run, bytes_needed=5),
        asked("no graph", TypeError, "^graph must", "got 3 of type int", 3, 2, 8),
        asked("no heads", ValueError, "^heads must", "got 0", causal(4), 0, 8),
        asked("half a channel", TypeError, "^dim must", "got 0.5", causal(4), 2, 0.5),
        asked("an unknown device", ValueError, "^device must", "got 'abacus'", causal(4), 2, 8, device="abacus"),
        asked("a dtype that is none", TypeError, "^dtype must", "got 'float32'", causal(4), 2, 8, dtype="float32"),
    ]


# -- the arithmetic of an edge ----------------------------------------------------------------------------------------

LOGITS, DST = torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 0, 2])
SOFTMAX = Subject(
    "edges.softmax", lambda: None, lambda _: edges.softmax(LOGITS, DST, 3)[0], lambda _: torch.tensor([0.5, 0.5, 1.0])
)
LOGIT = Subject("edges.logit", lambda: None, lambda _: edges.logit(LOGITS, LOGITS, 0.5), lambda _: torch.tensor(12.5))
ONE, LSE = torch.ones(2, 1), torch.zeros(2)
MERGE = Subject("edges.merge", lambda: None, lambda _: edges.merge(ONE, LSE, 3 * ONE, LSE)[0], lambda _: 2 * ONE)
OUT, HEARD = torch.ones(1, 1, 1, 1), torch.ones(1, dtype=torch.bool)
SINKS = Subject(
    "edges.add_sinks",
    lambda: None,
    lambda _: edges.add_sinks(OUT, torch.zeros(1, 1, 1), torch.zeros(1), HEARD)[0],
    lambda _: OUT / 2,
)
MODS = Subject("score_mods", lambda: None, lambda _: score_mods.alibi_slopes(4)[0], lambda _: 0.25)


def _of_edges() -> list[Case]:
    def softmax(what: str, error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(SOFTMAX, what, error, argument, came, lambda _: edges.softmax(*given))

    def merge(what: str, error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(MERGE, what, error, argument, came, lambda _: edges.merge(*given))

    def sinks(what: str, error: type[BaseException], argument: str, came: str, *given: Any) -> Case:
        return Case(SINKS, what, error, argument, came, lambda _: edges.add_sinks(*given))

    return [
        softmax("logits of integers", TypeError, "^logits must", "torch.int64", DST, DST, 3),
        softmax("a list", TypeError, "^logits must", "got list", [0.0], DST, 3),
        softmax("float receivers", TypeError, "^dst must be int64", "torch.float32", LOGITS, LOGITS, 3),
        softmax("receivers of fewer edges", ValueError, "^dst must be", r"\[2\], \[3\]", LOGITS, DST[:2], 3),
        softmax("a receiver that is none", IndexError, "^dst must be receivers in 0 .. 1", r"0 \.\. 2", LOGITS, DST, 2),
        softmax("a negative receiver", IndexError, "^dst must be receivers", r"-1 \.\. 1", LOGITS, DST - 1, 3),
        softmax("a float number of receivers", TypeError, "^num_dst must", "got 3.0", LOGITS, DST, 3.0),
        softmax("sinks that do not broadcast", ValueError, "^sink_logits must", r"got \[2\]", LOGITS, DST, 3, torch.ones(2)),
        Case(LOGIT, "other widths", ValueError, "q_dst and k_src", "3 and 2", lambda _: edges.logit(LOGITS, LOGITS[:2], 1.0)),
        Case(
            LOGIT,
            "other edges",
            ValueError,
            "q_dst and k_src",
            r"\[3, 1\]",
            lambda _: edges.logit(torch.ones(2, 1), torch.ones(3, 1), 1.0),
        ),
        Case(LOGIT, "a scale text", TypeError, "^scale must", "got '1'", lambda _: edges.logit(LOGITS, LOGITS, "1")),
        merge("a lse of other receivers", ValueError, "^lse_a must", r"\[3\]", ONE, torch.zeros(3), ONE, LSE),
        merge("results of other sizes", ValueError, "^out_b must", r"\[2, 2\]", ONE, LSE, torch.ones(2, 2), LSE),
        merge("a number", TypeError, "^lse_b must", "got int", ONE, LSE, ONE, 0),
        sinks(
            "sinks of other heads",
            ValueError,
            "^sink_logits must",
            r"got \[2\]",
            OUT,
            torch.zeros(1, 1, 1),
            torch.zeros(2),
            HEARD,
        ),
        sinks("float heard", TypeError, "^heard must", "torch.float32", OUT, torch.zeros(1, 1, 1), torch.zeros(1), HEARD.float()),
        Case(
            LOGIT,
            "heads that do not group",
            ValueError,
            "^num_heads must",
            "got 3",
            lambda _: edges.per_query_head(torch.ones(1, 2, 1), 3),
        ),
        Case(
            SOFTMAX,
            "a lse of other axes",
            ValueError,
            "^lse must",
            r"\[1, 3\]",
            lambda _: edges.weights_from_lse(LOGITS, DST, torch.ones(1, 3)),
        ),
        Case(SOFTMAX, "an unknown normaliser", ValueError, "^normaliser must", "'hard'", lambda _: weigh(LOGITS, DST, 3, "hard")),
    ]


def _of_mods() -> list[Case]:
    def case(what: str, error: type[BaseException], argument: str, came: str, bad: Any) -> Case:
        return Case(MODS, what, error, argument, came, bad)

    return [
        case("no heads", ValueError, "^num_heads must", "got 0", lambda _: score_mods.alibi_slopes(0)),
        case("a cap of 0", ValueError, "^cap must", "got 0.0", lambda _: score_mods.softcap(0.0)),
        case("a cap text", TypeError, "^cap must", "got '30'", lambda _: score_mods.softcap("30")),
        case("slopes that are a number", TypeError, "^slopes must", "got 0.5", lambda _: score_mods.alibi(0.5)),
        case(
            "a multiplicity of three axes",
            ValueError,
            "^multiplicity must",
            r"\[1, 2, 2\]",
            lambda _: score_mods.log_multiplicity(torch.ones(1, 2, 2)),
        ),
        case("a multiplicity list", TypeError, "^multiplicity must", "got list", lambda _: score_mods.log_multiplicity([1.0])),
        case(
            "a table without a middle",
            ValueError,
            "^table must",
            r"\[2, 4\]",
            lambda _: score_mods.relative_bias(torch.ones(2, 4)),
        ),
        case("a table list", TypeError, "^table must", "got list", lambda _: score_mods.relative_bias([[1.0]])),
        case("a negative reach", ValueError, "^reach must", "got -1", lambda _: score_mods.RelativeBias(2, -1)),
        case(
            "a link that is none",
            TypeError,
            "^every link must",
            "got str",
            lambda _: score_mods.chain(score_mods.softcap(1.0), "alibi"),
        ),
    ]


def cases() -> list[Case]:
    """Of the one verb and of what stands beside it."""
    parts = (_of_tensors, _of_graphs, _of_additions, _of_score_mods, _of_backends, _of_info, _of_table, _of_edges, _of_mods)
    return [case for part in parts for case in part()]
