"""The operators of the kernel: opcheck, compilers, derivatives, vmap, and no waiting for the device."""

import contextlib
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.kernel_cases import CASES, GRAPH
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_attention as ga
from gnn_attention._support import memo
from gnn_attention.backends.gpu import ops
from gnn_attention.backends.gpu.kernels import _common
from gnn_attention.score_mods import alibi, alibi_slopes, chain, relative_bias, softcap

# What a CUDA graph may not capture.
FORBIDDEN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# numbers of the host on their way to a tensor, and a question that the host asks
FORBIDDEN = {"aten::lift_fresh", "aten::equal", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"}


class CaptureError(RuntimeError):
    """What ends a capture on a GPU."""


class CaptureRules(TorchDispatchMode):
    """Raises for what waits for the device, moves between devices, or has a size that depends on numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        sized = func.name() == "aten::repeat_interleave.Tensor" and given.get("output_size") is not None
        # of a bool index, the number of entries is known to the device alone
        by_numbers = func.name() == "aten::index.Tensor" and all(
            index is None or index.dtype != torch.bool for index in args[1]
        )
        moved = func.name().startswith(("aten::_to_copy", "aten::copy_")) and _moves(args, given)
        if (
            moved
            or func.name() in FORBIDDEN
            or (FORBIDDEN_TAGS & set(func.tags) and not (sized or by_numbers))
        ):
            raise CaptureError(func.name())
        return func(*args, **given)


def _moves(args, given):
    """Whether a copy names a device, or has tensors on two; on a CPU ``to`` another one makes the call."""
    devices = {x.device for x in args if isinstance(x, torch.Tensor)}
    return given.get("device") is not None or len(devices) > 1


def trained(graph, given):
    """A forward and a backward pass with every option."""
    q, k, v, bias, sinks, table = given
    mod = chain(softcap(2.0), alibi(alibi_slopes(2)), relative_bias(table))
    more = {"bias": bias, "sink_logits": sinks, "score_mod": mod, "dropout": 0.3}
    out = ga.attend(q, k, v, graph, **more, backend="rows")
    return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]


@pytest.fixture
def options(device):
    """q, k, v, bias, sinks and a table for :func:`trained`."""
    table = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    return [*replace(CASES["bias by head"], sinks=True).inputs(torch.float64, device), table]


def test_a_planned_graph_can_be_captured(options, monkeypatch):
    """Both passes, with every option, keep the rules of CUDA graphs; the first ones, which plan, do not."""
    launched = []
    monkeypatch.setattr(_common, "launch", lambda kernel, *rest, **more: launched.append(kernel))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("waits for the device"))
    monkeypatch.setattr(memo, "eager_mode", contextlib.nullcontext)  # else what plans is outside of modes
    graph = replace(GRAPH)
    with CaptureRules(), pytest.raises(CaptureError):
        trained(graph, options)
    trained(graph, options)
    launched.clear()
    monkeypatch.setattr(ops, "are_eager", lambda tensors: True)  # as without the mode
    with CaptureRules():
        trained(graph, options)
    assert len(launched) >= 3


def attention_of(q, k, v, bias, sinks, table):
    """With all that is cached with a graph."""
    mod = chain(softcap(2.0), alibi(alibi_slopes(2)), relative_bias(table))
    return ga.attend(q, k, v, GRAPH, bias=bias, sink_logits=sinks, score_mod=mod, backend="rows")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_compiled_as_one_graph(compiler, device):
    """As in eager mode, gradients too."""
    case = replace(CASES["bias by head"], sinks=True)
    table = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    given = [*case.inputs(torch.float64, device), table]
    results = []
    for run in (attention_of, torch.compile(attention_of, fullgraph=True, backend=compiler)):
        out = run(*given)
        results.append([out, *torch.autograd.grad(out.sin().sum(), given)])
    found, wanted = results
    if compiler == "aot_eager":
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    else:  # inductor rounds what surrounds the operators in its own way
        assert_exact(found[0], wanted[0])
        assert_exact(found[1:], wanted[1:])


def test_second_derivatives_are_refused(device):
    """By name, and only where they are computed."""
    q, k, v = CASES["plain"].inputs(torch.float64, device)[:3]
    (grad,) = torch.autograd.grad(ga.attend(q, k, v, GRAPH, backend="rows").sum(), q, create_graph=True)
    with pytest.raises(
        NotImplementedError, match="second derivatives do not pass through the kernel of the backend rows"
    ):
        grad.sum().backward()


@pytest.mark.slow
def test_vmap_and_functional_gradients(device):
    """A mapped axis joins the samples; ``torch.func.grad`` is ``torch.autograd.grad``."""
    q, k, v, bias = (x.detach() for x in CASES["bias by head"].inputs(torch.float64, device)[:4])

    def loss(q, k, v, bias):
        return ga.attend(q, k, v, GRAPH, bias=bias, backend="rows").sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, 0, None, None))
    found = mapped(q.unsqueeze(1), k.unsqueeze(1), v[:1], bias)
    for sample in range(2):
        one = slice(sample, sample + 1)
        given = [x.clone().requires_grad_() for x in (q[one], k[one], v[:1], bias)]
        true = torch.autograd.grad(loss(*given), given)
        assert_exact([x[sample] for x in found], true)
