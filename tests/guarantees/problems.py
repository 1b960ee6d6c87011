"""A random draw as a problem with a truth: a call of ``attend``, or a layer in one form of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention import score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import ScoreMod
from gnn_attention.verify.measure import Truth, gradients_of
from gnn_attention.verify.truth import ORDERS, Attempt, Formula, plain_names
from tests.guarantees.draws import DTYPES, Draw

MESSAGE_PASSING = "message-passing path"  # of a layer, edge by edge
REACH, CAP, WIDTH = 4, 3.0, 12
FORMS: Mapping[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}


@dataclass(frozen=True, eq=False)
class AttendProblem:
    draw: Draw

    @cached_property
    def _leaves(self) -> dict[str, Tensor]:
        """The inputs before they are laid out, rounded to the dtype."""
        numbers, graph = self.draw.numbers, self.draw.graph
        rng = torch.Generator().manual_seed(self.draw.number)
        samples = 1 if numbers.layout == "one sample for all" else numbers.batch
        shapes = {
            "q": (numbers.batch, numbers.heads, graph.num_dst, numbers.dim),
            "k": (samples, numbers.kv_heads, graph.num_src, numbers.dim),
            "v": (samples, numbers.kv_heads, graph.num_src, numbers.value_dim),
        }
        drawn = {
            name: torch.randn(*shape, generator=rng, dtype=torch.float64) * numbers.size
            for name, shape in shapes.items()
        }
        if "relative" in numbers.mod:
            drawn["table"] = torch.randn(numbers.heads, 2 * REACH + 1, generator=rng, dtype=torch.float64)
        if numbers.bias != "none" and self.draw.edges is not None:
            axes = {"one for all": 0, "by head": 1, "by sample and head": 2}[numbers.bias]
            lead = (numbers.batch, numbers.heads)[2 - axes :]
            edges = len(self.draw.edges)
            drawn["bias"] = torch.randn(*lead, edges, generator=rng, dtype=torch.float64)
        if numbers.sinks:
            drawn["sink_logits"] = torch.randn(numbers.heads, generator=rng, dtype=torch.float64)
        return {name: x.to(DTYPES[numbers.dtype]) for name, x in drawn.items()}

    @cached_property
    def direction(self) -> Tensor:
        """Whose product with the output is differentiated."""
        numbers = self.draw.numbers
        rng = torch.Generator().manual_seed(self.draw.number + 1)
        shape = (numbers.batch, numbers.heads, self.draw.graph.num_dst, numbers.value_dim)
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(DTYPES[numbers.dtype])

    def run(self, backend: Backend | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert backend is not None
        inputs = self.inputs()
        out, _ = self.attended(inputs, self.laid_out(inputs), backend)
        return out, gradients_of(out, self.direction, inputs)

    def attended(
        self, inputs: Mapping[str, Tensor], qkv: tuple[Tensor, ...], backend: Backend, with_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and lse if wanted, of q, k and v in their places, with what is added to their logits."""
        q, k, v = qkv
        added = self._score_mod(inputs), inputs.get("bias"), inputs.get("sink_logits")
        scale = self.draw.numbers.scale
        found: Any = attend(q, k, v, self.draw.graph, scale, *added, backend=backend, return_info=with_lse)
        return (found[0], found[1].lse) if with_lse else (found, None)

    def inputs(self) -> dict[str, Tensor]:
        """Fresh inputs in the dtype of the draw, which want gradients."""
        return {name: x.clone().requires_grad_() for name, x in self._leaves.items()}

    def laid_out(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """q, k and v with the strides of the draw."""
        qkv, numbers = tuple(inputs[name] for name in "qkv"), self.draw.numbers
        if numbers.layout == "tokens first":
            return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
        if numbers.layout == "every second channel":
            return tuple(torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in qkv)
        return tuple(x.expand(numbers.batch, -1, -1, -1) for x in qkv)

    def _score_mod(self, inputs: Mapping[str, Tensor]) -> ScoreMod | None:
        wanted = [
            self._named_mod(name, inputs) for name in self.draw.numbers.mod.split(", ") if name != "none"
        ]
        return None if not wanted else wanted[0] if len(wanted) == 1 else score_mods.chain(*wanted)

    def _named_mod(self, name: str, inputs: Mapping[str, Tensor]) -> ScoreMod:
        if name == "alibi":
            return score_mods.alibi(score_mods.alibi_slopes(self.draw.numbers.heads))
        if name == "softcap":
            return score_mods.softcap(CAP)
        if name == "relative":
            return score_mods.relative_bias(inputs["table"])
        return score_mods.log_multiplicity(torch.tensor(self._counts))

    @property
    def _counts(self) -> list[float]:
        return [1.0 + j % 4 for j in range(self.draw.graph.src_offset + self.draw.graph.num_src)]

    @cached_property
    def truth(self) -> Truth:
        """The formula in float64, and SDPA's errors over neighbouring problems."""
        return self._formula.truth(self._leaves)

    @cached_property
    def _formula(self) -> Formula:
        scale = self.draw.numbers.scale or self.draw.numbers.dim**-0.5
        additive = "softcap" not in self.draw.numbers.mod
        return Formula(self.draw.mask, self.direction, scale, self._modified, additive)

    @cached_property
    def attempts(self) -> tuple[list[Attempt], list[Attempt]]:
        """What SDPA, and its fused kernel, make of the problem in the dtype, in a few orders."""

        def orders(widened: bool) -> list[Attempt]:
            return [self._formula.baseline(self._leaves, number, widened) for number in range(ORDERS)]

        with torch.enable_grad():
            return orders(False), orders(True)

    def _modified(self, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        """Score_mod and bias on dense logits ``[B, H, dst, src]``, written out."""
        numbers, graph = self.draw.numbers, self.draw.graph
        dst, src = (torch.arange(n) for n in (graph.num_dst, graph.num_src))
        far = dst.unsqueeze(1) + graph.dst_offset - src - graph.src_offset
        if "alibi" in numbers.mod:
            slopes = torch.tensor(score_mods.alibi_slopes(numbers.heads), dtype=logits.dtype)
            logits = logits - slopes.view(-1, 1, 1) * far.abs()
        if "relative" in numbers.mod:
            logits = logits + inputs["table"][:, far.clamp(-REACH, REACH) + REACH]
        if "multiplicity" in numbers.mod:
            logits = logits + torch.tensor(self._counts, dtype=logits.dtype)[graph.src_offset :].log()
        if "softcap" in numbers.mod:
            logits = CAP * torch.tanh(logits / CAP)
        if "bias" in inputs:
            src, dst = torch.tensor(self.draw.edges, dtype=torch.int64).reshape(-1, 2).T
            everyone = torch.arange(numbers.batch).view(-1, 1, 1), torch.arange(numbers.heads).view(-1, 1)
            spread = inputs["bias"].expand(numbers.batch, numbers.heads, -1).to(logits.dtype)
            logits = logits + torch.zeros_like(logits).index_put((*everyone, dst, src), spread)
        return logits


@dataclass(frozen=True, eq=False)
class LayerProblem:
    draw: Draw

    @cached_property
    def _heads(self) -> Any:
        numbers, rng = self.draw.numbers, torch.Generator().manual_seed(self.draw.number)
        sizes = numbers.heads, numbers.dim, numbers.value_dim, numbers.kv_heads
        heads = StandardHeads(WIDTH, *sizes, bias=numbers.bias != "none").double()
        for parameter in heads.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * WIDTH**-0.5
        return FORMS[numbers.form](heads).to(DTYPES[numbers.dtype])

    @cached_property
    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        numbers, graph = self.draw.numbers, self.draw.graph
        rng = torch.Generator().manual_seed(self.draw.number + 1)
        sizes = (numbers.size, numbers.size, 1.0)
        tokens = (graph.num_src, graph.num_dst, graph.num_dst)
        drawn = (
            torch.randn(numbers.batch, n, WIDTH, generator=rng, dtype=torch.float64) * size
            for n, size in zip(tokens, sizes, strict=True)
        )
        x_src, x_dst, direction = (x.to(DTYPES[numbers.dtype]) for x in drawn)
        return x_src, x_dst, direction

    @cached_property
    def truth(self) -> Truth:
        """The seeds' formula in float64, and the errors of SDPA between the layer's own projections."""
        return layer_truth(self._heads, *self._drawn, self.draw.mask)

    def layer(self, backend: Backend | None) -> MessagePassingAttention:
        """The layer on a backend, or with None on its message-passing path."""
        return MessagePassingAttention(self._heads, backend=backend or "message_passing")

    def inputs(self) -> dict[str, Tensor]:
        """Fresh states in the dtype of the draw, which want gradients."""
        x_src, x_dst, _ = (x.clone() for x in self._drawn)
        return {"x_src": x_src.requires_grad_(), "x_dst": x_dst.requires_grad_()}

    def run(self, backend: Backend | None) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = self.inputs()
        out = self.layer(backend)((inputs["x_src"], inputs["x_dst"]), self.draw.graph)
        return out, gradients_of(out, self._drawn[2], inputs | plain_names(self._heads))


def layer_truth(heads: Any, x_src: Tensor, x_dst: Tensor, direction: Tensor, mask: Tensor) -> Truth:
    """The formula in float64 on the layer's weights as they are, and SDPA between its own projections."""
    inputs = {"x_src": x_src, "x_dst": x_dst} | plain_names(heads)
    return Formula(mask, direction, heads.scale, heads=heads).truth(inputs)


Problem = AttendProblem | LayerProblem


def usual_backends() -> dict[str, Backend]:
    """The backends that run on a CPU without a compiler: varlen refuses every call there."""
    return {name: each for name, each in BACKENDS.items() if not each.compiled and name != "varlen"}


def problem_of(draw: Draw) -> Problem:
    return AttendProblem(draw) if draw.numbers.form == "attend" else LayerProblem(draw)


def results(
    problem: Problem, backends: Mapping[str, Backend]
) -> Iterator[tuple[str, Attempt | Exception | None]]:
    """What each backend, and for a layer the message-passing path, makes of a problem.

    It is a result, the exception that was raised, or None where the backend refuses the problem by name.
    """
    for name, backend in backends.items():
        yield name, _result(problem, backend)
    if isinstance(problem, LayerProblem) and problem.draw.edges is not None:
        yield MESSAGE_PASSING, _result(problem, None)


def _result(problem: Problem, backend: Backend | None) -> Attempt | Exception | None:
    try:
        return problem.run(backend)
    except RefusalError:
        return None
    except Exception as error:  # a guarantee reports whatever a backend raises
        return error
