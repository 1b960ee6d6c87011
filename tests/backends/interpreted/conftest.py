"""Kernels run here: by Triton's interpreter on a CPU, or on a GPU.

``test_interpreted.py`` starts a process of its own for this folder. By hand:
``TRITON_INTERPRET=1 pytest tests/backends/interpreted``.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    """The interpreter computes with numpy, which warns of -inf - -inf where a kernel means it."""
    for warning in ("invalid value encountered", "divide by zero encountered", "overflow encountered"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:RuntimeWarning")


@pytest.fixture
def device():
    """Where the kernels run."""
    return "cpu" if INTERPRETED else "cuda"
