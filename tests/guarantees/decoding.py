"""F9: decoding in chunks through the caches gives what one call on all tokens gives.

A case draws a graph of a causal family, a form of call or of heads, and a size of chunks. Its truth is dense
attention in float64 with a mask that is read off the family's definition. The truth of a language model is its
own full pass on the reference backend. Errors are judged by the rule of ``gnn_attention.verify``. ``tests/cache``
tests other heads and caches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.cache import KeyValueCache
from gnn_attention.model import Config, LanguageModel
from gnn_attention.verify.measure import Truth, judge
from tests.guarantees.draws import Draw, GraphDraw, Numbers
from tests.guarantees.families import FAMILIES
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import problem_of

BATCH, KV_HEADS, GROUP, DIM, VALUE_DIM, VOCABULARY = 4, 2, 2, 6, 5, 50
SIZES = {"width": 12, "num_layers": 2, "num_heads": 4, "head_dim": DIM, "mlp_width": 16, "reach": 4}
CHUNKS = (1, 3, 7)
CAUSAL = (
    *("causal", "window", "window and sinks", "dilated", "documents", "tree", "strict causal"),
    *("powers of two", "by head"),
)
FORMS = (
    *(("attend", "float64"), ("attend", "float32"), ("attend", "bfloat16")),
    *(("standard", "float32"), ("factored", "float64"), ("merged", "float32")),
    ("language model", "float64"),
)


@dataclass(frozen=True)
class DecodingDraw(Draw):
    """Case ``number``; any 21 consecutive cases combine every form with every size of chunks.

    >>> DecodingDraw(3).numbers.form, DecodingDraw(3).chunk, DecodingDraw(3).kind
    ('standard', 1, 'strict causal')
    """

    @cached_property
    def numbers(self) -> Numbers:
        """Draw grouped heads, values of another width, and projections with biases."""
        form, dtype = FORMS[self.number % len(FORMS)]
        bias = "none" if form == "attend" else "by head"
        return Numbers(form, BATCH, KV_HEADS, GROUP, DIM, VALUE_DIM, dtype, bias=bias)

    @cached_property
    def _graph_draw(self) -> GraphDraw:
        rng = random.Random(self.number)
        family = CAUSAL[self.number * 2 % len(CAUSAL)]
        graph, definition = FAMILIES[family](rng, rng.randint(40, 68), BATCH, KV_HEADS * GROUP)
        return graph, definition, None, family

    @property
    def chunk(self) -> int:
        return CHUNKS[self.number % len(CHUNKS)]

    def chunks(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.split(x, self.chunk, dim)


def _decode(draw: DecodingDraw) -> tuple[Tensor, Truth]:
    """Decode with ``attend`` or with a layer, chunk by chunk."""
    problem, cache = problem_of(draw), KeyValueCache(draw.graph)
    if problem.heads is not None:
        x = problem.inputs["x_src"]
        out = [cache.update(problem.heads, chunk) for chunk in draw.chunks(x, 1)]
        return torch.cat(out, 1), replace(problem, inputs={"x_src": x, "x_dst": x}).truth
    out = []
    for q, k, v in zip(*(draw.chunks(problem.inputs[name], 2) for name in "qkv"), strict=True):
        cache.append(k, v)
        out.append(cache.attend(q))
    return torch.cat(out, 2), problem.truth


def _decode_by_a_model(draw: DecodingDraw) -> tuple[Tensor, Truth]:
    """Decode with all layers of a language model; the truth is its full pass on the reference backend."""
    rng = torch.Generator().manual_seed(draw.number)
    model: Any = LanguageModel(Config(VOCABULARY, **SIZES)).double()
    for parameter in model.parameters():
        spread = parameter.shape[-2] ** -0.5 if parameter.dim() > 1 else 0.5
        sample = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        parameter.data = sample * spread + (parameter.dim() == 1)
    tokens = torch.randint(VOCABULARY, (BATCH, draw.graph.num_dst), generator=rng)
    cache = KeyValueCache(draw.graph, model.config.num_layers)
    out = torch.cat([model.proceed(chunk, cache) for chunk in draw.chunks(tokens, 1)], 1)
    model.backend = "reference"
    return out, Truth(model(tokens, draw.graph), {}, {})


def _check(draw: DecodingDraw, subject: str) -> Iterator[Finding]:
    with torch.no_grad():
        out, truth = (_decode_by_a_model if draw.numbers.form == "language model" else _decode)(draw)
    share = judge(out, {}, truth).share
    yield "case", share, "" if share <= 1 else f"{share:.3g} times the error that is allowed"


def _measure(count: int, tell: Tell) -> Verdict:
    cases = ((f"case {draw}, chunks of {draw.chunk}", draw) for draw in map(DecodingDraw, range(count)))
    tally = run_cases(cases, [""], _check, tell)
    error = f"largest error {tally.largest.get('case', 0.0):.2g} of what is allowed"
    return tally.outcome(f"{len(tally.failures):,} of {count:,} differ, {error}", [("case", "")])


GUARANTEE = Guarantee(
    name="F9",
    promise="decoding token by token gives what all tokens at once give",
    bar=(
        f"{len(CAUSAL)} families x chunks of 1, 3 and 7, in every form of heads and a language model, within "
        "the rule of verify"
    ),
    quick=7,
    full=21,
    measure=_measure,
)
