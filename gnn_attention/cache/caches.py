"""Decoding: a new token is a new node, with the edges that the graph gives it.

A cache stores keys and values of the tokens so far, so that only new ones are computed. Tokens come in chunks
of any size, at the positions of one graph that is known from the start: a chunk is *appended* (its tokens
send) and then *attends* (along ``graph.rows(start, stop)``). The results are those of the full pass.

============================  =================================  ===========================================
cache                         numbers for each token and layer   for
============================  =================================  ===========================================
:class:`KeyValueCache`        ``2 * kv_heads * head_dim``        heads of every form, RoPE, grouped heads
:class:`PatternMessageCache`  ``2 * heads * width``              a pattern and a message for each head
the same, ``keep="states"``   ``width + 1``                      states: ``sum w (x W_M) = (sum w x) W_M``
============================  =================================  ===========================================

A sender is dropped after its last receiver: ``window(n, w)`` stores w of them however long the text,
``sinks`` stay. The others keep their absolute positions, for rules, score_mods and rotations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import Backend
from gnn_attention.cache._base import TokenCache, at_heads, check_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, arrays
from gnn_attention.score_mods import ScoreMod

KEEP = ("messages", "states")
Rows = Float[Tensor, "batch kv_heads chunk dim"]
States = Float[Tensor, "batch chunk width"]
Sinks = Float[Tensor, " heads"] | None


class KeyValueCache(TokenCache):
    """Keys and values of the tokens so far, for one or several layers over one graph.

    ``cache.update(heads, x)`` is the attention layer on new tokens alone; :meth:`append` and :meth:`attend`
    are its two halves, for keys and values from elsewhere. Every layer gets every chunk before the next one
    comes. Where autograd records, gradients flow back to all chunks.

    Args:
        graph: its receivers and senders are the same tokens, in the order in which they come; ValueError
            otherwise, TypeError for no graph.
        layers: how many attention layers share the graph.
        latent: in latent attention (LatentHeads) a value is the first ``latent`` channels of its key.

    >>> from gnn_attention import StandardHeads, patterns
    >>> graph, heads = patterns.window(100, 3) | patterns.sinks(100, 1), StandardHeads(width=8, num_heads=2)
    >>> cache, x = KeyValueCache(graph), torch.randn(1, 10, 8)
    >>> y = torch.cat([cache.update(heads, chunk) for chunk in x.split(4, dim=1)], dim=1)
    >>> # the last chunk attends to token 6 and later, and to the sink
    >>> y.shape, cache.length, cache.positions.tolist()
    (torch.Size([1, 10, 8]), 10, [0, 6, 7, 8, 9])
    """

    def __init__(self, graph: TokenGraph, layers: int = 1, latent: int | None = None) -> None:
        super().__init__(graph, layers)
        self.latent = None if latent is None else checks.size("latent", latent, 1)

    def append(self, k: Rows, v: Rows, layer: int = 0) -> None:
        """Add the keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` of the next tokens.

        Raises ValueError for more tokens than the graph has, for a receiver that attends to a later token,
        for shapes or dtypes other than before, and where layers do not get the same chunks; TypeError for no
        tensors; IndexError for a layer out of range. Nothing has changed then.
        """
        for name, x in (("k", k), ("v", v)):
            check_rows(name, x)
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"k and v must agree in [B, Hkv, T], got {list(k.shape)} and {list(v.shape)}")
        self._append(self._stored(k, v), checks.index("layer", layer, self.layers))

    def attend(
        self,
        q: Float[Tensor, "batch heads chunk dim"],
        layer: int = 0,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
        backend: str | Backend = "auto",
    ) -> Float[Tensor, "batch heads chunk value_dim"]:
        """Attention of the last chunk: its rows of ``attend(q, k, v, graph, ...)`` over all tokens so far.

        ``score_mod`` is called at absolute positions; arguments and errors otherwise as of
        :func:`gnn_attention.attend`. ValueError before anything was appended. Nothing changes.
        """
        layer = checks.index("layer", layer, self.layers)
        return self._attend(q, layer, scale, score_mod, sink_logits=sink_logits, backend=backend)

    def update(
        self,
        heads: Any,
        x: States,
        layer: int = 0,
        score_mod: ScoreMod | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
        backend: str | Backend = "auto",
    ) -> States:
        """The updates of new tokens with states ``x``, as of an attention layer with these heads.

        :meth:`append` and :meth:`attend` in one, with the rotations of absolute positions; an error leaves
        the cache as it was. Of sharded heads ``score_mod`` gets the numbers that they have in their layer.
        """
        layer = checks.index("layer", layer, self.layers)
        arrays.check_heads(heads)
        positions = self._positions_of(x, layer)
        q, (k, v) = heads.receive(x, positions), heads.send(x, positions)
        with self.all_or_nothing():
            self.append(k, v, layer)
            mod = at_heads(score_mod, heads)
            update: Tensor = heads.collect(self.attend(q, layer, heads.scale, mod, sink_logits, backend))
            return update

    def senders(self, layer: int = 0) -> tuple[Rows, Rows]:
        """Copies of the keys and values at :attr:`positions`; ValueError before the first chunk."""
        rows = self._sender_rows(checks.index("layer", layer, self.layers))
        return rows[0], rows[-1][..., : self.latent]

    def _stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.latent is None:
            return (k, v)
        latent = k[..., : self.latent]
        if v.shape[3] != self.latent or not torch.allclose(latent, v, rtol=0.0, atol=0.0, equal_nan=True):
            where = f"k in a cache with latent={self.latent}"
            raise ValueError(f"v must be the first {self.latent} channels of {where}, got another v")
        return (k,)


class PatternMessageCache(TokenCache):
    """Patterns and messages of the tokens so far for each head, or the states they are made of.

    Seed S1.14, step 1: patterns and messages of the input token join the cache. Seed S1.15, step 2: ``alpha_i
    = softmax(P_i x_q^T / sqrt(d_k))``; S1.18, step 3: ``o_i = alpha_i M_i``. These cached patterns are the
    senders', ``p_j = x_j W_K W_Q^T``: heads with ``side="sender"``. With ``side="receiver"`` the receiver
    makes the pattern, and the cache stores a sender's state, once for all heads, and its messages;
    ``keep="states"`` stores the state alone, as a message is linear in it (S1.4). ValueError for states of
    senders' patterns, TypeError for heads without patterns (StandardHeads: take :class:`KeyValueCache`).

    >>> from gnn_attention import patterns
    >>> heads = MergedHeads(width=8, num_heads=2, head_dim=4, side="sender").double()
    >>> x = torch.randn(1, 5, 8).double()
    >>> cache = PatternMessageCache(heads, patterns.causal(100))
    >>> y = [cache.update(token) for token in x.split(1, dim=1)]
    >>> P, M = cache.senders()
    >>> torch.allclose(P, heads.patterns(x), rtol=0, atol=1e-12), P.shape, M.shape
    (True, torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5, 8]))
    """

    def __init__(self, heads: FactoredHeads | MergedHeads, graph: TokenGraph, keep: str = "messages") -> None:
        super().__init__(graph)
        if not isinstance(heads, (FactoredHeads, MergedHeads)):
            got = f"{type(heads).__name__}; keys and values are stored by KeyValueCache"
            raise TypeError(f"heads must be FactoredHeads or MergedHeads, which have patterns, got {got}")
        self.heads, self.keep = heads, checks.choice("keep", keep, KEEP)
        if keep == "states" and heads.side != "receiver":
            raise ValueError("keep='states' needs heads with side='receiver': others send no states")

    def append(self, x: States) -> None:
        """Step 1: add what the next tokens send; raises as :meth:`KeyValueCache.append`."""
        self._positions_of(x, 0)  # checks that x are states
        self._append(self._sent(x), 0)

    def attend(
        self, x: States, score_mod: ScoreMod | None = None, sink_logits: Sinks = None, backend: Any = "auto"
    ) -> States:
        """Steps 2 and 3: the updates of the last chunk, with states ``x``; raises as in KeyValueCache."""
        q = self.heads.receive(x)
        if self.keep == "states":
            # the 1 of a state counts only where there are biases
            q = functional.pad(q, (0, self.heads.source_width + 1 - q.shape[3]))
        z = self._attend(q, 0, self.heads.scale, score_mod, sink_logits=sink_logits, backend=backend)
        return self.heads.collect(z) if self.keep == "messages" else _update_of_mixtures(self.heads, z)

    def update(self, x: States, *arguments: Any, **options: Any) -> States:
        """:meth:`append` and :meth:`attend`, with the latter's arguments; after an error nothing changed."""
        with self.all_or_nothing():
            self.append(x)
            return self.attend(x, *arguments, **options)

    def senders(self) -> tuple[Float[Tensor, "batch _ senders width"], ...]:
        """Copies of the patterns and messages ``[B, heads, senders, width]`` at :attr:`positions`.

        With ``side="receiver"`` states ``[B, 1, senders, width]`` and messages, with ``keep="states"`` the
        states alone. ValueError before anything was appended.
        """
        first, *messages = self._sender_rows(0)
        width = self.heads.width if self.heads.side == "sender" else self.heads.source_width
        return first[..., :width], *messages

    def _sent(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.keep == "states":
            arrays.check_states(x, self.heads.source_width, next(self.heads.parameters()).dtype)
            return (functional.pad(arrays.like_products(x), (0, 1), value=1.0).unsqueeze(1),)
        k, v = self.heads.send(x)
        return (k if self.heads.side == "sender" else k[:, :1], v)


def _update_of_mixtures(
    heads: FactoredHeads | MergedHeads, z: Float[Tensor, "batch heads dst _"]
) -> Float[Tensor, "batch dst width"]:
    """The update from mixtures ``z`` of ``[x, 1]``, one for each head: their messages, summed."""
    if isinstance(heads, MergedHeads):
        z = z.to(heads.message.dtype)
        update = torch.einsum("bhti,hio->bto", z[..., : heads.message.shape[1]], heads.message)
        return arrays.plus_bias(update, heads.b_O)
    own, z = heads.standard, z.to(heads.standard.W_V.dtype)
    values = torch.einsum("bhti,hio->bhto", z[..., :-1], arrays.grouped(own.W_V, own.num_heads))
    if own.b_V is not None:
        # the last channel is the sum of the weights, 0 for an isolated row
        values = values + z[..., -1:] * arrays.grouped(own.b_V, own.num_heads).unsqueeze(1)
    return own.collect(values)
