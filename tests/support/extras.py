"""Skip tests whose optional package is missing, with the reason, except under CI."""

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
    "ase": "forces",
    "scipy": "test",
    "igraph": "test",
}


def needs(module):
    """Import and return a module. If it is missing, skip the test, or the whole file at its top level."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if "CI" in os.environ or error.name not in (module, *EXTRAS):
            raise
        package = error.name.split(".")[0]
        reason = f'{package} is not installed: pip install -e ".[{EXTRAS[package]}]"'
        pytest.skip(reason, allow_module_level=True)


def with_weights(*packages):
    """Return a mark that skips a test if packages of weights are missing."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing) and "CI" not in os.environ,
        reason=f"{missing} not installed: see the extra lm in docs/guide/language_model.md",
    )
