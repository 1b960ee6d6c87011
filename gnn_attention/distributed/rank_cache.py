"""Decoding over ranks: each stores keys and values of some tokens; queries attend to those of all ranks.

Every rank has the queries of the newest tokens and attends to its own senders; one small all-gather of
these results (a number for each channel of a value and one more, however long the past) and a merge by
log-sum-exp give every rank the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attended
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.cache._base import at_heads, check_rows, check_same_graph, checked_graph
from gnn_attention.distributed import attention, subgraphs
from gnn_attention.distributed.attention import Result
from gnn_attention.distributed.collectives import all_gather
from gnn_attention.distributed.merge_lse import in_merge_dtype, merged
from gnn_attention.distributed.partition import Partition
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.liveness import last_receivers, last_senders
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.score_mods import ScoreMod

Rows = Float[Tensor, "batch kv_heads tokens dim"]


class RankCache:
    """Keys and values of the tokens so far, spread over the ranks of a group, for one or several layers.

    :meth:`append` stores token t on rank ``t // block % world``; :meth:`fill` takes the first part of a text
    as it was spread for ``distributed.attend``. A sender is dropped after its last receiver. All methods are
    called on every rank, with the same arguments but for :meth:`fill`; only :meth:`attend` communicates.
    NotImplementedError for rows that want gradients.

    ``cache.append(k, v)`` then ``out = cache.attend(q)`` for each chunk of new tokens, of any size; or, for a
    whole model, ``generate(model, tokens, count, cache=cache)`` with as many layers as the model.

    ValueError unless each token of ``graph``, all that may come, is a receiver and a sender.
    """

    def __init__(self, graph: TokenGraph, group: Any, layers: int = 1, block: int = 1) -> None:
        self.graph, self.group = checked_graph(graph), group
        self.layers, self.block = checks.size("layers", layers, 1), checks.size("block", block, 1)
        self.rank, self.world_size = distributed.get_rank(group), distributed.get_world_size(group)
        self._chunks = [(0, 0)] * self.layers  # the last chunk
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * self.layers
        self._tokens = [torch.zeros(0, dtype=torch.int64, device="cpu")] * self.layers  # of the rows

    @property
    def length(self) -> int:
        """How many tokens all layers have."""
        return min(stop for _, stop in self._chunks)

    def positions(self, layer: int = 0) -> Int[Tensor, " senders"]:
        """The absolute positions of the senders that this rank stores."""
        return self._tokens[layer] + self.graph.src_offset

    def check_graph(self, graph: TokenGraph) -> None:
        """ValueError for another graph than this cache's."""
        check_same_graph(self.graph, graph)

    def fill(self, k: Rows, v: Rows, partition: Partition, layer: int = 0) -> None:
        """The first tokens: this rank's share of their keys and values, under a partition of these tokens.

        ValueError unless the layer is empty, the partition is of this group and not longer than the graph,
        and the rows are this rank's.
        """
        own, count = partition.src.tokens(self.rank), partition.src.num_tokens
        if self._chunks[layer][1] or partition.world_size != self.world_size or count > self.graph.num_src:
            expected = f"an empty layer and at most {self.graph.num_src} tokens on {self.world_size} ranks"
            raise ValueError(
                f"fill needs {expected}, got {partition!r} after {self._chunks[layer][1]} tokens"
            )
        self._check(k, v, layer, len(own))
        self._chunks[layer] = (count, count)
        self._store(layer, own, k, v)

    def append(self, k: Rows, v: Rows, layer: int = 0) -> None:
        """The next chunk: every rank gets all of its keys and values, and stores its own.

        ValueError for more tokens than the graph has, a receiver that attends to a token which has not come,
        or rows that do not fit those before; IndexError for a layer out of range. Nothing has changed then.
        """
        layer = checks.index("layer", layer, self.layers)
        check_rows("k", k)
        start, stop = self._chunks[layer][1], self._chunks[layer][1] + k.shape[2]
        self._check(k, v, layer, k.shape[2])
        self._check_room(start, stop)
        new = torch.arange(start, stop, device="cpu")
        mine = new // self.block % self.world_size == self.rank
        self._chunks[layer] = (start, stop)
        self._store(layer, new[mine], *(x[:, :, mine.to(x.device)] for x in (k, v)))

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
        """Attention of the last chunk along ``graph.rows(start, stop)``, on every rank. A collective.

        ValueError for other queries than those of the last chunk.
        """
        start, stop = self._chunks[checks.index("layer", layer, self.layers)]
        rows = self._rows[layer]
        if rows is None or start == stop:
            raise ValueError(f"layer {layer} has no new tokens to attend with: append them first")
        if q.shape[2] != stop - start:
            expected = f"a row for each of the tokens {start} .. {stop - 1}, the last chunk"
            raise ValueError(f"q must have {expected}, got {q.shape[2]}")
        part = self._subgraph(start, stop, layer)
        call = AttentionCall.checked(q, *rows, part.graph, scale, score_mod, None, sink_logits, with_lse=True)
        out, lse = self._attend_own(replace(in_merge_dtype(call), sink_logits=None), part, backend)
        out, lse = _merged_over_ranks(out, lse, self.group)
        if sink_logits is not None:
            has_in_edges = memoized(last_senders, self.graph)[start:stop] >= 0
            out, lse = edge_softmax.add_sinks(out, lse, sink_logits, has_in_edges.to(lse.device))
        return out.to(q.dtype)

    @torch.no_grad()
    def update(
        self,
        heads: Any,
        x: Float[Tensor, "batch chunk width"],
        layer: int = 0,
        score_mod: ScoreMod | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Float[Tensor, "batch chunk width"]:
        """The updates of new tokens with states ``x``, as :meth:`KeyValueCache.update`; on every rank.

        So ``model.proceed`` and ``generate`` run with this cache in the place of a :class:`KeyValueCache`.
        """
        start = self.graph.dst_offset + self._chunks[checks.index("layer", layer, self.layers)][1]
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        q, (k, v) = heads.receive(x, positions), heads.send(x, positions)
        with self.all_or_nothing():
            self.append(k, v, layer)
            mod = at_heads(score_mod, heads)
            update: Tensor = heads.collect(self.attend(q, layer, heads.scale, mod, *arguments, **options))
        return update

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, an error leaves the cache as it was."""
        before = list(self._chunks), list(self._rows), list(self._tokens)
        try:
            yield
        except BaseException:
            self._chunks, self._rows, self._tokens = before
            raise

    def _attend_own(self, call: AttentionCall, part: subgraphs.Subgraph, backend: str | Backend) -> Result:
        if not len(part.src):
            return attention.no_result(call)
        if backend == "auto" and enumerate_pairs.few(part.graph.shape4):
            backend = "dense"
        result = attended(attention.at_positions(call, part), backend)
        out, lse = attention.in_accumulation_dtype(call, *result)
        return out, lse

    def _subgraph(self, start: int, stop: int, layer: int) -> subgraphs.Subgraph:
        """The edges of the last chunk from this rank's senders; few pairs are looked up, not listed."""
        tokens = self._tokens[layer]
        few = (stop - start) * len(tokens) <= enumerate_pairs.FEW
        graph = replace(self.graph, _listed=None) if few else self.graph
        return subgraphs.subgraph(graph, torch.arange(start, stop, device="cpu"), tokens)

    def _store(self, layer: int, new: Tensor, k: Tensor, v: Tensor) -> None:
        # after those that are still attended to
        last: Tensor = memoized(last_receivers, self.graph)
        stay = last[self._tokens[layer]] >= self._chunks[layer][0]
        old = self._rows[layer] or (k[:, :, :0], v[:, :, :0])
        rows = (x[:, :, stay.to(x.device)] for x in old)
        k, v = (torch.cat([before, x.detach()], dim=2) for before, x in zip(rows, (k, v), strict=True))
        self._rows[layer], self._tokens[layer] = (k, v), torch.cat([self._tokens[layer][stay], new])

    def _check(self, k: Tensor, v: Tensor, layer: int, count: int) -> None:
        old = self._rows[checks.index("layer", layer, self.layers)] or (None, None)
        for name, x, before in zip("kv", (k, v), old, strict=True):
            check_rows(name, x)
            if torch.is_grad_enabled() and x.requires_grad:
                raise NotImplementedError(
                    f"{name} wants gradients, but none are recorded: use torch.no_grad()"
                )
            like = x.shape if before is None else (*before.shape[:2], x.shape[2], before.shape[3])
            if x.shape[2] != count or tuple(x.shape) != tuple(like):
                expected = f"{count} rows, like those before it, {list(like)}"
                raise ValueError(f"{name} must have {expected}, got {list(x.shape)}")

    def _check_room(self, start: int, stop: int) -> None:
        count = self.graph.num_dst
        if start == stop or stop > count:
            expected = f"1 .. {count - start} tokens, {start} of {count} have come"
            raise ValueError(f"a chunk must have {expected}, got {stop - start}")
        latest = int(memoized(last_senders, self.graph)[start:stop].max())
        if latest >= stop:
            raise ValueError(f"a chunk needs sender {latest}, which has not come: give larger chunks")


def _merged_over_ranks(out: Tensor, lse: Tensor, group: Any) -> Result:
    everyone = all_gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1), group)
    results = [(rank[..., :-1], rank[..., -1]) for rank in everyone]
    return merged(results, [0] * len(results), out.shape[2])
