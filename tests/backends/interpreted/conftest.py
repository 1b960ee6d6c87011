"""Kernels run here: by Triton's interpreter on a CPU (``TRITON_INTERPRET=1`` before Python starts), or on a
GPU.

The ordinary run collects nothing of this folder, since the variable is read when a kernel is made:
``test_interpreted.py`` starts a process of its own for it. By hand:
``TRITON_INTERPRET=1 pytest tests/backends/interpreted``.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REASON = (
    "tests/backends/interpreted needs TRITON_INTERPRET=1 set before Python starts, or a GPU: not collected"
)

if not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    """The interpreter computes with numpy, which warns of -inf - -inf where a kernel means it."""
    for warning in ("invalid value encountered", "divide by zero encountered", "overflow encountered"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:RuntimeWarning")


def pytest_terminal_summary(terminalreporter):
    """Nothing is left out in silence."""
    if not (INTERPRETED or torch.cuda.is_available()):
        terminalreporter.write_line(REASON)


@pytest.fixture
def device():
    """Where the kernels run."""
    return "cpu" if INTERPRETED else "cuda"
