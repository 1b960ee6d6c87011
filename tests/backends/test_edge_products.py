"""The differentiable operators over edges: against loops, derivatives by finite differences, and what torch
is told of them.
"""

import pytest
import torch
from support.bounds import assert_exact

from gnn_attention import edges
from gnn_attention.backends.cpu import csr_ops as products_of
from gnn_attention.backends.cpu import head_batching
from gnn_attention.backends.plan.csr import sorted_edges

HEADS, KV_HEADS, NUM_DST, NUM_SRC = 4, 2, 6, 7
WAYS = {"folded": 10**9, "head by head": 0}


@pytest.fixture(params=WAYS, autouse=True)
def way(request, monkeypatch):
    """Every test runs with heads folded and one at a time."""
    monkeypatch.setattr(head_batching, "MOST_EDGES", WAYS[request.param])


def edge_list(count=17):
    """An irregular list; receiver 2 hears nobody."""
    cells = torch.randperm(NUM_DST * NUM_SRC, generator=torch.Generator().manual_seed(1))[:count]
    src, dst = cells % NUM_SRC, cells // NUM_SRC
    return sorted_edges(src[dst != 2], dst[dst != 2], NUM_SRC, NUM_DST)[0]


LISTED = edge_list()
TENSORS = products_of.tensors_of(LISTED)
COUNT = LISTED.src.numel()


def drawn(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=rng, dtype=torch.float64).requires_grad_()


def pairs():
    """(position, src, dst) of every edge."""
    return list(zip(range(COUNT), LISTED.src.tolist(), LISTED.dst.tolist(), strict=True))


Q, K, V = drawn(HEADS, NUM_DST, 3), drawn(KV_HEADS, NUM_SRC, 3, seed=1), drawn(KV_HEADS, NUM_SRC, 5, seed=2)
W, X = drawn(HEADS, COUNT, seed=3), drawn(HEADS, NUM_DST, seed=4)
SINKS = drawn(seed=5).detach().new_tensor([0.3, -torch.inf, 2.0, -1.0]).requires_grad_()

OPERATORS = {
    "products": ("edge_products", (Q, K)),
    "incoming": ("edge_incoming", (W, V)),
    "outgoing": ("edge_outgoing", (W, Q, KV_HEADS)),
    "by_edge": ("edge_spread", (X,)),
    "total": ("edge_total", (W,)),
    "softmax": ("edge_softmax", (W, drawn(HEADS, NUM_DST, seed=5))),
}
each_operator = pytest.mark.parametrize("name", OPERATORS)


def call(name, *given):
    """The public function of an operator; of the softmax, whose sinks are told by receiver here, what is
    finite.
    """
    if name == "softmax":
        sinks = given[1].masked_fill(LISTED.ptr.diff() == 0, -torch.inf)
        weights, lse = products_of._SOFTMAX(given[0], sinks, TENSORS)
        return weights, lse[:, :, LISTED.ptr.diff() > 0]
    factors, rest = (
        [x for x in given if isinstance(x, torch.Tensor)],
        [x for x in given if not isinstance(x, torch.Tensor)],
    )
    return getattr(products_of, name)(*factors, TENSORS, *rest)


def test_products_by_loops():
    wanted = torch.zeros(2, HEADS, COUNT, dtype=torch.float64)
    for e, s, d in pairs():
        for h in range(HEADS):
            wanted[:, h, e] = (Q[:, h, d] * K[:, h // 2, s]).sum(-1).detach()
    assert_exact(products_of.products(Q, K, TENSORS), wanted)


def test_incoming_by_loops():
    wanted = torch.zeros(2, HEADS, NUM_DST, 5, dtype=torch.float64)
    for e, s, d in pairs():
        for h in range(HEADS):
            wanted[:, h, d] += W[:, h, e, None].detach() * V[:, h // 2, s].detach()
    assert_exact(products_of.incoming(W, V, TENSORS), wanted)


def test_outgoing_by_loops():
    wanted = torch.zeros(2, KV_HEADS, NUM_SRC, 3, dtype=torch.float64)
    for e, s, d in pairs():
        for h in range(HEADS):
            wanted[:, h // 2, s] += W[:, h, e, None].detach() * Q[:, h, d].detach()
    assert_exact(products_of.outgoing(W, Q, TENSORS, KV_HEADS), wanted)


def test_by_edge_and_total_by_loops():
    spread, wanted = products_of.by_edge(X, TENSORS), torch.zeros_like(X)
    for e, _, d in pairs():
        assert torch.equal(spread[:, :, e], X[:, :, d])
        wanted[:, :, d].data += W[:, :, e].detach()
    assert_exact(products_of.total(W, TENSORS), wanted)


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_softmax_is_that_of_edges(size):
    """Far apart too, where exp of a difference of whole logits would be 0 or inf."""
    found, wanted = (
        products_of.softmax(W * size, TENSORS),
        edges.softmax(W * size, LISTED.dst.long(), NUM_DST),
    )
    for x, true in zip(found, wanted, strict=True):
        assert_exact(x, true)
    assert (found[1][:, :, 2] == -torch.inf).all()


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_softmax_with_sinks_is_that_of_edges(size):
    """One more logit of every head; none of the receiver without in-edges. Gradients of both, and where all
    logits are -inf.
    """
    logits = (W.detach() * size).masked_fill(LISTED.dst == 1, -torch.inf).requires_grad_()
    heard = LISTED.ptr.diff() > 0
    results = []
    for weights, lse in (
        products_of.softmax(logits, TENSORS, SINKS),
        edges.softmax(logits, LISTED.dst.long(), NUM_DST, SINKS),
    ):
        loss = (weights * W.detach()).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * X.detach()).sum()
        results.append((weights, lse, torch.autograd.grad(loss, (logits, SINKS))))
    for x, true in zip(*results, strict=True):
        assert_exact(x, true)
    assert torch.equal(
        results[0][1] == -torch.inf,
        (~heard | ((torch.arange(NUM_DST) == 1) & SINKS.isneginf().view(1, 4, 1))).expand(2, -1, -1),
    )


def test_softmax_of_minus_infinity():
    """An edge of logit -inf has weight 0; a receiver with no other edges has lse -inf; gradients are
    finite.
    """
    logits = W.detach().clone()
    logits[:, :, LISTED.dst == 1], logits[:, :, 0] = -torch.inf, -torch.inf
    logits.requires_grad_()
    weights, lse = products_of.softmax(logits, TENSORS)
    assert (weights[:, :, LISTED.dst == 1] == 0).all()
    assert (lse[:, :, 1] == -torch.inf).all()
    (grad,) = torch.autograd.grad((weights * W.detach()).sum(), logits)
    assert torch.isfinite(grad).all()


def test_float32_weights_do_not_suffer_from_large_logits():
    """exp(logit - lse) of logits near 1000 would lose 3 digits of 7."""
    logits = (1000 + W.detach()).float()
    found, _ = products_of.softmax(logits, TENSORS)
    wanted, _ = edges.softmax(logits.double(), LISTED.dst.long(), NUM_DST)
    # With u = eps / 2: logit - top is exact (Sterbenz); exp has 2 ulps, 4 u; the sum of at most 7 such
    # positive numbers 4 u and 6 u; the quotient u. All are shares of the weight itself; lse = 1000, rounded,
    # would cost up to 500 u.
    assert ((found.double() - wanted).abs() <= 15 * torch.finfo(torch.float32).eps / 2 * wanted).all()


@pytest.mark.slow
@each_operator
def test_derivatives(name):
    """First and second, by finite differences in float64, along random directions."""
    _, given = OPERATORS[name]
    assert torch.autograd.gradcheck(lambda *xs: call(name, *xs), given)
    assert torch.autograd.gradgradcheck(lambda *xs: call(name, *xs), given, fast_mode=True)


@pytest.mark.slow
@each_operator
def test_what_torch_is_told_is_true(name):
    """Schema, autograd registration, shapes without values, and tracing with dynamic shapes."""
    operator, given = OPERATORS[name]
    factors, rest = (
        [x for x in given if isinstance(x, torch.Tensor)],
        [x for x in given if not isinstance(x, torch.Tensor)],
    )
    outcomes = torch.library.opcheck(getattr(torch.ops.gnn_attention, operator), (*factors, TENSORS, *rest))
    assert set(outcomes.values()) == {"SUCCESS"}
    assert len(outcomes) == 4


@each_operator
def test_vmap_is_a_loop(name):
    """Over the first argument alone, as the last axis."""
    first, *others = OPERATORS[name][1]
    many = torch.stack([first, 2 * first, first - 1], dim=-1)
    found = torch.vmap(lambda x: call(name, x, *others), in_dims=-1)(many)
    wanted = [call(name, many[..., i], *others) for i in range(3)]
    if name == "softmax":
        found, wanted = torch.cat(found, -1), [torch.cat(x, -1) for x in wanted]
    assert_exact(found, torch.stack(wanted))


@each_operator
def test_no_edges(name):
    """Zeros, and lse -inf; nothing else can come of nothing."""
    tensors = products_of.tensors_of(edge_list(0))
    given = [x[:, :, :0] if x is W else x for x in OPERATORS[name][1] if isinstance(x, torch.Tensor)]
    given = given[:1] if name == "softmax" else given
    rest = [KV_HEADS] if name == "outgoing" else []
    result = getattr(products_of, name)(*given, tensors, *rest)
    for x in result if name == "softmax" else [result]:
        assert ((x == 0) | (x == -torch.inf)).all()
    assert name != "softmax" or (result[1] == -torch.inf).all()
    assert name != "softmax" or (products_of.softmax(*given, tensors, SINKS)[1] == -torch.inf).all()
