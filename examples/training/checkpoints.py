"""The checkpoint of a training: one file, whole or not there, from which any number of ranks goes on."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from gnn_attention._support import atomic_files, checks
from gnn_attention._support.checks import quote
from gnn_attention._support.text import one_line

_WHOLE = StateDictOptions(full_state_dict=True)


class Checkpoint:
    """The last state of a training, in a file that is replaced after every so many steps.

    Raises ValueError for a file in a folder that does not exist.
    """

    def __init__(self, file: Path, every: int = 100) -> None:
        self.file, self.every = Path(file), checks.size("every", every, 1)
        atomic_files.check_output_path("--checkpoint", str(file))

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        record: Mapping[str, Any],
        first: bool = True,
    ) -> None:
        """Write it, ``record`` included. Every rank calls this, with ``first`` on the one that writes."""
        weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
        if first:
            state = {"model": weights, "optimizer": moments, "generator": generator.get_state()}
            content = io.BytesIO()
            torch.save({**state, "record": dict(record)}, content)
            atomic_files.write(self.file, content.getvalue())

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        expected: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Load what was saved and return its record, which must have the ``expected`` entries.

        Every rank calls this. Without a file nothing is loaded and the record is empty. ValueError where
        another training wrote the file, or it cannot be read.
        """
        if not self.file.exists():
            return {}
        try:
            # Without weights_only the file could run code.
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            record: dict[str, Any] = state["record"]
        except Exception as error:
            # What torch raises depends on where the file is damaged.
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"{self.file} is no checkpoint of a training: {reason}") from error
        for name, value in expected.items():
            if record.get(name) != value:
                change = f"{name} was {quote(record.get(name))}, is {quote(value)}; take another file"
                raise ValueError(f"{self.file} is a checkpoint of another training: {change}")
        tensors = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **tensors, options=_WHOLE)
        generator.set_state(state["generator"])
        return record
