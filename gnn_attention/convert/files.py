"""Graphs in files of this and other programs. An edge from u to v is a message from u to v.

The guide "Bring your graph" has a table of the formats, which the ending of a file names. Nodes whose
labels are all integers stand in numeric order, so that 0 .. n-1 are the positions of the tokens. Others stand
in the order of the file, those that it declares before what only edges name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from gnn_attention._support import atomic_files, checks
from gnn_attention._support.locks import ignore_warnings
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention._support.text import one_line
from gnn_attention.convert._file_readers import PLACE, READERS, add_tokens, are_integers, parse_number
from gnn_attention.convert.formats import from_triples, to_networkx
from gnn_attention.graph import TokenGraph

__all__ = ["READERS", "WRITERS", "GraphFile", "load", "write"]


@dataclass(frozen=True, eq=False)
class GraphFile:
    """What :func:`load` reads; ``str()`` says it in one line.

    ``graph`` is named like the file; ``labels`` are those of its tokens, in order of position; ``weights
    [graph.num_edges]``, in ``graph.edge_index`` order, may be None. ``num_edges`` counts the edges of the
    file, each of which is two messages if ``undirected``, and ``num_parallel`` those that repeat another one
    and are left out.
    """

    graph: TokenGraph
    labels: list[str] = field(repr=False)
    weights: Float[Tensor, " edges"] | None
    undirected: bool
    num_edges: int
    num_parallel: int

    def __str__(self) -> str:
        edges = _count(self.num_edges, "undirected edge" if self.undirected else "directed edge")
        text = f"{self.graph.name}: {_count(len(self.labels), 'node')}, {edges}"
        text += f" = {self.graph.num_edges:,} directed" if self.undirected else ""
        text += f", without {_count(self.num_parallel, 'parallel edge')}" if self.num_parallel else ""
        return text if self.weights is None else f"{text}, with weights"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def load(
    path: str | os.PathLike[str],
    undirected: bool | None = None,
    weight: str | None = "weight",
    num_tokens: int | None = None,
) -> GraphFile:
    """The graph of a file, with the labels of its tokens and the weights of its edges.

    Args:
        path: the file; its ending says what it is.
        undirected: whether an edge is a message in both directions. Lists, CSV without Gephi's column Type,
            general matrices and JSON without "directed" do not say it and are directed by default.
        weight: the edge attribute, or the column, of the weights; None reads none. An edge without one has
            the default of the file, else weight 1, as in networkx.
        num_tokens: the number of tokens where labels are positions 0, 1, ... and tokens without edges are
            missing. The first line of an edge list by :func:`write` says it (``# tokens 64``).

    A label is the attribute "label" or "name" of a node where each node has one of its own, else its id.
    The columns of the ends may also be called from and to, src and dst, u and v, and the like; a CSV may have
    semicolons or tabs for commas. Duplicate edges count once, with the first weight. Edge lists, CSV and
    JSON keep the order of the file, the others have that of networkx; the second direction of an undirected
    edge follows the first.

    Raises ValueError, which names the file and where possible the line or the edge, for an unknown ending and
    a file that holds no such graph or contradicts ``undirected``; ImportError where scipy is missing; OSError
    for a file that cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "words.csv").write_text("source,target,weight\\nthe,cat,0.5\\ncat,sat,2\\n")
    ...     words = load(Path(folder, "words.csv"), undirected=True)
    >>> print(words)
    words.csv: 3 nodes, 2 undirected edges = 4 directed, with weights
    >>> words.labels, words.graph.edge_index.tolist(), words.weights.tolist()
    (['the', 'cat', 'sat'], [[0, 1, 1, 2], [1, 0, 2, 1]], [0.5, 0.5, 2.0, 2.0])
    """
    path = Path(path)
    parse = _choose_by_ending(path, READERS)
    if undirected is not None:
        checks.instance("undirected", undirected, bool)
    if weight is not None:
        checks.instance("weight", weight, str)
    if num_tokens is not None:
        num_tokens = checks.size("num_tokens", num_tokens)
    try:
        text = path.read_text(encoding="utf-8-sig")
        # the other packages warn of what comes in their next versions
        with ignore_warnings():
            network = parse(text, weight, nx.MultiGraph() if undirected else nx.MultiDiGraph())
        if undirected is not None and network.is_directed() == undirected:
            direction = "directed" if undirected else "undirected"
            raise ValueError(f"its edges are {direction}, not undirected={undirected}: leave undirected out")
        if num_tokens is not None:
            add_tokens(network, num_tokens)
        return _build(path.name, network, weight)
    except ImportError as error:
        raise ImportError("MatrixMarket files are read by scipy: pip install scipy") from error
    except OSError:
        raise
    # of the parsers of other packages, too
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} holds no graph of tokens: {kind}{one_line(str(error), 300)}") from error


def write(graph: TokenGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file whose ending says how; :func:`load` gives the same edges and tokens back.

    Raises TypeError for no graph, and ValueError for an unknown ending, a graph whose receivers and senders
    are not the same tokens 0 .. n-1, and one that differs by head or sample.

    >>> import tempfile
    >>> from gnn_attention import patterns
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(patterns.window(5, 2), Path(folder) / "window.graphml")
    ...     load(Path(folder) / "window.graphml").graph == patterns.window(5, 2)
    True
    """
    path = Path(path)
    generate = _choose_by_ending(path, WRITERS)
    checks.instance("graph", graph, TokenGraph)
    if (graph.num_dst, graph.dst_offset, graph.src_offset) != (graph.num_src, 0, 0):
        raise ValueError(f"a file holds graphs of the same receivers and senders, from 0 on, got {graph!r}")
    atomic_files.write(path, "".join(f"{line}\n" for line in generate(graph)))


def _build(name: str, network: nx.Graph, weight: str | None) -> GraphFile:
    edges_of_file = sorted(network.edges(data=True), key=lambda edge: edge[2].get(PLACE, 0))
    listed = [(src, dst, attributes.get(weight)) for src, dst, attributes in edges_of_file]
    is_weighted = weight is not None and any(value not in (None, "") for *_, value in listed)
    if listed and not is_weighted and weight not in (None, "weight"):
        raise ValueError(f"none of its edges has a {weight!r}: name another attribute, or weight=None")
    labels = _labels_of_tokens(network)
    position = {node: place for place, node in enumerate(labels)}
    # the first of parallel edges
    edges: dict[tuple[int, int], float] = {}
    for src, dst, value in listed:
        number = 1.0 if value in (None, "") else parse_number(value)
        if number is None:
            got = str(value)[:40]
            raise ValueError(f"the edge {src} -> {dst}: a weight is a finite number, got {got!r}")
        edges.setdefault((position[src], position[dst]), number)
    triples = [(src, dst, number) for (src, dst), number in edges.items()]
    is_directed = network.is_directed()
    read = from_triples(triples, is_directed, len(labels), weight if is_weighted else None, name)
    graph, weights = read if is_weighted else (read, None)
    names = list(labels.values())
    return GraphFile(graph, names, weights, not is_directed, len(edges), len(listed) - len(edges))


def _labels_of_tokens(network: nx.Graph) -> dict[Hashable, str]:
    """The label of each node, in the order of the tokens."""
    labels = {node: str(node) for node in network}
    for attribute in ("name", "label"):
        words = {node: str(word) for node, word in network.nodes.data(attribute, "")}
        if "" not in words.values() and len({*words.values()}) == len(words):
            labels = words
    if not labels or not are_integers(labels.values()):
        return labels
    number, times = Counter(map(int, labels.values())).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{times} of its nodes are the same number {number}: write it in one way")
    return dict(sorted(labels.items(), key=lambda item: int(item[1])))


def _generate_edge_list(graph: TokenGraph) -> Iterable[str]:
    return [f"# tokens {graph.num_dst}", *(f"{src} {dst}" for src, dst in graph.edge_index.t().tolist())]


WRITERS: Mapping[str, Callable[[TokenGraph], Iterable[str]]] = {
    **dict.fromkeys((".edges", ".edgelist"), _generate_edge_list),
    ".adjlist": lambda graph: nx.generate_adjlist(to_networkx(graph)),
    ".graphml": lambda graph: nx.generate_graphml(to_networkx(graph)),
}


def _choose_by_ending(path: Path, forms: Mapping[str, Any]) -> Any:
    if path.suffix.lower() not in forms:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(forms)}")
    return forms[path.suffix.lower()]
