"""What the operators of the GPU kernel, and the kernel, are given."""

from typing import NamedTuple

from gnn_attention._support.shapes import Float, Int, Tensor


class Problem(NamedTuple):
    """One call on one graph: ``logit = softcap(scale q . k) + bias``.

    The last axis of q, k and v is contiguous; other strides are free. ``bias`` is ``[B, Hq, E]``, expanded
    with stride 0 where it does not vary; its edges are sorted by receiver, then sender. ``scale`` is
    positive; a ``softcap`` of 0 means that there is none. ``seed`` is an int64 tensor of one element where
    ``dropout`` is not 0. The offsets and firsts make positions, samples and heads absolute.
    """

    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    scale: float
    softcap: float = 0.0
    bias: Float[Tensor, "batch heads edges"] | None = None
    dropout: float = 0.0
    seed: Int[Tensor, "..."] | None = None
    dst_offset: int = 0
    src_offset: int = 0
    first_sample: int = 0
    first_head: int = 0
