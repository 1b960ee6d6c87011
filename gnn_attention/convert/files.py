"""Graphs in files of this and other programs. An edge from u to v is a message from u to v.

========================= ===================================================================================
``.edges``, ``.edgelist`` a line for each edge, ``src dst``, then a weight or networkx's ``{'weight': 2}``
``.csv``, ``.tsv``        the same; a header may name the columns: source, target, weight, and Gephi's Type
``.adjlist``              a line for each sender, ``src dst dst ...``; a token alone has no out-edges
``.graphml``, ``.gexf``   GraphML and GEXF, read by networkx
``.mtx``                  MatrixMarket, read by scipy: the entry (i, j) is an edge from i - 1 to j - 1
``.gml``                  GML, read by networkx; ``.net``, ``.paj`` and ``.pajek`` are Pajek
``.json``                 node-link data of networkx and D3
``.dot``, ``.gv``         Graphviz without subgraphs and ports, read by pydot
========================= ===================================================================================

Nodes whose labels are all integers stand in numeric order, so that 0 .. n-1 are the positions of the tokens.
Others stand in the order of the file, those that it declares before what only edges name.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files, checks
from gnn_attention._support.locks import ignored
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention._support.text import one_line
from gnn_attention.convert._file_readers import READERS, Content, are_integers, parse_number
from gnn_attention.convert.formats import from_triples, to_networkx
from gnn_attention.graph import TokenGraph

__all__ = ["MOST_TOKENS", "READERS", "WRITERS", "GraphFile", "load", "read", "write"]

# of a file
MOST_TOKENS = 2**24


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
    semicolons or tabs for commas. Duplicate edges count once, with the first weight. Edge lists, CSV, JSON,
    Pajek and sparse matrices keep the order of the file, the others have that of networkx; the second
    direction of an undirected edge follows the first.

    Raises ValueError, which names the file and where possible the line or the edge, for an unknown ending and
    a file that holds no such graph or contradicts ``undirected``; ImportError where scipy or pydot is
    missing; OSError for a file that cannot be read.

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
    size = None if num_tokens is None else checks.size("num_tokens", num_tokens)
    try:
        text = path.read_text(encoding="utf-8-sig")
        # the other packages warn of what comes in their next versions
        with ignored():
            content = parse(text, weight)
        if undirected is not None and content.undirected not in (None, undirected):
            direction = "undirected" if content.undirected else "directed"
            raise ValueError(f"its edges are {direction}, not undirected={undirected}: leave undirected out")
        return _build(path.name, content, weight, size, bool(undirected or content.undirected))
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise ImportError(f"this kind of file is read by {package}: pip install {package}") from error
    except OSError:
        raise
    # of the parsers of other packages, too
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} holds no graph of tokens: {kind}{one_line(str(error), 300)}") from error


def read(
    path: str | os.PathLike[str], num_tokens: int | None = None, undirected: bool | None = None
) -> TokenGraph:
    """The graph of a file without weights: ``load(path, undirected, None, num_tokens).graph``.

    >>> import tempfile
    >>> from gnn_attention import patterns
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(patterns.window(5, 2), Path(folder) / "window.graphml")
    ...     read(Path(folder) / "window.graphml") == patterns.window(5, 2)
    True
    """
    return load(path, undirected, None, num_tokens).graph


def write(graph: TokenGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file whose ending says how; :func:`read` gives the same edges and tokens back.

    Raises TypeError for no graph, and ValueError for an unknown ending, a graph whose receivers and senders
    are not the same tokens 0 .. n-1, and one that differs by head or sample.
    """
    path = Path(path)
    generate = _choose_by_ending(path, WRITERS)
    checks.instance("graph", graph, TokenGraph)
    if (graph.num_dst, graph.dst_offset, graph.src_offset) != (graph.num_src, 0, 0):
        raise ValueError(f"a file holds graphs of the same receivers and senders, from 0 on, got {graph!r}")
    atomic_files.write(path, "".join(f"{line}\n" for line in generate(graph)))


def _build(
    name: str, content: Content, weight: str | None, num_tokens: int | None, undirected: bool
) -> GraphFile:
    is_weighted = any(value not in (None, "") for *_, value in content.edges)
    if content.edges and not is_weighted and weight not in (None, "weight"):
        raise ValueError(f"none of its edges has a {weight!r}: name another attribute, or weight=None")
    labels, position = _place_nodes(content, num_tokens)
    # the first of parallel edges, which are the same in both directions if undirected
    edges: dict[tuple[int, int], tuple[int, int, float]] = {}
    for sender, receiver, value in content.edges:
        number = 1.0 if value in (None, "") else parse_number(value)
        if number is None:
            got = str(value)[:40]
            raise ValueError(f"the edge {sender} -> {receiver}: a weight is a finite number, got {got!r}")
        src, dst = position[sender], position[receiver]
        ends = (dst, src) if undirected and dst < src else (src, dst)
        edges.setdefault(ends, (src, dst, number))
    read = from_triples([*edges.values()], not undirected, len(labels), weight if is_weighted else None, name)
    graph, weights = read if is_weighted else (read, None)
    return GraphFile(graph, labels, weights, undirected, len(edges), len(content.edges) - len(edges))


def _place_nodes(content: Content, num_tokens: int | None) -> tuple[list[str], dict[Hashable, int]]:
    """The label of each token, and the position of each node."""
    size = content.size if num_tokens is None else num_tokens
    if content.size not in (None, size):
        raise ValueError(f"it has {content.size} tokens, not num_tokens={num_tokens}: leave num_tokens out")
    if size is not None and size > MOST_TOKENS:
        raise ValueError(f"it has {size:,} tokens, at most {MOST_TOKENS:,} are read")
    ends = (end for src, dst, _ in content.edges for end in (src, dst))
    nodes = [*dict.fromkeys([*content.nodes, *ends])]
    labels = content.labels or [str(node) for node in nodes]
    if not are_integers(labels):
        if size not in (None, len(nodes)):
            raise ValueError(
                f"its {len(nodes)} nodes have names such as {labels[0]!r}: it has no {size} tokens"
            )
        return labels, {node: position for position, node in enumerate(nodes)}
    numbers = {node: int(label) for node, label in zip(nodes, labels, strict=True)}
    if len({*numbers.values()}) < len(nodes):
        number, times = Counter(numbers.values()).most_common(1)[0]
        raise ValueError(f"{times} of its nodes are the same number {number}: write it in one way")
    if size is None:
        label_of = dict(zip(nodes, labels, strict=True))
        nodes.sort(key=numbers.__getitem__)
        return [label_of[node] for node in nodes], {node: position for position, node in enumerate(nodes)}
    if outside := [number for number in numbers.values() if not 0 <= number < size]:
        raise ValueError(f"its tokens are 0 .. {size - 1}, but it names a token {outside[0]}")
    return [str(token) for token in range(size)], numbers


def _generate_edge_list(graph: TokenGraph) -> Iterable[str]:
    return [f"# tokens {graph.num_dst}", *(f"{src} {dst}" for src, dst in graph.edge_index.t().tolist())]


def _generate_by_networkx(name: str, graph: TokenGraph) -> Iterable[str]:
    import networkx as nx

    lines: Iterable[str] = getattr(nx, f"generate_{name}")(to_networkx(graph))
    return lines


WRITERS: Mapping[str, Callable[[TokenGraph], Iterable[str]]] = {
    **dict.fromkeys((".edges", ".edgelist"), _generate_edge_list),
    ".adjlist": partial(_generate_by_networkx, "adjlist"),
    ".graphml": partial(_generate_by_networkx, "graphml"),
}


def _choose_by_ending(path: Path, forms: Mapping[str, Any]) -> Any:
    if path.suffix.lower() not in forms:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(forms)}")
    return forms[path.suffix.lower()]
