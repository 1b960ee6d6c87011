"""The launches that the compile gate compiles: a form, dtype, width and set of options, forward and backward.

``python tests/support/gate_cases.py '[["rows", "bfloat16", 64, "plain", "sm_90", 0], ...]'`` compiles these
cases, of each one of ``PASSES`` or all, with the Triton that it finds, and prints for each a line of JSON:
what came of its kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys

import torch
from support.compile_gate import compiled_for

from gnn_attention import patterns
from gnn_attention.backends.gpu import csr, row_windows, tiles
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, blocks, rows
from gnn_attention.edges import accumulation_dtype

CPU = torch.device("cpu")
# the kernels of the three passes over edges, and those that add what chunks of hubs leave
CHUNKS = ("merge", "add_up")
PASSES = {
    "rows": [("forward",), ("backward_dst",), ("backward_src",), CHUNKS],
    "blocks": [("receivers",), ("receivers_backward",), ("senders_backward",), CHUNKS],
}
# more than a chunk of a long block (backends/gpu/chunks.py)
TOKENS, HEADS, KV_HEADS = 4608, 4, 2


def graph():
    """A window, and hubs whose rows and blocks are done in chunks."""
    hubs = patterns.sinks(TOKENS, 1) | patterns.global_tokens(TOKENS, [TOKENS - 2])
    return patterns.window(TOKENS, 16) | hubs


def lowered(form, graph, numbered):
    """A graph in a form such as "windows of 32"."""
    if form == "rows":
        return csr.rows_of(graph, CPU, numbered)
    make = tiles.tiles_of if form.startswith("tiles") else row_windows.windows_of
    return make(graph, CPU, int(form.split()[-1]), numbered)


def configurations(form):
    """(bytes of a number, channels) of every pinned configuration; those of 64 serve 16 and 32 too."""
    if form == "rows":
        return list(rows.CONFIGS)
    found = blocks.TILES if form.startswith("tiles") else blocks.WINDOWS
    return [(size, dim) for size, most in found for dim in ((16, 32, 64) if most == 64 else (most,))]


def launch(form, dtype, dim, options):
    """A forward and a backward pass on CPU tensors, whose numbers mean nothing: nothing is computed."""
    wanted, full = graph(), options == "everything"
    sides, kernels = lowered(form, wanted, full), rows if form == "rows" else blocks
    with products_of(dtype) as number:
        problem = a_problem(wanted.num_edges, number, dim, full)
        out, lse = kernels.forward(problem, sides)
        kernels.backward(problem, sides, torch.zeros_like(out), torch.zeros_like(lse), lse)


@contextlib.contextmanager
def products_of(dtype):
    """The dtype of numbers, while products of float32 are as a user asks for them by "tf32" or "float32"."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if dtype == "tf32" else "ieee"
    try:
        yield torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    finally:
        matmul.fp32_precision = before


def configuration(form, dtype, dim, step):
    """What blocks of a plain call are launched with, on the GPU that is pretended."""
    side = lowered(form, patterns.window(128, 4), False)[0]
    with products_of(dtype) as number:
        problem = a_problem(0, number, dim, False)
        return tuple(blocks._config(problem, step, side, _common.constants(problem)))


def a_problem(edges, dtype, dim, full):
    """Token-major q, k and v, as projections give them."""
    counts = HEADS, KV_HEADS, KV_HEADS
    q, k, v = (torch.zeros(1, TOKENS, heads, dim, dtype=dtype).transpose(1, 2) for heads in counts)
    if not full:
        return Problem(q, k, v, dim**-0.5)
    wide = accumulation_dtype(dtype)
    before, bias = (torch.zeros(1, HEADS, edges, dtype=wide) for _ in range(2))
    slopes, seed = torch.zeros(HEADS), torch.zeros((), dtype=torch.int64)
    return Problem(q, k, v, dim**-0.5, 3.0, slopes, before, bias, 0.25, seed)


def kernels_of(form, number=None):
    """The names of the kernels of a pass, or of all."""
    passes = PASSES["rows" if form == "rows" else "blocks"]
    return {name for names in (passes if number is None else passes[number : number + 1]) for name in names}


def compiled(form, dtype, dim, options, gpu, number=None):
    """The kernels of one case."""
    with compiled_for(gpu, kernels_of(form, number)) as built:
        launch(form, dtype, dim, options)
    return [{**dataclasses.asdict(kernel), "faults": kernel.faults()} for kernel in built]


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps({"case": case, "built": compiled(*case)}), flush=True)
