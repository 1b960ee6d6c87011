"""The methods that ``gnn-attention bench`` compares, and how one of them is weighed and timed on a graph.

Every peer first runs on a small graph of the same form. What it took there, scaled by pairs or edges, says
whether the large graph fits into memory and time; if not, the peer is skipped with that reason.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import convert
from gnn_attention._support import memory
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.neighbours import neighbours_of
from gnn_attention.verify.measure import Truth, gradients_of, judge, worst_errors
from gnn_attention.verify.oracle import reordered
from gnn_attention.verify.truth import ORDERS

OURS = "attend"
PASSES = ("forward", "with backward")
HEADS, DIM, SMALL = 8, 64, 512
LONGEST = 3.0  # seconds that a call of a peer may take
ROUNDS = 15  # of samples, at most
COMPILING = 6.0  # seconds that must be left to begin a compilation
QUIET = "KINETO_LOG_LEVEL"  # torch's profiler writes to stderr unless this is set before its first use
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Anew:
    """A graph of ``make(tokens)`` that is made again for every call of ``attend``, as one chosen by data."""

    make: Callable[[int], TokenGraph]

    def __call__(self, tokens: int) -> TokenGraph:
        return self.make(tokens)


@dataclass(frozen=True, eq=False)
class Problem:
    """Normal inputs ``[1, H, T, D]`` of a graph, laid out as projections leave them."""

    graph: TokenGraph
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    build: Callable[[int], TokenGraph]

    @classmethod
    def draw(
        cls, build: Callable[[int], TokenGraph], tokens: int, device: torch.device, dtype: torch.dtype
    ) -> Problem:
        """The same numbers in every run."""
        graph = build(tokens)
        rng = torch.Generator(device).manual_seed(0)
        sizes = (graph.num_dst, graph.num_src, graph.num_src, graph.num_dst)
        q, k, v, grad_out = (
            torch.randn(1, n, HEADS, DIM, generator=rng, device=device, dtype=dtype).transpose(1, 2)
            for n in sizes
        )
        return cls(graph, q, k, v, grad_out, build)

    def call(self, function: Function, backward: bool) -> Callable[[], object]:
        """A call without gradients, or one with the gradients of q, k and v."""
        leaves = [x.detach().requires_grad_(backward) for x in (self.q, self.k, self.v)]
        if backward:
            return lambda: torch.autograd.grad(function(*leaves), leaves, self.grad_out)
        return torch.no_grad()(lambda: function(*leaves))


@dataclass(frozen=True)
class Method:
    """``prepare(problem)`` makes what a user would reuse (mask, edges, kernel) and returns f(q, k, v).

    ``grows``: what time and memory are proportional to; ``unsupported(problem, backward)``: why not to run.
    """

    prepare: Callable[[Problem], Function]
    grows: Callable[[TokenGraph], int] | None = None
    unsupported: Callable[[Problem, bool], str | None] = lambda problem, backward: None
    compiles: bool = False


def _attend(problem: Problem) -> Function:
    if isinstance(problem.build, Anew):
        return lambda q, k, v: attend(q, k, v, problem.build(k.shape[2]))
    return partial(attend, graph=problem.graph)


def _sdpa(problem: Problem) -> Function:
    if problem.graph.is_causal():
        return partial(functional.scaled_dot_product_attention, is_causal=True)
    return partial(functional.scaled_dot_product_attention, attn_mask=problem.graph.mask(problem.q.device))


def _flex(problem: Problem) -> Function:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph, device=problem.q.device)
    function: Function = partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask)
    return function


def _flex_unsupported(problem: Problem, backward: bool) -> str | None:
    if backward and problem.q.device.type == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    listed = problem.graph._listed is not None or neighbours_of(problem.graph.rule) is not None
    return "FlexAttention takes a rule, not an edge list" if listed else None


def _transformer_conv(problem: Problem) -> Function:
    """``propagate`` of PyG's TransformerConv on q, k and v alone, without its projections."""
    edges = problem.graph.edges_on(problem.q.device)
    layer = importlib.import_module("torch_geometric.nn").TransformerConv
    conv = layer(HEADS * DIM, DIM, HEADS, root_weight=False, bias=False)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = {name: x[0].transpose(0, 1) for name, x in (("query", q), ("key", k), ("value", v))}
        size = len(ends["key"]), len(ends["query"])
        out: Tensor = conv.propagate(edges, size=size, edge_attr=None, **ends)
        return out.transpose(0, 1).unsqueeze(0)

    return function


METHODS = {
    OURS: Method(_attend),
    "SDPA": Method(_sdpa, lambda graph: graph.num_dst * graph.num_src),
    "FlexAttention": Method(_flex, None, _flex_unsupported, compiles=True),
    "PyG TransformerConv": Method(
        _transformer_conv,
        lambda graph: graph.num_edges,
        lambda problem, _: "TransformerConv has one edge list for all heads" if problem.graph.heads else None,
    ),
}


def largest_errors(problem: Problem) -> dict[str, Any]:
    """Whether ``attend`` is right by the rule of verify: errors next to those of SDPA, from SDPA in float64.

    SDPA's are the worst of some orders of the channels, which are other roundings of the same problem.
    ``passed``, and of the ``worst`` number of output and gradients what was expected and what came.
    """
    masked = partial(functional.scaled_dot_product_attention, attn_mask=problem.graph.mask(problem.q.device))
    out, gradients = _results(problem, masked, torch.float64)
    attempts = (_results(problem, _sdpa_of_order(masked, n), problem.q.dtype) for n in range(ORDERS))
    yardstick = worst_errors(attempts, out, gradients)
    ours = _results(problem, _attend(problem), problem.q.dtype)
    found = judge(*ours, Truth(out, gradients, yardstick))
    return {"passed": found.passed, "worst": found.where}


def _sdpa_of_order(masked: Function, number: int) -> Function:
    return lambda q, k, v: masked(*reordered(number, q, k), v)


def _results(problem: Problem, function: Function, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: getattr(problem, name).detach().to(dtype, copy=True).requires_grad_() for name in "qkv"}
    out = function(*leaves.values())
    gradients = gradients_of(out, problem.grad_out, leaves)
    return out.detach().cpu(), {name: x.cpu() for name, x in gradients.items()}


class SkippedError(Exception):
    """Why a method is not measured; ``needs`` says what it would have taken, where that is the reason."""

    def __init__(self, reason: str, needs: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.needs = reason, needs


@dataclass
class _Candidate:
    """A method on a pass: its call, seconds by round, and the processor's, in all and of the system."""

    call: Callable[[], object]
    bytes: int
    first: float
    samples: dict[int, float] = field(default_factory=dict)
    busy: float = 0.0
    system: float = 0.0

    def sample(self, number: int, device: torch.device, times: int) -> None:
        before = os.times()
        self.samples[number] = _seconds(self.call, device, times)
        after = os.times()
        self.system += after.system - before.system
        self.busy += after.system - before.system + after.user - before.user


class Comparison:
    """One graph at its size, and a small one of the same form, within about ``seconds``."""

    def __init__(
        self,
        build: Callable[[int], TokenGraph],
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        seconds: float,
    ) -> None:
        self.graph, self.device, self.dtype, self.seconds = build(tokens), device, dtype, seconds
        self.build, self.small = build, Problem.draw(build, min(tokens, SMALL), device, dtype)

    @cached_property
    def large(self) -> Problem:
        """The graph with its inputs."""
        return Problem.draw(self.build, self.graph.num_src, self.device, self.dtype)

    def cases(self, names: Sequence[str], title: str, shown: Progress) -> list[dict[str, Any]]:
        """Both passes of every method."""
        ready = dict[str, list[_Candidate | SkippedError]]()
        for name in names:
            shown.begin(title + name)
            ready[name] = self._candidates(name)
        found = []
        for number, which in enumerate(PASSES):
            found += self._timed(which, {name: candidates[number] for name, candidates in ready.items()})
        return found

    def _candidates(self, name: str) -> list[_Candidate | SkippedError]:
        """For each pass what can be timed, or why not."""
        method, function = METHODS[name], None
        found: list[_Candidate | SkippedError] = []
        for backward in (False, True):
            try:
                self._check(name, method, backward)
                function = function or method.prepare(self.large)
                call = self.large.call(function, backward)
                call()  # plans and compilers
                start = time.perf_counter()
                peak = peak_bytes(call, self.device)
                found.append(_Candidate(call, peak, time.perf_counter() - start))
            except SkippedError as skipped:
                found.append(skipped)
            except Exception as error:  # a peer may fail in any way; it is reported, and the others go on
                why = f"{type(error).__name__}: {str(error).strip()[:150]}".splitlines()[0]
                found.append(SkippedError(f"{name} failed: {why}"))
        return found

    def _check(self, name: str, method: Method, backward: bool) -> None:
        """SkippedError where it is unsupported, or needs too much by what the small graph took."""
        reason = method.unsupported(self.large, backward)
        if reason is not None:
            raise SkippedError(reason)
        if method.compiles and self.seconds < COMPILING:
            raise SkippedError(f"{name} is compiled for each graph, and the minute is over")
        if method.grows is None or self.small.graph.num_src == self.graph.num_src:
            return
        call = self.small.call(method.prepare(self.small), backward)
        call()
        factor = method.grows(self.graph) / max(method.grows(self.small.graph), 1)
        needed, room = factor * peak_bytes(call, self.device), _room(self.device)
        if needed > room:
            size = f"{needed / 2**30:,.0f} GiB"
            raise SkippedError(f"{name} needs about {size}, {room / 2**30:,.1f} GiB are free", size)
        seconds = factor * _seconds(call, self.device)
        if seconds > LONGEST:
            took = f"{seconds:.2g} s"
            raise SkippedError(f"a call of {name} takes about {took}, the limit is {LONGEST:g}", took)

    def _timed(self, which: str, ready: dict[str, _Candidate | SkippedError]) -> list[dict[str, Any]]:
        """Interleaved rounds, so that a ratio is of two times taken one after the other."""
        candidates = [one for one in ready.values() if isinstance(one, _Candidate)]
        once = sum(max(one.first, 0.01) for one in candidates)
        rounds = int(min(ROUNDS, max(1, self.seconds / 4 / max(once, 1e-9))))
        for number in range(rounds):
            for one in candidates:
                times = max(1, int(0.01 / max(one.first, 1e-7)))
                one.sample(number, self.device, times)
        return [self._case(which, name, one, ready[OURS]) for name, one in ready.items()]

    def _case(
        self, which: str, name: str, one: _Candidate | SkippedError, ours: _Candidate | SkippedError
    ) -> dict[str, Any]:
        place = {"pass": which, "method": name}
        if isinstance(one, SkippedError):
            return {**place, "status": "skipped", "reason": one.reason, "needs": one.needs}
        seconds = statistics.median(one.samples.values())
        system = one.system / one.busy if one.busy else 0.0
        found = {**place, "status": "measured", "seconds": seconds, "bytes": one.bytes, "system": system}
        if isinstance(ours, SkippedError):
            return {**found, "time_ratio": None, "memory_ratio": None}
        if name == OURS:
            call = AttentionCall.checked(self.large.q, self.large.k, self.large.v, self.graph)
            found["backend"] = choose(call).name
        ratio = statistics.median(one.samples[number] / ours.samples[number] for number in one.samples)
        return {**found, "time_ratio": ratio, "memory_ratio": one.bytes / max(ours.bytes, 1)}


def _seconds(call: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Of one call; on a GPU until it is done."""
    # torch.utils.benchmark.Timer would call it twice more before every sample: too long for a slow peer
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _room(device: torch.device) -> float:
    """Bytes that may be taken: not the last fifth of what is free."""
    return 0.8 * (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available())


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """What a call takes at most beyond what was there before, results included.

    >>> peak_bytes(lambda: torch.ones(1000).add(1.0).sum(), torch.device("cpu")) >= 8000
    True
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault(QUIET, "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events: Any = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak: int = max([0, *accumulate(change for _, change in changes)])
    return peak
