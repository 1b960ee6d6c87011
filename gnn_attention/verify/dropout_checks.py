"""Dropout is that of the edge's key: the very weights that ``_edge_dropout`` names are dropped, forward and backward.

One seed gives one answer on every backend, form and device; the normaliser is that before dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gnn_attention import _edge_dropout
from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, GPU_ONLY, VALUE_DIM, Check, Settings, bound

__all__ = ["dropout_checks"]

PROBABILITY = 0.3
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")


def dropout_checks(settings: Settings) -> Iterator[Check]:
    """Graphs x dtypes x backends."""
    for dtype in [name for name in settings.dtypes if name not in GPU_ONLY]:
        for graph in [name for name in DROPOUT_GRAPHS if name in settings.graphs]:
            for backend in settings.backends:
                run = bound(_run, settings, DTYPES[dtype], GRAPHS[graph], backend)
                yield Check("dropout", backend.name, dtype, f"the weights dropped on {graph} are those of the key", run)


def _run(settings: Settings, dtype: torch.dtype, case: GraphCase, backend: Backend) -> Mapping[str, Any]:
    device = torch.device(settings.device)
    q, k, v, direction = _drawn(settings, dtype, case)
    own_q, own_k, own_v = leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        out = attend(own_q, own_k, own_v, case.graph, dropout=PROBABILITY, backend=backend)
        torch.manual_seed(settings.seed)
        seed = _edge_dropout.draw_seed(device).cpu()
    found = [out, *torch.autograd.grad(out, leaves, direction.to(device))]
    wanted = _truth(q, k, v, direction, case, seed)
    for name, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, wanted, strict=True):
        worst = float((a.detach().cpu().double() - b).abs().max() / b.abs().max())
        if not worst <= 16 * torch.finfo(dtype).eps:
            return {"passed": False, "message": f"{name} is not that of the dropped weights: off by {worst:.2g} of the largest"}
    return {"passed": True}


def _drawn(settings: Settings, dtype: torch.dtype, case: GraphCase) -> list[Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 4)
    dst, src = case.graph.num_dst, case.graph.num_src
    shapes = ((HEADS, dst, DIM), (KV_HEADS, src, DIM), (KV_HEADS, src, VALUE_DIM), (HEADS, dst, VALUE_DIM))
    return [torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def _truth(q: Tensor, k: Tensor, v: Tensor, direction: Tensor, case: GraphCase, seed: Tensor) -> list[Tensor]:
    """``(softmax(logits) * kept / (1 - p)) v`` and its gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    serving = [h // (HEADS // KV_HEADS) for h in range(HEADS)]
    logits = torch.einsum("bhid,bhjd->bhij", leaves[0], leaves[1][:, serving]) * DIM**-0.5
    dst, src = case.positions()
    sample, head = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    stays = _edge_dropout.kept(seed, sample, head, dst, src, PROBABILITY)
    weights = oracle.masked_softmax(logits, case.mask) * stays / (1 - PROBABILITY)
    out = torch.einsum("bhij,bhjv->bhiv", weights, leaves[2][:, serving])
    return [out.detach(), *torch.autograd.grad(out, leaves, direction.double())]
