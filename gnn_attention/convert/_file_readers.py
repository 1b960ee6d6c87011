"""What the files of each kind say, by the readers of networkx, scipy and pydot; tables are read here."""

import ast
import csv
import importlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any, NamedTuple

import networkx as nx

# of a file
MOST_TOKENS = 2**24

# names of columns
SOURCES = ("source", "src", "from", "sender")
TARGETS = ("target", "dst", "to", "receiver")

# the size, which `files.write` puts into an edge list: its last tokens may have no edges
_TOKENS = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


class Content(NamedTuple):
    """What a file says; None where it does not. An edge is a pair of indices into ``nodes``."""

    nodes: Sequence[object]
    edges: list[tuple[int, int]]
    weights: list[float] | None
    undirected: bool | None = None
    labels: list[str] | None = None
    size: int | None = None


def are_integers(words: Sequence[str]) -> bool:
    return all(map(_INTEGER.fullmatch, words))


def _read_table(text: str, weight: str | None, delimiter: str | None = None) -> Content:
    """A line for each edge. networkx skips a line that it cannot read, and does not keep their order."""
    size = _TOKENS.match(text.split("\n", 1)[0].strip())
    rows = _split_rows(text, delimiter)
    header = _find_columns(rows, weight) if delimiter and rows else None
    src, dst, value = header or (0, 1, 2)
    index: dict[str, int] = {}
    edges, values, lines = [], [], []
    for line, cells in rows[1:] if header else rows:
        if len(cells) <= max(src, dst) or not (cells[src] and cells[dst]):
            raise ValueError(f"line {line}: expected 'src dst', got {' '.join(cells)[:40]!r} alone")
        sender = index.setdefault(cells[src], len(index))
        edges.append((sender, index.setdefault(cells[dst], len(index))))
        cell = cells[value] if weight and 0 <= value < len(cells) else ""
        values.append(_look_up(weight, cell, line) if cell.startswith("{") else cell.partition(" ")[0])
        lines.append(line)
    # without a header the third column may be anything
    if not header and all(_number(cell) is None for cell in values):
        values.clear()
    weights = _read_weights(values, lambda edge: f"line {lines[edge]}")
    return Content(list(index), edges, weights, size=int(size[1]) if size else None)


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


def _look_up(name: str | None, text: str, line: int) -> object:
    """The value of ``name`` in the dictionary that networkx writes behind an edge."""
    try:
        return dict(ast.literal_eval(text)).get(name)
    except Exception as error:
        raise ValueError(f"line {line}: expected a dictionary, got {text[:40]!r}") from error


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_weights(values: Sequence[object], place: Callable[[int], object]) -> list[float] | None:
    """The weight of each edge; None where no edge has one."""
    if all(value in (None, "") for value in values):
        return None
    weights = []
    for edge, value in enumerate(values):
        number = 1.0 if value in (None, "") else _number(value)
        if number is None:
            raise ValueError(f"{place(edge)}: a weight is a finite number, got {str(value)[:40]!r}")
        weights.append(number)
    return weights


def _read_matrix_market(text: str, weight: str | None) -> Content:
    scipy_io, sparse = _require("scipy.io"), _require("scipy.sparse")
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
    edges = list(zip(matrix.row[stored].tolist(), matrix.col[stored].tolist(), strict=True))
    values = matrix.data[stored].tolist() if weight and kind != "pattern" else []
    weights = _read_weights(values, lambda edge: f"the entry {edges[edge]}")
    return Content(range(1, rows + 1), edges, weights, symmetry == "symmetric" or None, size=rows)


def _read_adjacency_list(text: str, weight: str | None) -> Content:
    lines = [line for line in text.split("\n") if line.partition("#")[0].strip()]
    return _from_networkx(nx.parse_adjlist(lines, create_using=nx.MultiDiGraph), weight, says=False)


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
    if not (declared := re.search(r"(?im)^\*vertices\s+(\d+)\s*$", text)):
        raise ValueError("expected a line '*vertices n', with a label for each of n nodes of one kind")
    if len(graph := nx.parse_pajek(text)) != int(declared[1]):
        raise ValueError(f"*vertices must give each node a label of its own, got {len(graph)} labels")
    return _from_networkx(graph, weight)


def _read_json(text: str, weight: str | None) -> Content:
    data = json.loads(text)
    if not isinstance(data, dict) or "nodes" not in data or not {"edges", "links"} & {*data}:
        raise ValueError("expected node-link data, an object with 'nodes' and 'links' or 'edges'")
    # versions of networkx differ in the name
    edges = data.get("edges", data.get("links"))
    graph = nx.node_link_graph({"directed": True} | data | {"edges": edges, "links": edges})
    return _from_networkx(graph, weight, says="directed" in data)


def _read_dot(text: str, weight: str | None) -> Content:
    pydot = _require("pydot")
    # igraph writes names of nodes so, for which pydot has no place
    text = re.sub(r"(?m)^( +)name=", r"\1label=", text)
    # pydot prints what is wrong
    with redirect_stdout(io.StringIO()) as printed:
        graphs = pydot.graph_from_dot_data(text) or []
    if len(graphs) != 1:
        reason = printed.getvalue().strip().split("\n")[-1]
        raise ValueError(reason or f"it holds {len(graphs)} graphs, expected one")
    graph = nx.MultiDiGraph() if graphs[0].get_type() == "digraph" else nx.MultiGraph()
    _add_dot(graph, graphs[0])
    return _from_networkx(graph, weight)


def _add_dot(graph: Any, part: Any) -> None:
    """Add what pydot has read. networkx leaves subgraphs out, and makes nodes of ports."""
    for node in part.get_node_list():
        if node.get_name() not in ("node", "edge", "graph"):
            graph.add_nodes_from([(node.get_name().strip('"'), _unquote(node.get_attributes()))])
    for edge in part.get_edge_list():
        senders, receivers = _dot_names(edge.get_source()), _dot_names(edge.get_destination())
        attributes = _unquote(edge.get_attributes())
        graph.add_edges_from((src, dst, attributes) for src in senders for dst in receivers)
    for each in part.get_subgraph_list():
        _add_dot(graph, each)


def _dot_names(end: Any) -> list[str]:
    """The nodes at an end of an edge: one, with or without a port, or all those of a subgraph."""
    if isinstance(end, str):
        return [re.sub(r'^("(?:[^"\\]|\\.)*"|[^":]*):.*', r"\1", end).strip('"')]
    if end["edges"] or end["subgraphs"]:
        raise ValueError("an edge ends at a subgraph that has edges of its own: write them apart")
    return [name.strip('"') for name in end["nodes"]]


def _unquote(attributes: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value).strip('"') for name, value in attributes.items()}


def _from_networkx(graph: Any, weight: str | None, says: bool = True) -> Content:
    """``says``: the file says whether its edges are directed."""
    index = {node: n for n, node in enumerate(graph)}
    if len({str(node) for node in index}) < len(index):
        raise ValueError("two of its nodes have ids that are written alike: give each one of its own")
    edges = [(index[src], index[dst]) for src, dst in graph.edges()]
    values = [value for *_, value in graph.edges(data=weight)] if weight else []
    weights = _read_weights(values, lambda edge: "the edge {} -> {}".format(*[*graph.edges()][edge]))
    labels = None
    for name in ("name", "label"):
        words = [str(word) for _, word in graph.nodes(data=name) if word not in (None, "")]
        labels = words if len({*words}) == len(index) else labels
    return Content(list(index), edges, weights, not graph.is_directed() if says else None, labels)


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"this kind of file is read by {package}: pip install {package}") from error


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
