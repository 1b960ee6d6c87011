"""Every kind of file that the library reads: a whole one, its reader, and what must hold of the result."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.training.checkpoints import RECORD, Checkpoints
from examples.training.compare_results import Outcome
from examples.training.compare_store import PLAN, Store
from gnn_attention import model as language_model
from gnn_attention import patterns
from gnn_attention.backends import cost_model
from gnn_attention.convert import expressions, files
from gnn_attention.graph import TokenGraph
from gnn_attention.model.tokenizer import BytePair
from gnn_attention.verify.report import Report, Result
from tests.guarantees import mutations
from tests.guarantees.mutations import Mutation


@dataclass(frozen=True)
class Form:
    """A kind of file: ``make(folder)`` writes a whole one, ``read`` reads it, ``check`` complains of what was
    read, or does not.

    ``named``: what a refusal must name; the file's name unless given.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    mutations: tuple[Mutation, ...]
    check: Callable[[bytes, Any], str | None] = lambda content, found: None
    named: str | None = None


def _text(path: Path) -> str:
    """As a caller may have it: with half characters where it is no UTF-8."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _model(folder: Path) -> Path:
    vocabulary = BytePair(((b"a", b"b"), (b"ab", b"c")))
    sizes = language_model.Config(
        len(vocabulary), 4, num_layers=1, num_heads=2, head_dim=2, mlp_width=4, reach=2
    )
    language_model.save(
        folder / "model.safetensors", language_model.LanguageModel(sizes), vocabulary, {"steps": 3}
    )
    return folder / "model.safetensors"


def _expression(folder: Path) -> Path:
    path = folder / "expression.txt"
    path.write_text(
        "window(12, 3) | sinks(12, 2) & ~causal(12).T - full(12).rows(0, 12) ^ causal(12) ** 2",
        encoding="utf-8",
    )
    return path


def _graph(ending: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        files.write(patterns.window(9, 3) | patterns.sinks(9, 1), folder / f"graph{ending}")
        return folder / f"graph{ending}"

    return make


def _check_graph(edges: Callable[[str], set[tuple[int, int]]]) -> Callable[[bytes, Any], str | None]:
    """What the library read and what a few lines of Python read are the same edges."""

    def check(content: bytes, found: TokenGraph) -> str | None:
        read = {(src, dst) for src, dst in found.edge_index.t().tolist()}
        return (
            None if read == edges(content.decode("utf-8-sig")) else "other edges than in the file were read"
        )

    return check


def _words(text: str) -> list[list[str]]:
    return [words for line in re.split(r"\r\n|\r|\n", text) if (words := line.split("#", 1)[0].split())]


def _listed(text: str) -> set[tuple[int, int]]:
    return {(int(words[0]), int(words[1])) for words in _words(text)}


def _adjacent(text: str) -> set[tuple[int, int]]:
    return {(int(words[0]), int(dst)) for words in _words(text) for dst in words[1:]}


def _linked(text: str) -> set[tuple[int, int]]:
    space = "{http://graphml.graphdrawing.org/xmlns}"
    graph = next(ElementTree.fromstring(text).iter(f"{space}graph"))
    edges = {(int(e.attrib["source"]), int(e.attrib["target"])) for e in graph.iter(f"{space}edge")}
    return edges if graph.get("edgedefault") == "directed" else edges | {(dst, src) for src, dst in edges}


def _report(folder: Path) -> Path:
    results = (
        Result("attend", "dense", "float64", "causal, plain", True, 0.25, 0.5, error=1e-16, unit=1e-12),
        Result("attend", "rows", "float32", "window", False, float("nan"), message="a number is NaN"),
        Result("layer", "flex", "float16", "tree", passed=False, skipped="needs a GPU"),
    )
    path = folder / "verify.json"
    path.write_text(Report(results, {"device": "CPU", "torch": "2.13"}, 2).to_json(), encoding="utf-8")
    return path


def _check_report(content: bytes, found: Report) -> str | None:
    """It can be shown, and written as it is."""
    str(found)
    return (
        None
        if Report.from_json(found.to_json()).to_json() == found.to_json()
        else "it is written otherwise than it was read"
    )


_PLAN = {"recipe": {"steps": 4, "rate": 0.003}, "corpus": "0123abcd", "version": 1}
_OUTCOME = Outcome("causal", "0123", 0, 4.5, 3.1, 3.0, None, 0.1, 900.0, 16)


def _store(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        Store(folder, _PLAN).add(_OUTCOME)
        return folder / file

    return make


def _stored(path: Path) -> Any:
    return Store(path.parent, _PLAN).find("causal", _OUTCOME.key, _OUTCOME.seed)


def _check_outcome(content: bytes, found: Outcome) -> str | None:
    numbers = [value for value in asdict(found).values() if isinstance(value, (int, float))]
    return None if all(abs(number) < 1e300 for number in numbers) else "a number is not finite"


def _costs(folder: Path) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps({"costs": asdict(cost_model.Costs())}), encoding="utf-8")
    return path


def _training() -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.Generator()


def _checkpoint(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        progress = {
            "recipe": {"steps": 4},
            "losses": [1.5, 1.25],
            "history": [{"step": 2, "training_loss": 1.5}],
            "seconds": 2.0,
        }
        Checkpoints(folder).save(2, *_training(), progress)
        return next((folder / "step-00000002").glob(file))

    return make


def _recorded_progress(path: Path) -> Any:
    return Checkpoints(path.parent.parent).record(path.parent, {"recipe": {"steps": 4}})


_JSON = (*mutations.ANY, *mutations.JSON, *mutations.JSON)
FORMS = (
    Form("language model", _model, language_model.load, (*mutations.ANY, *mutations.SAFETENSORS)),
    Form("edge list", _graph(".edges"), files.read, mutations.ANY, _check_graph(_listed)),
    Form("adjacency list", _graph(".adjlist"), files.read, mutations.ANY, _check_graph(_adjacent)),
    Form(
        "GraphML", _graph(".graphml"), files.read, (*mutations.ANY, *mutations.XML * 3), _check_graph(_linked)
    ),
    Form(
        "expression",
        _expression,
        lambda path: expressions.parse(_text(path)),
        (*mutations.ANY, *mutations.WORDS * 5),
        named="",
    ),
    Form("record of verify", _report, Report.from_file, _JSON, _check_report),
    Form("plan of an experiment", _store(PLAN), _stored, _JSON, named="files"),
    Form("outcome of an experiment", _store("0123-seed0.json"), _stored, _JSON, _check_outcome),
    Form("costs of a CPU", _costs, cost_model.read, _JSON),
    Form("what a checkpoint tells", _checkpoint(RECORD), _recorded_progress, _JSON, named="step-00000002"),
)
