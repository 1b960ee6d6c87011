"""The graphs of a comparison: from expressions without a size, from files, or as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gnn_attention import algebra, patterns
from gnn_attention._support.checks import quoted
from gnn_attention.convert import expressions, files
from gnn_attention.graph import TokenGraph

FILE = "file:"  # before the name of a file in the place of an expression

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
        expected = "expressions with ; between them, or a list of expressions and graphs"
        raise TypeError(f"graphs must be {expected}, got {quoted(graphs)}")
    items: Sequence[str | TokenGraph] = graphs.split(";") if isinstance(graphs, str) else graphs
    items = [item.strip() if isinstance(item, str) else item for item in items]
    found = [_contender(item, length, heads) for item in items if item != ""]
    if not found:
        expected = "name at least one graph, such as 'causal; window(64)'"
        raise ValueError(f"graphs must {expected}, got {quoted(graphs)}")
    for place, one in enumerate(found):
        if same := next((other for other in found[:place] if other.key == one.key), None):
            both = f"{quoted(same.text)} and {quoted(one.text)}"
            raise ValueError(f"graphs: {both} have the same {length} tokens and edges, leave one out")
    return found


def _contender(item: str | TokenGraph, length: int, heads: int) -> Contender:
    if isinstance(item, TokenGraph):
        name, graph = item.name, item
    elif isinstance(item, str) and item.startswith(FILE):
        name, graph = item, _from_file(item.removeprefix(FILE).strip(), length)
    else:
        name, graph = item, _from_expression(item, length)
    _check_graph(name, graph, length, heads)
    return Contender(name, graph, _key(graph))


def _from_expression(text: str, length: int) -> TokenGraph:
    try:
        return expressions.parse(text, n=length)
    except ValueError as error:
        raise ValueError(f"graphs: {quoted(text)}: {error}") from error


def _from_file(path: str, length: int) -> TokenGraph:
    graph = files.read(path)
    if graph.num_dst < length:
        few = f"{graph.num_dst} tokens, fewer than a window"
        raise ValueError(f"{path} has {few}: take a length of at most {graph.num_dst}")
    return graph if graph.num_dst == length else algebra.restrict(graph, range(length))


def _check_graph(name: str, graph: TokenGraph, length: int, heads: int) -> None:
    if (graph.num_dst, graph.num_src, graph.dst_offset, graph.src_offset) != (length, length, 0, 0):
        raise ValueError(
            f"graphs: {quoted(name)} must have the {length} tokens of a window, got {graph!r}; "
            "leave the number of tokens out of the expression, or take another length"
        )
    if graph.batch is not None or graph.heads not in (None, heads):
        expected = f"one graph, or one for each of the {heads} heads"
        raise ValueError(f"graphs: {quoted(name)} must be {expected}, got {graph!r}")
    later = (graph - patterns.causal(length)).num_edges
    if later:
        raise ValueError(
            f"graphs: {quoted(name)} has {later:,} edges from a later token (src > dst), which give the "
            "target away; write '(...) & causal' for an expression, take lines with src > dst out of a file"
        )


def _key(graph: TokenGraph) -> str:
    digest = hashlib.sha256(f"{graph.num_dst} tokens, {graph.heads or 1} heads".encode())
    for start in range(0, graph.num_dst, 256):
        digest.update(graph.rows(start, min(start + 256, graph.num_dst)).mask().numpy().tobytes())
    return digest.hexdigest()[:16]
