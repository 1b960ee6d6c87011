"""Registers an operator for autograd, compilers, ``torch.export``, ``torch.vmap`` and ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    keep: Callable[..., None],
) -> Callable[..., Any]:
    """Make ``torch.ops.gnn_attention.<name>`` and return what calls it.

    ``run`` computes on plain tensors, ``fake`` makes results of the right shapes;
    ``keep(ctx, inputs, output)`` and ``backward(ctx, *grads)`` are those of ``torch.autograd.Function``. The
    single tensors of the schema have a sample axis first, which an axis mapped by ``torch.vmap`` joins; they
    come before all other arguments.
    """
    full = f"gnn_attention::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "default", run)  # custom_op would import dynamo in every process
    torch.library.register_fake(full, fake)
    torch.library.register_autograd(full, backward, setup_context=keep)
    registered = getattr(torch.ops.gnn_attention, name)

    def call(*arguments: Any) -> Any:
        return (transformed if torch._C._are_functorch_transforms_active() else registered)(*arguments)

    # a vmap inside a grad leaves the grad to be done
    mapped = _vmap_rule(call, schema.split("->")[0].count("Tensor "))
    torch.library.register_vmap(full, mapped)
    transformed = _functorch_op(registered, backward, keep, mapped)
    return call


def _functorch_op(
    registered: Callable[..., Any],
    backward: Callable[..., Any],
    keep: Callable[..., None],
    mapped: Callable[..., Any],
) -> Callable[..., Any]:
    """For ``torch.func.grad``, which takes an ``autograd.Function`` but no registered derivative."""

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # a list is no input to a Function
        return tuple(None if isinstance(x, list) else x for x in backward(ctx, *grads))

    members = {"forward": registered, "setup_context": keep, "backward": gradients, "vmap": mapped}
    made = type(
        "Transformed",
        (torch.autograd.Function,),
        {word: staticmethod(member) for word, member in members.items()},
    )
    apply: Callable[..., Any] = made.apply  # type: ignore[attr-defined]
    return apply


def _vmap_rule(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The rule of ``torch.vmap``: the mapped axis joins the samples of the first ``count`` arguments."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        pairs = zip(arguments[:count], in_dims[:count], strict=True)
        moved = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs
        )
        result = call(*(x.flatten(0, 1) for x in moved), *arguments[count:])
        if isinstance(result, Tensor):
            return _split_samples(result, info.batch_size), 0
        return tuple(_split_samples(x, info.batch_size) for x in result), (0,) * len(result)

    return rule


def _split_samples(x: Tensor, count: int) -> Tensor:
    return x.view(count, x.shape[0] // count, *x.shape[1:])
