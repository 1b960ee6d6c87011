"""Type checkers understand calls of ``from_indices``; mypy checks this file strictly (pyproject.toml)."""

from typing import assert_type

import pytest
import torch

from gnn_attention import TokenGraph
from gnn_attention.graph.edges import log_count

INDEX = torch.tensor([[0, -1], [1, 0]])


def test_from_indices_returns_a_graph_or_a_pair() -> None:
    graph = TokenGraph.from_indices(INDEX, 2, INDEX[:, 0] + 1, coalesce=bool(len(INDEX)), causal=True)
    assert assert_type(graph, TokenGraph) == graph
    multigraph, score_mod = TokenGraph.from_indices(INDEX, 2, coalesce="count", name="mine")
    assert callable(assert_type(score_mod, log_count))
    assert isinstance(assert_type(multigraph | graph, TokenGraph), TokenGraph)
    blocks = assert_type(TokenGraph.from_block_indices(INDEX, 4, num_dst=8, num_src=8), TokenGraph)
    assert assert_type(blocks.in_degree(), torch.Tensor).tolist() == [4] * 4 + [8] * 4


def test_type_checkers_refuse_what_raises() -> None:
    """mypy reports an ignore that is not needed."""
    with pytest.raises(TypeError):
        _graph, _mod = TokenGraph.from_indices(INDEX, 2)  # type: ignore[misc]
    with pytest.raises(ValueError, match="coalesce must be"):
        TokenGraph.from_indices(INDEX, 2, coalesce="sum")  # type: ignore[call-overload]
    with pytest.raises(AttributeError):
        TokenGraph.from_indices(INDEX, 2, coalesce="count").in_degree()  # type: ignore[attr-defined]
