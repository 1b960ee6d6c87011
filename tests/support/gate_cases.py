"""The launches that the compile gate compiles: every form, dtype, width and set of options, forward and
backward.

``python tests/support/gate_cases.py '[["rows", "bfloat16", 64, "plain", "sm_90"], ...]'`` compiles these
cases with the Triton that it finds, and prints for each a line of JSON: what came of its kernels, or the
error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback

import torch
from support.compile_gate import compiled_for

from gnn_attention import patterns
from gnn_attention.backends.gpu import csr, row_windows, tiles
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _configs, blocks, rows
from gnn_attention.edges import accumulation_dtype

CPU = torch.device("cpu")
WINDOWS, TILES = row_windows.windows_of, tiles.tiles_of
FORMS = {
    "rows": lambda graph, numbered: csr.rows_of(graph, CPU, numbered),
    "windows of 16": lambda graph, numbered: WINDOWS(graph, CPU, 16, numbered),
    "windows of 32": lambda graph, numbered: WINDOWS(graph, CPU, 32, numbered),
    "windows of 64": lambda graph, numbered: WINDOWS(graph, CPU, 64, numbered),
    "tiles of 64": lambda graph, numbered: TILES(graph, CPU, 64, numbered),
    "tiles of 128": lambda graph, numbered: TILES(graph, CPU, 128, numbered),
}
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
OPTIONS = ("plain", "everything")
TOKENS, HEADS, KV_HEADS = 2304, 4, 2


def graph():
    """A window, and hubs whose rows are done in chunks."""
    return (
        patterns.window(TOKENS, 16) | patterns.sinks(TOKENS, 1) | patterns.global_tokens(TOKENS, [TOKENS - 2])
    )


def configurations(form):
    """(bytes of a number, channels) of every pinned configuration; those of 64 serve 16 and 32 too."""
    if form == "rows":
        return list(rows.CONFIGS)
    found = _configs.TILES if form.startswith("tiles") else _configs.WINDOWS
    return [(size, dim) for size, most in found for dim in ((16, 32, 64) if most == 64 else (most,))]


def launch(form, dtype, dim, options):
    """A forward and a backward pass on CPU tensors, whose numbers mean nothing: nothing is computed."""
    wanted, full = graph(), options == "everything"
    lowered, kernels = FORMS[form](wanted, full), rows if form == "rows" else blocks
    problem = a_problem(wanted.num_edges, DTYPES[dtype], dim, full)
    out, lse = kernels.forward(problem, lowered)
    kernels.backward(problem, lowered, torch.zeros_like(out), torch.zeros_like(lse), lse)


def a_problem(edges, dtype, dim, full):
    """Token-major q, k and v, as projections give them."""
    q, k, v = (
        torch.zeros(1, TOKENS, heads, dim, dtype=dtype).transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    if not full:
        return Problem(q, k, v, dim**-0.5)
    wide = accumulation_dtype(dtype)
    before, bias = (torch.zeros(1, HEADS, edges, dtype=wide) for _ in range(2))
    slopes, seed = torch.zeros(HEADS), torch.zeros((), dtype=torch.int64)
    return Problem(q, k, v, dim**-0.5, 3.0, slopes, before, bias, 0.25, seed)


def compiled(form, dtype, dim, options, gpu):
    """The kernels of one case."""
    with compiled_for(gpu) as built:
        launch(form, dtype, dim, options)
    return built


def report(cases):
    """Print a line of JSON for each case."""
    for case in cases:
        try:
            found = {
                "built": [
                    {**dataclasses.asdict(kernel), "faults": kernel.faults()} for kernel in compiled(*case)
                ]
            }
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": case, **found}), flush=True)


if __name__ == "__main__":
    report(json.loads(sys.argv[1]))
