"""Define problems, which are calls of ``attend`` or of a layer, and compute their truth."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import measure, oracle
from gnn_attention.verify.measure import Inputs, Solution, Truth, differentiate, measure_errors, merge_errors


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of ``attend`` with "q", "k", "v", ..., or of a layer of ``heads`` with "x_src" and "x_dst".

    The inputs have the dtype and device under test. ``dense(inputs, logits)`` returns new logits, and
    ``oracle_options(inputs)`` other options of the formula. The gradients are those of
    ``(out * direction).sum()``. If SDPA with a mask computes the problem (``additive``), it is the
    yardstick. Otherwise, dense attention in the inputs' dtype is.

    A backend is called with ``graph`` and the arguments ``options(inputs)``. ``layout`` changes the
    memory layout of q, k and v. Without a graph, a problem has a truth but cannot be solved.
    """

    inputs: Inputs
    mask: Tensor
    direction: Tensor
    scale: float
    dense: Callable[[Inputs, Tensor], Tensor] = lambda inputs, logits: logits
    additive: bool = True
    oracle_options: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}
    heads: Any = None
    num_variants: int = 16
    graph: Any = None
    options: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}
    layout: Callable[[Tensor], Tensor] = lambda x: x

    @cached_property
    def truth(self) -> Truth:
        """The output and gradients in float64, and the yardstick's errors in the inputs' dtype.

        On one small problem, the largest error depends on luck (half to twice the usual). So the yardstick is
        the largest error over ``num_variants`` problems: this one and perturbed copies.
        """
        inputs = {**self.inputs, **name_parameters(self.heads)}
        with torch.enable_grad():
            solution = self.evaluate(inputs)
            if self.direction.dtype == torch.float64:
                return Truth(*solution, {})
            errors, fused_errors = list[dict[str, float]](), list[dict[str, float]]()
            for seed in range(self.num_variants):
                perturbed = {name: measure.perturb(x, seed) for name, x in inputs.items()}
                expected = self.evaluate(perturbed)
                errors.append(measure_errors(self.evaluate(perturbed, seed), expected))
                if self.additive:
                    fused_errors.append(measure_errors(self.evaluate(perturbed, seed, fused=True), expected))
            truth = Truth(*solution, merge_errors(errors), merge_errors(fused_errors))
            return measure.widen_by_roundings(truth, self._intermediates, inputs, self.direction)

    def evaluate(self, inputs: Inputs, seed: int | None = None, fused: bool = False) -> Solution:
        """Compute output and gradients by the formulas in float64, without the library's projections.

        With a ``seed``, which draws an order of the channels, use the inputs' dtype, and SDPA if possible.
        """
        leaves = make_leaves(inputs, torch.float64 if seed is None else self.direction.dtype)
        if seed is None and self.heads is not None:
            dense = partial(self.dense, leaves)
            out = oracle.layer(leaves, leaves["x_src"], leaves["x_dst"], self.mask, self.scale, dense)
        else:
            out = self._call(leaves, seed, fused)[0]
        # The fused kernel of SDPA computes no gradient for its mask.
        grad_leaves = {name: x for name, x in leaves.items() if not (fused and name in ("table", "bias"))}
        return out.detach(), differentiate(out, self.direction, grad_leaves)

    def _intermediates(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the output, the output of each head and lse; for a layer also q, k and v."""
        out, z, q, k, v = self._call(inputs)
        logits = torch.einsum("bhid,bhjd->bhij", q, oracle.per_query_head(k, q)) * self.scale
        has_lse = self.oracle_options(inputs).get("normaliser", "softmax") == "softmax"
        lse = oracle.lse(self.dense(inputs, logits), self.mask, inputs.get("sink_logits")) * has_lse
        return (out, z, lse) if self.heads is None else (out, z, lse, q, k, v)

    def _call(self, inputs: Inputs, seed: int | None = None, fused: bool = False) -> tuple[Tensor, ...]:
        """Return the output, the output of each head, q, k and v; see :meth:`evaluate`."""
        sinks = inputs.get("sink_logits")
        dense = partial(self.dense, inputs)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if seed is not None and self.additive:
                bias = dense(q.new_zeros(self.mask.shape))
                return oracle.sdpa(q, k, v, self.mask, self.scale, bias, sinks, fused, seed)
            q, k = oracle.reorder_channels(seed or 0, q, k)
            options = self.oracle_options(inputs)
            return oracle.attention(q, k, v, self.mask, self.scale, dense, sinks, **options)

        if self.heads is None:
            q = inputs["q"]
            # All samples share keys and values that have only one sample.
            k, v = (inputs[name].expand(len(q), -1, -1, -1) for name in "kv")
            z = attention(q, k, v)
            return z, z, q, k, v

        def run() -> tuple[Tensor, ...]:
            q, (k, v) = self.heads.receive(inputs["x_dst"]), self.heads.send(inputs["x_src"])
            z = attention(q, k, v)
            return self.heads.collect(z), z, q, k, v

        layer = nn.Module()
        layer.heads, layer.forward = self.heads, run
        names = [name for name, _ in layer.named_parameters()]
        weights = {name: inputs[name.removeprefix("heads.").removeprefix("standard.")] for name in names}
        outputs: tuple[Tensor, ...] = functional_call(layer, weights, ())
        return outputs

    def solve(self, backend: Backend, inputs: Inputs | None = None) -> Solution:
        """Return the output and gradients of a backend, by default for the inputs of the problem."""
        leaves = make_leaves(self.inputs if inputs is None else inputs)
        with torch.random.fork_rng([self.direction.device] if self.direction.is_cuda else []):
            torch.manual_seed(0)
            if self.heads is None:
                out = self.call(backend, leaves)
            else:
                options = self.options(leaves)
                mod = options.pop("score_mod", None)
                layer = MessagePassingAttention(self.heads, mod, backend=name_backend(backend))
                out = layer((leaves["x_src"], leaves["x_dst"]), self.graph, **options)
                leaves |= name_parameters(self.heads)
        return out, differentiate(out, self.direction, leaves)

    @torch.enable_grad()
    def differentiate(self, derivative: str, backend: Backend | None = None) -> Solution:
        """Return a tangent ("forward mode"), or the sum of all squared gradients and its own gradients."""
        run = (lambda inputs: self._call(inputs)[0]) if backend is None else partial(self.call, backend)
        if derivative == "forward mode":
            tangents = {name: x.cos() for name, x in self.inputs.items()}
            return torch.func.jvp(run, (self.inputs,), (tangents,))[1], {}
        leaves = make_leaves(self.inputs)
        gradients = torch.autograd.grad(run(leaves), list(leaves.values()), self.direction, create_graph=True)
        total = torch.cat([gradient.flatten() for gradient in gradients]).square().sum()
        return total, differentiate(total, torch.ones_like(total), leaves)

    def call(self, backend: Backend, inputs: Inputs, **options: Any) -> Any:
        """Call ``attend`` with the options of the problem and the ones passed here."""
        q, k, v = (self.layout(inputs[name]) for name in "qkv")
        options |= self.options(inputs)
        return attend(q, k, v, self.graph, backend=name_backend(backend), **options)


def name_backend(backend: Backend) -> str | Backend:
    """Return a built-in backend's name, as users pass it; return any other backend unchanged."""
    return backend.name if BACKENDS.get(backend.name) is backend else backend


def make_leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def name_parameters(heads: Any) -> dict[str, Tensor]:
    """Return the parameters of heads by their names in the formulas, or {} without heads."""
    parameters = () if heads is None else heads.named_parameters()
    return {name.removeprefix("standard."): parameter for name, parameter in parameters}
