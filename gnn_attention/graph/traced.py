"""Edge lists inside a traced program: their numbers come when it runs, and an operator checks them then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.token_graph import TokenGraph


@dataclass(eq=False, repr=False)
class TracedEdges(TokenGraph):
    """The graph of an edge list whose numbers are not known yet: all that is known is how many edges there
    are, and the list.

    It stands in for ``TokenGraph.from_edges`` under ``torch.compile`` and ``torch.export``, whose checks it
    makes when the program runs, with the same errors. It lives and ends in the trace: nothing is cached with
    it.
    """

    def __post_init__(self) -> None:
        """Nothing that a compiler would have to follow."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]

    @classmethod
    def of(cls, edge_index: Any, num_dst: int, num_src: int) -> TracedEdges:
        """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order, between as many nodes as are
        given.

        What an EdgeIndex says of its own sizes is not looked at: compilers do not guard what a tensor carries
        next to its numbers.
        """
        plain = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index
        edges = torch.ops.gnn_attention.edge_list(plain, num_dst, num_src)
        return cls(rules.everyone, num_dst, num_src, name="edges", _listed=edges)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """The list, on the device where it was given."""
        assert self._listed is not None
        return self._listed

    @property
    def num_edges(self) -> int:
        """The length of the list."""
        assert self._listed is not None
        return self._listed.shape[1]


def is_edge_list(edges: Any) -> bool:
    """True for a plain integer tensor, such as an ``edge_index`` or torch_geometric's ``EdgeIndex``."""
    return (
        isinstance(edges, Tensor)
        and edges.layout == torch.strided
        and not (edges.is_floating_point() or edges.is_complex())
    )


def _checked(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return TokenGraph.from_edges(edge_index, num_dst, num_src).edges_on(edge_index.device)


def _like_checked(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_index.new_empty((2, edge_index.shape[-1]), dtype=torch.int64)


torch.library.define(
    "gnn_attention::edge_list", "(Tensor edge_index, SymInt num_dst, SymInt num_src) -> Tensor"
)
torch.library.impl("gnn_attention::edge_list", "default", _checked)
torch.library.register_fake("gnn_attention::edge_list", _like_checked)
