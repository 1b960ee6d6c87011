"""The arguments of the GPU kernel and its operators."""

from typing import NamedTuple

from gnn_attention._support.shapes import Float, Int, Tensor


class Problem(NamedTuple):
    """The arguments of one call on one graph, where ``logit = softcap(scale q . k) + bias``.

    The channels of q, k and v are contiguous in memory; other strides are arbitrary. The edges of
    ``bias`` are sorted by receiver, then sender, and its strides may be 0. ``scale`` is positive. A
    ``softcap`` of 0 means no softcap. Dropout needs a ``seed``, an int64 tensor of one element, and
    the last four fields, which convert indices of tokens, samples and heads to absolute ones.
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
