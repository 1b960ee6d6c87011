"""The kernel over rectangles against attention written out in float64; views of tokens."""

import pytest
import torch
from support.bounds import assert_exact, assert_results, assert_sum, formula
from support.plans import tokens

from gnn_attention import edge_softmax
from gnn_attention.backends.cpu import dense_blocks as kernels
from gnn_attention.backends.plan.plan import Gathered, Masks, Rectangles, Strided

SCALE = 0.3


def seeded(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def allowed_mask(*shape, seed=0):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 0] = True
    mask[..., 1, :] = False
    return mask


T, GROUPS = 40, 5


def masks(table, senders=9, seed=0):
    which = torch.randint(0, table, (GROUPS,), generator=torch.Generator().manual_seed(7))
    return Masks(allowed_mask(table, 8, senders, seed=seed), which)


EIGHT = Strided(0, 8, GROUPS, 8)
MIXED_UP = Gathered(torch.randperm(T, generator=torch.Generator().manual_seed(1)).view(GROUPS, 8))
ANY = Gathered(
    torch.randint(0, T, (GROUPS, 1), generator=torch.Generator().manual_seed(2)) * 3 % 31 + torch.arange(9)
)
PIECES = {
    "strided": Rectangles(EIGHT, Strided(0, 5, GROUPS, 9)),
    "overlapping, one mask": Rectangles(EIGHT, Strided(0, 6, GROUPS, 9), masks(1), has_empty_rows=True),
    "the same senders, masks": Rectangles(EIGHT, Strided(11, 0, GROUPS, 9), masks(3), has_empty_rows=True),
    "gathered senders, masks": Rectangles(EIGHT, ANY, masks(3), has_empty_rows=True),
    "gathered": Rectangles(MIXED_UP, ANY),
    "gathered receivers, masks": Rectangles(
        MIXED_UP, Strided(0, 7, GROUPS, 9), masks(2), has_empty_rows=True
    ),
    "causal": Rectangles(EIGHT, EIGHT, causal=True),
    "one": Rectangles(Strided(3, 1, 1, 30), Strided(1, 1, 1, 39)),
    "one, causal": Rectangles(Strided(0, 1, 1, T), Strided(0, 1, 1, T), causal=True),
    "one, gathered": Rectangles(Gathered(MIXED_UP.index.view(1, -1)), Gathered(MIXED_UP.index[2:3])),
    "two, masked": Rectangles(
        EIGHT.part(1, 3),
        EIGHT.part(0, 2),
        Masks(allowed_mask(2, 8, 8), torch.tensor([1, 0])),
        has_empty_rows=True,
    ),
}


def mask_of(pieces):
    mask = torch.zeros(T, T, dtype=torch.bool)
    for piece in pieces:
        for g in range(piece.dst.count):
            edge = torch.ones(piece.dst.size, piece.src.size, dtype=torch.bool)
            edge = edge.tril() if piece.causal else edge
            edge = edge if piece.masks is None else edge & piece.masks.table[piece.masks.which[g]]
            mask[tokens(piece.dst, g)[:, None], tokens(piece.src, g)] |= edge
    return mask


def run(pieces, q, k, v, grad):
    """Out, lse and the gradients as in the fused operator: pieces in turn, lse = inf without edges."""
    wide = edge_softmax.accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=wide).transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
    for piece in pieces:
        kernels.forward(q, k, v, piece, SCALE, out, lse)
    final = out.to(q.dtype)
    grads = [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
    lse_or_inf = lse.masked_fill(lse == -torch.inf, torch.inf)
    for piece in pieces:
        kernels.backward((grad, q, k, v, final), lse_or_inf, piece, SCALE, grads)
    return final, lse, *grads


def expected_of(pieces, q, k, v, grad):
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = formula(*inputs, mask_of(pieces), SCALE)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad.double())


def inputs(batch=2, kv_heads=2, dtype=torch.float64):
    shapes = ((4, 0), (kv_heads, 1), (kv_heads, 2), (4, 3))
    return [seeded(batch, T, heads, 8, seed=seed, dtype=dtype).transpose(1, 2) for heads, seed in shapes]


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("name", PIECES)
def test_one_piece(name, batch):
    pieces, given = [PIECES[name]], inputs(batch)
    assert_results(run(pieces, *given), expected_of(pieces, *given))


@pytest.mark.parametrize("batch", [2, 7])
@pytest.mark.parametrize("room", [1, 3000, 100_000, 10**9])
def test_a_few_rectangles_at_a_time(room, batch, monkeypatch):
    """The same however many go into one call, with masks made additive at once or part by part."""
    monkeypatch.setattr(kernels, "BYTES_AT_ONCE", room)
    given = inputs(batch)
    for piece in PIECES.values():
        for largest in (0, 10**9):
            monkeypatch.setattr(kernels, "LARGEST_TABLE", largest)
            assert_results(run([piece], *given), expected_of([piece], *given))


MERGED = [
    Rectangles(EIGHT, Strided(0, 2, GROUPS, 9), masks(2, seed=3), has_empty_rows=True),
    Rectangles(
        EIGHT,
        Strided(17, 0, GROUPS, 5),
        Masks(allowed_mask(1, 8, 5, seed=1).flip(1), torch.zeros(GROUPS).long()),
        fresh=False,
        has_empty_rows=True,
    ),
    Rectangles(Strided(16, 8, 3, 8), Strided(22, 6, 3, 6), fresh=False),
]


def test_pieces_over_the_same_receivers_are_merged():
    given = inputs()
    assert_results(run(MERGED, *given), expected_of(MERGED, *given))
    a, b, _ = (mask_of([piece]).any(1) for piece in MERGED)
    assert bool((a & ~b).any() & (b & ~a).any() & (a & b).any())


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
