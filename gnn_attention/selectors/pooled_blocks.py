"""Whole blocks of senders by what is pooled of their keys: MoBA's means and Quest's extremes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import edges
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.selectors import _choice


class PooledBlocks(nn.Module):
    """Each receiver's ``top`` blocks of ``block`` senders, its own among them, by query and pooled keys.

    ``pool="mean"``: ``q . mean(k)``, MoBA (Lu et al. 2025, arXiv 2502.13189). ``"extremes"``: the bound
    ``sum_d max(q_d min_d, q_d max_d)`` of all logits in the block, Quest (Tang et al. 2024, arXiv
    2406.10774). Each head chooses for itself. ``per="token"`` is the papers' choice; ``per="block"`` takes
    the mean over a block of queries, whose graph is tiles: quick, but *not causal in its choice*, since later
    queries of the block take part (for encoders, and prompts that are there as a whole).

    >>> x = torch.tensor([1.0, 1, 0, 0, 2, 2]).view(1, 1, 6, 1)
    >>> PooledBlocks(block=2, top=2).select(x, x).mask()[4].int().tolist()
    [1, 1, 0, 0, 1, 0]
    """

    def __init__(self, block: int, top: int, pool: str = "mean", per: str = "token") -> None:
        super().__init__()
        self.block, self.top = checks.size("block", block, 1), checks.size("top", top, 1)
        self.pool = checks.choice("pool", pool, ("mean", "extremes"))
        self.per = checks.choice("per", per, ("token", "block"))

    @torch.no_grad()
    def select(
        self,
        q: Float[Tensor, "batch heads dst dim"],
        k: Float[Tensor, "batch kv_heads src dim"],
        graph: TokenGraph | None = None,
    ) -> TokenGraph:
        """The edges of ``graph`` (None: causal) from the chosen blocks; one without an edge does not compete.

        With ``per="block"`` a causal graph, or all pairs: ValueError for others.
        """
        graph, by_block = _choice.checked(graph, q.shape[2], k.shape[2]), self.per == "block"
        queries, keys = self._query_features(q), edges.per_query_head(self._key_features(k), q.shape[1])
        queries = _pooled(queries, self.block) if by_block else queries
        if by_block and not (graph.is_causal() or graph.is_full()):
            raise ValueError(f"per='block' chooses from a causal graph or all pairs, got {graph!r}")

        def scores(rows: tuple[int, int]) -> Tensor:
            found = queries[:, :, slice(*rows)] @ keys.mT
            step = self.block if by_block else 1
            last = min(graph.num_dst, rows[1] * step)
            there = _choice.allowed(graph, (rows[0] * step, last), q.device)
            there = _blocks_with_any(there, self.block)
            there = _blocks_with_any(there.mT, step).mT if by_block else there
            first = graph.dst_offset - graph.src_offset
            dst = torch.arange(*rows, device=q.device) * step + first
            own = (dst // self.block).unsqueeze(-1) == torch.arange(keys.shape[2], device=q.device)
            return found.masked_fill(own, torch.inf).masked_fill(~there, -torch.inf)

        blocks = [scores(rows) for rows in _choice.row_blocks(queries.shape[2], k.shape[2] * q.shape[1])]
        index = torch.cat([_choice.largest(found, self.top) for found in blocks], 2)
        name = f"top {self.top} blocks of {self.block}"
        if not by_block:
            return _choice.subgraph(_choice.tokens_of(index, self.block, graph), graph, name)
        sizes = graph.num_dst, graph.num_src, not graph.is_full()
        return TokenGraph.from_block_indices(_choice.own_axes(index), self.block, *sizes, name=name)

    def _query_features(self, q: Tensor) -> Tensor:
        """What is linear in the pooled keys."""
        return q if self.pool == "mean" else torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)

    def _key_features(self, k: Tensor) -> Tensor:
        if self.pool == "mean":
            return _pooled(k, self.block)
        return torch.cat([_pooled(k, self.block, torch.amax), _pooled(k, self.block, torch.amin)], -1)


def _pooled(x: Tensor, block: int, pool: Callable[..., Tensor] = torch.mean) -> Tensor:
    """``[..., blocks, dim]``; the last block may be short."""
    return torch.stack([pool(part, dim=-2) for part in torch.split(x, block, -2)], -2)


def _blocks_with_any(there: Tensor, block: int) -> Tensor:
    filled = functional.pad(there, (0, -there.shape[-1] % block))
    return filled.view(*there.shape[:-1], -1, block).any(-1)
