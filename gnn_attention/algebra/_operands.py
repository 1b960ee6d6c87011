"""Checks of the operands of the algebra: which graphs fit together, their lists, the name of the result."""

from collections.abc import Sequence

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, text


def varies(function: str, *graphs: TokenGraph) -> dict[str, int | None]:
    """Heads and batch of a graph made of these; TypeError for no graph, ValueError where sizes disagree."""
    for graph in graphs:
        if not isinstance(graph, TokenGraph):
            hint = f"; a list of graphs is {function}(*graphs)" if isinstance(graph, Sequence) else ""
            raise TypeError(f"{function} takes graphs (TokenGraph), got {type(graph).__name__}{hint}")
    if not graphs:
        raise ValueError(f"{function} needs at least one graph, got none: it would have no nodes to stand on")
    sizes: dict[str, int | None] = {}
    for word in ("heads", "batch"):
        found = {getattr(graph, word): graph for graph in graphs if getattr(graph, word) is not None}
        if len(found) > 1:
            shown = " and ".join(repr(graph) for graph in list(found.values())[:2])
            hint = "select(batch, head) takes one of them"
            raise ValueError(f"{function} needs graphs of the same {word}, got {shown}; {hint}")
        sizes[word] = next(iter(found), None)
    return sizes


def square(function: str, graph: TokenGraph, instead: str) -> dict[str, int | None]:
    """:func:`varies` of a graph of the same tokens as receivers and senders; ``instead`` says what to do."""
    sizes = varies(function, graph)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        raise ValueError(
            f"{function} needs the same tokens as receivers and senders, got {graph!r}; {instead}"
        )
    return sizes


def from_zero(function: str, *graphs: TokenGraph) -> dict[str, int | None]:
    """:func:`varies` of graphs that begin at position 0, as the tokens of the result are others."""
    sizes = varies(function, *graphs)
    for graph in graphs:
        if graph.dst_offset or graph.src_offset:
            hint = f"restrict(graph, range({graph.num_dst}), range({graph.num_src})) forgets the positions"
            raise ValueError(f"{function} needs graphs that begin at position 0, got {graph!r}; {hint}")
    return sizes


def positions(
    name: str, values: object, count: int, wanted: str = "positions", any_order: bool = False
) -> list[int]:
    """Integers in 0 .. count - 1; IndexError says what the argument ``name`` must be."""
    numbers = checks.integers(name, values, wanted, any_order)
    if outside := [number for number in numbers if not 0 <= number < count]:
        raise IndexError(f"{name} must be {wanted} in 0 .. {count - 1}, got {outside[0]}")
    return numbers


def edge_lists(graphs: Sequence[TokenGraph]) -> list[Tensor] | None:
    """The lists that all of the graphs carry, or None if one of them is a rule alone."""
    lists = [edges for graph in graphs if (edges := graph.edges.unique_edges.stored_list()) is not None]
    return lists if len(lists) == len(graphs) else None


def name(function: str, graphs: Sequence[TokenGraph], *arguments: str) -> str:
    """The call as Python text, with the number of graphs where they are many; no empty arguments."""
    names = [graph.name for graph in graphs]
    shown = names if len(names) <= 6 else [text.format_list(names, "graphs")]
    return f"{function}({', '.join([*shown, *filter(None, arguments)])})"
