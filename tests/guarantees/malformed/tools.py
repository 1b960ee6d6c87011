"""Malformed use of audits, traces, circuits, pages, pictures, trainings, ranks and the command line."""

# mypy: disable-error-code="arg-type, dict-item"
from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples import training
from examples.training import compare, tasks
from examples.training.__main__ import main as train
from examples.training.text_corpus import Corpus
from gnn_attention import cost, distributed, draw, explorer
from gnn_attention.__main__ import main
from gnn_attention.cli import generate
from gnn_attention.interpret import circuits
from gnn_attention.interpret import trace as tracing
from gnn_attention.interpret.audit import audit
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model.foreign import heads_of
from gnn_attention.model.tokenizer import BytePair
from gnn_attention.patterns import causal, cross, window
from tests.guarantees.malformed.case import Case, CommandRefusedError, Of, Subject
from tests.guarantees.malformed.layers import heads_of_two, numbers


def _layer() -> MessagePassingAttention:
    return MessagePassingAttention(heads_of_two(), backend="auto")


AUDIT = Subject("audit", _layer, lambda layer: audit(layer, causal(4), (4, 8)).exact, lambda _: True)


def _alone(module: Any) -> Any:
    return module


def _of_audits() -> list[Case]:
    of, graph = Of(AUDIT), causal(4)
    return [
        of.type("^module must", "got 3", lambda _: audit(3, graph, (4, 8))),
        of.type("^graph must", "got 3", lambda layer: audit(layer, 3, (4, 8))),
        of.type("^graph must", r"got \[\]", lambda layer: audit(layer, [], (4, 8))),
        of.value("^input_shape must", r"got \(5, 8\)", lambda layer: audit(layer, graph, (5, 8))),
        of.type("^input_shape must", "got 4", lambda layer: audit(layer, graph, 4)),
        of.value("^layers must", "got 0", lambda layer: audit(layer, graph, (4, 8), layers=0)),
        of.value(
            "^witnesses must", "'guess'", lambda layer: audit(layer, graph, (4, 8), witnesses=["guess"])
        ),
        of.value(
            "^witnesses must", "got 'nose'", lambda layer: audit(layer, graph, (4, 8), witnesses=["nose"])
        ),
        of.value("^tolerance must", "got 2", lambda layer: audit(layer, graph, (4, 8), tolerance=2)),
        of.value(
            "^dtype must", "torch.float16", lambda layer: audit(layer, graph, (4, 8), dtype=torch.float16)
        ),
        of.value("^samples must", "got 0", lambda layer: audit(layer, graph, (4, 8), samples=0)),
        of.type("^call must take", r"of \(module\)", lambda layer: audit(layer, graph, (4, 8), call=_alone)),
        of.type("^call must", "got 3", lambda layer: audit(layer, graph, (4, 8), call=3)),
    ]


def _recorded(layer: Any) -> Any:
    with torch.no_grad():
        return tracing.record(layer, numbers(5, 8), window(5, 2))


TRACE = Subject(
    "trace",
    _layer,
    lambda layer: _recorded(layer).layers[0].weights([(0, 0)]).squeeze(),
    lambda _: torch.ones(2),
)


def _of_traces() -> list[Case]:
    of, x, graph = Of(TRACE), numbers(5, 8), window(5, 2)

    def operated(*surgeries: Any) -> Any:
        return lambda layer: tracing.record(layer, x, graph, surgery=surgeries)

    return [
        of.value(
            "attention layer|MessagePassingAttention", "Linear", lambda _: tracing.record(nn.Linear(2, 2), x)
        ),
        of.type("^module must", "got 3", lambda _: tracing.record(3, x)),
        of.type("interventions", "got 'cut'|got str", operated("cut")),
        of.value("0 -> 4 is no edge", "window", operated(tracing.cut([(0, 4)]))),
        of.type("edges", "got int|got 3", lambda _: tracing.cut(3)),
        of.value("heads", "got -1", lambda _: tracing.mute(heads=-1)),
        of.index("heads", "7", operated(tracing.cut([(0, 1)], heads=7))),
        of.index("layers", "3", operated(tracing.cut([(0, 1)], layers=3))),
    ]


CIRCUITS = Subject(
    "circuits", heads_of_two, lambda heads: int(circuits.of(heads, 0).pattern.rank()), lambda _: 4
)


def _of_circuits() -> list[Case]:
    of, one = Of(CIRCUITS), circuits
    return [
        of.index("head", "got 2", lambda heads: one.of(heads, 2)),
        of.type("heads", "got Linear|Linear", lambda _: one.of(nn.Linear(2, 2), 0)),
        of.value("^kind must", "'o'", lambda heads: one.composition(one.of(heads, 0), one.of(heads, 1), "o")),
        of.type("^earlier must", "got 1", lambda heads: one.composition(1, one.of(heads, 1), "q")),
        of.type("^model must", r"got \[\]", lambda _: one.compositions([], "q")),
    ]


ENCODER = Subject(
    "heads_of",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=2),
    lambda encoder: heads_of(encoder, layer=1).num_heads,
    lambda _: 2,
)


def _of_models() -> list[Case]:
    of = Of(ENCODER)
    return [
        of.type("^model must", "got 3", lambda _: heads_of(3)),
        of.refused("Linear", "known", lambda _: heads_of(nn.Linear(2, 2))),
        of.index("layer", "7", lambda encoder: heads_of(encoder, 7)),
        of.value("layer", "2", lambda encoder: heads_of(encoder)),
        of.type("^layer must", "'1'", lambda encoder: heads_of(encoder, "1")),
        of.value("^part must", "'middle'", lambda encoder: heads_of(encoder, 0, "middle")),
    ]


PAGE = Subject("explorer.page", lambda: None, lambda _: explorer.page([1, 2]).tokens, lambda _: 2)
DRAW = Subject("draw", lambda: window(4, 2), lambda graph: len(draw.degrees(graph).axes), lambda _: 2)


def _of_pages() -> list[Case]:
    of, page = Of(PAGE), explorer.page
    return [
        of.type("^text_or_tokens must", "got int", lambda _: page(3)),
        of.value("^text_or_tokens must", "got none", lambda _: page("")),
        of.value("^text_or_tokens has 1000000 tokens", "at most 512", lambda _: page(range(1_000_000))),
        of.value("^text_or_tokens has 1000000 char", "shorten", lambda _: page("a" * 1_000_000)),
        of.value("^text_or_tokens must", r"\[1, 2\]", lambda _: page(torch.ones(1, 2).long())),
        of.type("^graph must", "got 3", lambda _: page("def", graph=3)),
        of.type("^a graph must", "got int", lambda _: page("def", graph=[3])),
        of.value("^a graph must", r"causal\(1\)", lambda _: page("def f", graph=causal(1))),
        of.type("^masks must", "got 3", lambda _: page("def", masks=3)),
        of.type("^title must", "got int", lambda _: page("def", title=3)),
        of.value("^room must", "got -1", lambda _: page("def", room=-1)),
        of.type("^model must", "got 3", lambda _: page("def", model=3)),
    ]


def _of_pictures() -> list[Case]:
    of = Of(DRAW)
    return [
        of.type(r"^mask\(\) draws", "got int", lambda _: draw.mask(3)),
        of.value(r"^graph\(\) draws at most", "causal", lambda _: draw.graph(causal(10**6))),
        of.value(r"^arcs\(\) draws", r"cross\(2, 3\)", lambda _: draw.arcs(cross(2, 3))),
        of.value("^labels", "got 1", lambda graph: draw.mask(graph, labels=["a"])),
        of.value("^weights must", "got 1", lambda graph: draw.arcs(graph, weights=[1.0])),
        of.value("^layers must", "got 0", lambda graph: draw.layers(graph, 0)),
        of.index("token", "9", lambda graph: draw.layers(graph, 2, token=9)),
        of.type("^graphs must", "got 3", lambda _: draw.layers(3, 2)),
    ]


TEXT = Corpus({"a.py": "def f(x):\n    return x\n" * 30}, {"b.py": "def g(y):\n    return y\n" * 30})
RECIPE = Subject("recipes", lambda: None, lambda _: training.Recipe(length=8).edges().num_edges, lambda _: 36)


def _compare(**given: Any) -> Any:
    small = {"recipe": training.Recipe(steps=1, batch=1, length=8, pieces=256), "seeds": 1, "text": TEXT}
    return lambda _: compare.compare(**{"graphs": "causal", **small, **given})


def _of_trainings() -> list[Case]:
    of, recipe = Of(RECIPE), training.Recipe
    return [
        of.value("^steps must", "got 0", lambda _: recipe(steps=0)),
        of.type("^batch must", "'8'", lambda _: recipe(batch="8")),
        of.type("^rate must", "'high'", lambda _: recipe(rate="high")),
        of.value("^rate must", "got -1", lambda _: recipe(rate=-1.0)),
        of.value("^repeats must", "2", lambda _: recipe(repeats=2.0)),
        of.value("^precision must", "'float8'", lambda _: recipe(precision="float8")),
        of.value("^graph must", r"causal\(9\)", lambda _: recipe(length=8, graph="causal(9)")),
        of.type("^graph must", "got 3", lambda _: recipe(graph=3)),
        of.type("^recipe must", "got 3", _compare(recipe=3)),
        of.type("^graphs must", "got 3", _compare(graphs=3)),
        of.value("^graphs must", "got ''", _compare(graphs="")),
        of.value("^graphs:", "leave one out", _compare(graphs="causal; window(8, 8)")),
        of.value("^graphs: 'full'", "later token", _compare(graphs="full")),
        of.value("^seeds must", "got 0", _compare(seeds=0)),
        of.type("^text must", "got 'def'", _compare(text="def")),
        of.type("^training of text must", "got", _compare(text=Corpus({"a.py": 3}, {}))),
        of.type("^config must", "got 'small'", _compare(config="small")),
        of.type("^out must", "got 3", _compare(out=3)),
        of.type("^log must", "got 'loud'", _compare(log="loud")),
        of.type("^recipe must", "got 'short'", lambda _: training.train("short")),
        of.value("^minutes must", "got 0", lambda _: training.train(minutes=0)),
        of.value("^depth must", "got 0", lambda _: tasks.neighbours_match(0, 1)),
        of.value("^prompt must", "got none", lambda _: generate.continued("", 1)),
        of.type("text|prompt", "int", lambda _: generate.continued(3, 1)),
    ]


BYTES = Subject("BytePair", BytePair, lambda pairs: pairs.encode("ab"), lambda _: [97, 98])
COST = Subject(
    "cost", lambda: None, lambda _: cost.of_form("standard", 8, 2, tokens=4).macs.logits, lambda _: 80
)
ALONE = Subject(
    "distributed",
    lambda: None,
    lambda _: distributed.plan(causal(8), 2, 2, 4).partition.world_size,
    lambda _: 2,
)


def _of_others() -> list[Case]:
    of, priced, ranks = Of(BYTES), Of(COST), Of(ALONE)
    x = numbers(1, 1, 3, 2)
    return [
        of.type("^text is", "int", lambda pairs: pairs.encode(3)),
        of.type("^ids", "expected an iterable of integers", lambda pairs: pairs.decode([0.5])),
        of.index("token|ids", "256", lambda pairs: pairs.decode([256])),
        of.value("^size", "255", lambda _: BytePair.learn("ab", 255)),
        of.value("vocabulary|JSON", "expected", lambda _: BytePair.from_json("{}")),
        priced.value("^form must", "'folded'", lambda _: cost.of_form("folded", 8, 2)),
        priced.value(
            "^give tokens or graph",
            "tokens=4",
            lambda _: cost.of_form("merged", 8, 2, tokens=4, graph=causal(4)),
        ),
        priced.type("^graph must", "got 3", lambda _: cost.of_form("merged", 8, 2, graph=3)),
        priced.type("^dtype must", "'float32'", lambda _: cost.of_form("merged", 8, 2, dtype="float32")),
        priced.value("no configuration 'llama-9'", "llama", lambda _: cost.of_config("llama-9")),
        ranks.value("torch.distributed", "init", lambda _: distributed.local(causal(3))),
        ranks.value(
            "torch.distributed", "init_process_group", lambda _: distributed.attend(x, x, x, causal(3))
        ),
        ranks.value("^world_size must", "got 0", lambda _: distributed.plan(causal(8), 0, 2, 4)),
    ]


def _command(*words: str) -> int:
    """Its exit code; an error with what it said where it refused its arguments."""
    said, out = io.StringIO(), io.StringIO()
    with redirect_stderr(said), redirect_stdout(out):
        try:
            # a training is a command of the examples
            trains = words[:1] in (("train",), ("compare",))
            code = (train if trains else main)(list(words))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    if code == 2:
        lines = said.getvalue().strip().splitlines()
        raise CommandRefusedError("Traceback" if "Traceback" in said.getvalue() else lines[-1])
    return code


COMMANDS = Subject("gnn-attention", lambda: None, lambda _: _command("draw", "causal(3)"), lambda _: 0)


def _line(argument: str, came: str, words: str) -> Case:
    return Case(COMMANDS, CommandRefusedError, argument, came, lambda _: _command(*words.split()))


def _of_commands() -> list[Case]:
    out = Path(tempfile.gettempdir()) / "no-such-comparison"
    return [
        _line("command", "invalid choice: 'paint'", "paint"),
        _line("unrecognized arguments", "--colour", "draw causal(3) --colour"),
        _line("^gnn-attention draw: column", "not an expression", "draw causal("),
        _line("-o picture", "expected a file name", "draw causal(3) -o picture"),
        _line("-o no/such", "expected a folder", "draw causal(3) -o no/such/p.svg"),
        _line("no builder 'windw'", "did you mean", "graphs windw"),
        _line("--tokens", "invalid int value: 'many'", "generate def --tokens many"),
        _line("tokens must", "got -1", "generate def --tokens -1"),
        _line("no configuration", "'llama-9'", "cost --config llama-9"),
        _line("seeds must", "got 0", f"compare --seeds 0 --out {out}"),
        _line("steps must", "got 0", "train --steps 0"),
    ]


def cases() -> list[Case]:
    found = [*_of_audits(), *_of_traces(), *_of_circuits(), *_of_models(), *_of_pages()]
    found += [*_of_pictures(), *_of_trainings(), *_of_others(), *_of_commands()]
    return found
