"""The oracle, edge by edge: what chunks of its edges are, that they change nothing, and what it refuses for
its memory.
"""

from itertools import pairwise

import pytest
import torch
from support.bounds import assert_exact
from torch._dynamo.testing import CompileCounter

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import reference
from gnn_attention.backends.call import AttentionCall

# torch's own compiler instantiates autograd.Function, which torch itself calls deprecated
quiet = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def qkv(dst=9, src=9, heads=4, kv_heads=2, dim=8, value_dim=6, batch=2):
    """Random q, k, v of the given sizes."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, dst, dim), (batch, kv_heads, src, dim), (batch, kv_heads, src, value_dim))
    return tuple(torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_chunks_do_not_change_the_reference(monkeypatch, most):
    """One edge at a time, a few, or all: the same output, lse and gradients."""
    q, k, v = (x.requires_grad_() for x in qkv())
    graph = patterns.causal(9)
    whole, told = ga.attend(q, k, v, graph, backend="reference", return_info=True)
    wanted = torch.autograd.grad(whole.sum(), [q, k, v], retain_graph=True)
    monkeypatch.setattr(reference, "_most_edges", lambda call: most)
    found, info = ga.attend(q, k, v, graph, backend="reference", return_info=True)
    assert_exact(found, whole)
    assert_exact(info.lse, told.lse)
    gradients = torch.autograd.grad(found.sum(), [q, k, v])
    assert_exact(gradients, wanted)


@pytest.mark.parametrize("room", [1, 2, 3, 8, 20, 31, 44, 45, 46, 100])
@pytest.mark.parametrize("graph", [patterns.causal(9), patterns.window(9, 1)], ids=["causal", "loops"])
def test_chunks_are_runs_of_rows_that_fit(monkeypatch, graph, room):
    """Every row once, in order; no more edges than there is room for, but for one row alone; two neighbours
    fill half of it.
    """
    q, k, v = qkv()
    seen, some_rows = [], reference._some_rows

    def watched(call, start, stop, src, *rest):
        seen.append((start, stop, len(src)))
        return some_rows(call, start, stop, src, *rest)

    monkeypatch.setattr(reference, "_most_edges", lambda call: room)
    monkeypatch.setattr(reference, "_some_rows", watched)
    ga.attend(q, k, v, graph, backend="reference")
    degree = graph.in_degree().tolist()
    assert [row for start, stop, _ in seen for row in range(start, stop)] == list(range(9))
    assert all(count == sum(degree[start:stop]) for start, stop, count in seen)
    assert all(count <= room or stop == start + 1 for start, stop, count in seen)
    assert all(one[2] + two[2] > room / 2 for one, two in pairwise(seen))
    assert (len(seen) == 1) == (room >= graph.num_edges)


def test_an_edge_takes_both_its_ends_twice():
    """q, k, v and message of each head in float64, and eight numbers such as its logit: as gathered, and as
    made of it.
    """
    q, k, v = qkv(heads=3, kv_heads=1, dim=5, value_dim=7)
    call = AttentionCall(q, k, v, patterns.causal(9), 1.0)
    assert reference._bytes_per_edge(call) == 2 * 3 * (2 * 5 + 2 * 7 + 8) * 8
    assert reference._most_edges(call) == reference.CHUNK_BYTES // reference._bytes_per_edge(call)


def test_a_call_of_just_the_limit_is_held(monkeypatch):
    q, k, v = qkv()
    call = AttentionCall(q, k, v, patterns.causal(9), 1.0)
    needed = reference.bytes_needed(call)
    assert 45 * reference._bytes_per_edge(call) < needed
    monkeypatch.setattr(reference, "MEMORY_LIMIT", needed)
    assert reference.unsupported_reason(call) is None
    monkeypatch.setattr(reference, "MEMORY_LIMIT", needed - 1)
    assert reference.unsupported_reason(call) is not None


def test_the_refusal_tells_gigabytes():
    """Of a receiver of 2^24 senders: four times what is gathered of each edge, and 64 bytes for its lists."""
    size = 2**24
    q, k = torch.zeros(1, 1, 1, 1).expand(1, 4, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 4, size, 1)
    call = AttentionCall(q, k, k.expand(1, 4, size, 8), patterns.full(size).rows(0, 1), 1.0)
    assert reference._bytes_per_edge(call) == 4 * 2 * (1 + 8 + 4) * 8
    needed = size * (64 + 4 * 832) / 2**30
    assert (
        reference.unsupported_reason(call)
        == f"the reference would need about {needed:.1f} GiB, its limit is 2 GiB"
    )


def test_reference_refuses_with_the_estimate(monkeypatch):
    """Beyond its limit it names the bytes, and falls back on nobody. The next call works."""
    q, k, v = qkv()
    with monkeypatch.context() as patched:
        patched.setattr(reference, "MEMORY_LIMIT", 1000)
        with pytest.raises(
            NotImplementedError,
            match=r"backend 'reference' cannot hold .*causal.* about .* GiB, its limit is",
        ):
            ga.attend(q, k, v, patterns.causal(9), backend="reference")
    found = ga.attend(q, k, v, patterns.causal(9), backend="reference")
    assert_exact(found, ga.attend(q, k, v, patterns.causal(9), backend="dense"))


@pytest.mark.slow
def test_reference_stays_below_two_gigabytes_at_causal_2048():
    """Semantics 9 in docs/guide.md: forward and backward, 8 heads of 64, as the peak of a fresh process."""
    import subprocess
    import sys

    program = """
import resource, torch, gnn_attention as ga
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
q, k, v = (torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3))
graph = ga.patterns.causal(2048); graph.edge_index
before = peak()
ga.attend(q, k, v, graph, backend="reference").sum().backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * 2**30


@quiet
def test_the_reference_in_chunks_is_compiled_for_any_number_of_samples(monkeypatch):
    """How many edges fit at once depends on it: of a symbol, the program asks between which powers of two it
    is.
    """
    torch.compiler.reset()
    monkeypatch.setattr(reference, "CHUNK_BYTES", 2**12)
    graph, counted = patterns.causal(5), CompileCounter()
    compiled = torch.compile(
        lambda x: ga.attend(x, x, x, graph, backend="reference"), fullgraph=True, backend=counted
    )
    for samples in (3, 4, 5, 6):
        x = torch.randn(samples, 1, 5, 3, dtype=torch.float64)
        assert_exact(compiled(x), ga.attend(x, x, x, graph))
    assert counted.frame_count <= 3
