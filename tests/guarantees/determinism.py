"""F8: the same call gives the same bits, whatever lay in memory before.

A call is repeated with torch's deterministic algorithms and without. Backends that promise more are called
with a list of edges in other orders, and on one thread and on two. The output, lse and every gradient are
compared bit for bit. Calls are large enough for torch to share them among threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import relative_bias
from tests.guarantees.guarantee import Finding, Guarantee, Measured, Tell, run_cases
from tests.guarantees.problems import usual_backends

TOKENS, SHORT, DIM, REACH = 128, 70, 24, 6
HEADS = 3  # an odd number: two threads meet inside one head
ANY_ORDER = ("rows", "reference", "dense")  # the same bits for every order of a list of edges
ANY_THREADS = ("rows", "reference")  # the same bits on one thread and on two
Bits = Mapping[str, Tensor]


def _listed() -> TokenGraph:
    """Three quarters of all pairs, in no order."""
    rng = torch.Generator().manual_seed(0)
    edges = (torch.rand(TOKENS, TOKENS, generator=rng) < 0.75).nonzero().t()
    edges = edges[:, torch.randperm(edges.shape[1], generator=rng)]
    return convert.from_edge_index(edges, TOKENS, TOKENS)


@dataclass(frozen=True, eq=False)
class Call:
    """A graph, a dtype, and what is added to the logits: "table", "bias", "sinks" or nothing."""

    graph: TokenGraph
    dtype: torch.dtype
    added: str = ""

    def __str__(self) -> str:
        return f"{self.graph!r}, {self.dtype}, {self.added or 'plain'}"

    @cached_property
    def leaves(self) -> Bits:
        rng, tokens = torch.Generator().manual_seed(1), self.graph.num_src
        shapes: dict[str, tuple[int, ...]] = {
            "q": (1, HEADS, tokens, DIM),
            "k": (1, 1, tokens, DIM),
            "v": (1, 1, tokens, 17),
        }
        added = {"table": (HEADS, 2 * REACH + 1), "bias": (HEADS, self.graph.num_edges), "sinks": (HEADS,)}
        shapes |= {self.added: added[self.added]} if self.added else {}
        return {name: torch.randn(shape, generator=rng).to(self.dtype) for name, shape in shapes.items()}

    def bits(self, backend: Backend, order: Tensor | None = None) -> Bits:
        """Output, lse and gradients; with the list of edges in another order, a bias goes with its edge."""
        inputs = {name: x.clone().requires_grad_() for name, x in self.leaves.items()}
        graph, bias = self.graph, inputs.get("bias")
        if order is not None:
            graph = convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src)
            bias = None if bias is None else bias[:, order]
        mod = relative_bias(inputs["table"]) if "table" in inputs else None
        more = None, mod, bias, inputs.get("sinks")
        q, k, v = (inputs[name] for name in "qkv")
        out, info = attend(q, k, v, graph, *more, backend=backend, return_info=True)
        results = {"out": out.square(), "lse": info.lse}
        along = [torch.ones_like(x) for x in results.values()]
        gradients = torch.autograd.grad(list(results.values()), list(inputs.values()), along)
        named = {f"gradient of {name}": x for name, x in zip(inputs, gradients, strict=True)}
        return {name: x.detach() for name, x in results.items()} | named


def calls() -> list[Call]:
    """Every graph, dtype and option at least once; the list comes first."""
    window, short = patterns.window(SHORT, 20) | patterns.sinks(SHORT, 3), SHORT // 3
    return [
        Call(_listed(), torch.float32, "bias"),
        Call(_listed(), torch.float32, "table"),
        Call(patterns.causal(TOKENS), torch.float32),
        Call(window, torch.float64, "table"),
        Call(patterns.documents([short, SHORT - short]), torch.bfloat16, "sinks"),
    ]


@contextlib.contextmanager
def _setting(threads: int, deterministic: bool = False) -> Iterator[None]:
    """So many threads, and deterministic algorithms or not; afterwards it is as before."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def variations(call: Call, backend: Backend, number: int) -> Iterator[tuple[str, Bits]]:
    """Repetition ``number`` of a call, in every way that promises the same bits."""
    for deterministic in (False, True):
        with _setting(2, deterministic):
            for power in range(8, 22):  # leave NaN in the memory that the call is given
                torch.full((2**power,), torch.nan)
            yield "repeats", call.bits(backend)
    if call.graph.edges.listed() is not None and backend.name in ANY_ORDER:
        rng = torch.Generator().manual_seed(number)
        with _setting(2):
            order = torch.randperm(call.graph.num_edges, generator=rng)
            yield "orders of edges", call.bits(backend, order)
    if backend.name in ANY_THREADS:
        with _setting(1):
            yield "numbers of threads", call.bits(backend)


def differing(first: Bits, second: Bits) -> list[str]:
    """The names of results that differ in a bit, the sign of a zero too; a NaN differs from itself."""
    return [
        name
        for name, x in first.items()
        if not (torch.equal(x, second[name]) and torch.equal(x.signbit(), second[name].signbit()))
    ]


def _measure(count: int, tell: Tell) -> Measured:
    def check(call: Call, name: str) -> Iterator[Finding]:
        with _setting(2):
            first = call.bits(BACKENDS[name])
        for number in range(count):
            for way, second in variations(call, BACKENDS[name], number):
                wrong = differing(first, second)
                yield way, 0.0, f"{way}: {', '.join(wrong)} differ" if wrong else ""

    tally = run_cases(((call, call) for call in calls()), usual_backends(), check, tell)
    promised = {"repeats": usual_backends(), "orders of edges": ANY_ORDER, "numbers of threads": ANY_THREADS}
    words = (f"{tally.total(way) - tally.wrong[way]:,}/{tally.total(way):,} {way}" for way in promised)
    value = f"{', '.join(words)} gave the same bits, of outputs, lse and gradients"
    return tally.measured(value, [(way, name) for way, names in promised.items() for name in names])


GUARANTEE = Guarantee(
    name="F8",
    promise=(
        "the same call gives the same bits: repeated, with its edges in another order, on one thread and on "
        "two"
    ),
    bar=(
        "every repeat, forward and backward; any order in rows, reference and dense; any threads in rows "
        "and reference"
    ),
    quick=1,
    full=10,
    measure=_measure,
)
