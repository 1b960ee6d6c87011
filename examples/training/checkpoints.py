"""The checkpoint of a training in one file, from which any number of ranks can resume."""

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

_FULL_STATE = StateDictOptions(full_state_dict=True)


class Checkpoint:
    """A file with the state of a training, replaced after every ``every`` steps.

    Raises ValueError if the folder of the file does not exist.
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
        is_writer: bool = True,
    ) -> None:
        """Write the state and ``record``. Every rank must call this; the one with ``is_writer`` writes."""
        parameters, moments = get_state_dict(model, optimizer, options=_FULL_STATE)
        if is_writer:
            state = {"model": parameters, "optimizer": moments, "generator": generator.get_state()}
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
        """Load the saved state and return its record, which must have the ``expected`` entries.

        Every rank must call this. Without a file, the record is empty and nothing is loaded. ValueError if
        the file belongs to another training or cannot be read.
        """
        if not self.file.exists():
            return {}
        try:
            # Without weights_only, loading could run code from the file.
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            record: dict[str, Any] = state["record"]
        except Exception as error:
            # Where the file is damaged decides which error torch raises.
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"{self.file} is not a checkpoint of a training: {reason}") from error
        for name, value in expected.items():
            if record.get(name) != value:
                raise ValueError(
                    f"{self.file} is a checkpoint of another training, whose {name} was "
                    f"{quote(record.get(name))}, expected {quote(value)}: use another file"
                )
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states, options=_FULL_STATE)
        generator.set_state(state["generator"])
        return record
