"""F7: compiled programs have no graph break and are few, operators pass opcheck, and exported programs work.

``torch.compile(fullgraph=True)`` gives values and gradients equal to eager ones:

* A layer takes an ``edge_index`` as an input. At most two programs serve all numbers of tokens and edges,
  and two more serve the sizes 0 and 1, which compilers treat as constants.
* A call over a :class:`TokenGraph` has the graph as a constant. Each graph is compiled once, however often it
  is passed, and as few programs serve all numbers of samples.

Operators that check and choose edges pass ``opcheck`` here; ``tests/backends`` checks those that compute.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend

from gnn_attention import patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.measure import FLOAT64_RTOL
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import FORMS

SIZES = 12  # the number of sizes that the programs must serve
MAX_PROGRAMS = 2  # the most programs that may be compiled for them
WIDTH, NODES = 6, 7
LIST_GRAPH = TokenGraph.from_edges(torch.tensor([[4, 0, 6, 4, 2], [0, 1, 1, 5, 6]]), NODES)
GRAPHS = (
    patterns.window(NODES, 3),
    patterns.tree([-1, 0, 0, 1, 1, 2, 2]),
    LIST_GRAPH,
    TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= h), NODES, heads=2),
)


class CountingCompiler:
    """A compiler that counts its programs, and runs them and their gradients as they were traced."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, program: Any, inputs: Sequence[Any]) -> Any:
        self.programs += 1
        return lookup_backend("aot_eager")(program, list(inputs))


def _assert_same(
    run: Callable[..., Tensor],
    program: Callable[..., Tensor],
    inputs: Sequence[Any],
    leaves: Iterable[Tensor] = (),
) -> None:
    """Assert that outputs and gradients are equal up to 1e-12 of the largest number."""
    parameters = [*(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()), *leaves]
    results = []
    for function in (run, program):
        out = function(*inputs)
        loss = out.square().sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        results.append([out, *gradients])
    allowed = FLOAT64_RTOL * max(
        (float(x.detach().abs().max()) for x in results[0] if x.numel()), default=0.0
    )
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=allowed)


def _assert_few_programs(
    run: Callable[..., Tensor], inputs_of: Callable[[int], Sequence[Any]], leaves: Iterable[Tensor] = ()
) -> None:
    """Run a compiled function for a dozen sizes in a random order, then for 0 and 1, and count its programs."""
    compiler = CountingCompiler()
    leaves = list(leaves)
    program = torch.compile(run, fullgraph=True, backend=compiler)
    for size in random.Random(0).sample(range(2, 2 + SIZES), SIZES):
        _assert_same(run, program, inputs_of(size), leaves)
    assert compiler.programs <= MAX_PROGRAMS, f"{compiler.programs} programs for {SIZES} sizes"
    for size in (0, 1):
        _assert_same(run, program, inputs_of(size), leaves)
    assert compiler.programs <= 2 * MAX_PROGRAMS, f"{compiler.programs} programs with 0 and 1"


def _edges_as_an_input(form: str) -> None:
    layer = _layer(form)
    _assert_few_programs(layer, lambda n: (_numbers(n, WIDTH), _edges(n)), layer.parameters())


def _any_number_of_samples(backend: str) -> None:
    options: dict[str, Any] = {} if backend == "mixed" else {"score_mod": score_mods.softcap(2.0)}
    _assert_few_programs(partial(_attend, GRAPHS[0] | LIST_GRAPH, backend=backend, **options), _qkv)


def _graphs_as_constants(backend: str) -> None:
    """Pass graphs of equal size in one order and in reverse: each is compiled once."""
    compiler = CountingCompiler()
    program = torch.compile(partial(_attend, backend=backend), fullgraph=True, backend=compiler)
    for graph in (*GRAPHS, *GRAPHS[::-1]):
        _assert_same(partial(_attend, backend="reference"), program, (graph, *_qkv(2)))
    assert compiler.programs == len(GRAPHS), f"{compiler.programs} programs for {len(GRAPHS)} graphs"


def _export(form: str) -> None:
    """Export a layer for any numbers of tokens and edges, save it, load it and run it."""
    layer = _layer(form)
    file = io.BytesIO()
    tokens, edges = (torch.export.Dim(name, min=2, max=4096) for name in ("tokens", "edges"))

    def inputs(n: int) -> tuple[Tensor, ...]:
        return _numbers(n, WIDTH).detach(), _edges(n)

    exported_program = torch.export.export(layer, inputs(9), dynamic_shapes=({0: tokens}, {1: edges}))
    torch.export.save(exported_program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for n in (9, 2, 3, 17, 60):
        expected = layer(*inputs(n))
        allowed = FLOAT64_RTOL * float(expected.detach().abs().max())
        torch.testing.assert_close(module(*inputs(n)), expected, rtol=0, atol=allowed)


def _attend(graph: TokenGraph, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = attend(q, k, v, graph, **options)
    return out


def _numbers(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


def _qkv(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    return _numbers(samples, 2, NODES, 4), _numbers(samples, 1, NODES, 4), _numbers(samples, 1, NODES, 3)


def _edges(n: int) -> Tensor:
    """Return edges in no order, at least two if there are two tokens; the last receiver is isolated."""
    rng = random.Random(n)
    pairs = [
        (src, dst)
        for dst in range(n - 1)
        for src in range(n)
        if rng.random() < 0.4 or src == dst or (src, dst) == (1, 0)
    ]
    rng.shuffle(pairs)
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def _layer(form: str) -> MessagePassingAttention:
    heads = StandardHeads(WIDTH, 2, 3, 2, num_kv_heads=1, bias=True).double()
    for number, parameter in enumerate(heads.parameters()):
        parameter.data = _numbers(*parameter.shape).detach() / (number + 1)
    return MessagePassingAttention(FORMS[form](heads), backend="message_passing")


# ---- operators that check and choose edges inside programs

ROWS = torch.tensor([[0, -1], [1, 0]])
SETS = torch.tensor([[[[1, 1, 0]], [[-1, 0, 0]]]])
OPERATORS: dict[str, list[tuple[Any, ...]]] = {
    "edge_list": [(torch.tensor([[0, 2, 1], [1, 1, 2]]), 3, 3)],
    "chosen_edges": [
        (index, count, 2, True, False)
        for index in (ROWS, SETS)
        for count in (None, torch.ones(index.shape[:-1], dtype=torch.int64))
    ],
    "chosen_blocks": [(ROWS, 2, 4, 4)],
}


def _opcheck(name: str) -> None:
    """Run the four tests of ``torch.library.opcheck``."""
    for arguments in OPERATORS[name]:
        torch.library.opcheck(getattr(torch.ops.gnn_attention, name).default, arguments)


# ---- the guarantee

CASES: list[tuple[Callable[[str], None], str]] = [
    (_edges_as_an_input, "standard"),
    (_graphs_as_constants, "rows"),
    (_any_number_of_samples, "tiles"),
    (_export, "standard"),
    *((_opcheck, name) for name in OPERATORS),
    (_edges_as_an_input, "factored"),
    (_edges_as_an_input, "merged"),
    (_graphs_as_constants, "dense"),
    (_graphs_as_constants, "auto"),
    (_any_number_of_samples, "rows"),
    (_any_number_of_samples, "mixed"),
]


def _check(run: Callable[[], None], subject: str) -> Iterator[Finding]:
    """Run a case; a graph break, too many programs or a wrong export raises."""
    torch.compiler.reset()
    try:
        run()
    finally:
        torch.compiler.reset()
    yield "case", 0.0, ""


def _measure(count: int, tell: Tell) -> Verdict:
    names = (f"{check.__name__[1:].replace('_', ' ')}, {subject}" for check, subject in CASES)
    runs = [partial(check, subject) for check, subject in CASES[:count]]
    tally = run_cases(zip(names, runs, strict=False), [""], _check, tell)
    value = f"{len(tally.failures)} of {len(runs)} cases failed"
    return tally.outcome(value, [("case", "")])


GUARANTEE = Guarantee(
    name="F7",
    promise=(
        "compiled without a break and rarely: edges as an input, graphs as constants; operators pass "
        "opcheck; exports serve"
    ),
    bar=(
        f"0 breaks; at most {MAX_PROGRAMS} programs for {SIZES} sizes, and {MAX_PROGRAMS} more for 0 and 1; opcheck passes; "
        f"exported, saved and loaded programs equal eager to {FLOAT64_RTOL:g} of the largest number"
    ),
    quick=6,
    full=len(CASES),
    measure=_measure,
)
