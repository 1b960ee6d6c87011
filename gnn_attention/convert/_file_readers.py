"""Readers of each kind of file: tables are read here, the others by networkx, scipy and pydot."""

import ast
import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import product, repeat
from typing import Any, NamedTuple
from xml.etree import ElementTree

# of a file
MOST_TOKENS = 2**24

# names of columns; those of the first four pairs are mixed, too
SOURCES = ("source", "src", "from", "sender", "node1", "id1", "u", "start", "head", "origin")
TARGETS = ("target", "dst", "to", "receiver", "node2", "id2", "v", "end", "tail", "destination")
ENDS = [*zip(SOURCES, TARGETS, strict=True), *product(SOURCES[:4], TARGETS[:4])]

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
    # three rows of three numbers may be edges with weights
    is_square = not header and len(rows) > 3 and all(len(cells) == len(rows) for _, cells in rows)
    if is_square and all(parse_number(cell) is not None for _, cells in rows for cell in cells):
        matrix = "convert.from_scipy(np.loadtxt(path, delimiter=...), rows=...)"
        raise ValueError(f"it is a matrix of {len(rows)} x {len(rows)} numbers: use {matrix}")
    edges: list[Edge] = []
    for line, cells in rows:
        if len(cells) <= max(src, dst) or not (cells[src] and cells[dst]):
            raise ValueError(f"line {line}: expected 'src dst', got {' '.join(cells)[:40]!r} alone")
        value = cells[column] if 0 <= column < len(cells) else ""
        is_number = value == "" or value.startswith("{") or parse_number(value) is not None
        is_foreign = delimiter is None and _FOREIGN.match(" ".join(cells))
        if not header and (is_foreign or not is_number):
            raise ValueError(
                f"line {line}: expected 'src dst' or 'src dst weight', got {' '.join(cells)[:40]!r}; a .csv "
                "or .tsv may have other columns if its first line names those of the ends source and target"
            )
        if weight and value.startswith("{"):
            value = _look_up(weight, value, line)
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
    for words, (src, dst) in product((names, stems), ENDS):
        if words.count(src) == words.count(dst) == 1:
            value, kind = (names.index(n) if n in names else -1 for n in ((weight or "").lower(), "type"))
            return words.index(src), words.index(dst), value, kind
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
    rows = [line.partition("#")[0].split() for line in text.split("\n")]
    for n, words in enumerate(rows, 1):
        if any(map(_FOREIGN.match, words)):
            raise ValueError(f"line {n}: expected 'src dst dst ...', got {' '.join(words)[:40]!r}")
    rows = [words for words in rows if words]
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


def _read_graphml(text: str, weight: str | None) -> Content:
    import networkx as nx

    return _read_xml(partial(nx.parse_graphml, node_type=str), text, weight)


def _read_gexf(text: str, weight: str | None) -> Content:
    import networkx as nx

    return _read_xml(lambda text: nx.read_gexf(io.BytesIO(text.encode()), node_type=str), text, weight)


def _read_xml(parse: Callable[[str], Any], text: str, weight: str | None) -> Content:
    # networkx parses with Python's own XML parser, which would follow the entities of a DOCTYPE
    if forbidden := re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ValueError(
            f"it has a {forbidden[1].upper()}, which may define entities without limit: remove it"
        )
    if len(re.findall(r"<(?:\w+:)?graph[\s/>]", text)) > 1:
        raise ValueError("it holds several graphs: give each a file of its own")
    # networkx has no default of a key for all
    graph = parse(re.sub(r"""(<(?:\w+:)?key\s[^<>]*\bfor=["'])all\b""", r"\1edge", text))
    for kind, items in (("node", graph.nodes.data()), ("edge", graph.edges.data())):
        for *_, attributes in items:
            attributes.update(graph.graph.get(f"{kind}_default", {}) | attributes)
    elements = ElementTree.fromstring(text).iter()
    ids = {item.get("id") for item in elements if item.tag.rpartition("}")[2] == "node"}
    return _from_networkx(graph, weight, ids)


def _read_gml(text: str, weight: str | None) -> Content:
    import networkx as nx

    # without this word networkx refuses parallel edges, which other programs write
    if not re.search(r"\smultigraph\s", text):
        text = re.sub(r"(?m)^\s*graph\s*\[", r"\g<0> multigraph 1 ", text, count=1)
    return _from_networkx(nx.parse_gml(text, label="id"), weight)


def _read_pajek(text: str, weight: str | None) -> Content:
    """networkx takes whatever follows the first section of edges for edges of its kind."""
    import networkx as nx

    text = re.sub(r"(?im)^\*(arcs|edges)\b[^\n]*\n(?=\s*(\*|\Z))", "", text)
    sections = re.findall(r"(?im)^\*(?!network|vertices)(\w+)", text)
    if len(sections) > 1 or not {section.lower() for section in sections} <= {"arcs", "edges", "matrix"}:
        raise ValueError(f"one section *arcs, *edges or *matrix is read, got *{', *'.join(sections)}")
    count = re.search(r"(?im)^\*vertices\s+(\d+)[ \t]*$", text)
    graph = nx.parse_pajek(_add_labels(text, count)) if count else ()
    if not count or len(graph) != int(count[1]):
        raise ValueError(
            "expected a line '*vertices n', and n nodes of one kind, each with a label of its own"
        )
    return _from_networkx(graph, weight)


def _add_labels(text: str, head: re.Match[str]) -> str:
    """Vertices without a label, or without a line, are called by their numbers."""
    lines, star, rest = text[head.end() :].partition("\n*")
    labels = dict((line.split(None, 1) * 2)[:2] for line in lines.split("\n") if line.strip())
    if len(labels) < int(head[1]):
        # networkx needs seconds for as many, and the file need not be long
        labels = {n: n for n in map(str, range(1, min(int(head[1]), 10**5) + 1))} | labels
        if len(labels) != int(head[1]):
            raise ValueError("expected a label of each vertex, or at most 100,000 vertices 1 .. n")
    lines = "".join(f"\n{number} {label}" for number, label in labels.items())
    return text[: head.end()] + lines + star + rest


def _read_json(text: str, weight: str | None) -> Content:
    import networkx as nx

    data = json.loads(text)
    if not isinstance(data, dict) or "nodes" not in data or not {"edges", "links"} & {*data}:
        raise ValueError("expected node-link data, an object with 'nodes' and 'links' or 'edges'")
    # versions of networkx differ in the name
    edges = data["edges"] if "edges" in data else data["links"]
    are_objects = all(isinstance(item, dict) for item in [*data["nodes"], *edges])
    if not are_objects or not all({"source", "target"} <= {*edge} for edge in edges):
        raise ValueError("expected an object for each node, and one with 'source' and 'target' for each link")
    nodes = [*nx.node_link_graph(data | {"edges": [], "links": []})]
    ends = [edge[end] for edge in edges for end in ("source", "target")]
    # version 3 of D3 counts positions, also of nodes with ids
    is_counted = len(nodes) == len(data["nodes"]) and not any(isinstance(n, (int, float)) for n in nodes)
    if is_counted and all(type(end) is int and 0 <= end < len(nodes) for end in ends):
        edges = [edge | {end: nodes[edge[end]] for end in ("source", "target")} for edge in edges]
    graph = nx.node_link_graph({"directed": True} | data | {"edges": edges, "links": edges})
    content = _from_networkx(graph, weight, {*nodes})
    return content if "directed" in data else content._replace(undirected=None)


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


def _from_networkx(graph: Any, weight: str | None, ids: Collection[object] | None = None) -> Content:
    """``ids`` are the nodes that the file declares; None where an edge declares its ends."""
    others = [str(node)[:40] for node in graph if ids is not None and node not in ids]
    if others:
        raise ValueError(f"an edge names the node {others[0]!r}, which is not the id of a node")
    labels = None
    for name in ("name", "label"):
        words = [str(word) for _, word in graph.nodes(data=name) if word not in (None, "")]
        labels = words if len({*words}) == len(graph) else labels
    # With weight=None networkx gives triples, too.
    return Content([*graph.edges(data=weight)], [*graph], not graph.is_directed(), labels)


READERS: Mapping[str, Callable[[str, str | None], Content]] = {
    **dict.fromkeys((".edges", ".edgelist"), _read_table),
    ".adjlist": _read_adjacency_list,
    ".graphml": _read_graphml,
    ".gexf": _read_gexf,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".mtx": _read_matrix_market,
    ".gml": _read_gml,
    **dict.fromkeys((".net", ".paj", ".pajek"), _read_pajek),
    ".json": _read_json,
    **dict.fromkeys((".dot", ".gv"), _read_dot),
}
