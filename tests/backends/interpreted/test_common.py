"""What the kernels of all forms share: how numbers are read, and rounded for products."""

import pytest
import torch
import triton
import triton.language as tl
from support.block_kernels import SMALL, backward_of, form_of, problem_of
from support.bounds import error
from support.kernel_cases import GRAPH

from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.kernels import _common, rows, tiles, windows
from gnn_attention.verify.measure import summation_bound

FORMS = {
    "rows": (rows, GRAPH, lambda device: csr.rows_of(GRAPH, torch.device(device), for_edges=True)),
    "windows": (windows, SMALL, lambda device: form_of("windows 32", SMALL, True, device)),
    "tiles": (tiles, SMALL, lambda device: form_of("tiles 64", SMALL, True, device)),
}


@triton.jit
def _narrowed(X, Y, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(Y + at, _common.narrowed(tl.load(X + at), DTYPE).to(tl.float32))


@triton.jit
def _multiplied(X, Y, OUT, SIDE: tl.constexpr):
    row = tl.arange(0, SIDE).to(tl.int64)
    x = _common.gathered(X, row, SIDE, row >= 0, SIDE, SIDE, 1)
    y = _common.gathered(Y, row, SIDE, row >= 0, SIDE, SIDE, 1)
    at = row[:, None] * SIDE + row[None, :]
    tl.store(OUT + at, tl.where(_common.is_finite(x), tl.dot(x, y, out_dtype=tl.float32), 0.0))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, tl.bfloat16), (torch.float16, tl.float16)], ids=["bf16", "fp16"]
)
def test_numbers_are_rounded_to_nearest(dtype, name, device):
    """As torch rounds them: ties to even, and what is too large to infinity."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    x[:8] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 0.0, torch.inf, 3.4e38]
    )
    x, y = x.to(device), torch.empty(512, device=device)
    _narrowed[(1,)](x, y, 512, name)
    assert torch.equal(y, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_those_of_the_numbers(dtype, device):
    """Not those of their bits, and negative numbers are finite."""
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 16, generator=rng).to(device, dtype) for _ in range(2))
    out = torch.empty(16, 16, device=device)
    _multiplied[(1,)](x, y, out, 16)
    magnitude = float((x.double().abs() @ y.double().abs()).max())
    # A GPU multiplies float32 as TensorFloat-32: each factor is rounded to 11 bits, 2^-11 of it, before 16
    # products are summed.
    rounded = (2 * 2**-11 + 2**-22) * magnitude if device == "cuda" and dtype == torch.float32 else 0.0
    assert error(out, x.double() @ y.double()) <= rounded + summation_bound(17, magnitude, torch.float32)


@pytest.mark.parametrize("form", ["rows", "windows", pytest.param("tiles", marks=pytest.mark.slow)])
def test_what_nobody_wrote_is_not_read(form, device):
    """Fresh memory is full of NaN: results are the same, bit for bit, with receivers and senders that are
    alone too.
    """
    module, graph, make = FORMS[form]
    problem = problem_of(graph, torch.float32, device, before=(1, 1), bias=(1, 2), softcap=2.0)
    given = make(device)

    def results():
        out, lse = module.forward(problem, given)
        return [out, lse, *backward_of(module, problem, given, out, lse, torch.ones_like(out))]

    first = results()
    torch.use_deterministic_algorithms(True)  # fills torch.empty
    try:
        assert torch.empty(3).isnan().all()
        second = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(not x.isnan().any() for x in second)
