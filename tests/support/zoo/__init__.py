"""The table of theorems: a module for each of ``patterns``, a row for each way to call a builder."""

from importlib import import_module
from pathlib import Path

from support.zoo.row import read

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "row")
MODULES = [import_module(f"support.zoo.{family}") for family in FAMILIES]
ROWS = [row for module in MODULES for row in read(module.ROWS, vars(module))]
