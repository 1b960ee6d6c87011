"""Run a command with ``python -m gnn_attention``; see :mod:`gnn_attention.cli.main`."""

import signal
import sys

from gnn_attention.cli.main import main

__all__ = ["main", "run"]


def run() -> int:
    """Run the ``gnn-attention`` console script and return its exit code."""
    code = main()
    # All output has been written, so a later interrupt would only print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(run())
