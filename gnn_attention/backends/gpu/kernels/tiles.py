"""Attention over tiles, forward and backward: for graphs whose edges fill the tiles that hold any."""

from __future__ import annotations

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _visits
from gnn_attention.backends.gpu.kernels._visits import Config, Configs, Visits
from gnn_attention.backends.gpu.tiles import Tiles

__all__ = ["CONFIGS", "backward", "forward"]

# By bytes of a number and channels (a power of two): own tokens, others at once, warps and stages of every
# pass.
CONFIGS = {
    **dict.fromkeys(
        [(2, 16), (2, 32), (2, 64)],
        Configs(
            Config(128, 64, 8, 2),
            Config(128, 64, 8, 3),
            Config(64, 32, 8, 2),
            Config(64, 32, 8, 2),
            Config(64, 16, 8, 2),
        ),
    ),
    (2, 128): Configs(
        Config(128, 32, 8, 2),
        Config(128, 32, 8, 2),
        Config(64, 32, 8, 2),
        Config(64, 16, 8, 1),
        Config(32, 32, 8, 1),
    ),
    (2, 256): Configs(*[Config(64, 32, 8, 2)] * 2, *[Config(32, 16, 8, 1)] * 3),
    **dict.fromkeys(
        [(4, 16), (4, 32), (4, 64)], Configs(*[Config(32, 32, 8, 2)] * 3, *[Config(32, 16, 8, 1)] * 2)
    ),
    (4, 128): Configs(*[Config(32, 32, 8, 2)] * 2, *[Config(32, 16, 8, 2)] * 3),
    **dict.fromkeys([(8, 16), (8, 32), (8, 64)], Configs(*[Config(16, 16, 4, 1)] * 5)),
    (8, 128): Configs(*[Config(16, 16, 8, 1)] * 5),
}


def forward(
    problem: Problem, form: Tiles
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    return _visits.forward(problem, _ahead(form), CONFIGS)


def backward(
    problem: Problem,
    form: Tiles,
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias."""
    return _visits.backward(problem, _ahead(form), _back(form), CONFIGS, grad_out, delta, lse)


def _ahead(form: Tiles) -> Visits:
    return Visits(
        form.ptr, form.column, form.words, form.order, form.first, form.position, form.slots, form.size
    )


def _back(form: Tiles) -> Visits:
    return Visits(
        form.out_ptr,
        form.row,
        form.out_words,
        form.out_order,
        form.out_first,
        form.position,
        form.out_slots,
        form.out_size,
    )
