"""One self-contained page on which a model's attention can be walked through, cut and mended.

``page("Llamas do not output words")`` takes the model that ships with the package and carries all of it:
whatever is changed on the page is recomputed there, to the next token. Of a Hugging Face model the page
carries one run. It opens from a file, in a browser without a network, or in a notebook.

The sources are in ``web/``; ``npm ci && npm run build`` there makes ``page.html``, the template, which is
committed, so that Python needs no tool to write a page. ``python docs/make.py`` then writes the page of
``FIRST`` as ``docs/explore.html``, to which README and notebooks link.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gnn_attention import model as language_model
from gnn_attention._support import checks
from gnn_attention._support.checks import check_order, describe_type, quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.explorer._html import Page, assemble_page
from gnn_attention.explorer._masks import Choice, distinct, mask_of_text, masks_of_typed_text, users, zoo
from gnn_attention.explorer._pack import Source, whole
from gnn_attention.graph import TokenGraph
from gnn_attention.layer.glossary import GLOSSARY, VIEWS
from gnn_attention.model.tokenizer import BytePair

__all__ = ["FIRST", "Page", "page"]

FIRST = "for name in names:\n    print(name)\nfor name in"
LONGEST_TITLE = 80


def page(
    text_or_tokens: str | Sequence[int] | Tensor = FIRST,
    model: Any = None,
    graph: Any = None,
    masks: Iterable[Any] | None = None,
    room: int = 16,
    title: str | None = None,
    layers: int | Iterable[int] | None = None,
) -> Page:
    """The page of a text: ``page(...).save("page.html")``, or the value of a notebook's cell.

    Args:
        text_or_tokens: what is read, or the ids of its 1 to 512 tokens; of ``FIRST`` there is a tour.
        model: the model that ships, unless given: a file of ``gnn_attention.model.save``, ``(LanguageModel,
            BytePair)``, a Hugging Face model ``(model, tokenizer)`` (without the tokenizer for ids alone), or
            the name or folder of one.
        graph: a :class:`TokenGraph` or an expression such as ``"window(n, 4) | sinks(n, 1)"``, where n is the
            number of tokens and room, that is shown first; or several, of which the first is. Without it the
            model's own is.
        masks: the graphs to choose from next to these two, in place of a choice of the zoo.
        room: how many more tokens may be written on the page; of a Hugging Face model none.
        title: of the page, the text unless given.
        layers: of a Hugging Face model, which to show: all unless given.

    Raises TypeError, ValueError or IndexError for an argument that is none of these, a text that is empty or
    too long, more than a page can show; FileNotFoundError for weights that are not there; NotImplementedError
    for a Hugging Face model of a family that :func:`gnn_attention.heads_of` does not know.

    >>> shown = page("Llamas do not output words", graph="window(n, 4)")
    >>> shown
    Page('Llamas do not output words', 11 tokens, 1.9 MB)
    """
    words, first = text_or_tokens, [] if graph is None else _several("graph", graph)
    if not isinstance(words, str):
        words = checks.sizes("text_or_tokens", words, kind="the ids of tokens")
    offered = None if masks is None else _several("masks", masks)
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a string, got {type(title).__name__}")
    source = _source(words, model, checks.size("room", room), layers)
    count, room = len(source.tokens), source.room
    wanted = users(first, count, room)
    others = zoo(count, room) if offered is None else users(offered, count, room)
    title = _title(source, words) if title is None else title
    data = _data(source, title, wanted, others)
    more = {"typed": masks_of_typed_text(first)} if source.model["kind"] == "model" else {}
    return Page(assemble_page(title, data | more), title, count)


def _source(words: Any, model: Any, room: int, layers: Any) -> Source:
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    called = "LanguageModel"
    if model is None or (name is not None and Path(name).is_file()):
        path = language_model.TRAINED if name is None else Path(name)
        model, called = language_model.load(path)[:2], path.stem
    elif name is not None and name.endswith(".safetensors"):
        advice = "give one of gnn_attention.model.save, or a Hugging Face name or folder"
        raise FileNotFoundError(f"model {quote(name)} is no file: {advice}")
    first, *rest = model if isinstance(model, (tuple, list)) else (model,)
    if isinstance(first, language_model.LanguageModel):
        if len(rest) != 1 or not isinstance(rest[0], BytePair):
            raise TypeError("a LanguageModel needs its vocabulary: give model=(model, vocabulary)")
        if layers is not None:
            needed = "of this one the page holds, and needs, every layer"
            raise ValueError(f"layers={quote(layers)} is for a Hugging Face model: {needed}")
        return whole(words, first, rest[0], called, room)
    if name is None and (not isinstance(first, nn.Module) or len(rest) > 1):
        expected = "a file, a name, (model, vocabulary) or (model, tokenizer)"
        raise TypeError(f"model must be {expected}, got {model!r:.80}")
    # transformers is loaded for its own models alone
    foreign = importlib.import_module("gnn_attention.explorer._recorded")
    if name is not None:
        first, *rest = foreign.from_pretrained(name)
    source: Source = foreign.record_source(words, first, *rest, name=name, layers=layers)
    return source


def _several(name: str, graphs: Any) -> list[Any]:
    if isinstance(graphs, (str, TokenGraph)):
        return [graphs]
    check_order(name, graphs)
    if not isinstance(graphs, Iterable):
        expected = "a TokenGraph, an expression such as 'window(n, 4)', or several of them"
        raise TypeError(f"{name} must be {expected}, got {describe_type(graphs)}")
    return list(graphs)


def _title(source: Source, words: Any) -> str:
    named = any(text != str(token) for token, text in source.tokens)
    text = words if isinstance(words, str) else "".join(text for _, text in source.tokens) if named else ""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    line = " ⏎ ".join(filter(None, lines)) or str(source.model["name"])
    return line if len(line) <= LONGEST_TITLE else f"{line[:LONGEST_TITLE]}..."


def _data(source: Source, title: str, wanted: list[Choice], others: list[Choice]) -> dict[str, Any]:
    # in the form of web/src/types.ts
    shown = distinct([mask_of_text(source.own), *wanted], others)
    return {
        "version": 1,
        "title": title,
        "tokens": [{"id": token, "text": text} for token, text in source.tokens],
        "room": source.room,
        "masks": [choice.to_json() for choice in shown],
        "start": 1 if wanted else 0,
        "model": source.model,
        "words": [
            {"name": term.name, "words": {view: getattr(term, view.replace(" ", "_")) for view in VIEWS}}
            for term in GLOSSARY
        ],
        "views": list(VIEWS),
    }
