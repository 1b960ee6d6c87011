"""Claims of the texts that are shown by a picture, a count or an experiment, as in ``test_seeds``."""

# ruff: noqa: F405

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.bounds import assert_exact
from support.seeds import *  # noqa: F403
from torch import Tensor, nn
from torch.nn import functional

from gnn_attention import MergedHeads, StandardHeads

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def cell_of(notebook: str, tag: str) -> str:
    """The code of the cell that is tagged with a claim."""
    text = (NOTEBOOKS / f"{notebook}.py").read_text(encoding="utf-8")
    return next(cell for cell in text.split("# %%") if f'"{tag}"' in cell.partition("\n")[0]).partition("\n")[
        2
    ]


def test_S1_7_the_picture_of_the_merge_is_true():
    """Illustrations 2 and 3: each matrix in the picture of the notebook has its true shape."""
    heads, x, drawn_products = heads_with(), drawn(11, 12), []
    plt = SimpleNamespace(subplots=lambda *a, **o: (None, torch.zeros(2, 2)), show=lambda: None)
    names = {"n": 11, "width": 12, "d": 4, "plt": plt, "GREY": "", "ORANGE": "", "BLUE": ""}
    names["draw_product"] = lambda ax, factors, title: drawn_products.append(factors)
    exec(cell_of("04_three_forms", "S1.7"), names)
    true = {"X": x, "$W_V$": heads.W_V[0], "$W_O$": heads.W_O[0], "$W_Q$": heads.W_Q[0]}
    true |= {r"$W_K^\top$": heads.W_K[0].T, "$W_M$": heads.message_matrix().full()[0]}
    true |= {"$W_P$": heads.pattern_matrix().full()[0]}
    results = []
    for factors in drawn_products:
        shapes = {label: (rows, columns) for label, rows, columns, _ in (f for f in factors if f != "=")}
        *left, (result, _) = shapes.items()
        product = torch.eye(11).double()
        for label, shape in left:
            assert true[label].shape == shape, label
            product = product @ true[label]
        assert product.shape == shapes[result]
        results.append((result, product))
    (first, thin), (second, square), (third, thin_p), (fourth, square_p) = results
    assert (first, second, third, fourth) == ("messages M", "messages M", "patterns P", "patterns P")
    assert_exact(thin, square)
    assert_exact(thin_p, square_p)
    assert torch.linalg.matrix_rank(true["$W_M$"]) == 4 == torch.linalg.matrix_rank(true["$W_P$"])


def test_S1_26_decompositions_at_equal_parameters():
    """Other decompositions: with 3/4 of the numbers, thinner heads lose less than heads that share keys."""
    width, d, count = 24, 8, 4
    W_Q, W_K = drawn(count, width, d), drawn(count, width, d, seed=1)
    full = W_Q @ W_K.mT
    U, S, V = torch.linalg.svd(full)
    rank = 3 * d // 4
    thin = (U[..., :rank] * S[:, None, :rank]) @ V[:, :rank]
    shared = W_K.view(2, 2, width, d).mean(1, keepdim=True).expand(2, 2, -1, -1).reshape(W_K.shape)
    assert 2 * count * width * rank == W_Q.numel() + W_K.numel() // 2  # as many numbers
    lost = [(full - other).norm() / full.norm() for other in (thin, W_Q @ shared.mT)]
    # heads drawn apart: a shared key keeps half of the variance, so that sqrt(1/2) is lost
    assert lost[0] < 0.5 * lost[1]
    assert abs(lost[1] - 0.5**0.5) < 0.1
    best = (S[:, rank:].square().sum() / S.square().sum()).sqrt()
    assert_exact(lost[0], best)  # Eckart and Young


def test_S4_15_factors_or_products():
    """Why learn the factors? 41.9 M parameters, not 1.07 G; and few examples are not learned by heart."""
    with torch.device("meta"):
        llama = (StandardHeads(4096, 32, num_kv_heads=8), MergedHeads(4096, 32, head_dim=128))
    assert [sum(p.numel() for p in heads.parameters()) for heads in llama] == [41_943_040, 1_073_741_824]
    torch.manual_seed(1)
    seen, unseen = torch.randn(12, 8, 12).double(), torch.randn(128, 8, 12).double()
    teacher, start = (StandardHeads(12, 1, head_dim=1).double() for _ in range(2))
    errors = {}
    for name, student in {"factors": copy.deepcopy(start), "products": MergedHeads.of(start)}.items():
        assert_exact(answers(student, unseen), answers(start, unseen))  # one function, written in two ways
        errors[name] = learned(student, teacher, seen, unseen)
    assert errors["factors"][1] < 0.1 < 0.3 < errors["products"][1]
    assert errors["products"][0] < 0.1
    W_P, W_M = student.W_P.detach(), student.W_M.detach()
    assert min(torch.linalg.matrix_rank(W_P), torch.linalg.matrix_rank(W_M)) > 2  # of rank 1 at the start


def answers(heads: Any, states: Tensor) -> Tensor:
    """The updates, by the two lines of patterns and messages."""
    standard = isinstance(heads, StandardHeads)
    W_P, W_M = (heads.W_Q @ heads.W_K.mT, heads.W_V @ heads.W_O) if standard else (heads.W_P, heads.W_M)
    x, past = states[:, None], torch.ones(8, 8, dtype=torch.bool).tril()
    weights = (x @ W_P @ x.mT * heads.scale).masked_fill(~past, -torch.inf).softmax(-1)
    return (weights @ (x @ W_M)).sum(1)


def learned(student: Any, teacher: nn.Module, seen: Tensor, unseen: Tensor) -> list[float]:
    """The errors on seen and on new examples after 200 steps, as shares of saying nothing."""
    goals = [answers(teacher, states).detach() for states in (seen, unseen)]
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-2)
    for _ in range(200):
        optimizer.zero_grad()
        functional.mse_loss(answers(student, seen), goals[0]).backward()
        optimizer.step()
    found = (answers(student, states).detach() for states in (seen, unseen))
    return [float((a - g).square().mean() / g.square().mean()) for a, g in zip(found, goals, strict=True)]
