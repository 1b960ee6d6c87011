"""``python -m gnn_attention``: see :mod:`gnn_attention.cli.main`."""

import signal
import sys

from gnn_attention.cli.main import main

__all__ = ["main", "run"]


def run() -> int:
    """The console script: one command, after which the process ends."""
    code = main()
    # everything is written: an interrupt has nothing to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(run())
