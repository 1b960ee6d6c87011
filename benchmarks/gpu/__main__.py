"""``python -m benchmarks.gpu``: short for ``python -m benchmarks gpu``."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["gpu", *sys.argv[1:]]))
