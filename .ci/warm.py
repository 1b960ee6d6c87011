"""Run Python commands in forks of a process that has already imported torch, torch_geometric and pytest.

The process reads lines of JSON, ``[arguments of python, folder, seconds]``, and answers each with an exit code (1 if
the command takes longer). ``mutate.py`` starts thousands of small test runs, which would otherwise spend most of
their time importing the same packages.
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
            enter(folder)
            os._exit(run(arguments))
        print(wait(pid, limit), flush=True)


def enter(folder: str) -> None:
    """Prepare the fork: start a session in the folder, import packages from there, and print nothing."""
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def run(arguments: list[str]) -> int:
    """Run ``-m pytest ...`` or ``-c code`` and return its exit code."""
    try:
        if arguments[:2] == ["-m", "pytest"]:
            return int(pytest.main(arguments[2:]))
        exec(arguments[1], {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        return 1
    return 0


def wait(pid: int, limit: float) -> int:
    """Return the exit code of a fork, or 1 if it exceeds the limit or is ended by a signal."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        changed_pid, status = os.waitpid(pid, os.WNOHANG)
        if changed_pid:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
