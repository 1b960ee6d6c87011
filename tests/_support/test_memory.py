"""Available memory, in simulated systems, and the checks before large allocations."""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import memory

GIB = 2**30
VERSIONS = {
    "0::/a/b\n": ("sys/fs/cgroup", "max", "current", "inactive_file", "max"),
    "5:cpu:/\n4:memory:/a/b\n0::/\n": (
        *("sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2**63 - 4096,
    ),
}


def available_bytes(root, groups="", files=()):
    """Simulate a system with 32 GiB and these groups and files, and return its available memory."""
    system = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {32 * 2**20} kB\n", "proc/self/cgroup": groups}
    for name, text in (system | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return memory.available(str(root))


@pytest.mark.parametrize("tight", ["", "/a", "/a/b"])
@pytest.mark.parametrize("groups", VERSIONS, ids=["second version", "first"])
def test_the_lowest_limit_of_a_group_and_its_ancestors_counts(tmp_path, groups, tight):
    """The group, its parent or the root may have the limit; cached files are reclaimable."""
    root, limit, used, cached, no_limit = VERSIONS[groups]
    files = {}
    for folder in ("", "/a", "/a/b"):
        files[f"{root}{folder}/memory.{limit}"] = 4 * GIB if folder == tight else no_limit
        files[f"{root}{folder}/memory.{used}"] = 4 * GIB
        files[f"{root}{folder}/memory.stat"] = f"anon 5\n{cached} {GIB}\nactive_file 7\n"
    assert available_bytes(tmp_path, groups, files) == GIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 32 * GIB), (GIB, 0), (64 * GIB, 32 * GIB)])
def test_available_memory_is_between_zero_and_that_of_the_system(tmp_path, limit, expected):
    files = {"sys/fs/cgroup/a/memory.max": limit, "sys/fs/cgroup/a/memory.current": 2 * GIB}
    assert available_bytes(tmp_path, "0::/a\n", files) == expected


def limit_memory(monkeypatch, size=1000):
    """Simulate a machine with so few bytes of memory."""
    monkeypatch.setattr(memory, "MIN_CHECK_BYTES", 0)
    monkeypatch.setattr(memory, "available", lambda: size)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mask", r"mask\(\) of TokenGraph\(window\(64, 4\).*: it would need .* left; use some rows"),
        ("edge_index", r"the list of the 250 edges of TokenGraph\(window.* left; use some rows"),
        ("in_degree", r"the in-degrees of TokenGraph\(window\(64, 4\)"),
    ],
)
def test_large_results_of_a_graph_are_refused_before_they_are_computed(monkeypatch, name, reason):
    """Afterwards the same graph still works."""
    graph = patterns.window(64, 4)
    with monkeypatch.context() as patched:
        limit_memory(patched, size=2000 if name == "edge_index" else 1000)
        with pytest.raises(ValueError, match=reason):
            graph.edge_index if name == "edge_index" else getattr(graph, name)()
    assert graph.mask().sum() == graph.edge_index.shape[1] == graph.in_degree().sum() == 250


def test_a_product_of_graphs_that_is_too_large_is_refused(monkeypatch):
    hub = torch.stack([torch.zeros(5000, dtype=torch.int64), torch.arange(5000)])
    star = ga.TokenGraph.from_edges(hub, 5000)
    monkeypatch.setattr(memory, "available", lambda: 2**28)
    with pytest.raises(ValueError, match=r"the product of two graphs, .* 25,000,000 pairs .* use some rows"):
        star.T.T @ star.T  # All pairs are connected through the hub.
    assert (star @ star).num_edges == 5000


@pytest.mark.parametrize("backend", ["dense", "rows"])
def test_backends_refuse_calls_that_need_too_much_memory(monkeypatch, backend):
    q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
    expected = ga.attend(q, q, q, graph, backend="reference")
    with monkeypatch.context() as patched:
        limit_memory(patched)
        with pytest.raises(
            NotImplementedError, match=f"backend '{backend}' does not support .* GiB are left"
        ):
            ga.attend(q, q, q, graph, backend=backend)
    assert_exact(ga.attend(q, q, q, graph, backend=backend), expected)


def test_a_compiled_call_may_check_memory(monkeypatch):
    """Available memory is a constant to the compiler, so the program reads no file."""
    monkeypatch.setattr(memory, "MIN_CHECK_BYTES", 0)
    q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
    call = lambda q: ga.attend(q, q, q, graph, backend="dense")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_exact(compiled(q), ga.attend(q, q, q, graph, backend="reference"))
