"""Checkpoints of a training: whole or not there, at any number of ranks.

A checkpoint is a folder ``step-00000300`` that ``torch.distributed.checkpoint`` writes under another name; it
gets its own when all ranks have written. An interrupt, a kill or a full disk leaves the one before as it was.
torch stores what is where as a pickle, which can run code: go on only from checkpoints of your own.
"""

import json
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gnn_attention._support import atomic_files, checks, json_files
from gnn_attention._support.checks import quoted
from gnn_attention._support.text import one_line

NEWEST = 2  # that many stay
RECORD = "training.json"
_FOLDERS = "step-" + "[0-9]" * 8


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    # Ctrl-C inside torch's writer, which is C++, would come out as another error: it is delivered afterwards
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if caught:
            signal.raise_signal(signal.SIGINT)


class Checkpoints:
    """The checkpoints of one training in a folder, one after every so many steps.

    Raises ValueError for a folder whose parent does not exist.
    """

    def __init__(self, folder: Path, every: int = 100) -> None:
        self.folder, self.every = Path(folder), checks.size("every", every, 1)
        parent = self.folder.absolute().parent
        if not parent.is_dir():
            raise ValueError(f"checkpoints {folder}: expected a folder that exists, make {parent} first")

    def newest(self) -> Path | None:
        """The last whole checkpoint."""
        return max(self.folder.glob(_FOLDERS), default=None)

    @_interrupts_wait()
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        record: Mapping[str, Any],
        first: bool = True,
    ) -> None:
        """Write one; ``record`` is for JSON. Every rank calls it, with ``first`` on one of them."""
        whole = self.folder / f"step-{step:08d}"
        part = self.folder / f".{whole.name}.part"
        try:
            if first:
                # those of a run that was killed; another rank may have made the new one meanwhile
                self._remove_parts()
                part.mkdir(parents=True, exist_ok=True)
            with _first_failure(part):
                save(_state(model, optimizer, generator), storage_writer=FileSystemWriter(part))
                if first:
                    atomic_files.write(part / RECORD, json.dumps(dict(record)))
            if first:
                shutil.rmtree(whole, ignore_errors=True)
                part.rename(whole)
        except BaseException:
            if first:
                self._remove_parts()
            raise
        if first:
            for old in sorted(self.folder.glob(_FOLDERS))[:-NEWEST]:
                shutil.rmtree(old, ignore_errors=True)

    def _remove_parts(self) -> None:
        for part in self.folder.glob(".step-*.part"):
            shutil.rmtree(part, ignore_errors=True)

    def record(self, path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a checkpoint; ValueError where another training wrote it, or it cannot be read."""
        try:
            record = json_files.parsed((path / RECORD).read_text("utf-8"))
            json_files.check_fields(record, _FIELDS, RECORD)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no checkpoint of a training: {error}") from error
        for name, value in json.loads(json.dumps(dict(expected))).items():
            if record.get(name) != value:
                change = f"{name} was {quoted(record.get(name))}, is {quoted(value)}; take another folder"
                raise ValueError(f"{path} is a checkpoint of another training: {change}")
        return record

    def restore(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> None:
        """Load a checkpoint's tensors, at any number of ranks, each of which calls it; OSError if damaged."""
        state, reader = _state(model, optimizer, generator), FileSystemReader(path)
        try:
            with _first_failure(path):
                # torch tries twice and logs two tracebacks: a damaged index is found here
                reader.read_metadata()
                load(state, storage_reader=reader)
            generator.set_state(state["generator"])
        except OSError:
            raise
        except Exception as error:
            reason = one_line(f"{type(error).__name__}: {error}", 600)
            raise OSError(f"{path}: the checkpoint failed, it is damaged: {reason}") from error
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "generator": generator.get_state()}


@contextmanager
def _first_failure(path: Path) -> Iterator[None]:
    """OSError with what failed first on each rank, or the interrupt; one process is no reason to warn."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # of torch 2.9, in its own code
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            yield
    except CheckpointException as error:
        failures = [(rank, _first(failure[0])) for rank, failure in sorted(error.failures.items())]
        if any(isinstance(one, KeyboardInterrupt) for _, one in failures):
            raise KeyboardInterrupt from error
        reasons = (f"rank {rank}: {type(one).__name__}: {one}" for rank, one in failures)
        raise OSError(f"{path}: the checkpoint failed, {one_line('; '.join(reasons), 600)}") from error
    except OSError as error:
        raise OSError(f"{path}: the checkpoint failed, {error}") from error


def _first(error: BaseException) -> BaseException:
    # of a full disk torch's writer makes another error
    while error.__context__ is not None:
        error = error.__context__
    return error


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)


def _are_rows(values: Any) -> bool:
    rows = values if isinstance(values, list) else [None]
    return all(isinstance(row, dict) and _are_numbers([*row.values()]) for row in rows)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "losses": _are_numbers,
    "history": _are_rows,
    "seconds": lambda value: _are_numbers([value]) and 0 <= value < 1e12,
}
