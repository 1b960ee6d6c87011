"""The tokens of rectangles, as views of memory or gathered, and plans of them in parts."""

import pytest
import torch
from support.bounds import assert_exact, assert_sum
from support.inputs import qkv
from support.plans import STRUCTURED, tokens

import gnn_attention as ga
from gnn_attention.backends.cpu import dense_blocks as kernels
from gnn_attention.backends.plan.plan import Gathered, Strided


def seeded(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


BATCH, HEADS, TOKENS, DIM = 3, 2, 23, 4


LAYOUTS = {
    "head-major": lambda: seeded(BATCH, HEADS, TOKENS, DIM),
    "token-major": lambda: seeded(BATCH, TOKENS, HEADS, DIM).transpose(1, 2),
    "part of a larger one": lambda: seeded(BATCH + 1, HEADS + 3, TOKENS + 9, DIM + 2)[1:, 2:-1, 4:-5, 1:-1],
    "channels apart": lambda: seeded(BATCH, HEADS, DIM, TOKENS).transpose(2, 3),
    "packed with others": lambda: seeded(BATCH, TOKENS, 3, HEADS, DIM)[:, :, 1].transpose(1, 2),
}
DISJOINT = {  # no token in two groups
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
ALL = {**DISJOINT, **SHARING}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def samples(groups):
    return [*range(BATCH), slice(0, BATCH)] if groups.count == 1 else list(range(BATCH))


def places(sample, groups):
    """Where the value ``[i, :, j]`` is in x: (i, sample, token, j)."""
    for i in range(groups.count if sample != slice(0, BATCH) else BATCH):
        for j, token in enumerate(tokens(groups, 0 if sample == slice(0, BATCH) else i).tolist()):
            yield i, i if sample == slice(0, BATCH) else sample, token, j


def value_for(sample, groups):
    return seeded(groups.count if sample != slice(0, BATCH) else BATCH, HEADS, groups.size, DIM) + 10


@each_layout
@pytest.mark.parametrize("name", ALL)
def test_take_put_and_add(name, layout):
    """Strided groups are views; put writes those tokens alone; add as often as a token is in the groups."""
    groups = ALL[name]
    for sample in samples(groups):
        x, value = layout(), value_for(sample, groups).float()
        found, written, added = kernels.take(x, sample, groups), x.clone(), x.clone()
        assert found.shape == value.shape
        if isinstance(groups, Strided):
            assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        for i, b, token, j in places(sample, groups):
            assert torch.equal(found[i, :, j], x[b, :, token])
            written[b, :, token] = value[i, :, j].double()
            added[b, :, token] += value[i, :, j].double()
        y = layout()
        kernels.add(y, sample, groups, value)
        if name == "the same":  # what all groups add to their tokens is summed before, in float32
            assert_sum(y, added, terms=groups.count, magnitude=float(value.abs().sum(0).max()))
        else:
            assert_exact(y, added)
        if name in DISJOINT:
            kernels.put(x, sample, groups, value)
            assert torch.equal(x, written)


PARTS = (
    "window and sinks",
    "documents",
    "steps down",
    "global tokens",
    "rows of a window",
    "causal",
    "no ranges",
)


@pytest.mark.parametrize("room", [1, 3000, 100_000])
@pytest.mark.parametrize("name", PARTS)
def test_a_few_rectangles_at_a_time(name, room, monkeypatch):
    """The same however many go into one call, with masks made additive at once or part by part."""
    graph = STRUCTURED[name]
    given = qkv(graph.num_dst, graph.num_src, heads=2, kv_heads=1, batch=3)
    wanted = ga.attend(*given, graph, backend="rows")
    wanted = [wanted, *torch.autograd.grad(wanted.square().sum(), given)]
    monkeypatch.setattr(kernels, "BYTES_AT_ONCE", room)
    for largest in (0, 10**9):
        monkeypatch.setattr(kernels, "LARGEST_TABLE", largest)
        out = ga.attend(*given, graph, backend="tiles")
        assert_exact([out, *torch.autograd.grad(out.square().sum(), given)], wanted)
