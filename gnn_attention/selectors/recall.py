"""The fraction of the attention weights that a selection keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph

# Rounding may make a fraction exceed 1 by this much.
TOLERANCE = 1e-3


@torch.no_grad()
def recall(
    info: AttentionInfo, chosen: TokenGraph, backend: str | Backend = "auto"
) -> Float[Tensor, "batch heads dst"]:
    """Return for each receiver the fraction of its weights that lies on the edges of ``chosen``.

    The fraction is ``exp(lse over chosen - lse)``, which any backend computes without stored weights.
    It is NaN for an isolated receiver. ``info`` comes from ``attend(..., return_info=True)``, and
    ``chosen`` must be a subgraph of its graph. Raises ValueError if ``chosen`` has other tokens, or
    if edges outside that graph raise a fraction above 1, and NotImplementedError for a bias or sinks.

    >>> import gnn_attention as ga
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> _, info = ga.attend(x, x, x, ga.patterns.causal(4), return_info=True)
    >>> [round(share, 4) for share in recall(info, ga.patterns.window(4, 2)).flatten().tolist()]
    [1.0, 1.0, 0.6667, 0.5]
    """
    call = checks.instance("info", info, AttentionInfo).call
    if checks.instance("chosen", chosen, TokenGraph).frame[:2] != call.graph.frame[:2]:
        raise ValueError(f"chosen must have the tokens of {info.call.graph!r}, got {chosen!r}")
    call = replace(call, graph=chosen, bias=None, with_lse=True, dropout=0.0, v=info.call.v[..., :1])
    if info.call.bias is not None or call.sink_logits is not None:
        raise NotImplementedError("recall supports no bias and no sinks: leave them out of the call")
    lse = AttentionInfo(call, run_attention(call, backend)[1]).lse
    fraction = (lse - info.lse).exp()
    if bool((fraction > 1 + TOLERANCE).any()):
        raise ValueError(f"chosen must be a subgraph of {info.call.graph!r}, but {chosen!r} is not")
    output: Tensor = fraction.masked_fill(info.lse == -torch.inf, torch.nan)
    return output
