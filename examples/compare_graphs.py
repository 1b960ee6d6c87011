"""Read the graphs of a comparison: expressions without a size, files, or ``TokenGraph`` objects."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gnn_attention import algebra, patterns
from gnn_attention._support.checks import quote
from gnn_attention.convert import expressions, files
from gnn_attention.graph import TokenGraph

# This prefix marks the name of a file in place of an expression.
FILE = "file:"

GRAPHS_HELP = "expressions without a size, or file:NAME (.edges, .adjlist, .graphml), separated by ;"

Graphs = str | Sequence[str | TokenGraph]


@dataclass(frozen=True)
class Contender:
    """A graph and its name; graphs with the same edges have the same ``key``."""

    text: str
    graph: TokenGraph
    key: str


def contenders(graphs: Graphs, length: int, heads: int) -> list[Contender]:
    """Return the graphs of a window of ``length`` tokens; ValueError for an invalid or repeated graph."""
    if not isinstance(graphs, (str, list, tuple)):
        raise TypeError(
            "graphs must be expressions separated by ;, or a list of expressions and graphs, "
            f"got {quote(graphs)}"
        )
    items: Sequence[str | TokenGraph] = graphs.split(";") if isinstance(graphs, str) else graphs
    texts = (item.strip() if isinstance(item, str) else item for item in items)
    by_key: dict[str, Contender] = {}
    for contender in (_contender(item, length, heads) for item in texts if item != ""):
        if duplicate := by_key.get(contender.key):
            raise ValueError(
                f"graphs: {quote(duplicate.text)} and {quote(contender.text)} have the same {length} tokens "
                "and edges: leave one out"
            )
        by_key[contender.key] = contender
    if not by_key:
        raise ValueError(f"graphs must name a graph, such as 'causal; window(64)', got {quote(graphs)}")
    return list(by_key.values())


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
        raise ValueError(f"{path} has {graph.num_dst} tokens, fewer than a window: use at most this length")
    return graph if graph.num_dst == length else algebra.restrict(graph, range(length))


def _check_graph(name: str, graph: TokenGraph, length: int, heads: int) -> None:
    name = f"graphs: {quote(name)}"
    if (graph.num_dst, graph.num_src, graph.dst_offset, graph.src_offset) != (length, length, 0, 0):
        raise ValueError(
            f"{name} must have the {length} tokens of a window, got {graph!r}: leave the number of tokens "
            "out of the expression, or use another length"
        )
    if graph.batch is not None or graph.heads not in (None, heads):
        raise ValueError(f"{name} must be one graph, or one for each of the {heads} heads, got {graph!r}")
    if num_later := (graph - patterns.causal(length)).num_edges:
        raise ValueError(
            f"{name} has {num_later:,} edges from a later token (src > dst), which is a target of the loss: "
            "write '(...) & causal' for an expression, remove lines with src > dst from a file"
        )
