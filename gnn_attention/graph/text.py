"""Graphs in text: the name of an expression, and the small picture of a mask with its in-edges."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gnn_attention._support.shapes import Bool, Tensor

# nodes up to which str(graph) draws
LARGEST_PICTURE = 32
# characters of a name that repr(graph), and so every message, shows
LONGEST_NAME = 120


def summary(graph: Any) -> str:
    """``repr(graph)``: the name, the sizes, and where it begins if that is not position 0."""
    facts = {"batch": graph.batch, "heads": graph.heads}
    facts |= {"src from": graph.src_offset, "dst from": graph.dst_offset}
    varies = "".join(f", {word} {n}" for word, n in facts.items() if n)
    name = graph.name if len(graph.name) <= LONGEST_NAME else f"{graph.name[: LONGEST_NAME - 3]}..."
    return f"TokenGraph({name}: {graph.num_src} src -> {graph.num_dst} dst{varies})"


def parenthesize(name: str) -> str:
    """An operand's name, in brackets if it is itself an expression, with a space outside brackets."""
    depths = accumulate({"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0) for letter in name)
    expression = any(letter == " " and depth == 0 for letter, depth in zip(name, depths, strict=True))
    return f"({name})" if expression else name


def format_list(values: Sequence[object], word: str, longest: int = 6) -> str:
    """A list as Python text, or its length in words where it is long: ``[50 lengths]``."""
    return str(list(values)) if len(values) <= longest else f"[{len(values)} {word}]"


def picture(name: str, mask: Bool[Tensor, "dst src"]) -> str:
    """The mask, a row for each receiver, next to the in-edges of each receiver."""
    width = len(str(max(len(mask) - 1, 0)))
    lines = [f"{name}: mask[dst, src] and in-edges"]
    for dst, row in enumerate(mask.tolist()):
        cells = " ".join("■" if edge else "·" for edge in row)
        senders = " ".join(str(src) for src, edge in enumerate(row) if edge) or "none"
        lines.append(f"{dst:>{width}} {cells}   {dst:>{width}} <- {senders}")
    return "\n".join(lines)
