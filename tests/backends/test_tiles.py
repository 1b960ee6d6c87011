"""The backends ``tiles`` and ``mixed`` equal the dense formula."""

import pytest
import torch
from support.bounds import assert_exact, assert_rule, attention_truth
from support.inputs import qkv
from support.plans import STRUCTURED

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.cpu import dense_blocks, dense_blocks_eager
from gnn_attention.verify import oracle
from tests.backends.test_attention_op import LargestTensor, gradients

TILES = BACKENDS["tiles"]
MIXED = BACKENDS["mixed"]
SHAPES = {
    "window and sinks": patterns.window(150, 20) | patterns.sinks(150, 2),
    "strict causal": patterns.strict_causal(150),
    "documents": patterns.documents([70, 10, 70]),
    "decoding rows": patterns.causal(150).rows(60, 150),
}


def logits(q, k):
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5


@pytest.mark.parametrize(
    ("shape", "at_once"),
    [
        *((shape, 2**25) for shape in ((), (4, 1), (0,), (2, 1, 0))),
        *((shape, 60_000) for shape in ((1,), (4, 0), (2, 4, 0))),
    ],
)
def test_a_bias_in_the_order_of_a_shuffled_list(shape, at_once, monkeypatch):
    """The bias may have any shape that broadcasts (0 stands for the number of edges), and has a gradient."""
    monkeypatch.setattr(dense_blocks_eager, "LOGIT_CHUNK_BYTES", at_once)
    sorted_graph = SHAPES["window and sinks"]
    order = torch.randperm(sorted_graph.num_edges, generator=torch.Generator().manual_seed(4))
    graph = ga.convert.from_edge_index(sorted_graph.edge_index[:, order], 150, 150)
    shape = tuple(n or sorted_graph.num_edges for n in shape)
    bias = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    ).requires_grad_()
    q, k, v = qkv(150)
    output = ga.attend(q, k, v, graph, bias=bias, backend="tiles")
    src, dst = graph.edge_index
    table = torch.zeros(2, 4, 150, 150, dtype=torch.float64)
    index = torch.arange(2).view(2, 1, 1), torch.arange(4).view(4, 1), dst, src
    table = table.index_put(index, bias.expand(2, 4, sorted_graph.num_edges).contiguous())
    expected = oracle.masked_softmax(logits(q, k) + table, sorted_graph.mask()) @ v.repeat_interleave(2, 1)
    assert_exact(output, expected)
    assert_exact(gradients(output, [q, k, v, bias]), gradients(expected, [q, k, v, bias]))


@pytest.mark.parametrize("name", ["dense", "tiles"])
def test_a_nan_in_a_bias_is_carried_by_its_edge_alone(name):
    graph, inputs = SHAPES["window and sinks"], qkv(150)
    src, dst = graph.edge_index
    bias = torch.where((dst == 70) & (src == 60), torch.nan, 0.0).double()
    out = ga.attend(*inputs, graph, bias=bias, backend=name)
    assert out.isnan().any(-1)[0, 0].nonzero().tolist() == [[70]]
    for grad in torch.autograd.grad(out.sum(), inputs)[1:]:
        assert grad[:, :, ~graph.mask()[70]].isfinite().all()


SLICE_GRAPH = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= 10 * h + 5 * b), 80, heads=4, batch=2
)
SAMPLE_GRAPH = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src < dst) & (src >= 40 * b), 80, batch=2)
HEAD_GRAPH = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src - dst).abs() == h, 80, heads=4)


@pytest.mark.parametrize("graph", [SLICE_GRAPH, SAMPLE_GRAPH, HEAD_GRAPH], ids=["both", "sample", "head"])
@pytest.mark.parametrize("name", ["tiles", "rows", "mixed"])
def test_graphs_by_head_and_sample(name, graph):
    """Outputs with sinks and their gradients equal the formula, and lse is -inf for isolated receivers."""
    q, k, v = qkv(80)
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    mask = (graph.mask() if graph.batch else graph.mask().unsqueeze(0)).expand(2, 4, 80, 80)
    out, info = ga.attend(q, k, v, graph, sink_logits=sinks, backend=name, return_info=True)
    expected = oracle.masked_softmax(logits(q, k), mask, sinks) @ v.repeat_interleave(2, 1)
    assert_exact(out, expected)
    assert_exact(gradients(out, [q, k, v, sinks]), gradients(expected, [q, k, v, sinks]))
    assert torch.equal(info.lse == -torch.inf, ~mask.any(-1))


def _random_blocks() -> ga.TokenGraph:
    """Return blocks of 64 receivers that attend to random blocks of senders."""
    index = torch.rand(128, 128, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    return ga.TokenGraph.from_block_indices(index, 64, 8192, 8192)


@pytest.mark.parametrize(
    ("make", "batch", "score_mod"),
    [
        (lambda: patterns.window(8192, 256), 1, None),
        (lambda: patterns.window(8192, 256), 1, score_mods.softcap(3.0)),
        (lambda: patterns.documents([512] * 8), 4, score_mods.softcap(3.0)),
        (_random_blocks, 1, None),
    ],
    ids=["window", "window, score_mod", "documents, score_mod", "gathered blocks"],
)
def test_no_tensor_but_results_takes_more_than_4_mib(make, batch, score_mod):
    """The allocator would map a larger tensor anew in every step, page by page."""
    graph = make()
    inputs = qkv(graph.num_dst, heads=4, kv_heads=4, dim=16, batch=batch, dtype=torch.float32)
    assert inputs[0].numel() * 4 <= 2**22
    with LargestTensor() as recorder:
        gradients(ga.attend(*inputs, graph, score_mod=score_mod, backend=TILES), inputs)
    assert recorder.numbers * 4 <= 2**22


STRIPS = {
    "window": patterns.window(331, 100),
    "window, both sides": patterns.window(251, 70, causal=False),
    "window and sinks": patterns.window(331, 60) | patterns.sinks(331, 3),
    "rows of a window": patterns.window(400, 100).rows(23, 377),
    "receivers without edges": patterns.window(350, 64) & ~patterns.dilated(350, 350, 3),
}


@pytest.fixture(scope="module", params=STRIPS)
def strip_graph(request):
    return STRIPS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tiles_of_any_size(strip_graph, dtype):
    """Sizes need not be multiples of 16 or 64, and heads may share keys."""
    sizes = strip_graph.num_dst, strip_graph.num_src
    inputs = qkv(*sizes, heads=4, kv_heads=2, dim=16, value_dim=16, dtype=dtype, batch=1)
    grad_out = torch.randn(1, 4, sizes[0], 16, generator=torch.Generator().manual_seed(7)).to(dtype)
    out = ga.attend(*inputs, strip_graph, backend="tiles")
    grads = dict(zip("qkv", torch.autograd.grad(out, inputs, grad_out), strict=True))
    assert_rule(out, grads, attention_truth(*inputs, strip_graph, grad_out))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_value_that_only_rounds_a_width_up_carries_nothing(strip_graph, number):
    """A value that is not finite reaches only receivers that attend to it, in gradients too."""
    sizes, mask = (strip_graph.num_dst, strip_graph.num_src), strip_graph.mask()
    # Each width is rounded up by some keys, and every fourth sender includes one of them.
    for src in range(0, sizes[1], 4):
        q, k, v = qkv(*sizes, heads=1, kv_heads=1, dim=4, batch=1, dtype=torch.float32)
        with torch.no_grad():
            v[:, :, src] = number
        out = ga.attend(q, k, v, strip_graph, backend="tiles")
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(~out.isfinite().all(-1)[0, 0], mask[:, src])
        assert grad[0, 0, ~mask[:, src]].isfinite().all()


@pytest.mark.parametrize("limit", [1, 3000, 100_000])
@pytest.mark.parametrize("name", STRUCTURED)
def test_a_few_rectangles_at_a_time(name, limit, monkeypatch):
    """Results do not depend on how many rectangles go into one call."""
    graph = STRUCTURED[name]
    inputs = qkv(graph.num_dst, graph.num_src, heads=2, kv_heads=1, batch=3)
    expected = ga.attend(*inputs, graph, backend="rows")
    expected = [expected, *torch.autograd.grad(expected.square().sum(), inputs)]
    monkeypatch.setattr(dense_blocks, "BYTES_PER_CALL", limit)
    out = ga.attend(*inputs, graph, backend="tiles")
    assert_exact([out, *torch.autograd.grad(out.square().sum(), inputs)], expected)
