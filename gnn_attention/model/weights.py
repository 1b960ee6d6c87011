"""Tensors and texts in a safetensors file: written whole or not at all, with errors that name the file.

Source: https://huggingface.co/docs/safetensors.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from gnn_attention._support import atomic_files
from gnn_attention._support.text import one_line

File = str | os.PathLike[str]


def save(path: File, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, of any strides, and ``metadata`` to one file; TypeError or ValueError for others.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder) / "identity.safetensors", {"W_Q": torch.eye(2)}, {"width": "2"})
    ...     load(Path(folder) / "identity.safetensors")
    ({'W_Q': tensor([[1., 0.],
            [0., 1.]])}, {'width': '2'})
    """
    dense = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{name!r}] is a {type(tensor).__name__}: expected a Tensor")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"tensors[{name!r}] is sparse or without data: expected a dense tensor")
        # copies: safetensors refuses tensors that share memory
        dense[name] = tensor.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    try:
        content = serialized(dense, dict(metadata or {}) or None)
    except SafetensorError as error:
        raise ValueError(f"tensors cannot be written to {os.fspath(path)}: {error}") from error
    atomic_files.write(path, _ordered(content))


def _ordered(content: bytes) -> bytes:
    """The file with its metadata sorted: safetensors writes them in another order each time."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # the data begin at a multiple of 8 bytes, so that a reader may map them
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def load(path: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU and sorted by name, and its metadata.

    Raises ValueError that names a file which is no safetensors file, OSError where it cannot be read.
    """
    # a missing file, a folder: the system's own error
    Path(path).open("rb").close()
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(sorted((file.metadata() or {}).items()))
    except (SafetensorError, ValueError, RuntimeError) as error:
        why = one_line(str(error))
        raise ValueError(f"{os.fspath(path)}: expected a safetensors file: {why}") from error
