"""How much memory the system has left, and the control groups around this process still allow.

Each ancestor of a group may set a limit, and the least of them counts. Callers check before they take much:
a request that cannot be met is one sentence and not the end of the process.
"""

from collections.abc import Iterator
from pathlib import Path

from gnn_attention._support.dynamo import constant

WORTH_ASKING = 2**28  # bytes below which nothing is checked
UNKNOWN = 2**40  # where the system does not say
V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
FILES = {"memory": V1, "": V2}  # the controllers of a group -> where it is, and its files


@constant
def available(root: str = "/") -> int:
    """The bytes that are free, in the system whose files are below ``root``."""
    lines = _text(Path(root, "proc/meminfo")).splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([UNKNOWN, *free, *_left_in_groups(Path(root))]))


def shortage(needed: int) -> str | None:
    """None where so many bytes are free; else how many are needed and how many there are, in words.

    >>> shortage(2**20), shortage(2**60)[:38]
    (None, 'it would need 1,073,741,824.0 GiB, and')
    """
    if needed <= WORTH_ASKING or needed <= (room := available()):
        return None
    return f"it would need {needed / 2**30:,.1f} GiB, and {room / 2**30:,.1f} GiB are left"


def check(what: str, needed: int, instead: str) -> None:
    """ValueError where ``what`` needs more bytes than there are; ``instead`` says what to do."""
    if reason := shortage(needed):
        raise ValueError(f"{what}: {reason}; {instead}")


def _left_in_groups(root: Path) -> Iterator[int]:
    """What the control group of this process and each of its ancestors leave, in both versions of groups."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers in FILES:
            mount, *names, reclaimable = FILES[controllers]
            group = Path(own.strip("/"))
            for folder in (root / mount / parent for parent in (group, *group.parents)):
                limit, used = (_text(folder / name).strip() for name in names)
                if limit.isdigit() and used.isdigit():
                    # Files that are cached can be given back.
                    numbers = dict(entry.split() for entry in _text(folder / "memory.stat").splitlines())
                    yield int(limit) - int(used) + int(numbers.get(reclaimable, 0))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
