"""What every GPU kernel takes: a problem (tensors and what is added to a logit), and a graph in one of three
storage forms.

A form is a NamedTuple, its tensors first and its integers last, so that it crosses into a custom operator as
a list of tensors and a list of integers (:func:`packed`, :func:`unpacked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from gnn_attention._support.shapes import Float, Int, Tensor

ROWS, WINDOWS, TILES = 0, 1, 2
Packed = tuple[list[Tensor], list[int]]
Form = TypeVar("Form")


class Problem(NamedTuple):
    """One call on a plain graph: ``logit = softcap(scale q . k - slope_h |dst - src| + before) + bias``.

    The last axis of q, k and v is contiguous; other strides are free. ``before`` and ``bias`` are
    ``[B, Hq, E]``, expanded with stride 0 where they do not vary, in the form's order of edges: by receiver,
    then sender. ``scale`` is positive, ``softcap`` 0 is none. ``seed`` is an int64 tensor of one element
    where ``dropout`` is not 0. Offsets and firsts make positions, samples and heads absolute.
    """

    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    scale: float
    softcap: float = 0.0
    slopes: Float[Tensor, " heads"] | None = None
    before: Float[Tensor, "batch heads edges"] | None = None
    bias: Float[Tensor, "batch heads edges"] | None = None
    dropout: float = 0.0
    seed: Int[Tensor, "..."] | None = None
    dst_offset: int = 0
    src_offset: int = 0
    first_sample: int = 0
    first_head: int = 0


@runtime_checkable
class Kernels(Protocol):
    """A module of kernels for one form: ``lse`` and ``delta`` are in the dtype of sums, float32 or for
    float64 float64.

    ``delta = sum(grad_out * out, -1) - grad_lse``; the gradients of ``before`` and ``bias`` are
    ``[B, Hq, E]`` in the dtype of sums, None where the problem has none.
    """

    def forward(self, problem: Problem, form: Any) -> tuple[Tensor, Tensor]:
        """``out [B, Hq, dst, Dv]`` in the dtype of q, and ``lse [B, Hq, dst]``."""

    def backward(
        self, problem: Problem, form: Any, grad_out: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The gradients of q, k, v, before and bias."""


def packed(kind: int, form: Sequence[Any]) -> Packed:
    """A form as tensors and integers, of which the kind is the first; :func:`unpacked` undoes it.

    >>> import collections, torch
    >>> Two = collections.namedtuple("Two", "ptr size")
    >>> tensors, numbers = packed(ROWS, Two(torch.arange(2), 7))
    >>> numbers, unpacked(Two, tensors, numbers).size
    ([0, 7], 7)
    """
    return [x for x in form if isinstance(x, Tensor)], [kind, *(x for x in form if not isinstance(x, Tensor))]


def unpacked(form: type[Form], tensors: Sequence[Tensor], numbers: Sequence[int]) -> Form:
    """The form that was :func:`packed`."""
    return form(*tensors, *numbers[1:])
