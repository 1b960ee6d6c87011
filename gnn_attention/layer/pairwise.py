"""Message passing more general than attention, and where attention stands in it.

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
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.checks import described, quoted
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import plus_bias
from gnn_attention.layer._pyg_layer import Layer, check_size
from gnn_attention.layer.attention import fitting_graph, state_pair
from gnn_attention.patterns import cross

__all__ = ["NORMALISERS", "BothEnds", "PairwiseMessages", "StaticNodes", "weigh"]

_OF_ONE_LOGIT: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.clone,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
}
NORMALISERS = ("softmax", *_OF_ONE_LOGIT)
# modules that act on every number alone
_ACTIVATIONS = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardtanh),
)

Normaliser = str | Callable[[Tensor], Tensor]
OfAnEdge = Callable[[Tensor, Tensor], Tensor]


def weigh(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    normaliser: Normaliser = "softmax",
) -> Float[Tensor, "... edges"]:
    """The weight of every edge from its logit, by one of :data:`NORMALISERS` or a function of one logit.

    "softmax" makes the weights over the in-edges of a receiver sum to 1; all others weigh each edge for
    itself. ValueError for another name.

    >>> logits, dst = torch.tensor([0.0, 0.0, -1.0]), torch.tensor([0, 0, 1])
    >>> weigh(logits, dst, 2).tolist(), weigh(logits, dst, 2, "relu").tolist()
    ([0.5, 0.5, 1.0], [0.0, 0.0, 0.0])
    """
    if _checked_normaliser(normaliser) == "softmax":
        return edge_softmax.softmax(logits, dst, num_dst)[0]
    return (_OF_ONE_LOGIT[normaliser] if isinstance(normaliser, str) else normaliser)(logits)


class BothEnds(nn.Module):
    """An MLP of both ends of an edge, ``W_2 gelu(W_1 [x_dst, x_src] + b_1) + b_2``.

    ``[..., edges, width]`` and ``[..., edges, source_width]`` (``width`` unless given) become
    ``[..., edges, out]``. ValueError for a size below 1.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261), 3.2.

    >>> BothEnds(width=8, hidden=16, out=4)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, hidden: int, out: int, source_width: int | None = None) -> None:
        super().__init__()
        source = width if source_width is None else source_width
        sizes = {"width": width, "hidden": hidden, "out": out, "source_width": source}
        width, hidden, out, source = (checks.size(name, size, 1) for name, size in sizes.items())
        self.mlp = nn.Sequential(nn.Linear(width + source, hidden), nn.GELU(), nn.Linear(hidden, out))

    def forward(
        self, x_dst: Float[Tensor, "... width"], x_src: Float[Tensor, "... source_width"]
    ) -> Float[Tensor, "... out"]:
        """A message for every edge."""
        result: Tensor = self.mlp(torch.cat([x_dst, x_src], dim=-1))
        return result


class PairwiseMessages(Layer):
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

    Modules are trained with the layer. TypeError for a part that cannot be called, ValueError for an unknown
    normaliser.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), 2; Battaglia et al. 2018 (arXiv 1806.01261); seed S4.18.

    >>> from gnn_attention import patterns
    >>> layer = PairwiseMessages(BothEnds(8, 16, 8), logit=lambda x_dst, x_src: (x_dst * x_src).sum(-1))
    >>> layer(torch.randn(5, 8), patterns.window(5, 2)).shape
    torch.Size([5, 8])
    """

    inputs: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("message", "aggregate", "update"), ("x_i", "x_j", "x")
    )

    def __init__(
        self,
        message: OfAnEdge,
        logit: OfAnEdge | None = None,
        normaliser: Normaliser = "softmax",
        update: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(node_dim=-2)
        for name, part in (("message", message), ("logit", logit), ("update", update)):
            if not callable(part) and (part is not None or name == "message"):
                raise TypeError(f"{name} must be a function or a module, got {described(part)}")
        self.message_of, self.logit_of, self.update_of = message, logit, update
        self.normaliser = _checked_normaliser(normaliser)

    @classmethod
    def of(
        cls, heads: StandardHeads | FactoredHeads | MergedHeads, normaliser: Normaliser = "softmax"
    ) -> PairwiseMessages:
        """Attention: ``logit_h = scale * x_dst W_P_h x_src^T``, ``message_h = x_src W_M_h``, then ``+ b_O``.

        Equal to ``MessagePassingAttention(heads)``, biases included, but pattern and message are computed for
        every edge. With another normaliser it is a contextual MLP, whose two matrices are the patterns and
        messages of a receiver's senders (seed S4.21; :meth:`StaticNodes.of_context`).

        ValueError for rotary or normed heads and heads without ``W_O``, TypeError for other weights.
        """
        heads = FactoredHeads.of(heads) if isinstance(heads, StandardHeads) else heads
        if not isinstance(heads, (FactoredHeads, MergedHeads)):
            raise TypeError(f"heads must be Standard-, Factored- or MergedHeads, got {type(heads).__name__}")
        return cls(_SendersMessages(heads), _PatternLogits(heads), normaliser, _OutputBias(heads))

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], graph: Any, *, size: tuple[int, int] | None = None
    ) -> Float[Tensor, "..."]:
        """The update of every receiver, ``[N, out]`` or ``[B, T, out]``.

        ``x`` is ``[N, d]`` or ``[B, T, d]``, or a pair ``(x_src, x_dst)``; ``graph`` a :class:`TokenGraph` or
        an ``edge_index``; ``size``, as in PyG's bipartite calls, ``(senders, receivers)``. TypeError or
        ValueError where they do not fit, NotImplementedError for a graph that differs by head or sample.
        """
        self.check_settings(graph)
        x_src, x_dst = state_pair(x)
        sizes = (x_src.shape[-2], x_dst.shape[-2])
        if size is not None:
            check_size(size, *sizes)
        total: Tensor = self.propagate(_edge_index(graph, sizes, x_dst.device), size=sizes, x=(x_src, x_dst))
        total = total.to(x_dst.dtype)
        return total if self.update_of is None else self.update_of(total)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        """What travels along every edge: its message times its weight, summed over heads."""
        messages = _checked_messages(self.message_of(x_i, x_j), x_i)  # [..., edges, heads, out]
        if self.logit_of is not None:
            logits = _checked_logits(self.logit_of(x_i, x_j), messages)  # [..., edges, heads]
            weights = weigh(logits.mT, index, size_i, self.normaliser).mT
            messages = weights.unsqueeze(-1) * messages
        return messages.sum(-2)


class StaticNodes(Layer):
    """An MLP as attention: its hidden neurons are senders that never change, with patterns and messages.

    ``update = sum over nodes -> token of weight(x . pattern + bias) * message + update_bias``. A row of an
    MLP's first matrix is a pattern, the column of the second a message, the activation is the normaliser.

    Args:
        patterns: ``[nodes, width]``.
        messages: ``[nodes, out]``.
        bias: added to the logits of each node, ``[nodes]``.
        update_bias: added to every token's update, ``[out]``.
        normaliser: from logits to weights, see :func:`weigh`.

    All four tensors become parameters (copies). ValueError for shapes that do not fit.

    Sources: seed S4.21, after A. Karpathy; Geva et al. 2021 (arXiv 2012.14913): MLPs as memories of keys and
    values; Sukhbaatar et al. 2019 (arXiv 1907.01470): such nodes together with the tokens, under one softmax.

    >>> nodes = StaticNodes(torch.eye(3), torch.tensor([[1.0], [10.0], [100.0]]), normaliser="relu")
    >>> nodes(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.5]])).tolist()
    [[201.0], [50.0]]
    """

    inputs: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("message", "aggregate", "update"),
        ("x_i", "pattern_j", "bias_j", "sent_j", "x", "pattern", "bias", "sent"),
    )

    def __init__(
        self,
        patterns: Float[Tensor, "nodes width"],
        messages: Float[Tensor, "nodes out"],
        bias: Float[Tensor, " nodes"] | None = None,
        update_bias: Float[Tensor, " out"] | None = None,
        normaliser: Normaliser = "softmax",
    ) -> None:
        super().__init__(node_dim=-2)
        _check_nodes(patterns, messages, bias, update_bias)
        self.patterns, self.messages = _parameter(patterns), _parameter(messages)
        self.register_parameter("bias", None if bias is None else _parameter(bias))
        self.register_parameter("update_bias", None if update_bias is None else _parameter(update_bias))
        self.normaliser = _checked_normaliser(normaliser)

    @classmethod
    def of(cls, mlp: nn.Sequential) -> StaticNodes:
        """The nodes of ``nn.Sequential(nn.Linear, activation, nn.Linear)``, one for every hidden neuron.

        Equal to it; ``nn.Softmax(dim=-1)`` is an activation too. TypeError for other modules, ValueError for
        an activation that is not known to act on every number alone.
        """
        parts: list[Any] = list(mlp) if isinstance(mlp, nn.Sequential) else []
        if len(parts) != 3 or not isinstance(parts[0], nn.Linear) or not isinstance(parts[2], nn.Linear):
            got = ", ".join(type(part).__name__ for part in parts) or type(mlp).__name__
            raise TypeError(f"mlp must be an nn.Sequential of Linear, activation and Linear, got {got}")
        first, activation, second = parts
        return cls(first.weight, second.weight.T, first.bias, second.bias, _normaliser_of(activation))

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
        out), with "gelu" an MLP whose matrices are made from the context. TypeError for other heads,
        ValueError for rotary or normed ones and states that do not fit, IndexError for a head out of range.
        """
        checks.instance("heads", heads, StandardHeads)
        checks.index("head", head, heads.num_heads)
        sent = FactoredHeads.of(heads, side="sender").send(x.unsqueeze(0))
        pattern, message = (part[0, head] for part in sent)
        pattern, bias = pattern[:, : heads.width] * heads.scale, pattern[:, heads.width :] * heads.scale
        return cls(pattern, message, bias[:, 0] if bias.shape[1] else None, normaliser=normaliser)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"], graph: Any = None
    ) -> Float[Tensor, "*batch tokens out"]:
        """The update of every token, ``[N, out]`` or ``[B, T, out]``.

        ``graph`` leads from the nodes to the tokens; unless given it is full, as in an MLP. TypeError or
        ValueError where x and graph do not fit, NotImplementedError for a graph that differs by head or
        sample.
        """
        self.check_settings(graph)
        x, _ = state_pair((x, x))
        if x.shape[-1] != self.patterns.shape[1] or x.dtype != self.patterns.dtype:
            wanted = f"[..., {self.patterns.shape[1]}] in {self.patterns.dtype}"
            raise ValueError(f"x must be {wanted}, as the patterns are, got {list(x.shape)} in {x.dtype}")
        size = (len(self.patterns), x.shape[-2])
        bias = self.patterns.new_zeros(size[0]) if self.bias is None else self.bias
        nodes = {"pattern": (self.patterns, None), "sent": (self.messages, None), "x": (None, x)}
        edge_index = _edge_index(cross(size[1], size[0]) if graph is None else graph, size, x.device)
        total: Tensor = self.propagate(edge_index, size=size, bias=(bias.unsqueeze(-1), None), **nodes)
        return plus_bias(total.to(x.dtype), self.update_bias)

    def message(
        self, x_i: Tensor, pattern_j: Tensor, bias_j: Tensor, sent_j: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """The node's message, weighted by how well the token fits its pattern."""
        wide = edge_softmax.accumulation_dtype(x_i.dtype)
        logits = edge_softmax.logit(x_i.to(wide), pattern_j.to(wide), 1.0) + bias_j.squeeze(-1)
        return weigh(logits, index, size_i, self.normaliser).unsqueeze(-1) * sent_j.to(wide)


class _OfHeads(nn.Module):
    """A part of attention made of its heads, at every edge: the edges stand where tokens usually stand."""

    def __init__(self, heads: FactoredHeads | MergedHeads) -> None:
        super().__init__()
        self.heads = heads


class _PatternLogits(_OfHeads):
    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        q, (k, _) = self.heads.receive(_batched(x_dst)), self.heads.send(_batched(x_src))
        wide = edge_softmax.accumulation_dtype(q.dtype)
        logits = edge_softmax.logit(q.to(wide), k.to(wide), self.heads.scale).mT  # [B, edges, heads]
        return logits.reshape(*x_dst.shape[:-1], logits.shape[-1])


class _SendersMessages(_OfHeads):
    """``x_src W_M_h``, ``[..., edges, heads, width]``: independent of the receiver."""

    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        messages = self.heads.messages(_batched(x_src)).transpose(1, 2)
        return messages.reshape(*x_src.shape[:-1], *messages.shape[-2:])


class _OutputBias(_OfHeads):
    def forward(self, total: Tensor) -> Tensor:
        return plus_bias(total, self.heads.b_O)


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _checked_normaliser(normaliser: Normaliser) -> Normaliser:
    return normaliser if callable(normaliser) else checks.choice("normaliser", normaliser, NORMALISERS)


def _normaliser_of(activation: nn.Module) -> Normaliser:
    if isinstance(activation, nn.Softmax) and activation.dim == -1:
        return "softmax"
    if not isinstance(activation, _ACTIVATIONS):
        known = ", ".join(kind.__name__ for kind in _ACTIVATIONS)
        raise ValueError(f"expected Softmax(dim=-1) or one of {known} in mlp, got {quoted(activation)}")
    return activation


def _checked_messages(found: Tensor, x_dst: Tensor) -> Tensor:
    """Messages with an axis of heads, in float32 or better, in which they are summed."""
    axes = x_dst.dim()
    if found.shape[: axes - 1] != x_dst.shape[:-1] or found.dim() not in (axes, axes + 1):
        wanted = f"[..., {x_dst.shape[-2]} edges, out] or [..., {x_dst.shape[-2]} edges, heads, out]"
        raise ValueError(f"message must return {wanted} for these states, got {list(found.shape)}")
    found = found.unsqueeze(-2) if found.dim() == axes else found
    return found.to(edge_softmax.accumulation_dtype(found.dtype))


def _checked_logits(logits: Tensor, messages: Tensor) -> Tensor:
    wanted, got = messages.shape[:-1], logits.shape
    logits = logits.unsqueeze(-1) if wanted[-1] == 1 and logits.dim() == len(wanted) - 1 else logits
    if logits.shape != wanted:
        axes = f"[..., edges, heads] = {list(wanted)} for these messages (a single head may be left out)"
        raise ValueError(f"logit must return {axes}, got {list(got)}")
    return logits.to(messages.dtype)


def _check_nodes(patterns: Any, messages: Any, bias: Any, update_bias: Any) -> None:
    for name, value in (("patterns", patterns), ("messages", messages)):
        checks.instance(name, value, Tensor)
    if patterns.dim() != 2 or messages.dim() != 2 or len(patterns) != len(messages):
        shapes = f"{list(patterns.shape)} and {list(messages.shape)}"
        raise ValueError(f"patterns and messages must be [nodes, width] and [nodes, out], got {shapes}")
    biases = ("bias", bias, patterns.shape[:1]), ("update_bias", update_bias, messages.shape[1:])
    for name, value, wanted in biases:
        if value is not None and checks.instance(name, value, Tensor).shape != wanted:
            raise ValueError(f"{name} must be {list(wanted)} for these nodes, got {list(value.shape)}")


def _edge_index(graph: Any, size: tuple[int, int], device: torch.device) -> Int[Tensor, "2 edges"]:
    graph = fitting_graph(graph, size[1], size[0])
    if graph.heads is not None or graph.batch is not None:
        raise NotImplementedError(f"{graph!r} varies: these layers need one edge list, as of select()")
    return graph.edges_on(device)


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
