"""The arguments of the GPU kernel and its operators."""

from typing import NamedTuple

from gnn_attention._support.shapes import Float, Int, Tensor


class Problem(NamedTuple):
    """One call on one graph: ``logit = softcap(scale q . k) + bias``.

    The channels of q, k and v are adjacent; their other strides are arbitrary. ``bias`` has edges
    sorted by receiver, then sender, and may have strides of 0. ``scale`` is positive; a ``softcap``
    of 0 means none. ``seed`` is an int64 tensor of one element unless ``dropout`` is 0. Offsets and
    first indices make tokens, samples and heads absolute for dropout.
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
