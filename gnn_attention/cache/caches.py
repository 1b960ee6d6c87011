"""Decoding: a new token is a new node whose edges the graph defines.

A cache stores keys and values of all tokens so far, so that only those of new tokens are computed.
Tokens arrive in chunks of any size, in the order of a graph that is fixed from the start. A chunk is
*appended* (its tokens send), and then *attends*. The results equal those of a pass over all tokens.

For each token and layer, a :class:`KeyValueCache` stores ``2 * kv_heads * head_dim`` elements, and
a :class:`PatternMessageCache` up to ``2 * heads * width``, or ``width + 1`` with ``keep="states"``,
since ``sum w (x W_M) = (sum w x) W_M``. A sender is dropped when no later receiver needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.nn import functional

from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.cache._resident_senders import ResidentSenders, append_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, arrays
from gnn_attention.score_mods import ScoreMod

Rows = Float[Tensor, "batch kv_heads chunk dim"]
States = Float[Tensor, "batch chunk width"]
Sinks = Float[Tensor, " heads"] | None
Cache = TypeVar("Cache", bound="TokenCache")


class TokenCache:
    """Base class of both caches, with buffers ``[B, H, capacity, D]`` for each layer.

    ``_senders`` says which token each row holds. ``_pending_layers`` still wait for the last chunk.
    """

    def __init__(self, graph: TokenGraph, layers: int = 1) -> None:
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"graph must be a TokenGraph of all tokens to come, got {type(graph).__name__}")
        if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
            raise ValueError(f"graph must have the same tokens as receivers and as senders, got {graph!r}")
        self.graph = graph
        self.layers = checks.size("layers", layers, 1)
        self._senders = ResidentSenders(graph, 0, 0, torch.zeros(0, dtype=torch.int64, device="cpu"))
        self._buffers: list[tuple[Tensor, ...]] = [()] * self.layers
        self._pending_layers: set[int] = set()

    @property
    def length(self) -> int:
        """The number of tokens so far, which is the index of the next token."""
        return self._senders.stop

    @property
    def positions(self) -> Int[Tensor, " senders"]:
        """The absolute positions of the senders that the last chunk or later receivers need."""
        return self._senders.positions[self._senders.indices_in_use] + self.graph.src_offset

    @property
    def nbytes(self) -> int:
        """The number of bytes that the buffers of all layers take, including spare rows."""
        return sum(x.numel() * x.element_size() for buffers in self._buffers for x in buffers)

    def check_graph(self, graph: TokenGraph) -> None:
        """Raise ValueError unless this cache was made for ``graph``."""
        if graph is not self.graph and graph != self.graph:
            raise ValueError(f"this is a cache of {self.graph!r}, got {graph!r}; make a new cache for it")

    def reorder(self, index: Int[Tensor, " samples"] | Sequence[int]) -> None:
        """Continue sample i from the past of sample ``index[i]``, as in beam search.

        Samples may be repeated or left out. Raises TypeError unless ``index`` lists integers,
        IndexError if a sample is out of range, and ValueError if the graph varies by sample.
        """
        self._check_complete("reorder")
        if self.graph.batch is not None:
            raise ValueError(f"reorder: {self.graph!r} varies by sample, so no sample can move")
        samples = torch.tensor(checks.integers("index", index, "samples"), dtype=torch.int64, device="cpu")
        for batch in {x.shape[0] for buffers in self._buffers for x in buffers}:
            if not all(0 <= sample < batch for sample in samples.tolist()):
                raise IndexError(f"index must hold samples in 0 .. {batch - 1}, got {samples.tolist()}")
        self._buffers = [tuple(x[samples.to(x.device)] for x in rows) for rows in self._buffers]

    def rewind(self, length: int) -> None:
        """Drop all tokens after the first ``length``, such as a rejected draft.

        The last chunk can always be dropped. Raises ValueError if a sender that was dropped from
        the buffers would be needed again.
        """
        self._check_complete("rewind")
        length = checks.size("length", length)
        self._senders = self._senders.rewind(length)
        if not length:
            # The next chunk may have other shapes.
            self._buffers = [()] * self.layers

    def fork(self: Cache) -> Cache:
        """Return an independent copy; only the graph is shared."""
        fork = copy.copy(self)
        fork._buffers = [tuple(x.clone() for x in buffers) for buffers in self._buffers]
        return fork

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Restore all layers if an error occurs inside the context."""
        state = self._senders, self._buffers, self._pending_layers
        try:
            yield
        except BaseException:
            self._senders, self._buffers, self._pending_layers = state
            raise

    def __repr__(self) -> str:
        senders = f"{len(self._senders.indices_in_use)} senders of {self.length} in {self.layers} layers"
        return f"{type(self).__name__}({self.graph.name}: {senders}, {self.nbytes / 2**20:.1f} MB)"

    def _gather_senders(self, layer: int) -> tuple[Tensor, ...]:
        if layer in self._pending_layers or not self._buffers[layer]:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        return tuple(x[:, :, self._senders.indices_in_use.to(x.device)] for x in self._buffers[layer])

    def _append(self, rows: tuple[Tensor, ...], layer: int) -> None:
        """Check the tensors ``[B, H, chunk, D]`` of a layer's next chunk, and append them."""
        senders, old_buffers = self._senders, self._buffers[layer]
        chunk_size = rows[0].shape[2]
        if not chunk_size:
            raise ValueError("a chunk must have at least one token, got none")
        if layer not in self._pending_layers:
            self._check_complete("the next chunk")
            senders = senders.append(chunk_size)
        elif chunk_size != senders.chunk_size:
            raise ValueError(
                f"layer {layer} must get the tokens {senders.start} .. {senders.stop - 1}, as other "
                f"layers did, got a chunk of {chunk_size}"
            )
        layout = "[{0.shape[0]}, {0.shape[1]}, T, {0.shape[3]}] in {0.dtype} on {0.device}"
        for new_rows, buffer in zip(rows, old_buffers, strict=False):
            expected, got = layout.format(buffer), layout.format(new_rows)
            if got != expected:
                raise ValueError(f"a chunk must be like those before it, {expected}, got {got}")
        pairs = zip(old_buffers or (None,) * len(rows), rows, strict=True)
        buffers = tuple(append_rows(buffer, new_rows, senders) for buffer, new_rows in pairs)
        pending_layers = self._pending_layers if senders is self._senders else set(range(self.layers))
        self._pending_layers = pending_layers - {layer}
        self._buffers = [*self._buffers[:layer], buffers, *self._buffers[layer + 1 :]]
        self._senders = senders

    def _attend(self, q: Tensor, layer: int, scale: Any, mod: ScoreMod | None, **options: Any) -> Tensor:
        """Compute attention for the last chunk; a single head of k or v serves all heads."""
        senders, buffers = self._senders, self._buffers[layer]
        if layer in self._pending_layers or not senders.chunk_size:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        k, v = (x[:, :, : len(senders.positions)] for x in (buffers[0], buffers[-1]))
        heads = max(k.shape[1], v.shape[1])
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        if mod is not None and senders.has_gap:
            mod = partial(_apply_at_positions, mod, senders.positions + self.graph.src_offset)
        if options["backend"] == "auto" and senders.has_few_pairs:
            options["backend"] = "dense"
        return cast("Tensor", attend(q, k, v, senders.chunk_graph, scale, mod, **options))

    def _check_complete(self, action: str) -> None:
        if self._pending_layers:
            raise ValueError(
                f"{action} must wait until layer {min(self._pending_layers)} also has the tokens "
                f"{self._senders.start} .. {self._senders.stop - 1}"
            )


class KeyValueCache(TokenCache):
    """Keys and values of the tokens so far, for one or several layers over one graph.

    ``cache.update(heads, x)`` runs an attention layer on new tokens. To compute keys and values
    yourself, call its two halves, :meth:`append` and :meth:`attend`. Every layer must get a chunk
    before any layer gets the next one. If autograd records, gradients flow back to all chunks.

    All layers share the ``graph``, whose receivers and senders are the same tokens, in order of arrival.

    >>> from gnn_attention import StandardHeads, patterns
    >>> graph, heads = patterns.window(100, 3) | patterns.sinks(100, 1), StandardHeads(width=8, num_heads=2)
    >>> cache, x = KeyValueCache(graph), torch.randn(1, 10, 8)
    >>> y = torch.cat([cache.update(heads, chunk) for chunk in x.split(4, dim=1)], dim=1)
    >>> # The last chunk attends to token 6 and later tokens, and to the sink.
    >>> y.shape, cache.length, cache.positions.tolist()
    (torch.Size([1, 10, 8]), 10, [0, 6, 7, 8, 9])
    """

    def append(self, k: Rows, v: Rows, layer: int = 0) -> None:
        """Append the keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` of the next tokens.

        Raises ValueError for tokens beyond the graph, a receiver that attends to a token after the
        chunk, a new shape or dtype, or layers with different chunks; the cache is then unchanged.
        """
        edge_checks.axes(k=(k, "B Hkv T D"), v=(v, "B Hkv T Dv"))
        self._append((k, v), checks.index("layer", layer, self.layers))

    def attend(
        self,
        q: Float[Tensor, "batch heads chunk dim"],
        layer: int = 0,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
        backend: str | Backend = "auto",
    ) -> Float[Tensor, "batch heads chunk value_dim"]:
        """Compute the rows of ``attend(q, k, v, graph, ...)`` for the last chunk, over all tokens so far.

        ``score_mod`` gets absolute positions; other arguments and errors are as in
        :func:`gnn_attention.attend`. Raises ValueError before the first chunk.
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
        """Return the updates that a layer with these heads computes for new tokens with states ``x``.

        This is :meth:`append` and :meth:`attend`, with rotations by absolute positions; an error leaves
        the cache unchanged. ``score_mod`` gets the layer's head indices, even if heads are sharded.
        """
        layer = checks.index("layer", layer, self.layers)
        arrays.check_heads(heads)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"x must be the states [B, T, width] of the new tokens, got {checks.quote(x)}")
        start = self._senders.start if layer in self._pending_layers else self.length
        start += self.graph.dst_offset
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        q, (k, v) = heads.receive(x, positions), heads.send(x, positions)
        with self.all_or_nothing():
            self.append(k, v, layer)
            first_head = getattr(heads, "first_head", 0)
            if score_mod is not None and first_head:
                score_mod = partial(_shift_head, score_mod, first_head)
            z = self.attend(q, layer, heads.scale, score_mod, sink_logits, backend)
            return cast("Tensor", heads.collect(z))

    def senders(self, layer: int = 0) -> tuple[Rows, Rows]:
        """Return copies of the keys and values at :attr:`positions`; ValueError before the first chunk."""
        return cast("tuple[Rows, Rows]", self._gather_senders(checks.index("layer", layer, self.layers)))


class PatternMessageCache(TokenCache):
    """Patterns and messages of the tokens so far for each head, or the states that determine them.

    Step 1 (source S1.14 of docs/sources.md): patterns and messages of new tokens join the cache. Step 2
    (S1.15): ``alpha_i = softmax(P_i x_q^T / sqrt(d_k))``. Step 3 (S1.18): ``o_i = alpha_i M_i``. With
    ``side="sender"``, senders compute the patterns, ``p_j = x_j W_K W_Q^T``. With ``side="receiver"``,
    receivers do; the cache then stores messages and, once for all heads, states. ``keep="states"``
    stores only states, since a message is a linear map of its sender's state (S1.4). Raises TypeError
    for heads without patterns, and ValueError for ``keep="states"`` with ``side="sender"``.

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
            raise TypeError(
                f"heads must be FactoredHeads or MergedHeads, got {type(heads).__name__}; use KeyValueCache"
            )
        self.keep = checks.choice("keep", keep, ("messages", "states"))
        self.heads = heads
        if keep == "states" and heads.side != "receiver":
            raise ValueError("keep='states' needs heads with side='receiver': others send patterns")

    def append(self, x: States) -> None:
        """Step 1: append what the next tokens send; see :meth:`KeyValueCache.append` for errors."""
        if self.keep == "states":
            arrays.check_states(x, self.heads.source_width, next(self.heads.parameters()).dtype)
            states = functional.pad(arrays.to_product_dtype(x), (0, 1), value=1.0)
            self._append((states.unsqueeze(1),), 0)
        else:
            k, v = self.heads.send(x)
            self._append((k if self.heads.side == "sender" else k[:, :1], v), 0)

    def attend(
        self, x: States, score_mod: ScoreMod | None = None, sink_logits: Sinks = None, backend: Any = "auto"
    ) -> States:
        """Steps 2 and 3: return the updates of the last chunk, whose states are ``x``."""
        q = self.heads.receive(x)
        if self.keep == "states":
            # The last channel is 1 in every state, and matters only if the heads have biases.
            q = functional.pad(q, (0, self.heads.source_width + 1 - q.shape[3]))
        z = self._attend(q, 0, self.heads.scale, score_mod, sink_logits=sink_logits, backend=backend)
        if self.keep == "messages":
            return self.heads.collect(z)
        # z holds weighted sums of states ``[x, 1]``. The message of such a sum is the sum of the messages.
        if isinstance(self.heads, MergedHeads):
            message = self.heads.message
            return self.heads.collect(z[..., : message.shape[1]].to(message.dtype) @ message)
        standard = self.heads.standard
        z = z.to(standard.W_V.dtype)
        values = z[..., :-1] @ arrays.repeat_for_query_heads(standard.W_V, standard.num_heads)
        if standard.b_V is not None:
            # The last channel is the sum of the weights, which is 0 for an isolated receiver.
            biases = arrays.repeat_for_query_heads(standard.b_V, standard.num_heads)
            values = values + z[..., -1:] * biases.unsqueeze(1)
        return standard.collect(values)

    def update(self, x: States, *arguments: Any, **options: Any) -> States:
        """Append and attend, with the other arguments of :meth:`attend`; an error changes nothing."""
        with self.all_or_nothing():
            self.append(x)
            return self.attend(x, *arguments, **options)

    def senders(self) -> tuple[Float[Tensor, "batch _ senders width"], ...]:
        """Return copies of patterns and messages ``[B, heads, senders, width]`` at :attr:`positions`.

        If receivers compute the patterns, return states ``[B, 1, senders, width]`` and messages, or
        only states. Raises ValueError before the first chunk.
        """
        patterns_or_states, *messages = self._gather_senders(0)
        width = self.heads.width if self.heads.side == "sender" else self.heads.source_width
        return patterns_or_states[..., :width], *messages


def _shift_head(mod: ScoreMod, first_head: int, score: Tensor, b: Tensor, h: Tensor, *pair: Tensor) -> Tensor:
    return mod(score, b, h + first_head, *pair)


def _apply_at_positions(mod: Any, positions: Tensor, *arguments: Any) -> Tensor:
    *other_arguments, src = arguments
    return cast("Tensor", mod(*other_arguments, positions.to(src.device)[src]))
