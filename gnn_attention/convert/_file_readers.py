"""Readers of each kind of file: tables are read here, the others by networkx, scipy and pydot."""

import ast
import csv
import importlib
import io
import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import networkx as nx

# of a file
MOST_TOKENS = 2**24

# names of columns
SOURCES = ("source", "src", "from", "sender")
TARGETS = ("target", "dst", "to", "receiver")

# the size, which `files.write` puts into an edge list: its last tokens may have no edges
_SIZE = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)

# the ids of two nodes, and the weight as the file has it: None or "" is none
Edge = tuple[Hashable, Hashable, Any]


class Content(NamedTuple):
    """What a file says; None where it does not. ``nodes`` may lack those that the edges name."""

    edges: list[Edge]
    nodes: Sequence[Hashable] = ()
    undirected: bool | None = None
    labels: list[str] | None = None
    size: int | None = None


def are_integers(words: Sequence[str]) -> bool:
    return all(map(_INTEGER.fullmatch, words))


def parse_number(value: object) -> float | None:
    """The finite number that a text or an attribute says, else None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_table(text: str, weight: str | None, delimiter: str | None = None) -> Content:
    """A line for each edge. networkx skips a line that it cannot read, and does not keep their order."""
    size = _SIZE.match(text.split("\n", 1)[0].strip())
    rows = _split_rows(text, delimiter)
    header = _find_columns(rows, weight) if delimiter and rows else None
    src, dst, column = header or (0, 1, 2)
    edges: list[Edge] = []
    for line, cells in rows[1:] if header else rows:
        if len(cells) <= max(src, dst) or not (cells[src] and cells[dst]):
            raise ValueError(f"line {line}: expected 'src dst', got {' '.join(cells)[:40]!r} alone")
        value = cells[column] if weight and 0 <= column < len(cells) else ""
        value = _look_up(weight, value, line) if value.startswith("{") else value.partition(" ")[0]
        edges.append((cells[src], cells[dst], value))
    # without a header the third column may be anything
    if not (header or any(parse_number(value) is not None for *_, value in edges)):
        edges = [(sender, receiver, None) for sender, receiver, _ in edges]
    return Content(edges, size=int(size[1]) if size else None)


def _split_rows(text: str, delimiter: str | None) -> list[tuple[int, list[str]]]:
    """The number and the cells of each line; comments are left out."""
    if delimiter is None:
        words = [line.partition("#")[0].split(None, 2) for line in text.split("\n")]
        return [(n, line) for n, line in enumerate(words, 1) if line and not line[0].startswith("%")]
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    return [(n, row) for n, row in rows if any(row) and not row[0].startswith("#")]


def _find_columns(rows: list[tuple[int, list[str]]], weight: str | None) -> tuple[int, int, int] | None:
    """The columns of sender, receiver and weight (-1: none) that a header names."""
    line, cells = rows[0]
    names = [cell.lower() for cell in cells]
    src, dst = ([n for n, name in enumerate(names) if name in words] for words in (SOURCES, TARGETS))
    if len(src) == len(dst) == 1:
        return src[0], dst[0], names.index(weight.lower()) if weight and weight.lower() in names else -1
    if len(rows) > 1 and all(are_integers(row[:2]) for _, row in rows[1:]) and not are_integers(cells[:2]):
        raise ValueError(f"line {line}: expected the columns source and target, got {', '.join(cells)[:40]}")
    return None


def _look_up(name: str | None, text: str, line: int) -> Any:
    """The value of ``name`` in the dictionary that networkx writes behind an edge."""
    try:
        return dict(ast.literal_eval(text)).get(name)
    except Exception as error:
        raise ValueError(f"line {line}: expected a dictionary, got {text[:40]!r}") from error


def _read_adjacency_list(text: str, weight: str | None) -> Content:
    rows = [words for line in text.split("\n") if (words := line.partition("#")[0].split())]
    return Content([(src, dst, None) for src, *receivers in rows for dst in receivers], [r[0] for r in rows])


def _read_matrix_market(text: str, weight: str | None) -> Content:
    scipy_io, sparse = importlib.import_module("scipy.io"), importlib.import_module("scipy.sparse")
    rows, columns, entries, _, kind, symmetry = scipy_io.mminfo(io.StringIO(text))
    if rows != columns or kind == "complex" or symmetry not in ("general", "symmetric"):
        raise ValueError(
            "expected a square matrix of real numbers, general or symmetric, "
            f"got {rows} x {columns}, {kind}, {symmetry}"
        )
    # no memory is taken for what a header says: an entry is at least a digit and a line end
    if rows > MOST_TOKENS or entries > len(text):
        raise ValueError(f"it is too short for {entries:,} entries, or has more than {MOST_TOKENS:,} tokens")
    matrix = sparse.coo_array(scipy_io.mmread(io.StringIO(text)))
    # scipy mirrors what a symmetric file holds
    stored = matrix.row >= (matrix.col if symmetry == "symmetric" else 0)
    values = matrix.data[stored].tolist() if weight and kind != "pattern" else repeat(None)
    edges = list(zip(matrix.row[stored].tolist(), matrix.col[stored].tolist(), values, strict=False))
    return Content(edges, undirected=symmetry == "symmetric" or None, size=rows)


def _read_xml(parse: Callable[[str], Any], text: str, weight: str | None) -> Content:
    # networkx parses with Python's own XML parser, which would follow the entities of a DOCTYPE
    if forbidden := re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ValueError(
            f"it has a {forbidden[1].upper()}, which may define entities without limit: remove it"
        )
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    return _from_networkx(parse(text), weight)


def _read_gml(text: str, weight: str | None) -> Content:
    # without this word networkx refuses parallel edges, which other programs write
    if not re.search(r"\smultigraph\s", text):
        text = re.sub(r"(?m)^\s*graph\s*\[", r"\g<0> multigraph 1 ", text, count=1)
    return _from_networkx(nx.parse_gml(text, label="id"), weight)


def _read_pajek(text: str, weight: str | None) -> Content:
    """networkx takes whatever follows the first section of edges for edges of its kind."""
    text = re.sub(r"(?im)^\*(arcs|edges)\b[^\n]*\n(?=\s*(\*|\Z))", "", text)
    sections = re.findall(r"(?im)^\*(?!network|vertices)(\w+)", text)
    if len(sections) > 1 or not {section.lower() for section in sections} <= {"arcs", "edges", "matrix"}:
        raise ValueError(f"one section *arcs, *edges or *matrix is read, got *{', *'.join(sections)}")
    count = re.search(r"(?im)^\*vertices\s+(\d+)\s*$", text)
    graph = nx.parse_pajek(text) if count else ()
    if not count or len(graph) != int(count[1]):
        raise ValueError(
            "expected a line '*vertices n', and n nodes of one kind, each with a label of its own"
        )
    return _from_networkx(graph, weight)


def _read_json(text: str, weight: str | None) -> Content:
    data = json.loads(text)
    if not isinstance(data, dict) or "nodes" not in data or not {"edges", "links"} & {*data}:
        raise ValueError("expected node-link data, an object with 'nodes' and 'links' or 'edges'")
    # versions of networkx differ in the name
    edges = data.get("edges", data.get("links"))
    graph = nx.node_link_graph({"directed": True} | data | {"edges": edges, "links": edges})
    content = _from_networkx(graph, weight)
    return content if "directed" in data else content._replace(undirected=None)


def _read_dot(text: str, weight: str | None) -> Content:
    pydot = importlib.import_module("pydot")
    # igraph writes names of nodes so, for which pydot has no place
    text = re.sub(r"(?m)^( +)name=", r"\1label=", text)
    # pydot prints what is wrong
    with redirect_stdout(io.StringIO()) as printed:
        graphs = pydot.graph_from_dot_data(text) or []
    if len(graphs) != 1:
        reason = printed.getvalue().strip().split("\n")[-1]
        raise ValueError(reason or f"it holds {len(graphs)} graphs, expected one")
    ends = [end for edge in graphs[0].get_edge_list() for end in (edge.get_source(), edge.get_destination())]
    # networkx leaves subgraphs out, and makes nodes of ports
    if graphs[0].get_subgraph_list() or any(re.match('[^"]*:|".*":', str(end)) for end in ends):
        raise ValueError("it has subgraphs or ports: write each edge from one node to another")
    graph = nx.nx_pydot.from_pydot(graphs[0])
    for *_, attributes in [*graph.nodes.data(), *graph.edges.data()]:
        attributes.update({name: str(value).strip('"') for name, value in attributes.items()})
    return _from_networkx(graph, weight)


def _from_networkx(graph: Any, weight: str | None) -> Content:
    labels = None
    for name in ("name", "label"):
        words = [str(word) for _, word in graph.nodes(data=name) if word not in (None, "")]
        labels = words if len({*words}) == len(graph) else labels
    # With weight=None networkx gives triples, too.
    return Content([*graph.edges(data=weight)], [*graph], not graph.is_directed(), labels)


READERS: Mapping[str, Callable[[str, str | None], Content]] = {
    **dict.fromkeys((".edges", ".edgelist"), _read_table),
    ".adjlist": _read_adjacency_list,
    ".graphml": partial(_read_xml, partial(nx.parse_graphml, node_type=str)),
    ".gexf": partial(_read_xml, lambda text: nx.read_gexf(io.BytesIO(text.encode()), node_type=str)),
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".mtx": _read_matrix_market,
    ".gml": _read_gml,
    **dict.fromkeys((".net", ".paj", ".pajek"), _read_pajek),
    ".json": _read_json,
    **dict.fromkeys((".dot", ".gv"), _read_dot),
}
