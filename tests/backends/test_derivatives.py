"""Every derivative of every backend is that of the dense formula: forward, backward, nested and compiled."""

import sys

import pytest
import torch
from support.bounds import assert_exact, formula
from support.inputs import qkv, randn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support.autograd import derivative_order
from gnn_attention.backends import BACKENDS
from gnn_attention.verify import oracle

NAMES = ("rows", "tiles", "mixed", "dense", "reference", "message_passing", "auto")
SMALL = {
    "window": patterns.window(6, 3),
    "isolated": patterns.strict_causal(5),
    "documents": patterns.documents([2, 1, 3]),
    "list": ga.TokenGraph.from_edges(torch.tensor([[1, 0, 3, 2, 0], [1, 1, 0, 3, 3]]), 5, 4),
    "by head": ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= h), 5, heads=4),
}
# Its plan has rectangles, receivers in two of them, and, for mixed, a list of edges.
LARGE = patterns.window(150, 20) | patterns.sinks(150, 2)


def inputs_of(graph):
    return [x.detach() for x in qkv(graph.num_dst, graph.num_src, dim=2, value_dim=3, batch=1)]


def double_backward(loss, inputs):
    """Return the gradients of the squared gradients by autograd."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)


def triple_backward(loss, inputs):
    return double_backward(lambda *x: sum(y.sum() for y in _gradients(loss, x)), inputs)


def _gradients(loss, inputs):
    return torch.autograd.grad(loss(*inputs), inputs, create_graph=True)


def backward_of_functional_gradient(loss, inputs):
    """Mix a transform with autograd, which differentiates its result."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    grads = grad(loss, argnums=(0, 1, 2))(*leaves)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)


def backward_of_dual_numbers(loss, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents_of(inputs), strict=True)]
        tangent = forward_ad.unpack_dual(loss(*duals)).tangent
        return [tangent, *torch.autograd.grad(tangent, leaves)]


def tangents_of(inputs):
    return tuple(randn(*x.shape, seed=7 + i) for i, x in enumerate(inputs))


def push(function, inputs):
    return jvp(function, tuple(inputs), tangents_of(inputs))[1]


FIRST = {
    "jvp": push,
    "vjp": lambda loss, x: vjp(loss, *x)[1](torch.ones((), dtype=torch.float64)),
    "jvp of the gradient": lambda loss, x: push(grad(loss, argnums=(0, 1, 2)), x),
    "gradient of the jvp": lambda loss, x: grad(lambda *y: push(loss, y), argnums=(0, 1, 2))(*x),
    "jvp of the jvp": lambda loss, x: push(lambda *y: push(loss, y), x),
    "double backward": double_backward,
    "triple backward": triple_backward,
    "backward of a functional gradient": backward_of_functional_gradient,
    "backward of dual numbers": backward_of_dual_numbers,
}
ALL = FIRST | {
    "hessian": lambda loss, x: hessian(loss)(*x),
    "jacfwd of jacfwd": lambda loss, x: jacfwd(jacfwd(loss))(*x),
    "jacrev of jacfwd": lambda loss, x: jacrev(jacfwd(loss))(*x),
    "vmap of jvp": lambda loss, x: vmap(lambda t: jvp(lambda q: loss(q, *x[1:]), (x[0],), (t,))[1])(
        torch.stack([x[0], x[0] - 1])
    ),
}


def assert_derivatives(name, transform, graph, sinks):
    inputs = inputs_of(graph)
    sinks = torch.arange(4.0, dtype=torch.float64) / 4 if sinks else None
    mask = graph.mask().expand(1, 4, graph.num_dst, graph.num_src)

    def run(q, k, v):
        return ga.attend(q, k, v, graph, backend=name, sink_logits=sinks).sin().sum()

    def expected(q, k, v):
        return oracle.attention(q, k, v, mask, 2**-0.5, sink_logits=sinks).sin().sum()

    results = [flatten(ALL[transform](function, inputs)) for function in (run, expected)]
    assert_exact(*results)


def share_tensor(x, y, z):
    return (x + y * z,) * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", FIRST)
@pytest.mark.parametrize("make_tokens", [share_tensor, lambda x, y, z: (x, x * y, x + z)])
def test_keys_and_values_may_be_functions_of_the_queries(name, transform, make_tokens):
    """A derivative counts each path once, also if q, k and v are one tensor."""
    graph = SMALL["window"]
    mask = graph.mask().expand(1, 4, graph.num_dst, graph.num_src)
    inputs = [randn(1, 4, graph.num_dst, 2, seed=seed) for seed in range(3)]

    def run(*x):
        return ga.attend(*make_tokens(*x), graph, backend=name).sin().sum()

    def expected(*x):
        return oracle.attention(*make_tokens(*x), mask, 2**-0.5).sin().sum()

    assert_exact(*(flatten(FIRST[transform](function, inputs)) for function in (run, expected)))


def flatten(result):
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [x for part in result for x in flatten(part)]


@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_small_graphs(name, transform):
    for i, graph in enumerate(SMALL.values()):
        assert_derivatives(name, transform, graph, sinks=i % 2 == 1)


@pytest.mark.parametrize("transform", FIRST)
@pytest.mark.parametrize("name", ["rows", "tiles", "mixed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_plan_of_several_pieces(name, transform, sinks):
    assert_derivatives(name, transform, LARGE, sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rows", "tiles", "mixed", "dense"])
def test_tangents_have_rounding_errors_only(name, dtype):
    """The tangents of half inputs are summed in float32, and rounded once at the end."""
    inputs = [x.to(dtype) for x in inputs_of(LARGE)]
    tangents = [x.to(dtype) for x in tangents_of(inputs)]
    _, out = jvp(lambda *x: ga.attend(*x, LARGE, backend=name), tuple(inputs), tuple(tangents))
    wide = [tuple(x.double() for x in xs) for xs in (inputs, tangents)]
    _, exact = jvp(lambda *x: formula(*x, LARGE.mask(), 2**-0.5)[0], *wide)
    assert out.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    assert float((out - exact).abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "tiles", "mixed", "message_passing"])
@pytest.mark.parametrize("transform", ["jvp", "vjp", "hessian", "jvp of the gradient"])
def test_transforms_inside_a_compiled_program(name, transform, monkeypatch):
    graph = SMALL["window"]
    inputs = [x.clone() for x in inputs_of(graph)]
    sinks = torch.arange(4.0, dtype=torch.float64)
    tangents = tangents_of(inputs)
    # A compiler does not trace the generator of random numbers.
    monkeypatch.setattr(sys.modules[__name__], "tangents_of", lambda inputs: tangents)

    def run():
        return ALL[transform](
            lambda *x: ga.attend(*x, graph, backend=name, sink_logits=sinks).sin().sum(), inputs
        )

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_exact(flatten(compiled()), flatten(run()))


def test_the_order_counts_transforms_autograd_and_dual_numbers():
    x, orders = torch.ones(2, requires_grad=True), []

    def note(y):
        orders.append(derivative_order([y]))
        return y.sum()

    note(x)
    note(x.detach())
    grad(note)(x)
    jvp(grad(note), (x.detach(),), (x.detach(),))
    with forward_ad.dual_level():
        note(forward_ad.make_dual(x.detach(), x.detach()))
        note(x)
    vmap(note)(x.detach().view(2, 1))
    assert orders == [1, 0, 2, 2, 1, 1, 0]


def test_first_derivatives_stay_fused(monkeypatch):
    """A first derivative, forward or backward, runs the fused operator and not its formula."""
    from gnn_attention.backends.cpu import attention_op

    monkeypatch.setattr(attention_op, "attend_pieces", lambda *args: pytest.fail("not fused"))
    inputs = inputs_of(LARGE)
    for name in ("rows", "tiles", "mixed"):

        def loss(*x, name=name):
            return ga.attend(*x, LARGE, backend=name).sum()

        push(loss, inputs)
        grad(loss)(*inputs)
        vjp(loss, *inputs)[1](torch.ones((), dtype=torch.float64))
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.autograd.grad(loss(*leaves), leaves)


def test_no_backend_of_a_cpu_declares_a_missing_derivative():
    names = set(NAMES) - {"auto"}
    assert {name for name in names if not BACKENDS[name].capabilities.double_backward} == set()
