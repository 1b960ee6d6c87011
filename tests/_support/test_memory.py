"""How much memory there is, in made-up systems; and what checks it before much is taken."""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import memory

GIB = 2**30


def system(root, **files):
    """A made-up root; ``__`` in a name is a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {32 * 2**20} kB\n")
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
    return str(root)


def limits(folder, most, used, stat="", version=2):
    """The files of one group."""
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    found = {f"{folder}__memory_dot_{name}": value for name, value in zip(names, (most, used), strict=True)}
    return found | ({f"{folder}__memory_dot_stat": stat} if stat else {})


class TestAvailable:
    def test_without_groups_it_is_what_the_system_has(self, tmp_path):
        assert memory.available(system(tmp_path)) == 32 * GIB

    @pytest.mark.parametrize("tight", range(4))
    def test_the_least_of_all_ancestors_counts(self, tmp_path, tight):
        """The limit may stand at the group itself, at any one above it, or at the root: each is found."""
        folders = ["sys__fs__cgroup" + "".join(f"__{part}" for part in "abc"[:depth]) for depth in range(4)]
        files = {}
        for depth, folder in enumerate(folders):
            files |= limits(folder, 3 * GIB if depth == tight else "max", GIB)
        assert memory.available(system(tmp_path, proc__self__cgroup="0::/a/b/c\n", **files)) == 2 * GIB

    @pytest.mark.parametrize("tight", ["", "__a", "__a__b"])
    def test_the_first_version_too(self, tmp_path, tight):
        files = {}
        for folder in ("", "__a", "__a__b"):
            most = 5 * GIB if folder == tight else 2**63 - 4096
            files |= limits(f"sys__fs__cgroup__memory{folder}", most, GIB, version=1)
        groups = "5:cpu:/\n4:memory:/a/b\n1:name=systemd:/\n0::/\n"
        assert memory.available(system(tmp_path, proc__self__cgroup=groups, **files)) == 4 * GIB

    def test_cached_files_can_be_given_back(self, tmp_path):
        files = limits(
            "sys__fs__cgroup__a", 4 * GIB, 4 * GIB, f"anon 5\ninactive_file {GIB}\nactive_file 7\n"
        )
        assert memory.available(system(tmp_path, proc__self__cgroup="0::/a\n", **files)) == GIB

    def test_a_group_over_its_limit_leaves_nothing(self, tmp_path):
        files = limits("sys__fs__cgroup__a", GIB, 2 * GIB)
        assert memory.available(system(tmp_path, proc__self__cgroup="0::/a\n", **files)) == 0


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
