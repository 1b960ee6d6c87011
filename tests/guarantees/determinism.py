"""F8: the same call gives the same bits, whatever lay in memory before.

A call is repeated with torch's deterministic algorithms and without. Backends that promise more are called
with a list of edges in other orders, and on one thread and on two. The output, lse and every gradient are
compared bit for bit. Calls are large enough for torch to share them among threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import GraphCase
from gnn_attention.verify.groups import draw_problem
from gnn_attention.verify.truth import Problem, make_leaves
from tests.guarantees.guarantee import Finding, Guarantee, Measured, Tell, run_cases
from tests.guarantees.problems import usual_backends

TOKENS, SHORT, DIM, VALUE_DIM = 128, 70, 24, 17
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


def _problem(graph: TokenGraph, dtype: str, option: str) -> Problem:
    table: list[list[bool]] = graph.mask().tolist()
    sizes, dims = (1, HEADS), (DIM, VALUE_DIM)
    case = GraphCase(repr(graph), graph, lambda b, h, i, j: table[i][j], None, sizes, kv_heads=1, dims=dims)
    return draw_problem("cpu", dtype, case, option)


def calls() -> dict[str, Problem]:
    """Every graph, dtype and option at least once; the list comes first."""
    window, short = patterns.window(SHORT, 20) | patterns.sinks(SHORT, 3), SHORT // 3
    rows = [
        (_listed(), "float32", "edge bias"),
        (_listed(), "float32", "relative bias"),
        (patterns.causal(TOKENS), "float32", "plain"),
        (window, "float64", "relative bias"),
        (patterns.documents([short, SHORT - short]), "bfloat16", "sinks"),
    ]
    return {f"{row[0]!r}, {row[1]}, {row[2]}": _problem(*row) for row in rows}


def bits_of(problem: Problem, backend: Backend, order: Tensor | None = None) -> Bits:
    """Output, lse and gradients; with the list of edges in another order, a bias goes with its edge."""
    leaves, graph = make_leaves(problem.inputs), problem.graph
    given = dict(leaves)
    if order is not None:
        graph = convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src)
        given |= {"bias": given["bias"][..., order]} if "bias" in given else {}
    q, k, v = (given[name] for name in "qkv")
    out, info = attend(q, k, v, graph, backend=backend, return_info=True, **problem.options(given))
    results = {"out": out.square(), "lse": info.lse}
    along = [torch.ones_like(x) for x in results.values()]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), along)
    named = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in results.items()} | named


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


def variations(problem: Problem, backend: Backend, number: int) -> Iterator[tuple[str, Bits]]:
    """Repetition ``number`` of a call, in every way that promises the same bits."""
    for deterministic in (False, True):
        with _setting(2, deterministic):
            for power in range(8, 22):  # leave NaN in the memory that the call is given
                torch.full((2**power,), torch.nan)
            yield "repeats", bits_of(problem, backend)
    if problem.graph.edges.listed() is not None and backend.name in ANY_ORDER:
        rng = torch.Generator().manual_seed(number)
        with _setting(2):
            order = torch.randperm(problem.graph.num_edges, generator=rng)
            yield "orders of edges", bits_of(problem, backend, order)
    if backend.name in ANY_THREADS:
        with _setting(1):
            yield "numbers of threads", bits_of(problem, backend)


def differing(first: Bits, second: Bits) -> list[str]:
    """The names of results that differ in a bit, the sign of a zero too; a NaN differs from itself."""
    return [
        name
        for name, x in first.items()
        if not (torch.equal(x, second[name]) and torch.equal(x.signbit(), second[name].signbit()))
    ]


def _measure(count: int, tell: Tell) -> Measured:
    def check(problem: Problem, name: str) -> Iterator[Finding]:
        with _setting(2):
            first = bits_of(problem, BACKENDS[name])
        for number in range(count):
            for way, second in variations(problem, BACKENDS[name], number):
                wrong = differing(first, second)
                yield way, 0.0, f"{way}: {', '.join(wrong)} differ" if wrong else ""

    tally = run_cases(calls().items(), usual_backends(), check, tell)
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
