"""The files of a checkpoint: tensors as ``torch.distributed.checkpoint`` writes them, and what is where as JSON.

torch keeps the latter as a pickle, which runs whatever is written in it when it is read. Here it is ``index.json``, and every
tensor and number is read with ``weights_only=True``: a checkpoint from a stranger is refused or read, nothing of it is run.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gnn_attention._support import atomic_files, json_files
from gnn_attention._support.shapes import Tensor
from gnn_attention._support.text import one_line

__all__ = ["INDEX", "Planner", "Reader", "Writer"]

INDEX = "index.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Writer(FileSystemWriter):
    """torch's, but for the index, and for how tensors come into their file.

    torch would give ``torch.save`` the file. Its zip writer is C++ that calls back into Python, where an interrupt, or the error
    of a full disk, ends the process at once (``std::terminate``) or comes out as another error. Here it writes to memory, one
    tensor at a time, which runs nothing of Python.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """What this rank has, one after another in a file of its own."""
        file = Path(self.path) / f"{plan.storage_data.prefix}0.distcp"
        with file.open("wb") as stream:
            results = [_written(item, planner, stream) for item in plan.items]
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what is where, when all ranks have written."""
        places = [_place(written) for of_a_rank in results for written in of_a_rank]
        entries = {name: _entry(entry) for name, entry in metadata.state_dict_metadata.items()}
        atomic_files.write(Path(self.path) / INDEX, json.dumps({"entries": entries, "places": places}))


class Reader(FileSystemReader):
    """torch's, but for the index: ValueError where it is damaged."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is where, each part checked."""
        file = Path(self.path) / INDEX
        try:
            found = json_files.read(file)
            json_files.check_fields(found, {"entries": _is_object, "places": _is_list}, "it")
            entries = {name: _entry_of(name, entry) for name, entry in found["entries"].items()}
            stored = dict(_place_of(Path(self.path), number, place) for number, place in enumerate(found["places"]))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from None
        return Metadata(entries, storage_data=stored, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each item of the plan, read alone: nothing larger than what the index gives it."""
        for item in plan.items:
            self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        if item.storage_index not in self.storage_data:
            raise ValueError(f"{Path(self.path) / INDEX} is damaged: it gives no place to {item.storage_index.fqn!r:.80}")
        place = self.storage_data[item.storage_index]
        file = Path(self.path) / place.relative_path
        with file.open("rb") as stream:
            stream.seek(place.offset)
            content = io.BytesIO(stream.read(place.length))
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, content)
            return
        target = planner.resolve_tensor(item).detach()
        found = _narrowed(_loaded(content, file), item)
        if not isinstance(found, torch.Tensor) or found.size() != target.size():
            raise ValueError(f"{file} is damaged: it holds no tensor of {list(target.size())} for {item.storage_index.fqn!r:.80}")
        target.copy_(found)
        planner.commit_tensor(item, target)


class Planner(DefaultLoadPlanner):
    """torch's, but for numbers and lists, which are read without running anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """What is no tensor: read here, and given on as torch writes it. ValueError for another kind of value than there is."""
        name = read_item.dest_index.fqn
        read, there = _loaded(value, name), self._there(name)
        if None not in (read, there) and (type(read) is not type(there) or (isinstance(read, list) and read != there)):
            raise ValueError(f"{name} is damaged: it is {read!r:.80}, expected something like {there!r:.80}")
        found = io.BytesIO()
        torch.save(read, found)
        found.seek(0)
        super().load_bytes(read_item, found)

    def _there(self, name: str) -> Any:
        """The value that is to be replaced."""
        found: Any = self.original_state_dict
        for key in self.mappings[name]:
            found = found[key]
        return found


def _written(item: WriteItem, planner: SavePlanner, stream: BinaryIO) -> WriteResult:
    """An item of the plan, at the end of the file."""
    content, start = planner.resolve_data(item), stream.tell()
    # the view ends here, also where the disk is full: Python 3.13 complains of one that outlives its bytes
    with (_saved(content) if isinstance(content, torch.Tensor) else content).getbuffer() as view:
        stream.write(view)
    length = stream.tell() - start
    return WriteResult(item.index, length, _StorageInfo(Path(stream.name).name, start, length))


def _saved(x: Tensor) -> io.BytesIO:
    """The tensor as torch.save writes it, without what else is in its storage."""
    own, found = x.detach().cpu(), io.BytesIO()
    torch.save(own if own.untyped_storage().nbytes() == own.nbytes else own.clone(), found)
    return found


def _loaded(content: io.BytesIO, where: object) -> Any:
    """What torch.save wrote, if it is a tensor or plain data; ValueError for all that is damaged."""
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except MemoryError:
        raise ValueError(f"{where} is damaged: it asks for more memory than there is") from None
    except pickle.UnpicklingError:  # torch's advice would be to run it
        raise ValueError(f"{where} is damaged: it holds something else than numbers") from None
    except Exception as error:  # of the zip file, of a tensor that does not fit its bytes
        raise ValueError(f"{where} is damaged: {type(error).__name__}: {one_line(str(error), 200)}") from None


def _narrowed(found: Any, item: ReadItem) -> Any:
    """The part that is asked for; None where there is no such part."""
    if not isinstance(found, torch.Tensor) or found.dim() != len(item.lengths):
        return None
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if start + length > found.size(dim):
            return None
        found = found.narrow(dim, start, length)
    return found


# -- the index --------------------------------------------------------------------------------------------------------


def _entry(entry: Any) -> dict[str, Any] | None:
    """A tensor's dtype, size and parts; None for what is no tensor."""
    if isinstance(entry, BytesStorageMetadata):
        return None
    chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
    return {"dtype": str(entry.properties.dtype).removeprefix("torch."), "size": list(entry.size), "chunks": chunks}


def _entry_of(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    kinds = {"dtype": lambda x: isinstance(x, str) and x in DTYPES, "size": _are_counts, "chunks": _is_list}
    json_files.check_fields(entry, kinds, f"entry {name!r:.80}")
    size = entry["size"]
    for chunk in entry["chunks"]:
        if not _is_list(chunk) or len(chunk) != 2 or not all(_are_counts(part) and len(part) == len(size) for part in chunk):
            raise ValueError(f"entry {name!r:.80} has a part that is no offsets and sizes")
        if any(offset + length > whole for offset, length, whole in zip(*chunk, size, strict=True)):
            raise ValueError(f"entry {name!r:.80} has a part outside its size")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), torch.Size(size), chunks)


def _place(written: WriteResult) -> list[Any]:
    index, place = written.index, written.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, place.relative_path, place.offset, place.length]


def _place_of(folder: Path, number: int, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """A place inside a file of the folder, and no other."""
    if not _is_list(place) or len(place) != 5:
        raise ValueError(f"places[{number}] is no place")
    name, offset, file, start, length = place
    fits = (
        isinstance(name, str)
        and (offset is None or _are_counts(offset))
        and isinstance(file, str)
        and len(file) < 256
        and "\0" not in file
    )
    if not fits or not _are_counts([start, length]) or Path(file).name != file or not (folder / file).is_file():
        raise ValueError(f"places[{number}] is no place in a file of this folder")
    if start + length > (folder / file).stat().st_size:
        raise ValueError(f"places[{number}] ends outside its file")
    return MetadataIndex(name, offset), _StorageInfo(file, start, length)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_counts(values: Iterable[Any] | None) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)
