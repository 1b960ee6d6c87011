"""Compiled and exported programs take the index of a graph as an input, or compute it."""

from functools import partial

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from torch import nn
from torch._dynamo.testing import CompileCounter

import gnn_attention as ga

BATCH, HEADS, DST, SRC, WIDTH = 2, 4, 9, 11, 5
SHAPES = [(DST, WIDTH), (HEADS, DST, WIDTH), (BATCH, 1, DST, WIDTH), (BATCH, HEADS, DST, WIDTH)]


def qkv():
    rng = torch.Generator().manual_seed(0)
    shapes = (HEADS, DST, 8), (2, SRC, 8), (2, SRC, 5)
    tensors = (torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in tensors]


def draw_index(shape, seed):
    """Draw an index with empty rows, duplicates, -1 anywhere, and one sender that many receivers choose."""
    index = torch.randint(-1, SRC, shape, generator=torch.Generator().manual_seed(seed))
    index[..., 3, :] = -1
    index[..., 5:, 1] = 2
    return index


def attend_to_index(q, k, v, index, count=None, **options):
    graph = ga.TokenGraph.from_indices(index, k.shape[2], count, coalesce=True)
    return ga.attend(q, k, v, graph, **options)


def differentiate(function, *inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs[:3])]


def make_mask(index, num_src=SRC):
    mask = torch.zeros(*index.shape[:-1], num_src + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, index.masked_fill(index < 0, num_src), True)[..., :num_src]
    return mask[(None,) * (4 - mask.dim())]


def formula(q, k, v, index):
    return attend_to_mask(q, k, v, make_mask(index))


def attend_to_mask(q, k, v, mask):
    """Compute the formula, in float64."""
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    logits = (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf)
    return torch.where(mask.any(-1, keepdim=True), logits, 0.0).softmax(-1).where(mask, 0.0) @ v


@pytest.mark.parametrize(
    "shape", [SHAPES[-1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:-1])]
)
def test_other_values_run_the_same_program(shape):
    """The program is compiled once, as one graph, for any number of edges, and has the mask's gradients."""
    torch._dynamo.reset()
    counter, inputs = CompileCounter(), qkv()
    program = torch.compile(attend_to_index, fullgraph=True, backend=counter)
    for seed in range(3):
        index = draw_index(shape, seed)
        assert_exact(differentiate(program, *inputs, index), differentiate(formula, *inputs, index))
    assert counter.frame_count == 1


def attend_to_nearest(q, k, v):
    """Let each receiver attend to the senders of its three largest logits."""
    scores = q.detach() @ k.detach().repeat_interleave(HEADS // 2, 1).mT
    return attend_to_index(q, k, v, scores.topk(3, -1).indices)


class IndexAttention(nn.Module):
    """Attend along an index, or, without one, along an index computed from q and k."""

    def __init__(self, along_index, along_computed):
        super().__init__()
        self.along_index, self.along_computed = along_index, along_computed

    def forward(self, q, k, v, index=None):
        return self.along_computed(q, k, v) if index is None else self.along_index(q, k, v, index)


def assert_exported(along_index, along_computed, truth, index, second_index, strict):
    q, k, v = (x.detach() for x in qkv())
    module = IndexAttention(along_index, along_computed)
    program = torch.export.export(module, (q, k, v, index), strict=strict).module()
    assert_exact(program(q, k, v, second_index), truth(q, k, v, second_index))
    program = torch.export.export(module, (q, k, v), strict=strict).module()
    assert_exact(program(2 * q, k.flip(2), v), along_computed(2 * q, k.flip(2), v))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_another_index_or_computes_it(strict):
    index, second_index = (draw_index(SHAPES[3], seed) for seed in range(2))
    assert_exported(attend_to_index, attend_to_nearest, formula, index, second_index, strict)


@pytest.mark.slow
def test_an_index_that_is_computed_inside_is_compiled_by_inductor():
    inputs = qkv()
    results = differentiate(torch.compile(attend_to_nearest, fullgraph=True), *inputs)
    assert_exact(results, differentiate(attend_to_nearest, *inputs))


# The last block of receivers and that of senders are shorter.
SIZE, BLOCKS, COLUMNS = 2, 5, 6
LEADS = [(), (HEADS,), (BATCH, 1), (BATCH, HEADS)]


def draw_blocks(lead, seed):
    """Draw distinct blocks, with -1 anywhere, and none for one block of receivers."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.rand(*lead, BLOCKS, COLUMNS, generator=rng).argsort(-1)[..., :3]
    index = index.masked_fill(torch.rand(index.shape, generator=rng) < 0.3, -1)
    index[..., 1, :] = -1
    return index


def attend_to_blocks(q, k, v, index, causal=False, **options):
    graph = ga.TokenGraph.from_block_indices(index, SIZE, q.shape[2], k.shape[2], causal)
    return ga.attend(q, k, v, graph, **options)


def formula_of_blocks(q, k, v, index, causal=False):
    mask = make_mask(index, COLUMNS).repeat_interleave(SIZE, -2).repeat_interleave(SIZE, -1)[..., :DST, :SRC]
    return attend_to_mask(q, k, v, mask.tril() if causal else mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_other_blocks_run_the_same_program(lead, causal):
    """The program is compiled once, as one graph, and equals the mask and the eager call, gradients too."""
    torch._dynamo.reset()
    counter, inputs = CompileCounter(), qkv()
    program = torch.compile(attend_to_blocks, fullgraph=True, backend=counter)
    for seed in range(3):
        index = draw_blocks(lead, seed)
        results = differentiate(lambda *args, index=index: program(*args, index, causal), *inputs)
        for function in (formula_of_blocks, attend_to_blocks):
            assert_exact(results, differentiate(partial(function, index=index, causal=causal), *inputs))
    assert counter.frame_count == 1


def test_a_program_of_blocks_has_sinks_lse_and_nan():
    """A NaN reaches only its receivers, and sizes may be 0."""
    torch._dynamo.reset()
    (q, k, v), index = (x.detach() for x in qkv()), draw_blocks((BATCH, HEADS), 0)
    k[0, 1, 3], v[1, 0, 4] = torch.nan, torch.inf
    program = torch.compile(attend_to_blocks, fullgraph=True, backend="eager")
    options = {"sink_logits": torch.arange(HEADS).double(), "return_info": True}
    out, info = program(q, k, v, index, **options)
    expected, expected_info = attend_to_blocks(q, k, v, index, **options)
    assert torch.equal(out.isnan(), expected.isnan())
    assert 0 < int(out.isnan().sum()) < out.numel()
    for result, truth in ((out, expected), (info.lse, expected_info.lse)):
        assert_exact(result.nan_to_num(), truth.nan_to_num())
    lses = (run(q, k, v, index, return_info=True)[1].lse for run in (program, attend_to_blocks))
    assert_exact(*(x.nan_to_num() for x in lses))
    for rows, width, num_src in ((BLOCKS, 0, SRC), (0, 3, SRC), (BLOCKS, 2, 0)):
        slices = q[:, :, : DST * bool(rows)], k[:, :, :num_src], v[:, :, :num_src]
        empty = program(*slices, torch.full((rows, width), -1))
        assert empty.shape[2] == slices[0].shape[2]
        assert not empty.any()


def attend_to_union(q, k, v, index, blocks=False, last=False):
    from_blocks = partial(ga.TokenGraph.from_block_indices, block_size=SIZE, num_dst=DST)
    chosen_graph = (from_blocks if blocks else ga.TokenGraph.from_indices)(index, num_src=SRC)
    diagonal = ga.TokenGraph.from_rule(lambda b, h, dst, src: src == dst, DST, SRC)
    return ga.attend(q, k, v, diagonal | chosen_graph if last else chosen_graph | diagonal)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_unions_in_a_program_are_refused(blocks, last):
    """With a graph break, a union would run along the index alone or along all pairs."""
    torch._dynamo.reset()
    index = draw_blocks((), 0) if blocks else torch.zeros(DST, 1, dtype=torch.int64)
    program = torch.compile(attend_to_union, backend="eager")
    with pytest.raises(Exception, match="edges of an index in a traced program are not known"):
        program(*qkv(), index, blocks, last)


@pytest.mark.slow
def test_a_program_raises_the_errors_of_the_eager_call():
    """Wrong values raise when the program runs, unsupported options when it is traced."""
    torch._dynamo.reset()
    inputs, index = qkv(), draw_index(SHAPES[3], 0)
    program = torch.compile(attend_to_index, fullgraph=True, backend="eager")
    program(*inputs, index)

    def count(q, k, v, index):
        return ga.TokenGraph.from_indices(index, SRC, coalesce="count")

    def refuse(q, k, v, index):
        return ga.attend(q, k, v, ga.TokenGraph.from_indices(index, SRC))

    trace = lambda function: torch.compile(function, fullgraph=True, backend="eager")  # noqa: E731
    fault = index.clone()
    fault[1, 2, 3, 4] = SRC
    assert_refusals(
        [
            (lambda: program(*inputs, fault), IndexError, "holds 11 for receiver 3 of sample 1 of head 2"),
            (lambda: program(*inputs, index, index[..., 0] * 0 + 6), IndexError, r"count must be in 0 .. 5"),
            (
                lambda: program(*inputs, index, index[..., 0].double()),
                TypeError,
                "count must be a tensor of",
            ),
            (lambda: trace(refuse)(*inputs, index), ValueError, "more than once for receiver"),
            (lambda: trace(count)(*inputs, index), Exception, "takes no coalesce='count'"),
            (
                lambda: trace(attend_to_index)(*inputs, index, backend="tiles"),
                Exception,
                "does not run with backend='tiles'",
            ),
            (
                lambda: trace(attend_to_index)(*inputs, index, dropout=0.5),
                Exception,
                "does not run with a score_mod, bias",
            ),
        ]
    )
