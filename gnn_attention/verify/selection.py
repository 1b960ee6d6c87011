"""Which checks a run takes: few that cover every pair of values, or all of them."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gnn_attention.verify.check import Check

SELECTIONS = ("pairs", "all")


def pairs(checks: Sequence[Check]) -> list[int]:
    """Numbers of few checks, ascending, that cover in each group every pair of values that its checks have.

    Values are the backend, the dtype and the factors of the group: graph, option, form, direction and so on.
    A check that cannot be run covers nothing; one for each reason is among them, so that the report says it.
    """
    groups, reasons = defaultdict[str, list[int]](list), dict[str, int]()
    for number, check in enumerate(checks):
        if check.skipped is None:
            groups[check.group].append(number)
        else:
            reasons.setdefault(check.skipped, number)
    chosen = list(reasons.values())
    for numbers in groups.values():
        found = [checks[n] for n in numbers]
        rows = [{"backend": check.backend, "dtype": check.dtype, **check.factors} for check in found]
        chosen += [numbers[row] for row in covering(rows, 2)]
    return sorted(chosen)


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def covering(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Numbers of rows, ascending, that hold each combination of ``strength`` values that occurs in any row.

    A greedy choice: the row that adds most comes first, of equal ones the earliest.

    >>> covering([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    """
    combinations = [list(itertools.combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set(itertools.chain.from_iterable(combinations))
    queue = [(-len(found), number) for number, found in enumerate(combinations)]
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
