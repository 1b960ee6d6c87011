"""F4: a non-edge carries nothing. One token is poisoned, and no token without a path to it may change.

The poison is 1e4, NaN or an infinity in one channel of a token's q, k or v, in one head of one sample. A
receiver that does not attend to it has the same output, lse, and gradients of its query and of a bias on its
in-edges; a sender none of whose receivers attends to it has those of its key and value. A poisoned query spoils
its own row, and the gradients of its senders. All of this is read off the definition of the graph. A control
checks that the poison arrives: a NaN is in all rows that attend to it, and what is not finite in the
reference is so everywhere.

In the reference not a bit may change. Elsewhere the same summands may be summed in another order, by another
kernel. A sum of n numbers is off by less than ``6 sqrt(n) eps / 2`` of the sum of absolute values, but for
once in 10^7 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019, theorem 2.4: ``lambda sqrt(n) u`` but for
``2 exp(-lambda^2 / 2)``), so that two of them differ by less than ``6 sqrt(n) eps``, here of the largest
number, which is stricter; eps is that of float32 or float64, in which sums are. A half is rounded once more,
by up to its own eps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.edge_softmax import accumulation_dtype, per_query_head
from tests.guarantees.draws import DTYPES, Draw, Numbers
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import AttendProblem, usual_backends

SURE = 6.0  # lambda: a sum of rounding errors lies beyond it once in 10^7
POISONS = tuple((where, poison) for where in "qkv" for poison in (1e4, math.nan, math.inf, -math.inf))


@dataclass(frozen=True)
class Poisoned(Draw):
    """Case ``number`` of F1 as a call of ``attend``, with a token to poison; twelve in a row hold each poison
    once.

    >>> len({str(Poisoned(number).poison) for number in range(24, 36)})
    12
    """

    @cached_property
    def numbers(self) -> Numbers:
        """As drawn, with a sample at least, and each in memory of its own.

        Where samples share theirs, products are summed in another order than once they are copied, as cleaned
        ones are.
        """
        drawn = Numbers.drawn(random.Random(self.number))
        layout = "as made" if drawn.layout == "one sample for all" else drawn.layout
        return replace(drawn, form="attend", batch=max(1, drawn.batch), layout=layout)

    @cached_property
    def poison(self) -> tuple[str, float]:
        shuffled = random.Random(f"poisons {self.number // len(POISONS)}").sample(POISONS, len(POISONS))
        return shuffled[self.number % len(POISONS)]

    @cached_property
    def wants_lse(self) -> bool:
        """Whether lse, and the gradients that pass through it, are looked at too."""
        return random.Random(f"lse {self.number}").random() < 0.5

    def spot(self, x: Tensor) -> tuple[int, int, int, int] | None:
        """Sample, head, token and channel of ``x`` to poison: a token with edges to some, not all, if any."""
        rng, axis = random.Random(f"spot {self.number}"), -1 if self.poison[0] == "q" else -2
        if not x.numel():
            return None
        degree = self.mask[0].any(0).sum(axis)
        some = ((degree > 0) & (degree < self.mask.shape[axis])).nonzero().flatten().tolist()
        token = rng.choice(some or range(x.shape[2]))
        return rng.randrange(x.shape[0]), rng.randrange(x.shape[1]), token, rng.randrange(x.shape[3])


@dataclass(frozen=True)
class _Finding:
    """One backend on one case: the change as a share of what sums may make, and in words what was wrong."""

    backend: str
    difference: float
    wrong: str = ""


@dataclass(frozen=True, eq=False)
class _Case:
    draw: Poisoned

    @cached_property
    def problem(self) -> AttendProblem:
        return AttendProblem(self.draw)

    @cached_property
    def inputs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        clean, (where, poison) = self.problem.inputs(), self.draw.poison
        spot, spoiled = self.draw.spot(clean[where]), dict(clean)
        if spot is not None:
            spoiled[where] = (
                clean[where]
                .detach()
                .index_put(tuple(map(torch.tensor, spot)), torch.tensor(poison).to(clean[where]))
            )
            spoiled[where].requires_grad_()
        return clean, spoiled

    @cached_property
    def receivers(self) -> Bool[Tensor, "batch heads dst"]:
        """Rows that attend to the poison, or have it and are not isolated."""
        where, mask = self.draw.poison[0], self.draw.mask
        clean, spoiled = (x[where].detach() for x in self.inputs)
        marked = (clean != spoiled).any(-1).expand(self.draw.numbers.batch, -1, -1)
        if where == "q":
            return marked & mask.any(-1)
        return (mask & per_query_head(marked, mask.shape[1]).unsqueeze(-2)).any(-1)

    @cached_property
    def senders(self) -> Bool[Tensor, "batch kv_heads src"]:
        reached = (self.draw.mask & self.receivers.unsqueeze(-1)).any(-2)
        numbers = self.draw.numbers
        return reached.view(numbers.batch, numbers.kv_heads, numbers.group, -1).any(2)

    def results(self, inputs: Mapping[str, Tensor], backend: Backend) -> dict[str, Tensor]:
        """Output, lse and gradients, those of q, k and v for each sample apart."""
        q, k, v = self.problem.laid_out(inputs)
        out, lse = self.problem.attended(inputs, (q, k, v), backend, self.draw.wants_lse)
        found, along = {"out": out} | ({} if lse is None else {"lse": lse}), [self.problem.direction]
        along += [] if lse is None else [torch.ones_like(lse)]
        learners = {"q": q, "k": k, "v": v} | (
            {"bias": inputs["bias"]} if self._bias_is_whole(inputs) else {}
        )
        grads = torch.autograd.grad(list(found.values()), list(learners.values()), along, allow_unused=True)
        named = zip(learners.items(), grads, strict=True)
        return found | {
            f"gradient of {name}": torch.zeros_like(x) if g is None else g for (name, x), g in named
        }

    def _bias_is_whole(self, inputs: Mapping[str, Tensor]) -> bool:
        """True if each number of the bias belongs to one sample and head."""
        return "bias" in inputs and inputs["bias"].dim() == 3

    def untouched(self, name: str) -> Bool[Tensor, "..."]:
        if name in ("gradient of k", "gradient of v"):
            return ~self.senders
        if name == "gradient of bias":
            return ~self.receivers[:, :, [dst for _, dst in self.draw.edges or []]]
        return ~self.receivers

    def finding(self, backend: Backend) -> _Finding | None:
        try:
            before, after = (self.results(inputs, backend) for inputs in self.inputs)
        except RefusalError:
            return None
        except Exception as error:  # whatever it raises is a failure
            return _Finding(backend.name, math.inf, f"{type(error).__name__}: {str(error)[:200]}")
        changes = {name: _change(before[name], after[name], self.untouched(name)) for name in before}
        allowed = 0.0 if backend.name == "reference" else self.allowed
        wrong = [f"{name} by {change:.3g}" for name, change in changes.items() if not change <= allowed]
        words = f"it reached strangers: {', '.join(wrong)}" if wrong else ""
        worst = max(changes.values(), key=lambda change: math.inf if math.isnan(change) else change)
        return _Finding(backend.name, worst / self.allowed, words or self._unfelt(after["out"]))

    @cached_property
    def allowed(self) -> float:
        """By how much two orders of the same sums may differ, as a share of the largest number.

        The longest chain of sums: the channels of a logit and of ``grad_out . v``, the softmax and its row
        over all senders, and the gradient of a key over all receivers of its group.
        """
        numbers, graph = self.draw.numbers, self.draw.graph
        dtype = DTYPES[numbers.dtype]
        wide, own = (torch.finfo(x).eps for x in (accumulation_dtype(dtype), dtype))
        terms = numbers.dim + numbers.value_dim + 2 * graph.num_src + numbers.group * graph.num_dst
        return SURE * math.sqrt(terms) * wide + (own if own > wide else 0.0)

    def _unfelt(self, out: Tensor) -> str:
        lost = int((self.holders & out.isfinite().all(-1)).sum())
        return f"{lost} rows that attend to it are finite" if lost else ""

    @cached_property
    def holders(self) -> Bool[Tensor, "batch heads dst"]:
        """Rows that cannot be finite: all poisoned by a NaN, and by an infinity those of the reference."""
        if math.isnan(self.draw.poison[1]):
            return self.receivers
        with torch.no_grad():
            out, _ = self.problem.attended(
                self.inputs[1], self.problem.laid_out(self.inputs[1]), BACKENDS["reference"]
            )
        return ~out.isfinite().all(-1)


def _change(before: Tensor, after: Tensor, untouched: Bool[Tensor, "..."]) -> float:
    """The largest change of untouched entries, as a share of its largest number, or of 1."""
    one, other = before.detach()[untouched].double(), after.detach()[untouched].double()
    changes = torch.where(one == other, 0.0, (one - other).abs())
    size = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    return float(changes.max()) / max(1.0, size) if changes.numel() else 0.0


def _measure(count: int, tell: Tell) -> Measured:
    failures, worst = [], dict.fromkeys(usual_backends(), -1.0)
    seen: set[tuple[str, str]] = set()
    changed = 0
    for number in range(count):
        tell(f"graph {number} of {count}")
        case = _Case(Poisoned(number))
        wrong = [
            f"F4, {_said(case.draw)}, {found.backend}: {found.wrong}"
            for found in _findings(case, worst)
            if found.wrong
        ]
        failures += wrong
        changed += bool(wrong)
        if case.receivers.any() and not case.receivers.all() and not case.senders.all():
            seen.add((case.draw.poison[0], str(case.draw.poison[1])))
    failures += [
        f"F4: no {x} in {where} had rows with and without a path to it"
        for where, x in _wanted()
        if (where, x) not in seen
    ]
    failures += [f"F4: nothing was measured of {name}" for name, change in worst.items() if change < 0]
    exact = [name for name, change in worst.items() if change == 0]
    share = f"largest change {max(worst.values()):.2g} of what another order of sums may make"
    value = f"{changed:,} of {count:,} graphs changed; {share}; not a bit in {', '.join(exact)}"
    return Measured(value, tuple(failures))


def _findings(case: _Case, worst: dict[str, float]) -> Iterator[_Finding]:
    """One for each backend that holds the case; the largest changes are noted in ``worst``."""
    for name, backend in usual_backends().items():
        found = case.finding(backend)
        if found is not None:
            worst[name] = max(worst[name], math.inf if math.isnan(found.difference) else found.difference)
            yield found


def _wanted() -> list[tuple[str, str]]:
    return [(where, str(poison)) for where, poison in POISONS]


def _said(draw: Poisoned) -> str:
    where, poison = draw.poison
    return f"case {draw}: {poison} in {where}{', with lse' if draw.wants_lse else ''}"


GUARANTEE = Guarantee(
    name="F4",
    promise=(
        "a non-edge carries nothing: a poisoned token changes no token that has no path to it, nor its "
        "gradients"
    ),
    bar=(
        "0 graphs changed: not a bit in the reference, elsewhere 6 sqrt(n) eps for sums of n numbers, and a "
        "half's rounding"
    ),
    quick=36,
    full=2000,
    measure=_measure,
)
