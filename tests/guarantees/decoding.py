"""F9: decoding in chunks through the caches gives what all tokens at once give.

A case is a causal family of graphs, a way of decoding and a size of chunks. Its truth is dense
attention in float64 along a mask that is read off the family's definition; of a language model all other
parts are its own. The rule is that of ``gnn_attention.verify``. Other heads and caches are in ``tests/cache``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.model import Config, LanguageModel
from gnn_attention.verify.measure import Truth, judge
from gnn_attention.verify.truth import Problem
from tests.guarantees.families import FAMILIES
from tests.guarantees.guarantee import Finding, Guarantee, Measured, Tell, run_cases
from tests.guarantees.problems import layer_truth

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, WIDTH, VOCABULARY = 4, 4, 2, 6, 5, 12, 50
CHUNKS = (1, 3, 7)
CAUSAL = (
    *("causal", "window", "window and sinks", "dilated", "documents", "tree", "strict causal"),
    *("powers of two", "by head"),
)


@dataclass(frozen=True)
class Case:
    """Case ``number``; 21 in a row meet every way of decoding with every size of chunks."""

    number: int

    @property
    def way(self) -> str:
        return list(WAYS)[self.number % len(WAYS)]

    @property
    def chunk(self) -> int:
        return CHUNKS[self.number % len(CHUNKS)]

    @property
    def family(self) -> str:
        return CAUSAL[self.number * 2 % len(CAUSAL)]

    def __str__(self) -> str:
        return f"case {self.number}: {self.way}, {self.family}, chunks of {self.chunk}"


class Decoding:
    """A case with its graph, its mask from the definition, and its numbers drawn."""

    def __init__(self, case: Case) -> None:
        chance = random.Random(case.number)
        n = chance.randint(40, 68)
        self.graph: TokenGraph
        self.graph, definition = FAMILIES[case.family](chance, n, BATCH, HEADS)
        cells = [definition(0, h, i, j) for h in range(HEADS) for i in range(n) for j in range(n)]
        table = torch.tensor(cells).view(1, HEADS, n, n)
        self.mask: Bool[Tensor, "batch heads dst src"] = table.expand(BATCH, -1, -1, -1)
        self.chunk = case.chunk
        self.rng = torch.Generator().manual_seed(case.number)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64).to(dtype)

    def with_drawn_weights(self, module: Any) -> Any:
        """The module in float64 with every parameter drawn, biases and norms too."""
        for parameter in module.double().parameters():
            spread = parameter.shape[-2] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.data = self.normal(*parameter.shape) * spread + (parameter.dim() == 1)
        return module

    def updated(self, update: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``update`` of each chunk, one after the other."""
        return torch.cat([update(part) for part in torch.split(x, self.chunk, dim=1)], dim=1)


Way = Callable[[Decoding], tuple[Tensor, Truth]]


def _attend(dtype: torch.dtype, decoding: Decoding) -> tuple[Tensor, Truth]:
    """Grouped heads, and values of another width."""
    n, sizes = decoding.graph.num_dst, ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    q, k, v = (decoding.normal(BATCH, heads, n, dim, dtype=dtype) for heads, dim in sizes)
    cache, outs = KeyValueCache(decoding.graph), []
    for part in zip(*(torch.split(x, decoding.chunk, dim=2) for x in (q, k, v)), strict=True):
        cache.append(*part[1:])
        outs.append(cache.attend(part[0]))
    out = torch.cat(outs, dim=2)
    inputs = {"q": q, "k": k, "v": v}
    return out, Problem(inputs, decoding.mask, torch.ones_like(out), DIM**-0.5).truth


def _layer(
    form: Callable[[StandardHeads], Any], dtype: torch.dtype, decoding: Decoding
) -> tuple[Tensor, Truth]:
    standard = decoding.with_drawn_weights(StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, KV_HEADS, bias=True))
    heads = form(standard).to(dtype)
    x = decoding.normal(BATCH, decoding.graph.num_dst, WIDTH, dtype=dtype)
    out = decoding.updated(partial(KeyValueCache(decoding.graph).update, heads), x)
    return out, layer_truth(heads, x, x, x, decoding.mask)


def _model(decoding: Decoding) -> tuple[Tensor, Truth]:
    """All layers of a language model; the truth is its full pass, edge by edge."""
    sizes = {"num_layers": 2, "num_heads": HEADS, "head_dim": DIM, "mlp_width": 16, "reach": 4}
    model = decoding.with_drawn_weights(LanguageModel(Config(VOCABULARY, width=WIDTH, **sizes)))
    tokens = torch.randint(VOCABULARY, (BATCH, decoding.graph.num_dst), generator=decoding.rng)
    cache = KeyValueCache(decoding.graph, model.config.num_layers)
    out = decoding.updated(lambda part: model.proceed(part, cache), tokens)
    model.backend = "reference"
    return out, Truth(model(tokens, decoding.graph), {}, {})


WAYS: dict[str, Way] = {
    "attend, float64": partial(_attend, torch.float64),
    "attend, float32": partial(_attend, torch.float32),
    "attend, bfloat16": partial(_attend, torch.bfloat16),
    "standard heads, float32": partial(_layer, lambda heads: heads, torch.float32),
    "factored heads, float64": partial(_layer, FactoredHeads.of, torch.float64),
    "merged heads, float32": partial(_layer, MergedHeads.of, torch.float32),
    "language model, float64": _model,
}


def _check(case: Case, subject: str) -> Iterator[Finding]:
    with torch.no_grad():
        out, truth = WAYS[case.way](Decoding(case))
    share = judge(out, {}, truth).share
    yield "case", share, "" if share <= 1 else f"{share:.3g} times the error that is allowed"


def _measure(count: int, tell: Tell) -> Measured:
    tally = run_cases(((case, case) for case in map(Case, range(count))), [""], _check, tell)
    worst = f"largest error {tally.worst.get('case', 0.0):.2g} of what is allowed"
    return tally.measured(f"{len(tally.failures):,} of {count:,} differ, {worst}", [("case", "")])


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
