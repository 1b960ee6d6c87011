"""The operators of the kernel: compilers, derivatives, vmap, and no waiting for the device."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.kernel_cases import CASES, GRAPH, LEARNED, gradients, mark_slow, parameters, run_attention
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_attention as ga
from gnn_attention._support import memo
from gnn_attention.backends.gpu import ops
from gnn_attention.backends.gpu.kernels import _common
from gnn_attention.score_mods import alibi, alibi_slopes, chain, relative_bias, softcap

# What a CUDA graph may not capture.
FORBIDDEN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operators that copy numbers of the host to a tensor, or read numbers on the host.
FORBIDDEN = {"aten::lift_fresh", "aten::equal", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"}


class CaptureError(RuntimeError):
    """An operator that a CUDA graph cannot capture."""


class CaptureRules(TorchDispatchMode):
    """Raises for operators that wait for the device, copy between devices, or have sizes from numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        is_sized = func.name() == "aten::repeat_interleave.Tensor" and options.get("output_size") is not None
        # Only the device knows how many entries a bool index has.
        has_int_index = func.name() == "aten::index.Tensor" and all(
            index is None or index.dtype != torch.bool for index in args[1]
        )
        moved = func.name().startswith(("aten::_to_copy", "aten::copy_")) and _moves(args, options)
        if (
            moved
            or func.name() in FORBIDDEN
            or (FORBIDDEN_TAGS & set(func.tags) and not (is_sized or has_int_index))
        ):
            raise CaptureError(func.name())
        return func(*args, **options)


def _moves(args, options):
    """Return whether a copy names a device or has tensors on two."""
    devices = {x.device for x in args if isinstance(x, torch.Tensor)}
    return options.get("device") is not None or len(devices) > 1


def run_training_step(graph, inputs):
    """Run a forward and a backward pass with every option."""
    q, k, v, bias, sinks, table = inputs
    mod = chain(softcap(2.0), alibi(alibi_slopes(2)), relative_bias(table))
    options = {"bias": bias, "sink_logits": sinks, "score_mod": mod, "dropout": 0.3}
    out = ga.attend(q, k, v, graph, **options, backend="rows")
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


@pytest.fixture
def options(device):
    """Return q, k, v, bias, sinks and a table for :func:`run_training_step`."""
    table = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    return [*replace(CASES["bias by head"], sinks=True).inputs(torch.float64, device), table]


def test_a_planned_graph_can_be_captured(options, monkeypatch):
    """Both passes obey the rules of CUDA graphs, with every option, once the graph is planned."""
    launches = []
    monkeypatch.setattr(_common, "launch", lambda kernel, *rest, **more: launches.append(kernel))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("waits for the device"))
    monkeypatch.setattr(memo, "eager_mode", contextlib.nullcontext)  # It would plan outside of modes.
    graph = replace(GRAPH)
    with CaptureRules(), pytest.raises(CaptureError):
        run_training_step(graph, options)
    run_training_step(graph, options)
    launches.clear()
    monkeypatch.setattr(ops, "are_eager", lambda tensors: True)  # Without the mode it is True.
    with CaptureRules():
        run_training_step(graph, options)
    assert len(launches) >= 3


def attention_of(q, k, v, bias, sinks, table, backend="rows"):
    """Attend with every option that caches something with the graph."""
    mod = chain(softcap(2.0), alibi(alibi_slopes(2)), relative_bias(table))
    return ga.attend(q, k, v, GRAPH, bias=bias, sink_logits=sinks, score_mod=mod, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_compiled_as_one_graph(compiler, device):
    """Compiled outputs and gradients are those of eager mode."""
    case = replace(CASES["bias by head"], sinks=True)
    table = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    inputs = [*case.inputs(torch.float64, device), table]
    results = []
    for run in (attention_of, torch.compile(attention_of, fullgraph=True, backend=compiler)):
        out = run(*inputs)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    outputs, expected = results
    if compiler == "aot_eager":
        assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    else:  # Inductor rounds the code around the operators in its own way.
        assert_exact(outputs[0], expected[0])
        assert_exact(outputs[1:], expected[1:])


@pytest.mark.parametrize("name", mark_slow(["everything", "features and everything", "gelu"], ["everything"]))
def test_second_derivatives(name, device):
    """They pass through the operators of edges, with every option of the kernel."""
    case, results = CASES[name], []
    LEARNED.to(device)
    for backend in ("rows", "message_passing"):
        inputs = case.inputs(torch.float64, device)
        leaves = parameters(case, inputs)
        grads = gradients(*run_attention(case, inputs, backend), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))
    assert_exact(*results)


def test_forward_mode(device):
    inputs = [*replace(CASES["bias by head"], sinks=True).inputs(torch.float64, device)]
    inputs.append(torch.zeros(2, 3, dtype=torch.float64, device=device))
    inputs = tuple(x.detach() for x in inputs)
    tangents = tuple(torch.ones_like(x) for x in inputs)
    results = []
    for backend in ("rows", "message_passing"):
        run = functools.partial(attention_of, backend=backend)
        results.append(torch.func.jvp(run, inputs, tangents)[1])
    assert_exact([results[0]], [results[1]])


@pytest.mark.slow
def test_vmap_and_functional_gradients(device):
    """A mapped axis joins the samples; ``torch.func.grad`` is ``torch.autograd.grad``."""
    q, k, v, bias = (x.detach() for x in CASES["bias by head"].inputs(torch.float64, device)[:4])

    def loss(q, k, v, bias):
        return ga.attend(q, k, v, GRAPH, bias=bias, backend="rows").sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, 0, None, None))
    grads = mapped(q.unsqueeze(1), k.unsqueeze(1), v[:1], bias)
    for sample in range(2):
        index = slice(sample, sample + 1)
        inputs = [x.clone().requires_grad_() for x in (q[index], k[index], v[:1], bias)]
        expected = torch.autograd.grad(loss(*inputs), inputs)
        assert_exact([x[sample] for x in grads], expected)
