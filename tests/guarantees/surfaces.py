"""Every place of a page or a picture that shows a user's text: titles, labels, names of graphs and models."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import plots
from examples.training.compare_results import Mean, Row, plot
from gnn_attention import draw, explorer
from gnn_attention import model as language_model
from gnn_attention.graph import TokenGraph
from gnn_attention.model.tokenizer import BytePair
from tests.guarantees.llama import llama


@dataclass(frozen=True)
class Surface:
    """``make(text)`` is a page, a notebook's frame around one, or a picture that shows the text: ``kind``
    html, frame or svg.

    ``accepted``: what of a text can be given there at all; a file's name has no slash. ``longest``: of it is
    shown, if not all.
    """

    name: str
    kind: str
    make: Callable[[str], str]
    accepted: Callable[[str], str] = str
    longest: int | None = None


def _whole(text: str) -> str:
    """What UTF-8 can encode, at least a letter: a token of a vocabulary of bytes."""
    return text.encode("utf-8", "replace").decode() or "a"


def _file_name(text: str) -> str:
    return _whole(text).replace("/", "\u2215").replace("\0", "").strip(". ")[:60] or "a"


@cache
def _model(pieces: int) -> language_model.LanguageModel:
    torch.manual_seed(0)
    sizes = language_model.Config(pieces, 4, num_layers=1, num_heads=1, head_dim=4, mlp_width=4, reach=2)
    return language_model.LanguageModel(sizes).eval()


def _spelling(text: str) -> BytePair:
    """A vocabulary in which the text is one token, the last."""
    letters = [bytes([value]) for value in text.encode("utf-8")]
    merges: dict[bytes, tuple[bytes, bytes]] = {}
    known = letters[:1]
    for letter in letters[1:]:
        merges.setdefault(known[-1] + letter, (known[-1], letter))
        known.append(known[-1] + letter)
    return BytePair(tuple(merges.values()))


def _page(words: Any, vocabulary: BytePair, **more: Any) -> explorer.Page:
    return explorer.page(words, (_model(len(vocabulary)), vocabulary), masks=[], room=1, **more)


def _titled(text: str) -> str:
    return _page("abc", BytePair(), title=text).html


def _framed(text: str) -> str:
    return _page("abc", BytePair(), title=text)._repr_html_()


def _tokens(text: str) -> str:
    vocabulary = _spelling(text)
    return _page(
        [len(vocabulary) - 1 if vocabulary.merges else vocabulary.encode(text)[0]], vocabulary, title="a"
    ).html


def _read(text: str) -> str:
    return _page(text, BytePair()).html


def _graph_named(text: str) -> str:
    return _page("abc", BytePair(), graph=_graph(4, text), title="a").html


def _model_named(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{text}.safetensors"
        language_model.save(path, _model(256), BytePair(), {})
        return explorer.page("abc", path, masks=[], room=1, title="a").html


class _Tokenizer:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [1], "offset_mapping": [(0, len(text))]}

    def decode(self, ids: Any) -> str:
        return self.text


@cache
def _foreign() -> Any:
    """A tiny Hugging Face model, from no file."""
    torch.manual_seed(0)
    return llama(heads=2, num_key_value_heads=2)


def _foreign_token(text: str) -> str:
    return explorer.page([1, 2], (_foreign(), _Tokenizer(text)), masks=[], title="a").html


def _foreign_text(text: str) -> str:
    return explorer.page(text or "a", (_foreign(), _Tokenizer(text)), masks=[]).html


def written(make: Callable[[str], Any], text: str) -> tuple[str, str]:
    """A picture with its texts as texts, and as usually written: as shapes with the texts as remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks
        made = make(text)
        first = _svg(made, "none")
        made.set_layout_engine("none")  # everything is in its place
        return first, _svg(made, "path")


def _svg(made: Any, fonts: str) -> str:
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": fonts}):
        made.savefig(stream, format="svg")
    return stream.getvalue()


def _graph(n: int, name: str, num_src: int | None = None) -> TokenGraph:
    return TokenGraph.from_edges(torch.tensor([[0, 0, 1], [0, 1, 1]]), n, num_src, name=name)


def _by_head(text: str) -> Any:
    rule = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 3, heads=2, name=text)
    return draw.mask(rule)


def _labelled(picture: Callable[..., Any], text: str) -> Any:
    return picture(_graph(2, "a"), labels=[text, "b"])


def _columns(text: str) -> Any:
    return draw.graph(_graph(2, "a", 3), labels=[text, "b"], src_labels=["c", "d", f"{text}{text[:1]}"])


def _senders(text: str) -> Any:
    return draw.mask(_graph(2, "a", 3), src_labels=[text, "b", "c"])


def _large(text: str) -> Any:
    """A graph whose tokens have dots, and of which some are named."""
    return draw.graph(_graph(70, "a"), labels=[text] * 70)


def _compared(text: str) -> Any:
    mean = Mean(1.0, 0.1)
    found = [
        Row("causal", 4.0, mean, None, None, mean, mean, 4),
        Row(text, 2.0, mean, mean, None, mean, mean, 4),
    ]
    return plot(found, "a title", "facts")


def _compared_under(text: str) -> Any:
    mean = Mean(1.0, 0.1)
    return plot([Row("causal", 4.0, mean, None, None, mean, mean, 4)], text, "facts")


def _against_tokens(text: str) -> Any:
    sizes = [{"workload": f"b{n}", "allocator": "default", "tokens": n} for n in (8, 16)]
    case = {"allocator": "default", "pass": "forward", "status": "measured", "method": text, "seconds": 0.1}
    record = {"workloads": sizes, "cases": [{**case, "workload": size["workload"]} for size in sizes]}
    return plots.against_tokens(record, "b", "seconds")


def _crossover(text: str) -> Any:
    row = {"method": text, "kind": "tiles", "pass": "both", "points": [[0.1, 2.0], [0.5, 1.0]]}
    return plots.crossover({"crossover": [row]})


def _layers(graph: TokenGraph, **more: Any) -> Any:
    return draw.layers(graph, 2, **more)


def _named(picture: Callable[..., Any], text: str) -> Any:
    return picture(_graph(3, text))


def _under(picture: Callable[..., Any], text: str) -> Any:
    return picture(_graph(3, "a"), title=text)


_KINDS: dict[str, Callable[..., Any]] = {
    "mask": draw.mask,
    "graph": draw.graph,
    "arcs": draw.arcs,
    "layers": _layers,
    "hops": draw.hops,
    "degrees": draw.degrees,
    "side by side": draw.side_by_side,
}
_PICTURES: dict[str, Callable[[str], Any]] = {
    **{f"{name}: name of the graph": partial(_named, picture) for name, picture in _KINDS.items()},
    **{
        f"{name}: title": partial(_under, picture)
        for name, picture in _KINDS.items()
        if name != "side by side"
    },
    **{
        f"{name}: labels": partial(_labelled, _KINDS[name])
        for name in ("mask", "graph", "arcs", "side by side")
    },
    "mask of each head: name of the graph": _by_head,
    "mask: labels of senders": _senders,
    "graph: labels of both columns": _columns,
    "graph of many tokens: labels": _large,
    "comparison: name of a graph": _compared,
    "comparison: title": _compared_under,
    "benchmark: method": _against_tokens,
    "benchmark, crossover: method": _crossover,
}
SURFACES = (
    Surface("page: title", "html", _titled),
    Surface("page in a notebook: title", "frame", _framed),
    Surface("page: a token's text", "html", _tokens, _whole),
    Surface("page: what is read", "html", _read, _whole, 80),
    Surface("page: name of a graph", "html", _graph_named),
    Surface("page: name of a model", "html", _model_named, _file_name),
    Surface("page of a Hugging Face model: a token's text", "html", _foreign_token),
    Surface("page of a Hugging Face model: what is read", "html", _foreign_text),
    *(Surface(name, "svg", make) for name, make in _PICTURES.items()),
)
