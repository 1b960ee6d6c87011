"""F7: programs without a graph break that are compiled rarely, operators that pass opcheck, exports that serve.

``torch.compile(fullgraph=True)`` gives values and gradients equal to eager ones:

* a layer over an ``edge_index`` that is an input of the program, for any numbers of tokens and edges, in at
  most two programs, and two more for 0 and 1, which compilers take for constants;
* a call over a :class:`TokenGraph`, which is a constant of its program: each graph is compiled once, however
  often it comes, and serves any number of samples in as many programs.

torch lists the operators of the package, so that one without a call here is a failure. Their arguments are
recorded while public functions run.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend

from gnn_attention import patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.measure import EXACT
from tests.guarantees.gpu_checks import Recorder, leaf_like
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import FORMS

SIZES, FEW = 12, 2  # sizes that a program serves, and programs that may be made for them
WIDTH, NODES = 6, 7
LISTED = TokenGraph.from_edges(torch.tensor([[4, 0, 6, 4, 2], [0, 1, 1, 5, 6]]), NODES)
GRAPHS = (
    patterns.window(NODES, 3),
    patterns.tree([-1, 0, 0, 1, 1, 2, 2]),
    LISTED,
    TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= h), NODES, heads=2),
)
OF_CUDA = ("flash_", "triton_")  # operators that launch kernels for CUDA, which are checked there


class CountingCompiler:
    """A compiler that counts its programs and runs them as they are traced, gradients too."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, program: Any, inputs: Sequence[Any]) -> Any:
        self.programs += 1
        return lookup_backend("aot_eager")(program, list(inputs))


def _assert_same(
    run: Callable[..., Tensor],
    compiled: Callable[..., Tensor],
    inputs: Sequence[Any],
    leaves: Iterable[Tensor] = (),
) -> None:
    """Outputs and gradients are equal up to 1e-12 of the largest number."""
    learners = [*(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()), *leaves]
    results = []
    for function in (run, compiled):
        out = function(*inputs)
        loss = out.square().sum()
        gradients = torch.autograd.grad(loss, learners, allow_unused=True, materialize_grads=True)
        results.append([out, *gradients])
    allowed = EXACT * max((float(x.detach().abs().max()) for x in results[0] if x.numel()), default=0.0)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=allowed)


def _assert_few_programs(
    run: Callable[..., Tensor], inputs_of: Callable[[int], Sequence[Any]], leaves: Iterable[Tensor] = ()
) -> None:
    """A dozen sizes in a random order, then 0 and 1."""
    compiler, leaves = CountingCompiler(), list(leaves)
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    for size in random.Random(0).sample(range(2, 2 + SIZES), SIZES):
        _assert_same(run, compiled, inputs_of(size), leaves)
    assert compiler.programs <= FEW, f"{compiler.programs} programs for {SIZES} sizes"
    for size in (0, 1):
        _assert_same(run, compiled, inputs_of(size), leaves)
    assert compiler.programs <= 2 * FEW, f"{compiler.programs} programs with 0 and 1"


def _edges_as_an_input(form: str) -> None:
    layer = _layer(form)
    _assert_few_programs(layer, lambda n: (_numbers(n, WIDTH), _edges(n)), layer.parameters())


def _any_number_of_samples(backend: str) -> None:
    more: dict[str, Any] = {} if backend == "mixed" else {"score_mod": score_mods.softcap(2.0)}
    _assert_few_programs(partial(_attend, GRAPHS[0] | LISTED, backend=backend, **more), _qkv)


def _graphs_as_constants(backend: str) -> None:
    """Graphs of equal size, there and back: each is compiled once."""
    compiler = CountingCompiler()
    compiled = torch.compile(partial(_attend, backend=backend), fullgraph=True, backend=compiler)
    for graph in (*GRAPHS, *GRAPHS[::-1]):
        _assert_same(partial(_attend, backend="reference"), compiled, (graph, *_qkv(2)))
    assert compiler.programs == len(GRAPHS), f"{compiler.programs} programs for {len(GRAPHS)} graphs"


class _Call(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(GRAPHS[0], q, k, v, backend="tiles")


def _export(what: str) -> None:
    """A layer for any numbers of tokens and edges, or a call for any number of samples, saved and loaded."""
    run, file = _Call() if what == "call" else _layer(what), io.BytesIO()
    one, two = (torch.export.Dim(name, min=2, max=4096) for name in ("one", "two"))
    dims: Any = ({0: one}, {0: one}, {0: one}) if what == "call" else ({0: one}, {1: two})

    def inputs(n: int) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in (_qkv(n) if what == "call" else (_numbers(n, WIDTH), _edges(n))))

    torch.export.save(torch.export.export(run, inputs(9), dynamic_shapes=dims), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (9, 2, 3, 17, 60):
        wanted = run(*inputs(n))
        allowed = EXACT * float(wanted.detach().abs().max())
        torch.testing.assert_close(loaded(*inputs(n)), wanted, rtol=0, atol=allowed)


def _attend(graph: TokenGraph, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = attend(q, k, v, graph, **options)
    return out


def _numbers(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


def _qkv(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    return _numbers(samples, 2, NODES, 4), _numbers(samples, 1, NODES, 4), _numbers(samples, 1, NODES, 3)


def _edges(n: int) -> Tensor:
    """A list in no order, of two edges or more for two tokens or more; the last row is isolated."""
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


# ---- operators


def operators() -> list[str]:
    """The operators of the package that run on this machine, as torch knows them."""
    prefix = "gnn_attention::"
    names = {
        name.removeprefix(prefix).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
    }
    return sorted(name for name in names if not name.startswith(OF_CUDA))


@cache
def _recorded() -> dict[str, list[tuple[Any, ...]]]:
    """For each operator the arguments of some calls, forward and backward, with and without options."""
    with Recorder() as recorder:
        for call in _calls():
            call()
    arguments: dict[str, list[tuple[Any, ...]]] = {}
    for operator, given, _ in recorder.calls:
        arguments.setdefault(str(operator).split(".")[1], []).append(given)
    return arguments


def _opcheck(name: str) -> None:
    """The four tests of ``torch.library.opcheck`` on the recorded calls of an operator."""
    assert name in _recorded(), "no call of it is known: add one to tests.guarantees.compilation"
    for arguments in _recorded()[name]:
        inputs = tuple(leaf_like(x, "backward" not in name) for x in arguments)
        torch.library.opcheck(getattr(torch.ops.gnn_attention, name).default, inputs)


def _calls() -> Iterator[Callable[[], Any]]:
    graph, operators = patterns.window(6, 3) | patterns.sinks(6, 1), torch.ops.gnn_attention
    for backend in ("tiles", "rows", "mixed"):
        yield partial(_gradients, graph, backend=backend)
        yield partial(_gradients, graph, backend=backend, sink_logits=_numbers(2))
    yield partial(_gradients, graph, twice=True, backend="rows", bias=_numbers(graph.num_edges))
    softcap = score_mods.softcap(2.0)
    yield partial(_gradients, graph, twice=True, backend="rows", score_mod=softcap, sink_logits=_numbers(2))
    relative = score_mods.relative_bias(_numbers(2, 5))
    yield partial(_gradients, graph, backend="reference", score_mod=relative)
    # programs check and choose edges by operators
    yield partial(operators.edge_list, torch.tensor([[0, 2, 1], [1, 1, 2]]), 3, 3)
    for index in (torch.tensor([[0, -1], [1, 0]]), torch.tensor([[[[1, 1, 0]], [[-1, 0, 0]]]])):
        for count in (None, torch.ones(index.shape[:-1], dtype=torch.int64)):
            yield partial(operators.chosen_edges, index, count, 2, True, False)
    yield partial(operators.chosen_blocks, torch.tensor([[0, -1], [1, 0]]), 2, 4, 4)


def _gradients(graph: TokenGraph, twice: bool = False, **options: Any) -> None:
    q, k, v = (_numbers(2, heads, graph.num_dst, 4) for heads in (2, 1, 1))
    inputs = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    first = torch.autograd.grad(_attend(graph, q, k, v, **options).square().sum(), inputs, create_graph=twice)
    if twice:
        torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), inputs)


# ---- the guarantee

CASES: list[tuple[Callable[[str], None], str]] = [
    (_edges_as_an_input, "standard"),
    (_graphs_as_constants, "rows"),
    (_any_number_of_samples, "tiles"),
    (_export, "standard"),
    *((_opcheck, name) for name in operators()),
    (_edges_as_an_input, "factored"),
    (_edges_as_an_input, "merged"),
    (_graphs_as_constants, "dense"),
    (_graphs_as_constants, "auto"),
    (_any_number_of_samples, "rows"),
    (_any_number_of_samples, "mixed"),
    (_export, "call"),
]


def _measure(count: int, tell: Tell) -> Measured:
    failures = []
    for check, what in CASES[:count]:
        name = f"{check.__name__[1:].replace('_', ' ')}, {what}"
        tell(name)
        torch.compiler.reset()
        try:
            check(what)
        except Exception as error:  # a graph break, a limit, a wrong export: all of them fail the case
            failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            torch.compiler.reset()
    value = (
        f"{len(failures)} of {min(count, len(CASES))} cases failed; {len(operators())} operators are known"
    )
    return Measured(value, tuple(failures), () if count else ("no case was run",))


GUARANTEE = Guarantee(
    name="F7",
    promise=(
        "compiled without a break and rarely: edges as an input, graphs as constants; operators pass "
        "opcheck; exports serve"
    ),
    bar=(
        f"0 breaks; at most {FEW} programs for {SIZES} sizes, and {FEW} more for 0 and 1; opcheck passes for "
        f"every operator; exported, saved and loaded programs equal eager to {EXACT:g} of the largest number"
    ),
    quick=6,
    full=len(CASES),
    measure=_measure,
)
