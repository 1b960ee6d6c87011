"""How a workload of a GPU can be run: ours on every backend and in every form, and the peers that are
installed.

A peer is given the problem as it likes it best: the kernel by name, its own mask, edges sorted by receiver,
compiled where it compiles. What it cannot hold, or would need more memory for than there is, is refused with
the reason.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks import gpu_peers, methods
from benchmarks.gpu.workloads import (
    ALL_PAIRS,
    ANEMOI,
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH_ATTN,
    PYG_COMPILED,
    VARLEN,
)
from benchmarks.methods import AUTO, Method, Prepared, attended, call_of, of_backend
from benchmarks.workloads import FLEX, MASKED, PYG, SPARSE, Problem
from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.roofline import FORMS, Estimate, Sizes, estimates
from gnn_attention.backends.gpu.workload import counted, packing

__all__ = ["AGAIN", "AUTO", "OURS", "PEERS", "Method", "call_of", "methods_of", "predicted"]

AGAIN = "auto again"  # the same twice: how far apart two measurements of one thing are
FAR, LONG = 12.0, 0.05  # times the prediction of auto, and seconds, beyond which one of ours is not timed
ANEMOI_MODULE = "anemoi.models.triton.gt"
HALF = (torch.float16, torch.bfloat16)


def methods_of(names: Sequence[str], with_peers: bool) -> list[Method]:
    """All of ours and the peers of these names; the second measurement of auto comes last."""
    again = Method(AGAIN, OURS[AUTO].prepare, ours=True, keeps=True)
    return [*OURS.values(), *(PEERS[name] for name in (names if with_peers else ())), again]


def predicted(problem: Problem, device: Device) -> dict[str, dict[str, Estimate]]:
    """For each pass the estimates of :func:`gnn_attention.backends.gpu.roofline.estimates`, for the problem's
    sizes.
    """
    return {
        which: estimates(problem.graph, sizes_of(problem), device, which == "backward")
        for which in ("forward", "backward")
    }


def sizes_of(problem: Problem) -> Sizes:
    """The sizes that an estimate is made for."""
    q, _, v = problem.inputs
    return Sizes(q.shape[0] * q.shape[1], q.shape[3], v.shape[3], q.dtype)


def _refused(backend: Backend, problem: Problem) -> str | None:
    return backend.unsupported_reason(call_of(problem))


def _own_flex_refusal(problem: Problem) -> str | None:
    return _not_compiled_here(problem) or _refused(BACKENDS["flex"], problem)


def _not_compiled_here(problem: Problem) -> str | None:
    return None if problem.inputs[0].device.type == "cuda" else "it is compiled for a GPU here"


def _split_refusal(problem: Problem) -> str | None:
    """Where its parts are not worth being worked out."""
    counts = counted(problem.graph)
    if not counts.filled_tiles or not counts.strays:
        return "all of its edges suit the same kernel"
    return _refused(BACKENDS["split"], problem)


def _ours() -> Iterator[Method]:
    yield Method(AUTO, partial(attended, AUTO), ours=True, keeps=True)
    for name in ("dense", "varlen"):
        yield _of_backend(BACKENDS[name], name)
    yield replace(_of_backend(BACKENDS["flex"], "flex"), unsupported_reason=_own_flex_refusal)
    yield replace(_of_backend(BACKENDS["split"], "split"), unsupported_reason=_split_refusal)
    yield _of_backend(BACKENDS["triton"], "")
    for form in FORMS:
        yield _of_backend(replace(BACKENDS[f"triton-{form}"], name=f"triton {form}"), form)


def _of_backend(backend: Backend, estimate: str) -> Method:
    return of_backend(backend, partial(_refused, backend), estimate)


OURS = {method.name: method for method in _ours()}


def _kernel_of(name: str) -> contextlib.AbstractContextManager[Any]:
    attention = importlib.import_module("torch.nn.attention")
    context: contextlib.AbstractContextManager[Any] = attention.sdpa_kernel(
        getattr(attention.SDPBackend, name)
    )
    return context


def _sdpa(kernel: str, problem: Problem) -> Prepared:
    """One kernel of SDPA by name, for a causal or a full graph."""
    causal = problem.graph.is_causal()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _kernel_of(kernel):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Prepared(run)


def _needs_whole(problem: Problem) -> str | None:
    return (
        None
        if problem.graph.is_causal() or problem.graph.is_full()
        else "the graph is neither causal nor full"
    )


def _all_pairs(problem: Problem) -> Prepared:
    """Dense attention among all: what one would pay without a graph."""
    return Prepared(functional.scaled_dot_product_attention)


def _varlen(problem: Problem) -> Prepared:
    """``torch.nn.attention.varlen.varlen_attn`` on tokens ``[T, H, D]``, as it wants them."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    found = convert.to_varlen(problem.graph)
    bounds, longest = found.cu_seqlens.to(problem.inputs[0].device), found.max_seqlen

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = varlen(*packed, bounds, bounds, longest, longest, window_size=found.window)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _varlen_refusal(problem: Problem) -> str | None:
    if problem.inputs[0].dtype not in HALF or problem.inputs[0].device.type != "cuda":
        got = f"{problem.inputs[0].dtype} on {problem.inputs[0].device}"
        return f"it computes in float16 and bfloat16 on CUDA, got {got}"
    return (
        None
        if packing(problem.graph)
        else "the graph is no packing of documents with one window for all of them"
    )


def _flex_refusal(problem: Problem) -> str | None:
    listed = (
        None
        if problem.graph._listed is None
        else "a list of edges is no mask_mod; ours, 'flex', looks bits up instead"
    )
    return _not_compiled_here(problem) or listed


def _flash_attn(problem: Problem) -> Prepared:
    """The package of that name, the newest that is there, on ``[B, T, H, D]``."""
    run = importlib.import_module("flash_attn").flash_attn_func
    window = convert.to_window(problem.graph)
    options = {"causal": True} if problem.graph.is_causal() else {"window_size": window}
    return Prepared(lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2))


def _flash_attn_refusal(problem: Problem) -> str | None:
    try:
        convert.to_window(problem.graph)
    except ValueError as error:
        return str(error)
    return None


def _pyg_compiled(problem: Problem) -> Prepared:
    """TransformerConv's ``propagate`` as one compiled program for these sizes."""
    torch._dynamo.reset()
    run = methods.PEERS[PYG].prepare(problem).call
    return Prepared(torch.compile(run, dynamic=False))


def _anemoi(problem: Problem) -> Prepared:
    """The graph transformer of anemoi-models on ``[T, H, D]``: edges by receiver, and their order by sender.

    It adds a vector of each edge to key and value, which cannot be left out: here they are 0, and take part
    in its time and memory.
    """
    conv = importlib.import_module(ANEMOI_MODULE).graph_transformer_attention_conv
    graph, device = problem.graph, problem.device
    by_receiver, by_sender = _sorted_edges(graph.edges_on(device), graph.num_dst, graph.num_src)
    shape = len(by_receiver[0]), problem.heads, problem.dim
    vectors = torch.zeros(shape, dtype=problem.inputs[0].dtype, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = conv(query, key, value, vectors, by_receiver, by_sender)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _sorted_edges(
    edges: Tensor, num_dst: int, num_src: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Senders by receiver and where each receiver begins; where each sender begins, its edges, and receivers.

    >>> edges = torch.tensor([[1, 0, 1], [1, 0, 0]])
    >>> by_receiver, by_sender = _sorted_edges(edges, 2, 2)
    >>> [x.tolist() for x in (*by_receiver, *by_sender)]
    [[0, 1, 1], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 0, 1]]
    """
    order = torch.argsort(edges[1] * num_src + edges[0])
    src, dst = edges[:, order]
    starts, ends = (
        functional.pad(torch.bincount(x, minlength=n).cumsum(0), (1, 0))
        for x, n in ((dst, num_dst), (src, num_src))
    )
    return (src, starts), (ends, torch.argsort(src, stable=True), dst)


def _anemoi_refusal(problem: Problem) -> str | None:
    q = problem.inputs[0]
    if q.device.type != "cuda":
        return "its operators are for CUDA alone"
    if len(q) != 1:
        return f"it takes one sample, got {len(q)}"
    return None if q.dtype != torch.float64 else "it computes in float32 and shorter"


def _anemoi_bytes(problem: Problem, both: bool) -> float:
    """A vector for each edge, and its gradient."""
    size = problem.grad_out.element_size()
    return float(problem.graph.num_edges * problem.heads * problem.dim * size * (2 if both else 1))


def _peers() -> Iterator[Method]:
    for name, kernel in (
        (FLASH, "FLASH_ATTENTION"),
        (CUDNN, "CUDNN_ATTENTION"),
        (EFFICIENT, "EFFICIENT_ATTENTION"),
    ):
        yield Method(name, partial(_sdpa, kernel), unsupported_reason=_needs_whole, estimate="dense")
    yield replace(methods.PEERS[MASKED], estimate="dense")
    yield Method(ALL_PAIRS, _all_pairs, same=False)
    yield Method(
        VARLEN,
        _varlen,
        modules=("torch.nn.attention.varlen",),
        unsupported_reason=_varlen_refusal,
        estimate="varlen",
    )
    yield replace(methods.PEERS[FLEX], unsupported_reason=_flex_refusal, backward=None, estimate="flex")
    yield Method(FLASH_ATTN, _flash_attn, modules=("flash_attn",), unsupported_reason=_flash_attn_refusal)
    yield methods.PEERS[PYG]
    yield replace(
        methods.PEERS[PYG], name=PYG_COMPILED, prepare=_pyg_compiled, unsupported_reason=_not_compiled_here
    )
    yield Method(
        ANEMOI,
        _anemoi,
        modules=("triton", ANEMOI_MODULE),
        unsupported_reason=_anemoi_refusal,
        bytes_needed=_anemoi_bytes,
    )
    yield methods.PEERS[SPARSE]


gpu_peers.carried()
PEERS: dict[str, Method] = {method.name: method for method in _peers()}
