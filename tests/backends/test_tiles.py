"""The backends over tiles, alone and mixed with rows, against the dense formula."""

import pytest
import torch
from support.bounds import assert_exact, assert_rule, attention_truth
from support.covering import thinned
from support.inputs import qkv
from support.verify_cases import SMALL, check_graph

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.cpu import dense_blocks_eager
from gnn_attention.verify import oracle
from tests.backends.test_attention_op import Largest, gradients

TILES = BACKENDS["tiles"]
MIXED = BACKENDS["mixed"]
SHAPES = {
    "window and sinks": patterns.window(150, 20) | patterns.sinks(150, 2),
    "strict causal": patterns.strict_causal(150),
    "documents": patterns.documents([70, 10, 70]),
    "decoding rows": patterns.causal(150).rows(60, 150),
}


@pytest.mark.parametrize("graph", thinned(SMALL, 1))
def test_every_graph_and_feature_of_verify(graph):
    """Forward and gradients in float64, and some in float32, within the rule; rows too."""
    check_graph((TILES, MIXED, BACKENDS["rows"]), graph)


def logits(q, k):
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5


@pytest.mark.parametrize(
    ("shape", "at_once"), [("decoding rows", 2**25), *((shape, 60_000) for shape in SHAPES)]
)
def test_a_learned_relative_bias(shape, at_once, monkeypatch):
    monkeypatch.setattr(dense_blocks_eager, "LOGITS_AT_ONCE", at_once)
    graph, reach = SHAPES[shape], 30
    q, k, v = qkv(graph.num_dst, graph.num_src)
    mod = score_mods.RelativeBias(4, reach).double()
    torch.nn.init.normal_(mod.table, generator=torch.Generator().manual_seed(1))
    found = ga.attend(q, k, v, graph, score_mod=mod, backend="tiles")
    dst, src = torch.arange(graph.num_dst).unsqueeze(1) + graph.dst_offset, torch.arange(graph.num_src)
    h = torch.arange(4).view(1, 4, 1, 1)
    scores = mod(logits(q, k), torch.arange(2).view(2, 1, 1, 1), h, dst, src)
    wanted = oracle.masked_softmax(scores, graph.mask()) @ v.repeat_interleave(2, 1)
    assert_exact(found, wanted)
    learned = [q, k, v, mod.table]
    assert_exact(gradients(found, learned), gradients(wanted, learned))


@pytest.mark.parametrize(
    ("shape", "at_once"),
    [
        *((shape, 2**25) for shape in ((), (4, 1), (0,), (2, 1, 0))),
        *((shape, 60_000) for shape in ((1,), (4, 0), (2, 4, 0))),
    ],
)
def test_a_bias_in_the_order_of_a_shuffled_list(shape, at_once, monkeypatch):
    """Every broadcastable shape, with its gradient (0 stands for the number of edges)."""
    monkeypatch.setattr(dense_blocks_eager, "LOGITS_AT_ONCE", at_once)
    whole = SHAPES["window and sinks"]
    order = torch.randperm(whole.num_edges, generator=torch.Generator().manual_seed(4))
    graph = ga.convert.from_edge_index(whole.edge_index[:, order], 150, 150)
    shape = tuple(n or whole.num_edges for n in shape)
    bias = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    ).requires_grad_()
    q, k, v = qkv(150)
    found = ga.attend(q, k, v, graph, bias=bias, backend="tiles")
    src, dst = graph.edge_index
    table = torch.zeros(2, 4, 150, 150, dtype=torch.float64)
    every = torch.arange(2).view(2, 1, 1), torch.arange(4).view(4, 1), dst, src
    table = table.index_put(every, bias.expand(2, 4, whole.num_edges).contiguous())
    wanted = oracle.masked_softmax(logits(q, k) + table, whole.mask()) @ v.repeat_interleave(2, 1)
    assert_exact(found, wanted)
    assert_exact(gradients(found, [q, k, v, bias]), gradients(wanted, [q, k, v, bias]))


@pytest.mark.parametrize("name", ["dense", "tiles"])
def test_a_nan_in_a_bias_is_carried_by_its_edge_alone(name):
    graph, given = SHAPES["window and sinks"], qkv(150)
    src, dst = graph.edge_index
    bias = torch.where((dst == 70) & (src == 60), torch.nan, 0.0).double()
    out = ga.attend(*given, graph, bias=bias, backend=name)
    assert out.isnan().any(-1)[0, 0].nonzero().tolist() == [[70]]
    for slope in torch.autograd.grad(out.sum(), given)[1:]:
        assert slope[:, :, ~graph.mask()[70]].isfinite().all()


@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("name", ["dense", "tiles", "rows"])
def test_a_nan_in_a_token_is_carried_by_its_edges_alone(name, where):
    """With a softcap, where logits are written out."""
    graph, given = SHAPES["window and sinks"], [x.detach() for x in qkv(150)]
    clean = ga.attend(*given, graph, score_mod=score_mods.softcap(2.0), backend=name)
    given[where][:, :, 60] = torch.nan
    out = ga.attend(*given, graph, score_mod=score_mods.softcap(2.0), backend=name)
    reached = graph.mask()[:, 60] if where else torch.arange(150) == 60
    assert out.isnan().all(-1)[0, 0].tolist() == reached.tolist()
    assert_exact(out[:, :, ~reached], clean[:, :, ~reached])


BY_BOTH = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= 10 * h + 5 * b), 80, heads=4, batch=2
)
BY_SAMPLE = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src < dst) & (src >= 40 * b), 80, batch=2)
BY_HEAD = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src - dst).abs() == h, 80, heads=4)


@pytest.mark.parametrize("graph", [BY_BOTH, BY_SAMPLE, BY_HEAD], ids=["both", "sample", "head"])
@pytest.mark.parametrize("name", ["tiles", "rows", "mixed"])
def test_graphs_by_head_and_sample(name, graph):
    """With sinks; lse too."""
    q, k, v = qkv(80)
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    mask = (graph.mask() if graph.batch else graph.mask().unsqueeze(0)).expand(2, 4, 80, 80)
    out, info = ga.attend(q, k, v, graph, sink_logits=sinks, backend=name, return_info=True)
    wanted = oracle.masked_softmax(logits(q, k), mask, sinks) @ v.repeat_interleave(2, 1)
    assert_exact(out, wanted)
    assert_exact(gradients(out, [q, k, v, sinks]), gradients(wanted, [q, k, v, sinks]))
    assert torch.equal(info.lse == -torch.inf, ~mask.any(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiles", "mixed"])
def test_float16_is_rounded_once(name):
    """On a CPU: the output, and the gradient of v, are those of float32 on the same numbers, rounded."""
    graph, given = SHAPES["window and sinks"], qkv(150, dtype=torch.float16)
    out, exact = (ga.attend(*x, graph, backend=name) for x in (given, [x.float() for x in given]))
    assert torch.equal(out, exact.half())
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).half()
    slopes, wide = (
        torch.autograd.grad(y, given, direction.to(y.dtype), retain_graph=True) for y in (out, exact)
    )
    assert torch.equal(slopes[2], wide[2])
    assert_rule(out, dict(zip("qkv", slopes, strict=True)), attention_truth(*given, graph, direction))


@pytest.mark.parametrize(
    "graph",
    [
        patterns.strict_causal(512),
        pytest.param(patterns.causal(512), marks=pytest.mark.slow),
        pytest.param(patterns.full(512), marks=pytest.mark.slow),
    ],
    ids=lambda g: g.name,
)
def test_logits_of_a_large_rectangle_are_written_out_in_bands(graph, monkeypatch):
    q, k, v = qkv(512)

    def run():
        return ga.attend(q, k, v, graph, score_mod=score_mods.softcap(3.0), backend=TILES)

    wanted = gradients(whole := run(), [q, k, v])
    monkeypatch.setattr(dense_blocks_eager, "LOGITS_AT_ONCE", 2**19)
    with Largest() as made:
        out = run()
        found = gradients(out, [q, k, v])
    assert_exact(out, whole)
    assert_exact(found, wanted)
    assert made.numbers < q.shape[0] * q.shape[1] * 512 * 512 // 8


def _list_of_many_masks() -> ga.TokenGraph:
    """A list of edges in well filled tiles, hardly two of which are alike."""
    edges = patterns.window(4096, 256).edge_index
    kept = torch.rand(edges.shape[1], generator=torch.Generator().manual_seed(0)) < 0.9
    return ga.convert.from_edge_index(edges[:, kept], 4096, 4096)


def _gathered_blocks() -> ga.TokenGraph:
    """Blocks of 64 whose senders are drawn anywhere."""
    index = torch.rand(128, 128, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    return ga.TokenGraph.from_block_indices(index, 64, 8192, 8192)


@pytest.mark.parametrize(
    ("make", "batch", "score_mod"),
    [
        (lambda: patterns.window(8192, 256), 1, None),
        (lambda: patterns.window(8192, 256), 1, score_mods.softcap(3.0)),
        (lambda: patterns.documents([512] * 8), 4, score_mods.softcap(3.0)),
        (_gathered_blocks, 1, None),
        (_list_of_many_masks, 1, None),
    ],
    ids=["window", "window, score_mod", "documents, score_mod", "gathered blocks", "list"],
)
def test_no_tensor_but_results_takes_more_than_4_mib(make, batch, score_mod):
    """What is larger is mapped anew by the allocator in every step, page by page."""
    graph = make()
    inputs = qkv(graph.num_dst, heads=4, kv_heads=4, dim=16, batch=batch, dtype=torch.float32)
    assert inputs[0].numel() * 4 <= 2**22
    with Largest() as seen:
        gradients(ga.attend(*inputs, graph, score_mod=score_mod, backend=TILES), inputs)
    assert seen.numbers * 4 <= 2**22
