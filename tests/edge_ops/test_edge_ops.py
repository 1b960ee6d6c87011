"""The primitives equal dense formulas, on every kind of graph, and have derivatives of every order."""

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv, randn
from support.pair_formula import WEIGHTS, sparsemax

import gnn_attention as ga
from gnn_attention import edge_ops, patterns
from gnn_attention.edge_ops import csr_primitives

NUM_DST, NUM_SRC, HEADS, BATCH = 9, 7, 4, 2


def random_mask():
    mask = torch.rand(NUM_DST, NUM_SRC, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[2], mask[:, 3] = False, False
    return mask


def unsorted_list():
    edges = random_mask().nonzero().T.flip(0)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(2))
    return ga.TokenGraph.from_edges(edges[:, order], NUM_DST, NUM_SRC)


def from_rule(rule, **sizes):
    return ga.TokenGraph.from_rule(rule, NUM_DST, NUM_SRC, **sizes)


GRAPHS = {
    "list": unsorted_list,
    "mask": lambda: ga.convert.from_mask(random_mask()),
    "rule": lambda: from_rule(lambda b, h, dst, src: (src + dst) % 3 != 1),
    "by head": lambda: from_rule(lambda b, h, dst, src: (src + h) % 3 != dst % 3, heads=HEADS),
    "by sample": lambda: from_rule(lambda b, h, dst, src: (src + b) % 3 != dst % 3, batch=BATCH),
    "by both": lambda: from_rule(lambda b, h, i, j: (i + j) % (2 + b + h) != 1, batch=BATCH, heads=HEADS),
    "chosen": lambda: ga.TokenGraph.from_indices(
        randn(BATCH, HEADS, NUM_DST, NUM_SRC).argsort(-1)[..., :3], NUM_SRC
    ),
    "no edges": lambda: ga.convert.from_mask(random_mask() & False),
}
LISTS = ("list", "mask", "rule")


@pytest.fixture(params=[10**9, 0], ids=["folded", "head by head"], autouse=True)
def _way(request, monkeypatch):
    monkeypatch.setattr(csr_primitives, "MAX_EDGES", request.param)


def inputs(**options):
    return qkv(NUM_DST, NUM_SRC, HEADS, **options)


def to_matrix(values, graph, fill=0.0):
    """Return values of the edges of a graph without slices as ``[B, H, dst, src]``."""
    src, dst = graph.edge_index
    matrix = values.new_full((*values.shape[:2], graph.num_dst, graph.num_src), fill)
    matrix[:, :, dst, src] = values
    return matrix


@pytest.mark.parametrize("name", GRAPHS)
def test_attention_in_three_primitives_is_attend(name):
    graph, (q, k, v) = GRAPHS[name](), inputs()
    weights = edge_ops.softmax(edge_ops.gather_products(q, k, graph) * 8**-0.5, graph)
    results = [edge_ops.aggregate(weights, v, graph), ga.attend(q, k, v, graph, backend="reference")]
    grads = [torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in results]
    assert_exact(*results)
    assert_exact(*grads)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_scatter_is_the_transpose_of_aggregate(name, kv_heads):
    graph = GRAPHS[name]()
    q, k, _ = inputs(kv_heads=kv_heads)
    weights = edge_ops.gather_products(q, k, graph)
    v, x = randn(BATCH, kv_heads, NUM_SRC, 3, seed=1), randn(BATCH, HEADS, NUM_DST, 3, seed=2)
    product = (edge_ops.aggregate(weights, v, graph) * x).sum()
    transposed = (v * edge_ops.scatter(weights, x, graph, kv_heads)).sum()
    assert_exact(product, transposed, largest=float((weights.abs().sum() * 10).detach()))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("normaliser", WEIGHTS)
def test_normalisers_are_the_dense_formulas(name, normaliser):
    graph = GRAPHS[name]()
    s = (2 * randn(BATCH, HEADS, graph.num_edges)).requires_grad_()
    src, dst = graph.edge_index
    weights = edge_ops.normalise(s, graph, normaliser)
    expected = WEIGHTS[normaliser](to_matrix(s, graph), graph.mask())[:, :, dst, src]
    assert_exact(weights, expected)
    direction = randn(*s.shape, seed=4)
    assert_exact(*(torch.autograd.grad(w, s, direction)[0] for w in (weights, expected)))


@pytest.mark.parametrize("name", LISTS)
def test_sums_and_maxima_are_those_of_the_rows(name):
    graph = GRAPHS[name]()
    s = 3 * randn(BATCH, HEADS, graph.num_edges)
    (src, dst), has_edges = graph.edge_index, graph.mask().any(1)
    table = to_matrix(s, graph)
    assert_exact(edge_ops.cumsum(s, graph), table.cumsum(-1)[:, :, dst, src])
    reverse = table.flip(-1).cumsum(-1).flip(-1)
    assert_exact(edge_ops.cumsum(s, graph, reverse=True), reverse[:, :, dst, src])
    table = to_matrix(s, graph, -torch.inf)
    for function, expected in ((edge_ops.maximum, table.amax(-1)), (edge_ops.logsumexp, table.logsumexp(-1))):
        result = function(s, graph)
        assert_exact(result[:, :, has_edges], expected[:, :, has_edges])
        assert (result[:, :, ~has_edges] == -torch.inf).all()


def test_sums_of_single_edges_have_derivatives():
    graph, s = patterns.self_loops(4), randn(1, 1, 4)
    assert_exact(torch.func.grad(lambda s: edge_ops.cumsum(s, graph).sum())(s), torch.ones_like(s))


def test_a_nan_stays_with_its_receiver():
    graph = unsorted_list()
    s, dst = randn(1, 1, graph.num_edges), graph.edge_index[1]
    poisoned = s.clone()
    poisoned[..., 0] = torch.nan
    is_reached = dst == dst[0]
    for function in (edge_ops.softmax, edge_ops.cumsum, lambda s, g: edge_ops.normalise(s, g, "sparsemax")):
        result, expected = function(poisoned, graph), function(s, graph)
        assert_exact(result[..., ~is_reached], expected[..., ~is_reached])
        assert result[..., is_reached].isnan().any()
    assert edge_ops.normalise(poisoned, graph, "sparsemax")[..., is_reached].isnan().all()


def test_sparsemax_of_large_and_infinite_logits():
    graph = unsorted_list()
    s, (src, dst) = randn(1, 1, graph.num_edges), graph.edge_index
    weights = edge_ops.normalise(s, graph, "sparsemax")
    assert_exact(edge_ops.normalise(s + 2.0**30, graph, "sparsemax"), weights, largest=2.0**30)
    infinite = s.masked_fill(src == 1, -torch.inf)
    expected = sparsemax(to_matrix(infinite, graph, -1e9).clamp(min=-1e9))[:, :, dst, src]
    weights = edge_ops.normalise(infinite, graph, "sparsemax")
    assert_exact(weights[..., src != 1], expected[..., src != 1])
    assert not weights[..., src == 1].any()


FUNCTIONS = {
    "gather_products": lambda g, s, q, k: edge_ops.gather_products(q, k, g),
    "aggregate": lambda g, s, q, k: edge_ops.aggregate(s, k, g),
    "scatter": lambda g, s, q, k: edge_ops.scatter(s, q, g, 1),
    "softmax": lambda g, s, q, k: edge_ops.softmax(s, g),
    "sparsemax": lambda g, s, q, k: edge_ops.normalise(s, g, "sparsemax"),
    "cumsum": lambda g, s, q, k: edge_ops.cumsum(s, g),
    "maximum": lambda g, s, q, k: edge_ops.maximum(s, g)[:, :, g.in_degree() > 0],
    "logsumexp": lambda g, s, q, k: edge_ops.logsumexp(s, g)[:, :, g.in_degree() > 0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_kind(name):
    graph = ga.convert.from_mask(random_mask()[:4, :4])
    arguments = randn(1, 2, graph.num_edges), randn(1, 2, 4, 2, seed=1), randn(1, 1, 4, 2, seed=2)
    arguments = [x.requires_grad_() for x in arguments]

    def run(*tensors):
        return FUNCTIONS[name](graph, *tensors) + 0 * sum(x.sum() for x in tensors)

    assert torch.autograd.gradcheck(run, arguments, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, arguments, check_fwd_over_rev=True, fast_mode=True)
    leaves = [x.detach() for x in arguments]
    hessian = torch.func.hessian(lambda *x: run(*x).sin().sum())(*leaves)
    twice = torch.func.jacfwd(torch.func.jacfwd(lambda *x: run(*x).sin().sum()))(*leaves)
    assert_exact(hessian[0], twice[0], largest=10.0)


def test_compiled_exported_and_mapped():
    graph, (q, k, v) = unsorted_list(), (x.detach() for x in inputs())

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            s = edge_ops.gather_products(q, k, graph)
            weights = edge_ops.normalise(edge_ops.cumsum(s, graph), graph, "sparsemax")
            return edge_ops.aggregate(weights + edge_ops.softmax(s, graph), v, graph)

    layer = Layer()
    expected = layer(q, k, v)
    assert_exact(torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v), expected)
    assert_exact(torch.export.export(layer, (q, k, v)).module()(q, k, v), expected)
    assert_exact(torch.vmap(layer)(*(x.unsqueeze(1) for x in (q, k, v))).squeeze(1), expected)
    tangents = [randn(*x.shape, seed=i) for i, x in enumerate((q, k, v))]

    def push():
        return torch.func.jvp(layer, (q, k, v), tuple(tangents))[1]

    assert_exact(torch.compile(push, backend="aot_eager", fullgraph=True)(), push())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_summed_in_float32(dtype):
    graph = patterns.cross(1, 4096)
    ones = torch.ones(1, 1, 4096, 1, dtype=dtype)
    s = edge_ops.gather_products(ones[:, :, :1], ones, graph)
    assert s.dtype == torch.float32
    assert edge_ops.aggregate(s, ones, graph).item() == 4096
    assert edge_ops.scatter(s.to(dtype), ones[:, :, :1], graph).dtype == dtype
    assert edge_ops.softmax(0 * s, graph).sum().item() == 1.0


GRAPH = patterns.window(4, 2)
S, X = torch.zeros(1, 2, 7), torch.zeros(1, 2, 4, 3)
BAD_CALLS = {
    r"q must be \[B, H, dst, D\] with dst = 4, got \[1, 2, 3, 3\]": lambda: edge_ops.gather_products(
        X[:, :, :3], X, GRAPH
    ),
    r"q and k must have the same dim": lambda: edge_ops.gather_products(X, X[..., :2], GRAPH),
    r"k must have a number of heads that divides 1, got 2": lambda: edge_ops.gather_products(
        X[:, :1], X, GRAPH
    ),
    r"w must be \[B, H, 7\], got \[1, 2, 6\]": lambda: edge_ops.aggregate(S[..., :6], X, GRAPH),
    r"v must have 1 or 1 samples, got 2": lambda: edge_ops.aggregate(S, X.expand(2, -1, -1, -1), GRAPH),
    r"x must have the 2 heads of w, a multiple of num_kv_heads": lambda: edge_ops.scatter(S, X, GRAPH, 3),
    r"normaliser must be one of 'softmax', .*, got 'soft'": lambda: edge_ops.normalise(S, GRAPH, "soft"),
    r"normaliser must return weights of the shape of the logits, \[1, 2, 7\]": lambda: edge_ops.normalise(
        S, GRAPH, lambda s: s[..., :2]
    ),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_shapes_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()


def test_bad_types_are_named():
    with pytest.raises(TypeError, match="graph must be a TokenGraph, got"):
        edge_ops.softmax(S, torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"s must be a float tensor \[B, H, E\], got torch.int64"):
        edge_ops.softmax(S.long(), GRAPH)
    with pytest.raises(TypeError, match=r"normaliser must be one of softmax, .*, or a function"):
        edge_ops.normalise(S, GRAPH, 3)
