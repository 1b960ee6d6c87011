"""What is checked: graphs with a definition in plain Python, and what can be added to their edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

HEADS, KV_HEADS, BATCH = 4, 2, 8  # many samples, so that the worst error of a draw is not a matter of luck
REACH = 3  # of the relative bias

Inputs = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class GraphCase:
    """A graph, ``edge(b, h, dst, src) -> bool`` in plain Python, and its edge list if it was made of one."""

    name: str
    graph: TokenGraph
    edge: Callable[[int, int, int, int], bool]
    listed: list[tuple[int, int]] | None = None
    first_dst: int = 0

    @cached_property
    def mask(self) -> Tensor:
        """Bool ``[BATCH, HEADS, dst, src]``, pair by pair from the definition."""
        shape = (BATCH, HEADS, self.graph.num_dst, self.graph.num_src)
        cells = [self.edge(b, h, i + self.first_dst, j) for b, h, i, j in product(*map(range, shape))]
        return torch.tensor(cells, dtype=torch.bool).reshape(shape)

    def edges(self) -> Tensor:
        """(src, dst) ``[2, E]`` in the order of a per-edge bias: as listed, else by receiver, then sender."""
        if self.listed is not None:
            return torch.tensor(self.listed).T
        return self.mask[0, 0].nonzero().T.flip(0)

    @property
    def varies(self) -> bool:
        """True if the graph differs by head or sample, so that it has no edge order."""
        return self.graph.heads is not None or self.graph.batch is not None

    def positions(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Absolute positions of receivers ``[dst, 1]`` and senders ``[src]``."""
        dst = torch.arange(self.first_dst, self.first_dst + self.graph.num_dst, device=device)
        return dst.unsqueeze(1), torch.arange(self.graph.num_src, device=device)


def graph_cases() -> Iterator[GraphCase]:
    """Most are asymmetric, some have receivers without in-edges, two differ by head or sample."""
    # graphs get no names here: each is freed once its user drops it
    n, p = 13, patterns
    parents = [-1, 0, 0, 1, 1, 2, 3, -1, 7, 8, 8, 10, 4]
    owner = [0] * 5 + [2] + [3] * 7
    hubs = (2, 6)
    yield GraphCase("full", p.full(n), lambda b, h, i, j: True)
    yield GraphCase("causal", p.causal(n), lambda b, h, i, j: j <= i)
    yield GraphCase("strict_causal", p.strict_causal(n), lambda b, h, i, j: j < i)
    yield GraphCase("no_self", p.no_self(n), lambda b, h, i, j: j != i)
    yield GraphCase("window", p.window(n, 4), lambda b, h, i, j: 0 <= i - j < 4)
    yield GraphCase("dilated", p.dilated(n, 3, 2), lambda b, h, i, j: i - j in (0, 2, 4))
    yield GraphCase("prefix", p.prefix(n, 5), lambda b, h, i, j: j < 5 or j <= i)
    yield GraphCase(
        "documents", p.documents([5, 0, 1, 7]), lambda b, h, i, j: owner[i] == owner[j] and j <= i
    )
    yield GraphCase(
        "window | sinks", p.window(n, 3) | p.sinks(n, 2), lambda b, h, i, j: j <= i and (i - j < 3 or j < 2)
    )
    yield GraphCase(
        "global_tokens",
        p.global_tokens(n, list(hubs)),
        lambda b, h, i, j: j <= i and (i in hubs or j in hubs),
    )
    yield GraphCase("cross", p.cross(7, n), lambda b, h, i, j: True)
    yield GraphCase("tree", p.tree(parents), lambda b, h, i, j: j in _ancestors(parents, i))
    yield GraphCase("decode rows", p.causal(n).rows(9, n), lambda b, h, i, j: j <= i, first_dst=9)
    yield GraphCase("one token", p.causal(1), lambda b, h, i, j: True)
    yield GraphCase("no edges", p.window(n, 0), lambda b, h, i, j: False)
    yield _listed_case(10, n)
    yield GraphCase(
        "by head",
        TokenGraph.from_rule(_near, n, heads=HEADS, name="by head"),
        lambda b, h, i, j: 0 <= i - j <= h,
    )
    yield GraphCase(
        "by sample",
        TokenGraph.from_rule(_late, n, batch=BATCH, name="by sample"),
        lambda b, h, i, j: j <= i and j >= 4 * (b % 3),
    )
    yield GraphCase("causal, 97 tokens", p.causal(97), lambda b, h, i, j: j <= i)
    yield GraphCase("window, 97 tokens", p.window(97, 16), lambda b, h, i, j: 0 <= i - j < 16)


def _ancestors(parents: list[int], node: int) -> list[int]:
    """A node and those above it."""
    return [node, *(_ancestors(parents, parents[node]) if parents[node] >= 0 else [])]


def _listed_case(num_dst: int, num_src: int) -> GraphCase:
    """An irregular bipartite list in no particular order; receivers 0 and 4 are isolated."""
    everything = product(range(num_src), set(range(num_dst)) - {0, 4})
    pairs = [(s, d) for s, d in everything if (3 * s + 5 * d + s * d) % 3 == 0]
    pairs.sort(key=lambda pair: ((pair[0] * 7 + pair[1] * 11) % 17, pair[1], pair[0]))
    graph = convert.from_edge_index(torch.tensor(pairs).t(), num_dst, num_src)
    return GraphCase("listed", graph, lambda b, h, i, j: (j, i) in pairs, listed=pairs)


def _near(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & (dst - src <= h)


def _late(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src <= dst) & (src >= 4 * (b % 3))


GRAPHS = {case.name: case for case in graph_cases()}


@dataclass(frozen=True, eq=False)
class Feature:
    """Something added to the logits: the arguments of ``attend``, and the same on dense float64 logits.

    ``learned`` makes the inputs that get gradients; ``options`` turns them into arguments of ``attend``;
    ``dense`` adds them to logits ``[B, H, dst, src]``. ``additive`` says that ``dense`` is a plain sum, which
    SDPA can be given as a mask.
    """

    name: str
    learned: Callable[[GraphCase, torch.Generator], Inputs] = lambda case, rng: {}
    options: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}
    dense: Callable[[GraphCase, Inputs, Tensor], Tensor] = lambda case, inputs, logits: logits
    additive: bool = True
    scale: float | None = None
    needs_edge_order: bool = False

    def unsupported(self, case: GraphCase) -> str | None:
        """Why it cannot be on a graph: a bias for each edge needs an order of edges."""
        if self.needs_edge_order and case.varies:
            return "a per-edge bias has no order on a graph that differs by head or sample"
        return None


def _alibi(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    dst, src = case.positions(logits.device)
    slopes = logits.new_tensor([2.0 ** (-8.0 * (h + 1) / HEADS) for h in range(HEADS)])
    return logits - slopes.view(1, -1, 1, 1) * (dst - src).abs()


def _relative(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    dst, src = case.positions(logits.device)
    return logits + inputs["table"][:, (dst - src).clamp(-REACH, REACH) + REACH]


def _softcap(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    return 3.0 * torch.tanh(logits / 3.0)


def _multiplicity(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    return logits + logits.new_tensor([1.0 + j % 4 for j in range(case.graph.num_src)]).log()


def add_bias(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    """The inputs' "bias", broadcastable to ``[B, H, E]``, on the logits of the edges."""
    src, dst = case.edges().to(logits.device)
    places = torch.arange(BATCH).view(-1, 1, 1), torch.arange(HEADS).view(-1, 1)
    bias = inputs["bias"].expand(BATCH, HEADS, -1).to(logits.dtype)
    return logits + torch.zeros_like(logits).index_put(
        (*(x.to(logits.device) for x in places), dst, src), bias
    )


def _add_all(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    return add_bias(case, inputs, _softcap(case, inputs, _alibi(case, inputs, logits)))


def _normal(name: str, *shape: int) -> Callable[[GraphCase, torch.Generator], Inputs]:
    return lambda case, rng: {name: torch.randn(*shape, generator=rng, dtype=torch.float64)}


def _draw_bias(case: GraphCase, rng: torch.Generator) -> Inputs:
    return _normal("bias", BATCH, HEADS, case.edges().shape[1])(case, rng)


def _draw_all(case: GraphCase, rng: torch.Generator) -> Inputs:
    return {**_draw_bias(case, rng), **_normal("sink_logits", HEADS)(case, rng)}


def _mod(score_mod: Any) -> Callable[[Inputs], dict[str, Any]]:
    return lambda inputs: {"score_mod": score_mod}


def _relative_mod(inputs: Inputs) -> dict[str, Any]:
    return {"score_mod": score_mods.relative_bias(inputs["table"])}


def _features() -> Iterator[Feature]:
    alibi, cap = score_mods.alibi(score_mods.alibi_slopes(HEADS)), score_mods.softcap(3.0)
    counts, table = torch.tensor([1.0, 2.0, 3.0, 4.0] * 25), (HEADS, 2 * REACH + 1)
    ordered = partial(Feature, needs_edge_order=True)
    yield Feature("plain")
    yield Feature("scale 0.7", options=lambda _: {"scale": 0.7}, scale=0.7)
    yield Feature("alibi", options=_mod(alibi), dense=_alibi)
    yield Feature("relative bias", _normal("table", *table), _relative_mod, _relative)
    yield Feature("softcap", options=_mod(cap), dense=_softcap, additive=False)
    yield Feature("log multiplicity", options=_mod(score_mods.log_multiplicity(counts)), dense=_multiplicity)
    yield ordered("edge bias", _draw_bias, lambda inputs: {"bias": inputs["bias"]}, add_bias)
    yield Feature(
        "sinks", _normal("sink_logits", HEADS), lambda inputs: {"sink_logits": inputs["sink_logits"]}
    )
    both = score_mods.chain(alibi, cap)
    learned = _draw_all, lambda inputs: {"score_mod": both, **inputs}
    yield ordered("alibi, softcap, bias, sinks", *learned, _add_all, additive=False)


FEATURES = {feature.name: feature for feature in _features()}
