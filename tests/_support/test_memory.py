"""How much memory there is, in made-up systems; and what checks it before much is taken."""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import memory

GIB = 2**30


def system(root, groups=None, files=()):
    """A made-up root: what is free, the groups of this process, and the files of these groups."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {32 * 2**20} kB\n", **dict(files)}
    files |= {} if groups is None else {"proc/self/cgroup": groups}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return str(root)


FIRST, SECOND = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize("tight", ["", "/a", "/a/b"])
@pytest.mark.parametrize(
    ("groups", "root", "most", "used", "none"),
    [
        ("0::/a/b\n", SECOND, "max", "current", "max"),
        ("5:cpu:/\n4:memory:/a/b\n0::/\n", FIRST, "limit_in_bytes", "usage_in_bytes", 2**63 - 4096),
    ],
    ids=["second version", "first"],
)
def test_the_least_of_all_ancestors_counts(tmp_path, groups, root, most, used, none, tight):
    """The limit may stand at the group itself, at any one above it, or at the root: each is found."""
    folders = {f"{root}{folder}": 3 * GIB if folder == tight else none for folder in ("", "/a", "/a/b")}
    files = {f"{folder}/memory.{most}": limit for folder, limit in folders.items()}
    files |= {f"{folder}/memory.{used}": GIB for folder in folders}
    assert memory.available(system(tmp_path, groups, files)) == 2 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        # files that are cached can be given back
        (4 * GIB, 4 * GIB, f"anon 5\ninactive_file {GIB}\nactive_file 7\n", GIB),
        (GIB, 2 * GIB, "", 0),
        ("max", GIB, "", 32 * GIB),
    ],
)
def test_what_is_left_in_a_group(tmp_path, limit, used, stat, left):
    files = {"max": limit, "current": used, "stat": stat}
    files = {f"{SECOND}/a/memory.{name}": text for name, text in files.items()}
    assert memory.available(system(tmp_path, "0::/a\n", files)) == left


def test_without_groups_it_is_what_the_system_has(tmp_path):
    assert memory.available(system(tmp_path)) == 32 * GIB


def short(monkeypatch, room=1000):
    """A machine that has hardly any memory."""
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    monkeypatch.setattr(memory, "available", lambda: room)


class TestChecks:
    """Before anything is taken; the same object serves the next valid call."""

    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            ("mask", r"mask\(\) of TokenGraph\(window\(64, 4\).*: it would need .* left; take some rows"),
            ("edge_index", r"the list of the 250 edges of TokenGraph\(window.* left; take some rows"),
            ("in_degree", r"the in-degrees of TokenGraph\(window\(64, 4\)"),
        ],
    )
    def test_what_is_made_of_a_graph(self, monkeypatch, made, reason):
        graph = patterns.window(64, 4)
        with monkeypatch.context() as patched:
            short(patched, room=2000 if made == "edge_index" else 1000)
            with pytest.raises(ValueError, match=reason):
                graph.edge_index if made == "edge_index" else getattr(graph, made)()
        assert graph.mask().sum() == graph.edge_index.shape[1] == graph.in_degree().sum() == 250

    def test_a_product_of_two_graphs(self, monkeypatch):
        hub = torch.stack([torch.zeros(5000, dtype=torch.int64), torch.arange(5000)])
        star = ga.TokenGraph.from_edges(hub, 5000)
        monkeypatch.setattr(memory, "available", lambda: 2**28)
        with pytest.raises(
            ValueError, match=r"the product of two graphs, of up to 25,000,000 pairs .* take some rows"
        ):
            star.T.T @ star.T  # all pairs, by way of the hub
        assert (star @ star).num_edges == 5000

    @pytest.mark.parametrize("backend", ["dense", "rows"])
    def test_backends_refuse_by_name_and_auto_goes_on(self, monkeypatch, backend):
        q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
        wanted = ga.attend(q, q, q, graph, backend="reference")
        with monkeypatch.context() as patched:
            short(patched)
            with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot hold .* GiB are left"):
                ga.attend(q, q, q, graph, backend=backend)
        assert_exact(ga.attend(q, q, q, graph, backend=backend), wanted)

    def test_a_compiled_call_may_check(self, monkeypatch):
        """What is left is a constant to the compiler: no file is read inside its program."""
        monkeypatch.setattr(memory, "WORTH_ASKING", 0)
        q, graph = torch.randn(1, 2, 200, 8, dtype=torch.float64), patterns.window(200, 4)
        attend = torch.compile(
            lambda q: ga.attend(q, q, q, graph, backend="dense"), fullgraph=True, backend="eager"
        )
        assert_exact(attend(q), ga.attend(q, q, q, graph, backend="reference"))
