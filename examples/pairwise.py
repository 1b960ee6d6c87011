"""Message passing more general than attention, with attention and MLPs as special cases (notebook 14).

In general message passing, the message of an edge may depend on both of its ends. Here it also has a weight:
``update_dst = sum over src -> dst of weight * message(x_dst, x_src)``. A normaliser computes the weight from
``logit(x_dst, x_src)``, or with "softmax" from the logits of all in-edges. In attention the message is a
linear function of the sender only, and the weights of a receiver sum to 1 (:meth:`PairwiseMessages.of`). So a
token has one message per head for all its receivers. With another normaliser, and senders that never change,
the layer is an MLP (:class:`StaticNodes`).

These layers are for reading and comparison: for every edge they store a row as wide as a state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from gnn_attention import edge_softmax
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_ops.normalisers import Normaliser, check_normaliser, normalise_unsorted
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import add_bias
from gnn_attention.patterns import cross

EdgeFunction = Callable[[Tensor, Tensor], Tensor]


class BothEnds(nn.Module):
    """An MLP of the states at both ends of an edge, ``W_2 gelu(W_1 [x_dst, x_src] + b_1) + b_2``.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261), 3.2.

    >>> BothEnds(width=8, hidden=16, out=4)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * width, hidden), nn.GELU(), nn.Linear(hidden, out))

    def forward(self, x_dst: Float[Tensor, "... width"], x_src: Float[Tensor, "... width"]) -> Tensor:
        """Return a message for every edge, ``[..., out]``."""
        messages: Tensor = self.mlp(torch.cat([x_dst, x_src], dim=-1))
        return messages


class PairwiseMessages(MessagePassing):
    """Message passing whose messages and logits may depend on both ends of an edge.

    ``update_dst = update(sum over src -> dst of sum_h weight_h * message_h(x_dst, x_src))``, with weights
    from ``logit_h(x_dst, x_src)``.

    Args:
        message: function of the states at both ends, ``[..., edges, width]``, that returns
            ``[..., edges, out]``, or ``[..., edges, heads, out]`` for several heads.
        logit: function of the same states that returns ``[..., edges]`` or ``[..., edges, heads]``. If it is
            None, every weight is 1.
        normaliser: computes weights from logits; see ``gnn_attention.edge_ops.normalisers``.
        update: applied to the sum of a receiver's messages; by default the identity.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261); seed S4.18.

    >>> from gnn_attention import patterns
    >>> layer = PairwiseMessages(BothEnds(8, 16, 8), logit=lambda x_dst, x_src: (x_dst * x_src).sum(-1))
    >>> layer(torch.randn(5, 8), patterns.window(5, 2)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        message: EdgeFunction,
        logit: EdgeFunction | None = None,
        normaliser: Normaliser = "softmax",
        update: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(aggr="add", node_dim=-2)
        self.message_of, self.logit_of, self.update_of = message, logit, update
        self.normaliser = check_normaliser(normaliser)

    @classmethod
    def of(
        cls, heads: StandardHeads | FactoredHeads | MergedHeads, normaliser: Normaliser = "softmax"
    ) -> PairwiseMessages:
        """Return attention: ``logit_h = scale * x_dst W_P_h x_src^T``, ``message_h = x_src W_M_h``.

        The result equals ``MessagePassingAttention(heads)``, including biases, but patterns and messages are
        computed for every edge. With another normaliser it is a contextual MLP, whose two matrices are the
        patterns and messages of a receiver's senders (seed S4.21; :meth:`StaticNodes.of_context`).
        """
        factored = FactoredHeads.of(heads) if isinstance(heads, StandardHeads) else heads
        update = lambda total: add_bias(total, factored.b_O)  # noqa: E731
        return cls(_MessageOf(factored), _LogitOf(factored), normaliser, update)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], graph: TokenGraph) -> Float[Tensor, "..."]:
        """Return the update of every receiver, ``[N, out]`` or ``[B, T, out]``; x may be (x_src, x_dst)."""
        pair = x if isinstance(x, tuple) else (x, x)
        edges, size = graph.edges_on(pair[0].device), (graph.num_src, graph.num_dst)
        total: Tensor = self.propagate(edges, size=size, x=pair)
        total = total.to(pair[1].dtype)
        return total if self.update_of is None else self.update_of(total)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        """Return the message of every edge times its weight, summed over heads."""
        messages = _check_messages(self.message_of(x_i, x_j), x_i)  # [..., edges, heads, out]
        if self.logit_of is not None:
            logits = _check_logits(self.logit_of(x_i, x_j), messages)  # [..., edges, heads]
            weights = normalise_unsorted(self.normaliser, logits.mT, index, size_i).mT
            messages = weights.unsqueeze(-1) * messages
        return messages.sum(-2)


class _LogitOf(nn.Module):
    def __init__(self, heads: FactoredHeads | MergedHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        q, (k, _) = self.heads.receive(_batched(x_dst)), self.heads.send(_batched(x_src))
        logits = edge_softmax.logit(q, k, self.heads.scale).mT  # [B, edges, heads]
        return logits.reshape(*x_dst.shape[:-1], logits.shape[-1])


class _MessageOf(_LogitOf):
    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        messages = self.heads.messages(_batched(x_src)).transpose(1, 2)
        return messages.reshape(*x_src.shape[:-1], *messages.shape[-2:])


class StaticNodes(MessagePassing):
    """An MLP as attention to nodes that never change: each hidden neuron is a node.

    ``update = sum over nodes -> token of weight(x . pattern + bias) * message + update_bias``. Rows of the
    MLP's first matrix are patterns, columns of the second are messages; the activation is the normaliser.

    Args:
        patterns: the patterns of the nodes, ``[nodes, width]``.
        messages: the messages of the nodes, ``[nodes, out]``.
        bias: added to the logits of each node, ``[nodes]``.
        update_bias: added to the update of each token, ``[out]``.
        normaliser: computes weights from logits; see ``gnn_attention.edge_ops.normalisers``.

    Sources: seed S4.21, after A. Karpathy; Geva et al. 2021 (arXiv 2012.14913): MLPs as memories of keys and
    values; Sukhbaatar et al. 2019 (arXiv 1907.01470): such nodes together with the tokens, under one softmax.

    >>> nodes = StaticNodes(torch.eye(3), torch.tensor([[1.0], [10.0], [100.0]]), normaliser="relu")
    >>> nodes(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.5]])).tolist()
    [[201.0], [50.0]]
    """

    def __init__(
        self,
        patterns: Float[Tensor, "nodes width"],
        messages: Float[Tensor, "nodes out"],
        bias: Float[Tensor, " nodes"] | None = None,
        update_bias: Float[Tensor, " out"] | None = None,
        normaliser: Normaliser = "softmax",
    ) -> None:
        super().__init__(aggr="add", node_dim=-2)
        bias = patterns.new_zeros(len(patterns)) if bias is None else bias
        update_bias = messages.new_zeros(messages.shape[1]) if update_bias is None else update_bias
        self.patterns, self.messages, self.bias, self.update_bias = (
            nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
            for values in (patterns, messages, bias, update_bias)
        )
        self.normaliser = check_normaliser(normaliser)

    @classmethod
    def of(cls, mlp: nn.Sequential) -> StaticNodes:
        """Return the nodes of ``nn.Sequential(nn.Linear, activation, nn.Linear)``, one per hidden neuron.

        The activation must be elementwise or ``nn.Softmax(dim=-1)``. TypeError for other modules.
        """
        first, activation, second = mlp
        if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
            raise TypeError(f"mlp must be an nn.Sequential of Linear, activation and Linear, got {mlp}")
        normaliser = "softmax" if isinstance(activation, nn.Softmax) else activation
        return cls(first.weight, second.weight.T, first.bias, second.bias, normaliser)

    @classmethod
    def of_context(
        cls,
        heads: StandardHeads,
        x: Float[Tensor, "tokens width"],
        head: int = 0,
        normaliser: Normaliser = "softmax",
    ) -> StaticNodes:
        """Return the nodes of a fixed context: the pattern and message of every token of ``x`` in one head.

        With "softmax" the layer computes this head's update (without ``b_O``) of a token that attends to the
        whole context; with "gelu" it is an MLP whose matrices come from the context.
        """
        patterns, messages = FactoredHeads.of(heads, side="sender").send(x.unsqueeze(0))
        pattern, message = patterns[0, head], messages[0, head]
        pattern, bias = pattern[:, : heads.width] * heads.scale, pattern[:, heads.width :] * heads.scale
        return cls(pattern, message, bias[:, 0] if bias.shape[1] else None, normaliser=normaliser)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"], graph: TokenGraph | None = None
    ) -> Float[Tensor, "*batch tokens out"]:
        """Return the update of every token; ``graph`` (by default full) has the nodes as senders."""
        size = (len(self.patterns), x.shape[-2])
        edges = (cross(size[1], size[0]) if graph is None else graph).edges_on(x.device)
        nodes = {"pattern": self.patterns, "sent": self.messages, "bias": self.bias.unsqueeze(-1)}
        pairs = {name: (values, None) for name, values in nodes.items()}
        total: Tensor = self.propagate(edges, size=size, x=(None, x), **pairs)
        return total + self.update_bias

    def message(
        self, x_i: Tensor, pattern_j: Tensor, bias_j: Tensor, sent_j: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """Return the message of a node, weighted by how well the token fits its pattern."""
        logits = edge_softmax.logit(x_i, pattern_j, 1.0) + bias_j.squeeze(-1)
        weights = normalise_unsorted(self.normaliser, logits, index, size_i)
        return weights.unsqueeze(-1) * sent_j


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _check_messages(messages: Tensor, x_dst: Tensor) -> Tensor:
    """Add a missing axis of heads to messages, and convert them to the dtype of sums."""
    axes = x_dst.dim()
    if messages.shape[: axes - 1] != x_dst.shape[:-1] or messages.dim() not in (axes, axes + 1):
        edges = f"{x_dst.shape[-2]} edges"
        raise ValueError(f"message must return [..., {edges}, (heads,) out], got {list(messages.shape)}")
    messages = messages.unsqueeze(-2) if messages.dim() == axes else messages
    return messages.to(edge_softmax.accumulation_dtype(messages.dtype))


def _check_logits(logits: Tensor, messages: Tensor) -> Tensor:
    shape = messages.shape[:-1]
    logits = logits.unsqueeze(-1) if shape[-1] == 1 and logits.dim() == len(shape) - 1 else logits
    if logits.shape != shape:
        raise ValueError(f"logit must return [..., edges, heads] = {list(shape)}, got {list(logits.shape)}")
    return logits.to(messages.dtype)
