"""F8: the same call gives the same bits, whatever memory held before.

Each call is repeated with torch's deterministic algorithms and without them. Backends that promise more are also
called with their edges in other orders, and on one thread and on two. The output, lse and every gradient are
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
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import usual_backends

TOKENS, SHORT, DIM, VALUE_DIM = 128, 70, 24, 17
HEADS = 3  # an odd number: two threads meet inside one head
ANY_ORDER = ("rows", "reference", "dense")  # the same bits for every order of a list of edges
ANY_THREADS = ("rows", "reference")  # the same bits on one thread and on two
Bits = Mapping[str, Tensor]


def _make_list() -> TokenGraph:
    """Return a graph of three quarters of all pairs, in no order."""
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
    """Return calls with every graph, dtype and option at least once, edge lists first."""
    window = patterns.window(SHORT, 20) | patterns.sinks(SHORT, 3)
    rows = [
        (_make_list(), "float32", "edge bias"),
        (_make_list(), "float32", "relative bias"),
        (patterns.causal(TOKENS), "float32", "plain"),
        (window, "float64", "relative bias"),
        (patterns.documents([SHORT // 3, SHORT - SHORT // 3]), "bfloat16", "sinks"),
    ]
    return {f"{row[0]!r}, {row[1]}, {row[2]}": _problem(*row) for row in rows}


def bits_of(problem: Problem, backend: Backend, order: Tensor | None = None) -> Bits:
    """Compute output, lse and gradients, with edges in ``order`` if given; a bias is reordered with its edge."""
    leaves, graph = make_leaves(problem.inputs), problem.graph
    inputs = dict(leaves)
    if order is not None:
        graph = convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src)
        inputs |= {"bias": inputs["bias"][..., order]} if "bias" in inputs else {}
    q, k, v = (inputs[name] for name in "qkv")
    out, info = attend(q, k, v, graph, backend=backend, return_info=True, **problem.options(inputs))
    results = {"out": out.square(), "lse": info.lse}
    directions = [torch.ones_like(x) for x in results.values()]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), directions)
    named_gradients = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in results.items()} | named_gradients


@contextlib.contextmanager
def _setting(threads: int, deterministic: bool = False) -> Iterator[None]:
    """Set the number of threads and deterministic algorithms inside a context, and restore both after it."""
    previous_threads = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)
        torch.use_deterministic_algorithms(was_deterministic)


def variations(problem: Problem, backend: Backend, number: int) -> Iterator[tuple[str, Bits]]:
    """Repeat a call in every way that promises the same bits; ``number`` is the seed of the order of edges."""
    for deterministic in (False, True):
        with _setting(2, deterministic):
            # The call will reuse the memory that these tensors fill with NaN.
            for power in range(8, 22):
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


def find_differences(first: Bits, second: Bits) -> list[str]:
    """Return the names of results that differ in any bit. Zeros of unequal sign differ, and so does any NaN."""
    return [
        name
        for name, x in first.items()
        if not (torch.equal(x, second[name]) and torch.equal(x.signbit(), second[name].signbit()))
    ]


def _measure(count: int, tell: Tell) -> Verdict:
    def check(problem: Problem, name: str) -> Iterator[Finding]:
        with _setting(2):
            first = bits_of(problem, BACKENDS[name])
        for number in range(count):
            for way, second in variations(problem, BACKENDS[name], number):
                names = find_differences(first, second)
                yield way, 0.0, f"{way}: {', '.join(names)} differ" if names else ""

    tally = run_cases(calls().items(), usual_backends(), check, tell)
    promises = {"repeats": usual_backends(), "orders of edges": ANY_ORDER, "numbers of threads": ANY_THREADS}
    words = (f"{tally.total(way) - tally.faults[way]:,}/{tally.total(way):,} {way}" for way in promises)
    value = f"{', '.join(words)} gave the same bits, of outputs, lse and gradients"
    return tally.outcome(value, [(way, name) for way, names in promises.items() for name in names])


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
