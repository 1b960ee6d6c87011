"""The operator over plans equals the formula in float64, also in exports and torch.func transforms."""

import io
from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thin
from support.inputs import qkv
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import devices
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.plan.planner import packed_plan
from gnn_attention.backends.plan.work import WORK
from gnn_attention.verify import oracle

CPU = torch.device("cpu")
NAMES = sorted(WORK)


def formula(q, k, v, graph, scale=None, modify=None, sinks=None):
    mask = graph.mask().expand(q.shape[0], q.shape[1], graph.num_dst, graph.num_src)
    inputs = (x if x.dtype == torch.float64 else x.double() for x in (q, k, v))
    return oracle.attention(*inputs, mask, scale or q.shape[3] ** -0.5, modify, sinks)


def gradients(out, inputs, seed=3):
    rng = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(
        out, inputs, torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype)
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_through_out_and_lse(name):
    graph = ga.convert.from_edge_index(torch.tensor([[1, 0, 2, 2, 0], [1, 1, 0, 3, 3]]), 5, 3)
    inputs, plan = qkv(5, 3, heads=2, kv_heads=1, dim=3, value_dim=2, batch=2), packed_plan(graph, name, CPU)
    has_edges = graph.in_degree() > 0

    def out_and_lse(q, k, v):
        out, lse = attention_op.attention(q, k, v, plan, 0.7)
        return out, lse[:, :, has_edges]

    assert torch.autograd.gradcheck(out_and_lse, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_gradient_of_an_isolated_receiver_reaches_no_token(name):
    graph, inputs = patterns.strict_causal(70), qkv(70)
    out, info = ga.attend(*inputs, graph, backend=name, return_info=True)
    grad_outputs = torch.ones_like(out), torch.ones_like(info.lse)
    expected = torch.autograd.grad((out, info.lse), inputs, grad_outputs, retain_graph=True)
    for grad_output in grad_outputs:
        grad_output[:, :, 0] = torch.nan
    grads = torch.autograd.grad((out, info.lse), inputs, grad_outputs)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize(
    ("where", "value", "name"),
    thin(
        product(
            "qkv", [torch.nan, torch.inf, -torch.inf, 1e4], [*NAMES, "rows, on a GPU", "dense", "written out"]
        )
    ),
)
def test_a_value_reaches_the_receivers_of_its_edges_alone(where, value, name, monkeypatch):
    """Elsewhere, outputs and gradients equal those of a call without the value; a NaN makes its outputs NaN.

    A call with a number that is not finite runs edge by edge. On a GPU only "rows" promises to contain it.
    """
    monkeypatch.setattr(devices, "ASYNCHRONOUS", ("cpu",) if "on a GPU" in name else ())
    n, token, graph = 150, 70, patterns.window(150, 20) | patterns.sinks(150, 2)
    inputs = qkv(n)
    changed_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        changed_inputs["qkv".index(where)][:, :, token] = value
    is_reached = torch.arange(n) == token if where == "q" else graph.mask()[:, token]
    options = {"backend": name.removesuffix(", on a GPU"), "return_info": True}
    if name == "written out":
        options |= {"backend": "tiles", "score_mod": ga.score_mods.softcap(2.0)}
    out, info = ga.attend(*changed_inputs, graph, **options)
    expected, expected_info = ga.attend(*inputs, graph, **options)
    assert_exact(out[:, :, ~is_reached], expected[:, :, ~is_reached])
    assert_exact(info.lse[:, :, ~is_reached], expected_info.lse[:, :, ~is_reached])
    if value != value:
        assert out[:, :, is_reached].isnan().all()
    elif value == 1e4 and name != "written out":
        assert_exact(out, formula(*changed_inputs, graph))
    grads, expected_grads = (
        torch.autograd.grad(y[:, :, ~is_reached].square().sum(), x)
        for y, x in ((out, changed_inputs), (expected, inputs))
    )
    # Senders of a receiver that the value reaches may get zero times NaN as their gradient.
    is_clean_sender = ~graph.mask()[is_reached].any(0)
    selections = [slice(None)] * 3 if value == 1e4 else [~is_reached, is_clean_sender, is_clean_sender]
    assert_exact(*([x[:, :, i] for x, i in zip(y, selections, strict=True)] for y in (grads, expected_grads)))


FEW_SENDERS = [patterns.causal(1), patterns.cross(5, 3), patterns.self_loops(20), patterns.documents([3, 9])]
FEW_EDGES = torch.tensor([[4, 0, 6, 4], [0, 1, 1, 5]])
FEW_SENDERS += [patterns.causal(7), ga.TokenGraph.from_edges(FEW_EDGES, 7, 7)]


@pytest.mark.parametrize(("where", "graph", "name"), list(product("qk", FEW_SENDERS, [*NAMES, "dense"])))
def test_a_nan_of_few_senders_is_not_lost(where, graph, name):
    token = graph.num_src // 2
    q, k, v = (x.detach() for x in qkv(graph.num_dst))
    k, v = k[:, :, : graph.num_src], v[:, :, : graph.num_src]
    (q if where == "q" else k)[:, :, token] = torch.nan
    is_token = (torch.arange(graph.num_dst) == token) & (graph.in_degree() > 0)
    is_reached = graph.mask()[:, token] if where == "k" else is_token
    out, info = ga.attend(q, k, v, graph, backend=name, return_info=True)
    plain_out = ga.attend(q, k, v, graph, backend=name)
    assert torch.equal(plain_out.isnan(), out.isnan())
    assert out.isnan().any(-1)[0, 0].tolist() == info.lse.isnan()[0, 0].tolist() == is_reached.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_exported_saved_and_loaded(name):
    graph, inputs = patterns.window(9, 3), [x.detach() for x in qkv()]

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return ga.attend(q, k, v, graph, backend=name)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(), tuple(inputs)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    assert_exact(program(*inputs), formula(*inputs, graph))


@pytest.mark.parametrize("name", [*NAMES, "dense", "reference"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 2), (2, 0, None)])
def test_vmap_and_vmap_of_grad(name, in_dims):
    graph = patterns.window(9, 3)
    batch = [torch.stack([x.detach(), x.detach() + 1, x.detach() - 2]) for x in qkv()]
    inputs = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(batch, in_dims, strict=True)]

    def loss(q, k, v):
        return ga.attend(q, k, v, graph, backend=name).square().sum()

    outputs = torch.vmap(lambda *x: ga.attend(*x, graph, backend=name), in_dims)(*inputs)
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims)(*inputs)
    for i in range(3):
        sample = [
            x[0 if dim is None else i].clone().requires_grad_() for x, dim in zip(batch, in_dims, strict=True)
        ]
        expected = formula(*sample, graph)
        assert_exact(outputs[i], expected)
        assert_exact([x[i] for x in grads], torch.autograd.grad(expected.square().sum(), sample))


TRANSFORMS = {
    "grad": lambda loss: torch.func.grad(loss),
    "vmap in grad": lambda loss: torch.func.grad(lambda q: torch.vmap(loss)(q[None]).sum()),
    "grad in vmap": lambda loss: lambda q: torch.vmap(torch.func.grad(loss))(q[None])[0],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_graph_first_met_in_a_transform_serves_outside(transform, name):
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= 3 * h), 9, heads=4)
    inputs = qkv()
    q = inputs[0].detach()
    grad = TRANSFORMS[transform](lambda q: ga.attend(q, *inputs[1:], graph, backend=name).sum())(q)
    leaf = q.clone().requires_grad_()
    assert_exact([grad], torch.autograd.grad(formula(leaf, *inputs[1:], graph).sum(), leaf))
    out, expected = ga.attend(*inputs, graph, backend=name), formula(*inputs, graph)
    assert_exact(out, expected)
    assert_exact(gradients(out, inputs), gradients(expected, inputs))


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor made in this context, in operators too."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        bodies = {"attention_pieces": attention_op._run}
        bodies["attention_pieces_backward"] = attention_op._run_backward
        body = bodies.get(function.__name__.removesuffix(".default"))
        if body is not None:
            with self, torch.no_grad():
                return body(*arguments)
        result = function(*arguments, **(options or {}))
        tensors = result if isinstance(result, (list, tuple)) else [result]
        strided_tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.layout == torch.strided]
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in strided_tensors]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_size_of_all_pairs_is_made(name):
    n = 4096
    graph, inputs = patterns.window(n, 64), qkv(n, heads=2, kv_heads=1, dtype=torch.float32, batch=1)
    with LargestTensor() as recorder:
        gradients(ga.attend(*inputs, graph, backend=name), inputs)
    assert inputs[0].numel() <= recorder.numbers < n * n / 8
