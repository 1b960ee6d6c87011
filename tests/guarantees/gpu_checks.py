"""What only a GPU shows of our kernels: the same bits thrice, a bound on memory, operators for compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu.formats import SIDE
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import OWN
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, VALUE_DIM, Check, Settings, verdict
from gnn_attention.verify.measure import gradients_of
from gnn_attention.verify.truth import Formula
from tests.guarantees.gpu_large import LARGE, TOKENS, LargeCase

REPEATS = 3
WORKSPACE = 64 * 2**20
MEMORY_TOKENS, MEMORY_HEADS, MEMORY_DIM = 65_536, 8, 64
OPERATOR_GRAPHS = ("window", "listed")


def gpu_checks(settings: Settings, tokens: int = TOKENS) -> Iterator[Check]:
    """Repeatability of our kernels on larger graphs in every dtype; their memory; their operators."""
    own = [backend for backend in settings.backends if backend.name.startswith(OWN)]
    for dtype in settings.dtypes:
        for large in LARGE.values():
            case = LargeCase(settings, large, DTYPES[dtype], tokens, large.listed)
            for backend in own:
                name = f"{large.name}, {tokens} tokens: {REPEATS} runs give the same bits"
                yield Check("repeat", backend.name, dtype, name, partial(_repeats, case, backend))
    for dtype in [name for name in settings.dtypes if name in ("bfloat16", "float32")]:
        for hubs in (False, True):
            for backend in own:
                name = (
                    f"{'hubs' if hubs else 'random'}, {MEMORY_TOKENS} tokens: its graph, results and 64 MiB"
                )
                yield Check(
                    "memory",
                    backend.name,
                    dtype,
                    name,
                    partial(_memory, settings, DTYPES[dtype], hubs, backend),
                )
    for dtype in [name for name in settings.dtypes if name in ("float64", "float32")]:
        for graph in [name for name in OPERATOR_GRAPHS if name in settings.graphs]:
            for backend in own:
                given = settings, DTYPES[dtype]
                run = partial(_opcheck, *given, GRAPHS[graph].graph, backend)
                yield Check("operators", backend.name, dtype, f"opcheck on {graph}", run)
                run = partial(_compiled, *given, GRAPHS[graph], backend)
                yield Check("operators", backend.name, dtype, f"compiled as one graph on {graph}", run)


def _repeats(case: LargeCase, backend: Backend) -> Mapping[str, Any]:
    """Bit for bit."""
    first = results_of(case, backend)
    for _ in range(REPEATS - 1):
        for name, again in results_of(case, backend).items():
            if not torch.equal(first[name].nan_to_num(0.5), again.nan_to_num(0.5)):
                return {"passed": False, "message": f"{name} differs from run to run"}
    return {"passed": True}


def results_of(case: LargeCase, backend: Backend) -> dict[str, Tensor]:
    """Output, lse and every gradient."""
    inputs = case.inputs(case.dtype)
    out, info = case.attended(backend, inputs, return_info=True)
    return {"output": out.detach(), "lse": info.lse.detach(), **gradients_of(out, case.direction, inputs)}


def _memory(settings: Settings, dtype: torch.dtype, hubs: bool, backend: Backend) -> Mapping[str, Any]:
    """Forward: outputs and lse. Backward: gradients, and some numbers by receiver and head. Cached: what the
    graph needs.
    """
    # tiles are for blocks: they refuse edges that are scattered
    graph = _random_graph(MEMORY_TOKENS, hubs, SIDE if backend.name.endswith("tiles") else 1)
    q, k, v, direction = _random_inputs(settings, dtype)
    call = AttentionCall.checked(q, k, v, graph)
    outputs = q.numel() * q.element_size() + 8 * q[..., 0].numel()
    storage = backend.bytes_needed(call) if backend.bytes_needed is not None else 0
    allowed = {
        "graph": storage + WORKSPACE // 16,
        "forward": outputs + WORKSPACE,
        "backward": 4 * outputs + WORKSPACE,
    }
    used = _used(settings.device, partial(attend, q, k, v, graph, backend=backend), [q, k, v], direction)
    over = [name for name in allowed if used[name] > allowed[name]]
    found = ", ".join(
        f"{name} {used[name] / 2**20:.0f} of {allowed[name] / 2**20:.0f} MiB" for name in allowed
    )
    return {"passed": not over, "message": found}


def _used(
    device: str, run: Callable[[], Tensor], leaves: Sequence[Tensor], direction: Tensor
) -> dict[str, int]:
    """What a first call leaves on the device, and the most that a later pass allocates beyond that."""
    before = _allocated(device)
    torch.autograd.grad(run(), list(leaves), direction)
    graph = _allocated(device) - before
    out, forward = _peak(device, run)
    _, backward = _peak(device, partial(torch.autograd.grad, out, list(leaves), direction))
    return {"graph": graph, "forward": forward, "backward": backward}


def _allocated(device: str) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: str, run: Callable[[], Any]) -> tuple[Any, int]:
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _random_graph(n: int, hubs: bool, block: int = 1) -> TokenGraph:
    """32 random senders each, or 2 random blocks of senders for each block; with hubs, a receiver that attends
    to all and a sender that all attend to.
    """
    blocks, degree = n // block, 32 if block == 1 else 2
    drawn = torch.randint(blocks, (blocks, degree), generator=torch.Generator().manual_seed(n))
    inside, shape = torch.arange(block), (blocks, degree, block, block)
    src = (drawn.view(blocks, degree, 1, 1) * block + inside).expand(shape).flatten()
    own = torch.arange(blocks).view(-1, 1, 1, 1) * block + inside.view(-1, 1)
    dst = own.expand(shape).flatten()
    if hubs:
        every, hub = torch.arange(n), torch.full((n,), 5)
        src, dst = torch.cat([src, every, hub]), torch.cat([dst, hub, every])
    return convert.from_edge_index(torch.stack([src, dst]), n, n, coalesce=True)


def _random_inputs(settings: Settings, dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 6)
    drawn = [
        torch.randn(1, MEMORY_HEADS, MEMORY_TOKENS, MEMORY_DIM, generator=rng).to(dtype) for _ in range(4)
    ]
    return [x.to(settings.device).requires_grad_(number < 3) for number, x in enumerate(drawn)]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of our own operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gnn_attention":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _small_inputs(settings: Settings, dtype: torch.dtype, graph: TokenGraph) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 7)
    dst, src = graph.num_dst, graph.num_src
    shapes = {"q": (HEADS, dst, DIM), "k": (KV_HEADS, src, DIM), "v": (KV_HEADS, src, VALUE_DIM)}
    drawn = {
        name: torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()
    }
    drawn["bias"] = torch.randn(HEADS, graph.num_edges, generator=rng, dtype=torch.float64)
    return {name: x.to(settings.device, dtype).requires_grad_() for name, x in drawn.items()}


def _opcheck(
    settings: Settings, dtype: torch.dtype, graph: TokenGraph, backend: Backend
) -> Mapping[str, Any]:
    """``torch.library.opcheck`` on every call of an operator that a forward and a backward pass make."""
    inputs = _small_inputs(settings, dtype, graph)
    with Recorder() as recorder:
        out = attend(inputs["q"], inputs["k"], inputs["v"], graph, bias=inputs["bias"], backend=backend)
        torch.autograd.grad(out.sum(), list(inputs.values()))
    if not recorder.calls:
        return {"passed": False, "message": "no operator of ours was called"}
    for func, args, kwargs in recorder.calls:
        differentiable = "backward" not in str(func)
        leaves = tuple(leaf_like(x, differentiable) for x in args)
        torch.library.opcheck(func, leaves, kwargs)
    return {"passed": True, "message": ", ".join(sorted({str(func) for func, _, _ in recorder.calls}))}


def leaf_like(x: Any, differentiable: bool) -> Any:
    """A copy of a float tensor that begins a graph of its own; any other argument itself."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    leaf: Tensor = x.detach().clone()
    return leaf.requires_grad_(differentiable)


def _compiled(settings: Settings, dtype: torch.dtype, case: GraphCase, backend: Backend) -> Mapping[str, Any]:
    """``torch.compile(fullgraph=True)``, forward and backward, compared with the formula as every call is."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, case.graph, bias=bias, backend=backend)
        return out

    compiler = "inductor" if settings.device.startswith("cuda") else "aot_eager"
    inputs = _small_inputs(settings, dtype, case.graph)
    out = torch.compile(run, fullgraph=True, backend=compiler)(**inputs)
    direction = torch.ones_like(out)
    dense = partial(FEATURES["edge bias"].dense, case)
    truth = Formula(case.mask, direction, DIM**-0.5, dense, device=settings.device).truth(inputs)
    return verdict(out, gradients_of(out, direction, inputs), truth.for_backend(backend))
