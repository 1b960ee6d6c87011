"""Selection of whole blocks by pooled keys, which are means as in MoBA or extremes as in Quest."""

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
    """Choose ``top`` blocks of ``block`` senders by pooled keys; the receiver's own block is one of them.

    ``pool="mean"`` scores a block by ``q . mean(k)``, as MoBA does (Lu et al. 2025, arXiv
    2502.13189). ``"extremes"`` scores it by ``sum_d max(q_d min_d, q_d max_d)``, a bound on its
    logits, as Quest does (Tang et al. 2024, arXiv 2406.10774). Each head chooses for itself.

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
        """Return the edges of ``graph``, by default causal, in the chosen blocks.

        A block without edges does not compete. Raises the errors of ``attend`` for q and k.
        """
        graph = _choice.check_candidates(graph, q, k)
        AttentionCall.from_arguments(q, k, k, graph)
        # Both scores are products of queries, which Quest splits by sign, with pooled keys.
        if self.pool == "mean":
            queries, pooled_keys = q, blocks.block_means(k, self.block)
        else:
            queries, pooled_keys = blocks.split_signs(q), blocks.block_extremes(k, self.block)
        keys = edge_softmax.per_query_head(pooled_keys, q.shape[1])

        def compute_scores(rows: tuple[int, int]) -> Tensor:
            scores = queries[:, :, slice(*rows)] @ keys.mT
            mask = _choice.mask_rows(graph, rows, q.device)
            has_edge = blocks.split_blocks(mask.mT, self.block, False).any(-2).mT
            dst = torch.arange(*rows, device=q.device) + graph.dst_offset - graph.src_offset
            is_own = (dst // self.block).unsqueeze(-1) == torch.arange(keys.shape[2], device=q.device)
            return scores.masked_fill(is_own, torch.inf).masked_fill(~has_edge, -torch.inf)

        name = f"top {self.top} blocks of {self.block}"
        row_size = k.shape[2] * q.shape[1]
        return _choice.choose(compute_scores, graph, row_size, self.top, name, q.shape[1], self.block)
