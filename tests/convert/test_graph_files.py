"""Graph files make round trips, are read from other programs, and are refused if damaged."""

from __future__ import annotations

import json
import sys

import networkx as nx
import pytest
import torch
from support.extras import needs

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import files

ENDINGS = [".edges", ".edgelist", ".adjlist", ".GraphML"]
# The graph has the edge 0 -> 2 but not 2 -> 0, and token 5 has no edges.
LISTED = TokenGraph.from_edges(torch.tensor([[0, 3, 1, 2, 4], [2, 1, 1, 0, 4]]), 6)
GRAPHS = [LISTED, patterns.window(20, 3) | patterns.sinks(20, 2), patterns.causal(0)]


def save(folder, name, text):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


class TestRoundTrip:
    @pytest.mark.parametrize("ending", ENDINGS)
    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
    def test_the_same_edges_and_tokens(self, graph, ending, tmp_path):
        file = tmp_path / f"graph{ending}"
        files.write(graph, file)
        result = files.load(file).graph
        assert result == graph
        assert result.name == f"graph{ending}"


WORDS = ["the", "cat", "sat", "on"]
# One edge is a loop, no other has its reverse, and the edges name the nodes in the order of WORDS.
WEIGHTS = {("the", "cat"): 0.5, ("cat", "cat"): 3.0, ("sat", "the"): 1.5, ("on", "cat"): 2.0}


def write_by_igraph(kind):
    def write(graph, file):
        needs("igraph").Graph.from_networkx(graph, vertex_attr_hashable="name").write(str(file), kind)

    return write


def write_by_scipy(graph, file):
    symmetry = "general" if graph.is_directed() else "symmetric"
    needs("scipy.io").mmwrite(file, nx.to_scipy_sparse_array(graph, WORDS), symmetry=symmetry)


def write_json(graph, file):
    file.write_text(json.dumps(nx.node_link_data(graph, edges="links")), encoding="utf-8")


def write_table(pattern, header=""):
    """Return a writer of one line for each edge, by a pattern of u, v and w."""

    def write(graph, file):
        lines = [pattern.format(u=u, v=v, w=w) for u, v, w in graph.edges.data("weight")]
        file.write_text("\n".join([header, *lines]), encoding="utf-8")

    return write


def write_gephi(graph, file):
    kind = "Directed" if graph.is_directed() else "Undirected"
    write_table(f"{{u}},{{v}},{kind},{{w}}", "Source,Target,Type,Weight")(graph, file)


# Each row has a file, its writer, whether it states its direction, its labels, whether it has weights.
PROGRAMS = [
    ("networkx.edgelist", nx.write_edgelist, False, WORDS, True),
    ("networkx.adjlist", nx.write_adjlist, False, WORDS, False),
    ("networkx.graphml", nx.write_graphml, True, WORDS, True),
    ("networkx.gexf", nx.write_gexf, True, WORDS, True),
    ("networkx.gml", nx.write_gml, True, WORDS, True),
    ("networkx.json", write_json, True, WORDS, True),
    ("scipy.mtx", write_by_scipy, True, ["0", "1", "2", "3"], True),
    ("igraph.graphml", write_by_igraph("graphml"), True, WORDS, True),
    ("columns.csv", write_table("{w}, {v}, x, {u}", "Weight, To, Type, FROM"), False, WORDS, True),
    ("header.tsv", write_table("{v}\t{u}\t{w}", "dst\tsrc\tweight"), False, WORDS, True),
    ("plain.csv", write_table('"{u}","{v}",{w}'), False, WORDS, True),
    ("semicolons.csv", write_table("{u}; {v};{w}", "source;target;weight"), False, WORDS, True),
    ("gephi.csv", write_gephi, True, WORDS, True),
]


class TestPrograms:
    """In the files of all programs, an edge from u to v is a message from u to v."""

    @pytest.mark.parametrize("directed", [True, False])
    @pytest.mark.parametrize(
        ("name", "write", "typed", "labels", "weighted"), PROGRAMS, ids=lambda x: str(x)[:20]
    )
    def test_the_graph_that_was_written(self, name, write, typed, labels, weighted, directed, tmp_path):
        network = nx.DiGraph() if directed else nx.Graph()
        network.add_nodes_from(WORDS)
        network.add_weighted_edges_from((*edge, weight) for edge, weight in WEIGHTS.items())
        write(network, tmp_path / name)
        undirected = None if typed or directed else True
        content = files.load(tmp_path / name, undirected)
        assert content.labels == labels
        edges = [(WORDS[src], WORDS[dst]) for src, dst in content.graph.edge_index.T.tolist()]
        expected = WEIGHTS if directed else WEIGHTS | {(v, u): weight for (u, v), weight in WEIGHTS.items()}
        assert (sorted(edges), content.graph.num_dst) == (sorted(expected), 4)
        if weighted:
            assert content.weights.tolist() == [expected[edge] for edge in edges]
        else:
            assert content.weights is None
        assert content.undirected is not directed
        count = "4 directed edges" if directed else "4 undirected edges = 7 directed"
        assert str(content) == f"{name}: 4 nodes, {count}" + (", with weights" if weighted else "")
        assert files.load(tmp_path / name, undirected, weight=None).graph == content.graph

    @pytest.mark.parametrize("direction", ["directed", "undirected"])
    def test_a_contradiction(self, direction, tmp_path):
        file = tmp_path / "a.gml"
        nx.write_gml(nx.DiGraph([(0, 1)]) if direction == "directed" else nx.Graph([(0, 1)]), file)
        with pytest.raises(ValueError, match=f"its edges are {direction}, got undirected=.*: leave"):
            files.load(file, undirected=direction == "directed")

    def test_json_without_directed_is_a_list(self, tmp_path):
        """JSON without "directed" has directed links, in D3 between indices of nodes with names."""
        data = {"nodes": [{"name": "b"}, {"name": "a"}], "links": [{"source": 1, "target": 0, "value": 4}]}
        file = save(tmp_path, "a.json", json.dumps(data))
        content = files.load(file, weight="value")
        assert (content.labels, content.graph.edge_index.T.tolist()) == (["b", "a"], [[1, 0]])
        assert content.weights.tolist() == [4]
        assert str(content) == "a.json: 2 nodes, 1 directed edge, with weights"
        assert files.load(file, undirected=True).graph.num_edges == 2


def graphml(inside, keys="", direction="edgedefault='directed'"):
    graph = f"{keys}<graph {direction}>{inside}</graph>"
    return f"<graphml xmlns='http://graphml.graphdrawing.org/xmlns'>{graph}</graphml>"


KEY = "<key id='w' for='edge' attr.name='weight' attr.type='int'><default>7</default></key>"
EDGES = """<node id='a'/><node id='b'><data key='w'>3</data></node>
<edge source='a' target='b'/><edge source='b' target='a'><data key='w'>3</data></edge>"""
GEXF = """<gexf xmlns="http://www.gexf.net/1.2draft" version="1.2"><graph defaultedgetype="directed">
<attributes class="edge"><attribute id="0" title="weight" type="double"><default>7</default></attribute>
</attributes><nodes><node id="a"/><node id="b"/></nodes><edges><edge id="0" source="a" target="b"/>
<edge id="1" source="b" target="{}"><attvalues><attvalue for="0" value="3"/></attvalues></edge></edges>
</graph></gexf>"""
HEADERS = "src,dst FromNodeId,ToNodeId head,tail src,target"
# The labels, edges and weights follow from the definition of the format.
DEFINED = [
    ("a.graphml", graphml(EDGES, KEY), "ab", "ab ba", [7, 3]),
    ("a.gexf", GEXF.format("a"), "ab", "ab ba", [7, 3]),
    *[("a.csv", f"{header}\nb,a\na,c\n", "bac", "ba ac", None) for header in HEADERS.split()],
    ("a.tsv", "head\trelation\ttail\na\tlikes\tb\n", "ab", "ab", None),
    ("a.csv", "Source,Target,Type\na,b,friend\nb,c,directed by\n", "abc", "ab bc", None),
    ("a.csv", '"a,,,";b;2\n', ["a,,,", "b"], [("a,,,", "b")], [2]),
]


@pytest.mark.parametrize(("name", "text", "labels", "pairs", "weights"), DEFINED)
def test_what_a_format_defines(name, text, labels, pairs, weights, tmp_path):
    content = files.load(save(tmp_path, name, text))
    edges = [(content.labels[src], content.labels[dst]) for src, dst in content.graph.edge_index.T.tolist()]
    read = {} if content.weights is None else dict(zip(edges, content.weights.tolist(), strict=True))
    expected = [tuple(pair) for pair in (pairs.split() if isinstance(pairs, str) else pairs)]
    assert (content.labels, sorted(edges)) == ([*labels], sorted(expected))
    assert read == dict(zip(expected, weights or [], strict=weights is not None))


LABELS = [
    ("0 2\n1 0\n", ["0", "1", "2"], [(0, 2), (1, 0)]),
    ("3 1\n2 3\n", ["1", "2", "3"], [(2, 0), (1, 2)]),
    ("sat 1\n0 sat\n", ["sat", "1", "0"], [(0, 1), (2, 0)]),
]


class TestLabels:
    @pytest.mark.parametrize(("text", "labels", "pairs"), LABELS)
    def test_integers_in_numeric_order_others_as_they_come(self, text, labels, pairs, tmp_path):
        content = files.load(save(tmp_path, "a.edges", text))
        assert content.labels == labels
        assert [tuple(pair) for pair in content.graph.edge_index.T.tolist()] == pairs

    def test_labels_of_networkx_are_positions(self, tmp_path):
        """Labels of networkx that are integers are positions, although GML also numbers nodes as inserted."""
        network = nx.relabel_nodes(nx.DiGraph([(2, 0), (0, 1)]), str)
        for name, write in (("a.gml", nx.write_gml), ("a.gexf", nx.write_gexf)):
            write(network, tmp_path / name)
            assert sorted(files.load(tmp_path / name).graph.edge_index.T.tolist()) == [[0, 1], [2, 0]]

    def test_ids_where_labels_repeat(self, tmp_path):
        nodes = [{"id": 1, "label": "a"}, {"id": 0, "label": "a"}, {"id": 2, "label": "b"}]
        data = {"directed": True, "nodes": nodes, "edges": [{"source": 1, "target": 0}]}
        content = files.load(save(tmp_path, "a.json", json.dumps(data)))
        assert (content.labels, content.graph.edge_index.T.tolist()) == (["0", "1", "2"], [[1, 0]])


class TestWeights:
    @pytest.mark.parametrize(
        ("name", "text", "weights"),
        [
            ("a.edges", "0 1 0.5\n1 2\n", [0.5, 1]),
            ("a.edges", "0 1 {'weight': 2, 'a': 'b c'}\n1 2 {}\n", [2, 1]),
            ("a.edges", "0 1 1e3 1999-12-31\n% KONECT\n1 2 -2\n", [1000, -2]),
            ("a.csv", "source,target,weight\n0,1,\n1,2,7\n", [1, 7]),
            ("a.mtx", "%%MatrixMarket matrix array integer general\n2 2\n0\n5\n6\n0\n", [6, 5]),
        ],
    )
    def test_in_the_order_of_the_edges(self, name, text, weights, tmp_path):
        read = files.load(save(tmp_path, name, text)).weights
        assert (None if read is None else read.tolist()) == weights
        assert files.load(tmp_path / name, weight=None).weights is None

    def test_another_attribute(self, tmp_path):
        file = save(tmp_path, "a.csv", "source,target,weight,Cost\n0,1,4,8\n")
        assert files.load(file, weight="cost").weights.tolist() == [8]
        with pytest.raises(ValueError, match="none of its edges has a 'price': pass another attribute, or"):
            files.load(file, weight="price")

    def test_parallel_edges_are_counted(self, tmp_path):
        """Parallel edges are counted even in GML without the word multigraph, which only networkx writes."""
        edge = "edge [ source {} target {} weight {} ]\n"
        edges = "".join(edge.format(*ends) for ends in [(7, 3, 1), (3, 7, 2), (3, 3, 4), (7, 3, 8)])
        text = f'Creator "graph ["\ngraph [\nnode [ id 7 label "b" ]\nnode [ id 3 label "a" ]\n{edges}]\n'
        content = files.load(save(tmp_path, "a.gml", text))
        assert content.graph.edge_index.T.tolist() == [[0, 1], [1, 0], [1, 1]]
        assert (content.labels, content.weights.tolist()) == (["b", "a"], [1, 1, 4])
        facts = "without 2 parallel edges, with weights"
        assert str(content) == f"a.gml: 2 nodes, 2 undirected edges = 3 directed, {facts}"


READ_BY_NETWORKX = {
    ".edgelist": lambda file: nx.read_edgelist(file, nodetype=int, create_using=nx.DiGraph),
    ".adjlist": lambda file: nx.read_adjlist(file, nodetype=int, create_using=nx.DiGraph),
    ".graphml": lambda file: nx.read_graphml(file, node_type=int),
}


@pytest.mark.parametrize("ending", READ_BY_NETWORKX)
def test_networkx_reads_what_we_wrote(ending, tmp_path):
    files.write(LISTED, tmp_path / f"a{ending}")
    network = READ_BY_NETWORKX[ending](tmp_path / f"a{ending}")
    assert sorted(network.edges) == sorted(map(tuple, LISTED.edge_index.T.tolist()))


class TestReading:
    @pytest.mark.parametrize(
        ("name", "text", "n", "pairs"),
        [
            ("a.edges", "0 1\n\n1 2  # a\n# b\n 2\t0 3.5 {'a': 1}\n", 3, [(0, 1), (1, 2), (2, 0)]),
            ("a.edges", "# tokens 5\n0 1\n", 5, [(0, 1)]),
            ("a.edges", "0 1\r\n1 0\r\n0 1\r\n", 2, [(0, 1), (1, 0)]),
            ("a.edges", "", 0, []),
            ("a.adjlist", "#from somewhere\n0 1 2\n1\n2 2 2\n", 3, [(0, 1), (0, 2), (2, 2)]),
        ],
    )
    def test_lists(self, name, text, n, pairs, tmp_path):
        graph = files.load(save(tmp_path, name, text)).graph
        assert (graph.num_dst, graph.num_src) == (n, n)
        assert graph.edge_index.T.tolist() == [list(pair) for pair in pairs]


BOMB = f"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a0 "lol">{"".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(12))}]>
{graphml("<node id='0'/><desc>&a12;</desc>")}"""
MATRIX = "%%MatrixMarket matrix "
OTHERS = ["0, 1, 2.5", "p edge 3 2\ne 1 2", MATRIX, "*Vertices 3", "0 1 1_000"]
WRONG = [
    ("a.txt", "0 1\n", "expected a file that ends in .edges, .edgelist, .adjlist, .graphml"),
    ("a.edges", "0 1\n2\n", "line 2: expected 'src dst' or 'src dst weight', got '2'"),
    ("a.edges", "01 2\n1 2\n", "2 nodes have labels equal to 1: spell the label in one way"),
    *(("a.edges", f"% a\n{line}\n", "line 2: expected 'src dst' or") for line in OTHERS),
    ("a.adjlist", "\na: b c\n", "line 2: expected 'src dst dst ...', got 'a: b c"),
    ("a.csv", "0,1,friend\n1,2,foe\n", "line 1: .* its header names two of them source and target"),
    ("a.csv", "source,target,weight\na,b,3 km\n", "the weight of a -> b must be a number, got '3 km'"),
    ("a.csv", "Source,Target,Type\na,b,Directed\nb,c,UNDIRECTED\n", "Type holds Directed and Undirected, "),
    (
        "a.csv",
        "0,1,0,0\n0,0,1,0\n0,0,0,1\n1,0,0,0\n",
        "line 1: expected 'src dst' or 'src dst weight', got '0 1 0 0'",
    ),
    ("a.csv", "person,friend\n0,1\n", "line 1: expected the columns source and target, got person, friend"),
    ("a.edges", "0 1 {'weight': f()}\n", "malformed node or string"),
    ("a.edges", "# tokens 2\n0 2\n", r"its tokens are 0 \.\. 1, but it names a token 2"),
    ("a.edges", "# tokens 99999999999\n0 1\n", "it has 99,999,999,999 tokens, but at most 16,777,216 can"),
    ("a.graphml", BOMB, "ParseError: limit on input amplification factor"),
    ("a.graphml", graphml("<node id='0'/><graph/>"), "it holds several graphs: save each to its own file"),
    ("a.gml", "graph [\nnode [ id 0 ]\nedge [ source 0 ]\n]", "edge #0 has no 'target' attribute"),
    ("a.json", "[" * 100_000, "RecursionError"),
    (
        "a.json",
        '{"nodes": [{"id": "a"}, {"id": 7}], "links": [{"source": 0, "target": 1}]}',
        "names an id that no node has",
    ),
    ("a.mtx", f"{MATRIX}coordinate real general\n3 4 0\n", "expected a square matrix, got 3 x 4"),
]


class TestRefusals:
    @pytest.mark.parametrize(("name", "text", "match"), WRONG, ids=range(len(WRONG)))
    def test_one_value_error_that_names_the_file(self, name, text, match, tmp_path, capsys):
        needs("scipy.io" if name == "a.mtx" else "networkx")
        file = save(tmp_path, name, text)
        with pytest.raises(ValueError, match=match) as refusal:
            files.load(file)
        assert str(refusal.value).startswith(str(file))
        assert str(refusal.value).isprintable()
        assert capsys.readouterr().out == ""

    def test_without_scipy(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.io", None)
        with pytest.raises(ImportError, match="pip install scipy"):
            files.load(save(tmp_path, "a.mtx", ""))

    def test_numbers_must_fit(self, tmp_path):
        files.write(LISTED, tmp_path / "a.edges")
        assert files.load(tmp_path / "a.edges", num_tokens=7).graph.num_dst == 7
        files.write(LISTED, tmp_path / "a.graphml")
        with pytest.raises(ValueError, match=r"its tokens are 0 \.\. 3, but it names a token 4"):
            files.load(tmp_path / "a.graphml", num_tokens=4)
        words = save(tmp_path, "words.edges", "the cat\ncat sat\n")
        with pytest.raises(ValueError, match=r"its tokens are 0 \.\. 3, but it names a token the"):
            files.load(words, num_tokens=4)

    @pytest.mark.parametrize(
        ("graph", "match"),
        [
            (patterns.cross(3, 4), "receivers and senders must be the same tokens from 0 on"),
            (patterns.causal(6).rows(2, 4), "must be the same tokens from 0 on"),
            (patterns.duo_attention(16, 2, [1], 4), "a graph that varies by head has no single edge list"),
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
