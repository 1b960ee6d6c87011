"""A selector that computes all logits: the oracle with which cheaper selectors are compared."""

from __future__ import annotations

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.backends import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod
from gnn_attention.selectors import _choice

PER_CHOICES = ("head", "group", "all")


class TopK(nn.Module):
    """Choose the ``k`` senders with the largest exact logits ``score_mod(scale * q . k)``.

    ``per="head"`` chooses for each head. ``"group"`` chooses once for the heads that share a
    key head, and ``"all"`` chooses once for all heads. Both choose the senders with the largest
    attention weights, summed over these heads. Among equal logits any may be chosen.

    >>> x = torch.tensor([[1.0], [0.0], [2.0], [3.0]]).view(1, 1, 4, 1)
    >>> TopK(2).select(x, x).mask().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    """

    def __init__(
        self, k: int, per: str = "head", scale: float | None = None, score_mod: ScoreMod | None = None
    ) -> None:
        super().__init__()
        self.k = checks.size("k", k)
        self.per = checks.choice("per", per, PER_CHOICES)
        self.scale, self.score_mod = scale, score_mod

    @torch.no_grad()
    def select(
        self,
        q: Float[Tensor, "batch heads dst dim"],
        k: Float[Tensor, "batch kv_heads src dim"],
        graph: TokenGraph | None = None,
    ) -> TokenGraph:
        """Return the chosen edges of ``graph``, by default causal. Raises the errors of ``attend``."""
        graph = _choice.check_candidates(graph, q, k)
        info = AttentionInfo(AttentionCall.from_arguments(q, k, k, graph, self.scale, self.score_mod), None)
        num_groups = {"head": q.shape[1], "group": k.shape[1], "all": 1}[self.per]

        def compute_scores(rows: tuple[int, int]) -> Tensor:
            logits = info.logit_matrix(rows)
            if num_groups == q.shape[1]:
                return logits
            logits = logits.reshape(len(q), num_groups, q.shape[1] // num_groups, *logits.shape[2:])
            has_edge = (logits > -torch.inf).any(2)
            return logits.softmax(-1).sum(2).masked_fill(~has_edge, -torch.inf)

        row_size = q.shape[0] * q.shape[1] * graph.num_src
        return _choice.choose(compute_scores, graph, row_size, self.k, f"top {self.k}", q.shape[1])
