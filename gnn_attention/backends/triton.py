"""Attention on a GPU by kernels of this library, in Triton, for irregular and block-sparse graphs.

A graph is stored in one of three forms: rows of edges, row windows with bit words, or tiles. All options run
in the kernels, with one operator for a call. Where Python was started with ``TRITON_INTERPRET=1``, CPU
tensors are taken too, slowly: for a trial.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention import edges
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, one_of
from gnn_attention.backends.capabilities import Capabilities
from gnn_attention.backends.gpu import ops, score_terms, tiles
from gnn_attention.backends.gpu.csr import MOST_EDGES, bytes_of, hands_over, rows_of
from gnn_attention.backends.gpu.devices import device_of
from gnn_attention.backends.gpu.formats import BLOCKS, ROWS, Packed, Problem, pack
from gnn_attention.backends.gpu.roofline import Sizes, form_of
from gnn_attention.backends.gpu.row_windows import windows_of
from gnn_attention.backends.gpu.score_terms import added_to_edges, has_edge_numbers
from gnn_attention.backends.gpu.tiles import tiles_of
from gnn_attention.graph import TokenGraph, memoized

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# channels of a head; of numbers wider than halves, windows and tiles take half
WIDEST = {"rows": 512, "windows": 256, "tiles": 256}
MOST_PROGRAMS = 2**31 - 1  # of one head on a grid
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


def run(call: AttentionCall, form: str | None = None) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` in float32 or float64.

    ``form``: "rows", "windows" or "tiles"; None takes the best.
    """
    slopes, softcap, before, bias = added_to_edges(call)
    problem = Problem(
        *(call.q, call.k, call.v, call.scale, softcap, slopes, before, bias, call.dropout, call.seed),
        *(call.graph.dst_offset, call.graph.src_offset, call.first_sample, call.first_head),
    )
    numbered = before is not None or bias is not None or _hands_over(call, form)
    plan: Packed = memoized(_plan, call.graph, form, numbered, *_head(call))
    return call.with_sinks(*ops.attention(problem, plan))


def unsupported_reason(call: AttentionCall, form: str | None = None) -> str | None:
    """Why the kernels, in this form, do not support the call, or None."""
    if not INSTALLED:
        return "it needs Triton, which is not installed; it comes with torch for CUDA: pip install triton"
    return score_terms.unsupported_reason(call) or _too_large(call, form or form_name(call))


def bytes_needed(call: AttentionCall, form: str | None = None) -> int:
    """The extra memory: the graph in its form, a workspace, numbers for each edge."""
    numbers, by_tiles = has_edge_numbers(call), (form or form_name(call)) == "tiles"
    trained = _hands_over(call, form)
    rows = bytes_of(call.graph, numbers or trained) if numbers or not by_tiles else 0
    heads, wide = call.q.shape[0] * call.q.shape[1], edges.accumulation_dtype(call.q.dtype).itemsize
    sizes = call.graph.num_edges, heads, wide
    handed = 2 * math.prod(sizes) if trained and hands_over(*sizes) else 0
    in_tiles = tiles.bytes_of(one_of(call.graph, 0, 0)) if by_tiles else 0
    return rows + in_tiles + handed + score_terms.edge_number_bytes(call) + 2**26


def _hands_over(call: AttentionCall, form: str | None) -> bool:
    """Whether the rows of a sample are so few that both sides of an edge are numbered for its p and ds."""
    sizes = call.graph.num_edges, call.q.shape[1], edges.accumulation_dtype(call.q.dtype).itemsize
    trained = any_needs_gradients((call.q, call.k, call.v))
    return trained and hands_over(*sizes) and (form or form_name(call)) == "rows"


def form_name(call: AttentionCall) -> str:
    """The form of least estimated time; where graphs differ by head or sample, that of the first."""
    name, _ = memoized(_best_form, one_of(call.graph, 0, 0), *_head(call))
    return str(name)


# (graph, device, receivers of a block or None, whether edges are numbered) -> the graph in a form
FORMS: dict[str, Callable[[TokenGraph, torch.device, int | None, bool], Packed]] = {
    "rows": lambda graph, on, size, numbered: pack(ROWS, rows_of(graph, on, numbered)),
    "windows": lambda graph, on, size, numbered: pack(BLOCKS, windows_of(graph, on, size or 64, numbered)),
    "tiles": lambda graph, on, size, numbered: pack(BLOCKS, tiles_of(graph, on, None, numbered)),
}


def _plan(graph: TokenGraph, form: str | None, for_edges: bool, *head: Any) -> Packed:
    name, height = (form, None) if form else memoized(_best_form, graph, *head)
    return FORMS[name](graph, head[0], height, for_edges)


def _best_form(
    graph: TokenGraph, device: torch.device, heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[str, int | None]:
    """(name, receivers of a block): by estimated time, and rows for heads that are too wide for blocks."""
    best = form_of(graph, Sizes(heads, dim, value_dim, dtype), device_of(device))
    wide = max(dim, value_dim) > _widest(best.name, dtype)
    refused = best.name == "tiles" and memoized(_too_many_tiles, graph)[0] is not None
    return ("rows", None) if wide or refused else (best.name, best.height)


def _too_many_tiles(graph: TokenGraph) -> tuple[str | None]:
    """Counted once: a compiled program cannot."""
    return (tiles.unsupported_reason(graph),)


def _head(call: AttentionCall) -> tuple[torch.device, int, int, int, torch.dtype]:
    """What the form depends on; not the samples, whose number may change in a compiled program."""
    return call.q.device, call.q.shape[1], call.q.shape[3], call.v.shape[3], call.q.dtype


def _widest(form: str, dtype: torch.dtype) -> int:
    return WIDEST[form] // (2 if form != "rows" and dtype.itemsize > 2 else 1)


def _too_large(call: AttentionCall, form: str) -> str | None:
    width, widest = max(call.q.shape[3], call.v.shape[3]), _widest(form, call.q.dtype)
    if width > widest:
        return f"its {form} take heads of at most {widest} channels of {call.q.dtype}, got {width}"
    group = call.q.shape[1] // call.k.shape[1]
    if max(call.q.shape[2] * group, call.k.shape[2]) > MOST_PROGRAMS:
        return f"it takes at most {MOST_PROGRAMS} receivers times query heads of a group, and as many senders"
    numbers, count = has_edge_numbers(call), call.graph.num_edges
    if form == "tiles" and not numbers:
        (reason,) = memoized(_too_many_tiles, one_of(call.graph, 0, 0))
        return None if reason is None else str(reason)
    if count > MOST_EDGES:
        needed = f"{bytes_of(call.graph, numbers) / 2**30:.0f} GiB for {count} edges"
        return f"its {form} would need about {needed}, the limit is {MOST_EDGES} edges"
    return None


INSTEAD = "backend='tiles' (for a trial on a CPU set TRITON_INTERPRET=1 before Python starts)"
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
CAPABILITIES = Capabilities(
    DEVICES, DTYPES, double_backward=False, varying_graphs=False, cached="named", instead=INSTEAD
)
BACKEND = Backend(
    "triton",
    run,
    "kernels of this library, in the form that suits the graph; score_mods of this library alone",
    unsupported_reason,
    bytes_needed,
    compiled=True,
    recomputes=True,
    capabilities=CAPABILITIES,
)
FORM_BACKENDS = tuple(
    replace(
        BACKEND,
        name=f"triton-{form}",
        run=partial(run, form=form),
        supports=f"as triton, in the form {form} for every graph",
        unsupported_reason=partial(unsupported_reason, form=form),
        bytes_needed=partial(bytes_needed, form=form),
    )
    for form in FORMS
)
