"""One call of attention as a value: what every backend is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnn_attention._shapes import Float, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod

__all__ = ["Call"]


@dataclass(frozen=True, eq=False)
class Call:
    """Checked arguments of :func:`gnn_attention.attend`; ``out [B, Hq, dst, Dv]`` and ``lse [B, Hq, dst]`` are due.

    ``bias`` is ``[B or 1, Hq or 1, E]`` in ``graph.edge_index`` order, ``sink_logits`` is ``[Hq]``. The logit of an edge is
    ``score_mod(scale * q . k) + bias``. ``with_lse`` says whether the caller wants lse: a backend may return None otherwise.
    """

    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    graph: TokenGraph
    scale: float
    score_mod: ScoreMod | None = None
    bias: Float[Tensor, "..."] | None = None
    sink_logits: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0
    with_lse: bool = False

    def modified(self, score: Tensor, dst: Tensor, src: Tensor, batch: int = 0, head: int = 0) -> Tensor:
        """``score`` (``[B, Hq, ...]``, beginning at sample ``batch`` and head ``head``) after the score_mod, at local dst and src."""
        if self.score_mod is None:
            return score
        lead = (1,) * (score.dim() - 2)
        b = torch.arange(batch, batch + score.shape[0], device=score.device).view(-1, 1, *lead)
        h = torch.arange(head, head + score.shape[1], device=score.device).view(1, -1, *lead)
        return self.score_mod(score, b, h, dst + self.graph.dst_offset, src + self.graph.src_offset)
