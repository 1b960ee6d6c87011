"""Edge lists inside a traced program: an operator checks their numbers when the program runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from gnn_attention._support.custom_op import define
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import edge_list
from gnn_attention.graph.edges import ListedEdges
from gnn_attention.graph.token_graph import TokenGraph


@dataclass(eq=False, repr=False)
class Traced(TokenGraph):
    """A graph whose numbers are not known yet, under ``torch.compile`` and ``torch.export``.

    It ends with the trace: nothing is cached.
    """

    def __post_init__(self) -> None:
        """Nothing that a compiler would have to trace."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class TracedEdges(Traced):
    """What stands in for ``TokenGraph.from_edges``, with the same errors."""

    @classmethod
    def of(cls, edge_index: Any, num_dst: int, num_src: int) -> TracedEdges:
        """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order.

        The sizes of an EdgeIndex are not read: compilers do not guard attributes of tensors.
        """
        plain = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index
        if torch.compiler.is_compiling():
            edges = torch.ops.gnn_attention.edge_list(plain, num_dst, num_src)
        else:
            edges = edge_list.checked(plain, num_dst, num_src).to(plain.device)
        return cls(ListedEdges(edges, num_dst, num_src, "keep"), num_dst, num_src, name="edges")

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        return cast("ListedEdges", self.edges).edge_index

    @property
    def num_edges(self) -> int:
        return self.edges_on(torch.device("cpu")).shape[1]

    @property
    def has_parallel_edges(self) -> bool:
        """True, since their numbers are not known yet."""
        return True


def is_edge_list(edges: Any) -> bool:
    """True for a plain integer tensor, such as an ``edge_index`` or torch_geometric's ``EdgeIndex``."""
    if not isinstance(edges, Tensor) or edges.layout != torch.strided:
        return False
    return not (edges.is_floating_point() or edges.is_complex())


def _checked(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_list.checked(edge_index, num_dst, num_src).to(edge_index.device)


def _like_checked(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_index.new_empty((2, edge_index.shape[-1]), dtype=torch.int64)


define("edge_list", "(Tensor edge_index, SymInt num_dst, SymInt num_src) -> Tensor", _checked, _like_checked)
