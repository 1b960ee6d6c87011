"""Compare every word of the four views with its formula in the source text, written in columns."""

from __future__ import annotations

import torch
from support.bounds import assert_exact
from support.traces import LISTED, randn, record
from torch import Tensor

from gnn_attention import StandardHeads, score_mods
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret import trace

W_Q, W_K, W_V, W_O = (randn(rows, 12, seed=seed) for seed, rows in enumerate((3, 3, 5, 5)))
X = randn(12, 7, seed=4)
DISTANCE = score_mods.alibi((0.25,))
beta = 3**-0.5


def formulas() -> dict[str, Tensor]:
    """Return the formula of S4 for each word: matrices ``[sender, receiver]``, vectors as columns."""
    Q, K, V = W_Q @ X, W_K @ X, W_V @ X
    A, M = K.T @ Q, LISTED.mask().T.double()
    distance = torch.arange(7)[:, None] - torch.arange(7)
    mass = M * torch.exp(beta * A - 0.25 * distance.abs())
    listening = (mass / mass.sum(0)).nan_to_num()  # Two receivers are isolated.
    U, Y = W_O.T @ W_V @ X, W_O.T @ V @ listening
    return {
        "query": Q, "receiving channel": Q, "key": K, "sending channel": K,
        "relevance score": A, "score matrix": A, "channel overlap": A,
        "soft result ranking": listening, "attention matrix": listening,
        "column-probability matrix": listening, "listening distribution": listening,
        "value": V, "information read": V, "outgoing message": V,
        "mixture result": V @ listening, "information routed": V @ listening,
        "mixed incoming message": V @ listening,
        "interpretation": Y, "information written": Y, "mixture of updates": U @ listening, "state update": Y,
        "attention transform": W_K.T @ W_Q, "information transform": W_O.T @ W_V, "update matrix": U,
    }  # fmt: skip


def test_S4_1_every_word_returns_the_tensor_of_its_formula() -> None:
    """The four views have 24 words (seeds S4.1, S4.4, S4.10, S4.13, S4.14)."""
    # One head runs along a listed graph, with a bias for each distance.
    heads = StandardHeads.from_arrays(W_Q, W_K, W_V, W_O.T, layout="column", num_heads=1)
    call, expected = record(heads, X.T[None], LISTED, DISTANCE), formulas()
    assert {word for view in trace.VIEWS for word in call.terms(view)} == set(expected)
    src, dst = call.edge_index
    for word, columns in expected.items():
        value = call[word]
        if isinstance(value, FactoredMatrix):
            assert_exact(value.T.full()[0], columns)
        elif value.dim() == 3 and value.shape[1] == len(src):
            assert_exact(value[0, :, 0], columns[src, dst])
        else:
            assert_exact(value.reshape(7, -1).T, columns)
