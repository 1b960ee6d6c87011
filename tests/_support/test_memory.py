"""How much memory there is, in made-up systems; and what checks it before much is taken."""

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


def free(root, groups="", files=()):
    """What is available in a system with 32 GiB and these groups and files."""
    system = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {32 * 2**20} kB\n", "proc/self/cgroup": groups}
    for name, text in (system | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return memory.available(str(root))


@pytest.mark.parametrize("tight", ["", "/a", "/a/b"])
@pytest.mark.parametrize("groups", VERSIONS, ids=["second version", "first"])
def test_the_least_of_all_ancestors_counts(tmp_path, groups, tight):
    """The limit may stand at the group itself, above it, or at the root; caches can be given back."""
    root, limit, used, cached, none = VERSIONS[groups]
    files = {}
    for folder in ("", "/a", "/a/b"):
        files[f"{root}{folder}/memory.{limit}"] = 4 * GIB if folder == tight else none
        files[f"{root}{folder}/memory.{used}"] = 4 * GIB
        files[f"{root}{folder}/memory.stat"] = f"anon 5\n{cached} {GIB}\nactive_file 7\n"
    assert free(tmp_path, groups, files) == GIB


@pytest.mark.parametrize(("limit", "left"), [("max", 32 * GIB), (GIB, 0), (64 * GIB, 32 * GIB)])
def test_what_is_left_is_never_more_than_the_system_has_nor_less_than_nothing(tmp_path, limit, left):
    files = {"sys/fs/cgroup/a/memory.max": limit, "sys/fs/cgroup/a/memory.current": 2 * GIB}
    assert free(tmp_path, "0::/a\n", files) == left


def short(monkeypatch, room=1000):
    """A machine that has hardly any memory."""
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    monkeypatch.setattr(memory, "available", lambda: room)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("mask", r"mask\(\) of TokenGraph\(window\(64, 4\).*: it would need .* left; take some rows"),
        ("edge_index", r"the list of the 250 edges of TokenGraph\(window.* left; take some rows"),
        ("in_degree", r"the in-degrees of TokenGraph\(window\(64, 4\)"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_before_it_is_made(monkeypatch, made, reason):
    """The same graph then serves the next valid call."""
    graph = patterns.window(64, 4)
    with monkeypatch.context() as patched:
        short(patched, room=2000 if made == "edge_index" else 1000)
        with pytest.raises(ValueError, match=reason):
            graph.edge_index if made == "edge_index" else getattr(graph, made)()
    assert graph.mask().sum() == graph.edge_index.shape[1] == graph.in_degree().sum() == 250


def test_a_product_that_cannot_be_held_is_refused(monkeypatch):
    hub = torch.stack([torch.zeros(5000, dtype=torch.int64), torch.arange(5000)])
    star = ga.TokenGraph.from_edges(hub, 5000)
    monkeypatch.setattr(memory, "available", lambda: 2**28)
    with pytest.raises(ValueError, match=r"the product of two graphs, .* 25,000,000 pairs .* take some rows"):
        star.T.T @ star.T  # all pairs, by way of the hub
    assert (star @ star).num_edges == 5000


@pytest.mark.parametrize("backend", ["dense", "rows"])
def test_backends_refuse_by_name(monkeypatch, backend):
    q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
    wanted = ga.attend(q, q, q, graph, backend="reference")
    with monkeypatch.context() as patched:
        short(patched)
        with pytest.raises(NotImplementedError, match=f"'{backend}' does not support .* GiB are left"):
            ga.attend(q, q, q, graph, backend=backend)
    assert_exact(ga.attend(q, q, q, graph, backend=backend), wanted)


def test_a_compiled_call_may_check(monkeypatch):
    """What is left is a constant to the compiler: no file is read inside its program."""
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
    call = lambda q: ga.attend(q, q, q, graph, backend="dense")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_exact(compiled(q), ga.attend(q, q, q, graph, backend="reference"))
