"""Ctrl-C ends a command and all of its processes, and the command writes what it has measured."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest


def has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_an_interrupted_command_writes_what_there_is(tmp_path):
    """The program installs no handler before the command runs."""
    # A shell starts background jobs with Ctrl-C ignored, so the program restores the default handler.
    program = (
        "import signal, sys; handler = signal.default_int_handler; signal.signal(signal.SIGINT, handler); "
        "import gnn_attention.__main__ as main; "
        "assert signal.getsignal(signal.SIGINT) is handler; sys.exit(main.run())"
    )
    file = tmp_path / "checks.json"
    command = [sys.executable, "-W", "ignore", "-c", program, "verify", "--all", "--json", str(file)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        assert process.stderr.read(1)  # the first line of progress
        # A terminal, too, sends the signal to all processes of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert "results" in json.loads(file.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while has_processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not has_processes(process.pid)
