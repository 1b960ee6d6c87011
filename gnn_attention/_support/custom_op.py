"""Define operators that support autograd, compilers, ``torch.export``, ``vmap`` and ``torch.func``."""

from collections.abc import Callable
from typing import Any

import torch

from gnn_attention._support.autograd import has_forward_derivative
from gnn_attention._support.shapes import Tensor


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Define ``torch.ops.gnn_attention.<name>`` without a derivative; return its qualified name."""
    qualified_name = f"gnn_attention::{name}"
    torch.library.define(qualified_name, schema)
    # torch.library.custom_op would import dynamo in every process.
    torch.library.impl(qualified_name, "default", run)
    torch.library.register_fake(qualified_name, fake)
    return qualified_name


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None],
) -> Callable[..., Any]:
    """Define ``torch.ops.gnn_attention.<name>`` and return a function that calls it.

    ``run`` computes the result; ``fake`` returns empty tensors of the same shapes. ``save(ctx, inputs,
    output)`` and ``backward(ctx, *grads)`` are used as in a ``torch.autograd.Function``. The schema lists
    the tensors first. ``torch.vmap`` merges the mapped axis into each tensor's first axis, the samples.
    """
    qualified_name = define(name, schema, run, fake)
    torch.library.register_autograd(qualified_name, backward, setup_context=save)
    op = getattr(torch.ops.gnn_attention, name)

    def call(*arguments: Any) -> Any:
        # torch silently drops the tangents of a registered operator.
        if has_forward_derivative(x for x in arguments if isinstance(x, Tensor)):
            raise NotImplementedError(
                f"the operator {name} has no forward-mode derivative; use backend='message_passing'"
            )
        return (function if torch._C._are_functorch_transforms_active() else op)(*arguments)

    # The rule calls ``call``, because ``op`` has no derivative when vmap runs inside a gradient.
    vmap_rule = _make_vmap_rule(call, schema.split("->")[0].count("Tensor "))
    torch.library.register_vmap(qualified_name, vmap_rule)

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A registered derivative returns a list for a list; autograd.Function expects None instead.
        return tuple(None if isinstance(x, list) else x for x in backward(ctx, *grads))

    # torch.func.grad supports an autograd.Function, but not a registered derivative.
    methods = {"forward": op, "setup_context": save, "backward": gradients, "vmap": vmap_rule}
    namespace = {method_name: staticmethod(method) for method_name, method in methods.items()}
    function = type("Transformed", (torch.autograd.Function,), namespace).apply  # type: ignore[attr-defined]
    return call


def _make_vmap_rule(call: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
    def merge(batch_size: int, x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    def vmap_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        batch_size = info.batch_size
        tensors = [merge(batch_size, x, dim) for x, dim in zip(args[:num_tensors], in_dims, strict=False)]
        result = call(*tensors, *args[num_tensors:])
        results = (result,) if isinstance(result, Tensor) else result
        outputs = tuple(x.view(batch_size, x.shape[0] // batch_size, *x.shape[1:]) for x in results)
        return (outputs[0], 0) if isinstance(result, Tensor) else (outputs, (0,) * len(outputs))

    return vmap_rule


def gradient_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], kernel: str
) -> Callable[..., Any]:
    """Define an operator that computes gradients; ``kernel`` ends the error for second derivatives."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"second derivatives do not pass through {kernel}")

    return operator(name, schema, run, fake, refuse, save=lambda ctx, inputs, output: None)
