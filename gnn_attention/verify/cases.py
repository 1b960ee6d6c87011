"""What is checked: graphs with an independent definition in plain Python, and what can be added to their
edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention import convert, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

HEADS, KV_HEADS, BATCH = 4, 2, 8  # many samples, so that the worst error of a draw is not a matter of luck
REACH = 3  # of the relative bias


@dataclass(frozen=True, eq=False)
class GraphCase:
    """A graph and ``edge(b, h, dst, src) -> bool`` in plain Python, and where it has one its edge list as it
    was given.
    """

    name: str
    graph: TokenGraph
    edge: Callable[[int, int, int, int], bool]
    listed: list[tuple[int, int]] | None = None
    first_dst: int = 0

    @cached_property
    def mask(self) -> Tensor:
        """Bool ``[BATCH, HEADS, dst, src]``, pair by pair from the definition."""
        shape = (BATCH, HEADS, self.graph.num_dst, self.graph.num_src)
        cells = [
            self.edge(b, h, i + self.first_dst, j)
            for b in range(BATCH)
            for h in range(HEADS)
            for i in range(shape[2])
            for j in range(shape[3])
        ]
        return torch.tensor(cells, dtype=torch.bool).reshape(shape)

    def edges(self) -> list[tuple[int, int]]:
        """``(src, dst)`` in the order that a per-edge bias must follow: as listed, else by receiver, then
        sender.
        """
        if self.listed is not None:
            return self.listed
        return [(j, i) for i, j in self.mask[0, 0].nonzero().tolist()]

    @property
    def varies(self) -> bool:
        """True if the graph differs by head or sample, so that it has no edge order."""
        return self.graph.heads is not None or self.graph.batch is not None

    def positions(self) -> tuple[Tensor, Tensor]:
        """Absolute positions of receivers ``[dst, 1]`` and senders ``[src]``."""
        dst = torch.arange(self.first_dst, self.first_dst + self.graph.num_dst).unsqueeze(1)
        return dst, torch.arange(self.graph.num_src)


def graph_cases() -> Iterator[GraphCase]:
    """Every graph of the checks; most are asymmetric, some have receivers without in-edges, two differ by
    head or sample.
    """
    n, p = 13, patterns
    parents = [-1, 0, 0, 1, 1, 2, 3, -1, 7, 8, 8, 10, 4]
    owner = [0] * 5 + [2] + [3] * 7
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
        p.global_tokens(n, [2, 6]),
        lambda b, h, i, j: j <= i and (i in (2, 6) or j in (2, 6)),
    )
    yield GraphCase("cross", p.cross(7, n), lambda b, h, i, j: True)
    yield GraphCase("tree", p.tree(parents), lambda b, h, i, j: j in _line(parents, i))
    yield GraphCase("decode rows", p.causal(n).rows(9, n), lambda b, h, i, j: j <= i, first_dst=9)
    yield GraphCase("one token", p.causal(1), lambda b, h, i, j: True)
    yield GraphCase("no edges", p.window(n, 0), lambda b, h, i, j: False)
    yield _listed_case("listed", 10, n, every=3)
    yield GraphCase("by head", _by_head(n), lambda b, h, i, j: 0 <= i - j <= h)
    yield GraphCase("by sample", _by_sample(n), lambda b, h, i, j: j <= i and j >= 4 * (b % 3))
    yield GraphCase("causal, 97 tokens", p.causal(97), lambda b, h, i, j: j <= i)
    yield GraphCase("window, 97 tokens", p.window(97, 16), lambda b, h, i, j: 0 <= i - j < 16)


def _line(parents: list[int], node: int) -> list[int]:
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


def _listed_case(name: str, num_dst: int, num_src: int, every: int) -> GraphCase:
    """An irregular bipartite list in no particular order; receivers 0 and 4 are isolated."""
    pairs = [
        (s, d)
        for d in range(num_dst)
        for s in range(num_src)
        if (3 * s + 5 * d + s * d) % every == 0 and d not in (0, 4)
    ]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    known = set(pairs)
    graph = convert.from_edge_index(torch.tensor(pairs).t(), num_dst, num_src)
    return GraphCase(name, graph, lambda b, h, i, j: (j, i) in known, listed=pairs)


def _by_head(n: int) -> TokenGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= h)

    return TokenGraph.from_rule(rule, n, heads=HEADS, name="by head")


def _by_sample(n: int) -> TokenGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (src >= 4 * (b % 3))

    return TokenGraph.from_rule(rule, n, batch=BATCH, name="by sample")


GRAPHS = {case.name: case for case in graph_cases()}


@dataclass(frozen=True, eq=False)
class Feature:
    """Something added to the logits: the arguments of ``attend``, and the same on dense float64 logits,
    written out.

    ``learned`` makes the inputs that get gradients; ``options`` turns them into arguments of ``attend``;
    ``dense`` adds them to logits ``[B, H, dst, src]``. ``additive`` says that ``dense`` is a plain sum, which
    SDPA can be given as a mask.
    """

    name: str
    learned: Callable[[GraphCase, torch.Generator], dict[str, Tensor]] = lambda case, rng: {}
    options: Callable[[dict[str, Tensor]], dict[str, Any]] = lambda inputs: {}
    dense: Callable[[GraphCase, dict[str, Tensor], Tensor], Tensor] = lambda case, inputs, logits: logits
    additive: bool = True
    scale: float | None = None
    needs_edge_order: bool = False


def unordered(feature: Feature, case: GraphCase) -> str | None:
    """Why a feature cannot be on a graph: a bias for each edge needs an order of edges."""
    if feature.needs_edge_order and case.varies:
        return "a per-edge bias has no order on a graph that differs by head or sample"
    return None


def _alibi(case: GraphCase, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    dst, src = (x.to(logits.device) for x in case.positions())
    slopes = torch.tensor(
        [2.0 ** (-8.0 * (h + 1) / HEADS) for h in range(HEADS)], dtype=logits.dtype, device=logits.device
    )
    return logits - slopes.view(1, -1, 1, 1) * (dst - src).abs()


def _relative(case: GraphCase, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    dst, src = (x.to(logits.device) for x in case.positions())
    return logits + inputs["table"][:, (dst - src).clamp(-REACH, REACH) + REACH]


def _softcap(case: GraphCase, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    return 3.0 * torch.tanh(logits / 3.0)


def _counts(case: GraphCase) -> list[float]:
    return [1.0 + j % 4 for j in range(case.graph.num_src)]


def _multiplicity(case: GraphCase, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    return logits + torch.tensor(_counts(case), dtype=logits.dtype, device=logits.device).log()


def _bias(case: GraphCase, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    table, listed = torch.zeros_like(logits), case.edges()
    src, dst = ([edge[end] for edge in listed] for end in (0, 1))
    rows = (
        torch.tensor(dst, dtype=torch.int64, device=logits.device),
        torch.tensor(src, dtype=torch.int64, device=logits.device),
    )
    everything = (
        torch.arange(BATCH, device=logits.device).view(-1, 1, 1),
        torch.arange(HEADS, device=logits.device).view(-1, 1),
    )
    return logits + table.index_put(
        (*everything, *rows), inputs["bias"].expand(BATCH, HEADS, -1).to(table.dtype)
    )


def _draw(name: str, *shape: int) -> Callable[[GraphCase, torch.Generator], dict[str, Tensor]]:
    return lambda case, rng: {name: torch.randn(*shape, generator=rng, dtype=torch.float64)}


def _draw_bias(case: GraphCase, rng: torch.Generator) -> dict[str, Tensor]:
    return {"bias": torch.randn(BATCH, HEADS, len(case.edges()), generator=rng, dtype=torch.float64)}


def _draw_all(case: GraphCase, rng: torch.Generator) -> dict[str, Tensor]:
    return {**_draw_bias(case, rng), **_draw("sink_logits", HEADS)(case, rng)}


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("plain"),
        Feature("scale 0.7", scale=0.7),
        Feature(
            "alibi",
            options=lambda _: {"score_mod": score_mods.alibi(score_mods.alibi_slopes(HEADS))},
            dense=_alibi,
        ),
        Feature(
            "relative bias",
            learned=_draw("table", HEADS, 2 * REACH + 1),
            options=lambda inputs: {"score_mod": score_mods.relative_bias(inputs["table"])},
            dense=_relative,
        ),
        Feature(
            "softcap",
            options=lambda _: {"score_mod": score_mods.softcap(3.0)},
            dense=_softcap,
            additive=False,
        ),
        Feature(
            "log multiplicity",
            options=lambda _: {
                "score_mod": score_mods.log_multiplicity(torch.tensor([1.0, 2.0, 3.0, 4.0] * 25))
            },
            dense=_multiplicity,
        ),
        Feature(
            "edge bias",
            learned=_draw_bias,
            options=lambda inputs: {"bias": inputs["bias"]},
            dense=_bias,
            needs_edge_order=True,
        ),
        Feature(
            "sinks",
            learned=_draw("sink_logits", HEADS),
            options=lambda inputs: {"sink_logits": inputs["sink_logits"]},
        ),
        Feature(
            "alibi, softcap, bias, sinks",
            learned=_draw_all,
            options=lambda inputs: {
                "score_mod": score_mods.chain(
                    score_mods.alibi(score_mods.alibi_slopes(HEADS)), score_mods.softcap(3.0)
                ),
                **inputs,
            },
            dense=lambda case, inputs, logits: _bias(
                case, inputs, _softcap(case, inputs, _alibi(case, inputs, logits))
            ),
            additive=False,
            needs_edge_order=True,
        ),
    )
}
