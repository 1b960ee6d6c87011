"""Folders as one file, and back: an archive is read whole, its checksum too, before anything of it is used."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from gnn_attention._support import atomic_files

__all__ = ["members", "pack"]

DAMAGES = (OSError, EOFError, zlib.error, tarfile.TarError)


def pack(folder: Path, files: Iterable[Path], archive: Path) -> int:
    """Write these files of a folder into an archive, whole or not at all, and return its bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for file in files:
            tar.add(file, file.relative_to(folder))
    atomic_files.write(archive, data.getvalue())
    return len(data.getvalue())


def members(archive: Path) -> dict[str, bytes]:
    """The files in an archive by their places. ValueError if it is not there or damaged."""
    try:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
            files = [member for member in tar.getmembers() if member.isfile()]
            return {member.name: tar.extractfile(member).read() for member in files}  # type: ignore[union-attr]
    except DAMAGES as error:
        raise ValueError(f"{archive} cannot be read ({type(error).__name__}: {error})") from error
