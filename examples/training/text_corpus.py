"""The text that every Python installation has, split into a part to learn from and a part to be judged by."""

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.model.tokenizer import BytePair

# tests, fixtures of tools, tables of characters, what is not the standard library or differs by machine
_OF_TOOLS = {"__pycache__", "dist-packages", "distutils", "ensurepip", "lib2to3", "site-packages"}
_SKIPPED = _OF_TOOLS | {"encodings", "idlelib", "test", "tests", "turtledemo"}
_HELD_OUT = 16  # one file in so many


class Corpus(NamedTuple):
    """Text to learn from and text to be judged by: file name -> content."""

    training: Mapping[str, str]
    held_out: Mapping[str, str]


class Encoded(NamedTuple):
    """A corpus as tokens, made once for several trainings: see :func:`encoded`."""

    text: Corpus
    vocabulary: BytePair
    training: Int[Tensor, " tokens"]
    held_out: Int[Tensor, " tokens"]


def corpus(root: Path | None = None) -> Corpus:
    """The sources of the standard library (or of another folder), split by a hash of the file's name.

    Raises ValueError if there are none.

    >>> text = corpus()
    >>> "ast.py" in text.training | text.held_out, set(text.training) & set(text.held_out)
    (True, set())
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    skipped = ("_sysconfigdata", "sitecustomize")
    belongs = (path for path in paths if not _SKIPPED & set(path.parts) and not path.name.startswith(skipped))
    names = sorted(map(Path.as_posix, belongs))
    if not names:
        raise ValueError(f"root {str(root)!r} holds no *.py files: expected those of the standard library")
    parts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name in names:
        is_held_out = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0
        parts[is_held_out][name] = (root / name).read_text("utf-8", errors="replace")
    return Corpus(*parts)


def encoded(text: Corpus | None = None, pieces: int = 1024) -> Encoded:
    """A corpus (:func:`corpus` unless given) as tokens of a vocabulary learnt from its training part."""
    text = corpus() if text is None else text
    vocabulary = BytePair.learn("".join(text.training.values()), pieces)
    training, held_out = (torch.tensor(vocabulary.encode("".join(part.values()))) for part in text)
    return Encoded(text, vocabulary, training, held_out)
