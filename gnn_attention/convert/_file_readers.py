"""Readers of each kind of file: lists and tables are read here, others by networkx and scipy."""

import ast
import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import networkx as nx

# of a file
MOST_TOKENS = 2**24
# the attribute of an edge that says where the file names it, for networkx lists edges by sender
PLACE = "place in the file"

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


def are_integers(words: Iterable[str]) -> bool:
    return all(map(_INTEGER.fullmatch, words))


def parse_number(value: object) -> float | None:
    """The number that a text or an attribute says, else None; Python's 1_000 is none."""
    try:
        return None if "_" in str(value) else float(str(value))
    except ValueError:
        return None


def _check_count(count: int) -> int:
    if count > MOST_TOKENS:
        raise ValueError(f"it has {count:,} tokens, at most {MOST_TOKENS:,} are read")
    return count


def add_tokens(network: Any, count: int) -> None:
    """Add those of the tokens 0 .. count - 1 that have no edges."""
    known = {str(node) for node in network}
    network.add_nodes_from(name for name in map(str, range(_check_count(count))) if name not in known)
    if len(network) > count:
        outside = next(node for node in network if not (str(node).isdecimal() and int(node) < count))
        raise ValueError(f"its tokens are 0 .. {count - 1}, but it names a token {outside}")


def _read_table(text: str, weight: str | None, empty: Any, delimiter: str | None = None) -> Any:
    """A line for each edge; networkx skips a line that it cannot read."""
    rows = _split_rows(text, delimiter)
    header = _find_columns(rows, weight) if delimiter and rows else None
    src, dst, column, kind = header or (0, 1, 2, -1)
    rows = rows[1:] if header else rows
    edges: list[tuple[str, str, dict[str, Any]]] = []
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
        # networkx writes the attributes of an edge as a dictionary
        attributes = ast.literal_eval(value) if value.startswith("{") else {str(weight): value}
        edges.append((cells[src], cells[dst], {**attributes, PLACE: line}))
    kinds = {cells[kind].lower() for _, cells in rows if 0 <= kind < len(cells)} & {"directed", "undirected"}
    if len(kinds) > 1:
        raise ValueError("its column Type has Directed and Undirected: expected one of them in all lines")
    network = empty.to_undirected() if "undirected" in kinds else empty.to_directed() if kinds else empty
    network.add_edges_from(edges)
    if size := _SIZE.match(text.split("\n", 1)[0].strip()):
        add_tokens(network, int(size[1]))
    return network


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


def _read_adjacency_list(text: str, weight: str | None, empty: Any) -> Any:
    rows = [line.partition("#")[0] for line in text.split("\n")]
    for n, row in enumerate(rows, 1):
        if any(map(_FOREIGN.match, row.split())):
            raise ValueError(f"line {n}: expected 'src dst dst ...', got {row.strip()[:40]!r}")
    return nx.parse_adjlist(rows, create_using=empty)


def _read_matrix_market(text: str, weight: str | None, empty: Any) -> Any:
    scipy_io, sparse = importlib.import_module("scipy.io"), importlib.import_module("scipy.sparse")
    rows, columns, *_, kind, symmetry = scipy_io.mminfo(io.StringIO(text))
    if rows != columns:
        raise ValueError(f"expected a square matrix, got {rows} x {columns}")
    _check_count(rows)
    matrix = sparse.coo_array(scipy_io.mmread(io.StringIO(text)))
    name = None if kind == "pattern" else weight
    kind_of_graph = empty.to_undirected() if symmetry == "symmetric" else empty
    return nx.from_scipy_sparse_array(matrix, False, kind_of_graph, name)


def _read_xml(name: str, text: str, weight: str | None, empty: Any) -> Any:
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    network = getattr(nx, f"read_{name}")(io.BytesIO(text.encode()), node_type=str)
    # networkx keeps the defaults beside the attributes
    for *_, attributes in network.edges.data():
        attributes.update(network.graph.get("edge_default", {}) | attributes)
    return network


def _read_gml(text: str, weight: str | None, empty: Any) -> Any:
    # without this word networkx refuses parallel edges, which other programs write
    if not re.search(r"\smultigraph\s", text):
        text = re.sub(r"(?m)^\s*graph\s*\[", r"\g<0> multigraph 1 ", text, count=1)
    return nx.parse_gml(text, label="id")


def _read_json(text: str, weight: str | None, empty: Any) -> Any:
    """Node-link data; nodes without ids have their positions."""
    data = json.loads(text)
    # versions of networkx write and read different names
    links = data["edges"] if "edges" in data else data["links"]
    links = [link | {PLACE: place} for place, link in enumerate(links)]
    whole = data | {"edges": links, "links": links, "multigraph": True}
    network = nx.node_link_graph(whole, directed=empty.is_directed())
    if len(network) != len(data["nodes"]):
        raise ValueError("two nodes have the same id, or an edge names an id that no node has")
    return network


# each reads a text; the graph is ``empty``, or one of its kind where the file does not say its own
READERS: Mapping[str, Callable[[str, str | None, Any], Any]] = {
    **dict.fromkeys((".edges", ".edgelist"), _read_table),
    ".adjlist": _read_adjacency_list,
    ".graphml": partial(_read_xml, "graphml"),
    ".gexf": partial(_read_xml, "gexf"),
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".mtx": _read_matrix_market,
    ".gml": _read_gml,
    ".json": _read_json,
}
