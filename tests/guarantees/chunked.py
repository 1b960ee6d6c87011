"""Decoding in chunks through the caches, against all tokens at once by the formula: every family, chunk size
and way of decoding.

The truth is dense attention in float64 along a mask that is read off a definition in plain Python; the rule
is that of ``gnn_attention.verify``. Of rotated and latent heads the projections are their own, of a language
model so are all other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.model import Config, LanguageModel
from gnn_attention.rotary import Rotary
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Outcome, Truth, judge, worst_errors
from gnn_attention.verify.truth import ORDERS
from tests.guarantees.problems import layer_truth

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, WIDTH, VOCABULARY = 4, 4, 2, 6, 5, 12, 50
CHUNKS = (1, 3, 7)
Definition = Callable[[int, int, int], bool]  # (head, dst, src) -> is it an edge?


def _tree(n: int) -> tuple[TokenGraph, Definition]:
    parents = [-1, *((5 * i + 3) % i for i in range(1, n))]

    def line(node: int) -> set[int]:
        return {node} | (line(parents[node]) if parents[node] >= 0 else set())

    lines = [line(node) for node in range(n)]
    return patterns.tree(parents), lambda h, i, j: j in lines[i]


def _listed(n: int) -> tuple[TokenGraph, Definition]:
    """Edges in no order; receivers 0 and 4 are isolated."""
    pairs = [
        (j, i) for i in range(n) for j in range(i + 1) if (3 * j + 5 * i + j * i) % 4 == 0 and i not in (0, 4)
    ]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    known = set(pairs)
    return TokenGraph.from_edges(torch.tensor(pairs).T, n), lambda h, i, j: (j, i) in known


def _by_head(n: int) -> tuple[TokenGraph, Definition]:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= 2 * h)

    return TokenGraph.from_rule(rule, n, heads=HEADS, name="by head"), lambda h, i, j: 0 <= i - j <= 2 * h


def _documents(n: int) -> tuple[TokenGraph, Definition]:
    lengths = [5, 1, n - 15, 9]
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    return patterns.documents(lengths), lambda h, i, j: owner[i] == owner[j] and j <= i


FAMILIES: dict[str, Callable[[int], tuple[TokenGraph, Definition]]] = {
    "causal": lambda n: (patterns.causal(n), lambda h, i, j: j <= i),
    "window": lambda n: (patterns.window(n, 6), lambda h, i, j: 0 <= i - j < 6),
    "window and sinks": lambda n: (
        patterns.window(n, 4) | patterns.sinks(n, 2),
        lambda h, i, j: j <= i and (i - j < 4 or j < 2),
    ),
    "dilated": lambda n: (patterns.dilated(n, 4, 3), lambda h, i, j: i - j in (0, 3, 6, 9)),
    "documents": _documents,
    "tree": _tree,
    "by head": _by_head,
    "list": _listed,
}


@dataclass(frozen=True)
class Cell:
    """One way of decoding, one family of graphs, one size of chunks."""

    way: str
    family: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.way}, {self.family}, chunks of {self.chunk}"


@dataclass(frozen=True, eq=False)
class _Case:
    """A cell with its numbers drawn: the graph, its mask from the definition, and a generator."""

    graph: TokenGraph
    mask: Bool[Tensor, "batch heads dst src"]
    chunk: int
    rng: torch.Generator

    @staticmethod
    def of(cell: Cell, seed: int) -> _Case:
        """Lengths of 40 to 68 by the seed: a last chunk is short or whole, and senders are dropped often."""
        n = 40 + seed * 7 % 29
        graph, definition = FAMILIES[cell.family](n)
        cells = [definition(h, i, j) for h in range(HEADS) for i in range(n) for j in range(n)]
        mask = torch.tensor(cells).view(1, HEADS, n, n).expand(BATCH, -1, -1, -1)
        return _Case(graph, mask, cell.chunk, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Drawn in float64, rounded to the dtype."""
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64).to(dtype)

    def drawn(self, module: Any) -> Any:
        """The module in float64 with every parameter drawn, biases and norms too."""
        for parameter in module.double().parameters():
            spread = parameter.shape[-2] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.data = self.normal(*parameter.shape) * spread + (parameter.dim() == 1)
        return module

    def states(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.normal(BATCH, self.graph.num_dst, WIDTH, dtype=dtype)


Way = Callable[[_Case], tuple[Tensor, Truth]]


@torch.no_grad()
def judged(cell: Cell, seed: int) -> Outcome:
    """The error of decoding in chunks, in units of what is allowed to be: see ``verify.measure``.

    >>> judged(Cell("attend, float64", "window", 3), seed=0).passed
    True
    """
    found, truth = WAYS[cell.way](_Case.of(cell, seed))
    return judge(found, {}, truth)


def _attend(dtype: torch.dtype) -> Way:
    """Keys and values from anywhere: grouped heads, values of another width."""

    def way(case: _Case) -> tuple[Tensor, Truth]:
        n, sizes = case.graph.num_dst, ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
        q, k, v = (case.normal(BATCH, heads, n, dim, dtype=dtype) for heads, dim in sizes)
        cache, found = KeyValueCache(case.graph), []
        for part in zip(*(torch.split(x, case.chunk, dim=2) for x in (q, k, v)), strict=True):
            cache.append(*part[1:])
            found.append(cache.attend(part[0]))
        return torch.cat(found, dim=2), _truth_of(q, k, v, case.mask)

    return way


def _truth_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Truth:
    out = oracle.attention(q.double(), k.double(), v.double(), mask, DIM**-0.5)
    if q.dtype == torch.float64:
        return Truth(out, {}, {})
    orders: Any = ((oracle.sdpa(q, k, v, mask, DIM**-0.5, number=number), {}) for number in range(ORDERS))
    return Truth(out, {}, worst_errors(orders, out, {}))


def _standard(case: _Case, **options: Any) -> Any:
    return case.drawn(StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, KV_HEADS, bias=True, **options))


def _layer(form: Callable[[StandardHeads], Any], dtype: torch.dtype) -> Way:
    def way(case: _Case) -> tuple[Tensor, Truth]:
        heads, x = form(_standard(case)).to(dtype), case.states(dtype)
        return _updated(KeyValueCache(case.graph), case, heads, x), layer_truth(heads, x, x, x, case.mask)

    return way


def _updated(cache: KeyValueCache, case: _Case, heads: Any, x: Tensor) -> Tensor:
    return torch.cat([cache.update(heads, part) for part in torch.split(x, case.chunk, dim=1)], dim=1)


def _own_projections(make: Callable[[_Case], Any], latent: int | None = None) -> Way:
    """Heads whose projections know positions: the truth lies between ``receive`` and ``collect``."""

    def way(case: _Case) -> tuple[Tensor, Truth]:
        heads, x, where = make(case), case.states(), torch.arange(case.graph.num_dst)
        q, (k, v) = heads.receive(x, where), heads.send(x, where)
        out = heads.collect(oracle.attention(q, k, v, case.mask, heads.scale))
        return _updated(KeyValueCache(case.graph, latent=latent), case, heads, x), Truth(out, {}, {})

    return way


def _rotated(case: _Case) -> Any:
    return _standard(case, rotary=Rotary(), qk_norm=True)


def _latent(case: _Case) -> Any:
    return case.drawn(
        LatentHeads(WIDTH, HEADS, content_dim=4, rotary_dim=2, latent_dim=VALUE_DIM, query_dim=8, bias=True)
    )


def _messages(side: str, keep: str) -> Way:
    """The seeds' cache: a pattern and a message, or the state alone."""

    def way(case: _Case) -> tuple[Tensor, Truth]:
        standard, x = _standard(case), case.states()
        heads = MergedHeads.of(standard, side)
        cache = PatternMessageCache(heads, case.graph, keep)
        found = torch.cat([cache.update(part) for part in torch.split(x, case.chunk, dim=1)], dim=1)
        return found, layer_truth(standard, x, x, x, case.mask)

    return way


def _model(case: _Case) -> tuple[Tensor, Truth]:
    """All layers of a language model; the truth is its full pass, edge by edge."""
    config = Config(
        VOCABULARY, width=WIDTH, num_layers=2, num_heads=HEADS, head_dim=DIM, mlp_width=16, reach=4
    )
    model = case.drawn(LanguageModel(config))
    tokens = torch.randint(VOCABULARY, (BATCH, case.graph.num_dst), generator=case.rng)
    cache = KeyValueCache(case.graph, config.num_layers)
    found = torch.cat([model.proceed(part, cache) for part in torch.split(tokens, case.chunk, dim=1)], dim=1)
    model.backend = "reference"
    return found, Truth(model(tokens, case.graph), {}, {})


def _as_it_is(heads: StandardHeads) -> StandardHeads:
    return heads


WAYS: dict[str, Way] = {
    "attend, float64": _attend(torch.float64),
    "attend, float32": _attend(torch.float32),
    "attend, bfloat16": _attend(torch.bfloat16),
    "standard heads, float32": _layer(_as_it_is, torch.float32),
    "factored heads, float64": _layer(FactoredHeads.of, torch.float64),
    "merged heads, float32": _layer(MergedHeads.of, torch.float32),
    "rotated heads, float64": _own_projections(_rotated),
    "latent heads, float64": _own_projections(_latent, latent=VALUE_DIM),
    "patterns and messages, float64": _messages("sender", "messages"),
    "states, float64": _messages("receiver", "states"),
    "language model, float64": _model,
}
CELLS: Sequence[Cell] = [Cell(*each) for each in product(WAYS, FAMILIES, CHUNKS)]
