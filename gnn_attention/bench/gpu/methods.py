"""How a workload of a GPU can be run: ours on every backend and in every form, and the peers that are installed.

A peer is given the problem as it likes it best: the kernel by name, its own mask, edges sorted by receiver, compiled where it
compiles. What it cannot hold, or would need more memory for than there is, is refused with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend, triton
from gnn_attention.backends.call import Call
from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.roofline import FORMS, Estimate, Sizes, estimates
from gnn_attention.backends.gpu.workload import counted, packing
from gnn_attention.bench.gpu.workloads import (
    ALL_PAIRS,
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH_ATTN,
    FLEX,
    MASKED,
    PYG,
    SPARSE,
    VARLEN,
)
from gnn_attention.bench.methods import Method, Prepared
from gnn_attention.bench.workloads import Problem

__all__ = ["AGAIN", "AUTO", "OURS", "PEERS", "GpuMethod", "call_of", "methods_of", "predicted"]

AUTO, AGAIN = "auto", "auto again"  # the same twice: how far apart two measurements of one thing are
FAR, LONG = 12.0, 0.05  # times the prediction of auto, and seconds, beyond which one of ours is not timed
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class GpuMethod(Method):
    """``estimate`` names its prediction in ``_gpu_costs``; ``same`` is False for a yardstick of another graph."""

    estimate: str = ""
    same: bool = True


def methods_of(names: Sequence[str], with_peers: bool) -> list[GpuMethod]:
    """All of ours and the peers of these names; the second measurement of auto comes last."""
    again = GpuMethod(AGAIN, OURS[AUTO].prepare, ours=True, keeps=True)
    return [*OURS.values(), *(PEERS[name] for name in (names if with_peers else ())), again]


def predicted(problem: Problem, device: Device) -> dict[str, dict[str, Estimate]]:
    """For each pass the estimates of :func:`gnn_attention.backends.gpu.roofline.estimates`, for the problem's sizes."""
    return {which: estimates(problem.graph, sizes_of(problem), device, which == "backward") for which in ("forward", "backward")}


def sizes_of(problem: Problem) -> Sizes:
    """The sizes that an estimate is made for."""
    q, _, v = problem.inputs
    return Sizes(q.shape[0] * q.shape[1], q.shape[3], v.shape[3], q.dtype)


# -- ours -------------------------------------------------------------------------------------------------------------


def _attend(backend: str | Backend, problem: Problem) -> Prepared:
    graph = problem.graph
    return Prepared(lambda q, k, v: attend(q, k, v, graph, backend=backend))


def _refused(backend: Backend, problem: Problem) -> str | None:
    return backend.refusal(call_of(problem))


def _own_flex_refusal(problem: Problem) -> str | None:
    return _not_compiled_here(problem) or _refused(BACKENDS["flex"], problem)


def _not_compiled_here(problem: Problem) -> str | None:
    return None if problem.inputs[0].device.type == "cuda" else "FlexAttention is compiled for a GPU here"


def _split_refusal(problem: Problem) -> str | None:
    """Where its parts are not worth being worked out."""
    counts = counted(problem.graph)
    if not counts.filled_tiles or not counts.strays:
        return "all of its edges suit the same kernel"
    return _refused(BACKENDS["split"], problem)


def _bytes(backend: Backend, problem: Problem, both: bool) -> float:
    return float(backend.bytes_needed(call_of(problem))) if backend.bytes_needed else 0.0


def call_of(problem: Problem) -> Call:
    """The call of attention that a problem is."""
    q, k, v = problem.inputs
    return Call.checked(q, k, v, problem.graph)


def _ours() -> Iterator[GpuMethod]:
    yield GpuMethod(AUTO, partial(_attend, AUTO), ours=True, keeps=True)
    for name in ("dense", "varlen"):
        yield _of_backend(BACKENDS[name], name)
    yield replace(_of_backend(BACKENDS["flex"], "flex"), refusal=_own_flex_refusal)
    yield replace(_of_backend(BACKENDS["split"], "split"), refusal=_split_refusal)
    yield _of_backend(BACKENDS["triton"], "")
    for form in FORMS:
        run, refusal = partial(triton.run, form=form), partial(triton.refusal, form=form)
        yield _of_backend(Backend(f"triton {form}", run, "", refusal, triton.bytes_needed), form)


def _of_backend(backend: Backend, estimate: str) -> GpuMethod:
    return GpuMethod(
        backend.name,
        partial(_attend, backend),
        ours=True,
        bytes_needed=partial(_bytes, backend),
        refusal=partial(_refused, backend),
        keeps=True,
        estimate=estimate,
    )


OURS = {method.name: method for method in _ours()}


# -- peers ------------------------------------------------------------------------------------------------------------


def _kernel_of(name: str) -> contextlib.AbstractContextManager[Any]:
    attention = importlib.import_module("torch.nn.attention")
    context: contextlib.AbstractContextManager[Any] = attention.sdpa_kernel(getattr(attention.SDPBackend, name))
    return context


def _sdpa(kernel: str, problem: Problem) -> Prepared:
    """One kernel of SDPA by name, for a causal or a full graph."""
    causal = problem.graph.is_causal()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _kernel_of(kernel):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Prepared(run)


def _sdpa_mask(problem: Problem) -> Prepared:
    mask = problem.graph.mask(problem.inputs[0].device)
    return Prepared(partial(functional.scaled_dot_product_attention, attn_mask=mask))


def _needs_whole(problem: Problem) -> str | None:
    return None if problem.graph.is_causal() or problem.graph.is_full() else "the graph is neither causal nor full"


def _mask_bytes(problem: Problem, both: bool) -> float:
    return float(problem.cells * (1 + problem.inputs[0].element_size()))


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
        return f"it computes in float16 and bfloat16 on CUDA, got {problem.inputs[0].dtype} on {problem.inputs[0].device}"
    return None if packing(problem.graph) else "the graph is no packing of documents with one window for all of them"


def _flex(problem: Problem) -> Prepared:
    """Compiled, with the graph's own rule as ``mask_mod`` and our lists of tiles, which never take tokens x tokens."""
    torch._dynamo.reset()  # a kernel for each graph: past a limit of them it would run uncompiled, unseen
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph).to(str(problem.inputs[0].device))
    return Prepared(partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask))


def _flex_refusal(problem: Problem) -> str | None:
    listed = None if problem.graph._listed is None else "a list of edges is no mask_mod; ours, 'flex', looks bits up instead"
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


def _transformer_conv(problem: Problem) -> Prepared:
    """``propagate`` of PyG's TransformerConv on q, k and v alone."""
    heads, dim, edges = problem.heads, problem.dim, problem.graph.edges_on(problem.inputs[0].device)
    conv = importlib.import_module("torch_geometric.nn").TransformerConv(
        heads * dim, dim, heads=heads, root_weight=False, bias=False
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = conv.propagate(edges, size=(len(key), len(query)), query=query, key=key, value=value, edge_attr=None)
        return out.transpose(0, 1).unsqueeze(0)

    return Prepared(run)


def _message_bytes(problem: Problem, both: bool) -> float:
    """Keys, queries and values of every edge, and their products; kept for a backward pass."""
    return problem.graph.num_edges * problem.heads * problem.dim * problem.inputs[0].element_size() * (6.0 if both else 4.0)


def _torch_sparse(problem: Problem) -> Prepared:
    """Head by head: ``sampled_addmm`` on the edges, a softmax over each row, ``sparse.mm``; in float32, which it holds."""
    graph, device = problem.graph, problem.inputs[0].device
    shape, zeros = (graph.num_dst, graph.num_src), torch.zeros(graph.num_edges, device=device)
    pattern = torch.sparse_coo_tensor(graph.edges_on(device).flip(0), zeros, shape).coalesce().to_sparse_csr()
    scale = problem.dim**-0.5

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.sparse.sampled_addmm(pattern, q.contiguous(), k.T, beta=0.0, alpha=scale)
        out: Tensor = torch.sparse.mm(torch.sparse.softmax(logits.to_sparse_coo(), dim=1), v)
        return out

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = zip(*(x[0].float() for x in (q, k, v)), strict=True)
        return torch.stack([one_head(*head) for head in heads]).unsqueeze(0).to(q.dtype)

    return Prepared(run)


def _sparse_bytes(problem: Problem, both: bool) -> float:
    return problem.graph.num_edges * (400.0 if both else 200.0)


def _peers() -> Iterator[GpuMethod]:
    for name, kernel in ((FLASH, "FLASH_ATTENTION"), (CUDNN, "CUDNN_ATTENTION"), (EFFICIENT, "EFFICIENT_ATTENTION")):
        yield GpuMethod(name, partial(_sdpa, kernel), refusal=_needs_whole, estimate="dense")
    yield GpuMethod(MASKED, _sdpa_mask, bytes_needed=_mask_bytes, estimate="dense")
    yield GpuMethod(ALL_PAIRS, _all_pairs, same=False)
    yield GpuMethod(VARLEN, _varlen, modules=("torch.nn.attention.varlen",), refusal=_varlen_refusal, estimate="varlen")
    yield GpuMethod(FLEX, _flex, refusal=_flex_refusal, keeps=True, estimate="flex")
    yield GpuMethod(FLASH_ATTN, _flash_attn, modules=("flash_attn",), refusal=_flash_attn_refusal)
    yield GpuMethod(PYG, _transformer_conv, modules=("torch_geometric.nn",), bytes_needed=_message_bytes)
    yield GpuMethod(SPARSE, _torch_sparse, bytes_needed=_sparse_bytes)


PEERS: dict[str, GpuMethod] = {method.name: method for method in _peers()}
