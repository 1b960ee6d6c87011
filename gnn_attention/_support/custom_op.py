"""Define operators that support autograd, compilers, ``torch.export``, ``vmap`` and ``torch.func``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from gnn_attention._support.autograd import has_forward_derivative, is_compiling_a_transform
from gnn_attention._support.shapes import Tensor

JvpRule = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor | None]], Any]


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
    jvp: JvpRule | None = None,
    formula: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``torch.ops.gnn_attention.<name>`` and return a function that calls it.

    ``run`` computes the result; ``fake`` returns empty tensors of the same shapes. ``save(ctx, inputs,
    output)`` and ``backward(ctx, *grads)`` are used as in a ``torch.autograd.Function``. ``jvp(arguments,
    outputs, tangents)`` returns the forward-mode derivative, with a tangent or None for each argument.
    ``formula`` computes the result by operators of torch, for the transforms of ``torch.func`` in a
    compiled program, where the compiler differentiates it. The schema lists the tensors first.
    ``torch.vmap`` merges the mapped axis into each tensor's first axis, the samples.
    """
    qualified_name = define(name, schema, run, fake)
    torch.library.register_autograd(qualified_name, backward, setup_context=save)
    op = getattr(torch.ops.gnn_attention, name)

    def call(*arguments: Any) -> Any:
        if formula is not None and is_compiling_a_transform():
            return formula(*arguments)
        needs_jvp = has_forward_derivative(x for x in arguments if isinstance(x, Tensor))
        # torch silently drops the tangents of a registered operator.
        if needs_jvp and jvp is None:
            raise NotImplementedError(
                f"the operator {name} has no forward-mode derivative; use backend='message_passing'"
            )
        is_transformed = needs_jvp or torch._C._are_functorch_transforms_active()
        return (function if is_transformed else op)(*arguments)

    # The rule calls ``call``, because ``op`` has no derivative when vmap runs inside a gradient.
    vmap_rule = _make_vmap_rule(call, schema.split("->")[0].count("Tensor "))
    torch.library.register_vmap(qualified_name, vmap_rule)

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A registered derivative returns a list for a list; autograd.Function expects None instead.
        return tuple(None if isinstance(x, list) else x for x in backward(ctx, *grads))

    # torch.func.grad supports an autograd.Function, but not a registered derivative.
    methods = {"forward": op, "setup_context": save, "backward": gradients, "vmap": vmap_rule}
    if jvp is not None:
        methods |= {"setup_context": _save_for_jvp(save), "jvp": _make_jvp(jvp)}
    namespace = {method_name: staticmethod(method) for method_name, method in methods.items()}
    function = type("Transformed", (torch.autograd.Function,), namespace).apply  # type: ignore[attr-defined]
    return call


def linear_operator(
    name: str, schema: str, run: Callable[..., Any], backward: Callable[..., Any], formula: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an operator with one result that is linear in each of its tensors.

    ``backward(ctx, grad)`` finds the tensors and lists of tensors of the call in ``ctx.saved_tensors``,
    and all other arguments in ``ctx.options``. ``formula`` also tells compilers the shape of the result.
    """

    def jvp(arguments: Sequence[Any], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Any:
        pairs = enumerate(tangents)
        terms = [call(*arguments[:i], t, *arguments[i + 1 :]) for i, t in pairs if t is not None]
        return sum(terms[1:], terms[0])

    call = operator(name, schema, run, formula, backward, save_all, jvp, formula)
    return call


def save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the arguments of an operator as :func:`linear_operator` describes."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    tensors += [x for argument in inputs if isinstance(argument, (list, tuple)) for x in argument]
    ctx.options = [x for x in inputs if not isinstance(x, (Tensor, list, tuple))]
    ctx.save_for_backward(*tensors)


def _save_for_jvp(save: Callable[..., None]) -> Callable[..., None]:
    def save_for_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, output)
        outputs = [output] if isinstance(output, Tensor) else output
        ctx.arguments = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_forward(*(x for x in inputs if isinstance(x, Tensor)), *outputs)

    return save_for_both


def _make_jvp(rule: JvpRule) -> Callable[..., Any]:
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        # torch disables forward mode here, which would lose the tangents of outer transforms. The
        # saved tensors still carry their own tangents, which are the arguments of this function.
        with forward_ad._set_fwd_grad_enabled(True):
            unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
            primals = [unpack(x).primal for x in ctx.saved_tensors]
            arguments = [primals.pop(0) if x is None else x for x in ctx.arguments]
            return rule(arguments, primals, tangents)

    return jvp


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

    def refuse(*arguments: Any) -> None:
        raise NotImplementedError(f"second derivatives do not pass through {kernel}")

    return operator(name, schema, run, fake, refuse, save=lambda ctx, inputs, output: None, jvp=refuse)
