"""What every storage of edges answers.

A question that a storage can answer at once has an answer here; ``None`` means that the pairs have to be
searched, by ``graph.regions``. Nobody outside of ``graph/`` asks which storage a graph has.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.intervals.values import Interval, TriState, as_tristate
from gnn_attention.graph.rules import Rule


class EdgeSet:
    """The edges of a graph, without its sizes and name.

    ``rule`` is :meth:`contains` as FlexAttention takes it: made of functions and tables, for tensors alone.
    ``has_structure`` is False where the edges are chosen anew in every step, so that searching them for tiles
    would take longer than a call. ``has_slices`` is True where several samples or heads have rows of their
    own, which are searched one by one.
    """

    rule: Rule
    has_structure: bool = True
    has_slices: bool = False
    has_parallel_edges: bool = False

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        """Whether there is an edge: a bool tensor for tensors of tokens, a ``TriState`` for ranges."""
        return self.rule(b, h, dst, src)

    def boxes(self, b: Interval, h: Interval, dst: Interval, src: Interval) -> TriState:
        """Say of each box of pairs whether it may hold an edge, and whether all of its pairs are edges."""
        return as_tristate(dst.box, self.contains(b, h, dst, src))

    @property
    def obstacle(self) -> str | None:
        """Why the edges cannot be found from ranges of tokens, so that every pair is visited."""
        return None

    @property
    def distinct(self) -> EdgeSet:
        """The same edges without parallel ones."""
        return self

    def count(self) -> int | None:
        """The number of edges."""
        return None

    def listed(self) -> Int[Tensor, "2 edges"] | None:
        """The list of the edges, ``[2, E]`` in the order of ``edge_index``, where it was made."""
        return None

    def pointers(self) -> tuple[Int[Tensor, " rows_and_one"], Int[Tensor, " edges"]] | None:
        """``(ptr, src)``: row ``r = (b * heads + h) * num_dst + dst`` has ``src[ptr[r] : ptr[r + 1]]``."""
        return None

    def keys(self) -> Int[Tensor, " edges"] | None:
        """``r * num_src + src`` of every edge in ascending order, each once; ``r`` as in :meth:`pointers`."""
        return None

    def in_degree(self) -> Int[Tensor, " rows"] | None:
        """The number of edges into each receiver of each sample and head, on the CPU."""
        return None

    def rows(self, start: int, stop: int) -> EdgeSet:
        """The edges into the receivers ``start .. stop - 1``, which become ``0 .. stop - start - 1``."""
        raise NotImplementedError

    def select(self, batch: int, head: int) -> EdgeSet:
        """The edges of one sample and head."""
        raise NotImplementedError

    def transposed(self) -> EdgeSet:
        """Every edge reversed."""
        raise NotImplementedError

    def restricted_to(self, other: EdgeSet, is_edge: bool, slices: tuple[int, int]) -> EdgeSet | None:
        """The stored edges that are edges of ``other``, or are none; None where nothing is stored.

        ``slices`` are the numbers of samples and heads by which either of the two differs.
        """
        return None

    def without_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        """Edges that differ from these at listed pairs alone, and ``dst * num_src + src`` of those pairs.

        Pairs outside of ``num_dst`` receivers and ``num_src`` senders may be among them.
        """
        return self, []


def on_device(part: Any, device: torch.device) -> Any:
    """Return a rule, or a value bound to one, as plain functions with all of its tables on ``device``.

    FlexAttention cannot compile a ``mask_mod`` that copies a table from another device.

    >>> from gnn_attention.graph import rules
    >>> table = torch.tensor([0, 0, 1])
    >>> rule = partial(rules.transposed, partial(rules.look_up, table))
    >>> on_device(rule, torch.device("meta")).args[0].args[0].device
    device(type='meta')
    """
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, MethodType) and isinstance(part.__self__, EdgeSet):
        return on_device(part.__self__.rule, device)
    if isinstance(part, partial):
        arguments = (on_device(argument, device) for argument in part.args)
        return partial(part.func, *arguments, **{k: on_device(v, device) for k, v in part.keywords.items()})
    return tuple(on_device(entry, device) for entry in part) if type(part) is tuple else part
