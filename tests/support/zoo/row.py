"""A row of the table of theorems, and the closed formulas that many rows share."""

from collections.abc import Callable
from dataclasses import dataclass

from gnn_attention import TokenGraph

SIZES = (0, 1, 2, 17)


@dataclass(frozen=True)
class Row:
    """What must hold of a builder; every function is written without the library.

    ``edge(n, dst, src)`` is the definition, ``count(n)`` the number of edges, ``degree(n, dst)`` the
    in-degree. ``layers(n)``: the fewest layers after which every token has heard of every token that it may
    ever hear of (of ``src <= dst`` if ``causal``, else of all), its own state carried along; None = never.
    ``acyclic``: no directed cycle besides self loops; None = as ``causal``. ``nodes(n)``:
    ``(num_dst, num_src)``; ``layers`` is left out where no size gives a square graph, and it and
    ``symmetric`` are asked of square graphs alone. ``named_at``: a size at which the graph's name, read as
    Python, builds it again; None = the name cannot say it all. The claims that something does *not* hold (not
    symmetric, not causal, not acyclic) are tested at the largest size.
    """

    name: str
    build: Callable[[int], TokenGraph]
    edge: Callable[[int, int, int], bool]
    count: Callable[[int], int]
    degree: Callable[[int, int], int]
    layers: Callable[[int], int | None] | None = None
    causal: bool = True
    symmetric: bool = False
    acyclic: bool | None = None
    nodes: Callable[[int], tuple[int, int]] = lambda n: (n, n)
    sizes: tuple[int, ...] = SIZES
    named_at: int | None = 5


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def band(n: int, w: int) -> int:
    """Edges of a causal window: a triangle of side w, then w for each further receiver."""
    return triangle(n) if n <= w else triangle(w) + (n - w) * w


def both_sides(n: int, w: int) -> int:
    """Edges of a window on both sides: every edge of the causal one twice, self loops once."""
    return 2 * band(n, w) - (n if w else 0)


def steps(distance: int, stride: int) -> int:
    """How many steps of ``stride`` cover a distance."""
    return max(0, -(-distance // stride))


def once(n: int) -> int:
    """One layer reaches everything, and a single token needs none."""
    return int(n > 1)


def never(n: int) -> int | None:
    """Some token is never heard of, if there are two."""
    return None if n > 1 else 0
