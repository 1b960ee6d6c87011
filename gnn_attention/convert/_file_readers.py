"""Readers of each kind of file: lists, JSON and Pajek are read here, others by networkx, scipy and pydot."""

import ast
import csv
import importlib
import io
import json
import re
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import product, repeat
from typing import Any, NamedTuple

# names of columns
SOURCES = ("source", "src", "from", "sender", "node1", "id1", "u", "start", "head", "origin")
TARGETS = ("target", "dst", "to", "receiver", "node2", "id2", "v", "end", "tail", "destination")

# the size, which `files.write` puts into an edge list: its last tokens may have no edges
_SIZE = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)

# the dictionary behind an edge is one word
_WORD = re.compile(r"\{.*|\S+")

# what other formats have among the first two words of a line, and the line of DIMACS that has the sizes
_FOREIGN = re.compile(
    r"(\S+ )?(\S*[,;:]|[-=<>/]{2,}|\{\S*|\*[a-z]\S*|%%MatrixMarket)( |$)|p [a-z]+ \d+ \d+$", re.I
)

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
    """The number that a text or an attribute says, else None; Python's 1_000 is none."""
    try:
        return None if "_" in str(value) else float(str(value))
    except ValueError:
        return None


def _read_table(text: str, weight: str | None, delimiter: str | None = None) -> Content:
    """A line for each edge. networkx skips a line that it cannot read, and does not keep their order."""
    size = _SIZE.match(text.split("\n", 1)[0].strip())
    rows = _split_rows(text, delimiter)
    header = _find_columns(rows, weight) if delimiter and rows else None
    src, dst, column, kind = header or (0, 1, 2, -1)
    rows = rows[1:] if header else rows
    edges: list[Edge] = []
    for line, cells in rows:
        value = cells[column] if 0 <= column < len(cells) else ""
        is_number = value == "" or value.startswith("{") or parse_number(value) is not None
        # a row of more cells may be one of a matrix
        is_foreign = _FOREIGN.match(" ".join(cells)) if delimiter is None else len(cells) > 3
        has_ends = len(cells) > max(src, dst) and cells[src] and cells[dst]
        if not has_ends or (not header and (is_foreign or not is_number)):
            raise ValueError(
                f"line {line}: expected 'src dst' or 'src dst weight', got {' '.join(cells)[:40]!r}; a .csv "
                "or .tsv may have other columns if its first line names those of the ends source and target"
            )
        if weight and value.startswith("{"):
            # networkx writes the attributes of an edge as a dictionary
            value = ast.literal_eval(value).get(weight)
        edges.append((cells[src], cells[dst], value if weight else None))
    kinds = {cells[kind].lower() for _, cells in rows if 0 <= kind < len(cells)} & {"directed", "undirected"}
    if len(kinds) > 1:
        raise ValueError("its column Type has Directed and Undirected: expected one of them in all lines")
    undirected = "undirected" in kinds if kinds else None
    return Content(edges, undirected=undirected, size=int(size[1]) if size else None)


def _split_rows(text: str, delimiter: str | None) -> list[tuple[int, list[str]]]:
    """The number and the cells of each line; comments are left out."""
    if delimiter is None:
        words = [_WORD.findall(line.partition("#")[0]) for line in text.split("\n")]
        return [(n, line) for n, line in enumerate(words, 1) if line and not re.match("%(?!%M)", line[0])]
    if delimiter == ",":
        # spreadsheets of many countries write semicolons
        first = re.search(r"(?m)^ *[^#\s].*|\Z", text) or [""]
        delimiter = max(",;\t", key=re.sub('"[^"]*"', "", first[0]).count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    return [(n, row) for n, row in rows if any(row) and not row[0].startswith("#")]


def _find_columns(rows: list[tuple[int, list[str]]], weight: str | None) -> tuple[int, int, int, int] | None:
    """The columns of sender, receiver, weight and Gephi's Type (-1: none) that a header names."""
    line, cells = rows[0]
    names = [cell.lower() for cell in cells]
    # from_node and FromNodeId are from
    stems = [re.sub(r"[\W_]|(node)?(id)?$", "", name) for name in names]
    ends = [[number for number, stem in enumerate(stems) if stem in known] for known in (SOURCES, TARGETS)]
    if len(ends[0]) == len(ends[1]) == 1:
        value, kind = (names.index(n) if n in names else -1 for n in ((weight or "").lower(), "type"))
        return ends[0][0], ends[1][0], value, kind
    if len(rows) > 1 and all(are_integers(row[:2]) for _, row in rows[1:]) and not are_integers(cells[:2]):
        raise ValueError(f"line {line}: expected the columns source and target, got {', '.join(cells)[:40]}")
    return None


def _read_adjacency_list(text: str, weight: str | None) -> Content:
    rows = [line.partition("#")[0].split() for line in text.split("\n")]
    for n, words in enumerate(rows, 1):
        if any(map(_FOREIGN.match, words)):
            raise ValueError(f"line {n}: expected 'src dst dst ...', got {' '.join(words)[:40]!r}")
    rows = [words for words in rows if words]
    return Content([(src, dst, None) for src, *receivers in rows for dst in receivers], [r[0] for r in rows])


def _read_matrix_market(text: str, weight: str | None) -> Content:
    scipy_io, sparse = importlib.import_module("scipy.io"), importlib.import_module("scipy.sparse")
    rows, columns, _, _, kind, symmetry = scipy_io.mminfo(io.StringIO(text))
    if rows != columns:
        raise ValueError(f"expected a square matrix, got {rows} x {columns}")
    matrix = sparse.coo_array(scipy_io.mmread(io.StringIO(text)))
    # scipy mirrors what a symmetric file holds
    stored = matrix.row >= (matrix.col if symmetry == "symmetric" else 0)
    values = matrix.data[stored].tolist() if weight and kind != "pattern" else repeat(None)
    edges = list(zip(matrix.row[stored].tolist(), matrix.col[stored].tolist(), values, strict=False))
    return Content(edges, undirected=symmetry == "symmetric" or None, size=rows)


def _read_xml(name: str, text: str, weight: str | None) -> Content:
    import networkx as nx

    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    graph = getattr(nx, f"read_{name}")(io.BytesIO(text.encode()), node_type=str)
    # networkx keeps the defaults beside the attributes
    for *_, attributes in graph.edges.data():
        attributes.update(graph.graph.get("edge_default", {}) | attributes)
    return _from_networkx(graph, weight)


def _read_gml(text: str, weight: str | None) -> Content:
    import networkx as nx

    # without this word networkx refuses parallel edges, which other programs write
    if not re.search(r"\smultigraph\s", text):
        text = re.sub(r"(?m)^\s*graph\s*\[", r"\g<0> multigraph 1 ", text, count=1)
    return _from_networkx(nx.parse_gml(text, label="id"), weight)


def _read_pajek(text: str, weight: str | None) -> Content:
    """networkx needs a label of its own for each vertex, and takes all sections of edges for one kind."""
    labels: dict[str, str] = {}
    edges: dict[str, list[Edge]] = {}
    section = ""
    for words in map(shlex.split, re.sub(r"(?m)^%.*$", "", text).split("\n")):
        if words and words[0].startswith("*"):
            section = words[0][1:].lower()
            if section == "vertices":
                if int(words[1]) > 10**6:
                    raise ValueError(f"it has {words[1]} vertices, at most 1,000,000 are read")
                labels = {str(number): str(number) for number in range(1, int(words[1]) + 1)}
        elif words and section == "vertices":
            labels[words[0]] = words[1] if len(words) > 1 else words[0]
        elif words:
            value = words[2] if weight and len(words) > 2 else None
            edges.setdefault(section, []).append((words[0], words[1], value))
    if len(edges) > 1 or not {*edges} <= {"arcs", "edges"}:
        raise ValueError(f"one section *arcs or *edges is read, got *{', *'.join(edges)}")
    names = [*labels.values()]
    listed = edges.get("arcs") or edges.get("edges") or []
    return Content(listed, [*labels], "edges" in edges, names if len({*names}) == len(names) else None)


def _read_json(text: str, weight: str | None) -> Content:
    """Node-link data. networkx reads no positions in place of ids, and must be told the name of the edges."""
    data = json.loads(text)
    ids = [_as_id(node.get("id", place)) for place, node in enumerate(data["nodes"])]
    node_of = dict(zip(ids, ids, strict=True))
    # version 3 of D3 counts positions, also of nodes with ids
    if not any(isinstance(name, (int, float)) for name in ids):
        node_of |= dict(enumerate(ids))
    # versions of networkx write different names
    links = data["edges"] if "edges" in data else data["links"]
    ends = [(node_of[_as_id(link["source"])], node_of[_as_id(link["target"])]) for link in links]
    edges = [(src, dst, link.get(weight)) for (src, dst), link in zip(ends, links, strict=True)]
    undirected = not data["directed"] if "directed" in data else None
    return Content(edges, ids, undirected, _choose_labels(data["nodes"]))


def _as_id(value: Any) -> Hashable:
    # JSON has no tuples, which are the nodes of a grid
    return tuple(value) if isinstance(value, list) else value


def _read_dot(text: str, weight: str | None) -> Content:
    import networkx as nx

    pydot = importlib.import_module("pydot")
    # igraph writes names of nodes so, for which pydot has no place
    text = re.sub(r"(?m)^( +)name=", r"\1label=", text)
    # pydot prints what is wrong
    with redirect_stdout(io.StringIO()) as printed:
        graphs = pydot.graph_from_dot_data(text) or []
    if len(graphs) != 1:
        reason = printed.getvalue().strip().split("\n")[-1]
        raise ValueError(reason or f"it holds {len(graphs)} graphs, expected one")
    edges = graphs[0].get_edge_list()
    # the last default before an edge counts
    for edge, default in product(edges, reversed(graphs[0].get_node("edge"))):
        if default.get_sequence() < edge.get_sequence():
            edge.get_attributes().update(default.get_attributes() | edge.get_attributes())
    ends = [end for edge in edges for end in (edge.get_source(), edge.get_destination())]
    # networkx leaves subgraphs out, and makes nodes of ports
    if graphs[0].get_subgraph_list() or any(re.match('[^"]*:|".*":', str(end)) for end in ends):
        raise ValueError("it has subgraphs or ports: write each edge from one node to another")
    graph = nx.nx_pydot.from_pydot(graphs[0])
    for *_, attributes in [*graph.nodes.data(), *graph.edges.data()]:
        attributes.update({name: str(value).strip('"') for name, value in attributes.items()})
    return _from_networkx(graph, weight)


def _from_networkx(graph: Any, weight: str | None) -> Content:
    labels = _choose_labels([attributes for _, attributes in graph.nodes.data()])
    # With weight=None networkx gives triples, too.
    return Content([*graph.edges(data=weight)], [*graph], not graph.is_directed(), labels)


def _choose_labels(nodes: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The attribute "label", or else "name", of the nodes if each has one of its own."""
    for name in ("label", "name"):
        words = [str(node.get(name, "")) for node in nodes]
        if "" not in words and len({*words}) == len(words):
            return words
    return None


READERS: Mapping[str, Callable[[str, str | None], Content]] = {
    **dict.fromkeys((".edges", ".edgelist"), _read_table),
    ".adjlist": _read_adjacency_list,
    ".graphml": partial(_read_xml, "graphml"),
    ".gexf": partial(_read_xml, "gexf"),
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".mtx": _read_matrix_market,
    ".gml": _read_gml,
    **dict.fromkeys((".net", ".paj", ".pajek"), _read_pajek),
    ".json": _read_json,
    **dict.fromkeys((".dot", ".gv"), _read_dot),
}
