"""Groups of tokens taken, written and added to, against plain loops over tokens."""

import pytest
import torch
from support.bounds import assert_exact, assert_sum
from support.plans import tokens

from gnn_attention.backends.cpu.dense_blocks import add, put, take
from gnn_attention.backends.plan.plan import Gathered, Strided

BATCH, HEADS, TOKENS, DIM = 3, 2, 23, 4


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LAYOUTS = {
    "head-major": lambda: seeded(BATCH, HEADS, TOKENS, DIM),
    "token-major": lambda: seeded(BATCH, TOKENS, HEADS, DIM).transpose(1, 2),
    "part of a larger one": lambda: seeded(BATCH + 1, HEADS + 3, TOKENS + 9, DIM + 2)[1:, 2:-1, 4:-5, 1:-1],
    "channels apart": lambda: seeded(BATCH, HEADS, DIM, TOKENS).transpose(2, 3),
    "packed with others": lambda: seeded(BATCH, TOKENS, 3, HEADS, DIM)[:, :, 1].transpose(1, 2),
}
APART = {  # no token in two groups
    "touching": Strided(2, 5, 4, 5),
    "with gaps": Strided(1, 7, 3, 4),
    "one": Strided(4, 0, 1, 9),
    "one token each": Strided(0, 1, TOKENS, 1),
    "gathered": Gathered(torch.tensor([[22, 3, 0], [1, 17, 5]])),
    "gathered, one": Gathered(torch.tensor([[9, 2, 4, 21]])),
}
SHARING = {
    "overlapping": Strided(1, 2, 6, 5),
    "overlapping, uneven strips": Strided(0, 3, 4, 8),
    "overlapping by one": Strided(0, 4, 5, 5),
    "overlapping, one further": Strided(0, 1, 15, 9),
    "the same": Strided(3, 0, 5, 6),
    "gathered twice": Gathered(torch.tensor([[5, 1, 1], [1, 5, 20], [5, 0, 2]])),
}
ALL = {**APART, **SHARING}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def samples(groups):
    """Every sample alone; all of them where there is one group."""
    return [*range(BATCH), None] if groups.count == 1 else list(range(BATCH))


def places(sample, groups):
    """Where the value ``[i, :, j]`` stands in x: (i, sample, token, j)."""
    for i in range(groups.count if sample is not None else BATCH):
        for j, token in enumerate(tokens(groups, 0 if sample is None else i).tolist()):
            yield i, i if sample is None else sample, token, j


def value_for(sample, groups):
    return seeded(groups.count if sample is not None else BATCH, HEADS, groups.size, DIM) + 10


@each_layout
@pytest.mark.parametrize("name", ALL)
def test_take(name, layout):
    x, groups = layout(), ALL[name]
    for sample in samples(groups):
        found = take(x, sample, groups)
        assert found.shape == value_for(sample, groups).shape
        for i, b, token, j in places(sample, groups):
            assert torch.equal(found[i, :, j], x[b, :, token])


@each_layout
@pytest.mark.parametrize("name", [name for name in ALL if isinstance(ALL[name], Strided)])
def test_strided_groups_are_views(name, layout):
    """However large they are together, nothing is copied."""
    x, groups = layout(), ALL[name]
    for sample in samples(groups):
        assert take(x, sample, groups).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@each_layout
@pytest.mark.parametrize("name", APART)
def test_put(name, layout):
    """Those tokens alone, in the dtype of x."""
    groups = APART[name]
    for sample in samples(groups):
        x, value = layout(), value_for(sample, groups).float()
        expected = x.clone()
        for i, b, token, j in places(sample, groups):
            expected[b, :, token] = value[i, :, j].double()
        put(x, sample, groups, value)
        assert torch.equal(x, expected)


@each_layout
@pytest.mark.parametrize("name", ALL)
def test_add(name, layout):
    """As often as a token is in the groups."""
    groups = ALL[name]
    for sample in samples(groups):
        x, value = layout(), value_for(sample, groups).float()
        expected = x.clone()
        for i, b, token, j in places(sample, groups):
            expected[b, :, token] += value[i, :, j].double()
        add(x, sample, groups, value)
        if name == "the same":  # what all groups add to their tokens is summed before, in float32
            assert_sum(x, expected, terms=groups.count, magnitude=float(value.abs().sum(0).max()))
        else:
            assert_exact(x, expected)


def test_what_is_around_a_view_stays():
    """Tokens, heads and samples of the larger tensor that the view does not show."""
    for write in (put, add):
        for groups in APART.values():
            whole = torch.zeros(BATCH, HEADS + 2, TOKENS, DIM)
            write(whole[:, 1:-1], 1, groups, torch.ones(groups.count, HEADS, groups.size, DIM))
            assert int(whole.sum()) == groups.count * HEADS * groups.size * DIM == int(whole[1, 1:-1].sum())
