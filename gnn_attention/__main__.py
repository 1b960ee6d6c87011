"""``python -m gnn_attention``: see :mod:`gnn_attention.cli.main`."""

import sys

from gnn_attention.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
