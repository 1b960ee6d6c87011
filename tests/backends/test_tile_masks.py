"""Classes of equal rows, by which every distinct mask of a tile is kept once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention.backends.plan.tile_masks import classes


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.integers(-2, 2), min_size=n, max_size=n))))
def test_classes(rows):
    """Two rows have one class exactly if they are equal; classes count from 0, each with a row of it."""
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 3)
    number, some = classes(table)
    assert sorted(set(number.tolist())) == list(range(len(some)))
    assert len(some) == len({tuple(row) for row in rows})
    for row, kind in zip(rows, number.tolist(), strict=True):
        assert rows[int(some[kind])] == row


def test_rows_of_words_with_equal_sums_are_told_apart(monkeypatch):
    """All factors are 1 here, so that (1, 2) and (2, 1) have the sum 3."""
    monkeypatch.setattr(torch, "randint", lambda high, size, **options: torch.zeros(size).long())
    which, some = classes(torch.tensor([[1, 2], [2, 1], [1, 2], [3, 0]]))
    assert which[0] == which[2]
    assert len(set(which.tolist())) == len(some) == 3
