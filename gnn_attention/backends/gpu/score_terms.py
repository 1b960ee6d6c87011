"""A score_mod and a bias as the GPU kernel reads them: a softcap and a value for each head and edge.

The kernel computes ``logit = softcap(scale (q . k + r . a)) + bias``. The score_mods ``alibi``,
``relative_bias``, ``RelativeBias`` and ``log_multiplicity`` become terms of the bias; its gradient
reaches their parameters. A chain of these score_mods may begin with one ``softcap``.
"""

from collections.abc import Iterable

import torch

from gnn_attention import score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu.csr import pack_sides
from gnn_attention.edge_ops.edge_lists import edge_order
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod, alibi, chain, softcap

TERM_TYPES = (alibi, score_mods.relative_bias, score_mods.RelativeBias, score_mods.log_multiplicity)


def split_score_mod(score_mod: ScoreMod | None) -> tuple[float, list[ScoreMod]]:
    """Split a score_mod into a softcap (0.0 for none) and score_mods that add terms, or raise.

    >>> split_score_mod(chain(softcap(2.0), alibi((0.5,))))
    (2.0, [alibi(slopes=(0.5,))])
    """
    cap = 0.0
    mods = list(_flatten_chain(score_mod))
    if mods and isinstance(mods[0], softcap):
        cap, mods = mods[0].cap, mods[1:]
    for mod in mods:
        if type(mod) not in TERM_TYPES:
            raise NotImplementedError(
                f"the kernel does not support the score_mod {mod!r} (a softcap must come first in a chain); "
                "write it as a per-edge bias, or use backend='flex'"
            )
    return cap, mods


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the kernel does not support the score_mod of a call, or None."""
    num_heads = call.first_head + call.q.shape[1]
    try:
        _, mods = split_score_mod(call.score_mod)
    except NotImplementedError as error:
        return str(error)
    for mod in mods:
        if type(mod) is alibi and len(mod.slopes) < num_heads:
            return f"alibi has {len(mod.slopes)} slopes for {num_heads} heads"
    return None


def make_cap_and_bias(call: AttentionCall) -> tuple[float, Tensor | None]:
    """Return the ``softcap`` and ``bias`` (or None) of the :class:`Problem` of a call."""
    graph, device, num_heads = call.graph, call.q.device, call.q.shape[1]
    dtype = accumulation_dtype(call.q.dtype)
    cap, mods = split_score_mod(call.score_mod)
    bias = None
    if call.bias is not None:
        bias = call.bias.to(dtype).index_select(2, edge_order(graph, device))
    for mod in mods:
        ptr, src, *_ = memoized(pack_sides, graph, device, 1)[0]
        dst = torch.arange(graph.num_dst, device=device)
        dst = dst.repeat_interleave(ptr.diff(), output_size=src.numel()) + graph.dst_offset
        src = src.long() + graph.src_offset
        head = torch.arange(call.first_head, call.first_head + num_heads, device=device).view(1, -1, 1)
        if type(mod) is alibi:
            (slopes,) = memoized(_copy_to_device, graph, mod.slopes, dtype, device)
            term = -slopes[head] * (dst - src).abs()
        else:
            # These score_mods only add a term, so the term is their result for a score of 0.
            zero = torch.zeros(1, 1, 1, dtype=dtype, device=device)
            term = mod(zero, torch.zeros_like(head[:, :1]), head, dst, src)
        bias = term if bias is None else bias + term
    return cap, None if bias is None else bias.expand(call.q.shape[0], num_heads, -1)


def _flatten_chain(score_mod: ScoreMod | None) -> Iterable[ScoreMod]:
    if type(score_mod) is chain:
        for mod in score_mod.mods:
            yield from _flatten_chain(mod)
    elif score_mod is not None:
        yield score_mod


def _copy_to_device(
    graph: TokenGraph, slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor]:
    """Copy slopes to a device; the graph caches the copy, because copying waits for the device."""
    return (torch.tensor(slopes, dtype=dtype, device=device),)
