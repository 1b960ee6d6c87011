"""Commands of Python run in forks of a process that has already loaded torch, torch_geometric and pytest.

Reads lines of JSON, ``[arguments of python, folder, seconds]``, and answers each with the exit code (1 where
it took longer): ``mutate.py`` starts thousands of small test runs, most of whose time would go into loading
the same packages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import networkx  # noqa: F401
import pytest
import torch.nn.attention.flex_attention
import torch_geometric.nn  # noqa: F401


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin:
        arguments, folder, limit = json.loads(line)
        pid = os.fork()
        if pid == 0:
            begin(folder)
            os._exit(run(arguments))
        print(waited(pid, limit), flush=True)


def begin(folder: str) -> None:
    """In the fork: a session of its own in the folder, whose packages come first, and silent."""
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)


def run(arguments: list[str]) -> int:
    """The exit code of ``-m pytest ...`` or ``-c code``."""
    try:
        if arguments[:2] == ["-m", "pytest"]:
            return int(pytest.main(arguments[2:]))
        exec(arguments[1], {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        return 1
    return 0


def waited(pid: int, limit: float) -> int:
    """The exit code of a fork; 1 where it outlived the limit, or was ended by a signal."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
