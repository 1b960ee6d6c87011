"""Graphs in files: edge lists, adjacency lists and GraphML. An edge from u to v is a message from u to v.

=========================  ==================================================================================
``.edges``, ``.edgelist``  a line for each edge, ``src dst``; further words (weights, ...) are not read
``.adjlist``               a line for each sender, ``src dst dst ...``; a token alone has no out-edges
``.graphml``               GraphML; an undirected edge is a message in both directions
=========================  ==================================================================================

Nodes are labelled 0 .. n-1, the positions of the tokens; what follows a ``#`` in a line is a remark. The two
lists are networkx's, where its readers are: they say nothing of direction, so an undirected graph has to be
written with both. A file may come from an unknown author: it is read within limits of size, and whatever is
wrong with it is one ValueError.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from gnn_attention._support import atomic_files, checks
from gnn_attention.graph import TokenGraph

__all__ = ["MOST_BYTES", "MOST_TOKENS", "read", "write"]

MOST_BYTES = 2**25  # of a file
MOST_TOKENS = 2**24

# The size that ``write`` puts into an edge list, which has no other place for a token without out-edges.
_TOKENS = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)
_LABEL = re.compile(r"\d{1,18}", re.ASCII)


class _Found(NamedTuple):
    """What a file says: its edges, the tokens it names, and how many there are if it says so."""

    edges: list[tuple[int, int]]
    nodes: set[int]
    size: int | None = None


def read(path: str | os.PathLike[str], num_tokens: int | None = None) -> TokenGraph:
    """The graph of a file, an edge list in the file's order, named like the file; an edge that is there twice
    counts once.

    ``num_tokens``: how many tokens there are. It is needed where the file does not say: the first line of an
    edge list that :func:`write` made does (``# tokens 64``), and so do labels that are exactly 0 .. n-1.

    Raises ValueError for an unknown ending, a file of more than 32 MB and one that holds no such graph, in
    one sentence that names the file and, in a list, the line; XML with a DOCTYPE is refused before it is
    parsed, since it may define entities that grow without limit. OSError where the file cannot be read.

    >>> import tempfile
    >>> from gnn_attention import patterns
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(patterns.window(5, 2), Path(folder) / "window.graphml")
    ...     read(Path(folder) / "window.graphml") == patterns.window(5, 2)
    True
    """
    path = checks.path("path", path)
    parse, _ = _form(path)
    content = _content(path)
    try:
        found = parse(content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"))
        size = _size(found, None if num_tokens is None else checks.size("num_tokens", num_tokens))
    except ValueError as error:
        raise ValueError(f"{path} holds no graph of tokens: {error}") from error
    edges = torch.tensor(found.edges, dtype=torch.int64, device="cpu").reshape(-1, 2).t()
    return TokenGraph.from_edges(edges, size, coalesce=True, name=path.name)


def write(graph: TokenGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file whose ending says how; :func:`read` gives the same edges back, and the same
    number of tokens.

    Raises TypeError for no graph, and ValueError for an unknown ending, a graph whose receivers and senders
    are not the same tokens 0 .. n-1, one that differs by head or sample, and one that would not fit into 32
    MB.
    """
    path = checks.path("path", path)
    _, form = _form(path)
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if (graph.num_dst, graph.dst_offset, graph.src_offset) != (graph.num_src, 0, 0):
        raise ValueError(
            f"a file holds a graph whose receivers and senders are the same tokens, from 0 on, got {graph!r}"
        )
    text = "".join(form(graph)) if graph.num_edges < MOST_BYTES // len("0 1\n") else None
    if text is None or len(text) > MOST_BYTES:
        raise ValueError(
            f"{graph!r} has {graph.num_edges:,} edges, which do not fit into the {MOST_BYTES:,} bytes that are read"
        )
    atomic_files.write(path, text)


def _edge_list(text: str) -> _Found:
    said = _TOKENS.match(text.split("\n", 1)[0].strip())
    edges: list[tuple[int, int]] = []
    nodes: set[int] = set()
    for number, words in _lines(text):
        if len(words) < 2:
            raise ValueError(f"line {number}: expected 'src dst', got {words[0][:40]!r} alone")
        edges.append((_token(words[0], number), _token(words[1], number)))
        nodes.update(edges[-1])
    return _Found(edges, nodes, int(said[1]) if said else None)


def _adjacency_list(text: str) -> _Found:
    edges: list[tuple[int, int]] = []
    nodes: set[int] = set()
    for number, words in _lines(text):
        src, *receivers = (_token(word, number) for word in words)
        edges += [(src, dst) for dst in receivers]
        nodes.update((src, *receivers))
    return _Found(edges, nodes)


def _graphml(text: str) -> _Found:
    """Parsed by networkx with Python's own XML parser, which would follow the entities of a DOCTYPE."""
    if forbidden := re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ValueError(
            f"it has a {forbidden[1].upper()}, which may define entities without limit; take that part out"
        )
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    import networkx as nx

    try:
        graph = nx.parse_graphml(text, node_type=str)
        number = {label: _number(label) for label in graph.nodes}
    except Exception as error:  # of the XML parser, of networkx, of a label that is no number
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    label_of: dict[int, str] = {}
    for label, token in number.items():
        if (other := label_of.setdefault(token, label)) != label:
            raise ValueError(
                f"its nodes {other!r} and {label!r} are the same number: write every number in one way"
            )
    edges = [(number[u], number[v]) for u, v in graph.edges()]
    if not graph.is_directed():
        edges = [pair for u, v in edges for pair in ((u, v), (v, u))]
    return _Found(edges, set(number.values()))


def _number(label: str) -> int:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"a node is one of 0, 1, 2, ..., got {label[:40]!r}")
    return int(label)


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(io.StringIO(text), 1):
        if words := line.partition("#")[0].split():
            yield number, words


def _token(word: str, number: int) -> int:
    if not _LABEL.fullmatch(word):
        raise ValueError(f"line {number}: a token is one of 0, 1, 2, ..., got {word[:40]!r}")
    return int(word)


def _size(found: _Found, given: int | None) -> int:
    """The number of tokens, as given or as the file says; ValueError where labels do not fit."""
    if None not in (given, found.size) and given != found.size:
        raise ValueError(
            f"it says that there are {found.size} tokens, num_tokens={given}; leave num_tokens out"
        )
    size = found.size if given is None else given
    if size is None:
        size = len(found.nodes)
        if found.nodes != set(range(size)):
            wrong = min(set(range(size)) - found.nodes)
            raise ValueError(
                f"its {size} labels are not 0 .. {size - 1} (there is no {wrong}); "
                "number the tokens so, or give their number as num_tokens"
            )
    wrong_label = next((label for label in found.nodes if not 0 <= label < size), None)
    if wrong_label is not None:
        raise ValueError(f"its tokens are 0 .. {size - 1}, but it names a token {wrong_label}")
    if size > MOST_TOKENS:
        raise ValueError(f"it has {size:,} tokens, at most {MOST_TOKENS:,} are read")
    return size


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes, which is the most that is read")
    return content


def _as_edge_list(graph: TokenGraph) -> Iterable[str]:
    return [f"# tokens {graph.num_dst}\n", *(f"{src} {dst}\n" for src, dst in graph.edge_index.t().tolist())]


def _as_adjacency_list(graph: TokenGraph) -> Iterable[str]:
    receivers_of: list[list[str]] = [[] for _ in range(graph.num_src)]
    for src, dst in graph.edge_index.t().tolist():
        receivers_of[src].append(f" {dst}")
    return [f"{src}{''.join(receivers)}\n" for src, receivers in enumerate(receivers_of)]


def _as_graphml(graph: TokenGraph) -> Iterable[str]:
    import networkx as nx

    made = nx.DiGraph()
    made.add_nodes_from(range(graph.num_dst))
    made.add_edges_from(graph.edge_index.t().tolist())
    return [f"{line}\n" for line in nx.generate_graphml(made)]


_Form = tuple[Callable[[str], _Found], Callable[[TokenGraph], Iterable[str]]]
_FORMS: Mapping[str, _Form] = {
    ".edges": (_edge_list, _as_edge_list),
    ".edgelist": (_edge_list, _as_edge_list),
    ".adjlist": (_adjacency_list, _as_adjacency_list),
    ".graphml": (_graphml, _as_graphml),
}


def _form(path: Path) -> _Form:
    if path.suffix.lower() not in _FORMS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(_FORMS)}")
    return _FORMS[path.suffix.lower()]
