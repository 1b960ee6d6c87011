"""What every cache shares: chunks of new tokens, the senders that are kept, reordering and going back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.cache._slots import Held, extended
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod

__all__ = ["TokenCache", "check_rows"]

Cache = TypeVar("Cache", bound="TokenCache")


class TokenCache:
    """What both caches share: chunks, the senders that are kept, and going back.

    Buffers of a layer are ``[B, H, room, D]``; which tokens their rows belong to is the same for all layers (``_held``).
    ``_behind`` are the layers that have not been given the last chunk yet. ``latent``: that many first channels of the last of a
    layer's tensors are the values; None: all of them.
    """

    latent: int | None = None

    def __init__(self, graph: TokenGraph, layers: int = 1) -> None:
        self.graph = _checked_graph(graph)
        self.layers = checks.size("layers", layers, 1)
        self._held = Held.nothing(graph)
        self._rows: list[tuple[Tensor, ...]] = [()] * self.layers
        self._behind: set[int] = set()

    @property
    def length(self) -> int:
        """How many tokens came: where the next one stands, counted from the graph's first."""
        return self._held.stop

    @property
    def positions(self) -> Int[Tensor, " kept"]:
        """The absolute positions of the senders that are kept: those whom the last chunk or a later receiver hears."""
        return self._held.positions[self._held.needed] + self.graph.src_offset

    @property
    def nbytes(self) -> int:
        """Memory of all layers' buffers, in bytes; they have some rows to spare."""
        return sum(x.numel() * x.element_size() for rows in self._rows for x in rows)

    def check_graph(self, graph: TokenGraph) -> None:
        """ValueError if ``graph`` is another than this cache's: what is kept, and where, depends on it."""
        if graph is not self.graph and graph != self.graph:
            raise ValueError(f"this is a cache of {self.graph!r}, got {graph!r}; make a new one for another graph")

    def reorder(self, index: Int[Tensor, " samples"] | Sequence[int]) -> None:
        """Sample i goes on from what sample ``index[i]`` has heard (beam search); repeated and left out samples are allowed.

        Raises TypeError or ValueError for what is no list of integers ``[B]``, IndexError where there is no such sample, and
        ValueError for a graph that differs by sample.
        """
        self._check_complete("reorder")
        if self.graph.batch is not None:
            raise ValueError(f"reorder: {self.graph!r} differs by sample, and a past heard along one cannot go on along another")
        index = _checked_index(index)
        for batch in {x.shape[0] for rows in self._rows for x in rows}:
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
                raise IndexError(f"index must hold samples in 0 .. {batch - 1}, got {index.tolist()}")
        self._rows = [tuple(x.index_select(0, index.to(x.device)) for x in rows) for rows in self._rows]

    def rewind(self, length: int) -> None:
        """Back to when ``length`` tokens had come: those after them are forgotten (a draft that was refused).

        The last chunk can always be taken back, wholly or in part; more of it wherever nobody was dropped whom the tokens to
        come would hear. ValueError names the first such sender, or says that there are not so many tokens.
        """
        self._check_complete("rewind")
        length = checks.size("length", length)
        if length > self.length:
            raise ValueError(f"rewind({length}): only {self.length} tokens have come")
        self._held = self._held.back_to(length)
        if not length:
            self._rows = [()] * self.layers  # whatever comes now may have other shapes

    def fork(self: Cache) -> Cache:
        """A cache of its own that goes on from here; only the graph is shared."""
        twin = copy.copy(self)
        twin._rows = [tuple(x.clone() for x in rows) for rows in self._rows]
        twin._behind = set(self._behind)
        return twin

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, an error leaves the cache as it was: for a model whose layers take a chunk one after the other."""
        before = self._held, self._rows, self._behind
        try:
            yield
        except BaseException:
            self._held, self._rows, self._behind = before
            raise

    def __repr__(self) -> str:
        """How much came, and how much of it is kept."""
        kept = f"{len(self._held.needed)} senders kept of {self.length} in {self.layers} layers"
        return f"{type(self).__name__}({self.graph.name}: {kept}, {self.nbytes / 2**20:.1f} MB)"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _senders(self, layer: int) -> tuple[Tensor, ...]:
        """Copies of the rows of the senders that are kept."""
        if layer in self._behind or not self._rows[layer]:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        needed = self._held.needed
        return tuple(x[:, :, needed.to(x.device)] for x in self._rows[layer])

    def _append(self, rows: tuple[Tensor, ...], layer: int) -> None:
        """The next chunk of a layer: each of ``rows`` is ``[B, H, chunk, D]``. All is checked before anything changes."""
        held = self._with_chunk(layer, rows[0].shape[2])
        old = self._rows[layer]
        for given, before in zip(rows, old, strict=False):
            _check_like(given, before)
        found = tuple(extended(before, given, held) for given, before in zip(rows, old or (None,) * len(rows), strict=True))
        self._behind = (self._behind if held is self._held else set(range(self.layers))) - {layer}
        self._rows = [*self._rows[:layer], found, *self._rows[layer + 1 :]]
        self._held = held

    def _with_chunk(self, layer: int, count: int) -> Held:
        if not count:
            raise ValueError("a chunk must have at least one token, got none")
        if layer not in self._behind:
            self._check_complete("the next chunk")
            return self._held.followed_by(count)
        if count != self._held.stop - self._held.start:
            raise ValueError(f"layer {layer} must be given {self._chunk()}, as the layers before it, got a chunk of {count}")
        return self._held

    def _attend(
        self, q: Tensor, layer: int, scale: float | None, mod: ScoreMod | None, sinks: Tensor | None, backend: str | Backend
    ) -> Tensor:
        """The last chunk hears; nothing changes. What has one head, be it for k or v, serves all."""
        self._check_receivers(q, layer)
        held, rows = self._held, self._rows[layer]
        k, v = (x[:, :, : len(held.positions)] for x in (rows[0], rows[-1][..., : self.latent]))
        heads = max(k.shape[1], v.shape[1])
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        if mod is not None and held.gap:
            mod = _AtPositions(mod, held.positions + self.graph.src_offset)
        if backend == "auto" and held.few:
            backend = "dense"
        out: Tensor = attend(q, k, v, held.view, scale, mod, sink_logits=sinks, backend=backend)
        return out

    def _check_receivers(self, q: Tensor, layer: int) -> None:
        if layer in self._behind or self._held.start == self._held.stop:
            raise ValueError(f"layer {layer} has no new tokens that could hear: append them first")
        if isinstance(q, Tensor) and q.dim() == 4 and q.shape[2] != self._held.stop - self._held.start:
            raise ValueError(f"q must have a row for each of {self._chunk()}, the last that were appended, got {q.shape[2]}")

    def _check_complete(self, what: str) -> None:
        if self._behind:
            raise ValueError(f"{what} must wait until layer {min(self._behind)} was given {self._chunk()} too")

    def _chunk(self) -> str:
        return f"the tokens {self._held.start} .. {self._held.stop - 1}"

    def _checked_layer(self, layer: int) -> int:
        layer = checks.size("layer", layer)
        if layer >= self.layers:
            raise IndexError(f"layer must be in 0 .. {self.layers - 1}, got {layer}")
        return layer

    def _positions_of(self, x: Tensor, layer: int) -> Tensor:
        """Where the new tokens of a layer stand."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be the states [B, T, width] of the new tokens, got {got}")
        first = self.graph.dst_offset + (self._held.start if layer in self._behind else self._held.stop)
        return torch.arange(first, first + x.shape[1], device=x.device)


def check_rows(name: str, x: object) -> None:
    """TypeError or ValueError unless ``x`` is a float tensor ``[B, H, T, D]``."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float tensor [B, Hkv, T, D], got {got}")
    if x.dim() != 4:
        raise ValueError(f"{name} must be [B, Hkv, T, D], got shape {list(x.shape)}")


# -- helpers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _AtPositions:
    """A score_mod that is told absolute senders where the rows of a buffer have gaps."""

    mod: ScoreMod
    positions: Tensor

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """The row ``src`` is the sender at its position."""
        return self.mod(score, b, h, dst, self.positions.to(src.device)[src])


def _checked_graph(graph: TokenGraph) -> TokenGraph:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph of all the tokens that may come, got {type(graph).__name__}")
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        raise ValueError(f"a cache needs a graph whose receivers and senders are the same tokens, got {graph!r}")
    return graph


def _check_like(given: Tensor, before: Tensor) -> None:
    shapes = [(*x.shape[:2], x.shape[3]) for x in (given, before)]
    if shapes[0] != shapes[1] or (given.dtype, given.device) != (before.dtype, before.device):
        said = [f"[{b}, {h}, T, {d}] in {x.dtype} on {x.device}" for (b, h, d), x in zip(shapes, (given, before), strict=True)]
        raise ValueError(f"a chunk must be like those before it, {said[1]}, got {said[0]}")


def _checked_index(index: object) -> Tensor:
    found = index if isinstance(index, Tensor) else torch.as_tensor(index)
    if found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError(f"index must hold integers, the sample that each one goes on from, got {found.dtype}")
    if found.dim() != 1:
        raise ValueError(f"index must be a list [B] of samples, got shape {list(found.shape)}")
    return found.long()
