"""Read graph files. Edge lists and tables are parsed here; networkx or scipy parses the others."""

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

MAX_TOKENS = 2**24
# Each edge stores its place in the file under this key, because networkx groups edges by sender.
ORDER_KEY = "place in the file"

# The header of a table may use these names for the columns of senders and receivers.
SRC_NAMES = ("source", "src", "from", "sender", "node1", "id1", "u", "start", "head", "origin")
DST_NAMES = ("target", "dst", "to", "receiver", "node2", "id2", "v", "end", "tail", "destination")
# The first line of an edge list may state the number of tokens, as some tokens may have no edges.
_NUM_TOKENS = re.compile(r"#\s*tokens\s+(\d{1,18})\s*$", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
# A dictionary of edge attributes may contain spaces, but it is one cell.
_CELL = re.compile(r"\{.*|\S+")
# Lines of other formats begin like this. A DIMACS line with sizes must match as a whole.
_OTHER_FORMAT = re.compile(
    r"(\S+ )?(\S*[,;:]|[-=<>/]{2,}|\{\S*|\*[a-z]\S*|%%MatrixMarket)( |$)|p [a-z]+ \d+ \d+$", re.I
)


def are_integers(labels: Iterable[str]) -> bool:
    return all(map(_INTEGER.fullmatch, labels))


def parse_number(value: object) -> float | None:
    """Convert text or an attribute to a float. Return None if it has a "_" or is not a number."""
    try:
        return None if "_" in str(value) else float(str(value))
    except ValueError:
        return None


def _check_size(num_tokens: int) -> int:
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"it has {num_tokens:,} tokens, but at most {MAX_TOKENS:,} can be read")
    return num_tokens


def add_tokens(network: Any, num_tokens: int) -> None:
    """Add each token of 0 .. count - 1 that the network lacks because it has no edges."""
    labels = {str(node) for node in network}
    network.add_nodes_from(label for label in map(str, range(_check_size(num_tokens))) if label not in labels)
    if len(network) > num_tokens:
        node = next(x for x in network if not (str(x).isdecimal() and int(x) < num_tokens))
        raise ValueError(f"its tokens are 0 .. {num_tokens - 1}, but it names a token {node}")


def _read_table(text: str, weight: str | None, graph: Any, delimiter: str | None = None) -> Any:
    """Read one edge from each line and refuse bad lines, which networkx would silently skip."""
    rows = _split_rows(text, delimiter)
    header = _find_columns(rows, weight) if delimiter and rows else None
    src_column, dst_column, weight_column, type_column = header or (0, 1, 2, -1)
    rows = rows[1:] if header else rows
    edges: list[tuple[str, str, dict[str, Any]]] = []
    for line, cells in rows:
        value = cells[weight_column] if 0 <= weight_column < len(cells) else ""
        is_number = value == "" or value.startswith("{") or parse_number(value) is not None
        # A row of more than three cells may be a row of a matrix.
        is_other_format = _OTHER_FORMAT.match(" ".join(cells)) if delimiter is None else len(cells) > 3
        has_endpoints = len(cells) > max(src_column, dst_column) and cells[src_column] and cells[dst_column]
        if not has_endpoints or (not header and (is_other_format or not is_number)):
            raise ValueError(
                f"line {line}: expected 'src dst' or 'src dst weight', got {' '.join(cells)[:40]!r}; a .csv "
                "or .tsv may have other columns if its header names two of them source and target"
            )
        # networkx writes the attributes of an edge as a dictionary.
        attributes = ast.literal_eval(value) if value.startswith("{") else {str(weight): value}
        edges.append((cells[src_column], cells[dst_column], {**attributes, ORDER_KEY: line}))
    types = {cells[type_column].lower() for _, cells in rows if 0 <= type_column < len(cells)}
    types &= {"directed", "undirected"}
    if len(types) > 1:
        raise ValueError("its column Type holds Directed and Undirected, expected one of them")
    network = graph.to_undirected() if "undirected" in types else graph.to_directed() if types else graph
    network.add_edges_from(edges)
    if size := _NUM_TOKENS.match(text.split("\n", 1)[0].strip()):
        add_tokens(network, int(size[1]))
    return network


def _split_rows(text: str, delimiter: str | None) -> list[tuple[int, list[str]]]:
    """Return the line number and the cells of each row, without comments and empty rows."""
    if delimiter is None:
        lines = [_CELL.findall(line.partition("#")[0]) for line in text.split("\n")]
        # Lines that begin with % are comments, except a MatrixMarket header, which is refused.
        return [(n, row) for n, row in enumerate(lines, 1) if row and not re.match("%(?!%M)", row[0])]
    if delimiter == ",":
        # Spreadsheets write semicolons in countries whose decimal separator is a comma.
        first_line = re.search(r"(?m)^ *[^#\s].*|\Z", text) or [""]
        delimiter = max(",;\t", key=re.sub('"[^"]*"', "", first_line[0]).count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    return [(n, row) for n, row in rows if any(row) and not row[0].startswith("#")]


def _find_columns(rows: list[tuple[int, list[str]]], weight: str | None) -> tuple[int, int, int, int] | None:
    """Return the indices of source, target, weight (or -1) and Type (or -1), or None without a header."""
    line, cells = rows[0]
    names = [cell.lower() for cell in cells]
    # "from_node" and "FromNodeId" count as "from".
    stems = [re.sub(r"[\W_]|(node)?(id)?$", "", name) for name in names]
    source_columns = [column for column, stem in enumerate(stems) if stem in SRC_NAMES]
    target_columns = [column for column, stem in enumerate(stems) if stem in DST_NAMES]
    if len(source_columns) == len(target_columns) == 1:
        optional = [names.index(x) if x in names else -1 for x in ((weight or "").lower(), "type")]
        return source_columns[0], target_columns[0], optional[0], optional[1]
    if len(rows) > 1 and all(are_integers(row[:2]) for _, row in rows[1:]) and not are_integers(cells[:2]):
        raise ValueError(f"line {line}: expected the columns source and target, got {', '.join(cells)[:40]}")
    return None


def _read_adjacency_list(text: str, weight: str | None, graph: Any) -> Any:
    rows = [line.partition("#")[0] for line in text.split("\n")]
    for n, row in enumerate(rows, 1):
        if any(map(_OTHER_FORMAT.match, row.split())):
            raise ValueError(f"line {n}: expected 'src dst dst ...', got {row.strip()[:40]!r}")
    return nx.parse_adjlist(rows, create_using=graph)


def _read_matrix_market(text: str, weight: str | None, graph: Any) -> Any:
    scipy_io, sparse = importlib.import_module("scipy.io"), importlib.import_module("scipy.sparse")
    num_rows, num_columns, *_, kind, symmetry = scipy_io.mminfo(io.StringIO(text))
    if num_rows != num_columns:
        raise ValueError(f"expected a square matrix, got {num_rows} x {num_columns}")
    _check_size(num_rows)
    matrix = sparse.coo_array(scipy_io.mmread(io.StringIO(text)))
    attribute = None if kind == "pattern" else weight
    network = graph.to_undirected() if symmetry == "symmetric" else graph
    return nx.from_scipy_sparse_array(matrix, False, network, attribute)


def _read_xml(format_name: str, text: str, weight: str | None, graph: Any) -> Any:
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: save each to its own file")
    network = getattr(nx, f"read_{format_name}")(io.BytesIO(text.encode()), node_type=str)
    # networkx stores default attributes with the graph, not with its edges.
    for *_, attributes in network.edges.data():
        attributes.update(network.graph.get("edge_default", {}) | attributes)
    return network


def _read_gml(text: str, weight: str | None, graph: Any) -> Any:
    # Without the word "multigraph" networkx refuses parallel edges, which other programs write.
    if not re.search(r"\smultigraph\s", text):
        text = re.sub(r"(?m)^\s*graph\s*\[", r"\g<0> multigraph 1 ", text, count=1)
    return nx.parse_gml(text, label="id")


def _read_json(text: str, weight: str | None, graph: Any) -> Any:
    """Read node-link data; a node without an id is named by its index."""
    data = json.loads(text)
    # Different versions of networkx read the edges from different keys.
    links = data["edges"] if "edges" in data else data["links"]
    links = [link | {ORDER_KEY: index} for index, link in enumerate(links)]
    node_link_data = data | {"edges": links, "links": links, "multigraph": True}
    network = nx.node_link_graph(node_link_data, directed=graph.is_directed())
    if len(network) != len(data["nodes"]):
        raise ValueError("two nodes have the same id, or an edge names an id that no node has")
    return network


# A reader gets a file's text, the weight attribute and an empty graph; it returns a networkx graph.
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
