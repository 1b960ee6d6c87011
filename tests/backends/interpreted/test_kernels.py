"""The kernels of every form, through whole calls, against the reference in float64, and SDPA's errors."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from support import kernel_cases
from support.bounds import assert_exact, assert_rule, attention_truth
from support.kernel_cases import CASES, GRAPH, GRAPHS, KINDS, LEARNED, Case, attended, gradients, parameters

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, _row_passes, rows

FORMS = ("rows", "windows 32", "tiles 64")
each_form = pytest.mark.parametrize("kind", FORMS)
SMALL, FEW = kernel_cases.listed(40, 30, 0.2), kernel_cases.listed(14, 12, 0.2)


def with_slow(cases, quick):
    """Those that are not quick run with the slow ones."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


@pytest.fixture
def backend(kind, monkeypatch):
    return kernel_cases.use(kind, monkeypatch)


@pytest.fixture
def graph(kind):
    """Several blocks; for rows, which the interpreter takes one by one, fewer receivers."""
    return FEW if kind == "rows" else SMALL


@pytest.fixture
def short_steps(monkeypatch):
    """Programs over rows take two edges at a time: several steps, the last of them part empty."""
    configs = {key: config._replace(edges=2) for key, config in rows.CONFIGS.items()}
    monkeypatch.setattr(rows, "CONFIGS", configs)


def check(case, backend, device):
    """Output, lse and all gradients are those of the reference in float64."""
    LEARNED.to(device)
    given = case.inputs(torch.float64, device)
    inputs = parameters(case, given)
    found, true = (attended(case, given, name) for name in (backend, "reference"))
    assert_exact(found, true)
    assert_exact(gradients(*found, inputs), gradients(*true, inputs))


QUICK = [("rows", name) for name in ("by head and sample", "no edges", "no receivers")]
QUICK += itertools.product(FORMS, ("everything", "closed edges", "no senders", "no samples"))


@pytest.mark.parametrize(("kind", "case"), with_slow(itertools.product(FORMS, CASES), QUICK))
def test_every_option(case, backend, device, short_steps):
    check(CASES[case], backend, device)


NAMES = [("windows 32", "irregular"), ("tiles 64", "irregular"), *((kind, "no edges") for kind in KINDS)]


@pytest.mark.parametrize(("kind", "name"), with_slow(itertools.product(KINDS, GRAPHS), NAMES))
def test_graphs_of_several_blocks(name, backend, device):
    """With grouped heads, widths that are no powers of two; and with a bias, which numbers the edges."""
    for bias in (None, ()):
        check(Case(graph=GRAPHS[name], widths=(24, 20), bias=bias, batch=1), backend, device)


@pytest.mark.parametrize(
    "case",
    ["everything", *(pytest.param(x, marks=pytest.mark.slow) for x in ("groups of two", "closed edges"))],
)
def test_long_rows_in_chunks(case, device, short_steps, monkeypatch):
    """Rows of many edges on both sides, also where the workspace has room for few chunks at a time."""
    monkeypatch.setattr(csr, "CHUNK", 2)
    monkeypatch.setattr(rows, "WORKSPACE", 64)
    monkeypatch.setattr(rows, "TOGETHER", 2)
    sides = csr.rows_of(kernel_cases.listed(6, 5, 0.3), torch.device(device))
    assert min(side.chunk_row.numel() for side in sides) >= 5
    check(CASES[case], "triton-rows", device)


@pytest.mark.parametrize("kind", FORMS[:2])
def test_more_heads_than_a_grid_takes(backend, device, monkeypatch):
    monkeypatch.setattr(_common, "MOST_SLICES", 3)
    check(CASES["groups of two"], backend, device)


HALVES = (torch.bfloat16, torch.float16)
DTYPES = [*itertools.product(FORMS, (*HALVES, torch.float32), [32]), ("rows", torch.bfloat16, 80)]
DTYPES += itertools.product(("windows 64", "tiles 64"), HALVES, (128, 256))  # configurations of their own


@pytest.mark.parametrize(
    ("kind", "dtype", "width"),
    with_slow(DTYPES, [case for case in DTYPES if case[1] == torch.bfloat16 and case[2] in (32, 256)]),
)
def test_errors_are_those_of_sdpa(backend, graph, dtype, width, device):
    """At most twice SDPA's in the same dtype, three times for gradients."""
    case = Case(graph=graph, widths=(width, width), batch=1)
    given = case.inputs(dtype, device)[:3]
    out = ga.attend(*given, graph, backend=backend)
    rng = torch.Generator().manual_seed(2)
    direction = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(out, given, direction.to(device))
    truth = attention_truth(*(x.detach().cpu() for x in given), graph, direction)
    grads = dict(zip("qkv", (x.cpu() for x in found), strict=True))
    assert_rule(out.detach().cpu(), grads, truth.for_backend(BACKENDS[backend]))


HIDDEN = [("v", torch.nan), ("k", torch.nan), ("q", torch.nan), ("v", torch.inf), ("v", -torch.inf)]
SPOILED = [(kind, *hidden) for kind in FORMS for hidden in HIDDEN]
FIRST = [("rows", "k", torch.nan), ("windows 32", "k", torch.nan), ("tiles 64", "v", torch.inf)]


@pytest.mark.parametrize(("kind", "which", "bad"), with_slow(SPOILED, FIRST))
def test_a_token_that_is_not_finite_reaches_its_edges_alone(kind, graph, which, bad, backend, device):
    """No bit of the other receivers changes; gradients are those of a loss without the receivers reached."""
    given = [x.detach() for x in Case(graph=graph, batch=1).inputs(torch.float32, device)[:3]]
    spoiled = [x.clone() for x in given]
    spoiled["qkv".index(which)][..., 11, 3] = bad
    mask = graph.mask(device)
    hit = mask.any(1) & (torch.arange(graph.num_dst, device=device) == 11) if which == "q" else mask[:, 11]
    assert 0 < hit.sum() < graph.num_dst
    results = []
    for inputs in (given, spoiled):
        inputs = [x.requires_grad_() for x in inputs]
        out, info = ga.attend(*inputs, graph, backend=backend, return_info=True)
        grad = torch.ones_like(out).masked_fill(hit[:, None], 0.0)
        results.append((out, info.lse, *torch.autograd.grad(out, inputs, grad)))
    clean, found = results
    # blocks multiply an infinite value for other pairs too, so they replace it by NaN; rows do not
    contained = kind != "rows" or (which != "v" and bad != bad)
    assert not contained or found[0][:, :, hit].isnan().all()
    assert not contained or found[1][:, :, hit].isnan().all()
    for x, y in zip(clean[:3], found[:3], strict=True):
        assert torch.equal(x[:, :, ~hit], y[:, :, ~hit])
    senders = slice(None) if contained else ~mask[hit].any(0)
    for x, y in zip(clean[3:], found[3:], strict=True):
        assert torch.equal(x[:, :, senders], y[:, :, senders])


@each_form
def test_a_gradient_that_is_nan_reaches_its_edges_alone(backend, graph, device):
    """The q of its receiver and the senders of that; of a receiver without in-edges nothing."""
    given = Case(graph=graph, batch=1).inputs(torch.float32, device)[:3]
    out = ga.attend(*given, graph, backend=backend)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    clean = torch.autograd.grad(out, given, grad, retain_graph=True)
    grad[:, :, graph.num_dst // 2] = torch.nan  # no in-edges
    grad[:, :, 9, 2] = torch.nan
    dirty = torch.autograd.grad(out, given, grad)
    receiver, senders = torch.arange(graph.num_dst, device=device) == 9, graph.mask(device)[9]
    assert 0 < senders.sum() < graph.num_src
    for got, want, reached in zip(dirty, clean, (receiver, senders, senders), strict=True):
        assert got[:, :, reached].isnan().any(-1).all()
        assert torch.equal(got[:, :, ~reached], want[:, :, ~reached])


@each_form
def test_strides(backend, device):
    """Tokens or channels apart, one number for all: the bits are those of plain copies, gradients too."""
    rng = torch.Generator().manual_seed(4)
    q = torch.randn(2, 6, 2, 11, generator=rng).transpose(1, 2)[..., 1:9].to(device)
    k = torch.randn(8, 1, 5, 2, generator=rng).permute(3, 1, 2, 0).to(device)
    v = torch.randn(1, 1, 1, 8, generator=rng).to(device).expand(2, 1, 5, 8)
    results = []
    for inputs in ([q, k, v], [x.contiguous() for x in (q, k, v)]):
        inputs = [x.requires_grad_() for x in inputs]
        out = ga.attend(*inputs, GRAPH, backend=backend)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


FAR = [*itertools.product(FORMS, range(3))]


@pytest.mark.parametrize(("kind", "axis"), with_slow(FAR, [("rows", 2), ("windows 32", 2)]))
def test_offsets_beyond_32_bits(backend, axis, device):
    """Numbers that lie 2^31 and more apart; the pages between them are never touched."""
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 2**35:
        pytest.skip("needs 9 GB of address space on the GPU")
    graph, shape = patterns.causal(4), (2, 2, 4, 16)
    room = torch.empty(2**32 + 2**12, dtype=torch.float16, device=device)
    apart = [(2**32, 64, 16, 1), (128, 2**32, 16, 1), (128, 64, 2**32 // 3, 1)][axis]
    rng = torch.Generator().manual_seed(0)
    small = [torch.randn(shape, generator=rng).to(device, torch.float16) for _ in range(4)]

    def results(inputs):
        given = [x.detach().requires_grad_() for x in inputs[:3]]
        out = ga.attend(*given, graph, backend=backend)
        return [out, *torch.autograd.grad(out, given, inputs[3])]

    near = results(small)
    for which in range(4):
        far = room.as_strided(shape, apart)
        far.copy_(small[which])
        found = results([*small[:which], far, *small[which + 1 :]])
        assert all(torch.equal(x, y) for x, y in zip(near, found, strict=True))


@pytest.mark.parametrize("kind", [*FORMS[:2], pytest.param(FORMS[2], marks=pytest.mark.slow)])
def test_memory_that_was_not_written_is_not_read(backend, graph, device):
    """Fresh memory is full of NaN: results are the same, bit for bit, with isolated rows too."""
    case = Case(graph=graph, score_mod=CASES["everything"].score_mod, bias=(), batch=1)
    LEARNED.to(device)
    given = case.inputs(torch.float64, device)

    def results():
        out, lse = attended(case, given, backend)
        return [out, lse.masked_fill(lse.isinf(), 0.0), *gradients(out, lse, parameters(case, given))]

    first = results()
    torch.use_deterministic_algorithms(True)  # fills torch.empty
    try:
        assert torch.empty(3).isnan().all()
        second = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(x.isfinite().all() for x in second)


def test_the_last_chunk_of_very_many_edges(device):
    """It ends with its row where a whole one would run over what int32 can count."""

    @triton.jit
    def ends(PTR, CHUNK_ROW, CHUNK_START, OUT, limit):
        _, low, high = _row_passes._row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0), True)
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
    problem = Problem(*given, 0.5, bias=bias)
    wide = tuple(csr.Side(*(x.long() for x in side[:-1]), side.limit) for side in form)
    found = []
    for each in (form, wide):
        out, lse = rows.forward(problem, each)
        delta = _common.delta(out, out, lse.masked_fill(lse.isinf(), 0.0))
        found.append([out, lse, *(x for x in rows.backward(problem, each, out, delta, lse) if x is not None)])
    assert len(found[0]) == 6
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@triton.jit
def _round(X, Y, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(Y + at, _common.round_to(tl.load(X + at), DTYPE).to(tl.float32))


@triton.jit
def _bend(X, Y, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(Y + at, _common.tanh(tl.load(X + at)))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, tl.bfloat16), (torch.float16, tl.float16)])
def test_numbers_are_rounded_to_nearest(dtype, name, device):
    """As torch rounds them: ties to even, and what is too large to infinity."""
    special = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 0.0, torch.inf, 3.4e38]
    x = torch.cat([torch.tensor(special), torch.randn(504, generator=torch.Generator().manual_seed(0))])
    x, y = x.to(device), torch.empty(512, device=device)
    _round[(1,)](x, y, 512, name)
    assert torch.equal(y, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tanh_is_exact_near_0_and_at_both_ends(dtype, device):
    """Within 16 roundings, u = eps / 2 each, of the number itself.

    Below 1/2 it is a quotient of two polynomials of positive terms: each has 6 roundings, quotient and factor
    2, together 14 u; above, exp (2 ulps), a sum, a difference and a quotient are less. The true tanh has 2 u.
    """
    ends = torch.tensor([0.0, torch.inf, -torch.inf, 0.5])
    x = torch.cat([torch.logspace(-30, 2, 60), torch.linspace(-1, 1, 64), ends]).to(device, dtype)
    y, true = torch.empty(128, device=device, dtype=dtype), x.double().tanh()
    _bend[(1,)](x, y, 128)
    assert ((y.double() - true).abs() <= 16 * torch.finfo(dtype).eps / 2 * true.abs()).all()
