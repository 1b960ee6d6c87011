"""Build the site: landing page, book, zoo, guide, API, reference. It needs no network, and neither does who reads it.

    python docs/build.py                    # build/site/index.html, in a minute or two
    python docs/build.py --execute          # the notebooks run again, instead of being shown as they were committed
    python docs/build.py --out FOLDER

Needs: pip install -e ".[docs]". A warning of Sphinx, as of a link that leads nowhere, ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# An error in a cell that is no check of an exercise ends the build.
EXECUTE = ("nb_execution_mode=force", "nb_execution_timeout=1800", "nb_execution_raise_on_error=1")


def main(arguments: list[str] | None = None) -> int:
    """Let Sphinx write the pages, in a process of its own; every warning is an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="where the site goes")
    parser.add_argument("--execute", action="store_true", help="run the notebooks (minutes)")
    args = parser.parse_args(arguments)
    out, settings = args.out.resolve(), EXECUTE if args.execute else ()
    command = [sys.executable, "-m", "sphinx", "-qEW", "--keep-going", "-b", "html", "-d", f"{out}-doctrees"]
    command += [*(f"-D{setting}" for setting in settings), "-c", str(ROOT / "docs"), str(ROOT), str(out)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
