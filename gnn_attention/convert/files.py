"""Read and write graph files. An edge from u to v is a message from u to v.

The extension of a file names its format; the guide "Bring your graph" lists all formats. If all
labels are integers, nodes are sorted by label, so that labels 0 .. n-1 are the positions of the
tokens. Otherwise they keep the order of the file, but nodes that appear only in edges come last.
"""

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
from gnn_attention.convert._file_readers import ORDER_KEY, READERS, add_tokens, are_integers, parse_number
from gnn_attention.convert.formats import graph_from_triples, to_networkx
from gnn_attention.graph import TokenGraph

__all__ = ["READERS", "WRITERS", "GraphFile", "load", "write"]


@dataclass(frozen=True, eq=False)
class GraphFile:
    """The result of :func:`load`; ``str()`` summarises it in one line.

    ``graph.name`` is the name of the file, and ``labels[i]`` is the label of token i. ``weights``
    has a number for each edge in ``graph.edge_index`` order, or is None if no edge has a weight.
    ``num_edges`` counts distinct edges. If ``undirected``, each of them is two messages, except for
    self loops. ``num_parallel`` counts edges that were dropped because they repeat another edge.
    """

    graph: TokenGraph
    labels: list[str] = field(repr=False)
    weights: Float[Tensor, " edges"] | None
    undirected: bool
    num_edges: int
    num_parallel: int

    def __str__(self) -> str:
        edges = _format_count(self.num_edges, "undirected edge" if self.undirected else "directed edge")
        text = f"{self.graph.name}: {_format_count(len(self.labels), 'node')}, {edges}"
        text += f" = {self.graph.num_edges:,} directed" if self.undirected else ""
        if self.num_parallel:
            text += f", without {_format_count(self.num_parallel, 'parallel edge')}"
        return text if self.weights is None else f"{text}, with weights"


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def load(
    path: str | os.PathLike[str],
    undirected: bool | None = None,
    weight: str | None = "weight",
    num_tokens: int | None = None,
) -> GraphFile:
    """Read the graph in a file, with the labels of its tokens and the weights of its edges.

    Args:
        path: the file; its extension names the format.
        undirected: whether an edge is a message in both directions. Edge lists, CSV files without Gephi's
            "Type" column, general matrices and JSON without "directed" count as directed.
        weight: the edge attribute, or the column, that holds the weights; None reads no weights. Edges
            without a weight get the default weight of the file, or 1, as in networkx.
        num_tokens: the number of tokens, if labels are positions 0, 1, ... and some tokens without edges
            are missing. :func:`write` puts it in the first line of an edge list (``# tokens 64``).

    The label of a token is its attribute "label" or "name" if all are unique, and otherwise its id.
    The columns "source" and "target" may also be called "from" and "to", "u" and "v", and the like. A CSV
    may use semicolons or tabs. Parallel edges count once, with the first weight. Edge lists, CSV and JSON
    keep the order of edges; networkx orders the others. Each undirected edge is followed by its reverse.

    Raises ValueError for an unknown extension, for a file that is not valid in its format, and if
    its edges contradict ``undirected``; the message names the file and, if possible, the line or
    the edge. Raises ImportError if scipy is missing, and OSError if the file cannot be read.

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
    parse = _look_up_by_suffix(path, READERS)
    if undirected is not None:
        checks.instance("undirected", undirected, bool)
    if weight is not None:
        checks.instance("weight", weight, str)
    if num_tokens is not None:
        num_tokens = checks.size("num_tokens", num_tokens)
    try:
        text = path.read_text(encoding="utf-8-sig")
        # networkx and scipy warn about changes in their next versions.
        with ignore_warnings():
            network = parse(text, weight, nx.MultiGraph() if undirected else nx.MultiDiGraph())
        if undirected is not None and network.is_directed() == undirected:
            direction = "directed" if undirected else "undirected"
            raise ValueError(f"its edges are {direction}, got {undirected=}: leave undirected out")
        if num_tokens is not None:
            add_tokens(network, num_tokens)
        return _read_network(path.name, network, weight)
    except ImportError as error:
        raise ImportError("reading MatrixMarket files needs scipy: pip install scipy") from error
    except OSError:
        raise
    # The parsers of other packages raise exceptions of any type.
    except Exception as error:
        prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be read as a graph: {prefix}{one_line(str(error), 300)}") from error


def write(graph: TokenGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph in the format that the extension of ``path`` names; :func:`load` reads it back.

    Raises TypeError for anything but a graph, and ValueError for an unknown extension, for receivers and
    senders that are not the same tokens 0 .. n-1, and for a graph that varies by head or sample.

    >>> import tempfile
    >>> from gnn_attention import patterns
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(patterns.window(5, 2), Path(folder) / "window.graphml")
    ...     load(Path(folder) / "window.graphml").graph == patterns.window(5, 2)
    True
    """
    path = Path(path)
    generate_lines = _look_up_by_suffix(path, WRITERS)
    checks.instance("graph", graph, TokenGraph)
    if (graph.num_dst, graph.dst_offset, graph.src_offset) != (graph.num_src, 0, 0):
        raise ValueError(f"receivers and senders must be the same tokens from 0 on, got {graph!r}")
    atomic_files.write(path, "".join(f"{line}\n" for line in generate_lines(graph)))


def _read_network(name: str, network: nx.Graph, weight: str | None) -> GraphFile:
    edges = sorted(network.edges(data=True), key=lambda edge: edge[2].get(ORDER_KEY, 0))
    triples = [(src, dst, attributes.get(weight)) for src, dst, attributes in edges]
    is_weighted = weight is not None and any(value not in (None, "") for *_, value in triples)
    if triples and not is_weighted and weight not in (None, "weight"):
        raise ValueError(f"none of its edges has a {weight!r}: pass another attribute, or weight=None")
    labels = _label_tokens(network)
    positions = {node: position for position, node in enumerate(labels)}
    weights_by_pair: dict[tuple[int, int], float] = {}
    for src, dst, value in triples:
        edge_weight = 1.0 if value in (None, "") else parse_number(value)
        if edge_weight is None:
            raise ValueError(f"the weight of {src} -> {dst} must be a number, got {str(value)[:40]!r}")
        # The first of several parallel edges sets the weight.
        weights_by_pair.setdefault((positions[src], positions[dst]), edge_weight)
    is_directed = network.is_directed()
    unique_edges = [(src, dst, edge_weight) for (src, dst), edge_weight in weights_by_pair.items()]
    result = graph_from_triples(unique_edges, is_directed, len(labels), weight if is_weighted else None, name)
    graph, weights = result if is_weighted else (result, None)
    num_edges = len(unique_edges)
    return GraphFile(graph, [*labels.values()], weights, not is_directed, num_edges, len(triples) - num_edges)


def _label_tokens(network: nx.Graph) -> dict[Hashable, str]:
    """Return the label of each node, in the order of the tokens."""
    labels = {node: str(node) for node in network}
    for attribute in ("name", "label"):
        names = {node: str(name) for node, name in network.nodes.data(attribute, "")}
        if "" not in names.values() and len({*names.values()}) == len(names):
            labels = names
    if not labels or not are_integers(labels.values()):
        return labels
    value, num_nodes = Counter(map(int, labels.values())).most_common(1)[0]
    if num_nodes > 1:
        raise ValueError(f"{num_nodes} nodes have labels equal to {value}: spell the label in one way")
    return dict(sorted(labels.items(), key=lambda item: int(item[1])))


def _generate_edge_list(graph: TokenGraph) -> Iterable[str]:
    return [f"# tokens {graph.num_dst}", *(f"{src} {dst}" for src, dst in graph.edge_index.t().tolist())]


WRITERS: Mapping[str, Callable[[TokenGraph], Iterable[str]]] = {
    **dict.fromkeys((".edges", ".edgelist"), _generate_edge_list),
    ".adjlist": lambda graph: nx.generate_adjlist(to_networkx(graph)),
    ".graphml": lambda graph: nx.generate_graphml(to_networkx(graph)),
}


def _look_up_by_suffix(path: Path, functions: Mapping[str, Any]) -> Any:
    if path.suffix.lower() not in functions:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(functions)}")
    return functions[path.suffix.lower()]
