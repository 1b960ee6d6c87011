"""The arguments of the GPU kernel and its operators."""

from typing import NamedTuple

from gnn_attention._support.shapes import Float, Int, Tensor


class Problem(NamedTuple):
    """The arguments of one call on one graph, where ``logit = softcap(scale (q . k + r . a)) + bias``.

    The channels of q, k, v, r and a are contiguous in memory; other strides are arbitrary. The edges of
    ``bias``, of the features a and of their types are sorted by receiver, then sender; strides of bias and
    a may be 0. The row r of a receiver has the channels of each type, none if edges have no features;
    r has no rows if features do not change logits.
    ``scale`` is positive. A ``softcap`` of 0 means no softcap. Dropout needs a ``seed``, an int64 tensor of
    one element, and the four offsets, which convert indices of tokens, samples and heads to absolute ones.
    """

    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    r: Float[Tensor, "batch heads dst types_features"]
    a: Float[Tensor, "batch 1 edges features"]
    bias: Float[Tensor, "batch heads edges_or_zero"]
    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    seed: Int[Tensor, "..."] | None = None
    dst_offset: int = 0
    src_offset: int = 0
    first_sample: int = 0
    first_head: int = 0
    edge_type: Int[Tensor, " edges"] | None = None
    normaliser: str = "softmax"
