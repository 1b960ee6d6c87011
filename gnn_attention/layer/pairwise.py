"""Message passing more general than attention, and where attention stands in it.

In general message passing, what a sender tells a receiver may depend on both of them:
``update_dst = sum over src -> dst of weight(x_dst, x_src) * message(x_dst, x_src)``. Attention is the case in
which the message depends on the sender alone, is linear in it, and the weights of a receiver share out 1
(:meth:`PairwiseMessages.of`). So a token has one message a head for everybody who listens, made once for the
token and not once for every edge. Put another normaliser in the place of the softmax, let the senders be
nodes that never change, and it is an MLP (:class:`StaticNodes`).

These layers are for reading and comparing: they hold a row as wide as a state for every edge.

>>> from gnn_attention import MessagePassingAttention, patterns
>>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).double()
>>> x = torch.randn(5, 4, dtype=torch.float64)
>>> torch.allclose(StaticNodes.of(mlp)(x), mlp(x), rtol=0, atol=1e-12)
True
>>> heads, graph = StandardHeads(4, num_heads=2).double(), patterns.causal(5)
>>> torch.allclose(PairwiseMessages.of(heads)(x, graph), MessagePassingAttention(heads)(x, graph), rtol=0, atol=1e-12)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import MessagePassing

from gnn_attention import convert, edges
from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import plus_bias
from gnn_attention.layer._pyg_codegen import rendered
from gnn_attention.patterns import cross

__all__ = ["NORMALISERS", "BothEnds", "PairwiseMessages", "StaticNodes", "weigh"]

_OF_ONE_LOGIT: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.clone,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
}
NORMALISERS = ("softmax", *_OF_ONE_LOGIT)
_ACTIVATIONS = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardtanh),
)  # modules that act on every number alone

Normaliser = str | Callable[[Tensor], Tensor]
OfAnEdge = Callable[[Tensor, Tensor], Tensor]


def weigh(
    logits: Float[Tensor, "... edges"],
    dst: Int[Tensor, " edges"],
    num_dst: int,
    normaliser: Normaliser = "softmax",
) -> Float[Tensor, "... edges"]:
    """The weight of every edge from its logit, by one of :data:`NORMALISERS` or a function of one logit.

    Only "softmax" looks at more than one edge: the in-edges of a receiver share out 1, so that one more
    lowers the others. All others weigh each edge for itself. ValueError for another name.

    >>> logits, dst = torch.tensor([0.0, 0.0, -1.0]), torch.tensor([0, 0, 1])
    >>> weigh(logits, dst, 2).tolist(), weigh(logits, dst, 2, "relu").tolist(), weigh(logits, dst, 2, torch.exp)[:2].tolist()
    ([0.5, 0.5, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0])
    """
    if _checked_normaliser(normaliser) == "softmax":
        return edges.softmax(logits, dst, num_dst)[0]
    return (_OF_ONE_LOGIT[normaliser] if isinstance(normaliser, str) else normaliser)(logits)


class BothEnds(nn.Module):
    """An MLP of both ends of an edge, ``W_2 gelu(W_1 [x_dst, x_src] + b_1) + b_2``: a message that attention
    has no room for.

    ``[..., edges, width]`` and ``[..., edges, source_width]`` give ``[..., edges, out]``. ValueError for a
    size below 1.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), section 2; Battaglia et al. 2018 (arXiv 1806.01261),
        section 3.2.

    >>> BothEnds(width=8, hidden=16, out=4)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, hidden: int, out: int, source_width: int | None = None) -> None:
        """``source_width`` is the senders' width where it differs."""
        super().__init__()
        width, hidden, out = (
            checks.size(*size, 1) for size in (("width", width), ("hidden", hidden), ("out", out))
        )
        source = width if source_width is None else checks.size("source_width", source_width, 1)
        self.mlp = nn.Sequential(nn.Linear(width + source, hidden), nn.GELU(), nn.Linear(hidden, out))

    def forward(
        self, x_dst: Float[Tensor, "... width"], x_src: Float[Tensor, "... source_width"]
    ) -> Float[Tensor, "... out"]:
        """For every edge, from the states of its two ends."""
        result: Tensor = self.mlp(torch.cat([x_dst, x_src], dim=-1))
        return result


class PairwiseMessages(MessagePassing):
    """Message passing whose messages and weights may depend on both ends of an edge; attention is one choice
    of the parts.

    ``update_dst = update(sum over src -> dst of sum_h weight_h * message_h(x_dst, x_src))``, weights
    normalised from ``logit_h(x_dst, x_src)``.

    Args:
        message: ``message(x_dst, x_src)``, from ``[..., edges, width]`` of either end to
            ``[..., edges, out]``, or with heads ``[..., edges, heads, out]``.
        logit: ``logit(x_dst, x_src)``, a number for each message: ``[..., edges]``, with heads
            ``[..., edges, heads]``. None: every message weighs 1.
        normaliser: from logits to weights, see :func:`weigh`.
        update: what a receiver makes of the sum of all that it hears; it takes the sum itself unless given.

    Modules given here are trained with the layer. TypeError for a part that cannot be called, ValueError for
    a normaliser that there is not.

    Sources: Gilmer et al. 2017 (arXiv 1704.01212), section 2; Battaglia et al. 2018 (arXiv 1806.01261); seed
        S4.18.

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
        """See the class."""
        with rendered(self):
            super().__init__(aggr="add", flow="source_to_target", node_dim=-2)
        for name, part in (("message", message), ("logit", logit), ("update", update)):
            if not callable(part) and (part is not None or name == "message"):
                raise TypeError(
                    f"{name} must be a function or a module, got {quoted(part)} of type {type(part).__name__}"
                )
        self.message_of, self.logit_of, self.update_of = message, logit, update
        self.normaliser = _checked_normaliser(normaliser)

    @classmethod
    def of(
        cls, heads: StandardHeads | FactoredHeads | MergedHeads, normaliser: Normaliser = "softmax"
    ) -> PairwiseMessages:
        """Attention in this form: ``logit_h = scale * x_dst W_P_h x_src^T``, ``message_h = x_src W_M_h``, the
        update ``+ b_O``.

        Equal to ``MessagePassingAttention(heads)``, with its parameters, biases too; but pattern and message
        are computed for every edge where attention computes them once for every token. With another
        normaliser it is a contextual MLP: to a receiver, the senders' patterns and messages are the two
        matrices of one (seed S4.21; :meth:`StaticNodes.of_context`).

        ValueError for rotary or normed heads and heads without ``W_O``, TypeError for other weights.
        """
        heads = FactoredHeads.of(heads) if isinstance(heads, StandardHeads) else heads
        if not isinstance(heads, (FactoredHeads, MergedHeads)):
            raise TypeError(
                f"heads must be StandardHeads, FactoredHeads or MergedHeads, got {type(heads).__name__}"
            )
        return cls(_SendersMessages(heads), _PatternLogits(heads), normaliser, _OutputBias(heads))

    def forward(self, x: Tensor | tuple[Tensor, Tensor], graph: Any) -> Float[Tensor, "..."]:
        """The update of every receiver, ``[N, out]`` or ``[B, T, out]``.

        ``x`` is ``[N, d]`` or ``[B, T, d]``, or a pair ``(x_src, x_dst)``; ``graph`` a :class:`TokenGraph` or
        an ``edge_index``. TypeError or ValueError where they do not fit, NotImplementedError for a graph that
        differs by head or sample.
        """
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        _check_states(x_src, x_dst)
        size = (x_src.shape[-2], x_dst.shape[-2])
        heard: Tensor = self.propagate(_listed(graph, size, x_dst.device), size=size, x=(x_src, x_dst))
        heard = heard.to(x_dst.dtype)
        return heard if self.update_of is None else self.update_of(heard)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        """What travels along every edge: its message, times its weight, summed over heads. ``aggregate`` is
        PyG's plain sum.
        """
        said = _checked_messages(self.message_of(x_i, x_j), x_i)  # [..., edges, heads, out]
        if self.logit_of is not None:
            logits = _checked_logits(self.logit_of(x_i, x_j), said)  # [..., edges, heads]
            weights = weigh(logits.mT, index, size_i, self.normaliser).mT
            said = weights.unsqueeze(-1) * said
        return said.sum(-2)


class StaticNodes(MessagePassing):
    """An MLP as attention: its hidden neurons are senders that never change, with a pattern and a message of
    their own.

    ``update = sum over nodes -> token of weight(x . pattern + bias) * message + update_bias``. A row of an
    MLP's first matrix is a pattern, the column of the second a message, and the activation stands where
    attention has its softmax.

    Args:
        patterns: what each node responds to, ``[nodes, width]``.
        messages: what each node says, ``[nodes, out]``.
        bias: how ready it is, ``[nodes]``.
        update_bias: added to every token's update, ``[out]``.
        normaliser: from logits to weights, see :func:`weigh`.

    All four become parameters (copies). ValueError for shapes that do not fit.

    Sources: seed S4.21, after A. Karpathy; Geva et al. 2021 (arXiv 2012.14913): MLPs as memories of keys and
        values;
    Sukhbaatar et al. 2019 (arXiv 1907.01470): the same nodes beside the tokens, under one softmax.

    >>> nodes = StaticNodes(patterns=torch.eye(3), messages=torch.tensor([[1.0], [10.0], [100.0]]), normaliser="relu")
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
        """See the class."""
        with rendered(self):
            super().__init__(aggr="add", flow="source_to_target", node_dim=-2)
        _check_nodes(patterns, messages, bias, update_bias)
        self.patterns, self.messages = _own(patterns), _own(messages)
        self.register_parameter("bias", None if bias is None else _own(bias))
        self.register_parameter("update_bias", None if update_bias is None else _own(update_bias))
        self.normaliser = _checked_normaliser(normaliser)

    @classmethod
    def of(cls, mlp: nn.Sequential) -> StaticNodes:
        """The nodes of ``nn.Sequential(nn.Linear, activation, nn.Linear)``, one for every hidden neuron;
        equal to it.

        The activation is the normaliser, ``nn.Softmax(dim=-1)`` too. TypeError for other modules, ValueError
        for an activation that is not known to act on every number alone.
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
        """A context that is held still: every token of ``x`` becomes a node with its pattern and its message
        in a head.

        With "softmax" it is what this head adds for whoever listens to that context (``b_O`` left out): a
        cache of patterns and messages is a set of static nodes. With "gelu" it is an MLP whose matrices are
        written by the context. TypeError for other heads, ValueError for rotary or normed ones and states
        that do not fit, IndexError for a head that there is not.
        """
        if not isinstance(heads, StandardHeads):
            raise TypeError(f"heads must be StandardHeads, got {type(heads).__name__}")
        if checks.size("head", head) >= heads.num_heads:
            raise IndexError(f"head must be in 0 .. {heads.num_heads - 1}, got {head}")
        pattern, message = (
            part[0, head] for part in FactoredHeads.of(heads, side="sender").send(x.unsqueeze(0))
        )
        pattern, bias = pattern[:, : heads.width] * heads.scale, pattern[:, heads.width :] * heads.scale
        return cls(pattern, message, bias[:, 0] if bias.shape[1] else None, normaliser=normaliser)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"], graph: Any = None
    ) -> Float[Tensor, "*batch tokens out"]:
        """The update of every token, ``[N, out]`` or ``[B, T, out]``.

        ``graph``, from the nodes to the tokens, says who hears which node: all of them unless given, as in an
        MLP. TypeError or ValueError where x and graph do not fit, NotImplementedError for a graph that
        differs by head or sample.
        """
        _check_states(x, x)
        if x.shape[-1] != self.patterns.shape[1] or x.dtype != self.patterns.dtype:
            wanted = f"[..., {self.patterns.shape[1]}] in {self.patterns.dtype}"
            raise ValueError(f"x must be {wanted}, as the patterns are, got {list(x.shape)} in {x.dtype}")
        size = (len(self.patterns), x.shape[-2])
        bias = self.patterns.new_zeros(size[0]) if self.bias is None else self.bias
        nodes = {
            "pattern": (self.patterns, None),
            "said": (self.messages, None),
            "bias": (bias.unsqueeze(-1), None),
        }
        edge_index = _listed(cross(size[1], size[0]) if graph is None else graph, size, x.device)
        heard: Tensor = self.propagate(edge_index, size=size, x=(None, x), **nodes)
        return plus_bias(heard.to(x.dtype), self.update_bias)

    def message(
        self, x_i: Tensor, pattern_j: Tensor, bias_j: Tensor, said_j: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """What travels from a node to a token: the node's message, weighted by how well the token fits its
        pattern.
        """
        wide = edges.accumulation_dtype(x_i.dtype)
        logits = edges.logit(x_i.to(wide), pattern_j.to(wide), 1.0) + bias_j.squeeze(-1)
        return weigh(logits, index, size_i, self.normaliser).unsqueeze(-1) * said_j.to(wide)


class _PatternLogits(nn.Module):
    """``scale * x_dst W_P_h x_src^T`` of every edge, ``[..., edges, heads]``: the edges stand where tokens
    usually stand.
    """

    def __init__(self, heads: FactoredHeads | MergedHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        q, (k, _) = self.heads.receive(_batched(x_dst)), self.heads.send(_batched(x_src))
        wide = edges.accumulation_dtype(q.dtype)
        logits = edges.logit(q.to(wide), k.to(wide), self.heads.scale).mT  # [B, edges, heads]
        return logits.reshape(*x_dst.shape[:-1], logits.shape[-1])


class _SendersMessages(nn.Module):
    """``x_src W_M_h`` of every edge, ``[..., edges, heads, width]``: the receiver has no part in it."""

    def __init__(self, heads: FactoredHeads | MergedHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_dst: Tensor, x_src: Tensor) -> Tensor:
        messages = self.heads.messages(_batched(x_src)).transpose(1, 2)
        return messages.reshape(*x_src.shape[:-1], *messages.shape[-2:])


class _OutputBias(nn.Module):
    """``+ b_O``."""

    def __init__(self, heads: FactoredHeads | MergedHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, heard: Tensor) -> Tensor:
        return plus_bias(heard, self.heads.b_O)


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _checked_normaliser(normaliser: Normaliser) -> Normaliser:
    return normaliser if callable(normaliser) else checks.choice("normaliser", normaliser, NORMALISERS)


def _normaliser_of(activation: nn.Module) -> Normaliser:
    if isinstance(activation, nn.Softmax) and activation.dim == -1:
        return "softmax"
    if not isinstance(activation, _ACTIVATIONS):
        known = ", ".join(kind.__name__ for kind in _ACTIVATIONS)
        raise ValueError(
            f"mlp has the activation {quoted(activation)}: expected Softmax(dim=-1) or one of {known}"
        )
    return activation


def _checked_messages(said: Tensor, x_dst: Tensor) -> Tensor:
    """Messages with an axis of heads, in float32 or better, in which they are summed."""
    if said.shape[: x_dst.dim() - 1] != x_dst.shape[:-1] or said.dim() not in (x_dst.dim(), x_dst.dim() + 1):
        wanted = f"[..., {x_dst.shape[-2]} edges, out] or [..., {x_dst.shape[-2]} edges, heads, out]"
        raise ValueError(f"message must return {wanted} for these states, got {list(said.shape)}")
    said = said.unsqueeze(-2) if said.dim() == x_dst.dim() else said
    return said.to(edges.accumulation_dtype(said.dtype))


def _checked_logits(logits: Tensor, said: Tensor) -> Tensor:
    """A logit for each message, ``[..., edges, heads]``."""
    with_heads = logits.unsqueeze(-1) if said.shape[-2] == 1 and logits.dim() == said.dim() - 2 else logits
    if with_heads.shape != said.shape[:-1]:
        wanted = f"[..., edges, heads] = {list(said.shape[:-1])}"
        raise ValueError(
            f"logit must return {wanted} for these messages (a single head may be left out), got {list(logits.shape)}"
        )
    return with_heads.to(said.dtype)


def _check_states(x_src: Any, x_dst: Any) -> None:
    for x in (x_src, x_dst):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor [N, d] or [B, T, d], or a pair (x_src, x_dst) of them, got {type(x).__name__}"
            )
    if x_dst.dim() not in (2, 3) or x_src.dim() != x_dst.dim() or x_src.shape[:-2] != x_dst.shape[:-2]:
        shapes = f"{list(x_src.shape)} and {list(x_dst.shape)}"
        raise ValueError(f"x must be [N, d] or [B, T, d] (both of a pair alike), got {shapes}")


def _check_nodes(patterns: Any, messages: Any, bias: Any, update_bias: Any) -> None:
    for name, value in (
        ("patterns", patterns),
        ("messages", messages),
        ("bias", bias),
        ("update_bias", update_bias),
    ):
        if not isinstance(value, Tensor) and (value is not None or name in ("patterns", "messages")):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if patterns.dim() != 2 or messages.dim() != 2 or len(patterns) != len(messages):
        shapes = f"{list(patterns.shape)} and {list(messages.shape)}"
        raise ValueError(f"patterns and messages must be [nodes, width] and [nodes, out], got {shapes}")
    for name, value, wanted in (
        ("bias", bias, patterns.shape[:1]),
        ("update_bias", update_bias, messages.shape[1:]),
    ):
        if value is not None and value.shape != wanted:
            raise ValueError(
                f"{name} must be {list(wanted)} beside these patterns and messages, got {list(value.shape)}"
            )


def _listed(graph: Any, size: tuple[int, int], device: torch.device) -> Int[Tensor, "2 edges"]:
    """The edges of a graph of ``size = (num_src, num_dst)``."""
    graph = graph if isinstance(graph, TokenGraph) else convert.from_pyg(graph, size[1], size[0])
    if (graph.num_src, graph.num_dst) != size:
        raise ValueError(f"{graph!r} does not fit x with {size[0]} senders and {size[1]} receivers")
    if graph.heads is not None or graph.batch is not None:
        raise NotImplementedError(
            f"{graph!r} varies: general messages need one edge list; take select(batch, head) of it"
        )
    return graph.edges_on(device)


def _own(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
