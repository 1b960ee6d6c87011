"""What a GPU kernel adds to a logit: a score_mod and a bias as a softcap and numbers for each edge.

``logit = softcap(scale q . k) + bias`` covers the score_mods of this library: ``alibi``, ``relative_bias``,
``RelativeBias`` and ``log_multiplicity`` as numbers for each edge, with gradients to what they are made of,
and chains of these after at most one ``softcap``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gnn_attention import score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu.csr import rows_of
from gnn_attention.backends.plan.csr import order_of
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod, alibi, chain, softcap

EDGEWISE = (alibi, score_mods.relative_bias, score_mods.RelativeBias, score_mods.log_multiplicity)
ADVICE = "write it as a per-edge bias, or use backend='rows' or 'flex'"


def cap_and_terms(score_mod: ScoreMod | None) -> tuple[float, list[ScoreMod]]:
    """The cap (0.0 for none) and what is added after it; NotImplementedError for another score_mod.

    >>> cap_and_terms(chain(softcap(2.0), alibi((0.5,))))
    (2.0, [alibi(slopes=(0.5,))])
    """
    cap, links = 0.0, list(_links(score_mod))
    if links and isinstance(links[0], softcap):
        cap, links = links[0].cap, links[1:]
    for link in links:
        if type(link) not in EDGEWISE:
            what = "a softcap that is not the first" if type(link) is softcap else f"the score_mod {link!r}"
            raise NotImplementedError(f"its kernels do not support {what}; {ADVICE}")
    return cap, links


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernels do not support the score_mod of a call, or None."""
    try:
        (_, terms), needed = cap_and_terms(call.score_mod), call.first_head + call.q.shape[1]
    except NotImplementedError as error:
        return str(error)
    for mod in terms:
        if type(mod) is alibi and len(mod.slopes) < needed:
            return f"alibi has {len(mod.slopes)} slopes for {needed} heads"
    return None


def cap_and_bias(call: AttentionCall) -> tuple[float, Tensor | None]:
    """(softcap, bias) of this call on a plain graph, in the form of ``Problem``; None without one."""
    (cap, terms), bias = cap_and_terms(call.score_mod), None
    if call.bias is not None:
        bias = call.bias.to(accumulation_dtype(call.q.dtype))
        bias = bias.index_select(2, order_of(call.graph, call.q.device))
    graph, device, heads, first = call.graph, call.q.device, call.q.shape[1], call.first_head
    # a score_mod adds what it makes of 0 at each edge
    for mod in terms:
        ptr, src, *_ = memoized(rows_of, graph, device, 1)[0]
        each = torch.arange(graph.num_dst, device=device)
        dst = each.repeat_interleave(ptr.diff(), output_size=src.numel())
        zero = torch.zeros(1, 1, 1, dtype=accumulation_dtype(call.q.dtype), device=device)
        head = torch.arange(first, first + heads, device=device).view(1, -1, 1)
        ends = dst + graph.dst_offset, src.long() + graph.src_offset
        if type(mod) is alibi:
            (slopes,) = memoized(_on_device, graph, mod.slopes, zero.dtype, device)
            extra = -slopes[head] * (ends[0] - ends[1]).abs()
        else:
            extra = mod(zero, torch.zeros_like(head[:, :1]), head, *ends)
        bias = extra if bias is None else bias + extra
    return cap, None if bias is None else bias.expand(call.q.shape[0], heads, -1)


def _links(score_mod: ScoreMod | None) -> Iterable[ScoreMod]:
    if type(score_mod) is chain:
        for link in score_mod.mods:
            yield from _links(link)
    elif score_mod is not None:
        yield score_mod


def _on_device(
    graph: TokenGraph, numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor]:
    """Memoized on the graph, since to put numbers on a device is to wait for it."""
    return (torch.tensor(numbers, dtype=dtype, device=device),)
