"""The kernel of the backend ``rows`` as it is launched, compiled for GPUs that are not there: nothing spills.

Triton compiles for any GPU on any machine. The oldest Triton that is supported compiles the same where
``GNN_ATTENTION_OLD_TRITON`` names a folder that holds it
(``pip install --target FOLDER --no-deps triton==3.6.0``).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns
from gnn_attention.backends.gpu.csr import rows_of
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

OLD = os.environ.get("GNN_ATTENTION_OLD_TRITON")
CPU, TOKENS, HEADS, KV_HEADS = torch.device("cpu"), 64, 4, 2
SPARE = 16  # bytes of stack that are no spill: some number saved from before a loop until after it


@pytest.fixture
def compiled(monkeypatch):
    """``compiled(gpu, function)``: what the launches of a function compile for that GPU; none starts."""
    needs("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver

    launch, kernels = JITFunction.run, []

    def compile_only(self, *arguments, grid, warmup, **options):
        kernels.append(launch(self, *arguments, grid=grid, warmup=True, **options))

    class NoDriver:
        get_current_device = get_current_stream = lambda self, *device: 0

        def __init__(self, capability):
            self.get_current_target = lambda: GPUTarget("cuda", capability, 32)

    def compile_launches(gpu, function):
        monkeypatch.setattr(driver, "_active", NoDriver(int(gpu.removeprefix("sm_"))))
        function()
        return kernels

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compile_launches


def both_passes(dtype, width, every_option):
    """On CPU tensors, of whose numbers none is read."""
    from gnn_attention.backends.gpu.kernels import rows

    graph = patterns.window(TOKENS, 8)
    counts = HEADS, KV_HEADS, KV_HEADS
    q, k, v = (torch.zeros(1, TOKENS, heads, width, dtype=dtype).transpose(1, 2) for heads in counts)
    problem = Problem(q, k, v, width**-0.5)
    if every_option:
        wide = accumulation_dtype(dtype)
        before, bias = (torch.zeros(1, HEADS, graph.num_edges, dtype=wide) for _ in range(2))
        slopes, seed = torch.zeros(HEADS, dtype=wide), torch.zeros((), dtype=torch.int64)
        problem = Problem(q, k, v, width**-0.5, 3.0, slopes, before, bias, 0.25, seed)
    sides = rows_of(graph, CPU, for_edges=every_option)
    out, lse = rows.forward(problem, sides)
    rows.backward(problem, sides, torch.zeros_like(out), torch.zeros_like(lse), lse)


def stack_bytes(kernel, folder):
    """What spills to memory, as the reader in Triton's wheel tells of the machine code."""
    import triton

    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = folder / "kernel.cubin"
    code.write_bytes(kernel.asm["cubin"])
    done = subprocess.run([reader, "-res-usage", code], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout + done.stderr).group(1))


CASES = [
    (dtype, width, every_option, gpu)
    for gpu in ("sm_90", "sm_80")
    for dtype in (torch.bfloat16, torch.float32)
    for width in (64, 128)
    for every_option in (False, True)
]


@pytest.mark.parametrize(
    ("dtype", "width", "every_option", "gpu"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_the_three_passes_compile_without_spills(dtype, width, every_option, gpu, compiled, tmp_path):
    kernels = compiled(gpu, lambda: both_passes(dtype, width, every_option))
    assert [kernel.name for kernel in kernels] == ["forward", "backward_dst", "backward_src"]
    assert [kernel.name for kernel in kernels if stack_bytes(kernel, tmp_path) > SPARE] == []


@pytest.mark.slow
@pytest.mark.skipif(OLD is None and "CI" not in os.environ, reason="GNN_ATTENTION_OLD_TRITON names no folder")
def test_the_oldest_triton_compiles_the_same():
    assert (Path(OLD) / "triton").is_dir()
    paths = os.pathsep.join([OLD, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-m", "", "-k", "three_passes"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
