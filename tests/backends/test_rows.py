"""The rows backend passes the checks of ``verify``, and equals the reference on irregular graphs."""

import pytest
import torch
from support.bounds import assert_exact, assert_results, assert_rule, attention_truth
from support.covering import thin
from support.inputs import qkv, random_edges

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, Backend, reference, rows
from gnn_attention.edge_ops import csr_primitives
from gnn_attention.verify.cases import BATCH_SIZE, FEATURES, GRAPHS
from gnn_attention.verify.groups import build_checks

ROWS = BACKENDS["rows"]
ORACLE = Backend("reference", reference.run)
SMALL = [name for name, case in GRAPHS.items() if "97" not in name and case.sizes[0] == BATCH_SIZE]


def make_irregular_graph(seed=0):
    edges = random_edges(12, 15, 50, seed)
    return ga.convert.from_edge_index(edges[:, edges[1] != 5], 12, 15)


def solve(backend, graph, inputs, direction=1.0, **options):
    """Return out, lse and the gradients of q, k, v and every learned option."""
    out, info = ga.attend(*inputs, graph, backend=backend, return_info=True, **options)
    rng = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype)
    has_edges = (graph.in_degree() > 0).expand(info.lse.shape)
    total = (out * weights).sum() + direction * info.lse[has_edges].sin().sum()
    leaves = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [out, info.lse, *torch.autograd.grad(total, leaves)]


HEAD_BY_HEAD = pytest.param(0, id="head by head", marks=pytest.mark.slow)


@pytest.mark.parametrize("at_once", [pytest.param(rows.MAX_LOGITS_AT_ONCE, id="at once"), HEAD_BY_HEAD])
@pytest.mark.parametrize("graph", thin(SMALL, 2))
def test_every_graph_and_feature_of_verify(graph, at_once, monkeypatch):
    """Check every third feature in float64, and one in each other dtype; ``verify`` checks all."""
    monkeypatch.setattr(rows, "MAX_LOGITS_AT_ONCE", at_once)
    if not at_once:
        monkeypatch.setattr(csr_primitives, "MAX_EDGES", 0)
    number, features = list(GRAPHS).index(graph), list(FEATURES)
    options = {"float64": features[number % 3 :: 3]}
    for index, dtype in enumerate(("bfloat16", "float16", "float32")):
        options[dtype] = [features[(number + 3 * index) % len(features)]]
    outcomes = []
    for dtype, names in options.items():
        values = {"dtype": [dtype], "graph": [graph], "option": names, "size": ["inputs x1"]}
        outcomes += [check() for check in build_checks("attend", values, "cpu", (ROWS,))]
    assert any(x.passed for x in outcomes)
    assert not [(x.dtype, x.name, x.message) for x in outcomes if not (x.passed or x.skipped)]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("senders", [(), (3,), (8, 2, 5)], ids=str)
@torch.no_grad()
def test_one_receiver_equals_the_formula(senders, with_sinks):
    """A decoding step builds no lists; the receiver may be isolated."""
    graph = ga.TokenGraph.from_indices(torch.tensor([[*senders, -1]]), 15)
    inputs, sinks = [x.detach() for x in qkv(1, 15)], draw_leaf(4).detach() if with_sinks else None
    out, info = ga.attend(*inputs, graph, sink_logits=sinks, backend=ROWS, return_info=True)
    mask = torch.zeros(1, 15, dtype=torch.bool).index_fill(1, torch.tensor(senders, dtype=torch.int64), True)
    q, k = inputs[0], inputs[1].repeat_interleave(2, 1)
    lse = (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf).logsumexp(-1)
    if with_sinks and senders:
        lse = torch.logaddexp(lse, sinks.view(1, 4, 1))
    truth = attention_truth(*inputs, mask, sink_logits=sinks).out
    assert_exact(out, truth)
    assert_exact(info.lse.exp(), lse.exp())
    head_major, token_major = (x.contiguous() for x in inputs), (x.mT.contiguous().mT for x in inputs)
    for tensors in (head_major, token_major):
        assert_exact(ga.attend(*tensors, graph, sink_logits=sinks, backend=ROWS), truth)
    infinite_keys = torch.full_like(inputs[1], -torch.inf)
    assert not ga.attend(torch.ones_like(q), infinite_keys, inputs[2], graph, backend=ROWS).any()
    graph_by_sample = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src + b) % 3 == 0, 1, 15, batch=2)
    assert_exact(*(ga.attend(*inputs, graph_by_sample, backend=name) for name in ("rows", "reference")))


def draw_leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


OPTIONS = {
    "plain": lambda count: {},
    "scale": lambda count: {"scale": 0.9},
    "bias": lambda count: {"bias": draw_leaf(2, 4, count)},
    "bias of all": lambda count: {"bias": draw_leaf(count)},
    "bias of a head": lambda count: {"bias": draw_leaf(4, count)},
    "bias of a sample": lambda count: {"bias": draw_leaf(2, 1, count)},
    "sinks": lambda count: {"sink_logits": draw_leaf(4)},
    "score_mod": lambda count: {"score_mod": score_mods.alibi(score_mods.alibi_slopes(4))},
    "all": lambda count: {
        "score_mod": score_mods.softcap(2.0),
        "bias": draw_leaf(2, 4, count),
        "sink_logits": draw_leaf(4),
    },
}


@pytest.mark.parametrize("at_once", [rows.MAX_LOGITS_AT_ONCE, 0], ids=["at once", "head by head"])
@pytest.mark.parametrize(
    ("seed", "options"), [(number % 2, name) for number, name in enumerate(OPTIONS)], ids=str
)
def test_irregular_graphs_with_an_unsorted_list(options, seed, at_once, monkeypatch):
    """Out, lse and gradients equal those of the reference; the bias has the order of the list."""
    monkeypatch.setattr(rows, "MAX_LOGITS_AT_ONCE", at_once)
    torch.manual_seed(seed)
    graph = make_irregular_graph(seed=seed)
    inputs, arguments = qkv(12, 15), OPTIONS[options](graph.num_edges)
    assert_results(solve(ROWS, graph, inputs, **arguments), solve(ORACLE, graph, inputs, **arguments))


@pytest.mark.parametrize("at_once", [rows.MAX_LOGITS_AT_ONCE, 0], ids=["at once", "head by head"])
def test_a_learned_score_mod_gets_its_gradient(at_once, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LOGITS_AT_ONCE", at_once)
    graph, inputs = make_irregular_graph().rows(3, 9), qkv(6, 15)
    table = torch.randn(2, 4, 12, 15, dtype=torch.float64).requires_grad_()
    mod, grads = lambda s, b, h, dst, src: s + table[b, h, dst, src].sin(), []
    for backend in (ROWS, ORACLE):
        out = ga.attend(*inputs, graph, score_mod=mod, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), (table, *inputs)))
    assert_exact(*grads)


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sums_over_hubs_are_within_the_rule(transposed):
    """Three tokens have 1,000 edges; sequential sums had gradients with ten times SDPA's error."""
    rng = torch.Generator().manual_seed(0)
    graph = patterns.window(1000, 8) | patterns.sinks(1000, 3)
    graph = graph.T if transposed else graph
    q, k, v, direction = (torch.randn(1, 1, 1000, 16, generator=rng) for _ in range(4))
    direction = direction + 1
    leaves = {name: x.requires_grad_() for name, x in {"q": q, "k": k, "v": v}.items()}
    out = ga.attend(q, k, v, graph, backend="rows")
    gradients = dict(zip("qkv", torch.autograd.grad(out, list(leaves.values()), direction), strict=True))
    assert_rule(out, gradients, attention_truth(q, k, v, graph, direction))


@pytest.mark.parametrize("mod", [None, lambda score, *indices: score + 0], ids=["fused", "written out"])
def test_equal_weights_are_summed_within_the_rule(mod):
    """All additions round in one direction; sequential sums of 5,000 had 40 times SDPA's error."""
    graph, rng = patterns.cross(3, 5000), torch.Generator().manual_seed(0)
    leaves = {"q": torch.full((1, 1, 3, 8), 0.37), "k": torch.full((1, 1, 5000, 8), 0.3)}
    leaves["v"], direction = torch.full((1, 1, 5000, 8), 1.1), torch.randn(1, 1, 3, 8, generator=rng)
    truth = attention_truth(*leaves.values(), graph, direction)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    out = ga.attend(*leaves.values(), graph, score_mod=mod, backend="rows")
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), direction), strict=True))
    assert_rule(out, gradients, truth)
