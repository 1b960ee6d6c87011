"""Available memory of the system, within the limits of this process's control groups.

Callers check it before a large allocation, to raise an error before the system kills the process.
"""

from pathlib import Path

from gnn_attention._support.dynamo import constant

MIN_CHECK_BYTES = 2**28  # Requests for at most this many bytes are not checked.
DEFAULT_BYTES = 2**40  # This is assumed if the system does not report its memory.
V1_FILES = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2_FILES = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
CGROUP_FILES = {"memory": V1_FILES, "": V2_FILES}  # The keys are a group's controllers.


@constant
def available(root: str = "/") -> int:
    """Return the available bytes of the system whose ``proc`` and ``sys`` are below ``root``."""
    lines = _read_text(Path(root, "proc/meminfo")).splitlines()
    free_bytes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for line in _read_text(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUP_FILES:
            mount, limit_name, usage_name, reclaimable_name = CGROUP_FILES[controllers]
            group = Path(path.strip("/"))
            for folder in (Path(root, mount, parent) for parent in (group, *group.parents)):
                limit = _read_text(folder / limit_name).strip()
                usage = _read_text(folder / usage_name).strip()
                if limit.isdigit() and usage.isdigit():
                    # The kernel can reclaim the memory of cached files.
                    stat = dict(entry.split() for entry in _read_text(folder / "memory.stat").splitlines())
                    free_bytes.append(int(limit) - int(usage) + int(stat.get(reclaimable_name, 0)))
    return max(0, min([DEFAULT_BYTES, *free_bytes]))


def shortage(num_bytes: int) -> str | None:
    """Say why ``num_bytes`` are not available, or return None if they are.

    >>> shortage(2**20), shortage(2**60)[:38]
    (None, 'it would need 1,073,741,824.0 GiB, but')
    """
    if num_bytes <= MIN_CHECK_BYTES or num_bytes <= (free_bytes := available()):
        return None
    return f"it would need {num_bytes / 2**30:,.1f} GiB, but {free_bytes / 2**30:,.1f} GiB are left"


def check(subject: str, num_bytes: int, advice: str) -> None:
    """Raise ValueError with ``advice`` if ``subject`` needs more bytes than are available."""
    if reason := shortage(num_bytes):
        raise ValueError(f"{subject}: {reason}; {advice}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
