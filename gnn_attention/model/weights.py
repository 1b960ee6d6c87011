"""Tensors in a file that holds numbers and nothing that can run: the safetensors format.

Source: https://huggingface.co/docs/safetensors. The file is the header's length (8 bytes, little-endian), the header
(a JSON object: name -> dtype, shape and data_offsets, and maybe `__metadata__`, str -> str), then the tensors' bytes,
little-endian and row by row. Reading and writing it is ours because the package depends on torch, torch_geometric and
networkx alone, and the format is thirty lines: the rest here is doubt. The tests hold both directions against the
safetensors library.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnn_attention._support import atomic_files

__all__ = ["load", "save"]

_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # the safetensors library's own bound
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of these tensors and of `metadata`, there in full or not at all.

    The bytes go to a new file beside `path`, which then takes its place; whoever reads meanwhile has the old one.
    Tensors that share memory are written once each. Raises TypeError for what is no tensor or no str, and ValueError
    for a dtype other than float16/32/64, bfloat16, int32/64, uint8 and bool, or a tensor that is not dense.

    Source: https://huggingface.co/docs/safetensors, section Format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder) / "identity.safetensors", {"W_Q": torch.eye(2)}, {"width": "2"})
    ...     load(Path(folder) / "identity.safetensors")
    ({'W_Q': tensor([[1., 0.],
            [0., 1.]])}, {'width': '2'})
    """
    _check_mappings(tensors, metadata)
    # Largest items first: then each tensor starts at a multiple of its item, for readers that map the file.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = _header_bytes(tensors, order, dict(metadata or {}))
    with atomic_files.written(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.writelines(_data(tensors[name]) for name in order)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU and in the header's order, and its metadata.

    Nothing in the file is believed before it is checked: the header's length, its JSON, each dtype and shape, that the
    tensors' bytes cover the data without hole, overlap or rest. Raises ValueError that names the file, the tensor and
    what is wrong, and OSError where the file cannot be read.

    Source: https://huggingface.co/docs/safetensors, section Format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "cut.safetensors"
    ...     _ = file.write_bytes(b"four")
    ...     load(file)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ValueError: cut.safetensors: the file has 4 bytes: expected 8 or more, the first of them the header's length
    """
    with Path(path).open("rb") as file:
        try:
            return _read(file, os.fstat(file.fileno()).st_size)
        except (ValueError, RecursionError) as error:  # the latter from JSON nested a thousand deep
            raise ValueError(f"{os.fspath(path)}: {error}") from error


# Writing


def _check_mappings(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    for argument, found in (("tensors", tensors), ("metadata", metadata or {})):
        if not isinstance(found, Mapping):
            raise TypeError(f"{argument} is a {type(found).__name__}: expected a mapping from names")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata has {key!r}: {value!r}: expected a str for a str; json.dumps makes one")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(name, str):
        raise TypeError(f"tensors has the name {name!r}: expected a str")
    if name == _METADATA:
        raise ValueError(f"tensors has the name {name!r}, which the format keeps for itself: choose another")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensors[{name!r}] is a {type(tensor).__name__}: expected a Tensor")
    if tensor.dtype not in _NAMES:
        raise ValueError(f"tensors[{name!r}] is {tensor.dtype}: expected one of {_listed(_NAMES)}; convert it first")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError(f"tensors[{name!r}] is sparse, nested or without data: expected a dense tensor")


def _header_bytes(tensors: Mapping[str, Tensor], order: Iterable[str], metadata: dict[str, str]) -> bytes:
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        starts[name] = end
        end += _size(tensors[name])
    header: dict[str, object] = {_METADATA: metadata} if metadata else {}
    for name, tensor in tensors.items():
        offsets = [starts[name], starts[name] + _size(tensor)]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    raw = _encoded(header)
    raw += b" " * (-len(raw) % 8)  # the data, too, starts at a multiple of 8
    if len(raw) > _MAX_HEADER:
        raise ValueError(f"tensors and metadata need a header of {len(raw)} bytes: expected at most {_MAX_HEADER}")
    return raw


def _encoded(header: dict[str, object]) -> bytes:
    try:
        return json.dumps(header, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise ValueError(f"a name or metadata holds {found!r}, a lone surrogate: expected utf-8 text") from error


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _data(tensor: Tensor) -> bytearray:
    data = bytearray(_size(tensor))
    if data:  # torch.frombuffer refuses an empty buffer
        raw = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        torch.frombuffer(data, dtype=torch.uint8).copy_(_little_endian(raw, tensor.dtype))
    return data


# Reading


def _read(file: BufferedReader, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    header = _read_header(file, size)
    metadata = _metadata(header.pop(_METADATA, {}))
    entries = {name: _entry(name, fields) for name, fields in header.items()}
    in_order = sorted(entries.values(), key=lambda entry: (entry.start, entry.stop))
    _check_cover(in_order, size - file.tell())
    tensors = {entry.name: _read_tensor(file, entry) for entry in in_order}
    return {name: tensors[name] for name in entries}, metadata


def _read_header(file: BufferedReader, size: int) -> dict[str, Any]:
    if size < 8:
        raise ValueError(f"the file has {size} bytes: expected 8 or more, the first of them the header's length")
    length, bound = int.from_bytes(file.read(8), "little"), min(size - 8, _MAX_HEADER)
    if length > bound:
        raise ValueError(f"the header's length is given as {length} bytes: expected at most {bound}")
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise ValueError(f"the header begins with {raw[:1]!r}: expected b'{{', a JSON object")
    try:
        header: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
        _encoded(header)  # JSON's escapes can write lone surrogates, on which later prints and saves would fail
    except ValueError as error:
        raise ValueError(f"the header is no JSON object of this format: {error}") from error
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        raise ValueError(f"the name {_shown(twice[0])} is there twice")
    return found


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        raise ValueError(f"{_METADATA} is {_shown(found)}: expected a JSON object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise ValueError(f"{_METADATA} has {_shown(key)}: {_shown(value)}: expected a string")
    return found


def _entry(name: str, fields: Any) -> _Entry:
    try:
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"described by {_shown(fields)}: expected dtype, shape and data_offsets")
        dtype, shape = _dtype(fields["dtype"]), _shape(fields["shape"])
        start, stop = _offsets(fields["data_offsets"])
        needed = math.prod(shape) * dtype.itemsize
        if stop - start != needed:
            raise ValueError(f"data_offsets {start} to {stop}: expected {needed} bytes, those of its dtype and shape")
    except ValueError as error:
        raise ValueError(f"tensor {_shown(name)}: {error}") from error
    return _Entry(name, dtype, shape, start, stop)


def _dtype(found: Any) -> torch.dtype:
    if not isinstance(found, str) or found not in _DTYPES:
        raise ValueError(f"dtype {_shown(found)}: expected one of {_listed(_DTYPES)}")
    return _DTYPES[found]


def _shape(found: Any) -> tuple[int, ...]:
    if not _are_counts(found):
        raise ValueError(f"shape {_shown(found)}: expected a list of counts")
    # A dimension of 0 makes a tensor empty however large the others: they must still fit torch's strides.
    stride = 1
    for count in found:
        stride *= count or 1
        if stride >= 2**63:
            raise ValueError(f"shape {_shown(found)}: expected a product below 2**63")
    return tuple(found)


def _offsets(found: Any) -> tuple[int, int]:
    if not _are_counts(found) or len(found) != 2:
        raise ValueError(f"data_offsets {_shown(found)}: expected two counts of bytes, start and stop")
    return found[0], found[1]


def _are_counts(found: Any) -> bool:
    # type() and not isinstance: JSON's true is an int to isinstance.
    return isinstance(found, list) and all(type(count) is int and count >= 0 for count in found)


def _check_cover(entries: Iterable[_Entry], size: int) -> None:
    end = 0
    for name, _, _, start, stop in entries:
        if stop > size:
            raise ValueError(f"tensor {_shown(name)} ends at byte {stop} of the data: expected at most {size}")
        if start != end:
            wrong = "leaves a hole" if start > end else "overlaps"
            raise ValueError(f"tensor {_shown(name)} {wrong}: it starts at byte {start} of the data, not at {end}")
        end = stop
    if end != size:
        raise ValueError(f"the data have {size} bytes: expected {end}, where the last tensor ends")


def _read_tensor(file: BufferedReader, entry: _Entry) -> Tensor:
    data = bytearray(entry.stop - entry.start)
    if not data:  # torch.frombuffer refuses an empty buffer
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    if (count := file.readinto(data)) != len(data):
        raise ValueError(f"tensor {_shown(entry.name)} has {count} of {len(data)} bytes: the file was cut meanwhile")
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if entry.dtype is torch.bool and (largest := int(raw.max())) > 1:
        raise ValueError(f"tensor {_shown(entry.name)} is BOOL and holds the byte {largest}: expected 0 and 1 alone")
    return _little_endian(raw, entry.dtype).view(entry.dtype).reshape(entry.shape)


# Both


def _little_endian(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """These bytes of items as they are on this machine, made little-endian; and back, for it is its own inverse."""
    return raw if sys.byteorder == "little" else raw.reshape(-1, dtype.itemsize).flip(1).reshape(-1)


def _listed(found: Iterable[object]) -> str:
    return ", ".join(map(str, found))


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 200 else f"{text[:200]}..."
