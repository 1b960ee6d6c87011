"""The kernels along row windows against the dense formula: every feature, size and dtype, and what a non-edge
hides.
"""

import itertools

import pytest
import torch
from support.block_kernels import (
    FEATURES,
    GRAPHS,
    HIDDEN,
    SMALL,
    check_exact,
    check_nothing_to_do,
    check_strides,
    form_of,
    problem_of,
    with_slow,
)
from support.block_kernels import check_far_apart as check_far
from support.block_kernels import check_gradient_that_is_nan as check_gradient
from support.block_kernels import check_minus_infinity_of_a_bias as check_bias
from support.block_kernels import check_no_worse_than_sdpa as check_sdpa
from support.block_kernels import check_nothing_off_an_edge as check_hidden

from gnn_attention.backends.gpu.kernels import windows

KINDS = ("windows 16", "windows 32", "windows 64")
SOME = "windows 32"
QUICK = ("irregular", "no edges")


@pytest.mark.parametrize("name", with_slow(GRAPHS, QUICK))
@pytest.mark.parametrize("kind", KINDS)
def test_graphs(kind, name, device):
    """Every graph in blocks of every size, with grouped heads and widths that are no powers of two."""
    problem = problem_of(GRAPHS[name], device=device)
    check_exact(windows, problem, form_of(kind, GRAPHS[name], device=device), GRAPHS[name])


@pytest.mark.parametrize("feature", with_slow(FEATURES, ("everything",)))
def test_features(feature, device):
    """Exact in float64, gradients of everything that is added to a logit too."""
    problem, form = problem_of(SMALL, device=device, **FEATURES[feature]), form_of(SOME, SMALL, True, device)
    check_exact(windows, problem, form, SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_worse_than_sdpa(dtype, device):
    check_sdpa(windows, SOME, dtype, device)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_heads_are_no_worse_than_sdpa(dtype, dim, device):
    """They have configurations of their own."""
    check_sdpa(windows, "windows 64", dtype, device, dim)


@pytest.mark.parametrize(("hidden", "number"), with_slow(HIDDEN, [("k", torch.nan)]))
def test_nothing_off_an_edge(hidden, number, device):
    check_hidden(windows, SOME, hidden, number, device)


def test_a_gradient_that_is_nan(device):
    check_gradient(windows, SOME, device)


@pytest.mark.slow
def test_minus_infinity_of_a_bias(device):
    check_bias(windows, SOME, device)


@pytest.mark.slow
def test_strides(device):
    check_strides(windows, SOME, device)


def test_offsets_beyond_32_bits(device):
    check_far(windows, SOME, device)


def test_nothing_to_do(device):
    check_nothing_to_do(windows, SOME, device)


def test_blocks_fit():
    """Whatever the size of a block and the GPU: whole programs, whole steps of a tile, products of at least
    16 on a side.
    """
    for configs in windows.CONFIGS.values():
        for config, size, most in itertools.product(configs, (16, 32, 64), (16, 32, 64)):
            fitted = config.fitted(size, most)
            assert size % fitted.own == 64 % fitted.others == 0
            assert 16 <= fitted.others <= min(config.others, most)
            assert 16 <= fitted.own <= config.own
            assert config.warps >= fitted.warps >= 2


def test_heads_that_are_too_wide(device):
    """Refused by name before anything runs."""
    graph = GRAPHS["one edge"]
    problem = problem_of(graph, torch.float32, device, dim=129)
    with pytest.raises(
        NotImplementedError, match=r"at most 128 channels of torch.float32, got 129; use the form rows"
    ):
        windows.forward(problem, form_of(SOME, graph, device=device))
