"""F7: programs without a break that are compiled rarely, operators that torch knows well, and exports that
serve from disk.

What is promised of ``torch.compile(fullgraph=True)``, values and gradients equal to eager ones:

* a layer over an ``edge_index`` that is an input of the program: any numbers of tokens and edges, in at most
  two programs, and two more for 0 and 1, which compilers take for constants (what PyG's ``EdgeIndex`` tells
  about its numbers is compared too, so that each of its sizes is a program of its own: give
  ``edge_index.as_tensor()``);
* a call or a layer over a :class:`TokenGraph`: the graph is a constant of its program, so that each graph is
  compiled once, however often it comes, and serves any number of samples in as many programs.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend

from gnn_attention import patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.measure import EXACT
from tests.guarantees import operators
from tests.guarantees.guarantee import Guarantee, Measured, Tell

LENGTHS, FEW = 32, 2  # sizes that a program serves, and programs that may be made for them
BACKENDS = ("dense", "rows", "tiles", "mixed", "reference", "auto")
FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}
Run = Callable[..., Tensor]
WIDTH, NODES = 6, 7
GRAPHS = (
    patterns.window(NODES, 3),
    patterns.causal(NODES),
    patterns.tree([-1, 0, 0, 1, 1, 2, 2]),
    TokenGraph.from_edges(torch.tensor([[4, 0, 6, 4, 2], [0, 1, 1, 5, 6]]), NODES),
    TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= h), NODES, heads=2),
)


@dataclass(frozen=True)
class CompilationCase:
    """A promise and what it is tried on; :meth:`problem` says what is wrong, or None.

    >>> print(CompilationCase("lengths", "standard, dynamic=True"))
    lengths: standard, dynamic=True
    """

    kind: str
    of: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.of}"

    def problem(self) -> str | None:
        """What is raised or differs, in a line."""
        torch.compiler.reset()
        try:
            fault = KINDS[self.kind](self.of)
        except Exception as error:  # a break, a limit, a wrong export: all of them fail the case
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            torch.compiler.reset()
        return fault


class Counted:
    """A compiler that counts its programs and runs them as they are traced, gradients too."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, program: Any, inputs: Sequence[Any]) -> Any:
        self.programs += 1
        return lookup_backend("aot_eager")(program, list(inputs))


def _lengths(of: str) -> str | None:
    """32 numbers of tokens and edges in a random order, then 0 and 1 token."""
    form, how = of.split(", ")
    layer = _layer(form)
    dynamic = True if how == "dynamic=True" else None
    sizes = random.Random(0).sample(range(2, 2 + LENGTHS), LENGTHS)

    def given(n: int) -> tuple[Any, ...]:
        return _numbers(n, WIDTH), _edges(n)

    return _few_programs(layer, sizes, (0, 1), given, list(layer.parameters()), dynamic)


def _batches(of: str) -> str | None:
    graph = GRAPHS[0] | GRAPHS[3]
    more: dict[str, Any] = {} if of == "mixed" else {"score_mod": score_mods.softcap(2.0)}
    run = partial(_attended, graph, backend=of, **more)
    sizes = random.Random(0).sample(range(2, 2 + LENGTHS), LENGTHS)
    return _few_programs(run, sizes, (0, 1), _qkv, [], None)


def _few_programs(
    run: Callable[..., Tensor],
    sizes: Sequence[int],
    special: Sequence[int],
    given: Callable[[int], tuple[Any, ...]],
    leaves: list[Tensor],
    dynamic: bool | None,
) -> str | None:
    counted = Counted()
    compiled = torch.compile(run, fullgraph=True, backend=counted, dynamic=dynamic)
    for named, allowed in ((sizes, FEW), (special, 2 * FEW)):
        for size in named:
            fault = _differs(run, compiled, given(size), leaves)
            if fault is not None:
                return f"size {size}: {fault}"
        if counted.programs > allowed:
            return f"{counted.programs} programs for {len(named)} sizes, at most {allowed}"
    return None


def _graphs(of: str) -> str | None:
    """Five graphs of equal size, there and back: each is compiled once."""
    counted = Counted()
    compiled = torch.compile(partial(_attended, backend=of), fullgraph=True, backend=counted)
    for graph in (*GRAPHS, *GRAPHS[::-1]):
        fault = _differs(partial(_attended, backend="reference"), compiled, (graph, *_qkv(2)), [])
        if fault is not None:
            return f"{graph!r}: {fault}"
    return (
        None if counted.programs == len(GRAPHS) else f"{counted.programs} programs for {len(GRAPHS)} graphs"
    )


def _differs(
    run: Callable[..., Tensor], other: Callable[..., Tensor], given: tuple[Any, ...], leaves: list[Tensor]
) -> str | None:
    """In what ``other`` is not equal to ``run``: output or a gradient; NaN is equal to nothing."""
    inputs = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()] + leaves
    found, wanted = other(*given), run(*given)
    if not _equal([found], [wanted]):
        return "another output than eager"
    if not wanted.numel():
        return None
    gradients = [
        torch.autograd.grad(out.square().sum(), inputs, allow_unused=True) for out in (found, wanted)
    ]
    return None if _equal(*gradients) else "other gradients than eager"


def _equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    """Up to 1e-12 of the largest number of all, as float64 is allowed; None is a gradient of 0."""
    allowed = EXACT * max(
        (float(x.detach().abs().max()) for x in wanted if x is not None and x.numel()), default=0.0
    )
    return all(_off(a, b) <= allowed for a, b in zip(found, wanted, strict=True))


def _off(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return max(
            (float(x.detach().abs().max()) for x in (a, b) if x is not None and x.numel()), default=0.0
        )
    if a.shape != b.shape:
        return math.inf
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def _operator(of: str) -> str | None:
    calls = operators.recorded()[of]
    if not calls:
        return "no call of it is known: add one to guarantees.operators"
    outcomes = operators.checks(of, calls)
    wrong = [f"{test}: {said}" for test, said in outcomes.items() if said != "SUCCESS"]
    return "; ".join(wrong) or (None if len(outcomes) == 4 else f"{len(outcomes)} tests, not 4")


class _Exported(nn.Module):
    """A function of tensors as a module, with the modules that it calls."""

    def __init__(self, run: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
        """AttentionCall it; torch 2.9 exports no ``*given`` whose sizes may change."""
        return self.run(first, second) if third is None else self.run(first, second, third)


def _export(of: str) -> str | None:
    """A program made for some sizes, saved and loaded, on others: tokens and edges, or samples."""
    any_size = partial(torch.export.Dim, min=2, max=4096)
    if of in FORMS:
        layer = _layer(of)
        run, dims = _Exported(layer, layer), [{0: any_size("tokens")}, {1: any_size("edges")}]
        given: Callable[[int], tuple[Tensor, ...]] = lambda n: (_numbers(n, WIDTH).detach(), _edges(n))  # noqa: E731
    else:
        samples = any_size("samples")
        run, dims = _Exported(partial(_attended, GRAPHS[0], backend=of)), [{0: samples}] * 3
        given = lambda n: tuple(x.detach() for x in _qkv(n))  # noqa: E731
    loaded = _saved_and_loaded(torch.export.export(run, given(9), dynamic_shapes=tuple(dims)))
    wrong = [n for n in (9, 2, 3, 17, 60) if not _equal([loaded(*given(n))], [run(*given(n))])]
    return f"another output than eager for sizes {wrong}" if wrong else None


def _saved_and_loaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def _attended(graph: TokenGraph, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
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


KINDS: dict[str, Callable[[str], str | None]] = {
    "lengths": _lengths,
    "operator": _operator,
    "graphs": _graphs,
    "export": _export,
    "batches": _batches,
}


def cases() -> list[CompilationCase]:
    """Every case, one of each kind in turn, so that a few are of all kinds."""
    tried = {
        "lengths": [f"{form}, {how}" for how, form in product(("dynamic=True", "dynamic=None"), FORMS)],
        "operator": operators.on_this_machine(),
        "graphs": list(BACKENDS),
        "export": [*FORMS, *BACKENDS],
        "batches": list(BACKENDS),
    }
    ranked = [(number, kind, of) for kind, named in tried.items() for number, of in enumerate(named)]
    return [CompilationCase(kind, of) for _, kind, of in sorted(ranked, key=lambda one: one[0])]


def measure(count: int, tell: Tell) -> Measured:
    """The first ``count`` of :func:`cases`.

    >>> measure(0, print).holds
    False
    """
    chosen, failures = cases()[:count], []
    for case in chosen:
        tell(str(case))
        fault = case.problem()
        failures += [] if fault is None else [f"{case}: {fault}"]
    missing = [kind for kind in KINDS if not any(case.kind == kind for case in chosen)]
    numbers = ", ".join(f"{sum(case.kind == kind for case in chosen)} {kind}" for kind in KINDS)
    away = len(operators.names()) - len(operators.on_this_machine())
    value = f"{len(failures)} of {len(chosen)} cases failed ({numbers}); {away} operators launch kernels for CUDA: verify them there"
    return Measured(value, (*failures, *(f"nothing of the kind {kind} was measured" for kind in missing)))


GUARANTEE = Guarantee(
    name="F7",
    promise=(
        "compiled without a break and rarely: edges as an input, graphs as constants; operators pass "
        "opcheck; exports serve"
    ),
    bar=f"0 breaks; at most {FEW} programs for {LENGTHS} sizes, and {FEW} more for 0 and 1; opcheck 4 of 4 for every operator; "
    f"exported, saved and loaded programs equal eager to {EXACT:g} of the largest number",
    quick=5,
    full=len(cases()),
    measure=measure,
)
