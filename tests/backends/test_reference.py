"""The reference backend computes chunks of edges, and refuses calls beyond its memory limit."""

from itertools import pairwise

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv
from torch._dynamo.testing import CompileCounter

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import reference
from gnn_attention.backends.call import AttentionCall

CAUSAL = patterns.causal(9)
INPUTS = qkv()


@pytest.mark.parametrize("room", [1, 2, 3, 8, 20, 31, 44, 45, 46, 100])
@pytest.mark.parametrize("graph", [CAUSAL, patterns.window(9, 1)], ids=["causal", "loops"])
def test_chunks_are_runs_of_rows_that_fit(monkeypatch, graph, room):
    """Every row comes once, in order; chunks hold ``room`` edges or one row; neighbours fill half."""
    chunks, run_chunk = [], reference._run_chunk

    def record_chunk(call, start, stop, src, *edges):
        chunks.append((start, stop, len(src)))
        return run_chunk(call, start, stop, src, *edges)

    monkeypatch.setattr(reference, "_max_chunk_edges", lambda call: room)
    monkeypatch.setattr(reference, "_run_chunk", record_chunk)
    out = ga.attend(*INPUTS, graph, backend="reference")
    assert_exact(out, ga.attend(*INPUTS, graph, backend="dense"))
    degree = graph.in_degree().tolist()
    assert [row for start, stop, _ in chunks for row in range(start, stop)] == list(range(9))
    assert all(count == sum(degree[start:stop]) for start, stop, count in chunks)
    assert all(count <= room or stop == start + 1 for start, stop, count in chunks)
    assert all(first[2] + second[2] > room / 2 for first, second in pairwise(chunks))
    assert (len(chunks) == 1) == (room >= graph.num_edges)


def test_the_limit(monkeypatch):
    """A call at the limit is supported; beyond it, as for 2^24 senders, the error has the estimate."""
    call = AttentionCall(*INPUTS, CAUSAL, 1.0)
    limit = reference.bytes_needed(call)
    assert 45 * reference._bytes_per_edge(call) < limit
    monkeypatch.setattr(reference, "MAX_BYTES", limit)
    assert reference.unsupported_reason(call) is None
    monkeypatch.setattr(reference, "MAX_BYTES", limit - 1)
    with pytest.raises(
        NotImplementedError, match=r"backend 'reference' does not support .*causal.* GiB, its limit"
    ):
        ga.attend(*INPUTS, patterns.causal(9), backend="reference")
    monkeypatch.undo()
    size = 2**24
    q, k = torch.zeros(1, 1, 1, 1).expand(1, 4, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 4, size, 1)
    call = AttentionCall(q, k, k.expand(1, 4, size, 8), patterns.full(size).rows(0, 1), 1.0)
    # Each edge takes four times its gathered numbers, and 64 bytes of lists.
    gib = f"{size * (64 + 4 * 832) / 2**30:.1f} GiB"
    assert reference._bytes_per_edge(call) == 4 * 2 * (1 + 8 + 4) * 8 == 832
    assert reference.unsupported_reason(call) == f"the reference would need about {gib}, its limit is 2 GiB"


# torch's compiler instantiates autograd.Function, which torch itself deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_reference_in_chunks_is_compiled_for_any_number_of_samples(monkeypatch):
    """The size of a chunk depends on the samples, so programs compare it with powers of two only."""
    torch.compiler.reset()
    monkeypatch.setattr(reference, "BYTES_PER_CHUNK", 2**12)
    graph, counter = patterns.causal(5), CompileCounter()
    run = lambda x: ga.attend(x, x, x, graph, backend="reference")  # noqa: E731
    program = torch.compile(run, fullgraph=True, backend=counter)
    for samples in (3, 4, 5, 6):
        x = torch.randn(samples, 1, 5, 3, dtype=torch.float64)
        assert_exact(program(x), ga.attend(x, x, x, graph))
    assert counter.frame_count <= 3
