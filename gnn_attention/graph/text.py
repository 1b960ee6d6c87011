"""Graphs as text: summaries, names of expressions, and small pictures of a mask."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gnn_attention._support.shapes import Bool, Tensor

# str(graph) draws a picture of at most this many receivers and senders.
MAX_PICTURE_TOKENS = 32
# repr(graph), which error messages contain, shortens a name to this many characters.
LONGEST_NAME = 120


def summary(graph: Any) -> str:
    """Return ``repr(graph)``: name, sizes, and the first positions unless they are 0."""
    properties = {"batch": graph.batch, "heads": graph.heads}
    properties |= {"src from": graph.src_offset, "dst from": graph.dst_offset}
    details = "".join(f", {name} {value}" for name, value in properties.items() if value)
    name = graph.name if len(graph.name) <= LONGEST_NAME else f"{graph.name[: LONGEST_NAME - 3]}..."
    return f"TokenGraph({name}: {graph.num_src} src -> {graph.num_dst} dst{details})"


def parenthesize(name: str) -> str:
    """Put a name in parentheses if it is an expression, that is, has a space outside of brackets."""
    depths = accumulate({"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0) for letter in name)
    is_expression = any(letter == " " and depth == 0 for letter, depth in zip(name, depths, strict=True))
    return f"({name})" if is_expression else name


def format_list(values: Sequence[object], noun: str, max_length: int = 6) -> str:
    """Format a list as Python does, or as ``[50 lengths]`` if it is longer than ``max_length``."""
    return str(list(values)) if len(values) <= max_length else f"[{len(values)} {noun}]"


def picture(name: str, mask: Bool[Tensor, "dst src"]) -> str:
    """Draw one line for each receiver: its row of the mask, and the senders of its in-edges."""
    width = len(str(max(len(mask) - 1, 0)))
    lines = [f"{name}: mask[dst, src] and in-edges"]
    for dst, row in enumerate(mask.tolist()):
        cells = " ".join("■" if is_edge else "·" for is_edge in row)
        senders = " ".join(str(src) for src, is_edge in enumerate(row) if is_edge) or "none"
        lines.append(f"{dst:>{width}} {cells}   {dst:>{width}} <- {senders}")
    return "\n".join(lines)
