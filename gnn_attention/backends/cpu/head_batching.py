"""All heads of a small graph as one head of a larger: the graph repeated along the diagonal, head after head.

Every operation has a price of its own, so that many heads of few edges cost less together. Grouped heads stay
grouped: the query heads of a group hear the same senders.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.plan.csr import sorted_edges
from gnn_attention.backends.plan.plan import Edges

MOST_EDGES = 10**5  # of all heads together; above, one head at a time is as fast and takes less memory
MOST_KEPT = 4  # folded lists kept for each list of edges
_kept: MutableMapping[Tensor, dict[tuple[int, int], Edges]] = (
    WeakIdKeyDictionary()
)  # by the list's own tensor


def worth_folding(edges: Edges, slices: int) -> bool:
    """True if so many samples and heads of these edges are best taken at once."""
    return slices > 1 and slices * edges.src.numel() <= MOST_EDGES


def folded(edges: Edges, slices: int, kv_slices: int) -> Edges:
    """The edges repeated for ``slices`` sets of receivers over ``kv_slices`` sets of senders; kept while the
    list lives.
    """
    known = _kept.setdefault(edges.ptr, {})
    found = known.get((slices, kv_slices))
    if found is None:  # other threads may come and go meanwhile
        found = _fold(edges, slices, kv_slices)
        if len(known) >= MOST_KEPT:
            known.pop(next(iter(list(known)), (0, 0)), None)
        known[slices, kv_slices] = found
    return replace(found, fresh=edges.fresh)


def flat(x: Tensor) -> Tensor:
    """``[batch, heads, tokens, dim]`` as one sample and head ``[1, 1, batch * heads * tokens, dim]``, a view
    where it can be.
    """
    return (
        x.reshape(1, 1, -1, x.shape[-1]) if x.numel() else x.new_zeros(1, 1, x.shape[:3].numel(), x.shape[-1])
    )


def _fold(edges: Edges, slices: int, kv_slices: int) -> Edges:
    num_dst, num_src = edges.ptr.numel() - 1, edges.out_ptr.numel() - 1
    slice_ = torch.arange(slices, device=edges.src.device).unsqueeze(1)
    dst = edges.dst + slice_ * num_dst
    src = edges.src + slice_ // (slices // kv_slices) * num_src
    return sorted_edges(src.flatten(), dst.flatten(), kv_slices * num_src, slices * num_dst)[0]
