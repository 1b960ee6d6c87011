"""The methods that run a workload on a GPU: the backends of this library, and the peers.

Each peer gets the problem in its fastest form: its own mask, edges sorted by receiver, compiled if possible. A
problem that it does not support, or that needs more memory than is free, is refused with the reason; a missing peer
has a row that says so.
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
from benchmarks.gpu.workloads import AGAIN, ANEMOI, PYG_COMPILED, VARLEN, new_selection
from benchmarks.methods import AUTO, Method, Prepared, call_of, ours
from benchmarks.workloads import CAUSAL, FLEX, PYG, SPARSE, Problem, Workload
from gnn_attention import attend, convert
from gnn_attention.backends import Backend

__all__ = ["ANEMOI_MODULE", "OURS", "PEERS", "methods_of"]

ANEMOI_MODULE = "anemoi.models.triton.gt"
MOST_EDGES = 2**24  # largest edge list on which backends other than auto and rows are timed


def methods_of(workload: Workload) -> list[Method]:
    """Return auto, the peers of a workload, our other backends, and auto again, in this order."""
    first = [OURS[AUTO]]
    if workload.name.startswith("chosen"):
        first.append(Method("auto, a new graph each time", _new_graph, ours=True, same=False))
    peers = [PEERS[name] for name in workload.peers]
    return [*first, *peers, *list(OURS.values())[1:], replace(OURS[AUTO], name=AGAIN)]


def _new_graph(problem: Problem) -> Prepared:
    """Prepare a whole step: draw an index, build its graph on the device, and run attention along it."""
    n, device = problem.graph.num_dst, problem.device
    seeds = iter(range(1, 2**31))
    return Prepared(lambda q, k, v: attend(q, k, v, new_selection(n, next(seeds), device)))


def _needs_gpu(problem: Problem) -> str | None:
    return None if problem.device.type == "cuda" else "it is compiled for a GPU here"


def _refusal(backend: Backend, problem: Problem) -> str | None:
    call, edges = call_of(problem), problem.graph.edges.listed()
    if backend.name == "flex" and (reason := _needs_gpu(problem)):
        return reason
    if backend.name == "dense" and backend.bytes_needed is not None and backend.bytes_needed(call) > 0:
        return "it would write a table of all pairs"
    if backend.name != "rows" and edges is not None and edges.shape[1] > MOST_EDGES:
        return f"its plan of more than {MOST_EDGES} edges is not timed"
    return backend.unsupported_reason(call)


OURS = {method.name: method for method in ours(("rows", "flex", "varlen", "dense"), _refusal)}


def _varlen(problem: Problem) -> Prepared:
    """Run ``torch.nn.attention.varlen.varlen_attn`` on tokens in its layout ``[T, H, D]``."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    layout = convert.to_varlen(problem.graph)
    bounds, longest = layout.cu_seqlens.to(problem.device), layout.max_seqlen

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = varlen(*tokens, bounds, bounds, longest, longest, window_size=layout.window)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _pyg_compiled(problem: Problem) -> Prepared:
    """Compile TransformerConv's ``propagate`` for the sizes of the problem."""
    torch._dynamo.reset()
    run = methods.PEERS[PYG].prepare(problem).call
    return Prepared(torch.compile(run, dynamic=False))


def _anemoi(problem: Problem) -> Prepared:
    """Run the graph transformer of anemoi-models on ``[T, H, D]``, with edges by receiver and by sender.

    Its kernel always adds a vector of each edge to key and value; here these vectors are 0, but they cost time and
    memory.
    """
    conv = importlib.import_module(ANEMOI_MODULE).graph_transformer_attention_conv
    graph, device = problem.graph, problem.device
    edges = graph.edges_on(device)
    src, dst = edges[:, torch.argsort(edges[1] * graph.num_src + edges[0])]
    counts = (torch.bincount(dst, minlength=graph.num_dst), torch.bincount(src, minlength=graph.num_src))
    first_of_dst, first_of_src = (functional.pad(count.cumsum(0), (1, 0)) for count in counts)
    by_receiver, by_sender = (src, first_of_dst), (first_of_src, torch.argsort(src, stable=True), dst)
    shape = len(src), problem.heads, problem.dim
    vectors = torch.zeros(shape, dtype=problem.inputs[0].dtype, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = conv(query, key, value, vectors, by_receiver, by_sender)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _peers() -> Iterator[Method]:
    gpu_method, pyg = partial(Method, unsupported_reason=_needs_gpu), methods.PEERS[PYG]
    yield methods.PEERS[CAUSAL]
    yield gpu_method(VARLEN, _varlen, modules=("torch.nn.attention.varlen",))
    yield gpu_method(FLEX, methods.PEERS[FLEX].prepare)
    yield pyg
    yield gpu_method(PYG_COMPILED, _pyg_compiled, modules=pyg.modules)
    yield gpu_method(ANEMOI, _anemoi, modules=("triton", ANEMOI_MODULE))
    yield methods.PEERS[SPARSE]


gpu_peers.add_to_path()
PEERS = {method.name: method for method in _peers()}
