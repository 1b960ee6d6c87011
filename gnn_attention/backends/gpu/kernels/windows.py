"""Attention along row windows, forward and backward: senders that neighbouring receivers share are read once
for all of them.
"""

from __future__ import annotations

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _visits
from gnn_attention.backends.gpu.kernels._visits import Config, Configs, Visits
from gnn_attention.backends.gpu.row_windows import Windows

__all__ = ["CONFIGS", "backward", "forward"]

# By bytes of a number and channels (a power of two): own tokens, others at once, warps and stages of every
# pass.
CONFIGS = {
    **dict.fromkeys(
        [(2, 16), (2, 32), (2, 64)],
        Configs(
            Config(64, 64, 4, 3),
            Config(64, 64, 4, 3),
            Config(64, 32, 8, 2),
            Config(64, 32, 8, 2),
            Config(64, 16, 8, 2),
        ),
    ),
    (2, 128): Configs(
        Config(64, 64, 4, 2),
        Config(64, 32, 4, 2),
        Config(64, 32, 8, 2),
        Config(64, 16, 8, 1),
        Config(32, 32, 8, 1),
    ),
    (2, 256): Configs(Config(64, 32, 8, 2), Config(64, 16, 8, 2), *[Config(32, 16, 8, 1)] * 3),
    **dict.fromkeys(
        [(4, 16), (4, 32), (4, 64)],
        Configs(
            Config(32, 32, 8, 2),
            Config(32, 32, 8, 2),
            Config(16, 16, 4, 2),
            Config(32, 16, 8, 1),
            Config(16, 16, 8, 1),
        ),
    ),
    (4, 128): Configs(Config(32, 16, 8, 2), Config(32, 32, 8, 2), *[Config(32, 16, 8, 2)] * 3),
    **dict.fromkeys([(8, 16), (8, 32), (8, 64)], Configs(*[Config(16, 16, 4, 1)] * 5)),
    (8, 128): Configs(*[Config(16, 16, 8, 1)] * 5),
}


def forward(
    problem: Problem, form: Windows
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    return _visits.forward(problem, _ahead(_fitted(form, problem)), CONFIGS)


def backward(
    problem: Problem,
    form: Windows,
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias."""
    form = _fitted(form, problem)
    return _visits.backward(problem, _ahead(form), _back(form), CONFIGS, grad_out, delta, lse)


def _fitted(form: Windows, problem: Problem) -> Windows:
    """Words of 32 bits for float64, beside whose products Triton 3.6 does not compile those of 16."""
    narrow = problem.q.dtype == torch.float64 and form.words.dtype == torch.int16
    return form._replace(words=form.words.int(), out_words=form.out_words.int()) if narrow else form


def _ahead(form: Windows) -> Visits:
    return Visits(form.ptr, form.src, form.words, form.order, form.first, form.position, None, form.size)


def _back(form: Windows) -> Visits:
    return Visits(
        form.out_ptr, form.dst, form.out_words, form.out_order, form.out_first, form.position, None, form.size
    )
