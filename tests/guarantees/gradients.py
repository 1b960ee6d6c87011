"""F6: numerical derivatives of every input and every parameter, and of the gradients, against those of every
backend, in float64.

A case is a family of graphs, a form (a call of ``attend``, or a layer with standard, factored or merged
weights) and a backend, on a few tokens, with options drawn from its number. ``torch.autograd.gradcheck``
moves each number by 1e-6. Second derivatives are promised by ``dense``, ``reference`` and the walk; another
backend may refuse them by name, never give wrong ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from gnn_attention import score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.layer import MessagePassingAttention
from tests.guarantees.families import FAMILIES, shuffled_list
from tests.guarantees.guarantee import Guarantee, Measured, Tell

# twelve; of the list, in no order, some rows are isolated
KINDS = (
    *("causal", "full", "window", "band", "dilated", "window and sinks"),
    *("prefix", "documents", "tree", "globals", "by head", "list"),
)
FORMS: dict[str, Callable[[StandardHeads], Any] | None] = {
    "attend": None,
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}
# run float64 on a CPU, if not with every option
MEASURED = ("dense", "tiles", "rows", "mixed", "reference", "walk")
TWICE = ("dense", "reference", "walk")
TRIPLES = [case for case in product((*BACKENDS, "walk"), FORMS, KINDS) if case[:2] != ("walk", "attend")]
STEP = 229  # prime to the number of triples, about 0.6 of it: a few cases are spread over all of them
WIDTH, REACH = 3, 1
AttentionCall = Callable[..., Tensor]


@dataclass(frozen=True)
class GradientCase:
    """Case ``number``: everything else follows from it.

    >>> print(GradientCase(0))
    0: dense, attend, causal
    """

    number: int

    @cached_property
    def triple(self) -> tuple[str, str, str]:
        return TRIPLES[self.number * STEP % len(TRIPLES)]

    def __str__(self) -> str:
        return f"{self.number}: {', '.join(self.triple)}"

    @cached_property
    def _rng(self) -> random.Random:
        return random.Random(self.number)

    @cached_property
    def _numbers(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.number)

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._numbers, dtype=torch.float64).requires_grad_()

    def graph(self, batch: int, heads: int) -> TokenGraph:
        """Three to five tokens; the list has as many receivers or fewer."""
        family, n = self.triple[2], self._rng.randint(3, 5)
        if family == "list":
            return shuffled_list(self._rng, n, batch, heads)[0]
        return FAMILIES[family](self._rng, n, batch, heads)[0]

    def problem(self) -> tuple[AttentionCall, Sequence[Tensor]]:
        form = FORMS[self.triple[1]]
        return self._attend() if form is None else self._layer(form)

    def _sizes(self) -> tuple[int, int, int]:
        """Samples, key heads, query heads for each."""
        return self._rng.choice([1, 1, 2]), *self._rng.choice([(1, 1), (2, 1), (1, 2)])

    def _modified(self, heads: int) -> tuple[dict[str, Any], list[Tensor]]:
        kind = self._rng.choice(["none", "none", "none", "alibi", "softcap", "relative"])
        if kind == "relative":
            table = self._leaf(heads, 2 * REACH + 1)
            return {"score_mod": score_mods.relative_bias(table)}, [table]
        slopes = score_mods.alibi_slopes(heads)
        made = {"none": None, "alibi": score_mods.alibi(slopes), "softcap": score_mods.softcap(1.5)}
        return {"score_mod": made[kind]}, []

    def _bias(self, graph: TokenGraph, *lead: int) -> dict[str, Any]:
        """A number for each edge; not of a graph that differs by head, which has no single list of edges."""
        if graph.heads is not None or self._rng.random() < 0.6:
            return {}
        return {"bias": self._leaf(*(self._rng.choice([1, size]) for size in lead), graph.num_edges)}

    def _attend(self) -> tuple[AttentionCall, Sequence[Tensor]]:
        batch, kv_heads, group = self._sizes()
        heads, dim, value_dim = kv_heads * group, self._rng.randint(1, 2), self._rng.randint(1, 2)
        graph, (mod, learned) = self.graph(batch, heads), self._modified(heads)
        q, k, v = (
            self._leaf(batch, heads, graph.num_dst, dim),
            self._leaf(batch, kv_heads, graph.num_src, dim),
            self._leaf(batch, kv_heads, graph.num_src, value_dim),
        )
        options = self._bias(graph, batch, heads)
        if self._rng.random() < 0.3:
            options["sink_logits"] = self._leaf(heads)
        given = {**mod, "scale": self._rng.choice([None, 0.7]), "backend": self.triple[0]}

        def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
            more: dict[str, Any] = dict(zip(options, rest, strict=False))
            return attend(q, k, v, graph, **given, **more)

        return call, (q, k, v, *options.values(), *learned)

    def _layer(self, form: Callable[[StandardHeads], Any]) -> tuple[AttentionCall, Sequence[Tensor]]:
        batch, kv_heads, group = self._sizes()
        heads, dim, value_dim = kv_heads * group, self._rng.randint(1, 2), self._rng.randint(1, 2)
        graph, (mod, learned) = self.graph(batch, heads), self._modified(heads)
        standard = StandardHeads(
            WIDTH, heads, dim, value_dim, kv_heads, bias=self._rng.random() < 0.5
        ).double()
        for parameter in standard.parameters():
            parameter.data = self._leaf(*parameter.shape).data
        backend = None if self.triple[0] == "walk" else self.triple[0]
        layer = MessagePassingAttention(
            form(standard), mod["score_mod"], backend=backend or "message_passing"
        )
        x, weights = (
            (self._leaf(batch, n, WIDTH) for n in (graph.num_src, graph.num_dst)),
            dict(layer.named_parameters()),
        )
        options = self._bias(graph, batch, heads)

        def call(x_src: Tensor, x_dst: Tensor, *rest: Tensor) -> Any:
            named = dict(zip(weights, rest, strict=False))
            more = dict(zip(options, rest[len(weights) :], strict=False))
            return functional_call(layer, named, ((x_src, x_dst), graph), more)

        return call, (*x, *weights.values(), *options.values(), *learned)


def _first(call: AttentionCall, leaves: Sequence[Tensor]) -> str:
    """Whether the gradients were checked, or the call refused by name; any other error fails the case."""
    try:
        call(*leaves)
    except NotImplementedError:
        return "refused"
    gradcheck(call, leaves, nondet_tol=0.0)
    return "checked"


def _second(call: AttentionCall, leaves: Sequence[Tensor], promised: bool) -> str:
    try:
        gradgradcheck(call, leaves, nondet_tol=0.0)
    except NotImplementedError:
        if promised:
            raise
        return "refused twice"
    return "checked twice"


def _judged(case: GradientCase) -> tuple[str, ...]:
    call, leaves = case.problem()
    first = _first(call, leaves)
    return (first,) if first == "refused" else (first, _second(call, leaves, case.triple[0] in TWICE))


def measure(count: int, tell: Tell) -> Measured:
    """The cases ``0 .. count - 1``.

    >>> measure(0, print).holds
    False
    """
    seen: Counter[tuple[str, str]] = Counter()
    failures = []
    for number in range(count):
        case = GradientCase(number)
        tell(str(case))
        try:
            seen.update((case.triple[0], outcome) for outcome in _judged(case))
        except (
            Exception
        ) as error:  # whatever it raises is a failure: gradcheck tells a wrong derivative so, too
            failures.append(f"case {case}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    wanted = [(name, "checked") for name in MEASURED] + [(name, "checked twice") for name in TWICE]
    failures += [f"nothing of {name} was {outcome}" for name, outcome in wanted if not seen[name, outcome]]
    total: Counter[str] = Counter()
    for (_, outcome), times in seen.items():
        total[outcome] += times
    return Measured(_words(count, total, len(failures)), tuple(failures))


def _words(count: int, total: Counter[str], failed: int) -> str:
    return (
        f"{failed} failures in {count:,} cases: {total['checked']:,} gradients and "
        f"{total['checked twice']:,} second derivatives "
        f"checked; refused by name {total['refused']:,} calls and {total['refused twice']:,} second "
        "derivatives"
    )


GUARANTEE = Guarantee(
    name="F6",
    promise=(
        "gradients and second derivatives are those of the formula: 12 families, 4 forms, every backend "
        "that holds float64"
    ),
    bar="gradcheck and gradgradcheck (float64, eps 1e-6) pass in 100 % of cases, or a refusal names the reason; "
    "dense, reference and the walk refuse no second derivative",
    quick=14,
    full=len(TRIPLES),
    measure=measure,
)
