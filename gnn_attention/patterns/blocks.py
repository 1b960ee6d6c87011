"""Whole blocks of senders: selected by the data, sorted, permuted, compressed, tiled.

A block is ``block`` tokens in a row, ``blk(i) = i // block``; the last one may be short. Data come as in
``content``: ``[n, ...]``, ``[heads, n, ...]`` or ``[batch, heads, n, ...]``; of equal numbers the first wins.

Native sparse attention (Yuan et al. 2025, arXiv 2502.11089) adds the results of three graphs by a gate:
``compressed_blocks``, ``block_top_k`` and ``window``; see ``selectors.NativeSparseAttention``.
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

    The first ``initial``, the last ``local`` and those of its largest logits. ``logits [..., n, blocks]`` are
    a token's numbers for the blocks; those up to its own compete, and fewer than k count where there are
    fewer. ``src <= dst and blk(src) chosen by dst``; the own block is the last of the ``local`` ones, and
    ``local=0`` lets it compete too. The selection of native sparse attention (Yuan et al. 2025, arXiv
    2502.11089, section 4.1: k = 16 blocks of 64 tokens, of which 1 is initial and 2 are local). ValueError
    unless there are ``ceil(n / block)`` columns and ``initial + local <= k``.

    >>> block_top_k(torch.tensor([[0, 0], [0, 0], [5, 9], [9, 5]]), 2, 1, local=0).edge_index.tolist()
    [[0, 0, 1, 2, 0, 1], [0, 1, 1, 2, 3, 3]]
    """
    values, sizes = _data.all_axes("logits", logits, "n blocks")
    n, blocks = values.shape[-2:]
    if blocks != -(-n // block) or initial + local > k:
        columns = f"a column for each of the {-(-n // block)} blocks of {block}"
        second = f"and k must hold the {initial} initial and {local} local blocks"
        got = f"got logits {list(logits.shape)} and k = {k}"
        raise ValueError(f"logits must have {columns}, {second}, {got}")
    own, column = torch.arange(n, device="cpu").unsqueeze(-1) // block, torch.arange(blocks, device="cpu")
    always = (column < initial) | (column > own - local)
    forced = values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(always, torch.inf)
    chosen = _choice.are_largest(forced.masked_fill(column > own, -torch.inf), k)
    rule = rules.drop_future(partial(rules.look_up_blocks, _data.own_axes(chosen, sizes), 1, block))
    return TokenGraph.from_rule(rule, n, **sizes)


@builder(block=1, top=1)
def moba(q: Tensor, k: Tensor, block: int, top: int) -> TokenGraph:
    """Each token attends to its own block and ``top - 1`` earlier ones with largest ``q . mean(k)``.

    ``q, k [..., n, dim]``: :func:`block_top_k` of the dot products with the mean key of each block. Mixture
    of block attention (Lu et al. 2025, arXiv 2502.13189), which counts the own block among the top ones.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> moba(x, x, 2, 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    queries, keys, sizes = _data.queries_and_keys(q, k, -2)
    return block_top_k(_data.own_axes(queries @ block_means(keys, block).mT, sizes), block, top)


@builder(page=1)
def quest(q: Tensor, k: Tensor, page: int, top: int) -> TokenGraph:
    """Each token attends to its past in the ``top`` pages whose keys could give it the largest logit.

    ``q, k [..., n, dim]``; a page's number is the bound ``sum_d max(q_d min_d, q_d max_d)`` over the keys
    that the token may attend to, so that its own page competes with what is there yet: every row is a
    decoding step. Quest (Tang et al. 2024, arXiv 2406.10774), which does so for the last token only and
    leaves the first two layers and the prompt dense.

    >>> x = torch.tensor([[1.0], [3.0], [2.0], [-9.0], [1.0]])
    >>> quest(x, x, 2, 1).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    queries, keys, sizes = _data.queries_and_keys(q, k, -2)
    bounds = positive_and_negative_parts(queries) @ block_extremes(keys, page).mT
    # Of its own page a token knows the keys so far.
    high, low = (in_blocks(x, page, -torch.inf).cummax(dim=-2).values.flatten(-3, -2) for x in (keys, -keys))
    so_far = torch.cat([high, -low], dim=-1)[..., : keys.shape[-2], :]
    own = (positive_and_negative_parts(queries) * so_far).sum(dim=-1, keepdim=True)
    own_page = (torch.arange(keys.shape[-2], device="cpu") // page).unsqueeze(-1).expand(own.shape)
    return block_top_k(_data.own_axes(bounds.scatter(-1, own_page, own), sizes), page, top, local=0)


@builder(block=1, stride=1)
def compressed_blocks(n: int, block: int, stride: int | None = None) -> TokenGraph:
    """Each token attends to the pooled blocks that lie wholly in its past.

    Sender c stands for ``block`` tokens from ``c * stride`` on. ``src * stride + block - 1 <= dst``;
    ``floor((n - block) / stride) + 1`` senders, none where n < block, and in-degree
    ``floor((dst - block + 1) / stride) + 1``, 0 before the first block is complete. ``stride=None``: blocks
    side by side. The compressed branch of native sparse attention (Yuan et al. 2025, arXiv 2502.11089; there
    blocks of 32 at a stride of 16).

    >>> compressed_blocks(5, 2).in_degree().tolist()
    [0, 1, 1, 2, 2]
    """
    stride = block if stride is None else stride
    senders = max(0, (n - block) // stride + 1)
    return TokenGraph.from_rule(src * stride + (block - 1) <= dst, n, senders)


@builder(tile=1)
def tile_top_k(q: Tensor, k: Tensor, tile: int, top: int) -> TokenGraph:
    """The tokens of a tile attend to all of the ``top`` tiles with the largest product of means.

    Never causal. ``q [..., dst, dim]``, ``k [..., src, dim]``: ``tile(src)`` is one of the largest
    ``mean(q over tile(dst)) . mean(k over tile)``. In-degree ``top tile`` where no tile is short. The fine
    stage of video sparse attention ("Trainable Sparse Attention", 2025, arXiv 2505.13389), for video tokens
    laid out tile after tile, as in attention-gym's ``vsa``.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> tile_top_k(x, x, 2, 1).edge_index.tolist()
    [[0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    queries, keys, sizes = _data.queries_and_keys(q, k)
    products = block_means(queries, tile) @ block_means(keys, tile).mT
    chosen = _data.own_axes(_choice.are_largest(products, top), sizes)
    rule = partial(rules.look_up_blocks, chosen, tile, tile)
    return TokenGraph.from_rule(rule, queries.shape[-2], keys.shape[-2], **sizes)


@builder(block=1)
def sorted_blocks(n: int, order: Tensor | Sequence[Any], block: int, causal: bool = True) -> TokenGraph:
    """Each token attends to its own block and the one sorted to it.

    ``blk(src) = blk(dst) or blk(src) = order[blk(dst)]``. ``order [..., blocks]`` names a block for each of
    the ``ceil(n / block)`` blocks; ``src <= dst`` unless ``causal=False``, the encoder's graph. Sparse
    Sinkhorn attention (Tay et al. 2020, arXiv 2002.11296) after its sorting network has decided. Raises
    IndexError for a block that is none and ValueError for another number of them.

    >>> sorted_blocks(6, [0, 0, 1], 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    table, sizes = _block_table("order", order, n, block)
    chosen = look_up(_data.own_axes(table, sizes), dst // block) == src // block
    return TokenGraph.from_rule(
        rules.drop_future((dst // block == src // block) | chosen, causal), n, **sizes
    )


@builder(block=1)
def permuted_blocks(n: int, permutation: Tensor | Sequence[Any], block: int) -> TokenGraph:
    """Each block attends to one block.

    ``blk(src) = permutation[blk(dst)]``, ``block`` senders for each token; never causal.
    ``permutation [blocks]``, or ``[heads, blocks]`` with one for each head: the block masks of BlockBERT (Qiu
    et al. 2019, arXiv 1911.02972). The last block may be short. ValueError for what is no permutation.

    >>> permuted_blocks(4, [1, 0], 2).edge_index.tolist()
    [[2, 3, 2, 3, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    table, sizes = _block_table("permutation", permutation, n, block)
    blocks = table.shape[-1]
    if not torch.equal(table.sort(dim=-1).values, torch.arange(blocks, device="cpu").expand(table.shape)):
        raise ValueError(f"permutation must hold each of the {blocks} blocks once, got {permutation}")
    rule = look_up(_data.own_axes(table, sizes), dst // block) == src // block
    return TokenGraph.from_rule(rule, n, **sizes)


def in_blocks(x: Tensor, block: int, filler: float) -> Tensor:
    """``[..., n, dim]`` as ``[..., blocks, block, dim]``, the last block filled up."""
    filled = pad(x, (0, 0, 0, -x.shape[-2] % block), value=filler)
    return filled.reshape(*x.shape[:-2], filled.shape[-2] // block, block, x.shape[-1])


def block_means(x: Tensor, block: int) -> Tensor:
    """The mean over the tokens of each block, ``[..., blocks, dim]``."""
    count = in_blocks(torch.ones_like(x[..., :1]), block, 0.0).sum(dim=-2)
    return in_blocks(x, block, 0.0).sum(dim=-2) / count


def block_extremes(k: Tensor, block: int) -> Tensor:
    """The highest numbers of each block, then the lowest; :func:`signed` of a query bounds its logits."""
    highest, lowest = in_blocks(k, block, -torch.inf), in_blocks(k, block, torch.inf)
    return torch.cat([highest.amax(dim=-2), lowest.amin(dim=-2)], dim=-1)


def positive_and_negative_parts(q: Tensor) -> Tensor:
    """The positive part of a query, then the negative one."""
    return torch.cat([q.clamp(min=0), q.clamp(max=0)], dim=-1)


def _block_table(name: str, data: Tensor | Sequence[Any], n: int, block: int) -> tuple[Tensor, _data.Sizes]:
    """A block for each block, ``[batch, heads, blocks]``, and the sizes."""
    table, sizes = _data.whole_numbers(name, data, "blocks")
    blocks = -(-n // block)
    if table.shape[-1] != blocks:
        wanted = f"a block for each of the {blocks} blocks of {block} tokens"
        raise ValueError(f"{name} must name {wanted}, got {table.shape[-1]}")
    if outside := table[(table < 0) | (table >= blocks)].tolist():
        raise IndexError(f"{name} must name blocks in 0 .. {blocks - 1}, got {outside[0]}")
    return table, sizes
