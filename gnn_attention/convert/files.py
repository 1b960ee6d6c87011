"""Graphs in files: edge lists, adjacency lists and GraphML. An edge from u to v is a message from u to v.

=========================  ==================================================================================
``.edges``, ``.edgelist``  a line for each edge, ``src dst``; further words (weights, ...) are not read
``.adjlist``               a line for each sender, ``src dst dst ...``; a token alone has no out-edges
``.graphml``               GraphML; an undirected edge is a message in both directions
=========================  ==================================================================================

Nodes are labelled 0 .. n-1, the positions of the tokens; what follows a ``#`` is a comment. The lists are
those of networkx, always directed. Files are read within limits of size; what is wrong is a ValueError.
"""

import io
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gnn_attention._support import atomic_files, checks
from gnn_attention.graph import TokenGraph

__all__ = ["MOST_BYTES", "MOST_TOKENS", "read", "write"]

# of a file
MOST_BYTES = 2**25
MOST_TOKENS = 2**24

# the size, which `write` puts into an edge list: its last tokens may have no edges
_TOKENS = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)


class _Content(NamedTuple):
    edges: list[tuple[int, int]]
    nodes: set[int]
    size: int | None = None


def read(path: str | os.PathLike[str], num_tokens: int | None = None) -> TokenGraph:
    """The graph of a file, in the file's order and named like it; duplicate edges count once.

    ``num_tokens`` is needed where the file does not say it: the first line of an edge list by :func:`write`
    does (``# tokens 64``), and so do labels that are exactly 0 .. n-1.

    Raises ValueError, which names the file and in a list the line, for an unknown ending, a file of more than
    32 MB, one that holds no such graph, and XML with a DOCTYPE, whose entities may grow without limit;
    OSError where the file cannot be read.

    >>> import tempfile
    >>> from gnn_attention import patterns
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(patterns.window(5, 2), Path(folder) / "window.graphml")
    ...     read(Path(folder) / "window.graphml") == patterns.window(5, 2)
    True
    """
    path = checks.path("path", path)
    parse, _ = _form(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes, the most that are read")
    try:
        content = parse(raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"))
        size = _size(content, None if num_tokens is None else checks.size("num_tokens", num_tokens))
    except ValueError as error:
        raise ValueError(f"{path} holds no graph of tokens: {error}") from error
    edges = torch.tensor(content.edges, dtype=torch.int64, device="cpu").reshape(-1, 2).t()
    return TokenGraph.from_edges(edges, size, coalesce=True, name=path.name)


def write(graph: TokenGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file whose ending says how; :func:`read` gives the same edges and tokens back.

    Raises TypeError for no graph, and ValueError for an unknown ending, a graph whose receivers and senders
    are not the same tokens 0 .. n-1, one that differs by head or sample, and one that needs more than 32 MB.
    """
    path = checks.path("path", path)
    _, form = _form(path)
    checks.instance("graph", graph, TokenGraph)
    if (graph.num_dst, graph.dst_offset, graph.src_offset) != (graph.num_src, 0, 0):
        raise ValueError(f"a file holds graphs of the same receivers and senders, from 0 on, got {graph!r}")
    text = "".join(form(graph)) if graph.num_edges < MOST_BYTES // len("0 1\n") else None
    if text is None or len(text) > MOST_BYTES:
        edges = f"{graph!r} has {graph.num_edges:,} edges"
        raise ValueError(f"{edges}, which do not fit into the {MOST_BYTES:,} bytes that are read")
    atomic_files.write(path, text)


def _edge_list(text: str) -> _Content:
    size = _TOKENS.match(text.split("\n", 1)[0].strip())
    for number, line in enumerate(io.StringIO(text), 1):
        if len(words := line.partition("#")[0].split()) == 1:
            raise ValueError(f"line {number}: expected 'src dst', got {words[0][:40]!r} alone")
    return _adjacency_list(text, most=2)._replace(size=int(size[1]) if size else None)


def _adjacency_list(text: str, most: int | None = None) -> _Content:
    """``src dst dst ...`` in each line; of an edge list the first two words."""
    edges: list[tuple[int, int]] = []
    nodes: set[int] = set()
    for number, line in enumerate(io.StringIO(text), 1):
        if words := line.partition("#")[0].split()[:most]:
            src, *receivers = (_token(word, f"line {number}: a token") for word in words)
            edges += [(src, dst) for dst in receivers]
            nodes.update((src, *receivers))
    return _Content(edges, nodes)


def _graphml(text: str) -> _Content:
    # networkx parses with Python's own XML parser, which would follow the entities of a DOCTYPE
    if forbidden := re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ValueError(
            f"it has a {forbidden[1].upper()}, which may define entities without limit: remove it"
        )
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    import networkx as nx

    try:
        graph = nx.parse_graphml(text, node_type=str)
        number = {label: _token(label, "a node") for label in graph.nodes}
    # of the XML parser, of networkx, of a label that is no number
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    label_of: dict[int, str] = {}
    for label, token in number.items():
        if (other := label_of.setdefault(token, label)) != label:
            raise ValueError(f"its nodes {other!r} and {label!r} are the same number: write it in one way")
    edges = [(number[u], number[v]) for u, v in graph.edges()]
    if not graph.is_directed():
        edges = [pair for u, v in edges for pair in ((u, v), (v, u))]
    return _Content(edges, set(number.values()))


def _token(word: str, what: str) -> int:
    if not re.fullmatch(r"\d{1,18}", word, re.ASCII):
        raise ValueError(f"{what} is one of 0, 1, 2, ..., got {word[:40]!r}")
    return int(word)


def _size(content: _Content, num_tokens: int | None) -> int:
    if None not in (num_tokens, content.size) and num_tokens != content.size:
        raise ValueError(f"it has {content.size} tokens, not num_tokens={num_tokens}: leave num_tokens out")
    size = content.size if num_tokens is None else num_tokens
    if size is None:
        size = len(content.nodes)
        if content.nodes != set(range(size)):
            missing = f"there is no {min(set(range(size)) - content.nodes)}"
            raise ValueError(f"its {size} labels are not 0 .. {size - 1} ({missing}): give num_tokens")
    if content.nodes and max(content.nodes) >= size:
        raise ValueError(f"its tokens are 0 .. {size - 1}, but it names a token {max(content.nodes)}")
    if size > MOST_TOKENS:
        raise ValueError(f"it has {size:,} tokens, at most {MOST_TOKENS:,} are read")
    return size


def _as_edge_list(graph: TokenGraph) -> Iterable[str]:
    return [f"# tokens {graph.num_dst}\n", *(f"{src} {dst}\n" for src, dst in graph.edge_index.t().tolist())]


def _by_networkx(writer: str, graph: TokenGraph) -> Iterable[str]:
    import networkx as nx

    network = nx.DiGraph()
    network.add_nodes_from(range(graph.num_dst))
    network.add_edges_from(graph.edge_index.t().tolist())
    return [f"{line}\n" for line in getattr(nx, writer)(network)]


_Form = tuple[Callable[[str], _Content], Callable[[TokenGraph], Iterable[str]]]


def _form(path: Path) -> _Form:
    forms: dict[str, _Form] = dict.fromkeys((".edges", ".edgelist"), (_edge_list, _as_edge_list))
    forms[".adjlist"] = _adjacency_list, partial(_by_networkx, "generate_adjlist")
    forms[".graphml"] = _graphml, partial(_by_networkx, "generate_graphml")
    if path.suffix.lower() not in forms:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(forms)}")
    return forms[path.suffix.lower()]
