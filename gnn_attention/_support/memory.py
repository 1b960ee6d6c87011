"""Available memory of the system, within the limits of this process's control groups.

Callers check it before a large allocation, to raise an error before the system kills the process.
"""

from pathlib import Path

from gnn_attention._support.dynamo import constant

WORTH_ASKING = 2**28  # Requests for fewer bytes are not checked.
DEFAULT_BYTES = 2**40  # This is assumed if the system does not report its memory.
FILES_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
FILES_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
CGROUPS = {"memory": FILES_V1, "": FILES_V2}  # The keys are a group's controllers.


@constant
def available(root: str = "/") -> int:
    """Return the available bytes of the system whose ``proc`` and ``sys`` are below ``root``."""
    lines = _read_text(Path(root, "proc/meminfo")).splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for line in _read_text(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUPS:
            mount, limit_name, usage_name, reclaimable = CGROUPS[controllers]
            group = Path(path.strip("/"))
            for folder in (Path(root, mount, parent) for parent in (group, *group.parents)):
                limit = _read_text(folder / limit_name).strip()
                usage = _read_text(folder / usage_name).strip()
                if limit.isdigit() and usage.isdigit():
                    # The kernel can reclaim the memory of cached files.
                    stat = dict(entry.split() for entry in _read_text(folder / "memory.stat").splitlines())
                    free.append(int(limit) - int(usage) + int(stat.get(reclaimable, 0)))
    return max(0, min([DEFAULT_BYTES, *free]))


def shortage(needed: int) -> str | None:
    """Say why ``needed`` bytes are not available, or return None if they are.

    >>> shortage(2**20), shortage(2**60)[:38]
    (None, 'it would need 1,073,741,824.0 GiB, but')
    """
    if needed <= WORTH_ASKING or needed <= (free := available()):
        return None
    return f"it would need {needed / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are left"


def check(subject: str, needed: int, advice: str) -> None:
    """Raise ValueError with ``advice`` if ``subject`` needs more bytes than are available."""
    if reason := shortage(needed):
        raise ValueError(f"{subject}: {reason}; {advice}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
