"""The source code of the standard library, split into text for training and held-out text."""

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.model.tokenizer import BytePair

# These folders, and files with these prefixes, differ between machines or hold packages, tests or tables.
_TOOL_FOLDERS = {"__pycache__", "dist-packages", "distutils", "ensurepip", "lib2to3", "site-packages"}
_SKIPPED_FOLDERS = _TOOL_FOLDERS | {"encodings", "idlelib", "test", "tests", "turtledemo"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize")
# One file in about 16 is held out.
_HELD_OUT = 16


class Corpus(NamedTuple):
    """The contents of files for training and of held-out files, by file name."""

    training: Mapping[str, str]
    held_out: Mapping[str, str]


class Encoded(NamedTuple):
    """A corpus with its vocabulary and tokens, which several trainings can share; see :func:`encoded`."""

    text: Corpus
    vocabulary: BytePair
    training: Int[Tensor, " tokens"]
    held_out: Int[Tensor, " tokens"]


def corpus(root: Path | None = None) -> Corpus:
    """Read the source code of the standard library (or of another folder), split by a hash of file names.

    Raises ValueError for a folder without source files.

    >>> text = corpus()
    >>> "ast.py" in text.training | text.held_out, set(text.training) & set(text.held_out)
    (True, set())
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(
        path.as_posix()
        for path in paths
        if not _SKIPPED_FOLDERS & set(path.parts) and not path.name.startswith(_SKIPPED_PREFIXES)
    )
    if not names:
        raise ValueError(f"root must be a folder with *.py files, got {str(root)!r}")
    parts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name in names:
        is_held_out = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0
        parts[is_held_out][name] = (root / name).read_text("utf-8", errors="replace")
    return Corpus(*parts)


def encoded(text: Corpus | None = None, pieces: int = 1024) -> Encoded:
    """Encode a corpus (by default :func:`corpus`) with a vocabulary learned from its training text."""
    text = corpus() if text is None else text
    vocabulary = BytePair.learn("".join(text.training.values()), pieces)
    training, held_out = (torch.tensor(vocabulary.encode("".join(part.values()))) for part in text)
    return Encoded(text, vocabulary, training, held_out)
