"""Message passing more general than attention, and where attention stands in it (chapter 13 of the book).

In general message passing the message of an edge may depend on both of its ends. Here it has a weight too:
``update_dst = sum over src -> dst of weight * message(x_dst, x_src)``, where a normaliser makes the weight of
``logit(x_dst, x_src)``; under a softmax it depends on all senders of dst. Attention is the case in which the
message depends on the sender alone, is linear in it, and the weights of a receiver sum to 1
(:meth:`PairwiseMessages.of`): a token has one message for each head, made once for all its receivers. With
another normaliser instead of the softmax, and senders that never change, it is an MLP (:class:`StaticNodes`).

These layers are for reading and comparing: they store a row as wide as a state for every edge.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import MessagePassing

from gnn_attention import edge_softmax
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import add_bias
from gnn_attention.patterns import cross

Normaliser = str | Callable[[Tensor], Tensor]
OfAnEdge = Callable[[Tensor, Tensor], Tensor]
NORMALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.clone,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
}


def weigh(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    normaliser: Normaliser = "softmax",
) -> Float[Tensor, "... edges"]:
    """The weight of every edge from its logit, by "softmax", one of NORMALISERS or a function of one logit.

    "softmax" makes the weights over the in-edges of a receiver sum to 1; all others weigh each edge for
    itself. ValueError for another name.

    >>> logits, dst = torch.tensor([0.0, 0.0, -1.0]), torch.tensor([0, 0, 1])
    >>> weigh(logits, dst, 2).tolist(), weigh(logits, dst, 2, "relu").tolist()
    ([0.5, 0.5, 1.0], [0.0, 0.0, 0.0])
    """
    if normaliser == "softmax":
        return edge_softmax.softmax(logits, dst, num_dst)[0]
    if isinstance(normaliser, str) and normaliser not in NORMALISERS:
        raise ValueError(f"normaliser must be 'softmax' or one of {[*NORMALISERS]}, got {normaliser!r}")
    return (NORMALISERS[normaliser] if isinstance(normaliser, str) else normaliser)(logits)


class BothEnds(nn.Module):
    """An MLP of both ends of an edge, ``W_2 gelu(W_1 [x_dst, x_src] + b_1) + b_2``.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261), 3.2.

    >>> BothEnds(width=8, hidden=16, out=4)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * width, hidden), nn.GELU(), nn.Linear(hidden, out))

    def forward(self, x_dst: Float[Tensor, "... width"], x_src: Float[Tensor, "... width"]) -> Tensor:
        """A message for every edge, ``[..., out]``."""
        result: Tensor = self.mlp(torch.cat([x_dst, x_src], dim=-1))
        return result


class PairwiseMessages(MessagePassing):
    """Message passing whose messages and logits may depend on both ends of an edge.

    ``update_dst = update(sum over src -> dst of sum_h weight_h * message_h(x_dst, x_src))``, weights
    normalised from ``logit_h(x_dst, x_src)``.

    Args:
        message: ``message(x_dst, x_src)``, from ``[..., edges, width]`` of either end to
            ``[..., edges, out]``, or with heads ``[..., edges, heads, out]``.
        logit: ``logit(x_dst, x_src)``, ``[..., edges]`` or with heads ``[..., edges, heads]``. None: every
            message has the weight 1.
        normaliser: from logits to weights, see :func:`weigh`.
        update: applied to the sum of a receiver's messages; the identity unless given.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261); seed S4.18.

    >>> from gnn_attention import patterns
    >>> layer = PairwiseMessages(BothEnds(8, 16, 8), logit=lambda x_dst, x_src: (x_dst * x_src).sum(-1))
    >>> layer(torch.randn(5, 8), patterns.window(5, 2)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        message: OfAnEdge,
        logit: OfAnEdge | None = None,
        normaliser: Normaliser = "softmax",
        update: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(aggr="add", node_dim=-2)
        self.message_of, self.logit_of, self.update_of = message, logit, update
        self.normaliser = normaliser

    @classmethod
    def of(
        cls, heads: StandardHeads | FactoredHeads | MergedHeads, normaliser: Normaliser = "softmax"
    ) -> PairwiseMessages:
        """Attention: ``logit_h = scale * x_dst W_P_h x_src^T``, ``message_h = x_src W_M_h``, then ``+ b_O``.

        Equal to ``MessagePassingAttention(heads)``, biases included, but pattern and message are computed for
        every edge. With another normaliser it is a contextual MLP, whose two matrices are the patterns and
        messages of a receiver's senders (seed S4.21; :meth:`StaticNodes.of_context`).
        """
        factored = FactoredHeads.of(heads) if isinstance(heads, StandardHeads) else heads
        update = lambda total: add_bias(total, factored.b_O)  # noqa: E731
        return cls(_MessageOf(factored), _LogitOf(factored), normaliser, update)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], graph: TokenGraph) -> Float[Tensor, "..."]:
        """The update of every receiver, ``[N, out]`` or ``[B, T, out]``, of states or ``(x_src, x_dst)``."""
        pair = x if isinstance(x, tuple) else (x, x)
        edges, size = graph.edges_on(pair[0].device), (graph.num_src, graph.num_dst)
        total: Tensor = self.propagate(edges, size=size, x=pair)
        total = total.to(pair[1].dtype)
        return total if self.update_of is None else self.update_of(total)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        """What travels along every edge: its message times its weight, summed over heads."""
        messages = _checked_messages(self.message_of(x_i, x_j), x_i)  # [..., edges, heads, out]
        if self.logit_of is not None:
            logits = _checked_logits(self.logit_of(x_i, x_j), messages)  # [..., edges, heads]
            weights = weigh(logits.mT, index, size_i, self.normaliser).mT
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
    """An MLP as attention: its hidden neurons are senders that never change, with patterns and messages.

    ``update = sum over nodes -> token of weight(x . pattern + bias) * message + update_bias``. A row of an
    MLP's first matrix is a pattern, the column of the second a message, the activation is the normaliser.

    Args:
        patterns: ``[nodes, width]``.
        messages: ``[nodes, out]``.
        bias: added to the logits of each node, ``[nodes]``.
        update_bias: added to every token's update, ``[out]``.
        normaliser: from logits to weights, see :func:`weigh`.

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
        self.normaliser = normaliser

    @classmethod
    def of(cls, mlp: nn.Sequential) -> StaticNodes:
        """The nodes of ``nn.Sequential(nn.Linear, activation, nn.Linear)``, one for every hidden neuron.

        The activation acts on every number alone, or is ``nn.Softmax(dim=-1)``. TypeError for other modules.
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
        """A fixed context: every token of ``x`` becomes a node with its pattern and its message in a head.

        With "softmax" it is the update by this head of any token that attends to that context (``b_O`` left
        out), with "gelu" an MLP whose matrices are made from the context.
        """
        sent = FactoredHeads.of(heads, side="sender").send(x.unsqueeze(0))
        pattern, message = (part[0, head] for part in sent)
        pattern, bias = pattern[:, : heads.width] * heads.scale, pattern[:, heads.width :] * heads.scale
        return cls(pattern, message, bias[:, 0] if bias.shape[1] else None, normaliser=normaliser)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"], graph: TokenGraph | None = None
    ) -> Float[Tensor, "*batch tokens out"]:
        """The update of every token; ``graph``, full unless given, leads from the nodes to the tokens."""
        size = (len(self.patterns), x.shape[-2])
        edges = (cross(size[1], size[0]) if graph is None else graph).edges_on(x.device)
        nodes = {"pattern": self.patterns, "sent": self.messages, "bias": self.bias.unsqueeze(-1)}
        pairs = {name: (values, None) for name, values in nodes.items()}
        total: Tensor = self.propagate(edges, size=size, x=(None, x), **pairs)
        return total + self.update_bias

    def message(
        self, x_i: Tensor, pattern_j: Tensor, bias_j: Tensor, sent_j: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """The node's message, weighted by how well the token fits its pattern."""
        logits = edge_softmax.logit(x_i, pattern_j, 1.0) + bias_j.squeeze(-1)
        return weigh(logits, index, size_i, self.normaliser).unsqueeze(-1) * sent_j


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _checked_messages(messages: Tensor, x_dst: Tensor) -> Tensor:
    """Messages with an axis of heads, in float32 or better, in which they are summed."""
    axes = x_dst.dim()
    if messages.shape[: axes - 1] != x_dst.shape[:-1] or messages.dim() not in (axes, axes + 1):
        expected = f"[..., {x_dst.shape[-2]} edges, out] or [..., {x_dst.shape[-2]} edges, heads, out]"
        raise ValueError(f"message must return {expected} for these states, got {list(messages.shape)}")
    messages = messages.unsqueeze(-2) if messages.dim() == axes else messages
    return messages.to(edge_softmax.accumulation_dtype(messages.dtype))


def _checked_logits(logits: Tensor, messages: Tensor) -> Tensor:
    shape = messages.shape[:-1]
    logits = logits.unsqueeze(-1) if shape[-1] == 1 and logits.dim() == len(shape) - 1 else logits
    if logits.shape != shape:
        axes = f"[..., edges, heads] = {list(shape)} for these messages (a single head may be left out)"
        raise ValueError(f"logit must return {axes}, got {list(logits.shape)}")
    return logits.to(messages.dtype)
