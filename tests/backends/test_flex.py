"""FlexAttention is accurate with one mask_mod for every graph, rarely compiled, and refuses clearly."""

import shutil

import pytest
import torch
from support.bounds import assert_rule, attention_truth, error, formula
from support.covering import thin
from support.kernel_cases import lse_bound
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gnn_attention import attend, patterns, score_mods
from gnn_attention.backends import BACKENDS, flex
from gnn_attention.verify.cases import BATCH_SIZE, FEATURES, GRAPHS, NUM_HEADS, NUM_KV_HEADS

FLEX = BACKENDS["flex"]
DIM, VALUE_DIM = 6, 5
SAME_SIZES = [
    name for name, case in GRAPHS.items() if not case.graph.varying_axes and case.sizes[0] == BATCH_SIZE
]
DISABLE_COMPILE = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

needs_compiler = pytest.mark.skipif(
    flex._cpu_unsupported_reason() is not None, reason=str(flex._cpu_unsupported_reason())
)


def run_uncompiled(monkeypatch):
    """Run FlexAttention in eager mode, without a C++ compiler and without tracing in each call."""
    monkeypatch.setattr(DISABLE_COMPILE, True, raising=False)
    monkeypatch.setattr(flex, "_compile_attention", lambda threads: flex._attention)
    monkeypatch.setattr(flex, "_cpu_unsupported_reason", lambda: None)


@pytest.fixture(params=["uncompiled", pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler])])
def kernel(request, monkeypatch):
    """Run with the kernel for CPUs, and without one."""
    if request.param == "uncompiled":
        run_uncompiled(monkeypatch)


@pytest.fixture
def compile_options(monkeypatch):
    """Run torch.compile without its C++ compiler, and record the options of each call."""
    torch_compile, all_options = torch.compile, []

    def compile_eagerly(function, options=None, **arguments):
        all_options.append(options)
        return torch_compile(function, backend="eager", **arguments)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(flex, "_cpu_unsupported_reason", lambda: None)
    flex._compile_attention.cache_clear()
    torch.compiler.reset()
    yield all_options
    flex._compile_attention.cache_clear()
    torch.compiler.reset()


def draw(graph, dtype=torch.float32, batch=BATCH_SIZE, seed=0):
    """Draw q, k, v in float64, rounded to numbers of the dtype."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (NUM_HEADS, graph.num_dst, DIM),
        (NUM_KV_HEADS, graph.num_src, DIM),
        (NUM_KV_HEADS, graph.num_src, VALUE_DIM),
    )
    return [
        torch.randn(batch, *shape, generator=rng, dtype=torch.float64).to(dtype).double() for shape in shapes
    ]


def count_kernels():
    """Return the number of kernels compiled so far."""
    return counters["stats"]["unique_graphs"]


def check(graph, mask, dtype=torch.float32, modify=None, batch=BATCH_SIZE, **options):
    """Check that the error against float64 is at most twice that of SDPA on the same inputs."""
    wide_inputs = draw(graph, dtype, batch)
    q, k, v = (x.to(dtype) for x in wide_inputs)
    mask, scale = mask[:batch], options.get("scale") or DIM**-0.5
    out = attend(q, k, v, graph, backend=FLEX, **options)
    assert out.dtype == dtype
    is_isolated = ~mask.any(-1)
    assert (out[is_isolated.expand(out.shape[:3])] == 0).all()
    assert_rule(out, {}, compute_truth(q, k, v, mask, scale, modify))


def compute_truth(q, k, v, mask, scale=DIM**-0.5, modify=None):
    """Return attention in float64 and SDPA's errors; SDPA takes the change of the scores as a table."""
    products = scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    change = None if modify is None else modify(products).detach() - products
    with torch.no_grad():
        return attention_truth(q, k, v, mask, scale=scale, added=change)


@pytest.mark.parametrize("name", thin(["window, 97 tokens", "listed", "by head", "by sample", "no edges"]))
@pytest.mark.parametrize("sinks", [True, False])
def test_lse_and_sinks(name, sinks, monkeypatch):
    """Uncompiled FlexAttention supports both, as on CUDA; it ignores the lists of tiles."""
    run_uncompiled(monkeypatch)
    case = GRAPHS[name]
    q, k, v = (x.float() for x in draw(case.graph))
    sink_logits = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(5)) if sinks else None
    call = flex.AttentionCall.from_arguments(q, k, v, case.graph, sink_logits=sink_logits, with_lse=True)
    out, lse = flex.run(call)
    with torch.no_grad():
        assert_rule(out, {}, attention_truth(q, k, v, case.mask, sink_logits=sink_logits))
    true_lse = formula(q, k, v, case.mask, DIM**-0.5)[1]
    if sinks:
        true_lse = torch.logaddexp(true_lse, sink_logits.double().view(1, -1, 1)).masked_fill(
            ~case.mask.any(-1), -torch.inf
        )
    assert error(lse, true_lse) <= lse_bound(q, k, DIM**-0.5, true_lse)


@pytest.mark.slow
@needs_compiler
def test_graphs_of_every_structure_and_length_share_one_kernel():
    """The kernel is accurate on all graphs, and compiled once."""
    torch.compiler.reset()
    num_kernels = count_kernels()
    for name in SAME_SIZES:
        check(GRAPHS[name].graph, GRAPHS[name].mask)
    for graph in (patterns.window(700, 90), patterns.cross(130, 40), patterns.causal(300).rows(100, 290)):
        check(graph, graph.mask().expand(2, 1, -1, -1), batch=2)
    assert count_kernels() - num_kernels == 1


@pytest.mark.parametrize("name", ["listed", "by head", "by sample"])
def test_a_token_that_is_not_finite_reaches_the_receivers_of_its_edges(name, kernel):
    """Such tokens occur in each of q, k and v; key/value head 1 serves the query heads 2 and 3."""
    graph = GRAPHS[name].graph
    mask = GRAPHS[name].mask.expand(BATCH_SIZE, NUM_HEADS, -1, -1)
    q, k, v = (x.float() for x in draw(graph))
    truth = compute_truth(q, k, v, mask)
    k[0, 0, 3, 2], v[5, 1, 9, 1], q[1, 2, 4, 0], q[3, 1, 7, 0] = torch.inf, torch.nan, torch.nan, -torch.inf
    out = attend(q, k, v, graph, backend="flex")
    is_reached = torch.zeros(BATCH_SIZE, NUM_HEADS, graph.num_dst, dtype=torch.bool)
    is_reached[0, :2] = mask[0, :2, :, 3]
    is_reached[5, 2:] = mask[5, 2:, :, 9]
    is_reached[1, 2, 4], is_reached[3, 1, 7] = mask[1, 2, 4].any(), mask[3, 1, 7].any()
    assert torch.equal(out.isnan(), attend(q, k, v, graph, backend="reference").isnan())
    assert_rule(torch.where(is_reached.unsqueeze(-1), truth.out.float(), out), {}, truth)


@pytest.mark.parametrize(
    "feature", thin(["scale 0.7", "alibi", "softcap", "log multiplicity", "relative bias"])
)
@pytest.mark.parametrize("name", ["window, 97 tokens", "decode rows", "by head"])
def test_features(feature, name, monkeypatch):
    """Outputs with the score_mods of the package are within the rule of ``verify``."""
    run_uncompiled(monkeypatch)
    case, kind = GRAPHS[name], FEATURES[feature]
    rng, shapes = torch.Generator().manual_seed(0), case.shapes()
    tensors = {key: torch.randn(*shapes[key], generator=rng, dtype=torch.float64) for key in kind.extras}
    options = kind.options({key: x.float() for key, x in tensors.items()})
    modify = lambda logits: kind.dense(case, {key: x.to(logits) for key, x in tensors.items()}, logits)  # noqa: E731
    check(case.graph, case.mask, modify=modify, **options)


def test_tables_are_indexed_unchanged(monkeypatch):
    """Inductor supports the gradient of a table only if the kernel indexes the table unchanged."""
    table, module = torch.ones(NUM_HEADS, 7).bfloat16(), score_mods.RelativeBias(NUM_HEADS, 3).bfloat16()
    counts = score_mods.log_multiplicity(table[0])
    run_uncompiled(monkeypatch)

    def check_score_mod(tokens, plan, score_mod, *options):
        indices = [torch.zeros(1, dtype=torch.int64)] * 4
        program = make_fx(lambda score: score_mod(score, *indices))(torch.zeros(1))
        names = [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]
        assert names.count("index") == 3
        assert not {"_to_copy", "log"} & set(names)
        return tokens[0], None

    monkeypatch.setattr(flex, "_run_flex", check_score_mod)
    inputs, mod = draw(patterns.causal(5)), score_mods.chain(score_mods.relative_bias(table), module, counts)
    with torch.no_grad():
        attend(*(x.bfloat16() for x in inputs), patterns.causal(5), backend=FLEX, score_mod=mod)


@pytest.mark.parametrize("sizes", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0), (2, 2, 0, 0)])
def test_empty_calls(sizes):
    """Calls with an axis of size 0 return lse as on CUDA, call no score_mod, and run on meta tensors too."""
    batch, heads, num_dst, num_src = sizes
    q, k = torch.randn(batch, heads, num_dst, DIM), torch.randn(batch, heads, num_src, DIM)
    v = torch.randn(batch, heads, num_src, VALUE_DIM, requires_grad=True)
    graph, options = patterns.cross(num_dst, num_src), {"score_mod": max, "with_lse": True}
    out, lse = flex.run(flex.AttentionCall(q, k, v, graph, 1.0, **options))
    meta_inputs = (x.to("meta") for x in (q, k, v))
    assert flex.run(flex.AttentionCall(*meta_inputs, graph, 1.0, **options))[0].shape == out.shape
    assert out.shape == (batch, heads, num_dst, VALUE_DIM)
    assert (out == 0).all()
    assert out.requires_grad
    assert torch.equal(lse, torch.full((batch, heads, num_dst), -torch.inf))


def run_flex(q, k, v, **options):
    return attend(q, k, v, patterns.causal(5), backend=FLEX, **options)


LEARNED, DUAL = score_mods.RelativeBias(NUM_HEADS, 2), torch.autograd.forward_ad.make_dual
REFUSALS = {
    "it has no bias; leave bias out, or use backend='dense'": lambda *x: run_flex(*x, bias=torch.zeros(15)),
    "no dropout": lambda *x: run_flex(*x, dropout=0.1),
    "it has no sink_logits on cpu; leave": lambda *x: run_flex(*x, sink_logits=torch.zeros(NUM_HEADS)),
    "it has no lse on cpu; pass return_info=False": lambda *x: run_flex(*x, return_info=True),
    "no backward pass on cpu, and the score_mod has parameters": lambda *x: run_flex(*x, score_mod=LEARNED),
    r"no backward pass on cpu; call it under torch": lambda q, k, v: run_flex(q, k, v.requires_grad_()),
    "computes in float32, bfloat16, float16, q is float64": lambda *x: run_flex(*(y.double() for y in x)),
    "does not run under torch.vmap": lambda q, k, v: torch.vmap(lambda q: run_flex(q, k, v))(q[None]),
    "no forward-mode derivative": lambda q, k, v: run_flex(DUAL(q, q), k, v),
    "must return a float tensor, the new scores, got a int": lambda *x: run_flex(*x, score_mod=lambda *y: 3),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_unsupported_calls(message, monkeypatch):
    """The error says what is unsupported and what to do, before anything is compiled."""
    monkeypatch.setattr(flex, "_compile_attention", None)
    monkeypatch.setattr(flex, "_cpu_unsupported_reason", lambda: None)
    inputs = [x.float() for x in draw(patterns.causal(5))]
    error = TypeError if "must return" in message else NotImplementedError
    with torch.autograd.forward_ad.dual_level(), pytest.raises(error, match=message):
        REFUSALS[message](*inputs)


def test_a_machine_without_a_compiler(monkeypatch):
    """The error names the missing compiler."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    flex._cpu_unsupported_reason.cache_clear()
    try:
        graph = patterns.causal(5)
        with pytest.raises(NotImplementedError, match="needs a C\\+\\+ compiler, such as g\\+\\+"):
            attend(*(x.float() for x in draw(graph)), graph, backend=FLEX)
    finally:
        flex._cpu_unsupported_reason.cache_clear()


@pytest.mark.slow
@needs_compiler
def test_score_mods_that_cannot_be_compiled():
    """The compiler refuses operators that are not pointwise, and the error explains it."""
    graph = patterns.causal(5)
    q, k, v = (x.float() for x in draw(graph))
    message = r"cannot compile this call .* must be made of pointwise operators"
    with pytest.raises(NotImplementedError, match=message):
        attend(q, k, v, graph, score_mod=lambda score, b, h, dst, src: score.sort().values, backend=FLEX)


def test_a_score_mod_that_reads_beyond_the_end_of_a_table(kernel):
    """The call raises an IndexError, compiled or not."""
    graph, table = patterns.causal(20), torch.zeros(3)
    q, k, v = (x.float() for x in draw(graph))
    mod = lambda score, b, h, dst, src: score + table[dst]  # noqa: E731
    message = r"reads beyond the end of a tensor: index out of bounds|index 3 is out of bounds"
    with pytest.raises(IndexError, match=message):
        attend(q, k, v, graph, score_mod=mod, backend=FLEX)


@pytest.mark.slow
def test_too_many_kernels_are_an_error(compile_options, monkeypatch):
    """Python numbers that change would compile a kernel in each call, so the limit raises an error.

    Graphs share one kernel, which is compiled for the current number of threads.
    """
    monkeypatch.setattr(flex, "MAX_KERNELS", 1)
    graphs = patterns.causal(20), patterns.window(20, 4)
    q, k, v = (x.float() for x in draw(graphs[0], batch=2))
    num_kernels = count_kernels()
    check(graphs[0], graphs[0].mask().expand(2, 1, -1, -1), batch=2)
    message = r"has compiled 1 kernels.*pass the numbers of a score_mod as a tensor"
    with pytest.raises(NotImplementedError, match=message):
        attend(q, k, v, graphs[0], scale=0.3, backend=FLEX)
    # The existing kernel still works.
    check(graphs[1], graphs[1].mask().expand(2, 1, -1, -1), batch=2)
    assert count_kernels() - num_kernels == 1
    assert compile_options == [{"cpp.threads": torch.get_num_threads()}]


def test_a_compiled_program_on_a_cpu_is_refused():
    """The compiler would fuse the operators around the call into the kernel."""
    graph = patterns.causal(5)
    program = torch.compile(lambda *x: attend(*x, graph, backend=FLEX), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="does not run inside a compiled program; use backend='tiles'"):
        program(*(x.float() for x in draw(graph)))


@pytest.mark.parametrize("installed", [True, False])
def test_cuda_needs_triton(installed, monkeypatch):
    """The call has a fake q on CUDA."""
    monkeypatch.setattr(flex, "_has_triton", lambda: installed)
    with FakeTensorMode():
        q = torch.empty(1, 1, 5, 8, device="cuda")
        reason = flex.unsupported_reason(flex.AttentionCall(q, q, q, patterns.causal(5), 1.0))
    assert (reason is None) == installed
    assert installed or "needs Triton" in reason


@pytest.mark.parametrize("fails", [True, False])
def test_if_the_flash_kernel_fails_the_default_one_is_used(fails, monkeypatch):
    names = []

    def kernel(tokens, *options):
        names.append(options[-1])
        if fails and options[-1]:
            raise RuntimeError("BACKEND='FLASH' but flash attention cannot be used")
        return tokens[0], None

    monkeypatch.setattr(flex, "_FAILED_KERNELS", set())
    monkeypatch.setattr(flex, "_choose_kernel", lambda device, dtype: "" if flex._FAILED_KERNELS else "FLASH")
    monkeypatch.setattr(flex, "_compile_attention", lambda threads: kernel)
    monkeypatch.setattr(flex, "_cpu_unsupported_reason", lambda: None)
    for _ in range(2):
        attend(*(torch.randn(1, 1, 40, 8) for _ in "qkv"), patterns.window(40, 9), backend="flex")
    assert names == (["FLASH", "", ""] if fails else ["FLASH"] * 2)
