"""Attention over well filled tiles and a list of all other edges: pieces of one plan, in one operator."""

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.plan import work
from gnn_attention.graph import memoized

MOST_EDGES = 2**28  # whose list takes some GiB


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    return attention_op.along_plan(call, "mixed")


def unsupported_reason(call: AttentionCall) -> str | None:
    edges_left = memoized(work.mixed_work, one_of(call.graph, 0, 0)).edges
    if edges_left <= MOST_EDGES:
        return None
    return f"{edges_left} edges are left outside of well filled tiles, the limit is {MOST_EDGES}"


def bytes_needed(call: AttentionCall) -> int:
    """An estimate of the extra memory: what one call of a kernel takes."""
    return 2**27


BACKEND = Backend(
    "mixed",
    run,
    "tiles where they are well filled, rows for all other edges",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(
        devices=("cpu", "meta"),
        score_mod=False,
        bias=False,
        dropout=False,
        double_backward=False,
        varying_graphs=False,
        cached=True,
        visits_non_edges=True,
        instead="backend='tiles' or 'rows'",
    ),
)
