"""A run of checks that adds to an earlier one, so that a record can be carried on."""

import datetime
import hashlib
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result

PACKAGE = Path(__file__).resolve().parent.parent
SAME = ("device", "cuda", "torch", "triton", "ptxas", "seed", "sources")


def begin(environment: Mapping[str, Any], resumed: Report | None) -> Report:
    """The report that a run adds to: an empty one, or the earlier one that it carries on.

    ValueError if the earlier run was made on another device, with other versions, sources or seed.
    """
    environment = {**environment, "sources": sources()}
    if resumed is None:
        return Report((), environment)
    for name in SAME:
        earlier, now = resumed.environment.get(name), environment.get(name)
        if earlier != now:
            what = "" if name == "sources" else f": {earlier!r}, now {now!r}"
            raise ValueError(f"the earlier record was made with other {name}{what}; begin a new record")
    return resumed


def add(earlier: Report, results: Mapping[int, Result], due: int, began: float) -> Report:
    """The earlier results and those, by number, of the ``due`` checks of a run that began then."""
    date, seconds = datetime.datetime.fromtimestamp(began, datetime.UTC), round(time.time() - began, 1)
    run: dict[str, Any] = {"date": date.isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    run |= {"seconds": seconds, "checks": len(results)}
    about = {**earlier.environment, "runs": [*earlier.environment.get("runs", []), run]}
    return Report((*earlier.results, *(results[n] for n in sorted(results))), about, due - len(results))


def sources(package: Path = PACKAGE) -> str:
    """The sha256 of all Python files of the package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
