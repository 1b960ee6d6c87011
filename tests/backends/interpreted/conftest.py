"""Tests that run kernels: by Triton's interpreter on a CPU, or on a GPU.

``test_interpreted.py`` starts a process of its own for this folder. To run it by hand:
``TRITON_INTERPRET=1 pytest tests/backends/interpreted``.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    """Silence numpy, with which the interpreter computes, where a kernel means -inf - -inf."""
    for warning in ("invalid value encountered", "divide by zero encountered", "overflow encountered"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:RuntimeWarning")


@pytest.fixture
def device():
    """The device on which kernels run."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True, scope="session")
def _patch_each_module_once():
    """Halve the time: the interpreter would patch Triton's language for each function of a kernel.

    A launch patches the names in our modules, and nothing undoes a patch of Triton's own modules.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpretedFunction

    original_call, patched_modules = InterpretedFunction.__call__, {"gnn_attention"}

    def call(self, *arguments, **options):
        module = self.fn.__module__
        if module.partition(".")[0] in patched_modules or module in patched_modules:
            return self.rewrite()(*arguments, **options)
        patched_modules.add(module)
        return original_call(self, *arguments, **options)

    InterpretedFunction.__call__ = call
