"""Checkpoints of a training: whole or not there, at any number of ranks, and nothing is lost by going on from one.

A checkpoint is a folder ``step-00000300`` that ``torch.distributed.checkpoint`` writes under another name and that gets its own
when all ranks have written; beside the tensors it holds ``index.json``, what is where, and ``training.json``. Whoever is
interrupted, killed or out of disk leaves the one before as it was. Nothing of a checkpoint is run when it is read.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gnn_attention._support import atomic_files, checks, json_files
from gnn_attention._support.checks import quoted
from gnn_attention._support.text import one_line
from gnn_attention.training.checkpoint_format import Planner, Reader, Writer

__all__ = ["Checkpoints"]

KEPT = 2  # the newest ones
TOLD = "training.json"


@contextmanager
def _interrupts_first() -> Iterator[None]:
    """An interrupt comes as itself, though what cleans up behind it may fail (shutil.rmtree closes a folder twice)."""
    try:
        yield
    except Exception as error:
        first: BaseException | None = error
        while first is not None and not isinstance(first, KeyboardInterrupt):
            first = first.__context__
        if first is not None:
            raise first from None
        raise


class Checkpoints:
    """The checkpoints of one training in a folder, one after every so many steps.

    Raises ValueError for a folder whose parent does not exist.
    """

    def __init__(self, folder: Path, every: int = 100) -> None:
        """``every``: steps from one to the next."""
        self.folder, self.every = Path(folder), checks.size("every", every, 1)
        if not self.folder.absolute().parent.is_dir():
            raise ValueError(f"checkpoints {folder}: expected a folder that exists, make {self.folder.absolute().parent} first")

    def newest(self) -> Path | None:
        """The last whole checkpoint."""
        found = sorted(self.folder.glob("step-" + "[0-9]" * 8))
        return found[-1] if found else None

    @_interrupts_first()
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        told: Mapping[str, Any],
        first: bool = True,
    ) -> None:
        """Write one; ``told`` is what JSON can hold. Every rank calls it, with ``first`` on one of them."""
        whole = self.folder / f"step-{step:08d}"
        part = self.folder / f".{whole.name}.part"
        try:
            if first:
                self._remove_parts()  # of a run that was killed
                part.mkdir(parents=True, exist_ok=True)  # another rank may have made it meanwhile
            with _in_plain_words(part):
                save(_state(model, optimizer, generator), storage_writer=Writer(part))
            if first:
                atomic_files.write(part / TOLD, json.dumps(dict(told)))
                shutil.rmtree(whole, ignore_errors=True)
                part.rename(whole)
        except BaseException:  # an interrupt too
            if first:
                self._remove_parts()
            raise
        if first:
            _settle(self.folder)
            for old in sorted(self.folder.glob("step-" + "[0-9]" * 8))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def _remove_parts(self) -> None:
        for part in self.folder.glob(".step-*.part"):
            shutil.rmtree(part, ignore_errors=True)

    def told(self, path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
        """What was told with a checkpoint; ValueError where another training wrote it, or it cannot be read."""
        try:
            told = json_files.read(path / TOLD)
            json_files.check_fields(told, _TOLD, TOLD)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no checkpoint of a training: {error}") from error
        for name, value in json.loads(json.dumps(dict(expected))).items():
            if told.get(name) != value:
                raise ValueError(
                    f"{path} is a checkpoint of another training: {name} was {quoted(told.get(name))}, is {quoted(value)}; "
                    "give the arguments it was made with, or another folder"
                )
        return told

    def restore(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        """Put a checkpoint's tensors in their places, at whatever number of ranks. Every rank calls it.

        Raises OSError that names the folder where it is damaged; nothing in it is run.
        """
        state, reader = _state(model, optimizer, generator), Reader(path)
        try:
            reader.read_metadata()  # before torch does, which tries twice and prints what it finds
        except ValueError as error:
            raise OSError(f"{path}: the checkpoint failed, {error}") from None
        with _in_plain_words(path):
            load(state, storage_reader=reader, planner=Planner())
        try:
            generator.set_state(state["generator"])
        except RuntimeError as error:
            raise OSError(f"{path}: the checkpoint failed, the state of the generator is damaged: {error}") from None
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "generator": generator.get_state()}


@contextmanager
def _in_plain_words(path: Path) -> Iterator[None]:
    """What torch.distributed.checkpoint wraps, an interrupt for one, comes as itself; one process is no reason to warn."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # of torch 2.9, in its own code
            yield
    except CheckpointException as error:
        found = {rank: failure[0] for rank, failure in error.failures.items()}
        if any(isinstance(one, KeyboardInterrupt) for one in found.values()):
            raise KeyboardInterrupt from error
        told = "; ".join(f"rank {rank}: {type(one).__name__}: {one}" for rank, one in sorted(found.items()))
        raise OSError(f"{path}: the checkpoint failed, {one_line(told, 600)}") from error


def _settle(folder: Path) -> None:
    """The new name reaches the disk, where a folder can be told so."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


_TOLD: dict[str, Callable[[Any], bool]] = {
    "losses": _are_numbers,
    "history": lambda value: (
        isinstance(value, list) and all(isinstance(row, dict) and _are_numbers([*row.values()]) for row in value)
    ),
    "seconds": lambda value: _are_numbers([value]) and 0 <= value < 1e12,
}
