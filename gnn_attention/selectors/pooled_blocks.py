"""Whole blocks of senders by what is pooled of their keys: MoBA's means and Quest's extremes."""

from __future__ import annotations

import torch
from torch import nn

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.patterns import blocks
from gnn_attention.selectors import _choice


class PooledBlocks(nn.Module):
    """Each receiver's ``top`` blocks of ``block`` senders, its own among them, by query and pooled keys.

    ``pool="mean"``: ``q . mean(k)``, MoBA (Lu et al. 2025, arXiv 2502.13189). ``"extremes"``: the bound
    ``sum_d max(q_d min_d, q_d max_d)`` of all logits in the block, Quest (Tang et al. 2024, arXiv
    2406.10774). Each head chooses for itself, as each receiver does.

    >>> x = torch.tensor([1.0, 1, 0, 0, 2, 2]).view(1, 1, 6, 1)
    >>> PooledBlocks(block=2, top=2).select(x, x).mask()[4].int().tolist()
    [1, 1, 0, 0, 1, 0]
    """

    def __init__(self, block: int, top: int, pool: str = "mean") -> None:
        super().__init__()
        self.block, self.top = checks.size("block", block, 1), checks.size("top", top, 1)
        self.pool = checks.choice("pool", pool, ("mean", "extremes"))

    @torch.no_grad()
    def select(
        self,
        q: Float[Tensor, "batch heads dst dim"],
        k: Float[Tensor, "batch kv_heads src dim"],
        graph: TokenGraph | None = None,
    ) -> TokenGraph:
        """The edges of ``graph`` (None: causal) in the chosen blocks: one without any does not compete.

        Raises as ``attend`` does for q and k.
        """
        graph = _choice.check_candidates(graph, q, k)
        AttentionCall.from_arguments(q, k, k, graph)
        # the scores are linear in the pooled keys
        if self.pool == "mean":
            queries, pooled = q, blocks.block_means(k, self.block)
        else:
            queries, pooled = blocks.positive_and_negative_parts(q), blocks.block_extremes(k, self.block)
        keys = edge_softmax.per_query_head(pooled, q.shape[1])

        def scores(rows: tuple[int, int]) -> Tensor:
            found = queries[:, :, slice(*rows)] @ keys.mT
            allowed = _choice.mask_rows(graph, rows, q.device)
            there = blocks.in_blocks(allowed.mT, self.block, False).any(-2).mT
            dst = torch.arange(*rows, device=q.device) + graph.dst_offset - graph.src_offset
            own = (dst // self.block).unsqueeze(-1) == torch.arange(keys.shape[2], device=q.device)
            return found.masked_fill(own, torch.inf).masked_fill(~there, -torch.inf)

        width, name = k.shape[2] * q.shape[1], f"top {self.top} blocks of {self.block}"
        return _choice.choose(scores, graph, width, self.top, name, q.shape[1], self.block)
