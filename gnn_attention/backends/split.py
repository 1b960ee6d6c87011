"""Attention over a graph in disjoint parts, each on the kernel that does it best, joined by log-sum-exp.

Parts (``plan.decompose``) are plain calls over ranges of receivers and senders; positions stay absolute, so
that score_mods and dropout see the same edges; sinks are added once, after the merge. The kernel of a part is
the one with the least estimated time.
"""

from dataclasses import replace

import torch

from gnn_attention import edges
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dense, flex, merge_lse, rows, tiles, triton, varlen
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.capabilities import Capabilities
from gnn_attention.backends.cost_model import Work, costs
from gnn_attention.backends.cpu.dense_blocks_eager import isolated
from gnn_attention.backends.gpu.devices import device_of
from gnn_attention.backends.gpu.roofline import Sizes, estimates, weighed
from gnn_attention.backends.plan.decompose import WHOLE, Part, parts, positions, shifted
from gnn_attention.backends.plan.planner import WORK
from gnn_attention.graph import TokenGraph, memoized

KERNELS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (dense, varlen, triton, flex, tiles, rows)
}
JOINED = {"tiles", "rows", "flex", "triton"}  # take many parts in one call as well as one by one
DEVICES = ("cuda",)  # whose kernels are chosen by bytes and products
DENSE_BYTES = 2**30  # of logits that are written out for a part


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    call = replace(call, with_lse=True)
    found = _assigned(call)
    if not found:
        out, lse = isolated(call, call.graph.num_dst)
        return out.to(call.q.dtype), lse
    if len(found) == 1 and found[0][0].graph is call.graph:
        return _with_lse(found[0][1], call)
    wide = merge_lse.in_merge_dtype(call)
    results = [_with_lse(name, cut(wide, part)) for part, name in found]
    merged = merge_lse.merged(results, [part.dst[0] for part, _ in found], call.graph.num_dst)
    out, lse = call.with_sinks(*merged)
    return out.to(call.q.dtype), lse


def unsupported_reason(call: AttentionCall) -> str | None:
    try:
        _assigned(_first(call))
    except NotImplementedError as error:
        return str(error)
    return None


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated: results of the parts, their sum, and what a kernel of ``tiles`` takes."""
    size = call.q.shape[0] * call.q.shape[1] * call.graph.num_dst * call.v.shape[3]
    return 3 * size * edges.accumulation_dtype(call.q.dtype).itemsize + tiles.bytes_needed(call)


def _first(call: AttentionCall) -> AttentionCall:
    return replace(call, with_lse=True, graph=one_of(call.graph, 0, 0))


def _with_lse(name: str, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[name].run(call)
    assert lse is not None
    return out, lse


def cut(call: AttentionCall, part: Part) -> AttentionCall:
    """The call on the receivers, senders and edges of a part, without sinks."""
    if part.graph is call.graph:
        return call
    bias = call.bias
    if bias is not None:
        bias = bias.index_select(2, positions(part, call.graph, call.q.device))
    q = call.q[:, :, slice(*part.dst)]
    k, v = (x[:, :, slice(*part.src)] for x in (call.k, call.v))
    return replace(call, q=q, k=k, v=v, graph=part.graph, bias=bias, sink_logits=None)


def _assigned(call: AttentionCall) -> list[tuple[Part, str]]:
    """The parts, each with its backend; all as one where the same backend, taking masks, takes each."""
    one = shifted(call.graph) if call.q.device.type in DEVICES else None
    found = [(part, _backend_of(call, part)) for part in (parts(call.graph) if one is None else (one,))]
    names = {name for _, name in found}
    if len(names) == 1 and names <= JOINED:
        whole = Part(call.graph, (0, call.graph.num_dst), (0, call.graph.num_src), WHOLE)
        return [(whole, _backend_of(call, whole))]
    return found


def _backend_of(call: AttentionCall, part: Part) -> str:
    inner, reasons = cut(replace(call, bias=None), part), []
    if call.bias is not None:
        # as long as that of the part
        inner = replace(inner, bias=call.bias[..., : part.graph.num_edges])
    for name in _order(inner):
        reason = KERNELS[name].unsupported_reason(inner)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    of_part = f"its part {part.what!r} of {part.graph.name}"
    raise NotImplementedError(f"no backend holds {of_part}: {'; '.join(reasons)}")


def _order(call: AttentionCall) -> tuple[str, ...]:
    return _order_on_cuda(call) if call.q.device.type in DEVICES else memoized(_by_time, call.graph)


def _order_on_cuda(call: AttentionCall) -> tuple[str, ...]:
    needed = dense.bytes_needed(call)
    sizes = Sizes(call.q.shape[0] * call.q.shape[1], call.q.shape[3], call.v.shape[3], call.q.dtype)
    modified = call.score_mod is not None
    order = memoized(_by_time_on_cuda, call.graph, sizes, call.q.device, needed > 0, modified)
    return tuple(name for name in order if name != "dense" or needed <= DENSE_BYTES)


def _by_time_on_cuda(
    graph: TokenGraph, sizes: Sizes, device: torch.device, written_out: bool, modified: bool
) -> tuple[str, ...]:
    constants = device_of(device)
    times = weighed(estimates(graph, sizes, constants), constants, written_out, modified)
    return (*sorted(times, key=lambda name: times[name]), "tiles", "rows")


def _by_time(graph: TokenGraph) -> tuple[str, ...]:
    # logits are written out in "dense"
    pairs = Work(masked_pairs=4 * graph.num_dst * graph.num_src)
    work = {"dense": pairs, "tiles": WORK["tiles"](graph), "rows": WORK["rows"](graph)}
    return tuple(sorted(work, key=lambda name: costs().seconds(work[name], heads=8)))


BACKEND = Backend(
    "split",
    run,
    "each part of the graph on the kernel for it, joined by log-sum-exp, with the options that these support",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(double_backward=False, varying_graphs=False),
)
