"""Triton's names of the compiled kernels are the same whichever kernel a process uses first.

Triton hashes a function with those that it calls, in the order in which they are hashed first. A process that
ran one kernel would else not find in its cache what another process compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.extras import needs

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import triton
from gnn_attention.backends.gpu.kernels import _common, _row_passes
for name in sys.argv[1:]:
    getattr(_row_passes, name).cache_key
functions = {**vars(_common), **vars(_row_passes)}
kernels = {name: x for name, x in functions.items() if isinstance(x, triton.JITFunction)}
print(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}))
"""


def keys_of(*first):
    """The key of every function, in a process that asks for those of ``first`` before all others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    command = [sys.executable, "-c", PROGRAM, *first]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_keys_do_not_depend_on_what_was_used_first():
    needs("triton")
    forward_first, senders_first = keys_of("forward"), keys_of("backward_src", "merge")
    assert {"forward", "backward_dst", "backward_src", "merge", "add_up", "_delta"} <= set(forward_first)
    assert forward_first == senders_first
