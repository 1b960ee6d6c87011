"""These checks need a GPU: every run gives the same bits, and compilers can use the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.groups import draw_problem
from gnn_attention.verify.measure import Outcome, differentiate, judge, judge_condition
from gnn_attention.verify.truth import Problem, make_leaves

REPEATS = 3


def run_again(problem: Problem, backend: Backend, kernel: str = "") -> Outcome:
    """Check that output, lse and gradients are equal bit for bit in three runs of the operator ``kernel``.

    The operator must be called: if it were missing, operators of torch would pass all other checks in its place.
    """
    with Recorder() as recorder:
        first = _results(problem, backend)
    if not any(kernel in str(func) for func, _, _ in recorder.calls) and kernel:
        return judge_condition(False, f"the operator {kernel} was not called")
    for _ in range(REPEATS - 1):
        for name, repeat in _results(problem, backend).items():
            if not torch.equal(first[name].nan_to_num(0.5), repeat.nan_to_num(0.5)):
                return judge_condition(False, f"{name} differs from run to run")
    return judge_condition(True)


def _results(problem: Problem, backend: Backend) -> dict[str, Tensor]:
    """Return the output, lse and every gradient."""
    leaves = make_leaves(problem.inputs)
    q, k, v = (leaves[name] for name in "qkv")
    options = problem.options(leaves)
    out, info = attend(q, k, v, problem.graph, backend=backend, return_info=True, **options)
    gradients = differentiate(out, problem.direction, leaves)
    return {"output": out.detach(), "lse": info.lse.detach(), **gradients}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the calls of operators of this library."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gnn_attention":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _small_problem(device: str, dtype: str, graph: str, backend: Backend) -> Problem:
    """Return a call, with a bias for each edge if the backend supports it."""
    return draw_problem(device, dtype, graph, "edge bias" if backend.capabilities.bias else "plain")


def run_opcheck(device: str, dtype: str, graph: str, backend: Backend) -> Outcome:
    """Run ``torch.library.opcheck`` on every call of an operator in a forward and a backward pass."""
    problem = _small_problem(device, dtype, graph, backend)
    with Recorder() as recorder:
        problem.solve(backend)
    if not recorder.calls:
        return judge_condition(False, "no operator of ours was called")
    for func, args, kwargs in recorder.calls:
        differentiable = "backward" not in str(func)
        leaves = tuple(leaf_like(x, differentiable) for x in args)
        torch.library.opcheck(func, leaves, kwargs)
    return judge_condition(True)


def leaf_like(x: Any, differentiable: bool) -> Any:
    """Return a detached copy of a float tensor; any other argument is returned unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    leaf: Tensor = x.detach().clone()
    return leaf.requires_grad_(differentiable)


def run_compiled(device: str, dtype: str, graph: str, backend: Backend) -> Outcome:
    """Compile a call with ``fullgraph=True``, and judge its output and gradients as those of every call."""
    problem = _small_problem(device, dtype, graph, backend)
    leaves = make_leaves(problem.inputs)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = attend(q, k, v, problem.graph, bias=bias, backend=backend)
        return out

    out = _compile(device, run)(**leaves)
    gradients = differentiate(out, problem.direction, leaves)
    return judge(out, gradients, problem.truth.for_backend(backend))


def run_compiled_layer(device: str, dtype: str, graph: str) -> Outcome:
    """Compile a layer on its message-passing path, and judge its output and gradients."""
    problem = draw_problem(device, dtype, graph, form="standard", kind="grouped heads with biases")
    layer = MessagePassingAttention(problem.heads, backend="message_passing")
    leaves = make_leaves(problem.inputs)

    def run(x_src: Tensor, x_dst: Tensor) -> Tensor:
        out: Tensor = layer((x_src, x_dst), problem.graph)
        return out

    out = _compile(device, run)(**leaves)
    gradients = differentiate(out, problem.direction, leaves)
    return judge(out, gradients, problem.truth)


def _compile(device: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    backend = "inductor" if device.startswith("cuda") else "aot_eager"
    return torch.compile(run, fullgraph=True, backend=backend)
