"""The interface of all edge sets.

A method returns ``None`` if the storage does not hold the answer. The caller then searches the
pairs with ``graph.regions``. Code outside of ``graph/`` never checks the class of an edge set.
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

    ``rule`` is :meth:`contains` as a ``mask_mod`` of FlexAttention. It consists of functions and of
    tables that :func:`on_device` can move. ``has_structure`` is False for edges that are chosen
    anew in every step: searching them for tiles would take longer than attention itself.
    ``has_slices`` is True if samples or heads have their own chosen rows. Slices are then searched
    one by one.
    """

    rule: Rule
    has_structure: bool = True
    has_slices: bool = False
    has_parallel_edges: bool = False

    def contains(self, b: Any, h: Any, dst: Any, src: Any) -> Any:
        """Return which pairs are edges: a bool tensor for tensors, a ``TriState`` for ranges."""
        return self.rule(b, h, dst, src)

    def boxes(self, b: Interval, h: Interval, dst: Interval, src: Interval) -> TriState:
        """Return for each box whether it may hold an edge, and whether all its pairs are edges."""
        return as_tristate(dst.box, self.contains(b, h, dst, src))

    @property
    def obstacle(self) -> str | None:
        """The reason why edges cannot be evaluated on ranges and every pair is visited, or None."""
        return None

    @property
    def unique_edges(self) -> EdgeSet:
        """The edges, with only the first copy of each."""
        return self

    def count(self) -> int | None:
        """Return the number of edges."""
        return None

    def listed(self) -> Int[Tensor, "2 edges"] | None:
        """Return the edges ``[2, E]`` in the order of ``edge_index`` if they are stored."""
        return None

    def pointers(self) -> tuple[Int[Tensor, " rows_plus_one"], Int[Tensor, " edges"]] | None:
        """Return CSR rows ``(ptr, src)``, numbered by ``r = (b * heads + h) * num_dst + dst``."""
        return None

    def keys(self) -> Int[Tensor, " edges"] | None:
        """Return the sorted, distinct keys ``r * num_src + src``; ``r`` is as in :meth:`pointers`."""
        return None

    def in_degree(self) -> Int[Tensor, " rows"] | None:
        """Return the in-degree of each row ``r`` of :meth:`pointers`, on the CPU."""
        return None

    def rows(self, start: int, stop: int) -> EdgeSet:
        """Return the in-edges of receivers ``start .. stop - 1``, which are renumbered from 0."""
        raise NotImplementedError

    def select(self, batch: int, head: int) -> EdgeSet:
        """Return the edges of one sample and head."""
        raise NotImplementedError

    def transposed(self) -> EdgeSet:
        """Return the edges with senders and receivers exchanged."""
        raise NotImplementedError

    def restrict_to(self, other: EdgeSet, in_other: bool, batch_shape: tuple[int, int]) -> EdgeSet | None:
        """Return the stored edges inside ``other`` (``in_other=True``) or outside of it (False).

        Return None unless the stored edges have ``batch_shape``, the result's ``(batch, heads)``.
        """
        return None

    def extract_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        """Return the edges with empty lists in place of all lists, and the keys of each list.

        A key is ``dst * num_src + src``. Some pairs may lie outside ``num_dst`` x ``num_src``.
        """
        return self, []


def on_device(value: Any, device: torch.device) -> Any:
    """Return a rule, or an argument bound to one, with all its tables on ``device``.

    FlexAttention cannot compile a ``mask_mod`` that copies a table from another device.

    >>> from gnn_attention.graph import rules
    >>> table = torch.tensor([0, 0, 1])
    >>> rule = partial(rules.transpose, partial(rules.look_up, table))
    >>> on_device(rule, torch.device("meta")).args[0].args[0].device
    device(type='meta')
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, MethodType) and isinstance(value.__self__, EdgeSet):
        return on_device(value.__self__.rule, device)
    if isinstance(value, partial):
        arguments = (on_device(argument, device) for argument in value.args)
        options = {name: on_device(argument, device) for name, argument in value.keywords.items()}
        return partial(value.func, *arguments, **options)
    return tuple(on_device(entry, device) for entry in value) if type(value) is tuple else value
