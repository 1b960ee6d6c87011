"""Attention to whole blocks: selected by scores, sorted, permuted, compressed or tiled.

Token i is in block ``blk(i) = i // block``. All blocks have ``block`` tokens, but the last may be
shorter. The module ``content`` lists the shapes of q, k and logits. Ties go to the earlier block.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _choice, _data
from gnn_attention.patterns._builder import builder

__all__ = ["block_top_k", "compressed_blocks", "moba", "permuted_blocks", "quest", "sorted_blocks"]
__all__ += ["tile_top_k"]


@builder(block=1)
def block_top_k(logits: Tensor, block: int, k: int, initial: int = 0, local: int = 1) -> TokenGraph:
    """Each token attends to its past in ``k`` blocks.

    These are the first ``initial`` blocks, the last ``local`` blocks up to the token's own, and the blocks
    with the largest ``logits [..., n, blocks]``. The edges are the pairs ``src <= dst`` whose ``blk(src)`` is
    one of the blocks of ``dst``. Blocks after the token's own are not eligible, so a token in one
    of the first k blocks attends to its whole past. The token's own block is one of the ``local``
    blocks; with ``local=0`` its logit decides. Source: native sparse attention (Yuan et al. 2025,
    arXiv 2502.11089, section 4.1: 16 blocks of 64 tokens, 1 initial and 2 local). The paper's gates
    combine this graph with ``compressed_blocks`` and ``window``, as in ``selectors.NativeSparseAttention``.
    Raises ValueError unless ``logits`` has ``ceil(n / block)`` columns and ``initial + local <= k``.

    >>> block_top_k(torch.tensor([[0, 0], [0, 0], [5, 9], [9, 5]]), 2, 1, local=0).edge_index.tolist()
    [[0, 0, 1, 2, 0, 1], [0, 1, 1, 2, 3, 3]]
    """
    values, sizes = _data.expand_axes("logits", logits, "n blocks")
    n, num_blocks = values.shape[-2:]
    if num_blocks != -(-n // block) or initial + local > k:
        raise ValueError(
            f"logits must have a column for each of the {-(-n // block)} blocks of {block}, and k must hold "
            f"the {initial} initial and {local} local blocks, got logits {list(logits.shape)} and k = {k}"
        )
    dst_block = torch.arange(n, device="cpu").unsqueeze(-1) // block
    src_block = torch.arange(num_blocks, device="cpu")
    is_fixed = (src_block < initial) | (src_block > dst_block - local)
    scores = values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(is_fixed, torch.inf)
    selection = _choice.is_largest(scores.masked_fill(src_block > dst_block, -torch.inf), k)
    rule = partial(rules.look_up_blocks, _data.drop_axes(selection, sizes), 1, block)
    return TokenGraph.from_rule(rules.drop_future(rule), n, **sizes)


@builder(block=1, top=1)
def moba(q: Tensor, k: Tensor, block: int, top: int) -> TokenGraph:
    """Each token attends to its own block and the ``top - 1`` earlier ones with the largest ``q . mean(k)``.

    ``q`` and ``k`` are ``[..., n, dim]``. The graph is :func:`block_top_k`; its logits are the
    products of each query and the mean key of each block. Source: mixture of block attention, MoBA
    (Lu et al. 2025, arXiv 2502.13189), which counts the token's own block among the top ones.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> moba(x, x, 2, 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    queries, keys, sizes = _data.expand_queries_and_keys(q, k, -2)
    return block_top_k(_data.drop_axes(queries @ block_means(keys, block).mT, sizes), block, top)


@builder(page=1)
def quest(q: Tensor, k: Tensor, page: int, top: int) -> TokenGraph:
    """Each token attends to its past in the ``top`` pages that could hold its largest logits.

    ``q`` and ``k`` are ``[..., n, dim]``. The score of a page is ``sum_d max(q_d min_d, q_d max_d)``,
    an upper bound on its logits. ``min`` and ``max`` are over the keys of the page up to the token itself,
    so each row selects what a decoding step would select. Source: Quest (Tang et al. 2024, arXiv
    2406.10774), which selects for the last token only; the prompt and the first two layers stay dense.

    >>> x = torch.tensor([[1.0], [3.0], [2.0], [-9.0], [1.0]])
    >>> quest(x, x, 2, 1).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    queries, keys, sizes = _data.expand_queries_and_keys(q, k, -2)
    bounds = split_signs(queries) @ block_extremes(keys, page).mT
    # The bound of a token's own page must not depend on later keys, so it uses running extremes.
    pages = (split_blocks(x, page, -torch.inf) for x in (keys, -keys))
    high, low = (x.cummax(dim=-2).values.flatten(-3, -2)[..., : keys.shape[-2], :] for x in pages)
    own_bound = (split_signs(queries) * torch.cat([high, -low], dim=-1)).sum(dim=-1, keepdim=True)
    own_page = (torch.arange(keys.shape[-2], device="cpu") // page).unsqueeze(-1).expand(own_bound.shape)
    logits = bounds.scatter(-1, own_page, own_bound)
    return block_top_k(_data.drop_axes(logits, sizes), page, top, local=0)


@builder(block=1, stride=1)
def compressed_blocks(n: int, block: int, stride: int | None = None) -> TokenGraph:
    """Each token attends to the pooled blocks that lie wholly in its past.

    Sender c pools the ``block`` tokens from ``c * stride`` on, so the edges are
    ``src * stride + block - 1 <= dst``. There are ``floor((n - block) / stride) + 1`` senders, none
    if n < block. The in-degree is ``floor((dst - block + 1) / stride) + 1``, or 0 before the first
    block is complete. ``stride=None`` means ``stride=block``. Source: the compressed branch of
    native sparse attention (Yuan et al. 2025, arXiv 2502.11089), with blocks of 32 and stride 16.

    >>> compressed_blocks(5, 2).in_degree().tolist()
    [0, 1, 1, 2, 2]
    """
    stride = block if stride is None else stride
    num_src = max(0, (n - block) // stride + 1)
    return TokenGraph.from_rule(src * stride + (block - 1) <= dst, n, num_src)


@builder(tile=1)
def tile_top_k(q: Tensor, k: Tensor, tile: int, top: int) -> TokenGraph:
    """Each tile attends to the ``top`` tiles whose mean key has the largest product with its mean query.

    ``q`` is ``[..., dst, dim]`` and ``k`` is ``[..., src, dim]``. Each receiver of a tile attends
    to all tokens of these tiles, so the graph is not causal. The in-degree is ``top * tile`` if no
    tile is short. Source: the fine stage of video sparse attention ("Trainable Sparse Attention",
    2025, arXiv 2505.13389) and attention-gym's ``vsa``, whose tokens are ordered tile by tile.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> tile_top_k(x, x, 2, 1).edge_index.tolist()
    [[0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    queries, keys, sizes = _data.expand_queries_and_keys(q, k)
    products = block_means(queries, tile) @ block_means(keys, tile).mT
    selection = _data.drop_axes(_choice.is_largest(products, top), sizes)
    rule = partial(rules.look_up_blocks, selection, tile, tile)
    return TokenGraph.from_rule(rule, queries.shape[-2], keys.shape[-2], **sizes)


@builder(block=1)
def sorted_blocks(n: int, order: Tensor | Sequence[Any], block: int, causal: bool = True) -> TokenGraph:
    """Each token attends to its own block and to the block that ``order`` assigns to it.

    The edges are ``blk(src) = blk(dst) or blk(src) = order[blk(dst)]``, and ``src <= dst`` unless
    ``causal=False``. ``order [..., blocks]`` names one block for each of ``ceil(n / block)``
    blocks. Source: sparse Sinkhorn attention (Tay et al. 2020, arXiv 2002.11296), whose sorting
    network computes ``order``. Raises IndexError for a block outside ``0 .. blocks - 1``, and
    ValueError if ``order`` has a different number of blocks.

    >>> sorted_blocks(6, [0, 0, 1], 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    index, sizes = _check_blocks("order", order, n, block)
    is_sorted_block = look_up(_data.drop_axes(index, sizes), dst // block) == src // block
    rule = (dst // block == src // block) | is_sorted_block
    return TokenGraph.from_rule(rules.drop_future(rule, causal), n, **sizes)


@builder(block=1)
def permuted_blocks(n: int, permutation: Tensor | Sequence[Any], block: int) -> TokenGraph:
    """Each token attends to all of one block, which a permutation assigns to the token's block.

    The edges are ``blk(src) = permutation[blk(dst)]``; they are not causal. The in-degree is
    ``block``, or less if the assigned block is the shorter last one. ``permutation`` is
    ``[blocks]`` or ``[heads, blocks]``. Source: the block masks of BlockBERT (Qiu et al. 2019,
    arXiv 1911.02972). Raises the same errors as ``sorted_blocks``, and ValueError unless each row
    holds every block once.

    >>> permuted_blocks(4, [1, 0], 2).edge_index.tolist()
    [[2, 3, 2, 3, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    index, sizes = _check_blocks("permutation", permutation, n, block)
    num_blocks = index.shape[-1]
    if not torch.equal(index.sort(dim=-1).values, torch.arange(num_blocks, device="cpu").expand(index.shape)):
        raise ValueError(f"permutation must hold each of the {num_blocks} blocks once, got {permutation}")
    rule = look_up(_data.drop_axes(index, sizes), dst // block) == src // block
    return TokenGraph.from_rule(rule, n, **sizes)


def split_blocks(x: Tensor, block: int, fill_value: float) -> Tensor:
    """Reshape ``[..., n, dim]`` to ``[..., blocks, block, dim]``; ``fill_value`` pads the last block."""
    padded = pad(x, (0, 0, 0, -x.shape[-2] % block), value=fill_value)
    return padded.reshape(*x.shape[:-2], padded.shape[-2] // block, block, x.shape[-1])


def block_means(x: Tensor, block: int) -> Tensor:
    """Return the mean of the tokens of each block, ``[..., blocks, dim]``."""
    block_sizes = split_blocks(torch.ones_like(x[..., :1]), block, 0.0).sum(dim=-2)
    return split_blocks(x, block, 0.0).sum(dim=-2) / block_sizes


def block_extremes(k: Tensor, block: int) -> Tensor:
    """Return the maxima and minima of each block; their product with ``split_signs(q)`` bounds q . k."""
    maxima = split_blocks(k, block, -torch.inf).amax(dim=-2)
    minima = split_blocks(k, block, torch.inf).amin(dim=-2)
    return torch.cat([maxima, minima], dim=-1)


def split_signs(q: Tensor) -> Tensor:
    """Return the positive part of a query, then its negative part, ``[..., 2 dim]``."""
    return torch.cat([q.clamp(min=0), q.clamp(max=0)], dim=-1)


def _check_blocks(name: str, data: Any, n: int, block: int) -> tuple[Tensor, _data.Sizes]:
    index, sizes = _data.expand_integers(name, data, "blocks")
    num_blocks = -(-n // block)
    if index.shape[-1] != num_blocks:
        raise ValueError(
            f"{name} must name a block for each of the {num_blocks} blocks of {block}, got {index.shape[-1]}"
        )
    if invalid := index[(index < 0) | (index >= num_blocks)].tolist():
        raise IndexError(f"{name} must name blocks in 0 .. {num_blocks - 1}, got {invalid[0]}")
    return index, sizes
