"""How a workload of a GPU can be run: by the backends of this library, and by the peers that are there.

A peer is given the problem as it likes it best: the kernel by name, its own mask, edges sorted by receiver,
compiled where it compiles. A problem that it does not support, or that needs more memory than is free, is
refused with the reason; a peer that is missing is a row that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import gpu_peers, methods
from benchmarks.gpu.workloads import (
    AGAIN,
    ANEMOI,
    CUDNN,
    EFFICIENT,
    FLASH,
    PYG_COMPILED,
    VARLEN,
    new_selection,
)
from benchmarks.methods import AUTO, Method, Prepared, along_graph, call_of
from benchmarks.workloads import FLEX, PYG, SPARSE, Problem, Workload
from gnn_attention import attend, convert
from gnn_attention.backends import BACKENDS, Backend

__all__ = ["ANEMOI_MODULE", "OURS", "PEERS", "methods_of"]

ANEMOI_MODULE = "anemoi.models.triton.gt"
MOST_EDGES = 2**24  # of a workload on which the backends other than auto and rows are timed


def methods_of(workload: Workload) -> list[Method]:
    """Auto, the peers of a workload, our other backends, and auto again, in this order."""
    own = [OURS[AUTO]]
    if workload.name.startswith("chosen"):
        own.append(Method("auto, a new graph each time", _new_graph, ours=True, same=False))
    peers = [PEERS[name] for name in workload.peers]
    return [*own, *peers, *list(OURS.values())[1:], replace(OURS[AUTO], name=AGAIN)]


def _new_graph(problem: Problem) -> Prepared:
    """The whole step: the index is drawn, becomes a graph on the device, and attention runs along it."""
    n, device = problem.graph.num_dst, problem.device
    seeds = iter(range(1, 2**31))
    return Prepared(lambda q, k, v: attend(q, k, v, new_selection(n, next(seeds), device)))


def _refusal(backend: Backend, problem: Problem) -> str | None:
    call = call_of(problem)
    if backend.name == "flex" and (reason := _not_compiled(problem)):
        return reason
    if backend.name == "dense" and backend.bytes_needed is not None and backend.bytes_needed(call) > 0:
        return "it would write a table of all pairs"
    listed = problem.graph.listed_edges
    if backend.name != "rows" and listed is not None and listed.shape[1] > MOST_EDGES:
        return f"its plan of more than {MOST_EDGES} edges is not timed"
    return backend.unsupported_reason(call)


def _not_compiled(problem: Problem) -> str | None:
    return None if problem.device.type == "cuda" else "it is compiled for a GPU here"


OURS = {AUTO: Method(AUTO, partial(along_graph, AUTO), ours=True)}
OURS |= {
    name: Method(
        name,
        partial(along_graph, BACKENDS[name]),
        ours=True,
        unsupported_reason=partial(_refusal, BACKENDS[name]),
    )
    for name in ("rows", "flex", "varlen", "dense")
}


def _sdpa(kernel: str, problem: Problem) -> Prepared:
    """One kernel of SDPA by name, for a causal or a full graph."""
    attention = importlib.import_module("torch.nn.attention")
    causal = problem.graph.is_causal()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, kernel)):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Prepared(run)


def _sdpa_refusal(problem: Problem) -> str | None:
    whole = problem.graph.is_causal() or problem.graph.is_full()
    return None if whole else "the graph is neither causal nor full"


def _varlen(problem: Problem) -> Prepared:
    """``torch.nn.attention.varlen.varlen_attn`` on tokens ``[T, H, D]``, as it wants them."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    packed = convert.to_varlen(problem.graph)
    bounds, longest = packed.cu_seqlens.to(problem.device), packed.max_seqlen

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = varlen(*tokens, bounds, bounds, longest, longest, window_size=packed.window)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _varlen_refusal(problem: Problem) -> str | None:
    q = problem.inputs[0]
    if q.dtype not in (torch.float16, torch.bfloat16) or q.device.type != "cuda":
        return f"it computes in float16 and bfloat16 on CUDA, got {q.dtype} on {q.device}"
    try:
        convert.to_varlen(problem.graph)
    except ValueError as error:
        return str(error)
    return None


def _flex_refusal(problem: Problem) -> str | None:
    if problem.graph.listed_edges is not None:
        return "a list of edges is no mask_mod; our backend flex looks bits up instead"
    return _not_compiled(problem)


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
    return None if problem.device.type == "cuda" else "its operators are for CUDA alone"


def _peers() -> Iterator[Method]:
    kernels = {FLASH: "FLASH_ATTENTION", CUDNN: "CUDNN_ATTENTION", EFFICIENT: "EFFICIENT_ATTENTION"}
    for name, kernel in kernels.items():
        yield Method(name, partial(_sdpa, kernel), unsupported_reason=_sdpa_refusal)
    varlen = ("torch.nn.attention.varlen",)
    yield Method(VARLEN, _varlen, modules=varlen, unsupported_reason=_varlen_refusal)
    yield replace(methods.PEERS[FLEX], unsupported_reason=_flex_refusal, backward=None)
    pyg = methods.PEERS[PYG]
    yield pyg
    yield replace(pyg, name=PYG_COMPILED, prepare=_pyg_compiled, unsupported_reason=_not_compiled)
    anemoi = ("triton", ANEMOI_MODULE)
    yield Method(ANEMOI, _anemoi, modules=anemoi, unsupported_reason=_anemoi_refusal)
    yield methods.PEERS[SPARSE]


gpu_peers.carried()
PEERS = {method.name: method for method in _peers()}
