"""The backend made of others: every option, its plan, and the kernel of each part."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thinned
from support.inputs import qkv, scattered
from support.verify_cases import check_graph

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, RefusalError, dense, flex, split
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu.roofline import Sizes
from gnn_attention.backends.plan import decompose
from gnn_attention.verify.cases import GRAPHS

N = 96
SHAPES = {
    "window and sinks": patterns.window(N, 12) | patterns.sinks(N, 3),
    "longformer": patterns.longformer(N, 8, 3, causal=False),
    "window and list": patterns.window(N, 12) | scattered(N, N, 300),
    "decoding rows": (patterns.window(N, 12) | patterns.sinks(N, 3)).rows(N - 20, N),
}
quiet = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch):
    """Parts of so few tokens would all go to one backend, which then takes the whole."""
    monkeypatch.setattr(split, "JOINED", set())


def given_of(graph, **options):
    return qkv(graph.num_dst, graph.num_src, **options)


def checked(graph, **options):
    return AttentionCall.checked(*(x.detach() for x in given_of(graph)), graph, **options)


def assigned(call):
    """The parts with the backend of each, as a call for lse."""
    return split._assigned(split._first(call))


def options(graph):
    bias, sinks, table = (torch.randn(4, count, dtype=torch.float64) for count in (graph.num_edges, 1, 40))
    bias, sinks, table = bias.requires_grad_(), sinks[:, 0].clone().requires_grad_(), table.requires_grad_()
    alibi = score_mods.alibi(score_mods.alibi_slopes(4))
    learned = lambda s, b, h, dst, src: s + table[h, (dst - src).abs() % 40]  # noqa: E731
    every = {"bias": bias, "sink_logits": sinks, "dropout": 0.2, "score_mod": alibi, "scale": -0.3}
    return {
        "plain": ({}, []),
        "sinks": ({"sink_logits": sinks}, [sinks]),
        "bias": ({"bias": bias}, [bias]),
        "learned score_mod": ({"score_mod": learned}, [table]),
        "dropout": ({"dropout": 0.4}, []),
        "all": (every, [bias, sinks]),
    }


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("option", ["plain", "sinks", "bias", "learned score_mod", "dropout", "all"])
def test_equal_to_the_reference(name, option):
    """Output, lse and all gradients of a function of both, in float64; the same weights are dropped."""
    graph = SHAPES[name]
    assert len(assigned(checked(graph))) > 1
    given, (extra, learned) = given_of(graph), options(graph)[option]
    results = []
    for backend in ("split", "reference"):
        torch.manual_seed(5)
        out, info = ga.attend(*given, graph, backend=backend, return_info=True, **extra)
        loss = out.sin().sum() + info.lse.cos().sum()
        results.append(([out], [info.lse], torch.autograd.grad(loss, [*given, *learned])))
    for found, wanted in zip(*results, strict=True):
        assert_exact(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_graph_and_feature_of_verify(graph):
    check_graph((BACKENDS["split"],), graph, dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("sinks", [None, torch.ones(4, dtype=torch.float64)], ids=["plain", "sinks"])
def test_isolated_receivers(sinks):
    some = patterns.sinks(N, 3) - patterns.window(N, 12)
    for graph in (some, some - some):
        given, empty = given_of(graph), graph.in_degree() == 0
        out, info = ga.attend(*given, graph, sink_logits=sinks, backend="split", return_info=True)
        assert (out[:, :, empty] == 0).all()
        assert (info.lse[:, :, empty] == -torch.inf).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), given))


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("name", "compiler"),
    [("window and sinks", "eager"), pytest.param("window and list", "aot_eager", marks=pytest.mark.slow)],
)
def test_compiled_and_mapped(name, compiler):
    torch.compiler.reset()
    graph = SHAPES[name]
    given = given_of(graph)

    def run(q, k, v):
        return ga.attend(q, k, v, graph, backend="split")

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    out, wanted = compiled(*given), run(*given)
    assert_exact(out, wanted)
    assert_exact(*(torch.autograd.grad(x.sin().sum(), given) for x in (out, wanted)))
    several = [torch.stack([x.detach(), x.detach() + 1]) for x in given]
    wanted = torch.stack([run(*x) for x in zip(*several, strict=True)])
    assert_exact(torch.func.vmap(run)(*several), wanted)


def test_the_plan_is_that_of_the_first_head_of_the_first_sample():
    graph = ga.TokenGraph.from_rule(
        lambda b, h, dst, src: (dst - src).abs() <= 3 + 2 * b + h, N, batch=2, heads=4
    )
    each = [graph.select(*place).num_edges for place in ((0, 0), (0, 1), (1, 0))]
    assert sum(part.graph.num_edges for part, _ in assigned(checked(graph))) == each[0]
    assert len(set(each)) == 3


def test_parts_of_one_backend_are_one_call(monkeypatch):
    """Where the same kernel would take each of them; a graph of one part is that call."""
    monkeypatch.setattr(split, "JOINED", {"tiles"})
    monkeypatch.setattr(split, "_order", lambda call: ("tiles",))
    graph = SHAPES["longformer"]
    assert assigned(checked(graph)) == [((graph, (0, N), (0, N), "the whole graph"), "tiles")]
    monkeypatch.setattr(split, "_order", lambda call: ("dense",))
    assert len(assigned(checked(SHAPES["longformer"]))) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once_on_a_cpu(dtype):
    graph = SHAPES["window and sinks"]
    halves = [x.detach() for x in given_of(graph, dtype=dtype)]
    assert len(assigned(AttentionCall.checked(*halves, graph))) > 1
    wide = ga.attend(*(x.float() for x in halves), graph, backend="split")
    assert torch.equal(ga.attend(*halves, graph, backend="split"), wide.to(dtype))


def test_a_part_that_no_backend_holds_is_named(monkeypatch):
    monkeypatch.setattr(split, "KERNELS", {"flex": flex.BACKEND})
    monkeypatch.setattr(split, "_order", lambda call: ("flex",))
    graph = SHAPES["window and sinks"]
    message = r"'split' cannot hold .*no backend holds its part 'senders of many'.*float64"
    with pytest.raises(RefusalError, match=message):
        ga.attend(*given_of(graph), graph, backend="split")


@quiet
@pytest.mark.parametrize("which", ["plain", "sinks", "bias", "dropout", "all"])
@pytest.mark.parametrize("compiled", thinned([False, True]))
def test_on_cuda_strict_causal_is_a_causal_call_on_shifted_tokens(which, compiled, monkeypatch):
    """As one part, with every option; the first receiver, which has no in-edges, gets 0 and lse -inf."""
    graph = patterns.strict_causal(N)
    monkeypatch.setattr(split, "DEVICES", ("cpu",))
    monkeypatch.setattr(split, "_order", lambda call: ("dense",))
    ((part, name),) = assigned(checked(graph))
    assert (part.dst, part.src, part.graph.is_causal(), name) == ((1, N), (0, N - 1), True, "dense")
    seen = []

    def counted(call):
        seen.append(call.graph.num_dst)
        return dense.run(call)

    monkeypatch.setitem(split.KERNELS, "dense", replace(dense.BACKEND, run=counted))
    extra, learned = options(graph)[which]
    results = []
    for backend in ("split", "reference"):
        given = given_of(graph)

        def run(*x, backend=backend):
            out, info = ga.attend(*x, graph, backend=backend, return_info=True, **extra)
            return out, info.lse

        torch._dynamo.reset()
        torch.manual_seed(5)
        program = (
            torch.compile(run, fullgraph=True, backend="eager")
            if compiled and "dropout" not in extra
            else run
        )
        out, lse = program(*given)
        grads = torch.autograd.grad(out.sin().sum() + lse[:, :, 1:].cos().sum(), [*given, *learned])
        results.append([out, lse[:, :, 1:], *grads])
    assert seen == [N - 1]
    assert not results[0][0][:, :, 0].any()
    for mine, theirs in zip(*results, strict=True):
        assert_exact(mine, theirs)


@pytest.mark.parametrize(
    ("graph", "dst", "src"),
    [
        (patterns.strict_causal(N).rows(0, 40), (1, 40), (0, 39)),
        (patterns.full(N) & ga.TokenGraph.from_rule(lambda b, h, dst, src: src >= 7, N), (0, N), (7, N)),
    ],
)
def test_full_and_causal_graphs_over_fewer_tokens_are_found(graph, dst, src):
    assert decompose.shifted(graph)[1:3] == (dst, src)


@pytest.mark.parametrize(
    "graph", [patterns.causal(N), SHAPES["longformer"], patterns.window(N, 9).rows(5, 50)]
)
def test_others_are_no_shifted_ones(graph):
    assert decompose.shifted(graph) is None


@pytest.mark.parametrize(
    ("graph", "first"),
    [
        (patterns.causal(4096), "dense"),
        (patterns.cross(64, 4096), "dense"),
        (patterns.window(4096, 256), "varlen"),
        (scattered(2048, 2048, 4096), "triton"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_which_kernel_is_first_on_cuda(graph, first, monkeypatch):
    """By the estimates of a device, where our kernels count as longer while no record verified them."""
    monkeypatch.setattr(dense, "DEVICES_OF_FLASH", ("meta",))
    sizes = graph.num_dst, graph.num_src
    q, k = (torch.empty(1, 4, n, 64, device="meta", dtype=torch.bfloat16) for n in sizes)
    order = split._order_on_cuda(AttentionCall.checked(q, k, k, graph, with_lse=True))
    assert order[0] == first
    assert set(order[:-2]) >= {"flex", "triton"}
    assert order[-2:] == ("tiles", "rows")


def test_on_cuda_no_part_writes_out_too_many_logits():
    graph = patterns.strict_causal(8192)
    q = torch.empty(1, 8, 8192, 64, device="meta", dtype=torch.bfloat16)
    call = AttentionCall.checked(q, q, q, graph, with_lse=True)
    assert dense.bytes_needed(call) > split.DENSE_BYTES
    assert "dense" not in split._order_on_cuda(call)


def test_all_pairs_of_a_long_window_are_the_last_resort():
    assert split._by_time(patterns.window(4096, 8))[-1] == "dense"


@pytest.mark.parametrize(("with_lse", "first"), [(False, "dense"), (True, "flex")])
def test_estimates_on_cuda_are_those_of_the_sizes_of_the_call(with_lse, first, monkeypatch):
    """Heads of all samples; where logits are written out, dense takes as long as that does."""
    seconds = {"dense": 1.0, "written out": 3.0, "rows": 2.0, "windows": 4.0, "tiles": 5.0}
    seconds |= {"flex": 2.1, "modified": 2.6}
    sizes_of_calls = []

    def estimated(graph, sizes, device):
        sizes_of_calls.append(sizes)
        return {name: SimpleNamespace(seconds=time) for name, time in seconds.items()}

    monkeypatch.setattr(split, "estimates", estimated)
    shapes = (6, N, 16), (3, N, 16), (3, N, 24)
    q, k, v = (torch.empty(2, *shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    order = split._order_on_cuda(AttentionCall.checked(q, k, v, patterns.causal(N), with_lse=with_lse))
    assert sizes_of_calls == [Sizes(12, 16, 24, torch.bfloat16)]
    assert order == (*dict.fromkeys([first, "flex", "dense", "triton"]), "tiles", "rows")
