"""Native sparse attention: attention over three graphs in one layer, combined by learned gates."""

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
    """Compute ``collect(sum over c of g_c(x) attend(q, k_c, v_c, graph_c))`` with three causal graphs.

    In the *compressed* branch a token attends to pooled blocks that lie wholly in its past. A block
    of ``block`` tokens begins every ``stride`` tokens. MLPs compute the key and the value of a
    block from those of its tokens and position embeddings. In the *selected* branch a token attends
    to ``top`` blocks of ``selected`` tokens: the first ``initial``, the last ``local``, and those
    with the largest weights of the compressed branch, summed over a group of heads. In the *window*
    branch it attends to the last ``window`` tokens. Gates are ``sigmoid(x W)``, one for each head
    and branch. Each branch has its own keys and values; ``rotary`` rotates queries and keys of the
    last two branches. Selection has no gradient; its scores learn through the compressed branch.

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
        """Raises ValueError for an invalid size, or if ``initial + local`` exceeds ``top``."""
        super().__init__()
        self.block, self.stride = checks.size("block", block, 1), checks.size("stride", stride, 1)
        self.selected, self.top = checks.size("selected", selected, 1), checks.size("top", top, 1)
        self.initial, self.local = checks.size("initial", initial), checks.size("local", local)
        self.window = checks.size("window", window, 1)
        if initial + local > top:
            raise ValueError(f"top must hold the {initial} initial and {local} local blocks, got {top}")
        self.heads = StandardHeads(width, num_heads, head_dim, num_kv_heads=num_kv_heads)
        dim, groups = self.heads.head_dim, self.heads.num_kv_heads
        # The first axis is the branch, compressed or selected; the second is the key or the value.
        self.senders = nn.Parameter(torch.randn(2, 2, groups, width, dim) * width**-0.5)
        self.places = nn.Parameter(torch.zeros(2, block, dim))
        # The first MLP pools keys, the second values.
        self.pools = nn.ModuleList(
            nn.Sequential(nn.Linear(block * dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(2)
        )
        self.gates = nn.Linear(width, 3 * num_heads)
        self.rotary, self.backend = rotary, backend

    def forward(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Return the update of every token."""
        n = x.shape[1]
        backend = self.backend
        q, (k, v) = self.heads.receive(x), self.heads.send(x)
        compressed_k, compressed_v = (self._pool(project(x, W), i) for i, W in enumerate(self.senders[0]))
        selected_k, selected_v = (project(x, W) for W in self.senders[1])
        graph = patterns.compressed_blocks(n, self.block, self.stride)
        compressed, info = attend(q, compressed_k, compressed_v, graph, backend=backend, return_info=True)
        rotated_q, k, selected_k = (self._rotate(y) for y in (q, k, selected_k))
        selected = attend(rotated_q, selected_k, selected_v, self.select(info), backend=backend)
        recent = attend(rotated_q, k, v, patterns.window(n, self.window), backend=backend)
        gates = self.gates(x).sigmoid().unflatten(-1, (3, -1, 1)).permute(2, 0, 3, 1, 4)
        update: Tensor = self.heads.collect((gates * torch.stack([compressed, selected, recent])).sum(0))
        return update

    @torch.no_grad()
    def select(self, info: AttentionInfo) -> TokenGraph:
        """Return the graph of the selected branch, chosen by the weights of the compressed one."""
        q, k = info.call.q, info.call.k
        n = info.call.graph.num_dst
        blocks = torch.arange(-(-n // self.selected), device=q.device)
        # Equation 9 of the paper counts the strides that a pooled block shares with a candidate block.
        starts = (torch.arange(k.shape[2], device=q.device) * self.stride).unsqueeze(-1)
        ends = torch.minimum(starts + self.block, (blocks + 1) * self.selected)
        overlap = (ends - torch.maximum(starts, blocks * self.selected)).clamp(min=0)
        num_strides = overlap.to(info.lse) / self.stride

        def compute_scores(rows: tuple[int, int]) -> Tensor:
            weights = info.weight_matrix(rows=rows)
            weights = weights.view(len(q), k.shape[1], q.shape[1] // k.shape[1], *weights.shape[2:])
            importance = weights.sum(2) @ num_strides
            own_block = (torch.arange(*rows, device=q.device) // self.selected).unsqueeze(-1)
            is_fixed = (blocks < self.initial) | (blocks > own_block - self.local)
            return importance.masked_fill(is_fixed, torch.inf).masked_fill(blocks > own_block, -torch.inf)

        row_size = q.shape[0] * q.shape[1] * max(1, k.shape[2])
        name = f"{self.top} selected blocks of {self.selected}"
        graph = patterns.causal(n)
        return _choice.choose(compute_scores, graph, row_size, self.top, name, q.shape[1], self.selected)

    def _pool(self, x: Tensor, index: int) -> Tensor:
        if x.shape[2] < self.block:
            return x[:, :, :0]
        blocks = x.unfold(2, self.block, self.stride).mT + self.places[index]
        pooled: Tensor = self.pools[index](blocks.flatten(-2))
        return pooled

    def _rotate(self, x: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary.turn(x, torch.arange(x.shape[2], device=x.device))
