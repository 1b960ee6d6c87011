"""Covering arrays: few rows of values that hold every pair, or triple, of values that any row holds."""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the values of each name, as rows."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def covering(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Numbers of rows, ascending, that hold each combination of ``strength`` values that occurs in any row.

    A greedy choice: the row that adds most comes first, of equal ones the earliest.

    >>> covering([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    """
    combinations = [list(itertools.combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set(itertools.chain.from_iterable(combinations))
    queue = [(-len(values), number) for number, values in enumerate(combinations)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        promised, number = heapq.heappop(queue)
        gain = sum(combination in missing for combination in combinations[number])
        if gain == -promised:
            chosen.append(number)
            missing.difference_update(combinations[number])
        elif gain:
            heapq.heappush(queue, (-gain, number))
    return sorted(chosen)
