"""Build the site: landing page, book, zoo, guide, API, reference. Neither building nor reading it needs a network.

    python docs/build.py                    # write build/site/index.html, in a minute or two
    python docs/build.py --execute          # run the notebooks instead of showing their committed outputs
    python docs/build.py --out FOLDER

It needs `pip install -e ".[docs]"`. The exit code is 1 if Sphinx warns, for example about a broken link.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# An error in any cell ends the build, unless the cell is the check of an exercise.
EXECUTE = ("nb_execution_mode=force", "nb_execution_timeout=1800", "nb_execution_raise_on_error=1")


def main(arguments: list[str] | None = None) -> int:
    """Run Sphinx in a separate process, with every warning as an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder of the site")
    parser.add_argument("--execute", action="store_true", help="run the notebooks (minutes)")
    args = parser.parse_args(arguments)
    out, settings = args.out.resolve(), EXECUTE if args.execute else ()
    command = [sys.executable, "-m", "sphinx", "-qEW", "--keep-going", "-b", "html", "-d", f"{out}-doctrees"]
    command += [*(f"-D{setting}" for setting in settings), "-c", str(ROOT / "docs"), str(ROOT), str(out)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
