"""How much memory the system has left, and the control groups around this process still allow.

Each ancestor of a group may set a limit, and the least of them counts. Callers check before they take much:
a request that cannot be met is one sentence and not the end of the process.
"""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from gnn_attention._support.dynamo import constant

WORTH_ASKING = 2**28  # bytes below which nothing is checked
UNKNOWN = 2**40  # where the system does not say
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@constant
def available(root: str = "/") -> int:
    return max(0, min([_of_the_system(Path(root)), *_of_groups(Path(root))]))


def shortage(needed: int) -> str | None:
    """None where so many bytes are free; else how many are needed and how many there are, in words.

    >>> shortage(2**20), shortage(2**60)[:38]
    (None, 'it would need 1,073,741,824.0 GiB, and')
    """
    if needed <= WORTH_ASKING or needed <= (room := available()):
        return None
    return f"it would need {needed / 2**30:,.1f} GiB, and {room / 2**30:,.1f} GiB are left"


def check(what: str, needed: int, instead: str) -> None:
    """ValueError where ``what`` needs more bytes than there are; ``instead`` says what to do.

    >>> check("mask()", 2**60, "take a part")
    Traceback (most recent call last):
    ValueError: mask(): it would need 1,073,741,824.0 GiB, and ... GiB are left; take a part
    """
    reason = shortage(needed)
    if reason is not None:
        raise ValueError(f"{what}: {reason}; {instead}")


def _of_the_system(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return UNKNOWN


def _of_groups(root: Path) -> Iterator[int]:
    """What each group leaves: those of ``/proc/self/cgroup``, in both versions, and all their ancestors."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, files = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], V2
        elif "memory" in controllers.split(","):
            mounts, files = ["sys/fs/cgroup/memory"], V1
        else:
            continue
        group = Path(path.strip("/"))
        for mount, folder in product(mounts, (group, *group.parents)):
            left = _left(root / mount / folder, *files)
            if left is not None:
                yield left


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None
    lines = _text(group / "memory.stat").splitlines()
    cache = sum(int(line.split()[1]) for line in lines if line.startswith(reclaimable + " "))
    return int(most) - int(used) + cache


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
