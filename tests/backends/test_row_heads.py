"""Rows with several heads in one program, compiled for a GPU that is not there: nothing spills."""

import pytest
from support.extras import needs

# dtype, channels, query and key/value heads, and what a program takes of them
TAKEN = [
    ("bfloat16", 64, (8, 1), (1, 8)),
    ("bfloat16", 64, (8, 8), (8, 1)),
    ("bfloat16", 64, (4, 2), (2, 2)),
    ("bfloat16", 64, (6, 2), (2, 3)),
    ("bfloat16", 32, (16, 1), (1, 16)),
    ("bfloat16", 20, (8, 8), (8, 1)),
    ("bfloat16", 128, (4, 1), (1, 4)),
    ("bfloat16", 128, (4, 4), (4, 1)),
    ("bfloat16", 256, (2, 1), (1, 2)),
    ("float32", 64, (8, 1), (1, 8)),
    ("float32", 64, (8, 8), (8, 1)),
    ("float64", 64, (8, 1), (1, 8)),
]


BACKWARD = {"backward_dst", "backward_src"}
# the kernels of a part, and the bytes of p and ds that may be handed over: else they are computed again
PARTS = {"forward": ({"forward"}, 0), "backward": (BACKWARD, 0), "handed over": (BACKWARD, 2**28)}
SOME = [
    pytest.param(*case, part, marks=pytest.mark.nightly if (n + m) % 4 else pytest.mark.slow)
    for n, case in enumerate(TAKEN)
    for m, part in enumerate(PARTS)
]


@pytest.mark.parametrize(("dtype", "dim", "heads", "taken", "part"), SOME, ids=str)
def test_several_heads_compile_without_spills(dtype, dim, heads, taken, part, monkeypatch):
    """With every option, for sm_90."""
    needs("triton")
    from support import compile_gate, gate_cases

    from gnn_attention.backends.gpu import csr
    from gnn_attention.backends.gpu.kernels import rows

    names, most = PARTS[part]
    monkeypatch.setattr(csr, "MOST_HANDED", most)
    monkeypatch.setattr(rows, "together", lambda *sizes: rows.Together(*taken))
    monkeypatch.setattr(gate_cases, "HEADS", heads[0])
    monkeypatch.setattr(gate_cases, "KV_HEADS", heads[1])
    with compile_gate.compiled_for("sm_90", names) as built:
        gate_cases.launch("rows", dtype, dim, "everything")
    assert {kernel.kernel for kernel in built} == names
    assert [kernel for kernel in built if kernel.faults()] == []
    assert all(kernel.counts["wide loads"] for kernel in built if dim >= 64)
