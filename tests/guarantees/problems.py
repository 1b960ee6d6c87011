"""A random draw as a problem with a truth: a call of ``attend``, or a layer in one form of its weights."""

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

MESSAGE_PASSING = "message_passing"  # of a layer its own four steps, edge by edge
REACH, CAP, WIDTH = 4, 3.0, 12
FORMS: Mapping[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}


def problem_of(draw: Draw) -> Problem:
    return attend_problem(draw) if draw.numbers.form == "attend" else layer_problem(draw)


def attend_problem(draw: Draw) -> Problem:
    """A call of ``attend``: the inputs are rounded to the dtype before they are laid out."""
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
        dense=partial(_modified, draw),
        additive="softcap" not in numbers.mod,
        graph=graph,
        options=partial(_options, draw),
        layout=partial(_laid_out, numbers),
    )


def _laid_out(numbers: Numbers, x: Tensor) -> Tensor:
    """q, k or v with the strides of the draw."""
    if numbers.layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if numbers.layout == "every second channel":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return x.expand(numbers.batch, -1, -1, -1)


def _options(draw: Draw, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    names = [name for name in draw.numbers.mod.split(", ") if name != "none"]
    mods = [_score_mod(name, draw, inputs) for name in names]
    score_mod = mods[0] if len(mods) == 1 else score_mods.chain(*mods) if mods else None
    learned = {name: inputs[name] for name in ("bias", "sink_logits") if name in inputs}
    return {"scale": draw.numbers.scale, "score_mod": score_mod, **learned}


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


def _modified(draw: Draw, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Score_mod and bias on dense logits ``[B, H, dst, src]``, written out."""
    numbers, graph = draw.numbers, draw.graph
    dst, src = (torch.arange(n) for n in (graph.num_dst, graph.num_src))
    far = dst.unsqueeze(1) + graph.dst_offset - src - graph.src_offset
    if "alibi" in numbers.mod:
        slopes = torch.tensor(score_mods.alibi_slopes(numbers.heads), dtype=logits.dtype)
        logits = logits - slopes.view(-1, 1, 1) * far.abs()
    if "relative" in numbers.mod:
        logits = logits + inputs["table"][:, far.clamp(-REACH, REACH) + REACH]
    if "multiplicity" in numbers.mod:
        logits = logits + torch.tensor(_counts(draw), dtype=logits.dtype)[graph.src_offset :].log()
    if "softcap" in numbers.mod:
        logits = CAP * torch.tanh(logits / CAP)
    if "bias" in inputs:
        src, dst = torch.tensor(draw.edges, dtype=torch.int64).reshape(-1, 2).T
        everyone = torch.arange(numbers.batch).view(-1, 1, 1), torch.arange(numbers.heads).view(-1, 1)
        spread = inputs["bias"].expand(numbers.batch, numbers.heads, -1).to(logits.dtype)
        logits = logits + torch.zeros_like(logits).index_put((*everyone, dst, src), spread)
    return logits


def layer_problem(draw: Draw) -> Problem:
    """A layer with drawn weights; a bias of the draw is one of its projections."""
    numbers, rng = draw.numbers, torch.Generator().manual_seed(draw.number)
    sizes, dtype = (numbers.heads, numbers.dim, numbers.value_dim, numbers.kv_heads), DTYPES[numbers.dtype]
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
    rounded = {name: (x * numbers.size).to(dtype) for name, x in inputs.items()}
    return Problem(rounded, draw.mask, direction, heads.scale, heads=heads, graph=draw.graph)


def call(
    problem: Problem, inputs: Mapping[str, Tensor], qkv: tuple[Tensor, ...], backend: Backend, **more: Any
) -> Any:
    """``attend`` of q, k and v in their places, with what is added to their logits."""
    q, k, v = qkv
    return attend(q, k, v, problem.graph, backend=name_backend(backend), **problem.options(inputs), **more)


def usual_backends() -> dict[str, Backend]:
    """The backends that run on a CPU without a compiler: varlen refuses every call there."""
    return {name: each for name, each in BACKENDS.items() if not each.compiled and name != "varlen"}


def takes(problem: Problem, backend: str) -> bool:
    """The message-passing path of a layer needs one list of edges."""
    varies = problem.graph.batch is not None or problem.graph.heads is not None
    return not (varies and problem.heads is not None and backend == MESSAGE_PASSING)
