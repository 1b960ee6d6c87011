"""Read the tables of theorems; the module also has the closed formulas that many rows share."""

import math
from collections.abc import Callable

import torch

from gnn_attention import TokenGraph, patterns

SIZES = (0, 1, 2, 17)


class Row:
    """The theorems about a builder, in formulas that do not use the library.

    A row of a table reads ``graph: edge``, then indented ``word=formula; word=formula``. The formulas are
    Python expressions of the size n, the receiver i and the sender j. ``edge`` defines the graph, and
    ``degree`` is the in-degree, if it has a closed form. ``layers`` is the smallest number of layers after
    which every token has received from every token that it may receive from (``src <= dst`` if ``causal``,
    else all) and has kept its own state; it is None if this never happens. ``causal`` is True unless
    ``symmetric``. ``acyclic`` says that self loops are the only directed cycles; it defaults to ``causal``.
    ``nodes`` is the number of tokens, or the numbers of receivers and senders. ``named_at`` is a size at
    which the graph's name, read as Python, builds the graph again; it is None if the name says too little.
    A property that does *not* hold is tested at the largest size.
    """

    def __init__(self, head: str, clauses: str, scope: dict[str, object]):
        self.name, _, edge = head.partition(": ")
        words = dict(clause.split("=", 1) for clause in clauses.strip().split("; "))
        if unknown := words.keys() - {*FORMULAS, *CONSTANTS}:
            raise ValueError(f"{self.name}: {unknown}")
        self.words = {"edge": edge, **words}

        def formula(word: str, default: str | None = None) -> Callable | None:
            source = words.get(word, default)
            return source and eval(f"lambda n, i=0, j=0: ({source})", scope)

        self.build: Callable[[int], TokenGraph] = formula("graph", self.name)
        self.edge: Callable[[int, int, int], bool] = formula("edge", edge)
        self.degree, self.layers = formula("degree"), formula("layers")
        self._nodes = formula("nodes", "n")
        constants = {word: eval(words[word]) for word in CONSTANTS if word in words}
        self.symmetric: bool = constants.get("symmetric", False)
        self.causal: bool = constants.get("causal", not self.symmetric)
        self.acyclic: bool = constants.get("acyclic", self.causal)
        self.sizes: tuple[int, ...] = constants.get("sizes", SIZES)
        self.named_at: int | None = constants.get("named_at", 5)

    def nodes(self, n: int) -> tuple[int, int]:
        """Return ``(num_dst, num_src)``."""
        nodes = self._nodes(n)
        return nodes if isinstance(nodes, tuple) else (nodes, nodes)


FORMULAS = ("degree", "layers", "nodes")
CONSTANTS = ("causal", "symmetric", "acyclic", "sizes", "named_at")


def read(table: str, helpers: dict[str, object]) -> list[Row]:
    """Return the rows of a table, whose formulas may use ``helpers``, the functions of its module."""
    scope = {**vars(math), **vars(patterns), "torch": torch, **SHARED, **helpers}
    rows: list[list[str]] = []
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            rows.append([line, ""])
        else:
            # A line with eight spaces continues the head of the row.
            continues_head = line.startswith("        ") and not rows[-1][1]
            rows[-1][0 if continues_head else 1] += " " + line.strip()
    return [Row(head, clauses, scope) for head, clauses in rows]


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def steps(distance: int, stride: int) -> int:
    """Return the number of steps of ``stride`` that cover a distance."""
    return max(0, -(-distance // stride))


def once(n: int) -> int:
    """Return the layers to full reach if one is enough; a single token needs none."""
    return int(n > 1)


def never(n: int) -> int | None:
    """Return the layers to full reach if some token is never reached by another."""
    return None if n > 1 else 0


def binary_ones(number: int) -> int:
    return bin(number).count("1")


def log2(n: int) -> int:
    """Return the binary logarithm rounded down, or 0 for n = 0."""
    return max(n.bit_length() - 1, 0)


SHARED = {f.__name__: f for f in (triangle, steps, once, never, binary_ones, log2)}
