"""The launches of the backend ``rows`` compile for GPUs that this machine need not have.

Triton compiles for any GPU on any machine; its interpreter accepts code that its compiler does not.
"""

import pytest
import torch
from support.extras import needs
from support.kernel_cases import mark_slow

from gnn_attention import patterns
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.csr import pack_sides, unpack_sides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_ops.normalisers import ELEMENTWISE
from gnn_attention.edge_softmax import accumulation_dtype

CPU, TOKENS, HEADS, KV_HEADS = torch.device("cpu"), 64, 4, 2


@pytest.fixture
def compile_for(monkeypatch):
    """Return ``compile_for(gpu, function)``, which compiles the kernels that a function would launch."""
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

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns without it.
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compile_launches


def run_both_passes(dtype, width, every_option, normaliser="softmax"):
    """Run both passes on CPU tensors, whose numbers are not read; with every option, edges have two types."""
    from gnn_attention.backends.gpu.kernels import rows

    graph = patterns.window(TOKENS, 8)
    counts = HEADS, KV_HEADS, KV_HEADS
    q, k, v = (torch.zeros(1, TOKENS, heads, width, dtype=dtype).transpose(1, 2) for heads in counts)
    wide_dtype, num_edges = accumulation_dtype(dtype), graph.num_edges
    num_features, edge_type, options = 0, None, ()
    if every_option:
        num_features, edge_type = 5, torch.zeros(num_edges, dtype=torch.int32)
        options = 3.0, 0.25, torch.zeros((), dtype=torch.int64)
    r = torch.zeros(1, HEADS, TOKENS, 2 * num_features, dtype=wide_dtype)
    a = torch.zeros(1, 1, num_edges, num_features, dtype=wide_dtype)
    bias = torch.zeros(1, HEADS, num_edges if every_option else 0, dtype=wide_dtype)
    problem = Problem(q, k, v, r, a, bias, width**-0.5, *options)
    problem = problem._replace(edge_type=edge_type, normaliser=normaliser)
    sides = unpack_sides(*pack_sides(graph, CPU))
    out, sums, lse = rows.forward(problem, sides)
    grads = torch.zeros_like(out), torch.zeros_like(sums)
    rows.backward(problem, sides, grads, torch.zeros_like(lse), lse)


@pytest.mark.parametrize(
    ("dtype", "every_option", "gpu"),
    [
        (torch.bfloat16, False, "sm_90"),
        *(
            pytest.param(dtype, True, "sm_80", marks=pytest.mark.slow)
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
)
def test_the_three_passes_compile(dtype, every_option, gpu, compile_for):
    kernels = compile_for(gpu, lambda: run_both_passes(dtype, 64, every_option))
    assert [kernel.name for kernel in kernels] == ["forward", "backward_dst", "backward_src"]
    assert all(kernel.asm["cubin"] for kernel in kernels)


@pytest.mark.parametrize("normaliser", mark_slow(ELEMENTWISE, ["gelu"]))
def test_normalisers_compile(normaliser, compile_for):
    kernels = compile_for("sm_90", lambda: run_both_passes(torch.float64, 16, False, normaliser))
    assert len(kernels) == 3


@pytest.mark.slow
@pytest.mark.parametrize("normaliser", ["softmax", "sigmoid"])
def test_chunks_of_long_rows_compile(normaliser, compile_for, monkeypatch):
    monkeypatch.setattr(csr, "MIN_CHUNK_SIZE", 4)
    kernels = compile_for("sm_90", lambda: run_both_passes(torch.bfloat16, 64, True, normaliser))
    # Each pass has two results with chunks: out and sums of features, or two gradients.
    names = ["forward", "backward_dst", "backward_src"]
    expected_names = [x for name in names for x in [name, name, "combine_chunks", "combine_chunks"]]
    assert [kernel.name for kernel in kernels] == expected_names
