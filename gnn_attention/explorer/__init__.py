"""Write a self-contained HTML page on which a reader can follow and change a model's attention.

``page("Llamas do not output words")`` embeds the model that ships with the package: after each
change, the page computes the model again, up to the next token. For a Hugging Face model, the page
embeds one recorded run. Browsers open the page from a file, without a network; notebooks display
it.

The sources are in ``web/``. ``npm ci && npm run build`` there makes the template ``page.html``,
which is committed, so that users need no npm. ``python docs/make.py`` then writes the page
of the text ``FIRST`` to ``docs/explore.html``.
"""

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
from gnn_attention.explorer import _masks
from gnn_attention.explorer._html import Page, assemble_page
from gnn_attention.explorer._masks import Choice
from gnn_attention.explorer._pack import Source, pack_model
from gnn_attention.graph import TokenGraph
from gnn_attention.layer.glossary import GLOSSARY, VIEWS
from gnn_attention.model.tokenizer import BytePair

__all__ = ["FIRST", "Page", "page"]

FIRST = "for name in names:\n    print(name)\nfor name in"
MAX_TITLE_LENGTH = 80


def page(
    text_or_tokens: str | Sequence[int] | Tensor = FIRST,
    model: Any = None,
    graph: Any = None,
    masks: Iterable[Any] | None = None,
    room: int = 16,
    title: str | None = None,
    layers: int | Iterable[int] | None = None,
) -> Page:
    """Make the page of a text. Save it with ``page(...).save(path)``, or display it in a notebook.

    Args:
        text_or_tokens: the text, or the ids of its 1 to 512 tokens. The text ``FIRST`` has a guided tour.
        model: a file that ``gnn_attention.model.save`` wrote, ``(LanguageModel, BytePair)``, a
            Hugging Face ``(model, tokenizer)`` (token ids need no tokenizer), or the name or folder
            of a Hugging Face model. Default: the model that ships with the package.
        graph: the graph that is shown first, or a list of graphs that begins with it. A graph is a
            :class:`TokenGraph`, or an expression such as ``"window(n, 4) | sinks(n, 1)"``, where n is
            the number of tokens plus ``room``. Default: the model's own graph.
        masks: further graphs to choose from. Default: a selection of the library's patterns.
        room: how many more tokens fit on the page. A page of a Hugging Face model has no room.
        title: title of the page. Default: the text.
        layers: the layers of a Hugging Face model to show. Default: all.

    Raises TypeError, ValueError or IndexError for invalid arguments, for an empty text, or if the
    text or model is too large for a page; FileNotFoundError for a missing model file;
    NotImplementedError for a Hugging Face model whose attention cannot be recorded.

    >>> page("Llamas do not output words", graph="window(n, 4)")
    Page('Llamas do not output words', 11 tokens, 1.9 MB)
    """
    text = text_or_tokens
    if not isinstance(text, str):
        text = checks.sizes("text_or_tokens", text, kind="the ids of tokens")
    graphs = [] if graph is None else _list_graphs("graph", graph)
    menu = None if masks is None else _list_graphs("masks", masks)
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a string, got {type(title).__name__}")
    source = _read_source(text, model, checks.size("room", room), layers)
    num_tokens, room = len(source.tokens), source.room
    choices = _masks.make_user_choices(graphs, num_tokens, room)
    zoo = _masks.zoo(num_tokens, room) if menu is None else _masks.make_user_choices(menu, num_tokens, room)
    title = _default_title(source, text) if title is None else title
    data = _make_data(source, title, choices, zoo)
    if source.model["kind"] == "model":
        data["typed"] = _masks.make_typed_text_data(graphs)
    return Page(assemble_page(title, data), title, num_tokens)


def _read_source(text: Any, model: Any, room: int, layers: Any) -> Source:
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    model_name = "LanguageModel"
    if model is None or (name is not None and Path(name).is_file()):
        path = language_model.TRAINED if name is None else Path(name)
        model = language_model.load(path)[:2]
        model_name = path.stem
    elif name is not None and name.endswith(".safetensors"):
        raise FileNotFoundError(f"model {quote(name)} is not a file: gnn_attention.model.save writes one")
    module, *tokenizers = model if isinstance(model, (tuple, list)) else (model,)
    if isinstance(module, language_model.LanguageModel):
        if len(tokenizers) != 1 or not isinstance(tokenizers[0], BytePair):
            raise TypeError("a LanguageModel needs its vocabulary: pass model=(model, vocabulary)")
        if layers is not None:
            raise ValueError(f"layers={quote(layers)} is for a Hugging Face model: others need all layers")
        return pack_model(text, module, tokenizers[0], model_name, room)
    if name is None and (not isinstance(module, nn.Module) or len(tokenizers) > 1):
        raise TypeError(
            f"model must be a file, a name, (model, vocabulary) or (model, tokenizer), got {model!r:.80}"
        )
    # ``_recorded`` imports transformers, which is optional.
    recorder = importlib.import_module("gnn_attention.explorer._recorded")
    if name is not None:
        module, *tokenizers = recorder.from_pretrained(name)
    source: Source = recorder.record_source(text, module, *tokenizers, name=name, layers=layers)
    return source


def _list_graphs(name: str, graphs: Any) -> list[Any]:
    if isinstance(graphs, (str, TokenGraph)):
        return [graphs]
    check_order(name, graphs)
    if not isinstance(graphs, Iterable):
        kind = describe_type(graphs)
        raise TypeError(f"{name} must be TokenGraphs or expressions such as 'window(n, 4)', got {kind}")
    return list(graphs)


def _default_title(source: Source, text: Any) -> str:
    if not isinstance(text, str):
        # Without a tokenizer, each token's text is its id. Then the title is the model's name.
        has_texts = any(token_text != str(token) for token, token_text in source.tokens)
        text = "".join(token_text for _, token_text in source.tokens) if has_texts else ""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    line = " ⏎ ".join(filter(None, lines)) or str(source.model["name"])
    return line if len(line) <= MAX_TITLE_LENGTH else f"{line[:MAX_TITLE_LENGTH]}..."


def _make_data(source: Source, title: str, choices: list[Choice], zoo: list[Choice]) -> dict[str, Any]:
    """Return the data of a page, in the form of ``web/src/types.ts``."""
    masks = _masks.add_distinct([_masks.make_model_choice(source.graph), *choices], zoo)
    return {
        "version": 1,
        "title": title,
        "tokens": [{"id": token, "text": text} for token, text in source.tokens],
        "room": source.room,
        "masks": [choice.to_json() for choice in masks],
        "start": 1 if choices else 0,
        "model": source.model,
        "words": [
            {"name": term.name, "words": {view: getattr(term, view.replace(" ", "_")) for view in VIEWS}}
            for term in GLOSSARY
        ],
        "views": list(VIEWS),
    }
