"""``python -m gnn_attention``: see :mod:`gnn_attention.cli.main`."""

import sys

try:
    from gnn_attention.cli.main import main
except KeyboardInterrupt:  # while the commands are loaded
    print("interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
