"""``attend`` equals loops and dense formulas, returns lse, weights and logits, and names wrong input."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, flex
from gnn_attention.verify.cases import graph_cases

NAMES = ["dense", "message_passing", "mixed", "reference", "rows", "tiles"]
# These backends support every option.
FULL = [name for name in NAMES if name != "mixed"]


def qkv(dst=9, src=9, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=torch.float64, batch=2, seed=0):
    """Return random q, k and v of these sizes."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, dst, dim), (batch, kv_heads, src, dim), (batch, kv_heads, src, value_dim))
    return tuple(torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)


def attend_by_loops(q, k, v, edges, scale):
    """Compute attention by the definition, in loops that share no code with the library."""
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
    """The graph is asymmetric and bipartite with an isolated receiver; heads are grouped, and Dv != D."""
    edges = [(4, 1), (0, 1), (6, 0), (2, 3), (6, 3), (3, 3), (1, 4)]
    q, k, v = qkv(dst=5, src=7)
    graph = ga.convert.from_edge_index(torch.tensor(edges).t(), 5, 7)
    output = ga.attend(q, k, v, graph, scale=scale, backend=backend)
    assert_exact(output, attend_by_loops(q, k, v, edges, scale or 8**-0.5))
    assert (output[:, :, 2] == 0).all()


def test_seventy_thousand_equal_fp16_logits_give_the_mean():
    """The denominator exceeds the range of float16, in which plain arithmetic would return 0."""
    n = 70_000
    q, k, v = (torch.ones(1, 1, t, 2, dtype=torch.float16) for t in (1, n, n))
    graph = patterns.cross(1, n)
    truth = attention_truth(q, k, v * 0.5, graph)
    for backend in NAMES:
        out, info = ga.attend(q, k, v * 0.5, graph, backend=backend, return_info=True)
        assert (out.dtype, info.lse.dtype) == (torch.float16, torch.float32)
        assert_rule(out, {}, truth)


OVERFLOW_GRAPHS = [patterns.causal(3), patterns.window(300, 40), patterns.erdos_renyi(90, 0.05)]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0]).double()], ids=["plain", "sinks"])
@pytest.mark.parametrize("graph", OVERFLOW_GRAPHS, ids=lambda g: g.name)
def test_logits_that_overflow_to_minus_infinity(backend, sinks, graph):
    """Such edges count as missing; a receiver without others has the output 0 and the lse of its sink."""
    n = graph.num_dst
    q, k, v = qkv(dst=n, src=n, heads=2, kv_heads=1, batch=1)
    has_large_query, has_low_key = (torch.arange(n) % 3 == 1).view(n, 1), (torch.arange(n) < n / 2).view(n, 1)
    q = torch.zeros_like(q).masked_fill(has_large_query, 1e200)
    k = (k * 1e-200).masked_fill(has_low_key, -1e200)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, info = ga.attend(*inputs, graph, sink_logits=sinks, backend=backend, return_info=True)
    edges = graph.mask() & ~(has_large_query & has_low_key.T)
    logits = (q @ k.mT * 8**-0.5).masked_fill(~edges, -torch.inf)
    empty = ~edges.any(-1)
    extra = torch.full((2,), -torch.inf, dtype=torch.float64) if sinks is None else sinks
    lse = torch.cat([logits, extra.view(1, 2, 1, 1).expand(1, 2, n, 1)], -1).logsumexp(-1).detach()
    lse = lse.masked_fill(~graph.mask().any(-1), -torch.inf)
    assert (empty & graph.mask().any(-1)).any()
    assert (out[:, :, empty] == 0).all()
    assert_exact(info.lse, lse)
    weights = (logits - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp()
    assert_exact(out, weights @ v)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("backend", FULL)
def test_minus_infinity_on_an_edge_removes_it(backend):
    q, k, v = (x.requires_grad_() for x in qkv(dst=3, src=3))
    graph = patterns.causal(3)
    bias = torch.zeros(6, dtype=torch.float64)
    # These are both in-edges of receiver 1, and 0 -> 2.
    bias[[1, 2, 3]] = -torch.inf
    out, info = ga.attend(q, k, v, graph, bias=bias, backend=backend, return_info=True)
    remaining_graph = ga.convert.from_edge_index(torch.tensor([[0, 1, 2], [0, 2, 2]]), 3, 3)
    expected, expected_info = ga.attend(q, k, v, remaining_graph, backend=backend, return_info=True)
    assert_exact(out, expected)
    assert_exact(info.lse, expected_info.lse)
    assert (out[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


BORROWED = [
    patterns.causal(9).rows(4, 9),
    patterns.window(9, 3),
    patterns.strict_causal(9) - patterns.full(9),
    ga.TokenGraph.from_rule(lambda b, h, dst, src: (src < dst - h) & (h > 0), 9, heads=4),
]


@pytest.mark.parametrize("backend", FULL)
@pytest.mark.parametrize("graph", BORROWED, ids=repr)
def test_a_score_mod_without_a_value_on_non_edges_spoils_nothing(backend, graph):
    """The score_mod divides by 0 at a non-edge, which must not give 0 * inf in a gradient."""
    q, k, v = (x.requires_grad_() for x in qkv(dst=graph.num_dst))
    weight, results = torch.ones(1, dtype=torch.float64, requires_grad=True), []
    for minimum in (0, 1):

        def mod(score, b, h, dst, src, minimum=minimum):
            gap = dst - src - h if graph.heads else dst - src + 1
            return weight * score / gap.clamp(min=minimum)

        out = ga.attend(q, k, v, graph, score_mod=mod, backend=backend)
        gradients = torch.autograd.grad(out.sum(), [q, k, v, weight], materialize_grads=True)
        results.append([out, *gradients])
    assert_exact(*results)


@pytest.mark.parametrize("backend", FULL)
def test_a_score_mod_of_another_dtype_or_shape_is_fitted(backend):
    """One adds a float64 table to float32 scores, and one depends on positions only."""
    q, k, v = qkv(dtype=torch.float32)
    positions, graph = torch.arange(9.0), patterns.causal(9)
    distances = positions.view(-1, 1) - positions
    for mod, queries, added in (
        (lambda score, b, h, dst, src: score + torch.arange(9).double()[src], q, positions),
        (lambda score, b, h, dst, src: (dst - src).double(), torch.zeros_like(q), distances),
    ):
        output = ga.attend(q, k, v, graph, score_mod=mod, backend=backend)
        assert output.dtype == torch.float32
        assert_rule(output, {}, attention_truth(queries, k, v, graph, added=added))


@pytest.mark.parametrize("backend", NAMES)
def test_autocast_does_not_reach_the_sums(backend):
    """The output and lse have the accuracy of float32 if the inputs are float32."""
    q, k, v = qkv(dtype=torch.float32)
    float64_inputs, graph = [x.double() for x in (q, k, v)], patterns.causal(9)
    reach = float((q.abs() @ k.abs().repeat_interleave(2, 1).mT).max()) * 8**-0.5
    _, exact = ga.attend(*float64_inputs, graph, backend="reference", return_info=True)
    truth = attention_truth(q, k, v, graph)
    with torch.autocast("cpu", torch.bfloat16):
        output, info = ga.attend(q, k, v, graph, backend=backend, return_info=True)
        output_alone = ga.attend(q, k, v, graph, backend=backend)
    assert info.lse.dtype == torch.float32
    assert_rule(output, {}, truth)
    assert_rule(output_alone, {}, truth)
    # They are a scaled product of 8 channels (9), a sum of 9 exps (11), a logarithm (3), a largest logit (1).
    assert_sum(info.lse, exact.lse, 24, reach + float(exact.lse.abs().max()))


@pytest.mark.parametrize("backend", NAMES)
def test_weights_have_gradients(backend):
    """The gradients of a loss on weights with respect to q and k equal those of a dense softmax."""
    q, k, v = (x.requires_grad_() for x in qkv(heads=2, kv_heads=2))
    graph = patterns.causal(9)
    _, info = ga.attend(q, k, v, graph, backend=backend, return_info=True)
    src, dst = graph.edge_index
    direction = torch.randn(len(src), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((info.weights() * direction).sum(), [q, k])
    dense = torch.softmax((q @ k.mT * 8**-0.5).masked_fill(~graph.mask(), -torch.inf), -1)
    expected = torch.autograd.grad((dense[:, :, dst, src] * direction).sum(), [q, k])
    assert_exact(gradients, expected)


def test_logits_are_those_of_the_formula_and_may_be_chosen():
    """Logits include score_mod and bias; an argument chooses the edges whose logits are returned."""
    q, k, v = qkv(heads=2, kv_heads=2)
    graph, bias = patterns.causal(9), torch.arange(45, dtype=torch.float64)
    _, info = ga.attend(q, k, v, graph, bias=bias, score_mod=score_mods.softcap(2.0), return_info=True)
    src, dst = graph.edge_index
    expected = (2 * torch.tanh(q @ k.mT * 8**-0.5 / 2))[:, :, dst, src] + bias
    assert_exact(info.logits(), expected)
    indices = torch.tensor([7, 3])
    assert_exact(info.logits(indices), expected[..., indices])
    assert_exact(info.weights(indices), info.weights()[..., indices])
    # The pairs are 3 -> 8 and 0 -> 4.
    pairs = torch.tensor([[3, 0], [8, 4]])
    expected_pairs = torch.stack([expected[..., 8 * 9 // 2 + 3], expected[..., 4 * 5 // 2]], -1)
    assert_exact(info.logits(edges=pairs), expected_pairs)
    with pytest.raises(ValueError, match=r"4 -> 3 is not an edge of .*causal\(9\)"):
        info.weights(torch.tensor([[0, 4], [0, 3]]))


def test_weights_as_a_matrix():
    """The matrix has the weights of edges and 0 elsewhere, with all options and an isolated receiver."""
    q, k, v = qkv()
    graph, bias = patterns.strict_causal(9), torch.arange(36, dtype=torch.float64).sin()
    options = {"bias": bias, "score_mod": score_mods.softcap(2.0), "sink_logits": torch.ones(4).double()}
    _, info = ga.attend(q, k, v, graph, **options, return_info=True)
    src, dst = graph.edge_index
    expected = torch.zeros(2, 4, 9, 9, dtype=torch.float64)
    expected[:, :, dst, src] = info.weights()
    assert_exact(info.weight_matrix(), expected)
    assert not info.weight_matrix()[:, :, 0].any()
    for start, stop in ((0, 4), (3, 7), (5, 9)):
        assert_exact(info.weight_matrix(rows=(start, stop)), expected[:, :, start:stop])


def test_weights_as_a_matrix_of_a_graph_that_differs_by_head():
    q, k, v = qkv()
    graph = ga.algebra.per_head(*(patterns.window(9, size) for size in (1, 2, 3, 9)))
    _, info = ga.attend(q, k, v, graph, return_info=True)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    assert_exact(info.weight_matrix(), logits.masked_fill(~graph.mask(), -torch.inf).softmax(-1))


def test_wrong_indices_of_edges_are_named():
    """A negative index does not count from the end; a graph that varies has no edge indices."""
    _, info = ga.attend(*qkv(), patterns.causal(9), return_info=True)
    for indices in ([0, -1], [45]):
        bounds = f"{min(indices)} .. {max(indices)}"
        with pytest.raises(IndexError, match=f"edges must be indices in 0 .. 44, got {bounds}"):
            info.weights(torch.tensor(indices))
    for indices in (torch.ones(45).bool(), torch.tensor([1.0])):
        with pytest.raises(TypeError, match=f"edges must be integers, .* got {indices.dtype}; .*nonzero"):
            info.weights(indices)
    with pytest.raises(ValueError, match=r"varies by head has no single edge list"):
        ga.attend(*qkv(), FOUR_HEADS, return_info=True)[1].weights()


@pytest.mark.parametrize("graph", [patterns.full(9), patterns.causal(9)])
def test_full_and_causal_graphs_are_one_sdpa_call_without_a_mask(monkeypatch, graph):
    """The storage of the graph does not matter, and a token may be NaN."""
    calls, (q, k, v) = [], qkv()
    q[:, :, 3] = torch.nan
    sdpa = functional.scaled_dot_product_attention
    record_call = lambda *a, **kw: calls.append(kw) or sdpa(*a, **kw)  # noqa: E731
    monkeypatch.setattr(functional, "scaled_dot_product_attention", record_call)
    for equal_graph in (graph, ga.convert.from_mask(graph.mask()), graph.T.T):
        output = ga.attend(q, k, v, equal_graph).isnan().any(-1)[0, 0]
        assert output.tolist() == [i == 3 for i in range(9)]
    assert {kw["attn_mask"] for kw in calls} == {None}
    assert {kw["is_causal"] for kw in calls} == {graph.is_causal()}


Q, K, V = qkv()
CAUSAL = patterns.causal(9)
EXPECTED = attend_by_loops(Q, K, V, [(src, dst) for dst in range(9) for src in range(dst + 1)], 8**-0.5)
THREE_HEADS, FOUR_HEADS = (ga.TokenGraph.from_rule(lambda b, h, i, j: j <= i - h, 9, heads=n) for n in (3, 4))

WRONG_CALLS = [
    (ValueError, r"q must be \[B, Hq, dst, D\], got shape \[4, 9, 8\]", {"q": Q[0]}),
    (TypeError, r"k must be a float tensor \[B, Hkv, src, D\], got list", {"k": K.tolist()}),
    (ValueError, r"k must be like q \(torch.float64 on cpu\), got torch.float32 on cpu", {"k": K.float()}),
    (ValueError, r"q must have a multiple of k.s heads, got 3 and 2", {"q": Q[:, :3]}),
    (ValueError, r"at least one channel \(D\), got shape \[2, 4, 9, 0\]", {"q": Q[..., :0], "k": K[..., :0]}),
    (TypeError, r"graph must be a TokenGraph, got Tensor; see gnn_attention", {"graph": CAUSAL.mask()}),
    (ValueError, r"does not fit q with 9 receivers and k with 9 .*rows\(", {"graph": patterns.causal(8)}),
    (ValueError, r"has heads=3, but q has heads=4", {"graph": THREE_HEADS}),
    (ValueError, r"varies by head has no single edge list", {"graph": FOUR_HEADS, "bias": torch.zeros(3)}),
    (ValueError, r"backend must be one of 'auto', 'dense', .*'rows', .*got 'fast'", {"backend": "fast"}),
    (TypeError, r"backend must be a name or a gnn_attention.Backend, got int", {"backend": 3}),
    (ValueError, r"dropout must be a probability in \[0, 1\), got 1.0", {"dropout": 1.0}),
    (TypeError, r"score_mod must be a function \(score, b, h, dst, src\), got 1.0 ", {"score_mod": 1.0}),
    (ValueError, r"bias must .* \[B, Hq, E\] = \[2, 4, 45\], got \[44\]", {"bias": torch.zeros(44)}),
    (ValueError, r"bias must be on q's device, cpu, got meta", {"bias": torch.zeros(45, device="meta")}),
    (ValueError, r"sink_logits must be \[Hq\] = \[4\], got \[2\]", {"sink_logits": torch.zeros(2)}),
    (TypeError, r"scale must be .*; .* lose its gradient: multiply q by it", {"scale": torch.tensor(0.5)}),
    (ValueError, r"scale must be finite, got nan", {"scale": math.nan}),
    (TypeError, r"must return a float tensor, .* got a torch.bool", {"score_mod": lambda s, *_: s > 0}),
    (ValueError, r"\[2, 4, 9, 9\], got \[1, 2, 4, 9, 9\]", {"score_mod": lambda s, b, h, dst, src: s[None]}),
]


@pytest.mark.parametrize("number", range(len(WRONG_CALLS)))
def test_wrong_input_is_named(number):
    """The error is the same under torch.compile, and the next valid call is right."""
    error, message, changes = WRONG_CALLS[number]
    call = {"q": Q, "k": K, "v": V, "graph": CAUSAL, **changes}
    with pytest.raises(error, match=message):
        ga.attend(**call)
    if number % 8 == 0:
        with pytest.raises(error, match=message):
            torch.compile(lambda: ga.attend(**call), backend="eager")()
    assert_exact(ga.attend(Q, K, V, CAUSAL), EXPECTED)


@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows", "mixed", "reference"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_need_not_be_positive(scale, backend):
    """Causal kernels mask with -inf before they scale: a scale of 0 would give NaN, a negative one +inf."""
    q, k, v = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    past = torch.ones(7, 7).tril().bool()
    expected = (q @ k.mT * scale).masked_fill(~past, -torch.inf).softmax(-1) @ v
    assert_exact(ga.attend(q, k, v, patterns.causal(7), scale=scale, backend=backend), expected)


@pytest.mark.parametrize("name", [*NAMES, pytest.param("flex", id="eager_flex", marks=pytest.mark.slow)])
def test_a_graph_is_freed_with_its_last_name(name, monkeypatch):
    """A graph is freed at once, with everything that is cached with it."""
    disable = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(disable, True, raising=False)
    monkeypatch.setattr(flex, "_compile_attention", lambda threads: flex._attention)
    monkeypatch.setattr(flex, "_cpu_unsupported_reason", lambda: None)
    gc.collect()
    gc.disable()
    try:
        for case in graph_cases():
            graph, sizes, kv_heads, grads = case.graph, case.sizes, case.kv_heads, name != "flex"
            del case
            q = torch.randn(*sizes, graph.num_dst, 4, requires_grad=grads)
            k = torch.randn(sizes[0], kv_heads, graph.num_src, 4, requires_grad=grads)
            has_bias = name in FULL and not (graph.heads or graph.batch)
            bias = torch.randn(graph.num_edges, requires_grad=grads) if has_bias else None
            out = ga.attend(q, k, k, graph, backend=name, bias=bias)
            if grads:
                out.sum().backward()
            reference = weakref.ref(graph)
            del graph, out
            assert reference() is None
    finally:
        gc.enable()


def test_a_scale_or_dropout_that_changes_with_every_call_leaves_nothing_behind():
    """The results of checks are cached with the graph by shape, and there are few shapes."""
    graph, x = patterns.window(6, 2), torch.ones(1, 1, 6, 4)
    sizes = []
    for step in range(20):
        ga.attend(x, x, x, graph, scale=0.5 + step, dropout=step / 40)
        sizes.append(len(graph._memo))
    assert sizes[-1] == sizes[1]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_a_checkpointed_call_is_recomputed_by_the_backend_it_had(backend, reentrant, padded, monkeypatch):
    """The free memory at that time does not matter, even if calls with other options share the graph."""
    graph, runs, room = patterns.window(20, 3), [], [2**40]
    # The free memory is read once for the edges of the graph, which is not part of this test.
    graph.edges_on(torch.device("cpu"))
    for name, original in list(BACKENDS.items()):
        record_run = lambda call, original=original: runs.append(original.name) or original.run(call)  # noqa: E731
        monkeypatch.setitem(BACKENDS, name, replace(original, run=record_run))
    monkeypatch.setattr(memory, "MIN_CHECK_BYTES", 0)
    monkeypatch.setattr(memory, "available", lambda: room[0])
    x = qkv(20, 20)[0]
    keep = torch.ones(20, 1).double()
    keep[-1] = 0.0 if padded else 1.0
    forms = [{}, {"score_mod": score_mods.softcap(3.0)}, {"sink_logits": torch.zeros(4).double()}, {}]

    def run_backward(backend):
        leaf = out = x.clone().requires_grad_()
        free = [2**40] * 3 + [0 if backend == "auto" else 2**40]
        for options, room[0] in zip(forms, free, strict=True):
            layer = lambda x, options=options: ga.attend(x, x, x, graph, backend=backend, **options)  # noqa: E731
            out = checkpoint(layer, out * keep, use_reentrant=reentrant)
        room[0] = 0
        out.square().sum().backward()
        return leaf.grad

    try:
        gradient = run_backward(backend)
    finally:
        room[0] = 2**40
    assert runs[:4] == ["dense"] * 3 + ["reference" if backend == "auto" else "dense"]
    assert runs[4:] == runs[:4][::-1]
    assert_exact(gradient, run_backward("reference"))


@pytest.mark.parametrize("name", ["dense", "tiles", "rows", "mixed", "reference"])
@pytest.mark.parametrize(("bytes_needed", "times"), [(0, 1), (2**29, 2)])
def test_a_backend_is_looked_up_again_only_where_it_needs_much_memory(bytes_needed, times, name, monkeypatch):
    """The choice is repeated because less memory may be free at the second call."""
    reasons = []
    changes = {"unsupported_reason": reasons.append, "bytes_needed": lambda call: bytes_needed}
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], **changes))
    graph, x = patterns.causal(6), torch.ones(1, 1, 6, 4)
    for _ in range(2):
        ga.attend(x, x, x, graph, backend=name)
    assert len(reasons) == times


@pytest.mark.parametrize(
    "backend", ["reference", "dense", "tiles", "rows", pytest.param("flex", marks=pytest.mark.slow), "auto"]
)
def test_the_keys_of_one_sample_serve_all(backend):
    """k and v of one sample, such as a shared prompt, serve all samples, and their gradients are summed."""
    draw, trains = torch.Generator().manual_seed(0), backend != "flex"
    q, k, v = (torch.randn(n, h, 9, 8, generator=draw) for n, h in ((3, 4), (1, 2), (1, 2)))
    graph = patterns.window(9, 4)
    results = []
    for sizes in ((1, 1, 1, 1), (3, 1, 1, 1)):
        inputs = [x.clone().requires_grad_(trains) for x in (q, k, v)]
        out = ga.attend(inputs[0], *(x.repeat(sizes) for x in inputs[1:]), graph, backend=backend)
        grads = torch.autograd.grad(out.pow(2).sum(), inputs) if trains else ()
        results.append([out, *grads])
    for output, expected in zip(*results, strict=True):
        torch.testing.assert_close(output, expected)
