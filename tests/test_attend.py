"""The verb: against SDPA and plain loops, its errors by name, its extras (lse, weights, dropout, explain),
and compilation.
"""

import gc
import math
import weakref
from itertools import product

import pytest
import torch
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, Backend, dense, flex, support_matrix
from gnn_attention.backends.call import AttentionCall
from gnn_attention.verify.cases import graph_cases

NAMES = ["dense", "mixed", "reference", "rows", "split", "tiles"]
FULL = [name for name in NAMES if name != "mixed"]  # those that hold every option

OUT, LSE = (2, 4, 9, 6), (2, 4, 9)  # shapes for qkv()

# torch's own compiler instantiates autograd.Function, which torch itself calls deprecated
quiet = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def qkv(dst=9, src=9, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=torch.float64, batch=2, seed=0):
    """Random q, k, v of the given sizes."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, dst, dim), (batch, kv_heads, src, dim), (batch, kv_heads, src, value_dim))
    return tuple(torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)


def by_loops(q, k, v, edges, scale):
    """Receiver by receiver, sender by sender: the definition, with nothing shared with the library."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                senders = [s for s, d in edges if d == i]
                if senders:
                    logits = torch.stack([q[b, h, i] @ k[b, h // group, j] * scale for j in senders])
                    out[b, h, i] = torch.softmax(logits, 0) @ v[b, h // group, senders]
    return out


@pytest.mark.parametrize("backend", [*NAMES, "auto"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_loops_over_an_irregular_graph(backend, scale):
    """An asymmetric bipartite list with grouped heads, Dv != D and an isolated row."""
    edges = [(4, 1), (0, 1), (6, 0), (2, 3), (6, 3), (3, 3), (1, 4)]
    q, k, v = qkv(dst=5, src=7)
    graph = ga.convert.from_edge_index(torch.tensor(edges).t(), 5, 7)
    found = ga.attend(q, k, v, graph, scale=scale, backend=backend)
    assert_exact(found, by_loops(q, k, v, edges, scale or 8**-0.5))
    assert (found[:, :, 2] == 0).all()


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_q_and_lse_is_wide(backend, dtype):
    """Half in, half out; lse in float32."""
    out, info = ga.attend(*qkv(dtype=dtype), patterns.window(9, 3), backend=backend, return_info=True)
    assert (out.dtype, out.shape) == (dtype, OUT)
    assert (info.lse.dtype, info.lse.shape) == (torch.float32, LSE)


def test_seventy_thousand_equal_fp16_logits_give_the_mean():
    """A denominator beyond fp16's range: plain half arithmetic returns 0 here."""
    n = 70_000
    q, k, v = (torch.ones(1, 1, t, 2, dtype=torch.float16) for t in (1, n, n))
    graph = patterns.cross(1, n)
    truth = attention_truth(q, k, v * 0.5, graph)
    for backend in NAMES:
        assert_rule(ga.attend(q, k, v * 0.5, graph, backend=backend), {}, truth)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0]).double()], ids=["plain", "sinks"])
def test_lse_of_an_isolated_row_is_minus_infinity(backend, sinks):
    """And its output is 0, with sinks too."""
    q, k, v = qkv(dst=4, src=3, heads=2, kv_heads=1, batch=1)
    graph = ga.TokenGraph.from_edges(torch.tensor([[0, 2], [1, 1]]), 4, 3)
    out, info = ga.attend(q, k, v, graph, sink_logits=sinks, backend=backend, return_info=True)
    isolated = torch.tensor([True, False, True, True])
    assert torch.equal(info.lse == -torch.inf, isolated.expand(1, 2, 4))
    assert info.lse[..., 1].isfinite().all()
    assert torch.equal((out == 0).all(-1), isolated.expand(1, 2, 4))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.5, -2.0], dtype=torch.float64)], ids=["plain", "sinks"]
)
@pytest.mark.parametrize(
    "graph",
    [patterns.causal(3), patterns.window(300, 40), patterns.erdos_renyi(90, 0.05)],
    ids=lambda g: g.name,
)
def test_logits_that_overflow_to_minus_infinity(backend, sinks, graph):
    """They equal no edges; where all of them do, the output is 0 and lse that of the sink alone."""
    n = graph.num_dst
    q, k, v = qkv(dst=n, src=n, heads=2, kv_heads=1, batch=1)
    loud, low = (torch.arange(n) % 3 == 1).view(n, 1), (torch.arange(n) < n / 2).view(n, 1)
    q, k = torch.zeros_like(q).masked_fill(loud, 1e200), (k * 1e-200).masked_fill(low, -1e200)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, info = ga.attend(*given, graph, sink_logits=sinks, backend=backend, return_info=True)
    edges = graph.mask() & ~(loud & low.T)
    logits = (q @ k.mT * 8**-0.5).masked_fill(~edges, -torch.inf)
    empty = ~edges.any(-1) & graph.mask().any(-1)
    extra = torch.full((2,), -torch.inf, dtype=torch.float64) if sinks is None else sinks
    lse = torch.cat([logits, extra.view(1, 2, 1, 1).expand(1, 2, n, 1)], -1).logsumexp(-1).detach()
    lse = lse.masked_fill(~graph.mask().any(-1), -torch.inf)
    assert empty.any()
    assert (out[:, :, empty] == 0).all()
    assert_exact(info.lse, lse)
    weights = (logits - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp()
    assert_exact(out, weights @ v)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), given))


@pytest.mark.parametrize("backend", FULL)
def test_lse_with_sinks_and_bias(backend):
    """Lse = log(sum exp(logit) + exp(sink)), written out."""
    q, k, v = qkv(dst=1, src=3, heads=2, kv_heads=2, batch=1)
    bias, sinks = torch.tensor([0.5, -1.0, 2.0]).double(), torch.tensor([0.3, -4.0]).double()
    options = {"bias": bias, "sink_logits": sinks, "backend": backend}
    out, info = ga.attend(q, k, v, patterns.cross(1, 3), **options, return_info=True)
    logits = torch.einsum("hd,hjd->hj", q[0, :, 0], k[0]) * 8**-0.5 + bias
    total = logits.exp().sum(-1) + sinks.exp()
    assert_exact(info.lse[0, :, 0], total.log())
    assert_exact(out[0, :, 0], torch.einsum("hj,hjv->hv", logits.exp() / total[:, None], v[0]))
    assert_exact(info.weights()[0], logits.exp() / total[:, None])


@pytest.mark.parametrize("backend", FULL)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 7), (4, 1), (2, 1, 7), (2, 4, 7)])
def test_bias_broadcasts_to_samples_heads_edges(backend, shape):
    """Every broadcastable shape equals the full one."""
    graph = ga.convert.from_edge_index(torch.tensor([[4, 0, 6, 2, 6, 3, 1], [1, 1, 0, 3, 3, 3, 4]]), 5, 7)
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = qkv(dst=5, src=7)
    full = bias.expand(2, 4, 7).contiguous()
    found, wanted = (ga.attend(q, k, v, graph, bias=b, backend=backend) for b in (bias, full))
    assert_exact(found, wanted)


@pytest.mark.parametrize("backend", FULL)
def test_minus_infinity_on_an_edge_removes_it(backend):
    q, k, v = (x.requires_grad_() for x in qkv(dst=3, src=3))
    graph = patterns.causal(3)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[[1, 2, 3]] = -torch.inf  # both in-edges of receiver 1, and 0 -> 2
    out, info = ga.attend(q, k, v, graph, bias=bias, backend=backend, return_info=True)
    rest = ga.convert.from_edge_index(torch.tensor([[0, 1, 2], [0, 2, 2]]), 3, 3)
    wanted, other = ga.attend(q, k, v, rest, backend=backend, return_info=True)
    assert_exact(out, wanted)
    assert_exact(info.lse, other.lse)
    assert (out[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("backend", FULL)
def test_dropout_keeps_the_mean_and_zero_is_exact(backend):
    """The others are scaled up; half of them are dropped, independently for each edge and head."""
    n = 400
    q, k, v = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1), torch.ones(1, 1, n, 1)
    torch.manual_seed(0)
    out = ga.attend(q, k, v, patterns.full(n), dropout=0.5, backend=backend).flatten()
    deviation = (n / 4) ** 0.5 * 2 / n  # of the mean of n Bernoulli(1/2) values, times 2
    assert abs(out.mean() - 1) < 5 * deviation / n**0.5
    # the deviation of n numbers has itself one of 1 / sqrt(2 n) = 0.035 of it: 5 of those
    assert 0.8 < out.std() / deviation < 1.2
    assert torch.equal(ga.attend(q, k, v, patterns.full(n), backend=backend).flatten(), torch.ones(n))


def test_graphs_by_head_and_by_sample_run_each_on_its_own_edges():
    """A graph that differs by sample and head equals separate calls on its parts."""
    q, k, v = qkv()
    rule = lambda b, h, dst, src: (dst - src >= 0) & (dst - src <= b + h)  # noqa: E731
    graph = ga.TokenGraph.from_rule(rule, 9, heads=4, batch=2)
    for name in NAMES:
        whole = ga.attend(q, k, v, graph, backend=name)
        for b, h in product(range(2), range(4)):
            part = (x[b, at].view(1, 1, 9, -1) for x, at in ((q, h), (k, h // 2), (v, h // 2)))
            assert_exact(whole[b, h], ga.attend(*part, patterns.window(9, b + h + 1), backend=name)[0, 0])


def test_score_mods_get_absolute_positions_and_query_heads():
    """On rows 5..8 of a graph dst counts from 5."""
    seen = {}

    def spy(score, b, h, dst, src):
        seen.update(b=b.flatten().tolist(), h=h.flatten().tolist(), dst=sorted(set(dst.flatten().tolist())))
        return score

    q, k, v = qkv(dst=4)
    for name in FULL:
        ga.attend(q, k, v, patterns.causal(9).rows(5, 9), score_mod=spy, backend=name)
        assert seen == {"b": [0, 1], "h": [0, 1, 2, 3], "dst": [5, 6, 7, 8]}


@pytest.mark.parametrize("backend", FULL)
@pytest.mark.parametrize("graph", [patterns.causal(9), patterns.window(9, 3), patterns.causal(9).rows(4, 9)])
def test_a_score_mod_without_a_value_on_non_edges_spoils_nothing(backend, graph):
    """Divided by 0 where dst + 1 = src: it must not come back as 0 * inf in a gradient."""
    q, k, v = (x.requires_grad_() for x in qkv(dst=graph.num_dst))
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    mods = [
        lambda s, b, h, dst, src, least=least: weight * s / (dst - src + 1).clamp(min=least)
        for least in (0, 1)
    ]
    found, wanted = (ga.attend(q, k, v, graph, score_mod=mod, backend=backend) for mod in mods)
    assert_exact(found, wanted)
    gradients = [torch.autograd.grad(out.sum(), [q, k, v, weight]) for out in (found, wanted)]
    assert_exact(*gradients)


def test_a_score_mod_without_a_value_on_non_edges_where_the_graph_varies():
    """Each head borrows from its own edges, a head without any from those of the others."""
    some = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src < dst - h) & (h > 0), 9, heads=4)
    for graph in (some, patterns.strict_causal(9) - patterns.full(9)):
        q, k, v = (x.requires_grad_() for x in qkv())
        mod, none = (lambda s, b, h, dst, src: s / (dst - src - h)), {"materialize_grads": True}
        outs = [ga.attend(q, k, v, graph, score_mod=mod, backend=n) for n in FULL]
        gradients = [torch.autograd.grad(out.sum(), [q, k, v], allow_unused=True, **none) for out in outs]
        for out, slopes in zip(outs[1:], gradients[1:], strict=True):
            assert_exact(outs[0], out)
            assert_exact(gradients[0], slopes)


@pytest.mark.parametrize("backend", FULL)
def test_a_score_mod_of_another_dtype_or_shape_is_fitted(backend):
    """A float64 table added to float32 scores; a function of the positions alone."""
    q, k, v = qkv(dtype=torch.float32)
    places, graph = torch.arange(9.0), patterns.causal(9)
    distances = places.view(-1, 1) - places
    for mod, queries, added in (
        (lambda score, b, h, dst, src: score + torch.arange(9).double()[src], q, places),
        (lambda score, b, h, dst, src: (dst - src).double(), torch.zeros_like(q), distances),
    ):
        found = ga.attend(q, k, v, graph, score_mod=mod, backend=backend)
        assert found.dtype == torch.float32
        assert_rule(found, {}, attention_truth(queries, k, v, graph, added=added))


@pytest.mark.parametrize("backend", NAMES)
def test_autocast_does_not_reach_the_sums(backend):
    """float32 in, float32 out, with the accuracy of float32: also lse."""
    q, k, v = qkv(dtype=torch.float32)
    wide, graph = [x.double() for x in (q, k, v)], patterns.causal(9)
    products = wide[0] @ wide[1].repeat_interleave(2, 1).mT * 8**-0.5
    reach = float((q.abs() @ k.abs().repeat_interleave(2, 1).mT).max()) * 8**-0.5
    for options in ({}, {"score_mod": score_mods.softcap(2.0)}) if backend in FULL else ({},):
        _, exact = ga.attend(*wide, graph, backend="reference", return_info=True, **options)
        # SDPA has no softcap, but takes what one adds as a table
        added = 2 * torch.tanh(products / 2) - products if options else None
        truth = attention_truth(q, k, v, graph, added=added)
        with torch.autocast("cpu", torch.bfloat16):
            found, info = ga.attend(q, k, v, graph, backend=backend, return_info=True, **options)
            alone = ga.attend(q, k, v, graph, backend=backend, **options)
        assert info.lse.dtype == torch.float32
        assert_rule(found, {}, truth)
        assert_rule(alone, {}, truth)
        # the product of 8 channels, scaled (9), softcap (6), a sum of 9 exponentials (11), a logarithm (3)
        # plus the largest logit
        assert_sum(info.lse, exact.lse, 30, reach + float(exact.lse.abs().max()))


@pytest.mark.parametrize("backend", NAMES)
def test_vmap_and_grad_of_torch_func(backend):
    """One more axis in front."""
    q, k, v = (torch.stack([x, x + 1]) for x in qkv())
    graph = patterns.window(9, 3)

    def run(q, k, v):
        return ga.attend(q, k, v, graph, backend=backend)

    wanted = torch.stack([run(*x) for x in zip(q, k, v, strict=True)])
    assert_exact(torch.func.vmap(run)(q, k, v), wanted)
    slope = torch.func.grad(lambda q: run(q, k[0], v[0]).sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    assert_exact(slope, torch.autograd.grad(run(leaf, k[0], v[0]).sum(), leaf)[0])


@pytest.mark.parametrize("graph", [patterns.full(9), patterns.causal(9)])
def test_a_nan_does_not_cost_a_mask_of_all_pairs(graph):
    """Full and causal graphs never become T x T, poisoned or not, compiled or not."""
    q, k, v = qkv()
    q[:, :, 3] = torch.nan
    found = ga.attend(q, k, v, graph, backend="dense").isnan().any(-1)[0, 0]
    assert found.tolist() == [i == 3 for i in range(9)]
    assert not [key for key in graph._memo if key[0] in ("_dense", "_enumerate")]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dst", "src", "batch"), [(0, 3, 2), (3, 0, 2), (0, 0, 1), (3, 3, 0)])
@pytest.mark.parametrize("extra", [{}, {"score_mod": score_mods.softcap(1.0)}])
def test_nothing_at_all_is_a_size_too(backend, dst, src, batch, extra):
    """No receivers, no senders, no samples: zeros of the right shape."""
    extra = extra if backend in FULL else {}
    q, k, v = qkv(dst=dst, src=src, batch=batch, kv_heads=4)
    out = ga.attend(q, k, v, patterns.cross(dst, src), backend=backend, **extra)
    assert out.shape == (batch, 4, dst, 6)
    assert (out == 0).all()


@pytest.mark.parametrize("backend", FULL)
def test_gradcheck(backend):
    """Numerical derivatives of every input, bias and sinks included."""
    graph = ga.convert.from_edge_index(torch.tensor([[1, 0, 2, 2], [1, 1, 0, 3]]), 4, 3)
    small = qkv(dst=4, src=3, heads=2, kv_heads=1, dim=2, value_dim=3, batch=1)
    q, k, v = (x.requires_grad_() for x in small)
    bias, sinks = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (4, 2))

    def run(q, k, v, bias, sinks):
        options = {"bias": bias, "sink_logits": sinks, "score_mod": score_mods.softcap(2.0)}
        return ga.attend(q, k, v, graph, **options, backend=backend)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))


@pytest.mark.parametrize("backend", NAMES)
def test_weights_have_gradients(backend):
    """A loss on weights reaches q and k: equal to the derivative of a dense softmax."""
    q, k, v = (x.requires_grad_() for x in qkv(heads=2, kv_heads=2))
    graph = patterns.causal(9)
    _, info = ga.attend(q, k, v, graph, backend=backend, return_info=True)
    src, dst = graph.edge_index
    direction = torch.randn(len(src), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((info.weights() * direction).sum(), [q, k])
    dense = torch.softmax((q @ k.mT * 8**-0.5).masked_fill(~graph.mask(), -torch.inf), -1)
    wanted = torch.autograd.grad((dense[:, :, dst, src] * direction).sum(), [q, k])
    assert_exact(found, wanted)


def test_logits_are_those_of_the_formula_and_may_be_chosen():
    """Before the softmax, score_mod and bias included."""
    q, k, v = qkv(heads=2, kv_heads=2)
    graph, bias = patterns.causal(9), torch.arange(45, dtype=torch.float64)
    _, info = ga.attend(q, k, v, graph, bias=bias, score_mod=score_mods.softcap(2.0), return_info=True)
    src, dst = graph.edge_index
    wanted = (2 * torch.tanh(q @ k.mT * 8**-0.5 / 2))[:, :, dst, src] + bias
    assert_exact(info.logits(), wanted)
    chosen = torch.tensor([7, 3])
    assert_exact(info.logits(chosen), wanted[..., chosen])
    assert_exact(info.weights(chosen), info.weights()[..., chosen])
    pairs = torch.tensor([[3, 0], [8, 4]])  # 3 -> 8 and 0 -> 4
    both = torch.stack([wanted[..., 8 * 9 // 2 + 3], wanted[..., 4 * 5 // 2]], -1)
    assert_exact(info.logits(edges=pairs), both)
    with pytest.raises(ValueError, match=r"4 -> 3 is no edge of .*causal\(9\)"):
        info.weights(torch.tensor([[0, 4], [0, 3]]))


WRONG_EDGES = [
    (torch.tensor([0, -1]), IndexError, r"edges must be positions in 0 .. 44, got -1 .. 0"),
    (torch.tensor([45]), IndexError, r"edges must be positions in 0 .. 44, got 45 .. 45"),
    (torch.ones(45).bool(), TypeError, r"edges must be integers, .* got torch.bool; .* nonzero"),
    (torch.tensor([1.0]), TypeError, r"edges must be integers"),
]


@pytest.mark.parametrize(("edges", "error", "message"), WRONG_EDGES)
def test_wrong_positions_of_edges_are_named(edges, error, message):
    """A negative position does not count from the end; a graph that varies has no positions."""
    _, info = ga.attend(*qkv(), patterns.causal(9), return_info=True)
    with pytest.raises(error, match=message):
        info.weights(edges)
    with pytest.raises(ValueError, match=r"differs by head has no single edge list"):
        ga.attend(*qkv(), FOUR, return_info=True)[1].weights()


def test_shapes_and_flops_can_be_had_without_data():
    """On the meta device, as for counting a large model."""
    q, k, v = (x.to("meta") for x in qkv())
    assert ga.attend(q, k, v, patterns.causal(9)).shape == (2, 4, 9, 6)


def test_auto_goes_on_to_the_edges_when_dense_is_too_large(monkeypatch):
    """And explain says so beforehand."""
    graph = patterns.window(128, 2)
    assert ga.explain(graph, 4, 8).choice == "dense"
    monkeypatch.setattr(dense, "COMFORTABLE", 10_000)
    assert ga.explain(graph, 4, 8).choice == "rows"
    q, k, v = qkv(dst=128, src=128)
    assert_exact(ga.attend(q, k, v, graph), ga.attend(q, k, v, graph, backend="dense"))


def test_a_backend_of_your_own():
    mine = Backend("mine", lambda call: (torch.full(OUT, 7.0), None))
    out, info = ga.attend(*qkv(), patterns.causal(9), backend=mine, return_info=True)
    assert (out == 7).all()
    with pytest.raises(NotImplementedError, match="returned no lse"):
        _ = info.lse
    with_lse = Backend("mine", lambda call: (torch.ones(OUT), torch.zeros(LSE)))
    info = ga.attend(*qkv(), patterns.causal(9), backend=with_lse, return_info=True)[1]
    assert torch.equal(info.lse, torch.zeros(LSE))
    picky = Backend("picky", mine.run, unsupported_reason=lambda call: "it is Friday")
    message = r"backend .picky. cannot hold this call on .*causal.*: it is Friday"
    with pytest.raises(ga.RefusalError, match=message) as refused:
        ga.attend(*qkv(), patterns.causal(9), backend=picky)
    assert refused.value.reason == "it is Friday"


WRONG_BACKENDS = {
    r"run of a Backend must be a function \(call\) -> .*, got 3 of type int": ("mine", 3),
    "unsupported_reason of a Backend must be a function .* got 'no' of type str": ("mine", max, "", "no"),
    r"bytes_needed of a Backend must be a function .* got 7 of type int": ("mine", max, "", max, 7),
    "name of a Backend must be a string, got 3 of type int": (3, max),
}


@pytest.mark.parametrize("message", WRONG_BACKENDS)
def test_a_wrong_backend_of_your_own_is_refused(message):
    with pytest.raises(TypeError, match=message):
        Backend(*WRONG_BACKENDS[message])


NO_RESULT = r"must return \(out, lse or None\)"
WRONG_RESULTS = [
    (None, TypeError, NO_RESULT + ", its run gave None"),
    (torch.ones(OUT), TypeError, NO_RESULT),
    ([torch.ones(OUT), None], TypeError, NO_RESULT),
    ((torch.ones(OUT), "lse"), TypeError, NO_RESULT),
    ((torch.ones(2, 4, 9, 4), None), ValueError, r"gave \[2, 4, 9, 4\] and None"),
    ((torch.ones(OUT), torch.ones(2, 4, 8)), ValueError, r"and \[2, 4, 8\]"),
    ((torch.ones(OUT), torch.ones(2, 4, 10)), ValueError, r"gave \[2, 4, 9, 6\] and \[2, 4, 10\]"),
    ((torch.ones(OUT), torch.ones(OUT)), ValueError, r"and \[2, 4, 9, 6\]"),
]


@pytest.mark.parametrize("name", ["mine", "dense"])  # the library's name does not make it the library's
@pytest.mark.parametrize(("result", "error", "message"), WRONG_RESULTS)
def test_a_backend_of_your_own_that_returns_something_else(result, error, message, name):
    with pytest.raises(error, match=message):
        ga.attend(*qkv(), patterns.causal(9), backend=Backend(name, lambda call: result))


def test_explain_prints_the_choice_and_counts():
    """Flops of dense and of edges by hand: 4 H D times pairs, half of them where the graph is causal."""
    text = ga.explain(patterns.window(64, 4), heads=2, dim=8)
    edges = 64 * 4 - (1 + 2 + 3)
    flops = {name: count for name, count, _, _ in text.rows}
    assert flops["dense"] == 4 * 2 * 8 * 64 * 64
    assert flops["reference"] == flops["rows"] == 4 * 2 * 8 * edges
    assert "auto takes dense" in str(text)
    assert "window(64, 4)" in str(text)
    assert ga.explain(patterns.causal(256), 2, 8).reason == "one SDPA call without a mask"
    by_sample = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - 0 * b, 64, batch=3)
    flops = {name: count for name, count, _, _ in ga.explain(by_sample, 2, 8).rows}
    assert (flops["dense"], flops["rows"]) == (4 * 2 * 8 * 3 * 64 * 64 // 2, 4 * 2 * 8 * 3 * 64 * 65 // 2)


def test_the_table_of_backends():
    """Each with its name and what it supports."""
    assert {"dense", "mixed", "reference", "rows", "tiles"} <= set(ga.list_backends()) == set(BACKENDS)
    assert all(name == backend.name and backend.supports for name, backend in BACKENDS.items())
    assert ga.list_backends()["mixed"].endswith("no score_mod, bias, dropout, second derivative")
    assert ga.list_backends()["flex"].endswith("lse on cuda only; backward pass on cuda only")


def test_the_support_matrix():
    """A row for each backend, a column for each option, from the same declarations as the refusals."""
    head, line, *rows = (row.strip("| ").split(" | ") for row in support_matrix().splitlines())
    assert set(line) == {"---"}
    assert [row[0] for row in rows] == [f"`{name}`" for name in BACKENDS]
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert found["`varlen`"]["devices"] == "cuda"
    assert found["`varlen`"]["dtypes"] == "float16, bfloat16"
    assert (found["`flex`"]["lse"], found["`flex`"]["bias"]) == ("cuda only", "no")
    assert found["`rows`"]["bias"] == "yes"
    call = AttentionCall.checked(*qkv(), patterns.causal(9), score_mod=score_mods.softcap(1.0))
    reasons = {f"`{name}`": backend.unsupported_reason(call) or "" for name, backend in BACKENDS.items()}
    without = {name for name, row in found.items() if (row["score_mod"], row["devices"]) == ("no", "all")}
    assert {name for name, reason in reasons.items() if "no score_mod" in reason} == without


@pytest.mark.parametrize("graph", [patterns.full(9), patterns.causal(9)])
def test_full_and_causal_graphs_are_one_sdpa_call_without_a_mask(monkeypatch, graph):
    """However the graph was made: also as an edge list that happens to be causal."""
    calls = []
    real = functional.scaled_dot_product_attention
    spy = lambda *a, **kw: calls.append(kw) or real(*a, **kw)  # noqa: E731
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    for same in (graph, ga.convert.from_mask(graph.mask()), graph.T.T):
        ga.attend(*qkv(), same)
    assert [kw["attn_mask"] for kw in calls] == [None] * 3
    assert {kw["is_causal"] for kw in calls} == {graph.is_causal()}


Q, K, V = qkv()
CAUSAL = patterns.causal(9)
RIGHT = by_loops(Q, K, V, [(src, dst) for dst in range(9) for src in range(dst + 1)], 8**-0.5)
BY_HEAD, FOUR = (ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - h, 9, heads=n) for n in (3, 4))
BY_SAMPLE = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - b, 9, batch=5)

WRONG = [
    (ValueError, r"q must be \[B, Hq, dst, D\], got shape \[4, 9, 8\]", {"q": Q[0]}),
    (TypeError, r"k must be a float tensor \[B, Hkv, src, D\], got list", {"k": K.tolist()}),
    (TypeError, r"v must be a float tensor \[B, Hkv, src, Dv\], got torch.int64", {"v": V.long()}),
    (ValueError, r"k must be like q \(torch.float64 on cpu\), got torch.float32 on cpu", {"k": K.float()}),
    (ValueError, r"k and v must agree in .*, got \[2, 2, 9, 8\] and \[2, 2, 5, 6\]", {"v": V[:, :, :5]}),
    (ValueError, r"must agree in B and D, got \[1, 4, 9, 8\] and \[2, 2, 9, 8\]", {"q": Q[:1]}),
    (ValueError, r"q and k must agree in B and D", {"q": Q[..., :4]}),
    (ValueError, r"heads of q must be a multiple of the heads of k, got 3 and 2", {"q": Q[:, :3]}),
    (ValueError, r"at least one channel \(D\), got shape \[2, 4, 9, 0\]", {"q": Q[..., :0], "k": K[..., :0]}),
    (TypeError, r"graph must be a TokenGraph, got Tensor; see gnn_attention", {"graph": CAUSAL.mask()}),
    (ValueError, r"does not fit q with 9 receivers and k with 9 .*rows\(", {"graph": patterns.causal(8)}),
    (ValueError, r"does not fit q with 2 receivers and k with 9 senders", {"q": Q[:, :, :2]}),
    (ValueError, r"differs by heads \(3\), but q has heads 4", {"graph": BY_HEAD}),
    (ValueError, r"differs by batch \(5\), but q has batch 2", {"graph": BY_SAMPLE}),
    (ValueError, r"differs by head has no single edge list", {"graph": FOUR, "bias": torch.zeros(3)}),
    (ValueError, r"backend must be one of 'auto', 'dense', .*'rows', .*got 'fast'", {"backend": "fast"}),
    (TypeError, r"backend must be a name or a gnn_attention.backends.Backend, got int", {"backend": 3}),
    (ValueError, r"dropout must be a probability in \[0, 1\), got 1.0", {"dropout": 1.0}),
    (ValueError, r"dropout must be a probability", {"dropout": True}),
    (TypeError, r"score_mod must be a function \(score, b, h, dst, src\) .* got float", {"score_mod": 1.0}),
    (TypeError, r"bias must be a float tensor broadcastable to \[B, Hq, E\], got list", {"bias": [0.0]}),
    (ValueError, r"bias must .* \[B, Hq, E\] = \[2, 4, 45\], got \[44\]", {"bias": torch.zeros(44)}),
    (ValueError, r"bias must be broadcastable", {"bias": torch.zeros(1, 2, 4, 45)}),
    (ValueError, r"bias must be on the device of q, cpu, got meta", {"bias": torch.zeros(45, device="meta")}),
    (ValueError, r"sink_logits must be \[Hq\] = \[4\], got \[2\]", {"sink_logits": torch.zeros(2)}),
    (TypeError, r"sink_logits must be a float tensor \[Hq\], got float", {"sink_logits": 1.0}),
    (ValueError, r"must be on the device of q", {"sink_logits": torch.zeros(4, device="meta")}),
    (TypeError, r"scale must be .*; .* lose its gradient: multiply q by it", {"scale": torch.tensor(0.5)}),
    (TypeError, r"scale must be a number or None, got str", {"scale": "0.5"}),
    (ValueError, r"scale must be finite, got nan", {"scale": math.nan}),
    (
        TypeError,
        r"must return a float tensor, .* got a torch.bool tensor",
        {"score_mod": lambda s, *_: s > 0},
    ),
    (TypeError, r"score_mod must return .* got a NoneType", {"score_mod": lambda *ends: None}),
    (ValueError, r"\[2, 4, 9, 9\], got \[1, 2, 4, 9, 9\]", {"score_mod": lambda s, b, h, dst, src: s[None]}),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_input_is_named(number):
    """Under torch.compile too; the next valid call is right."""
    error, message, changes = WRONG[number]
    call = {"q": Q, "k": K, "v": V, "graph": CAUSAL, **changes}
    with pytest.raises(error, match=message):
        ga.attend(**call)
    if number % 8 == 0:
        with pytest.raises(error, match=message):
            torch.compile(lambda: ga.attend(**call), backend="eager")()
    assert_exact(ga.attend(Q, K, V, CAUSAL), RIGHT)


@quiet
@pytest.mark.parametrize(
    "backend",
    [name if name in ("dense", "split") else pytest.param(name, marks=pytest.mark.slow) for name in FULL],
)
def test_fullgraph_compile_follows_the_graph(backend):
    """No graph breaks; another graph is another program, not the old one."""
    torch.compiler.reset()
    q, k, v = (x.requires_grad_() for x in qkv())

    def run(q, k, v, graph):
        return ga.attend(q, k, v, graph, score_mod=score_mods.softcap(3.0), backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for graph in (patterns.window(9, 3), patterns.tree([-1, 0, 0, 1, 1, 2, 2, -1, 7])):
        found, wanted = compiled(q, k, v, graph), run(q, k, v, graph)
        assert_exact(found, wanted)
        assert_exact(*(torch.autograd.grad(out.sum(), [q, k, v]) for out in (found, wanted)))


@quiet
@pytest.mark.parametrize("backend", NAMES)
def test_compiled_calls_keep_the_nan_rule(backend):
    torch.compiler.reset()
    q, k, v = qkv(dtype=torch.float32)
    v[:, :, 4] = torch.nan
    graph = patterns.window(9, 2)
    run = lambda: ga.attend(q, k, v, graph, backend=backend)  # noqa: E731
    out = torch.compile(run, fullgraph=True, backend="aot_eager")()
    assert out.isnan().any(-1).any(0).any(0).tolist() == [False] * 4 + [True] * 2 + [False] * 3


@pytest.mark.slow
def test_a_graph_may_be_made_in_a_compiled_function():
    """With a graph break, for builders, algebra, decoding rows and conversions."""
    makers = (
        lambda: patterns.causal(9),
        lambda: patterns.window(9, 3) | ~patterns.causal(9) & patterns.full(9).T,
        lambda: patterns.causal(10).rows(1, 10).T.rows(0, 9).T,
        lambda: ga.convert.from_mask(CAUSAL.mask()),
    )
    q, k, v = qkv()
    for make in makers:
        torch.compiler.reset()
        compiled = torch.compile(lambda q, make=make: ga.attend(q, k, v, make()), backend="eager")
        assert_exact(compiled(q), ga.attend(q, k, v, make()))


@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows", "mixed", "reference"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_need_not_be_positive(scale, backend):
    """Causal kernels put -inf in before they scale: 0 would make NaN of it, a negative number +inf."""
    q, k, v = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    past = torch.ones(7, 7).tril().bool()
    expected = (q @ k.mT * scale).masked_fill(~past, -torch.inf).softmax(-1) @ v
    assert_exact(ga.attend(q, k, v, patterns.causal(7), scale=scale, backend=backend), expected)


@pytest.mark.parametrize("name", [*NAMES, pytest.param("flex", id="eager_flex")])
def test_a_graph_is_freed_with_its_last_name(name, monkeypatch):
    """With all that is cached with it, at once."""
    disable = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(disable, True, raising=False)
    monkeypatch.setattr(flex, "_compiled", lambda threads: flex._attention)
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)
    count, number, grads = 0, 0, name != "flex"
    gc.collect()
    gc.disable()
    try:
        for case in graph_cases():
            graph, number = case.graph, number + 1
            del case
            sizes = (4, graph.num_dst), (2, graph.num_src)
            q, k = (torch.randn(8, *size, 4, requires_grad=grads) for size in sizes)
            biased = number % 2 and name in FULL and not (graph.heads or graph.batch)
            bias = torch.randn(graph.num_edges, requires_grad=grads) if biased else None
            try:
                out = ga.attend(q, k, k, graph, backend=name, bias=bias)
            except NotImplementedError:
                continue
            if grads:
                out.sum().backward()
            seen = weakref.ref(graph)
            del graph, out
            assert seen() is None
            count += 1
    finally:
        gc.enable()
    assert count > 5


def test_a_scale_or_dropout_that_changes_with_every_call_leaves_nothing_behind():
    """What was checked is cached with the graph by shapes, of which there are few."""
    graph, x = patterns.window(6, 2), torch.ones(1, 1, 6, 4)
    sizes = []
    for step in range(20):
        ga.attend(x, x, x, graph, scale=0.5 + step, dropout=step / 40)
        sizes.append(len(graph._memo))
    assert sizes[-1] == sizes[1]
