"""Which tokens take more than their share of attention, in every head of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo, attended
from gnn_attention.backends import AttentionCall, Backend
from gnn_attention.huggingface import attending
from gnn_attention.huggingface._alignment import Place
from gnn_attention.huggingface._overrides import check_routed, crosses
from gnn_attention.huggingface.surgery import Watching
from gnn_attention.interpret.trace import pairs

__all__ = ["MeanWeights", "mean_weights", "sinks"]

# of four sums in float64 for each of 8 heads: 4 MiB
EDGES_AT_ONCE = 2**14
Group = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class MeanWeights:
    """Means over groups of edges, in each layer and head: of weights, of their squares, of uniform weights.

    Means over the edges of a text, then over the texts with an edge in the group; NaN where none has one.
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
    (``attention_mask``). Tokens count from the first of each text, and padding does not count: the result is
    the mean over the texts of what each gives alone. Graphs of ``use_graph`` count. Weights come from lse, in
    chunks of edges.

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

    By distance: ``mean_weights(model, ids, torch.sub, T)``. ``dst`` and ``src`` are ``[batch or 1, edges]``.
    Raises as :func:`sinks` does.
    """
    check_routed(model)
    found: dict[int, list[Tensor]] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def watching(module: nn.Module) -> Watching:
        is_cross = crosses(names.get(id(module), ""), module)
        sums = partial(_record, found.setdefault(id(module), []), is_cross, group, groups)
        return Watching.over(sums, "auto")

    with attending(watching):
        model(ids, **inputs)
    if not found:
        raise ValueError(f"model must call its attention, but {type(model).__name__} did not")
    means = torch.stack([_mean_over_texts(torch.cat(calls, 1)) for calls in found.values()], 1)
    return MeanWeights(*means)


def _sender(dst: Tensor, src: Tensor) -> Tensor:
    return src


def _mean_over_texts(sums: Float[Tensor, "4 batch heads groups"]) -> Float[Tensor, "3 heads groups"]:
    # not nanmean, which would hide a weight that is NaN
    count = sums[3]
    means = torch.where(count > 0, sums[:3] / count, 0.0)
    return means.sum(1) / (count > 0).sum(0)


def _record(
    found: list[Tensor],
    is_cross: bool,
    group: Group,
    groups: int,
    inner: str | Backend,
    changed: Any,
    place: Place,
    call: AttentionCall,
) -> tuple[Tensor, Tensor | None]:
    """The call on any backend; the sums of each text go to ``found``. Positions count a text's own tokens."""
    call = replace(call, with_lse=True)
    out, lse = attended(call, inner)
    lse, graph, (batch, heads) = AttentionInfo(call, lse).lse, call.graph, call.q.shape[:2]
    left = lse.new_zeros(1, 1).long() if place.left is None else place.left.to(out.device).view(-1, 1)
    tokens = None if is_cross or place.padding is None else place.padding.to(out.device)
    degree = graph.in_degree().view(graph.batch or 1, graph.heads or 1, -1).to(out.device)
    sums = lse.new_zeros(4, batch, heads, groups, dtype=torch.float64)
    for ends in torch.split(pairs.union(graph, out.device), EDGES_AT_ONCE, 1):
        src, dst = ends
        weight = edge_softmax.weights_from_lse(pairs.logits(call, ends), dst, lse).double()
        there = pairs.is_edge(graph, ends, batch, heads)
        if tokens is not None:
            there = there & tokens[:, None, dst + graph.dst_offset - graph.src_offset]
        fair = (1.0 / degree[..., dst].double()).expand_as(weight)
        values = torch.stack([weight, weight.square(), fair, torch.ones_like(weight)])
        dst = dst + graph.dst_offset - (0 if is_cross else left)
        at = group(dst, src + graph.src_offset - left).expand(batch, -1).where(there.any(1), 0)
        values = values.masked_fill(~there, 0.0)
        sums.scatter_add_(3, at.unsqueeze(1).expand(values.shape), values)
    found.append(sums.cpu())
    return out, lse
