"""Graphs refuse wrong rules, lists, sizes, operands, rows and heads, and they never change."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from gnn_attention import TokenGraph, patterns
from tests.graph.test_graph import family, graph_from_list, per_head

LIST4 = graph_from_list([(3, 1), (0, 2), (2, 1), (1, 0), (0, 1)], 4, 5)
COPIES = torch.tensor([[2, 0, 1, 0, 0], [0, 1, 1, 1, 1]])
SIGNED = r"edge_index must be a tensor of signed integers of shape \[2, E\], got "
POSITIONAL = r"four named positional parameters \(b, h, dst, src\), got "
OPERATORS_ONLY = "must be made of tensor operators"
WRONG_RULES = [
    ("causal", r"rule must be a function rule\(b, h, dst, src\) -> bool tensor, got str"),
    (torch.eq, r"rule must be a function .*got the builtin"),
    (lambda dst, src: src <= dst, rf"{POSITIONAL}\(dst, src\)"),
    (lambda *e: e[3] <= e[2], rf"{POSITIONAL}\(\*e\)"),
    (lambda b, h, dst, src: src - dst, "must return a bool tensor, got a torch.int64 tensor"),
    (lambda b, h, dst, src: src <= dst and src > 0, OPERATORS_ONLY),
    (lambda b, h, dst, src: torch.ones(5, dtype=torch.bool), r"a shape that broadcasts to \[3, 7\], got"),
]
WRONG_EDGES = [
    ([[0], [1]], TypeError, f"{SIGNED}list"),
    (torch.zeros(2, 1, dtype=torch.uint8), TypeError, f"{SIGNED}torch.uint8"),
    (torch.zeros(3, 2, dtype=torch.int64), ValueError, r"shape \[2, E\] \(row 0 senders.*got \[3, 2\]; for"),
    (torch.tensor([[0, 4], [1, 1]]), IndexError, r"\[0, 1\] = 4 is not a sender: expected 0 \.\. 3"),
    (torch.tensor([[0, 3], [1, 3]]), IndexError, r"\[1, 1\] = 3 is not a receiver: expected 0 \.\. 2"),
    (COPIES, ValueError, r"2 duplicate edges \(the edge 0 -> 1 is at 1 and 3\)"),
]
WRONG_SIZES = [
    ({"num_dst": -1}, ValueError, "num_dst must be at least 0, got -1"),
    ({"num_dst": 2, "heads": 0}, ValueError, "heads must be at least 1, got 0"),
    ({"num_dst": 2, "batch": "2"}, TypeError, "batch must be an integer, got '2'"),
]
REFUSALS = [
    *((partial(TokenGraph.from_rule, rule, 4), TypeError, match) for rule, match in WRONG_RULES),
    *((partial(TokenGraph.from_edges, edges, 3, 4), error, match) for edges, error, match in WRONG_EDGES),
    *(
        (partial(TokenGraph.from_rule, per_head, **sizes), error, match)
        for sizes, error, match in WRONG_SIZES
    ),
    (lambda: patterns.causal(4).rows(2, 5), IndexError, r"rows\(2, 5\): expected start <= stop <= 4"),
    (lambda: patterns.causal(4).rows(-1, 2), ValueError, "start must be at least 0, got -1"),
    (lambda: patterns.causal(4) | patterns.causal(5), ValueError, r"joined by \| must have the same tokens"),
    (lambda: family()["heads"] ^ TokenGraph.from_rule(per_head, 3, 4, heads=3), ValueError, "heads 2.*heads"),
    (lambda: patterns.cross(2, 3) @ patterns.cross(4, 2), ValueError, "joined by @ must meet: expected 3"),
    (lambda: family(3, 3)["both"] @ patterns.causal(3), ValueError, "varies by sample and head has no"),
    (lambda: patterns.causal(3) ** -1, ValueError, "the power of a graph must be at least 0, got -1"),
    (lambda: patterns.cross(2, 3) ** 2, ValueError, "only a graph whose senders are"),
    *((partial(eval, f"graph {sign} 3", {"graph": LIST4}), TypeError, "operand") for sign in "|&-^@"),
    (lambda: family()["both"].select(head=2), IndexError, r"head must be in 0 \.\. 1, got 2"),
    (lambda: family()["heads"].edge_index, ValueError, r"varies by head has no .*; use mask\(\), or select"),
    (lambda: patterns.causal(3).mask(3), TypeError, "device must be a torch.device or the name of one, got"),
    (lambda: LIST4.positions_of(torch.tensor([[0], [0]])), ValueError, "0 -> 0 is not an edge of"),
    (lambda: LIST4.positions_of(torch.tensor([[5], [0]])), IndexError, "is not a sender"),
    (lambda: setattr(LIST4, "num_dst", 4), dataclasses.FrozenInstanceError, "a TokenGraph never changes"),
    (lambda: delattr(LIST4, "name"), dataclasses.FrozenInstanceError, "a TokenGraph never changes"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS, ids=[row[2][:40] for row in REFUSALS])
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
