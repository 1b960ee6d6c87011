"""The graphs of a comparison: from expressions without a size, from files, or as they are."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gnn_attention import algebra, patterns
from gnn_attention._support.checks import quote
from gnn_attention.convert import expressions, files
from gnn_attention.graph import TokenGraph

FILE = "file:"  # before the name of a file in the place of an expression

LISTED = "expressions without the number of tokens, or file:NAME (.edges, .adjlist, .graphml), split by ;"

Graphs = str | Sequence[str | TokenGraph]


@dataclass(frozen=True)
class Contender:
    """A graph and its name; ``key`` is the same for the same edges."""

    text: str
    graph: TokenGraph
    key: str


def contenders(graphs: Graphs, length: int, heads: int) -> list[Contender]:
    """The graphs of a window of ``length`` tokens; ValueError for a faulty or repeated one."""
    if not isinstance(graphs, (str, list, tuple)):
        got = f"or a list of expressions and graphs, got {quote(graphs)}"
        raise TypeError(f"graphs must be expressions with ; between them, {got}")
    items: Sequence[str | TokenGraph] = graphs.split(";") if isinstance(graphs, str) else graphs
    stripped = (item.strip() if isinstance(item, str) else item for item in items)
    found: dict[str, Contender] = {}
    for one in (_contender(item, length, heads) for item in stripped if item != ""):
        if same := found.get(one.key):
            both = f"{quote(same.text)} and {quote(one.text)}"
            raise ValueError(f"graphs: {both} have the same {length} tokens and edges, leave one out")
        found[one.key] = one
    if not found:
        got = f"such as 'causal; window(64)', got {quote(graphs)}"
        raise ValueError(f"graphs must name at least one graph, {got}")
    return list(found.values())


def _contender(item: str | TokenGraph, length: int, heads: int) -> Contender:
    if isinstance(item, TokenGraph):
        name, graph = item.name, item
    elif isinstance(item, str) and item.startswith(FILE):
        name, graph = item, _from_file(item.removeprefix(FILE).strip(), length)
    else:
        try:
            name, graph = item, expressions.parse(item, n=length)
        except ValueError as error:
            raise ValueError(f"graphs: {quote(item)}: {error}") from error
    _check_graph(name, graph, length, heads)
    digest = hashlib.sha256(f"{graph.num_dst} tokens, {graph.heads or 1} heads".encode())
    for start in range(0, graph.num_dst, 256):
        digest.update(graph.rows(start, min(start + 256, graph.num_dst)).mask().numpy().tobytes())
    return Contender(name, graph, digest.hexdigest()[:16])


def _from_file(path: str, length: int) -> TokenGraph:
    graph = files.load(path, weight=None).graph
    if graph.num_dst < length:
        advice = f"take a length of at most {graph.num_dst}"
        raise ValueError(f"{path} has {graph.num_dst} tokens, fewer than a window: {advice}")
    return graph if graph.num_dst == length else algebra.restrict(graph, range(length))


def _check_graph(name: str, graph: TokenGraph, length: int, heads: int) -> None:
    name = f"graphs: {quote(name)}"
    if (graph.num_dst, graph.num_src, graph.dst_offset, graph.src_offset) != (length, length, 0, 0):
        got = f"got {graph!r}; leave their number out of the expression, or take another length"
        raise ValueError(f"{name} must have the {length} tokens of a window, {got}")
    if graph.batch is not None or graph.heads not in (None, heads):
        raise ValueError(f"{name} must be one graph, or one for each of the {heads} heads, got {graph!r}")
    if later := (graph - patterns.causal(length)).num_edges:
        advice = "write '(...) & causal' for an expression, take lines with src > dst out of a file"
        raise ValueError(f"{name} has {later:,} edges from a later token (src > dst), the target: {advice}")
