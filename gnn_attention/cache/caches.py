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

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import functional

from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.cache._slots import ResidentSenders, append_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, arrays
from gnn_attention.score_mods import ScoreMod

KEEP = ("messages", "states")
Rows = Float[Tensor, "batch kv_heads chunk dim"]
States = Float[Tensor, "batch chunk width"]
Sinks = Float[Tensor, " heads"] | None
Cache = TypeVar("Cache", bound="TokenCache")


class TokenCache:
    """The base of both caches.

    Buffers of a layer are ``[B, H, room, D]``; the tokens of their rows are the same for all layers
    (``_senders``). ``_behind`` are the layers without the last chunk yet.
    """

    def __init__(self, graph: TokenGraph, layers: int = 1) -> None:
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"graph must be a TokenGraph of all tokens to come, got {type(graph).__name__}")
        if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
            expected = "a graph whose receivers and senders are the same tokens"
            raise ValueError(f"a cache needs {expected}, got {graph!r}")
        self.graph = graph
        self.layers = checks.size("layers", layers, 1)
        self._senders = ResidentSenders(graph, 0, 0, torch.zeros(0, dtype=torch.int64, device="cpu"))
        self._rows: list[tuple[Tensor, ...]] = [()] * self.layers
        self._behind: set[int] = set()

    @property
    def length(self) -> int:
        """The number of tokens so far: the position of the next one, counted from the graph's first."""
        return self._senders.stop

    @property
    def positions(self) -> Int[Tensor, " senders"]:
        """The absolute positions of the senders that the last chunk or a later receiver attends to."""
        return self._senders.positions[self._senders.indices_in_use] + self.graph.src_offset

    @property
    def nbytes(self) -> int:
        """Memory of all layers' buffers, in bytes; they have some rows to spare."""
        return sum(x.numel() * x.element_size() for rows in self._rows for x in rows)

    def check_graph(self, graph: TokenGraph) -> None:
        """ValueError for another graph than this cache's."""
        if graph is not self.graph and graph != self.graph:
            raise ValueError(f"this is a cache of {self.graph!r}, got {graph!r}; make a new one for that")

    def reorder(self, index: Int[Tensor, " samples"] | Sequence[int]) -> None:
        """Sample i goes on from sample ``index[i]`` (beam search); repeated and omitted samples are allowed.

        Raises TypeError unless index is a list of integers ``[B]``, IndexError for a sample out of range,
        and ValueError for a graph that differs by sample.
        """
        self._check_complete("reorder")
        if self.graph.batch is not None:
            raise ValueError(f"reorder: {self.graph!r} differs by sample: no past can go on as another")
        samples = torch.tensor(checks.integers("index", index, "samples"), dtype=torch.int64, device="cpu")
        for batch in {x.shape[0] for rows in self._rows for x in rows}:
            if not all(0 <= sample < batch for sample in samples.tolist()):
                raise IndexError(f"index must hold samples in 0 .. {batch - 1}, got {samples.tolist()}")
        self._rows = [tuple(x.index_select(0, samples.to(x.device)) for x in rows) for rows in self._rows]

    def rewind(self, length: int) -> None:
        """Back to the first ``length`` tokens: those after them are dropped (a rejected draft).

        The last chunk can always be taken back; more where no dropped sender is needed again. ValueError
        names the first such sender, or says that there are not so many tokens.
        """
        self._check_complete("rewind")
        length = checks.size("length", length)
        self._senders = self._senders.rewind(length)
        if not length:
            self._rows = [()] * self.layers  # the next chunk may have other shapes

    def fork(self: Cache) -> Cache:
        """An independent copy that goes on from here; only the graph is shared."""
        twin = copy.copy(self)
        twin._rows = [tuple(x.clone() for x in rows) for rows in self._rows]
        return twin

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, an error leaves the cache as it was, in all layers."""
        before = self._senders, self._rows, self._behind
        try:
            yield
        except BaseException:
            self._senders, self._rows, self._behind = before
            raise

    def __repr__(self) -> str:
        senders = f"{len(self._senders.indices_in_use)} senders of {self.length} in {self.layers} layers"
        return f"{type(self).__name__}({self.graph.name}: {senders}, {self.nbytes / 2**20:.1f} MB)"

    def _sender_rows(self, layer: int) -> tuple[Tensor, ...]:
        if layer in self._behind or not self._rows[layer]:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        return tuple(x[:, :, self._senders.indices_in_use.to(x.device)] for x in self._rows[layer])

    def _append(self, rows: tuple[Tensor, ...], layer: int) -> None:
        """The next chunk of a layer, each ``[B, H, chunk, D]``; checked before anything changes."""
        senders, count, old = self._senders, rows[0].shape[2], self._rows[layer]
        if not count:
            raise ValueError("a chunk must have at least one token, got none")
        if layer not in self._behind:
            self._check_complete("the next chunk")
            senders = senders.append(count)
        elif count != senders.count:
            chunk = f"{self._chunk()}, as the layers before it"
            raise ValueError(f"layer {layer} must get {chunk}, got a chunk of {count}")
        form = "[{0.shape[0]}, {0.shape[1]}, T, {0.shape[3]}] in {0.dtype} on {0.device}"
        for new, before in zip(rows, old, strict=False):
            got, expected = form.format(new), form.format(before)
            if got != expected:
                raise ValueError(f"a chunk must be like those before it, {expected}, got {got}")
        buffers = zip(old or (None,) * len(rows), rows, strict=True)
        joined = tuple(append_rows(before, new, senders) for before, new in buffers)
        self._behind = (self._behind if senders is self._senders else set(range(self.layers))) - {layer}
        self._rows = [*self._rows[:layer], joined, *self._rows[layer + 1 :]]
        self._senders = senders

    def _attend(self, q: Tensor, layer: int, scale: Any, mod: ScoreMod | None, **options: Any) -> Tensor:
        """Attention of the last chunk; nothing changes. Keys or values of one head serve all heads."""
        senders, rows = self._senders, self._rows[layer]
        if layer in self._behind or not senders.count:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        k, v = (x[:, :, : len(senders.positions)] for x in (rows[0], rows[-1]))
        heads = max(k.shape[1], v.shape[1])
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        if mod is not None and senders.gap:
            mod = partial(_at_positions, mod, senders.positions + self.graph.src_offset)
        if options["backend"] == "auto" and senders.has_few_pairs:
            options["backend"] = "dense"
        out: Tensor = attend(q, k, v, senders.view, scale, mod, **options)
        return out

    def _check_complete(self, what: str) -> None:
        if self._behind:
            raise ValueError(f"{what} must wait until layer {min(self._behind)} has got {self._chunk()} too")

    def _chunk(self) -> str:
        return f"the tokens {self._senders.start} .. {self._senders.stop - 1}"


class KeyValueCache(TokenCache):
    """Keys and values of the tokens so far, for one or several layers over one graph.

    ``cache.update(heads, x)`` is the attention layer on new tokens alone; :meth:`append` and :meth:`attend`
    are its two halves, for keys and values from elsewhere. Every layer gets every chunk before the next one
    comes. Where autograd records, gradients flow back to all chunks.

    Args:
        graph: its receivers and senders are the same tokens, in the order in which they come; ValueError
            otherwise, TypeError for no graph.
        layers: how many attention layers share the graph.

    >>> from gnn_attention import StandardHeads, patterns
    >>> graph, heads = patterns.window(100, 3) | patterns.sinks(100, 1), StandardHeads(width=8, num_heads=2)
    >>> cache, x = KeyValueCache(graph), torch.randn(1, 10, 8)
    >>> y = torch.cat([cache.update(heads, chunk) for chunk in x.split(4, dim=1)], dim=1)
    >>> # the last chunk attends to token 6 and later, and to the sink
    >>> y.shape, cache.length, cache.positions.tolist()
    (torch.Size([1, 10, 8]), 10, [0, 6, 7, 8, 9])
    """

    def append(self, k: Rows, v: Rows, layer: int = 0) -> None:
        """Add the keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` of the next tokens.

        Raises ValueError for more tokens than the graph has, for a receiver that attends to a later token,
        for shapes or dtypes other than before, and where layers do not get the same chunks; TypeError for no
        tensors; IndexError for a layer out of range. Nothing has changed then.
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
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"x must be the states [B, T, width] of the new tokens, got {checks.quote(x)}")
        first = self.graph.dst_offset + (self._senders.start if layer in self._behind else self.length)
        positions = torch.arange(first, first + x.shape[1], device=x.device)
        q, (k, v) = heads.receive(x, positions), heads.send(x, positions)
        with self.all_or_nothing():
            self.append(k, v, layer)
            head = getattr(heads, "first_head", 0)
            mod = partial(_from_head, score_mod, head) if score_mod is not None and head else score_mod
            update: Tensor = heads.collect(self.attend(q, layer, heads.scale, mod, sink_logits, backend))
            return update

    def senders(self, layer: int = 0) -> tuple[Rows, Rows]:
        """Copies of the keys and values at :attr:`positions`; ValueError before the first chunk."""
        k, v = self._sender_rows(checks.index("layer", layer, self.layers))
        return k, v


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


def _update_of_mixtures(heads: FactoredHeads | MergedHeads, z: Tensor) -> States:
    """The update from mixtures ``z [B, H, T, width + 1]`` of ``[x, 1]``: the sum of their messages."""
    if isinstance(heads, MergedHeads):
        return heads.collect(z[..., : heads.message.shape[1]].to(heads.message.dtype) @ heads.message)
    own, z = heads.standard, z.to(heads.standard.W_V.dtype)
    values = z[..., :-1] @ arrays.repeat_for_query_heads(own.W_V, own.num_heads)
    if own.b_V is not None:
        # the last channel is the sum of the weights, 0 for an isolated row
        values = values + z[..., -1:] * arrays.repeat_for_query_heads(own.b_V, own.num_heads).unsqueeze(1)
    return own.collect(values)


def _from_head(mod: ScoreMod, first: int, score: Tensor, b: Tensor, h: Tensor, *ends: Tensor) -> Tensor:
    return mod(score, b, h + first, *ends)


def _at_positions(mod: ScoreMod, at: Tensor, score: Tensor, b: Any, h: Any, dst: Any, src: Tensor) -> Tensor:
    # where the rows of a buffer have gaps
    return mod(score, b, h, dst, at.to(src.device)[src])
