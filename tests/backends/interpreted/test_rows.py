"""The kernels over rows of edges, through the operators, against the dense formula in float64."""

import pytest
import torch
import triton
import triton.language as tl
from support.bounds import assert_exact, assert_rule, assert_sum, attention_truth
from support.kernel_cases import CASES, GRAPH, LEARNED, Case, attended, formula, gradients, listed, parameters

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, dropout
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, _row_passes, rows

FORM = "triton-rows"


@pytest.fixture
def short_steps(monkeypatch):
    """Programs take two edges at a time, so that a few edges are several steps, the last of them part
    empty.
    """
    monkeypatch.setattr(
        rows, "CONFIGS", {key: config._replace(edges=2) for key, config in rows.CONFIGS.items()}
    )


QUICK = ["closed edges", "by head and sample", "no edges", "no receivers"]  # everything: test_triton_ops


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_formula(case, device, short_steps):
    """Output, lse and all gradients in float64 to 1e-12, for every option and shape."""
    LEARNED.to(device)
    case = CASES[case]
    given = case.inputs(torch.float64, device)
    found, true = attended(case, given, FORM), formula(case, given)
    assert_exact(found, true)
    inputs = parameters(case, given)
    assert_exact(gradients(*found, inputs), gradients(*true, inputs))


@pytest.mark.parametrize(
    "case",
    [
        "everything",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("groups of two", "closed edges")),
    ],
)
def test_long_rows_in_chunks(case, device, short_steps, monkeypatch):
    """Receivers and senders of many edges are cut into chunks, also where the workspace holds few at a
    time.
    """
    monkeypatch.setattr(csr, "CHUNK", 2)
    monkeypatch.setattr(rows, "WORKSPACE", 64)
    monkeypatch.setattr(rows, "TOGETHER", 2)
    case = CASES[case]
    case = Case(**{**vars(case), "graph": listed(6, 5, 0.3)})  # with nothing kept
    given = case.inputs(torch.float64, device)
    form = csr.rows_of(case.graph, given[0].device)
    assert min(form.chunk_row.numel(), form.out_chunk_row.numel()) >= 5
    found, true = attended(case, given, FORM), formula(case, given)
    assert_exact(found, true)
    inputs = parameters(case, given)
    assert_exact(gradients(*found, inputs), gradients(*true, inputs))


def test_more_heads_than_a_grid_holds(device, monkeypatch):
    """Samples and heads are launched in parts."""
    monkeypatch.setattr(_common, "MOST_SLICES", 3)
    given = CASES["plain"].inputs(torch.float64, device)
    found, true = attended(CASES["plain"], given, FORM), formula(CASES["plain"], given)
    assert_exact(found, true)
    assert_exact(gradients(*found, given[:3]), gradients(*true, given[:3]))


@pytest.mark.parametrize("width", [16, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_errors_are_those_of_sdpa(dtype, width, device):
    """At most twice SDPA's in the same dtype, three times for gradients."""
    case = Case(graph=patterns.causal(8), widths=(width, 16), heads=(2, 1))
    given = case.inputs(dtype, device)[:3]
    direction = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(
        device, dtype
    )
    out = ga.attend(*given, case.graph, backend=FORM)
    found = {name: x.cpu() for name, x in zip("qkv", torch.autograd.grad(out, given, direction), strict=True)}
    truth = attention_truth(*(x.detach().cpu() for x in given), case.graph, direction.cpu())
    assert_rule(out.detach().cpu(), found, truth.for_backend(BACKENDS[FORM]))


def test_a_small_cap_keeps_small_logits(device):
    """tanh is exact to rounding near 0 too, and at both ends.

    Below 1/2 it is a quotient of two polynomials of positive terms: with u = eps / 2 each has 6 roundings,
    quotient and factor 2, together 14 u of the number itself; above, exp (2 ulps), a sum, a difference and a
    quotient are less. The true tanh has 2 u.
    """

    @triton.jit
    def bent(X, Y, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(Y + at, _common.tanh(tl.load(X + at)))

    for dtype in (torch.float64, torch.float32):
        x = torch.cat(
            [
                torch.logspace(-30, 2, 60),
                torch.linspace(-1, 1, 64),
                torch.tensor([0.0, torch.inf, -torch.inf, 0.5]),
            ]
        )
        x, y = x.to(device, dtype), torch.empty(128, device=device, dtype=dtype)
        bent[(1,)](x, y, 128)
        assert (
            (y.double() - x.double().tanh()).abs()
            <= 16 * torch.finfo(dtype).eps / 2 * x.double().tanh().abs()
        ).all()


@pytest.mark.parametrize("bad", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "which", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_what_is_not_finite_reaches_only_who_hears_it(which, bad, device):
    """Receiver 5 asks, or sender 4 says, something that is not finite: nobody else's numbers or gradients
    change.
    """
    given = CASES["plain"].inputs(torch.float64, device)[:3]
    clean = ga.attend(*given, GRAPH, backend=FORM)
    token = (5, 4, 4)[which]
    spoiled = [x.detach().clone() for x in given]
    spoiled[which][..., token, 0] = bad
    spoiled = [x.requires_grad_() for x in spoiled]
    out = ga.attend(*spoiled, GRAPH, backend=FORM)
    mask = GRAPH.mask(device)
    hit = mask[:, token] if which else torch.arange(6, device=device) == token
    assert torch.equal(out[:, :, ~hit], clean[:, :, ~hit])
    strict = which < 2 and bad != torch.inf  # inf in a query or key may be a weight of 0
    assert not strict or out[:, :, hit].isnan().all()
    kept = torch.zeros_like(out)
    kept[:, :, ~hit] = 1.0
    first, second = (torch.autograd.grad(x, leaves, kept) for x, leaves in ((clean, given), (out, spoiled)))
    others = (
        slice(None) if strict else ~mask[hit].any(0)
    )  # a receiver whose lse is NaN contributes nothing to anybody
    assert torch.equal(first[0][:, :, ~hit], second[0][:, :, ~hit])
    for x, y in zip(first[1:], second[1:], strict=True):
        assert torch.equal(x[:, :, others], y[:, :, others])


def test_a_gradient_that_nobody_wants(device):
    """NaN that comes in for a receiver without in-edges goes nowhere; and one without lse contributes
    nothing.
    """
    given = CASES["closed edges"].inputs(torch.float64, device)
    out, lse = attended(CASES["closed edges"], given, FORM)
    grad = torch.ones_like(out)
    grad[:, :, 3] = torch.nan
    found = torch.autograd.grad(out, [x for x in given if x is not None], grad)
    assert all(x.isfinite().all() for x in found)
    assert (lse[:, :, 3] == -torch.inf).all()
    assert (out[:, :, 3] == 0).all()


@pytest.mark.slow
def test_runs_repeat_bit_for_bit(device):
    """Two runs give the same bits, gradients too."""
    given = CASES["everything"].inputs(torch.float32, device)
    LEARNED.float()
    try:
        runs = [attended(CASES["everything"], given, FORM) for _ in range(2)]
        found = [[*run, *gradients(*run, parameters(CASES["everything"], given))] for run in runs]
    finally:
        LEARNED.double()
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_dropped_edges_are_those_of_every_backend(device):
    """Weights read off with unit values: 0 exactly where ``_edge_dropout`` drops, at absolute places."""
    graph = patterns.full(8).rows(2, 6)
    q, k = torch.zeros(2, 3, 4, 4, device=device), torch.zeros(2, 3, 8, 4, device=device)
    v = torch.eye(8, device=device).expand(2, 3, 8, 8)
    torch.manual_seed(11)
    call = AttentionCall.checked(q, k, v, graph, dropout=0.5)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 3, 4, 8)), indexing="ij")
    stays = dropout.mask(call.seed.cpu(), b, h, i + 2, j, 0.5)
    torch.manual_seed(11)
    out = ga.attend(q, k, v, graph, dropout=0.5, backend=FORM)
    # A weight is exp(0 - 0) / 8 / (1 - 0.5): 1/4 with a rounding each of exp, sum, quotient, product and
    # factor, at most.
    assert_sum(out.cpu(), stays / 4.0, terms=5, magnitude=0.25)
    # Of n = 192 edges a half stays, with deviation 1 / (2 sqrt(n)) = 0.036: five of them.
    assert abs(float(stays.double().mean()) - 0.5) < 5 * 0.5 / 192**0.5


@pytest.mark.parametrize(
    "axis", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_offsets_beyond_32_bits(axis, device):
    """Numbers that lie 2^31 and more apart; the pages between them are never touched."""
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 2**35:
        pytest.skip("needs 9 GB of address space on the GPU")
    graph, shape = patterns.causal(4), (2, 2, 4, 16)
    room = torch.empty(2**32 + 2**12, dtype=torch.float16, device=device)
    apart = [(2**32, 64, 16, 1), (128, 2**32, 16, 1), (128, 64, 2**32 // 3, 1)][axis]
    small = [
        torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device, torch.float16)
        for n in range(3)
    ]
    grad = torch.ones(shape, device=device, dtype=torch.float16)

    def results(inputs):
        given = [x.detach().requires_grad_() for x in inputs]
        out = ga.attend(*given, graph, backend=FORM)
        return [out, *torch.autograd.grad(out, given, grad)]

    near = results(small)
    for which in range(3):
        far = room.as_strided(shape, apart)
        far.copy_(small[which])
        found = results([*small[:which], far, *small[which + 1 :]])
        assert all(torch.equal(x, y) for x, y in zip(near, found, strict=True))


def test_the_last_chunk_of_very_many_edges(device):
    """It ends with its row where a whole one would run over what int32 holds."""

    @triton.jit
    def ends(PTR, CHUNK_ROW, CHUNK_START, OUT, limit):
        _, low, high = _row_passes._span(PTR, CHUNK_ROW, CHUNK_START, 0, limit, True)
        tl.store(OUT, low)
        tl.store(OUT + 1, high)

    last = 2**31 - csr.STEP
    numbers = ([0, last], [0], [last - 10])
    given = [torch.tensor(x, dtype=torch.int32, device=device) for x in numbers]
    out = torch.zeros(2, dtype=torch.int64, device=device)
    ends[(1,)](*given, out, 2**17)
    assert out.tolist() == [last - 10, last]


@pytest.mark.slow
def test_wide_numbers_of_edges_and_tokens(device):
    """A graph whose lists are int64, as those of more than 2^31 edges are, gives the same bits."""
    given = [x.detach() for x in CASES["plain"].inputs(torch.float32, device)[:3]]
    form = csr.rows_of(GRAPH, given[0].device, for_edges=True)
    bias = torch.randn(2, 2, GRAPH.num_edges, device=device)
    problem, wide = Problem(*given, 0.5, bias=bias), csr.Rows(*(x.long() for x in form[:-2]), *form[-2:])
    found = []
    for each in (form, wide):
        out, lse = rows.forward(problem, each)
        delta = _common.delta(out, out, lse.masked_fill(lse.isinf(), 0.0))
        found.append([out, lse, *(x for x in rows.backward(problem, each, out, delta, lse) if x is not None)])
    assert len(found[0]) == 6
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_strides_that_are_odd(device):
    """Tokens that lie askew, channels apart, one number for all: the result is that of a plain copy."""
    rng = torch.Generator().manual_seed(4)
    q = torch.randn(2, 2, 6, 11, generator=rng, dtype=torch.float64)[..., 1:9].to(device)
    k = torch.randn(8, 1, 5, 2, generator=rng, dtype=torch.float64).permute(3, 1, 2, 0).to(device)
    v = torch.randn(1, 1, 1, 8, generator=rng, dtype=torch.float64).to(device).expand(2, 1, 5, 8)
    out = ga.attend(q, k, v, GRAPH, backend=FORM)
    assert torch.equal(out, ga.attend(q.contiguous(), k.contiguous(), v.contiguous(), GRAPH, backend=FORM))
