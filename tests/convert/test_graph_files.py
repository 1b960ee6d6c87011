"""Graphs in files: round trips, networkx as the other reader and writer, and what is refused."""

from __future__ import annotations

import os
import time
import tracemalloc
from typing import ClassVar

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import files

ENDINGS = [".edges", ".edgelist", ".adjlist", ".graphml"]
# 0 -> 2 but not 2 -> 0; no token attends to token 5, and it has no in-edges.
LISTED = TokenGraph.from_edges(torch.tensor([[0, 3, 1, 2, 4], [2, 1, 1, 0, 4]]), 6)
GRAPHS = [
    LISTED,
    patterns.window(20, 3) | patterns.sinks(20, 2),
    patterns.causal(0),
]


def saved(folder, name, text):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


class TestRoundTrip:
    @pytest.mark.parametrize("ending", [*ENDINGS, ".GraphML"])
    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
    def test_the_same_edges_and_tokens(self, graph, ending, tmp_path):
        file = tmp_path / f"graph{ending}"
        files.write(graph, file)
        found = files.read(file)
        assert found == graph
        assert found.name == f"graph{ending}"

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 6).flatmap(
            lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))
        )
    )
    def test_any_graph(self, tmp_path_factory, drawn):
        n, pairs = drawn
        graph = TokenGraph.from_edges(torch.tensor(sorted(pairs), dtype=torch.int64).reshape(-1, 2).T, n)
        for ending in ENDINGS:
            file = tmp_path_factory.mktemp("any") / f"graph{ending}"
            files.write(graph, file)
            assert files.read(file) == graph


class TestNetworkx:
    """Its writers and readers mean the same files: an edge u -> v is a message from u to v."""

    WRITERS: ClassVar = {
        ".edgelist": nx.write_edgelist,
        ".adjlist": nx.write_adjlist,
        ".graphml": nx.write_graphml,
    }
    READERS: ClassVar = {
        ".edgelist": lambda file: nx.read_edgelist(file, nodetype=int, create_using=nx.DiGraph),
        ".adjlist": lambda file: nx.read_adjlist(file, nodetype=int, create_using=nx.DiGraph),
        ".graphml": lambda file: nx.read_graphml(file, node_type=int),
    }

    @pytest.mark.parametrize("ending", WRITERS)
    def test_reads_what_networkx_wrote(self, ending, tmp_path):
        theirs = nx.DiGraph([(2, 0, {"weight": 0.5}), (0, 1), (1, 1), (3, 1)])
        self.WRITERS[ending](theirs, tmp_path / f"a{ending}")
        found = files.read(tmp_path / f"a{ending}")
        assert found.num_src == 4
        assert sorted(map(tuple, found.edge_index.T.tolist())) == sorted(theirs.edges)
        assert bool(found.mask()[0, 2])
        assert not bool(found.mask()[2, 0])

    @pytest.mark.parametrize("ending", WRITERS)
    def test_networkx_reads_what_we_wrote(self, ending, tmp_path):
        files.write(LISTED, tmp_path / f"a{ending}")
        theirs = self.READERS[ending](tmp_path / f"a{ending}")
        assert sorted(theirs.edges) == sorted(map(tuple, LISTED.edge_index.T.tolist()))

    def test_an_undirected_edge_is_two(self, tmp_path):
        nx.write_graphml(nx.Graph([(0, 1), (1, 2), (2, 2)]), tmp_path / "a.graphml")
        pairs = files.read(tmp_path / "a.graphml").edge_index.T.tolist()
        assert sorted(map(tuple, pairs)) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]


class TestReading:
    @pytest.mark.parametrize(
        ("name", "text", "n", "pairs"),
        [
            ("a.edges", "0 1\n\n1 2  # a\n# b\n 2\t0 3.5 {'a': 1}\n", 3, [(0, 1), (1, 2), (2, 0)]),
            ("a.edges", "# tokens 5\n0 1\n", 5, [(0, 1)]),
            ("a.edges", "0 1\r\n1 0\r\n0 1\r\n", 2, [(0, 1), (1, 0)]),
            ("a.edges", "# tokens 3\r0 1\r1 0\r", 3, [(0, 1), (1, 0)]),
            ("a.adjlist", "0 1\r1 0\r", 2, [(0, 1), (1, 0)]),
            ("a.edges", "\ufeff0 1\n", 2, [(0, 1)]),
            ("a.edges", "", 0, []),
            ("a.adjlist", "#from somewhere\n0 1 2\n1\n2 2 2\n", 3, [(0, 1), (0, 2), (2, 2)]),
        ],
    )
    def test_lists(self, name, text, n, pairs, tmp_path):
        graph = files.read(saved(tmp_path, name, text))
        assert (graph.num_dst, graph.num_src) == (n, n)
        assert graph.edge_index.T.tolist() == [list(pair) for pair in pairs]

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_the_number_of_tokens_as_an_argument(self, ending, tmp_path):
        theirs = nx.DiGraph([(0, 1), (2, 1)])
        {**TestNetworkx.WRITERS, ".edges": nx.write_edgelist}[ending](theirs, tmp_path / f"a{ending}")
        assert files.read(tmp_path / f"a{ending}", num_tokens=7).num_dst == 7


def graphml(inside):
    graph = f"<graph edgedefault='directed'>{inside}</graph>"
    return f"<graphml xmlns='http://graphml.graphdrawing.org/xmlns'>{graph}</graphml>"


BOMB = f"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a0 "lol">{"".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(12))}]>
{graphml("<node id='0'/><desc>&a12;</desc>")}"""
OUTSIDE = "<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]>" + graphml("<node id='0'/><desc>&b;</desc>")

WRONG = [
    ("a.txt", "0 1\n", "expected a file that ends in .edges, .edgelist, .adjlist, .graphml"),
    ("a.edges", "0 1\n2\n", "line 2: expected 'src dst', got '2' alone"),
    ("a.edges", "0 1\n\n0 -1\n", "line 3: a token is one of 0, 1, 2, ..., got '-1'"),
    ("a.edges", "a b\n", "line 1: a token is one of 0, 1, 2, ..., got 'a'"),
    ("a.edges", "0 1_0\n", "got '1_0'"),
    ("a.edges", "0 ١\n", "a token is one of"),
    ("a.edges", f"0 {'9' * 5000}\n", "line 1: a token is one of"),
    ("a.edges", "0 999999999999\n", r"its 2 labels are not 0 \.\. 1 \(there is no 1\): give num_tokens"),
    ("a.edges", "# tokens 2\n0 2\n", r"its tokens are 0 \.\. 1, but it names a token 2"),
    ("a.edges", "# tokens 99999999999\n0 1\n", "it has 99,999,999,999 tokens, at most 16,777,216 are read"),
    ("a.adjlist", "0 1\nx\n", "line 2: a token is one of 0, 1, 2, ..., got 'x'"),
    ("a.graphml", BOMB, "it has a DOCTYPE, which may define entities without limit"),
    ("a.graphml", OUTSIDE, "it has a DOCTYPE"),
    ("a.graphml", BOMB.replace("DOCTYPE", "doctype"), "it has a DOCTYPE"),
    ("a.graphml", graphml("<node id='a'/>"), "a node is one of 0, 1, 2, ..., got 'a'"),
    ("a.graphml", graphml("<node/>"), "a.graphml holds no graph of tokens"),
    ("a.graphml", graphml("<node id='0'/><node id='01'/><node id='1'/>"), "its nodes '01' and '1' are the"),
    ("a.graphml", graphml("<hyperedge/>"), "doesn't support hyperedges"),
    ("a.graphml", graphml("<node id='0'><data key='x'>1</data></node>"), "a.graphml holds no graph of"),
    ("a.graphml", graphml("<node id='0'/><graph/>"), "it holds several graphs: give each a file of its own"),
    ("a.graphml", "<graphml>", "ParseError: no element found"),
    ("a.graphml", "\0", "a.graphml holds no graph of tokens"),
]


class TestRefusals:
    @pytest.mark.parametrize(("name", "text", "match"), WRONG, ids=range(len(WRONG)))
    def test_one_value_error_that_names_the_file(self, name, text, match, tmp_path):
        file = saved(tmp_path, name, text)
        start = time.perf_counter()
        with pytest.raises(ValueError, match=match) as refused:
            files.read(file)
        assert type(refused.value) is ValueError
        assert str(refused.value).startswith(str(file))
        assert "\n" not in str(refused.value)
        assert time.perf_counter() - start < 2

    @pytest.mark.parametrize(
        "content",
        [BOMB.encode("utf-16"), BOMB.encode("utf-16-be"), b"\xff\xfe\xfd", OUTSIDE.encode("utf-32")],
    )
    def test_a_doctype_cannot_hide_in_another_encoding(self, content, tmp_path):
        (tmp_path / "a.graphml").write_bytes(content)
        with pytest.raises(ValueError, match=r"a.graphml holds no graph of tokens"):
            files.read(tmp_path / "a.graphml")

    def test_labels_cost_nothing(self, tmp_path):
        """No memory is taken for what a label or a header says."""
        far = saved(tmp_path, "a.edges", "# tokens 999999999999999999\n0 999999999999999998\n")
        tracemalloc.start()
        with pytest.raises(ValueError, match="at most 16,777,216 are read"):
            files.read(far)
        assert tracemalloc.get_traced_memory()[1] < 4 * files.MOST_BYTES
        tracemalloc.stop()

    def test_size_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "MOST_BYTES", 100)
        files.write(patterns.window(9, 2), tmp_path / "small.edges")
        assert files.read(tmp_path / "small.edges") == patterns.window(9, 2)
        with pytest.raises(ValueError, match=r"has 45 edges, which do not fit into the 100 bytes that are"):
            files.write(patterns.causal(9), tmp_path / "large.edges")
        with pytest.raises(ValueError, match="do not fit"):
            files.write(patterns.window(20, 1), tmp_path / "large.graphml")
        assert [file.name for file in tmp_path.iterdir()] == ["small.edges"]
        with pytest.raises(ValueError, match=r"large.edges has more than 100 bytes"):
            files.read(saved(tmp_path, "large.edges", "0 1\n" * 26))

    def test_only_files(self, tmp_path):
        (tmp_path / "a.edges").mkdir()
        with pytest.raises(ValueError, match=r"a.edges is no file"):
            files.read(tmp_path / "a.edges")
        os.mkfifo(tmp_path / "b.edges")
        with pytest.raises(ValueError, match=r"b.edges is no file"):
            files.read(tmp_path / "b.edges")
        with pytest.raises(FileNotFoundError):
            files.read(tmp_path / "c.edges")

    def test_numbers_must_fit(self, tmp_path):
        files.write(LISTED, tmp_path / "a.edges")
        with pytest.raises(ValueError, match="it has 6 tokens, not num_tokens=7: leave"):
            files.read(tmp_path / "a.edges", num_tokens=7)
        files.write(LISTED, tmp_path / "a.graphml")
        with pytest.raises(ValueError, match=r"its tokens are 0 \.\. 3, but it names a token"):
            files.read(tmp_path / "a.graphml", num_tokens=4)
        with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
            files.read(tmp_path / "a.graphml", num_tokens=-1)

    @pytest.mark.parametrize(
        ("graph", "match"),
        [
            (patterns.cross(3, 4), "graphs of the same receivers and senders, from 0 on"),
            (patterns.causal(6).rows(2, 4), "the same receivers and senders, from 0 on"),
            (patterns.duo_attention(16, 2, [1], 4), "a graph that differs by head has no single edge list"),
        ],
    )
    def test_what_no_file_holds(self, graph, match, tmp_path):
        with pytest.raises(ValueError, match=match):
            files.write(graph, tmp_path / "a.edges")
        with pytest.raises(ValueError, match="expected a file that ends in"):
            files.write(patterns.causal(3), tmp_path / "a.csv")
        with pytest.raises(TypeError, match="of type DiGraph"):
            files.write(nx.DiGraph(), tmp_path / "a.edges")
        assert list(tmp_path.iterdir()) == []

    @settings(max_examples=200, deadline=None)
    @given(
        st.sampled_from(ENDINGS),
        st.text("012 \n#<>/'=graphmlnodeid\t", max_size=60) | st.text(max_size=30) | st.binary(max_size=30),
    )
    def test_any_content_is_a_graph_or_a_value_error(self, tmp_path_factory, ending, content):
        file = tmp_path_factory.getbasetemp() / f"any{ending}"
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        try:
            graph = files.read(file)
        except ValueError as refused:
            assert type(refused) is ValueError  # noqa: PT017
            return
        assert isinstance(graph, TokenGraph)
