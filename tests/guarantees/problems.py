"""A random draw becomes a problem with a truth: a call of ``attend``, or a layer with heads in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gnn_attention import score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.score_mods import ScoreMod
from gnn_attention.verify.truth import Problem, name_backend
from tests.guarantees.draws import DTYPES, Draw, Numbers

MESSAGE_PASSING = "message_passing"  # the four steps of a layer, edge by edge
REACH, CAP, WIDTH = 4, 3.0, 12
FORMS: Mapping[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}


def problem_of(draw: Draw) -> Problem:
    return attend_problem(draw) if draw.numbers.form == "attend" else layer_problem(draw)


def attend_problem(draw: Draw) -> Problem:
    """Return a call of ``attend`` whose inputs are rounded to the dtype before they are laid out."""
    numbers, graph = draw.numbers, draw.graph
    samples = 1 if numbers.layout == "one sample for all" else numbers.batch
    shapes: dict[str, tuple[int, ...]] = {
        "q": (numbers.batch, numbers.heads, graph.num_dst, numbers.dim),
        "k": (samples, numbers.kv_heads, graph.num_src, numbers.dim),
        "v": (samples, numbers.kv_heads, graph.num_src, numbers.value_dim),
    }
    rng, dtype = torch.Generator().manual_seed(draw.number), DTYPES[numbers.dtype]
    draw_normal = partial(torch.randn, generator=rng, dtype=torch.float64)
    inputs = {name: draw_normal(*shape) * numbers.size for name, shape in shapes.items()}
    if "relative" in numbers.mod:
        inputs["table"] = draw_normal(numbers.heads, 2 * REACH + 1)
    if numbers.bias != "none" and draw.edges is not None:
        axes = {"one for all": 0, "by head": 1, "by sample and head": 2}[numbers.bias]
        inputs["bias"] = draw_normal(*(numbers.batch, numbers.heads)[2 - axes :], len(draw.edges))
    if numbers.sinks:
        inputs["sink_logits"] = draw_normal(numbers.heads)
    rng.manual_seed(draw.number + 1)
    direction = draw_normal(numbers.batch, numbers.heads, graph.num_dst, numbers.value_dim).to(dtype)
    return Problem(
        {name: x.to(dtype) for name, x in inputs.items()},
        mask=draw.mask,
        direction=direction,
        scale=numbers.scale or numbers.dim**-0.5,
        dense=partial(_modify_logits, draw),
        additive="softcap" not in numbers.mod,
        graph=graph,
        options=partial(_options, draw),
        layout=partial(_lay_out, numbers),
    )


def _lay_out(numbers: Numbers, x: Tensor) -> Tensor:
    """Return q, k or v with the strides of the draw."""
    if numbers.layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if numbers.layout == "every second channel":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return x.expand(numbers.batch, -1, -1, -1)


def _options(draw: Draw, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    names = [name for name in draw.numbers.mod.split(", ") if name != "none"]
    mods = [_score_mod(name, draw, inputs) for name in names]
    score_mod = mods[0] if len(mods) == 1 else score_mods.chain(*mods) if mods else None
    tensors = {name: inputs[name] for name in ("bias", "sink_logits") if name in inputs}
    return {"scale": draw.numbers.scale, "score_mod": score_mod, **tensors}


def _score_mod(name: str, draw: Draw, inputs: Mapping[str, Tensor]) -> ScoreMod:
    if name == "alibi":
        return score_mods.alibi(score_mods.alibi_slopes(draw.numbers.heads))
    if name == "softcap":
        return score_mods.softcap(CAP)
    if name == "relative":
        return score_mods.relative_bias(inputs["table"])
    return score_mods.log_multiplicity(torch.tensor(_counts(draw)))


def _counts(draw: Draw) -> list[float]:
    return [1.0 + j % 4 for j in range(draw.graph.src_offset + draw.graph.num_src)]


def _modify_logits(draw: Draw, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Apply score_mod and bias to dense logits ``[B, H, dst, src]`` by their formulas."""
    numbers, graph = draw.numbers, draw.graph
    dst, src = (torch.arange(n) for n in (graph.num_dst, graph.num_src))
    distance = dst.unsqueeze(1) + graph.dst_offset - src - graph.src_offset
    if "alibi" in numbers.mod:
        slopes = torch.tensor(score_mods.alibi_slopes(numbers.heads), dtype=logits.dtype)
        logits = logits - slopes.view(-1, 1, 1) * distance.abs()
    if "relative" in numbers.mod:
        logits = logits + inputs["table"][:, distance.clamp(-REACH, REACH) + REACH]
    if "multiplicity" in numbers.mod:
        logits = logits + torch.tensor(_counts(draw), dtype=logits.dtype)[graph.src_offset :].log()
    if "softcap" in numbers.mod:
        logits = CAP * torch.tanh(logits / CAP)
    if "bias" in inputs:
        src, dst = torch.tensor(draw.edges, dtype=torch.int64).reshape(-1, 2).T
        sample, head = torch.arange(numbers.batch).view(-1, 1, 1), torch.arange(numbers.heads).view(-1, 1)
        bias = inputs["bias"].expand(numbers.batch, numbers.heads, -1).to(logits.dtype)
        logits = logits + torch.zeros_like(logits).index_put((sample, head, dst, src), bias)
    return logits


def layer_problem(draw: Draw) -> Problem:
    """Return a layer with random parameters; a bias of the draw is one of its projections."""
    numbers, rng = draw.numbers, torch.Generator().manual_seed(draw.number)
    dtype = DTYPES[numbers.dtype]
    sizes = numbers.heads, numbers.dim, numbers.value_dim, numbers.kv_heads
    standard = StandardHeads(WIDTH, *sizes, bias=numbers.bias != "none").double()
    for parameter in standard.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * WIDTH**-0.5
    heads = FORMS[numbers.form](standard).to(dtype)
    rng.manual_seed(draw.number + 1)
    tokens = {"x_src": draw.graph.num_src, "x_dst": draw.graph.num_dst, "direction": draw.graph.num_dst}
    inputs = {
        name: torch.randn(numbers.batch, n, WIDTH, generator=rng, dtype=torch.float64)
        for name, n in tokens.items()
    }
    direction = inputs.pop("direction").to(dtype)
    rounded_inputs = {name: (x * numbers.size).to(dtype) for name, x in inputs.items()}
    return Problem(rounded_inputs, draw.mask, direction, heads.scale, heads=heads, graph=draw.graph)


def call(
    problem: Problem, inputs: Mapping[str, Tensor], qkv: tuple[Tensor, ...], backend: Backend, **options: Any
) -> Any:
    """Call ``attend`` on q, k and v with the options of the problem, which may add to logits."""
    q, k, v = qkv
    return attend(q, k, v, problem.graph, backend=name_backend(backend), **problem.options(inputs), **options)


def usual_backends() -> dict[str, Backend]:
    """Return the backends that run on a CPU without a compiler; varlen refuses every call there."""
    return {name: backend for name, backend in BACKENDS.items() if not backend.compiled and name != "varlen"}


def takes(problem: Problem, backend: str) -> bool:
    """Return False for a message-passing layer on a graph that varies by sample or head, and True otherwise."""
    is_varying = problem.graph.batch is not None or problem.graph.heads is not None
    return not (is_varying and problem.heads is not None and backend == MESSAGE_PASSING)
