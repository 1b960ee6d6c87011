"""Registers an operator for autograd, compilers, ``torch.export``, ``torch.vmap`` and ``torch.func``."""

from collections.abc import Callable
from typing import Any

import torch

from gnn_attention._support.autograd import has_forward_derivative
from gnn_attention._support.shapes import Tensor


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Make an operator without a derivative, and return its full name."""
    full = f"gnn_attention::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "default", run)  # custom_op would import dynamo in every process
    torch.library.register_fake(full, fake)
    return full


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    keep: Callable[..., None],
) -> Callable[..., Any]:
    """Make ``torch.ops.gnn_attention.<name>`` and return what calls it.

    ``run`` computes on plain tensors, ``fake`` makes results of the right shapes, ``keep(ctx, inputs,
    output)`` and ``backward(ctx, *grads)`` are those of ``torch.autograd.Function``. The single tensors of
    the schema come first and begin with a sample axis, which an axis mapped by ``torch.vmap`` joins.
    """
    full = define(name, schema, run, fake)
    torch.library.register_autograd(full, backward, setup_context=keep)
    registered = getattr(torch.ops.gnn_attention, name)

    def call(*arguments: Any) -> Any:
        # torch would drop the tangents of a registered operator in silence
        if has_forward_derivative(x for x in arguments if isinstance(x, Tensor)):
            raise NotImplementedError(
                f"forward-mode derivatives do not pass through the operator {name}; "
                "use backend='message_passing'"
            )
        return (transformed if torch._C._are_functorch_transforms_active() else registered)(*arguments)

    # a vmap inside a grad leaves the grad to be done
    mapped = _vmap_rule(call, schema.split("->")[0].count("Tensor "))
    torch.library.register_vmap(full, mapped)

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # a list is no input to a Function
        return tuple(None if isinstance(x, list) else x for x in backward(ctx, *grads))

    # torch.func.grad takes an autograd.Function, but no registered derivative
    members = {"forward": registered, "setup_context": keep, "backward": gradients, "vmap": mapped}
    body = {word: staticmethod(member) for word, member in members.items()}
    transformed = type("Transformed", (torch.autograd.Function,), body).apply  # type: ignore[attr-defined]
    return call


def _vmap_rule(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    def join(size: int, x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        joined = [join(size, *pair) for pair in zip(arguments[:count], in_dims, strict=False)]
        result = call(*joined, *arguments[count:])
        results = (result,) if isinstance(result, Tensor) else result
        separate = tuple(x.view(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return (separate[0], 0) if isinstance(result, Tensor) else (separate, (0,) * len(separate))

    return rule


def gradient_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], advice: str
) -> Callable[..., Any]:
    """An operator for first derivatives; a second one is a NotImplementedError with ``advice``."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"second derivatives do not pass through {advice}")

    return operator(name, schema, run, fake, refuse, keep=lambda ctx, inputs, output: None)
