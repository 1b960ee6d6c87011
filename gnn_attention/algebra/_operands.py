"""Helpers for all functions here: they check operands, collect edge lists and name results."""

from collections.abc import Sequence

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, text


def get_sizes(function: str, *graphs: TokenGraph) -> dict[str, int | None]:
    """Return the heads and the batch of ``graphs``; raise an error if these differ."""
    for graph in graphs:
        if isinstance(graph, (list, tuple)):
            raise TypeError(f"{function} takes graphs, got a {type(graph).__name__}; use {function}(*graphs)")
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"{function} takes graphs (TokenGraph), got {type(graph).__name__}")
    if not graphs:
        raise ValueError(f"{function} needs at least one graph, got none")
    sizes: dict[str, int | None] = {}
    for axis in ("heads", "batch"):
        graph_by_size = {getattr(graph, axis): graph for graph in graphs if getattr(graph, axis) is not None}
        if len(graph_by_size) > 1:
            first, second, *_ = graph_by_size.values()
            raise ValueError(
                f"{function} needs graphs with the same {axis}, got {first!r} and {second!r}; "
                "select(batch, head) returns one slice of a graph"
            )
        sizes[axis] = next(iter(graph_by_size), None)
    return sizes


def check_square(function: str, graph: TokenGraph, advice: str) -> None:
    """Raise an error with ``advice`` unless ``graph`` is a square graph."""
    get_sizes(function, graph)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        raise ValueError(f"{function} needs the same tokens on both sides, got {graph!r}; {advice}")


def check_no_offsets(function: str, *graphs: TokenGraph) -> None:
    """Raise ValueError unless all ``graphs`` begin at position 0."""
    for graph in graphs:
        if graph.dst_offset or graph.src_offset:
            raise ValueError(
                f"{function} needs graphs that begin at position 0, got {graph!r}; "
                f"restrict(graph, range({graph.num_dst}), range({graph.num_src})) removes the offsets"
            )


def check_positions(
    name: str, values: object, size: int, kind: str = "positions", any_order: bool = False
) -> list[int]:
    """Return ``values`` as integers in ``0 .. size - 1``; errors call them ``kind``."""
    positions = checks.integers(name, values, kind, any_order)
    if outside := [position for position in positions if not 0 <= position < size]:
        raise IndexError(f"{name} must be {kind} in 0 .. {size - 1}, got {outside[0]}")
    return positions


def collect_edge_lists(graphs: Sequence[TokenGraph]) -> list[Tensor] | None:
    """Return the edge lists of all graphs, or None if any graph stores no list."""
    lists = [edges for graph in graphs if (edges := graph.edges.unique_edges.listed()) is not None]
    return lists if len(lists) == len(graphs) else None


def format_call(function: str, graphs: Sequence[TokenGraph], *arguments: str) -> str:
    """Return a call as Python text, without empty ``arguments``; more than 6 graphs are only counted."""
    names = [graph.name for graph in graphs]
    names = names if len(names) <= 6 else [text.format_list(names, "graphs")]
    return f"{function}({', '.join([*names, *filter(None, arguments)])})"
