"""The kernel of the backend ``rows``: results of the reference in float64, and errors of SDPA."""

import pytest
import torch
from support import kernel_cases
from support.bounds import assert_rule, attention_truth
from support.kernel_cases import CASES, GRAPH, GRAPHS, Case, check_against_the_reference, mark_slow

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.kernels import _row_passes, rows
from gnn_attention.edge_ops.normalisers import ELEMENTWISE

FEW = kernel_cases.listed(8, 7, 0.25)


@pytest.fixture
def short_steps(monkeypatch):
    """Make programs take two edges at a time: several steps, the last of them half empty."""
    configs = {key: config._replace(num_edges=2) for key, config in rows.CONFIGS.items()}
    monkeypatch.setattr(rows, "CONFIGS", configs)


@pytest.mark.parametrize("name", ["plain", "features and everything", "features and sigmoid", *ELEMENTWISE])
def test_the_backend_rows_runs_the_kernel(name, device, monkeypatch):
    """Launches are recorded, because torch operators would give the same numbers."""
    launches = kernel_cases.record_launches(monkeypatch)
    inputs = CASES[name].inputs(torch.float32, device)
    out, _ = kernel_cases.run_attention(CASES[name], inputs, "rows")
    torch.autograd.grad(out.sum(), inputs[:3])
    assert launches == [_row_passes.forward, _row_passes.backward_dst, _row_passes.backward_src]


QUICK = ("everything", "closed edges", "features and everything", "features and sigmoid", "gelu")
QUICK += ("no edges", "no receivers", "no senders", "no samples")


@pytest.mark.parametrize("case", mark_slow(CASES, QUICK))
def test_every_option(case, device, short_steps):
    check_against_the_reference(CASES[case], device)


@pytest.mark.parametrize("name", mark_slow(GRAPHS, ["wide"]))
def test_graphs_of_many_shapes(name, device):
    """Graphs with grouped heads and widths that are no powers of two, with and without a bias."""
    for bias in (None, ()):
        check_against_the_reference(Case(graph=GRAPHS[name], widths=(24, 20), bias=bias, batch=1), device)


@pytest.mark.parametrize(
    "case",
    mark_slow(
        ["everything", "groups of two", "closed edges", "features and everything", "features and sigmoid"],
        ["groups of two", "features and sigmoid"],
    ),
)
def test_long_rows_in_chunks(case, device, short_steps, monkeypatch):
    """Rows are long on both sides, and the workspace holds few chunks at a time."""
    monkeypatch.setattr(csr, "MIN_CHUNK_SIZE", 2)
    monkeypatch.setattr(rows, "MAX_WORKSPACE_BYTES", 64)
    monkeypatch.setattr(rows, "CHUNKS_PER_STEP", 2)
    sides = csr.unpack_sides(*csr.pack_sides(kernel_cases.listed(6, 5, 0.3), torch.device(device)))
    assert min(side.chunk_row.numel() for side in sides) >= 5
    check_against_the_reference(CASES[case], device)


def test_more_heads_than_a_grid_takes(device, monkeypatch):
    monkeypatch.setattr(rows, "MAX_SLICES", 3)
    check_against_the_reference(Case(graph=kernel_cases.listed(3, 3, 0.5), heads=(4, 4), batch=1), device)


DTYPES = [(torch.bfloat16, width) for width in (32, 80, 256)]
DTYPES += [(torch.float16, 32), (torch.float32, 32)]


@pytest.mark.parametrize(("dtype", "width"), mark_slow(DTYPES, DTYPES[:1]))
def test_errors_are_those_of_sdpa(dtype, width, device):
    """Errors are at most twice those of SDPA in the same dtype, three times for gradients."""
    inputs = Case(graph=FEW, widths=(width, width), batch=1).inputs(dtype, device)[:3]
    out = ga.attend(*inputs, FEW, backend="rows")
    rng = torch.Generator().manual_seed(2)
    grad_out = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(dtype)
    gradients_of_qkv = torch.autograd.grad(out, inputs, grad_out.to(device))
    truth = attention_truth(*(x.detach().cpu() for x in inputs), FEW, grad_out)
    grads = dict(zip("qkv", (x.cpu() for x in gradients_of_qkv), strict=True))
    assert_rule(out.detach().cpu(), grads, truth.for_backend(BACKENDS["rows"]))


HIDDEN = [("v", torch.nan), ("k", torch.nan), ("q", torch.nan), ("v", torch.inf), ("v", -torch.inf)]


@pytest.mark.parametrize(("name", "value"), mark_slow(HIDDEN, HIDDEN[1:4:2]))
def test_a_token_that_is_not_finite_reaches_its_edges_alone(name, value, device):
    """No bit of other receivers changes, in outputs or in gradients of a loss over these."""
    clean_inputs = [x.detach() for x in Case(graph=FEW, batch=1).inputs(torch.float32, device)[:3]]
    spoiled_inputs = [x.clone() for x in clean_inputs]
    spoiled_inputs["qkv".index(name)][..., 5, 3] = value
    mask = FEW.mask(device)
    is_reached = mask.any(1) & (torch.arange(FEW.num_dst, device=device) == 5) if name == "q" else mask[:, 5]
    assert 0 < is_reached.sum() < FEW.num_dst
    results = []
    for inputs in (clean_inputs, spoiled_inputs):
        inputs = [x.requires_grad_() for x in inputs]
        out, info = ga.attend(*inputs, FEW, backend="rows", return_info=True)
        grad = torch.ones_like(out).masked_fill(is_reached[:, None], 0.0)
        results.append((out, info.lse, *torch.autograd.grad(out, inputs, grad)))
    clean, spoiled = results
    # A value that is not finite spoils one channel, a NaN in q or k whole rows and their lse.
    assert spoiled[0][:, :, is_reached][..., 3].isfinite().logical_not().all()
    assert name == "v" or spoiled[1][:, :, is_reached].isnan().all()
    for x, y in zip(clean[:2], spoiled[:2], strict=True):
        assert torch.equal(x[:, :, ~is_reached], y[:, :, ~is_reached])
    assert torch.equal(clean[2][:, :, ~is_reached], spoiled[2][:, :, ~is_reached])
    # If only a value is not finite, the weights of a receiver are, and its gradient 0 meets that value.
    senders = slice(None) if name != "v" else ~mask[is_reached].any(0)
    for x, y in zip(clean[3:], spoiled[3:], strict=True):
        assert torch.equal(x[:, :, senders], y[:, :, senders])


def test_a_gradient_that_is_nan_reaches_its_edges_alone(device):
    """It reaches the query of its receiver and the senders; from an isolated receiver nothing."""
    inputs = Case(graph=FEW, batch=1).inputs(torch.float32, device)[:3]
    out = ga.attend(*inputs, FEW, backend="rows")
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    expected_grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    grad_out[:, :, FEW.num_dst // 2] = torch.nan  # an isolated receiver
    grad_out[:, :, 6, 2] = torch.nan
    grads = torch.autograd.grad(out, inputs, grad_out)
    receiver, senders = torch.arange(FEW.num_dst, device=device) == 6, FEW.mask(device)[6]
    assert 0 < senders.sum() < FEW.num_src
    for grad, expected_grad, reached in zip(grads, expected_grads, (receiver, senders, senders), strict=True):
        assert grad[:, :, reached].isnan().any(-1).all()
        assert torch.equal(grad[:, :, ~reached], expected_grad[:, :, ~reached])


def test_strides(device):
    """Outputs and gradients for any strides have the bits of those for contiguous copies."""
    rng = torch.Generator().manual_seed(4)
    q = torch.randn(2, 6, 2, 11, generator=rng).transpose(1, 2)[..., 1:9].to(device)
    k = torch.randn(8, 1, 5, 2, generator=rng).permute(3, 1, 2, 0).to(device)
    v = torch.randn(1, 1, 1, 8, generator=rng).to(device).expand(2, 1, 5, 8)
    results = []
    for inputs in ([q, k, v], [x.contiguous() for x in (q, k, v)]):
        inputs = [x.requires_grad_() for x in inputs]
        out = ga.attend(*inputs, GRAPH, backend="rows")
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("axis", mark_slow(range(3), [2]))
def test_offsets_beyond_32_bits(axis, device):
    """Numbers may be 2^31 and more apart; the pages between them are never touched."""
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 2**35:
        pytest.skip("needs 9 GB of address space on the GPU")
    graph, shape = patterns.causal(4), (2, 2, 4, 16)
    memory = torch.empty(2**32 + 2**13, dtype=torch.float16, device=device)
    strides = [(2**32, 64, 16, 1), (128, 2**32, 16, 1), (128, 64, 2**32 // 3, 1)][axis]
    rng = torch.Generator().manual_seed(0)
    small = [torch.randn(shape, generator=rng).to(device, torch.float16) for _ in range(4)]

    def results(inputs):
        given = [x.detach().requires_grad_() for x in inputs[:3]]
        out = ga.attend(*given, graph, backend="rows")
        return [out, *torch.autograd.grad(out, given, inputs[3])]

    far = [memory[1024 * n :].as_strided(shape, strides) for n in range(4)]
    for x, numbers in zip(far, small, strict=True):
        x.copy_(numbers)
    assert all(torch.equal(x, y) for x, y in zip(results(small), results(far), strict=True))
