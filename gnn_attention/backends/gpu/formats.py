"""What every GPU kernel takes: a problem (tensors and what is added to a logit), and a graph in some form.

A form is a pair of equal NamedTuples, for receivers and, transposed, for senders. Their tensors come first
and their integers last: a form crosses into a custom operator as a list of tensors and one of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from gnn_attention._support.shapes import Float, Int, Tensor

ROWS, BLOCKS = 0, 1
SIDE = 64  # tokens on the side of a tile: bits of a word
Packed = tuple[list[Tensor], list[int]]
Side = TypeVar("Side")


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


class Blocks(NamedTuple):
    """Blocks of ``size`` own tokens, and the ``other`` tokens that each visits, in ascending order.

    In windows (``across`` 1) an entry of ``other`` is a token, and bit r of its word says that it goes with
    own token r. In tiles (``across`` 64) it is a tile of tokens, and bit c of ``words[slots[entry], r]`` says
    that own token r goes with its c-th; slot 0: all pairs are edges.

    A row of ``items`` is (block, first entry, end, place, step), most entries first. A long block has several
    items, its chunks: own token r of one leaves a partial result at ``place + step * r`` of a workspace of
    ``chunks * size`` rows; other items have place -1. Those of own token ``long[n]`` are at ``long_first[n]
    .. long_first[n + 1] - 1``.

    Where edges are numbered, by the count of the row's bits before an edge, which is not stored, ``first`` is
    where the edges of each own token of each item begin, and ``position`` where each edge stands by receiver.
    """

    items: Int[Tensor, "items 5"]
    other: Int[Tensor, " entries"]
    words: Int[Tensor, "..."]
    slots: Int[Tensor, " entries_or_none"]
    long: Int[Tensor, " long"]
    long_first: Int[Tensor, " long_and_one"]
    first: Int[Tensor, "items_or_none size"]
    position: Int[Tensor, "..."]
    chunks: int
    size: int
    across: int


def pack(kind: int, form: Sequence[Sequence[Any]]) -> Packed:
    """A form as tensors and integers, of which the kind is the first; :func:`unpack` undoes it."""
    flat = [x for side in form for x in side]
    return [x for x in flat if isinstance(x, Tensor)], [kind, *(x for x in flat if not isinstance(x, Tensor))]


def unpack(side: type[Side], tensors: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Side, Side]:
    """The form that was packed."""
    half, middle = len(tensors) // 2, 1 + len(numbers) // 2
    return side(*tensors[:half], *numbers[1:middle]), side(*tensors[half:], *numbers[middle:])
