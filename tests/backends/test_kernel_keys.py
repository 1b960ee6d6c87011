"""Triton's names of the compiled kernels are the same whichever kernel a process uses first.

Triton hashes a function with those that it calls, in the order in which they are hashed first. A process that
ran one kernel would else not find in its cache what another process compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.extras import needs

ROOT = Path(__file__).parents[2]
# a folder with the oldest Triton that is supported: pip install --target FOLDER --no-deps triton==3.6.0
OLD = os.environ.get("GNN_ATTENTION_OLD_TRITON")
PROGRAM = """
import json, sys
import triton
if sys.argv[1] == "without":  # the loop in kernels/__init__.py finds no function to hash
    of_triton, triton.JITFunction = triton.JITFunction, type(None)
from gnn_attention.backends.gpu.kernels import _common, _row_passes
if sys.argv[1] == "without":
    triton.JITFunction = of_triton
for name in sys.argv[2:]:
    getattr(_row_passes, name).cache_key
functions = {**vars(_common), **vars(_row_passes)}
kernels = {name: x for name, x in functions.items() if isinstance(x, triton.JITFunction)}
print(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}))
"""


def keys_of(how, *first):
    """The key of every function, in a process that asks for those of ``first`` before all others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    command = [sys.executable, "-c", PROGRAM, how, *first]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_keys_do_not_depend_on_what_was_used_first():
    needs("triton")
    forward_first, senders_first = keys_of("with", "forward"), keys_of("with", "backward_src", "merge")
    assert {"forward", "backward_dst", "backward_src", "merge", "add_up", "_delta"} <= set(forward_first)
    assert forward_first == senders_first


@pytest.mark.slow
@pytest.mark.skipif(OLD is None and "CI" not in os.environ, reason="GNN_ATTENTION_OLD_TRITON names no folder")
def test_keys_of_the_oldest_triton_depend_on_it_without_the_loop(monkeypatch):
    """With the loop that hashes all functions in order they do not. Triton 3.9 needs none."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([OLD, os.environ.get("PYTHONPATH", "")]))
    for how in ("with", "without"):
        forward_first, senders_first = keys_of(how, "forward"), keys_of(how, "backward_src", "merge")
        assert (forward_first == senders_first) is (how == "with")
