"""The differentiable operators over edges: against loops, derivatives opcheck, vmap."""

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import random_edges

from gnn_attention.backends.cpu import csr_ops, csr_primitives
from gnn_attention.backends.plan.csr import sorted_edges

HEADS, KV_HEADS, NUM_DST, NUM_SRC = 4, 2, 6, 7
WAYS = {"folded": 10**9, "head by head": 0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(csr_primitives, "MOST_EDGES", WAYS[request.param])


SRC, DST = random_edges(NUM_DST, NUM_SRC, 17, seed=1)
LISTED = sorted_edges(SRC[DST != 2], DST[DST != 2], NUM_SRC, NUM_DST)[0]
COUNT = LISTED.src.numel()


def drawn(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=rng, dtype=torch.float64).requires_grad_()


Q, K, V = drawn(HEADS, NUM_DST, 3), drawn(KV_HEADS, NUM_SRC, 3, seed=1), drawn(KV_HEADS, NUM_SRC, 5, seed=2)
W = drawn(HEADS, COUNT, seed=3)
OPERATORS = {"products": (Q, K), "incoming": (W, V), "outgoing": (W, Q)}
each_operator = pytest.mark.parametrize("name", OPERATORS)


def call(name, *factors, edges=LISTED):
    rest = [KV_HEADS] if name == "outgoing" else []
    return getattr(csr_ops, name)(*factors, edges.tensors, *rest)


def test_by_loops(way):
    wanted = {
        "products": torch.zeros(2, HEADS, COUNT, dtype=torch.float64),
        "incoming": torch.zeros(2, HEADS, NUM_DST, 5, dtype=torch.float64),
        "outgoing": torch.zeros(2, KV_HEADS, NUM_SRC, 3, dtype=torch.float64),
    }
    q, k, v, w = (x.detach() for x in (Q, K, V, W))
    for e, (s, d) in enumerate(zip(LISTED.src.tolist(), LISTED.dst.tolist(), strict=True)):
        for h in range(HEADS):
            wanted["products"][:, h, e] = (q[:, h, d] * k[:, h // 2, s]).sum(-1)
            wanted["incoming"][:, h, d] += w[:, h, e, None] * v[:, h // 2, s]
            wanted["outgoing"][:, h // 2, s] += w[:, h, e, None] * q[:, h, d]
    for name, factors in OPERATORS.items():
        assert_exact(call(name, *factors), wanted[name])


@each_operator
def test_first_and_second_derivatives(name, way):
    given = OPERATORS[name]
    assert torch.autograd.gradcheck(lambda *xs: call(name, *xs), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *xs: call(name, *xs), given, fast_mode=True)


@pytest.mark.slow
@each_operator
def test_opcheck(name):
    """Schema, autograd registration, shapes without values, and tracing with dynamic shapes."""
    rest = [KV_HEADS] if name == "outgoing" else []
    operator = getattr(torch.ops.gnn_attention, f"edge_{name}")
    outcomes = torch.library.opcheck(operator, (*OPERATORS[name], LISTED.tensors, *rest))
    assert set(outcomes.values()) == {"SUCCESS"}
    assert len(outcomes) == 4


FEW_SRC, FEW_DST = torch.tensor([3, 0, 2, 1]), torch.tensor([0, 1, 1, 2])


def test_folded_lists_are_cached_while_their_list_lives_and_are_few():
    """The same list and sizes give the same tensors; many sizes push the oldest out."""
    folded, cache, first = (
        csr_primitives.folded,
        csr_primitives._cache,
        sorted_edges(FEW_SRC, FEW_DST, 4, 3)[0],
    )
    assert folded(first, 2, 2).src is folded(first, 2, 2).src
    assert folded(first, 2, 1).src is not folded(first, 2, 2).src
    for slices in range(2, 12):
        folded(first, slices, slices)
    assert len(cache[first.ptr]) == csr_primitives.MOST_CACHED
    before = len(cache)
    del first
    assert len(cache) == before - 1
