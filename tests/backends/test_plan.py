"""Plans as values: what is packed comes back, and parts hold every group once."""

import pytest
import torch
from support.plans import visits

from gnn_attention.backends.plan.plan import (
    Edges,
    Gathered,
    Masks,
    Plan,
    Rectangles,
    Strided,
    packed,
    unpacked,
)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def masks(count, receivers, senders, table=3):
    rng = torch.Generator().manual_seed(count)
    which = torch.randint(0, table, (count,), generator=rng)
    return Masks(torch.rand(table, receivers, senders, generator=rng) < 0.5, which)


def edge_list(fresh):
    return Edges(*(numbers(n) + 10 * i for i, n in enumerate((5, 6, 6, 4, 6, 6))), fresh=fresh)


PIECES = {
    "strided": Rectangles(Strided(3, 4, 5, 4), Strided(0, 4, 5, 9)),
    "strided, masked": Rectangles(
        Strided(0, 4, 5, 4), Strided(1, 0, 5, 6), masks(5, 4, 6), has_empty_rows=True
    ),
    "strided, gathered": Rectangles(
        Strided(0, 2, 7, 2), Gathered(numbers(7, 3)), masks(7, 2, 3), fresh=False
    ),
    "gathered, strided": Rectangles(Gathered(numbers(7, 3)), Strided(0, 0, 7, 21)),
    "gathered": Rectangles(Gathered(numbers(7, 3)), Gathered(numbers(7, 3).flip(0)), causal=True),
    "edges": edge_list(fresh=True),
    "more edges": edge_list(fresh=False),
}
RECTANGLES = {name: piece for name, piece in PIECES.items() if isinstance(piece, Rectangles)}


def nested(value):
    """A value of a plan as nested tuples; tensors by identity, for none may be copied."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, tuple):
        return tuple(nested(part) for part in value)
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else (type(value), *(nested(getattr(value, name)) for name in fields))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("chosen", [[], list(PIECES), list(PIECES)[::-1]], ids=["none", "all", "reversed"])
def test_what_was_packed_comes_back(chosen, complete):
    """Every field of every piece, in order, the tensors themselves; numbers are integers, for an operator."""
    plan = Plan(tuple(PIECES[name] for name in chosen), complete)
    tensors, words = packed(plan)
    assert all(type(n) is int for n in words)
    assert nested(unpacked(tensors, words)) == nested(plan)


@pytest.mark.parametrize("count", [1, 3, 7, 100])
@pytest.mark.parametrize("name", RECTANGLES)
def test_parts_have_every_group_once(name, count):
    """In order, at most ``count`` at a time, with the flags of the whole and without a copy of its masks."""
    whole = RECTANGLES[name]
    parts = list(whole.parts(count))
    assert [part.dst.count for part in parts[:-1]] == [count] * (len(parts) - 1)
    assert sum(part.dst.count for part in parts) == whole.dst.count
    assert sum(part.cells for part in parts) == whole.cells
    assert torch.equal(visits(parts, 30, 30), visits([whole], 30, 30))
    for part in parts:
        assert part.src.count == part.dst.count
        for flag in ("causal", "fresh", "has_empty_rows"):
            assert getattr(part, flag) == getattr(whole, flag)
        if whole.masks is not None:
            assert part.masks.table is whole.masks.table
            assert len(part.masks.which) == part.dst.count
