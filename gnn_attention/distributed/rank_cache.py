"""Decoding over ranks: each keeps the keys and values of some of the tokens so far, and the newest hear all of them.

Every rank is given the queries of the newest tokens and works out what they hear from its own senders; one small all-gather of
these results (a number for each channel of a value and one more, whatever the length of the past) and a merge by log-sum-exp give
every rank the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from gnn_attention import edges
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attended
from gnn_attention.backends import Backend
from gnn_attention.backends.call import Call
from gnn_attention.cache._base import check_rows
from gnn_attention.distributed import subgraphs
from gnn_attention.distributed.attention import in_parts, placed
from gnn_attention.distributed.collectives import gathered
from gnn_attention.distributed.partition import Partition
from gnn_attention.graph import TokenGraph, kept
from gnn_attention.graph.liveness import last_receivers, last_senders
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.score_mods import ScoreMod

__all__ = ["RankCache"]


class RankCache:
    """Keys and values of the tokens so far, spread over the ranks of a group, for one or several layers over one graph.

    A token that comes by :meth:`append` is kept by rank ``t // block % world``; :meth:`fill` takes a first part of the text as it
    was spread for ``distributed.attend``. A sender is dropped when its last receiver has heard it. All methods are called on
    every rank, with the same arguments but for :meth:`fill`; only :meth:`attend` makes ranks talk. Nothing is recorded for
    autograd: NotImplementedError where it would be.

    ``cache.append(k, v)`` then ``out = cache.attend(q)`` for each chunk of new tokens, of any size; or, for a whole model,
    ``generate(model, tokens, count, cache=distributed.cache(graph, layers=model.config.num_layers))``.
    """

    def __init__(self, graph: TokenGraph, group: Any, layers: int = 1, block: int = 1) -> None:
        """``graph``: of all tokens that may come, the same as receivers and as senders; ValueError otherwise."""
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"graph must be a TokenGraph of all the tokens that may come, got {type(graph).__name__}")
        if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
            raise ValueError(f"a cache needs a graph whose receivers and senders are the same tokens, got {graph!r}")
        self.graph, self.group = graph, group
        self.layers, self.block = checks.size("layers", layers, 1), checks.size("block", block, 1)
        self.rank, self.world_size = distributed.get_rank(group), distributed.get_world_size(group)
        self._chunks = [(0, 0)] * self.layers  # the tokens that came last
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * self.layers
        self._at = [torch.zeros(0, dtype=torch.int64, device="cpu")] * self.layers  # the tokens of the rows

    @property
    def length(self) -> int:
        """How many tokens came to all layers."""
        return min(stop for _, stop in self._chunks)

    def positions(self, layer: int = 0) -> Int[Tensor, " kept"]:
        """The absolute positions of the senders that this rank keeps."""
        return self._at[layer] + self.graph.src_offset

    def fill(
        self,
        k: Float[Tensor, "batch kv_heads own dim"],
        v: Float[Tensor, "batch kv_heads own dim"],
        partition: Partition,
        layer: int = 0,
    ) -> None:
        """The first tokens: this rank's share of their keys and values, as a partition of that many tokens says.

        ValueError unless the layer is empty, the partition is of this group and not longer than the graph, and the rows are its.
        """
        own, count = partition.src.tokens(self.rank), partition.src.num_tokens
        if self._chunks[layer][1] or partition.world_size != self.world_size or count > self.graph.num_src:
            raise ValueError(
                f"fill needs an empty layer and a partition of at most {self.graph.num_src} tokens on {self.world_size} ranks, "
                f"got {partition!r} after {self._chunks[layer][1]} tokens"
            )
        self._check(k, v, layer, len(own))
        self._chunks[layer] = (count, count)
        self._keep(layer, own, k, v)

    def append(
        self, k: Float[Tensor, "batch kv_heads chunk dim"], v: Float[Tensor, "batch kv_heads chunk dim"], layer: int = 0
    ) -> None:
        """The next tokens send; every rank is given all of their keys and values, and keeps those that are its own.

        ValueError for more tokens than the graph has, a receiver that hears a token which has not come, or rows that do not fit
        those before; IndexError for a layer that is none. Nothing has changed then.
        """
        layer = self._layer(layer)
        check_rows("k", k)
        start, stop = self._chunks[layer][1], self._chunks[layer][1] + k.shape[2]
        self._check(k, v, layer, k.shape[2])
        self._check_room(start, stop)
        new = torch.arange(start, stop, device="cpu")
        mine = new // self.block % self.world_size == self.rank
        self._chunks[layer] = (start, stop)
        self._keep(layer, new[mine], *(x[:, :, mine.to(x.device)] for x in (k, v)))

    @torch.no_grad()
    def attend(
        self,
        q: Float[Tensor, "batch heads chunk dim"],
        layer: int = 0,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
        backend: str | Backend = "auto",
    ) -> Float[Tensor, "batch heads chunk value_dim"]:
        """What the last chunk hears, on every rank the same: attention along ``graph.rows(start, stop)``. A collective.

        ValueError for other queries than those of the last chunk.
        """
        start, stop = self._chunks[self._layer(layer)]
        rows = self._rows[layer]
        if rows is None or start == stop:
            raise ValueError(f"layer {layer} has no new tokens that could hear: append them first")
        if q.shape[2] != stop - start:
            raise ValueError(f"q must have a row for each of the tokens {start} .. {stop - 1}, the last chunk, got {q.shape[2]}")
        found = self._piece(start, stop, layer)
        call = Call.checked(q, *rows, found.graph, scale, score_mod, sink_logits=sink_logits, with_lse=True)
        out, lse = self._merged(*self._heard(replace(in_parts(call), sink_logits=None), found, backend))
        if sink_logits is not None:
            heard = kept(last_senders, self.graph)[start:stop] >= 0
            out, lse = edges.add_sinks(out, lse, sink_logits, heard.to(lse.device))
        return out.to(q.dtype)

    @torch.no_grad()
    def update(
        self,
        heads: Any,
        x: Float[Tensor, "batch chunk width"],
        layer: int = 0,
        score_mod: ScoreMod | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
        backend: str | Backend = "auto",
    ) -> Float[Tensor, "batch chunk width"]:
        """The updates of new tokens with states ``x``, as :meth:`KeyValueCache.update` gives them; on every rank the same.

        So a language model proceeds, and ``generate`` goes on, with this cache in the place of a :class:`KeyValueCache`.
        """
        start = self.graph.dst_offset + self._chunks[self._layer(layer)][1]
        at = torch.arange(start, start + x.shape[1], device=x.device)
        q, (k, v) = heads.receive(x, at), heads.send(x, at)
        with self.all_or_nothing():
            self.append(k, v, layer)
            update: Tensor = heads.collect(self.attend(q, layer, heads.scale, score_mod, sink_logits, backend))
        return update

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, an error leaves the cache as it was."""
        before = list(self._chunks), list(self._rows), list(self._at)
        try:
            yield
        except BaseException:
            self._chunks, self._rows, self._at = before
            raise

    def check_graph(self, graph: TokenGraph) -> None:
        """ValueError if ``graph`` is another than this cache's."""
        if graph is not self.graph and graph != self.graph:
            raise ValueError(f"this is a cache of {self.graph!r}, got {graph!r}; make a new one for another graph")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _heard(self, call: Call, found: subgraphs.Piece, backend: str | Backend) -> tuple[Tensor, Tensor]:
        """From the senders of this rank."""
        wide = edges.accumulation_dtype(call.q.dtype)
        if not len(found.src):
            out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3], dtype=wide)
            return out, out.new_full(out.shape[:3], -torch.inf)
        if backend == "auto" and enumerate_pairs.few(found.graph._shape):
            backend = "dense"
        out, lse = attended(placed(call, found) if found.is_placed else call, backend)
        return out.to(wide), lse.to(wide)

    def _merged(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ranks."""
        everyone = gathered(torch.cat([out, lse.unsqueeze(-1)], dim=-1), self.group)
        outs, parts = everyone[..., :-1], everyone[..., -1]
        whole = parts.logsumexp(0)
        shares = parts.masked_fill(whole == -torch.inf, 0.0).softmax(0)  # not e^(part - whole), which has the rounding of whole
        return (outs * shares.unsqueeze(-1)).sum(0), whole

    def _piece(self, start: int, stop: int, layer: int) -> subgraphs.Piece:
        """The edges of the last chunk from this rank's senders; few pairs are looked up, not listed."""
        at = self._at[layer]
        few = (stop - start) * len(at) <= enumerate_pairs.FEW
        graph = replace(self.graph, _listed=None) if few else self.graph
        return subgraphs.piece(graph, torch.arange(start, stop, device="cpu"), at)

    def _keep(self, layer: int, new: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows behind those that are there, without the ones whom nobody will hear again."""
        last: Tensor = kept(last_receivers, self.graph)
        stay = last[self._at[layer]] >= self._chunks[layer][0]
        old = self._rows[layer] or (k[:, :, :0], v[:, :, :0])
        joined = [torch.cat([before[:, :, stay.to(x.device)], x.detach()], dim=2) for before, x in zip(old, (k, v), strict=True)]
        self._rows[layer], self._at[layer] = (joined[0], joined[1]), torch.cat([self._at[layer][stay], new])

    def _check(self, k: Tensor, v: Tensor, layer: int, count: int) -> None:
        for name, x, before in zip("kv", (k, v), self._rows[self._layer(layer)] or (None, None), strict=True):
            check_rows(name, x)
            if torch.is_grad_enabled() and x.requires_grad:
                raise NotImplementedError(f"{name} wants gradients, which this cache does not record: use torch.no_grad()")
            like = x.shape if before is None else (*before.shape[:2], x.shape[2], before.shape[3])
            if x.shape[2] != count or tuple(x.shape) != tuple(like):
                raise ValueError(f"{name} must have {count} rows, like those before it, {list(like)}, got {list(x.shape)}")

    def _check_room(self, start: int, stop: int) -> None:
        if start == stop or stop > self.graph.num_dst:
            room = f"{self.graph.num_dst} tokens, of which {start} have come"
            most = self.graph.num_dst - start
            raise ValueError(f"{self.graph!r} has {room}: a chunk must have 1 .. {most}, got {stop - start}")
        latest = int(kept(last_senders, self.graph)[start:stop].max())
        if latest >= stop:
            raise ValueError(f"a receiver of {start} .. {stop - 1} hears sender {latest}, which has not come: give larger chunks")

    def _layer(self, layer: int) -> int:
        layer = checks.size("layer", layer)
        if layer >= self.layers:
            raise IndexError(f"layer must be in 0 .. {self.layers - 1}, got {layer}")
        return layer
