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


@pytest.fixture(autouse=True, scope="session")
def _patch_each_module_once():
    """Spare half of the time: the interpreter patches Triton's language for each function of a kernel.

    A launch patches what our modules see, and nothing undoes what was patched for those of Triton.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpretedFunction

    patching, patched = InterpretedFunction.__call__, {"gnn_attention"}

    def call(self, *given, **more):
        module = self.fn.__module__
        if module.partition(".")[0] in patched or module in patched:
            return self.rewrite()(*given, **more)
        patched.add(module)
        return patching(self, *given, **more)

    InterpretedFunction.__call__ = call
