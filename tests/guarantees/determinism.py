"""F8: the same call gives the same bits. Again and again, whatever lay in memory before; with edges listed in
another order; and in the backends that promise it on one thread as on two.

What is compared is the output, lse, and every gradient, with torch's deterministic algorithms and without.
Calls are large enough for torch to share them among threads, of which there are two, whatever else is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import relative_bias
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import usual_backends

TOKENS, SHORT, DIM, VALUE_DIM, REACH, WIDTH = 128, 70, 24, 17, 6, 40
BATCH, HEADS, KV_HEADS = 1, 3, 1  # an odd number of heads: two threads meet inside one
ANY_ORDER = ("rows", "reference", "dense")  # the same bits for every order of a list of edges
ANY_THREADS = ("rows", "reference")  # the same bits on one thread and on two
FEW = 10  # of the repeats: in how many the order of edges, and the number of threads, change
Bits = dict[str, Tensor]


def _graphs() -> dict[str, TokenGraph]:
    rng = torch.Generator().manual_seed(0)
    listed = (torch.rand(TOKENS, TOKENS, generator=rng) < 0.75).nonzero().t()
    return {
        "causal": patterns.causal(TOKENS),
        "window and sinks": patterns.window(SHORT, 20) | patterns.sinks(SHORT, 3),
        "documents": patterns.documents([SHORT // 3, SHORT - SHORT // 3]),
        "list": convert.from_edge_index(
            listed[:, torch.randperm(listed.shape[1], generator=rng)], TOKENS, TOKENS
        ),
    }


@dataclass(frozen=True, eq=False)
class _Call:
    """A graph, a dtype and what is added to the logits ("plain", "table", ...); or "walk", a layer's own."""

    where: str
    graph: TokenGraph
    dtype: torch.dtype
    added: str

    @cached_property
    def leaves(self) -> Mapping[str, Tensor]:
        rng, edges, tokens = torch.Generator().manual_seed(1), self.graph.num_edges, self.graph.num_src
        shapes: dict[str, tuple[int, ...]] = (
            {"x": (BATCH, tokens, WIDTH)}
            if self.added == "walk"
            else {
                "q": (BATCH, HEADS, tokens, DIM),
                "k": (BATCH, KV_HEADS, tokens, DIM),
                "v": (BATCH, KV_HEADS, tokens, VALUE_DIM),
            }
        )
        further = {"table": (HEADS, 2 * REACH + 1), "bias": (HEADS, edges), "sinks": (HEADS,)}
        shapes |= {self.added: further[self.added]} if self.added in further else {}
        return {
            name: torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)
            for name, shape in shapes.items()
        }

    def bits(self, backend: Backend | None, order: Tensor | None = None) -> Bits:
        """Output, lse and gradients; with the edges in another order, those of a bias in the order given."""
        inputs = {name: x.clone().requires_grad_() for name, x in self.leaves.items()}
        call = self if order is None else replace(self, graph=_reordered(self.graph, order))
        results = call._walked(inputs) if backend is None else call._attended(inputs, backend, order)
        along = [torch.ones_like(x) for x in results.values()]
        grads = torch.autograd.grad(list(results.values()), list(inputs.values()), along)
        named = {f"gradient of {name}": grad for name, grad in zip(inputs, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()} | named

    def _attended(self, inputs: Mapping[str, Tensor], backend: Backend, order: Tensor | None) -> Bits:
        q, k, v = (inputs[name] for name in "qkv")
        mod, bias = relative_bias(inputs["table"]) if "table" in inputs else None, inputs.get("bias")
        bias = bias if bias is None or order is None else bias[:, order]
        out, info = attend(
            q, k, v, self.graph, None, mod, bias, inputs.get("sinks"), backend=backend, return_info=True
        )
        return {"out": out.square(), "lse": info.lse}

    def _walked(self, inputs: Mapping[str, Tensor]) -> Bits:
        heads = StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, KV_HEADS, bias=True)
        rng = torch.Generator().manual_seed(2)
        for parameter in heads.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng) * WIDTH**-0.5
        layer = MessagePassingAttention(heads.to(self.dtype), backend="message_passing")
        return {"out": layer(inputs["x"], self.graph).square()}

    def __str__(self) -> str:
        return f"{self.added} on {self.where}, {str(self.dtype).removeprefix('torch.')}"


def _reordered(graph: TokenGraph, order: Tensor) -> TokenGraph:
    return convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src)


def _calls() -> list[_Call]:
    """Every graph, dtype and option at least once."""
    graphs = _graphs()
    chosen = (
        ("causal", torch.float32, "plain"),
        ("window and sinks", torch.float64, "table"),
        ("documents", torch.bfloat16, "sinks"),
        ("list", torch.float32, "bias"),
        ("list", torch.float32, "table"),
        ("list", torch.float32, "walk"),
    )
    return [_Call(name, graphs[name], dtype, added) for name, dtype, added in chosen]


def _backends(call: _Call) -> dict[str, Backend | None]:
    if call.added == "walk":
        return {"walk": None}
    return {**usual_backends()}


@contextlib.contextmanager
def _setting(threads: int, deterministic: bool = False) -> Iterator[None]:
    """So many threads, and deterministic algorithms or not; as it was afterwards."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def _stirred(number: int) -> None:
    """Leave other numbers in the memory that the next call is given."""
    for power in range(8, 22):
        torch.full((2**power + 64 * (number % 7),), torch.nan)


def _again(call: _Call, backend: Backend | None, count: int) -> Iterator[tuple[str, Bits, Bits]]:
    for deterministic in (False, True) if count else ():
        flag = "with deterministic algorithms" if deterministic else "as it is"
        with _setting(2, deterministic):
            first = call.bits(backend)
            for number in range(count):
                _stirred(number)
                yield f"repeat {number} {flag}", first, call.bits(backend)


def _in_another_order(call: _Call, backend: Backend | None, count: int) -> Iterator[tuple[str, Bits, Bits]]:
    if not count or call.where != "list" or backend is None or backend.name not in ANY_ORDER:
        return
    with _setting(2):
        first = call.bits(backend)
        for number in range(-(-count // FEW)):
            rng = torch.Generator().manual_seed(number)
            yield (
                f"order {number}",
                first,
                call.bits(backend, torch.randperm(call.graph.num_edges, generator=rng)),
            )


def _on_threads(call: _Call, backend: Backend | None, count: int) -> Iterator[tuple[str, Bits, Bits]]:
    if backend is None or backend.name not in ANY_THREADS:
        return
    for number in range(-(-count // FEW)):
        found = []
        for threads in (1, 2):
            with _setting(threads):
                found.append(call.bits(backend))
        yield f"one thread and two, {number}", found[0], found[1]


Promise = Callable[[_Call, "Backend | None", int], Iterator[tuple[str, Bits, Bits]]]
PROMISES: dict[str, Promise] = {
    "repeats": _again,
    "orders of edges": _in_another_order,
    "numbers of threads": _on_threads,
}


def _measure(count: int, tell: Tell) -> Measured:
    failures: list[str] = []
    equal, seen, names = dict.fromkeys(PROMISES, 0), dict.fromkeys(PROMISES, 0), set[tuple[str, str]]()
    for call in _calls():
        for name, backend in _backends(call).items():
            tell(f"{call}, {name}")
            for promise in PROMISES:
                wrong, done = _broken(promise, call, name, backend, count)
                failures += wrong[:3]
                seen[promise], equal[promise] = seen[promise] + done, equal[promise] + done - len(wrong)
                names |= {(promise, name)} if done else set()
    failures += _unseen(names)
    value = ", ".join(f"{equal[promise]:,}/{seen[promise]:,} {promise}" for promise in PROMISES)
    return Measured(f"{value} gave the same bits, of outputs, lse and gradients", tuple(failures))


def _broken(
    promise: str, call: _Call, name: str, backend: Backend | None, count: int
) -> tuple[list[str], int]:
    """Every comparison in which a bit differs, and how many there were."""
    wrong, done = [], 0
    try:
        for what, one, other in PROMISES[promise](call, backend, count):
            done += 1
            names = [key for key in one if not _same_bits(one[key], other[key])]
            wrong += [f"F8, {call}, {name}, {what}: {', '.join(names)} differ"] if names else []
    except RefusalError:
        return [], 0
    except Exception as error:  # whatever it raises is a failure
        return [
            *wrong,
            f"F8, {call}, {name}, {promise}: {type(error).__name__}: {str(error)[:200]}",
        ], done + 1
    return wrong, done


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """The sign of a zero too; a NaN is no result."""
    return bool(torch.equal(one, other) and torch.equal(one.signbit(), other.signbit()))


def _unseen(seen: set[tuple[str, str]]) -> list[str]:
    usual = list(usual_backends())
    wanted = {"repeats": (*usual, "walk"), "orders of edges": ANY_ORDER, "numbers of threads": ANY_THREADS}
    pairs = ((promise, name) for promise, names in wanted.items() for name in names)
    return [
        f"F8: nothing was measured of {name} under {promise}"
        for promise, name in pairs
        if (promise, name) not in seen
    ]


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
    full=100,
    measure=_measure,
)
