"""What every cache shares: chunks of new tokens, resident senders, reordering and rewinding."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.cache._slots import ResidentSenders, append_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod

Cache = TypeVar("Cache", bound="TokenCache")


class TokenCache:
    """The base of both caches.

    Buffers of a layer are ``[B, H, room, D]``; the tokens of their rows are the same for all layers
    (``_senders``). ``_behind`` are the layers without the last chunk yet. The values are the first
    ``latent`` channels of the last of a layer's tensors; None: all of them.
    """

    latent: int | None = None

    def __init__(self, graph: TokenGraph, layers: int = 1) -> None:
        self.graph = checked_graph(graph)
        self.layers = checks.size("layers", layers, 1)
        self._senders = ResidentSenders.empty(graph)
        self._rows: list[tuple[Tensor, ...]] = [()] * self.layers
        self._behind: set[int] = set()

    @property
    def length(self) -> int:
        """The number of tokens so far: the position of the next one, counted from the graph's first."""
        return self._senders.stop

    @property
    def positions(self) -> Int[Tensor, " senders"]:
        """The absolute positions of the senders that the last chunk or a later receiver attends to."""
        return self._senders.positions[self._senders.needed] + self.graph.src_offset

    @property
    def nbytes(self) -> int:
        """Memory of all layers' buffers, in bytes; they have some rows to spare."""
        return sum(x.numel() * x.element_size() for rows in self._rows for x in rows)

    def check_graph(self, graph: TokenGraph) -> None:
        """ValueError for another graph than this cache's."""
        check_same_graph(self.graph, graph)

    def reorder(self, index: Int[Tensor, " samples"] | Sequence[int]) -> None:
        """Sample i goes on from sample ``index[i]`` (beam search); repeated and omitted samples are allowed.

        Raises TypeError or ValueError unless index is a list of integers ``[B]``, IndexError for a sample out
        of range, and ValueError for a graph that differs by sample.
        """
        self._check_complete("reorder")
        if self.graph.batch is not None:
            raise ValueError(f"reorder: {self.graph!r} differs by sample: no past can go on as another")
        checks.check_order("index", index)
        index = index if isinstance(index, Tensor) else torch.as_tensor(index)
        if index.is_floating_point() or index.dtype == torch.bool:
            raise TypeError(f"index must hold integers, the sample that each goes on from, got {index.dtype}")
        if index.dim() != 1:
            raise ValueError(f"index must be a list [B] of samples, got shape {list(index.shape)}")
        index = index.long()
        for batch in {x.shape[0] for rows in self._rows for x in rows}:
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
                raise IndexError(f"index must hold samples in 0 .. {batch - 1}, got {index.tolist()}")
        self._rows = [tuple(x.index_select(0, index.to(x.device)) for x in rows) for rows in self._rows]

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
        twin._behind = set(self._behind)
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
        senders = f"{len(self._senders.needed)} senders of {self.length} in {self.layers} layers"
        return f"{type(self).__name__}({self.graph.name}: {senders}, {self.nbytes / 2**20:.1f} MB)"

    def _sender_rows(self, layer: int) -> tuple[Tensor, ...]:
        if layer in self._behind or not self._rows[layer]:
            raise ValueError(f"layer {layer} has no new tokens: append them first")
        needed = self._senders.needed
        return tuple(x[:, :, needed.to(x.device)] for x in self._rows[layer])

    def _append(self, rows: tuple[Tensor, ...], layer: int) -> None:
        """The next chunk of a layer, each ``[B, H, chunk, D]``; checked before anything changes."""
        senders, old = self._with_chunk(layer, rows[0].shape[2]), self._rows[layer]
        for given, before in zip(rows, old, strict=False):
            _check_like(given, before)
        buffers = zip(old or (None,) * len(rows), rows, strict=True)
        found = tuple(append_rows(before, given, senders) for before, given in buffers)
        self._behind = (self._behind if senders is self._senders else set(range(self.layers))) - {layer}
        self._rows = [*self._rows[:layer], found, *self._rows[layer + 1 :]]
        self._senders = senders

    def _with_chunk(self, layer: int, count: int) -> ResidentSenders:
        if not count:
            raise ValueError("a chunk must have at least one token, got none")
        if layer not in self._behind:
            self._check_complete("the next chunk")
            return self._senders.append(count)
        if count != self._senders.count:
            chunk = f"{self._chunk()}, as the layers before it"
            raise ValueError(f"layer {layer} must get {chunk}, got a chunk of {count}")
        return self._senders

    def _attend(self, q: Tensor, layer: int, scale: Any, mod: ScoreMod | None, **options: Any) -> Tensor:
        """Attention of the last chunk; nothing changes. Keys or values of one head serve all heads."""
        self._check_receivers(q, layer)
        senders, rows = self._senders, self._rows[layer]
        k, v = (x[:, :, : len(senders.positions)] for x in (rows[0], rows[-1][..., : self.latent]))
        heads = max(k.shape[1], v.shape[1])
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        if mod is not None and senders.gap:
            mod = partial(_at_positions, mod, senders.positions + self.graph.src_offset)
        if options["backend"] == "auto" and senders.few:
            options["backend"] = "dense"
        out: Tensor = attend(q, k, v, senders.view, scale, mod, **options)
        return out

    def _check_receivers(self, q: Tensor, layer: int) -> None:
        if layer in self._behind or not self._senders.count:
            raise ValueError(f"layer {layer} has no new tokens to attend with: append them first")
        if isinstance(q, Tensor) and q.dim() == 4 and q.shape[2] != self._senders.count:
            chunk = f"{self._chunk()}, the last that were appended"
            raise ValueError(f"q must have a row for each of {chunk}, got {q.shape[2]}")

    def _check_complete(self, what: str) -> None:
        if self._behind:
            raise ValueError(f"{what} must wait until layer {min(self._behind)} has got {self._chunk()} too")

    def _chunk(self) -> str:
        return f"the tokens {self._senders.start} .. {self._senders.stop - 1}"

    def _positions_of(self, x: Tensor, layer: int) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be the states [B, T, width] of the new tokens, got {got}")
        first = self.graph.dst_offset + (self._senders.start if layer in self._behind else self._senders.stop)
        return torch.arange(first, first + x.shape[1], device=x.device)


def check_rows(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float tensor [B, Hkv, T, D], got {got}")
    if x.dim() != 4:
        raise ValueError(f"{name} must be [B, Hkv, T, D], got shape {list(x.shape)}")


def check_same_graph(own: TokenGraph, graph: TokenGraph) -> None:
    if graph is not own and graph != own:
        raise ValueError(f"this is a cache of {own!r}, got {graph!r}; make a new one for another graph")


def at_heads(mod: ScoreMod | None, heads: object) -> ScoreMod | None:
    """``mod`` at the numbers of the heads in their layer, where a rank has those from ``first_head`` on."""
    first = getattr(heads, "first_head", 0)
    return mod if mod is None or not first else partial(_from_head, mod, first)


def _from_head(mod: ScoreMod, first: int, score: Tensor, b: Tensor, h: Tensor, *ends: Tensor) -> Tensor:
    return mod(score, b, h + first, *ends)


def _at_positions(mod: ScoreMod, at: Tensor, score: Tensor, b: Any, h: Any, dst: Any, src: Tensor) -> Tensor:
    # where the rows of a buffer have gaps
    return mod(score, b, h, dst, at.to(src.device)[src])


def checked_graph(graph: TokenGraph) -> TokenGraph:
    """A graph whose receivers and senders are the same tokens; TypeError or ValueError otherwise."""
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph of all tokens to come, got {type(graph).__name__}")
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        expected = "a graph whose receivers and senders are the same tokens"
        raise ValueError(f"a cache needs {expected}, got {graph!r}")
    return graph


def _check_like(given: Tensor, before: Tensor) -> None:
    form = "[{0.shape[0]}, {0.shape[1]}, T, {0.shape[3]}] in {0.dtype} on {0.device}"
    got, expected = form.format(given), form.format(before)
    if got != expected:
        raise ValueError(f"a chunk must be like those before it, {expected}, got {got}")
