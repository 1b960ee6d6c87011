"""Native sparse attention: three graphs in one layer, added by learned gates."""

from __future__ import annotations

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import AttentionInfo, attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.heads.arrays import project
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import _choice


class NativeSparseAttention(nn.Module):
    """``update = collect(sum over c of g_c(x) attend(q, k_c, v_c, graph_c))`` for three causal graphs.

    *compressed*: pooled blocks of ``block`` tokens at a ``stride`` that are wholly past, each a key and value
    made by an MLP from those of its tokens with learned positions; *selected*: ``top`` blocks of ``selected``
    tokens, the first ``initial``, the last ``local`` and those with most of the compressed branch's weights,
    summed over the heads of a group, which choose together; *window*: the last ``window`` tokens. Gates are
    ``sigmoid(x W)``, one for each head and branch. Each branch has keys and values of its own; queries and
    keys of the last two are turned by ``rotary``. The choice has no gradient: the scores that make it learn
    as weights of the compressed branch.

    Source: Yuan et al. 2025 (arXiv 2502.11089), sections 3.2 and 3.3.

    >>> layer = NativeSparseAttention(8, num_heads=2, block=4, stride=2, selected=4, top=3, window=4)
    >>> layer(torch.zeros(1, 20, 8)).shape
    torch.Size([1, 20, 8])
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        block: int = 32,
        stride: int = 16,
        selected: int = 64,
        top: int = 16,
        initial: int = 1,
        local: int = 2,
        window: int = 512,
        rotary: Rotary | None = Rotary(),  # noqa: B008 (frozen)
        backend: str | Backend = "auto",
    ) -> None:
        """ValueError unless ``initial + local <= top``, and for sizes that do not fit."""
        super().__init__()
        self.block, self.stride = checks.size("block", block, 1), checks.size("stride", stride, 1)
        self.selected, self.top = checks.size("selected", selected, 1), checks.size("top", top, 1)
        self.initial, self.local = checks.size("initial", initial), checks.size("local", local)
        self.window = checks.size("window", window, 1)
        if initial + local > top:
            raise ValueError(f"top must hold the {initial} initial and {local} local blocks, got {top}")
        self.heads = StandardHeads(width, num_heads, head_dim, num_kv_heads=num_kv_heads)
        dim, groups = self.heads.head_dim, self.heads.num_kv_heads
        # keys and values of the compressed and of the selected branch
        self.senders = nn.Parameter(torch.randn(2, 2, groups, width, dim) * width**-0.5)
        self.places = nn.Parameter(torch.zeros(2, block, dim))
        # of keys, of values
        self.pools = nn.ModuleList(
            nn.Sequential(nn.Linear(block * dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(2)
        )
        self.gates = nn.Linear(width, 3 * num_heads)
        self.rotary, self.backend = rotary, backend

    def forward(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """The update of every token."""
        n, q = x.shape[1], self.heads.receive(x)
        (k, v), own = self.heads.send(x), [[project(x, W) for W in pair] for pair in self.senders]
        pooled_k, pooled_v = (self._pool(y, branch) for branch, y in enumerate(own[0]))
        graph = patterns.compressed_blocks(n, self.block, self.stride)
        compressed, info = attend(q, pooled_k, pooled_v, graph, backend=self.backend, return_info=True)
        turned, near, far = (self._rotate(y) for y in (q, k, own[1][0]))
        selected = attend(turned, far, own[1][1], self.select(info), backend=self.backend)
        recent = attend(turned, near, v, patterns.window(n, self.window), backend=self.backend)
        gates = self.gates(x).sigmoid().unflatten(-1, (3, -1, 1)).permute(2, 0, 3, 1, 4)
        update: Tensor = self.heads.collect((gates * torch.stack([compressed, selected, recent])).sum(0))
        return update

    @torch.no_grad()
    def select(self, info: AttentionInfo) -> TokenGraph:
        """The graph of the selected branch, by the weights of the compressed one."""
        q, k, n = info.call.q, info.call.k, info.call.graph.num_dst
        blocks, groups = torch.arange(-(-n // self.selected), device=q.device), k.shape[1]
        # How many strides of tokens a pooled block shares with a block to select: equation 9.
        pooled = (torch.arange(k.shape[2], device=q.device) * self.stride).unsqueeze(-1)
        ends = torch.minimum(pooled + self.block, (blocks + 1) * self.selected)
        overlap = (ends - torch.maximum(pooled, blocks * self.selected)).clamp(min=0)
        shares = overlap.to(info.lse) / self.stride

        def scores(rows: tuple[int, int]) -> Tensor:
            weights = info.weight_matrix(rows=rows)
            apart = weights.view(len(q), groups, q.shape[1] // groups, *weights.shape[2:])
            importance = apart.sum(2) @ shares
            own = (torch.arange(*rows, device=q.device) // self.selected).unsqueeze(-1)
            always = (blocks < self.initial) | (blocks > own - self.local)
            return importance.masked_fill(always, torch.inf).masked_fill(blocks > own, -torch.inf)

        width = q.shape[0] * q.shape[1] * max(1, k.shape[2])
        name = f"{self.top} selected blocks of {self.selected}"
        return _choice.choose(scores, patterns.causal(n), width, self.top, name, q.shape[1], self.selected)

    def _pool(self, x: Tensor, branch: int) -> Tensor:
        if x.shape[2] < self.block:
            return x[:, :, :0]
        apart = x.unfold(2, self.block, self.stride).mT + self.places[branch]
        pooled: Tensor = self.pools[branch](apart.flatten(-2))
        return pooled

    def _rotate(self, x: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary.turn(x, torch.arange(x.shape[2], device=x.device))
