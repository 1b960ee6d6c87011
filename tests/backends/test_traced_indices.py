"""Chosen graphs in compiled and exported programs: another index at every call, or one computed there."""

from functools import partial

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from torch import nn
from torch._dynamo.testing import CompileCounter

import gnn_attention as ga

BATCH, HEADS, DST, SRC, MOST = 2, 4, 9, 11, 5
SHAPES = [(DST, MOST), (HEADS, DST, MOST), (BATCH, 1, DST, MOST), (BATCH, HEADS, DST, MOST)]


def qkv():
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, DST, 8), (2, SRC, 8), (2, SRC, 5)
    tensors = (torch.randn(BATCH, *shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in tensors]


def drawn(shape, seed):
    """Empty rows, duplicates, -1 anywhere, and one sender that all receivers of a row choose."""
    index = torch.randint(-1, SRC, shape, generator=torch.Generator().manual_seed(seed))
    index[..., 3, :] = -1
    index[..., 5:, 1] = 2
    return index


def attended(q, k, v, index, count=None, **options):
    graph = ga.TokenGraph.from_indices(index, k.shape[2], count, coalesce=True)
    return ga.attend(q, k, v, graph, **options)


def with_gradients(function, *inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs[:3])]


def mask_of(index, num_src=SRC):
    mask = torch.zeros(*index.shape[:-1], num_src + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, index.masked_fill(index < 0, num_src), True)[..., :num_src]
    return mask[(None,) * (4 - mask.dim())]


def dense(q, k, v, index):
    return along_mask(q, k, v, mask_of(index))


def along_mask(q, k, v, mask):
    """The formula, in float64."""
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    logits = (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf)
    return torch.where(mask.any(-1, keepdim=True), logits, 0.0).softmax(-1).where(mask, 0.0) @ v


@pytest.mark.parametrize(
    "shape", [SHAPES[-1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:-1])]
)
def test_other_numbers_run_the_same_program(shape):
    """Compiled once and whole, for as many edges as there are each time, with the gradients of the mask."""
    torch._dynamo.reset()
    counter, inputs = CompileCounter(), qkv()
    compiled = torch.compile(attended, fullgraph=True, backend=counter)
    for seed in range(3):
        index = drawn(shape, seed)
        assert_exact(with_gradients(compiled, *inputs, index), with_gradients(dense, *inputs, index))
    assert counter.frame_count == 1


def nearest(q, k, v):
    """Each receiver attends to the senders of its three largest logits."""
    scores = q.detach() @ k.detach().repeat_interleave(HEADS // 2, 1).mT
    return attended(q, k, v, scores.topk(3, -1).indices)


class Chosen(nn.Module):
    """Attention along an index, or without one along what is ``made`` of q and k."""

    def __init__(self, along, made):
        super().__init__()
        self.along, self.made = along, made

    def forward(self, q, k, v, index=None):
        return self.made(q, k, v) if index is None else self.along(q, k, v, index)


def assert_exported(along, made, truth, index, other, strict):
    q, k, v = (x.detach() for x in qkv())
    program = torch.export.export(Chosen(along, made), (q, k, v, index), strict=strict).module()
    assert_exact(program(q, k, v, other), truth(q, k, v, other))
    program = torch.export.export(Chosen(along, made), (q, k, v), strict=strict).module()
    assert_exact(program(2 * q, k.flip(2), v), made(2 * q, k.flip(2), v))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_another_index_or_computes_it(strict):
    index, other = (drawn(SHAPES[3], seed) for seed in range(2))
    assert_exported(attended, nearest, dense, index, other, strict)


@pytest.mark.slow
def test_an_index_that_is_computed_inside_is_compiled_by_inductor():
    inputs = qkv()
    found = with_gradients(torch.compile(nearest, fullgraph=True), *inputs)
    assert_exact(found, with_gradients(nearest, *inputs))


# the last block of receivers and of senders is short
SIZE, BLOCKS, COLUMNS = 2, 5, 6
LEADS = [(), (HEADS,), (BATCH, 1), (BATCH, HEADS)]


def drawn_blocks(lead, seed):
    """Distinct blocks, -1 anywhere, a block of receivers without any."""
    draw = torch.Generator().manual_seed(seed)
    index = torch.rand(*lead, BLOCKS, COLUMNS, generator=draw).argsort(-1)[..., :3]
    index = index.masked_fill(torch.rand(index.shape, generator=draw) < 0.3, -1)
    index[..., 1, :] = -1
    return index


def along_blocks(q, k, v, index, causal=False, **options):
    graph = ga.TokenGraph.from_block_indices(index, SIZE, q.shape[2], k.shape[2], causal)
    return ga.attend(q, k, v, graph, **options)


def dense_blocks(q, k, v, index, causal=False):
    mask = mask_of(index, COLUMNS).repeat_interleave(SIZE, -2).repeat_interleave(SIZE, -1)[..., :DST, :SRC]
    return along_mask(q, k, v, mask.tril() if causal else mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_other_blocks_run_the_same_program(lead, causal):
    """Compiled once and whole; the gradients are those of the mask, and all is that of the eager call."""
    torch._dynamo.reset()
    counter, inputs = CompileCounter(), qkv()
    compiled = torch.compile(along_blocks, fullgraph=True, backend=counter)
    for seed in range(3):
        index = drawn_blocks(lead, seed)
        found = with_gradients(lambda *given, index=index: compiled(*given, index, causal), *inputs)
        for function in (dense_blocks, along_blocks):
            assert_exact(found, with_gradients(partial(function, index=index, causal=causal), *inputs))
    assert counter.frame_count == 1


def test_a_program_of_blocks_keeps_the_rules():
    """Sinks, lse, a NaN that only its receivers have; and sizes of nothing."""
    torch._dynamo.reset()
    (q, k, v), index = (x.detach() for x in qkv()), drawn_blocks((BATCH, HEADS), 0)
    k[0, 1, 3], v[1, 0, 4] = torch.nan, torch.inf
    compiled = torch.compile(along_blocks, fullgraph=True, backend="eager")
    options = {"sink_logits": torch.arange(HEADS).double(), "return_info": True}
    (out, info), (due, due_info) = (run(q, k, v, index, **options) for run in (compiled, along_blocks))
    assert torch.equal(out.isnan(), due.isnan())
    assert 0 < int(out.isnan().sum()) < out.numel()
    assert_exact([x.nan_to_num() for x in (out, info.lse)], [x.nan_to_num() for x in (due, due_info.lse)])
    lses = (run(q, k, v, index, return_info=True)[1].lse for run in (compiled, along_blocks))
    assert_exact(*(x.nan_to_num() for x in lses))
    for rows, most, num_src in ((BLOCKS, 0, SRC), (0, 3, SRC), (BLOCKS, 2, 0)):
        ends = q[:, :, : DST * bool(rows)], k[:, :, :num_src], v[:, :, :num_src]
        empty = compiled(*ends, torch.full((rows, most), -1))
        assert empty.shape[2] == ends[0].shape[2]
        assert not empty.any()


def joined(q, k, v, index, blocks=False, last=False):
    of_blocks = partial(ga.TokenGraph.from_block_indices, block_size=SIZE, num_dst=DST)
    chosen = (of_blocks if blocks else ga.TokenGraph.from_indices)(index, num_src=SRC)
    always = ga.TokenGraph.from_rule(lambda b, h, dst, src: src == dst, DST, SRC)
    return ga.attend(q, k, v, always | chosen if last else chosen | always)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_what_is_joined_in_a_program_is_refused(blocks, last):
    """Not whole, it would run where an operator breaks it, along the index alone or along everything."""
    torch._dynamo.reset()
    index = drawn_blocks((), 0) if blocks else torch.zeros(DST, 1, dtype=torch.int64)
    compiled = torch.compile(joined, backend="eager")
    with pytest.raises(Exception, match="edges of an index in a traced program are not known"):
        compiled(*qkv(), index, blocks, last)


@pytest.mark.slow
def test_a_program_raises_what_the_eager_call_does():
    """Of the numbers when it runs; of options that it cannot take when it is traced."""
    torch._dynamo.reset()
    inputs, index = qkv(), drawn(SHAPES[3], 0)
    compiled = torch.compile(attended, fullgraph=True, backend="eager")
    compiled(*inputs, index)

    def counted(q, k, v, index):
        return ga.TokenGraph.from_indices(index, SRC, coalesce="count")

    def once(q, k, v, index):
        return ga.attend(q, k, v, ga.TokenGraph.from_indices(index, SRC))

    whole = lambda function: torch.compile(function, fullgraph=True, backend="eager")  # noqa: E731
    far, twice = index.clone(), index.clone()
    far[1, 2, 3, 4], twice[1, 2, 3, :2] = SRC, 4
    later = Exception
    assert_refusals(
        [
            (lambda: compiled(*inputs, far), IndexError, "holds 11 for receiver 3 of sample 1 of head 2"),
            (lambda: compiled(*inputs, index, index[..., 0] * 0 + 6), IndexError, r"count must be in 0 .. 5"),
            (
                lambda: compiled(*inputs, index, index[..., 0].double()),
                TypeError,
                "count must be a tensor of",
            ),
            (lambda: whole(once)(*inputs, index), ValueError, "more than once for receiver"),
            (lambda: whole(counted)(*inputs, index), later, "takes no coalesce='count'"),
            (
                lambda: whole(attended)(*inputs, index, backend="tiles"),
                later,
                "does not run with backend='tiles'",
            ),
            (
                lambda: whole(attended)(*inputs, index, dropout=0.5),
                later,
                "does not run with a score_mod, bias",
            ),
        ]
    )
