"""Which tokens take more than their share of attention, in every head of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo, attended
from gnn_attention.backends import AttentionCall, Backend
from gnn_attention.huggingface import attending
from gnn_attention.huggingface._overrides import check_routed

__all__ = ["MeanWeights", "mean_weights", "sinks"]

EDGES_AT_ONCE = 2**18
Group = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class MeanWeights:
    """Means over groups of edges, in each layer and head: of weights, of their squares, of uniform weights.

    NaN where a group has no edge.
    """

    weight: Float[Tensor, "layers heads groups"]
    square: Float[Tensor, "layers heads groups"]
    uniform: Float[Tensor, "layers heads groups"]

    @property
    def ratio(self) -> Float[Tensor, "layers heads groups"]:
        """How many times its share a group takes."""
        return self.weight / self.uniform

    def over(self, times: float = 8.0) -> Int[Tensor, "found 3"]:
        """``(layer, head, group)`` of all that take more than ``times`` their share, in this order."""
        return (self.ratio > checks.number("times", times, positive=True)).nonzero()


def sinks(model: nn.Module, ids: Int[Tensor, "batch tokens"], **inputs: Any) -> MeanWeights:
    """The mean weight that each token gets from the receivers that may attend to it, by layer and head.

    A *sink* has a ``ratio`` far above 1: ``.over(8)`` lists layer, head and token of all that take more than
    eight times what uniform weights over the same edges would give. ``inputs`` go to the model beside ``ids``
    (``attention_mask``). Graphs of ``use_graph`` count. Weights come from lse, in chunks of edges.

    Raises ValueError for a model on another attention than ``"gnn_attention"``, or one that calls none.
    Sources: arXiv 2309.17453, 2504.02732.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8)
    >>> sizes |= dict(num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaModel(LlamaConfig(**sizes, attn_implementation="gnn_attention")).eval()
    >>> found = sinks(model, torch.tensor([[1, 1, 1]]))  # uniform of token 0: (1 + 1/2 + 1/3) / 3
    >>> tuple(found.weight.shape), [round(share, 4) for share in found.uniform[0, 0].tolist()]
    ((2, 2, 3), [0.6111, 0.4167, 0.3333])
    """
    return mean_weights(model, ids, _sender, ids.shape[-1], **inputs)


@torch.no_grad()
def mean_weights(
    model: nn.Module, ids: Int[Tensor, "batch tokens"], group: Group, groups: int, **inputs: Any
) -> MeanWeights:
    """Mean weights by ``group(dst, src)``, the number of an edge's group in ``0 .. groups - 1``.

    By distance: ``mean_weights(model, ids, torch.sub, T)``. Raises as :func:`sinks` does.
    """
    check_routed(model)
    found: dict[int, Tensor] = {}
    with attending(lambda module: Backend("recording", partial(_record, found, id(module), group, groups))):
        model(ids, **inputs)
    if not found:
        raise ValueError(f"model must call its attention, but {type(model).__name__} did not")
    sums = torch.stack(list(found.values()))
    return MeanWeights(*(sums[:, :3] / sums[:, 3:]).unbind(1))


def _sender(dst: Tensor, src: Tensor) -> Tensor:
    return src


def _record(
    found: dict[int, Tensor], module: int, group: Group, groups: int, call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """The call on any backend; the sums go into ``found[module]``."""
    call = replace(call, with_lse=True)
    out, lse = attended(call, "auto")
    info, heads = AttentionInfo(call, lse), slice(call.first_head, call.first_head + call.q.shape[1])
    degree = call.graph.in_degree().to(out.device)
    for positions in torch.split(torch.arange(call.graph.num_edges, device=out.device), EDGES_AT_ONCE):
        src, dst = call.graph.edges_on(out.device)[:, positions]
        weight = info.weights(positions).double()
        fair = (1.0 / degree[dst].double()).expand_as(weight)
        values = torch.stack([weight, weight.square(), fair, torch.ones_like(weight)]).sum(1)
        at = group(dst + call.graph.dst_offset, src + call.graph.src_offset)
        sums = values.new_zeros(*values.shape[:2], groups).index_add_(2, at, values)
        _room(found, module, heads.stop, groups)[:, heads] += sums.cpu()
    return out, lse


def _room(found: dict[int, Tensor], module: int, heads: int, groups: int) -> Tensor:
    """The sums so far, for as many heads: parts of a graph that differs by head come one by one."""
    old = found.get(module, torch.zeros(4, 0, groups, dtype=torch.float64))
    if old.shape[1] < heads:
        old = torch.cat([old, old.new_zeros(4, heads - old.shape[1], groups)], 1)
        found[module] = old
    return found[module]
