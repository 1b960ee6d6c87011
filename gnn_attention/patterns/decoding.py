"""Training and decoding layouts: block diffusion, draft heads, text that attends to interleaved media."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gnn_attention._support import checks
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, text
from gnn_attention.patterns import _data
from gnn_attention.patterns._symbols import dst, look_up, src
from gnn_attention.patterns.sequences import shared_prefix

__all__ = ["block_diffusion", "draft_training", "media_cross"]


def block_diffusion(n: int, block: int) -> TokenGraph:
    """Noised tokens attend to their noised block and the clean blocks before it.

    Clean tokens attend to clean blocks up to their own. ``n`` noised tokens, then the same ``n`` clean, both
    in blocks of ``block``: 2 n nodes, the training of block diffusion. With ``blk`` the number of a token's
    block, a noised token attends to the noised tokens of its own block and the clean ones of earlier blocks,
    ``blk(src) < blk(dst)``; a clean token attends to the clean ones with ``blk(src) <= blk(dst)`` and no
    noised one. So a noised token attends to as many as its clean twin: ``min((blk + 1) * block, n)``.
    ``block=1`` is a causal model; ``block=n`` denoises everything at once. A last block may be shorter. At
    decoding: ``block_causal(n, block)``. BD3-LM (Arriola et al. 2025, arXiv 2503.09573).

    >>> block_diffusion(3, 2).in_degree().tolist()
    [2, 2, 3, 2, 2, 3]
    """
    n, block = checks.size("n", n), checks.size("block", block, 1)
    among_noised = (dst < n) & (src < n) & (src // block == dst // block)
    earlier = (dst < n) & (src >= n) & ((src - n) // block < dst // block)
    among_clean = (dst >= n) & (src >= n) & ((src - n) // block <= (dst - n) // block)
    rule = among_noised | earlier | among_clean
    return TokenGraph.from_rule(rule, 2 * n, name=f"block_diffusion({n}, {block})")


def draft_training(prefix: int, blocks: int, block: int) -> TokenGraph:
    """Each token attends to the whole verified prefix and its own draft's past.

    ``blocks`` drafts of ``block`` tokens after one prefix.
    ``src <= dst and (src < prefix or draft(src) = draft(dst))``, with ``draft(i) = (i - prefix) // block``.
    In-degree of the t-th token of a draft, counted from 0: ``prefix + t + 1``. The receivers of a draft head
    are ``.rows(prefix, prefix + blocks * block)``: the prefix comes from the model whose tokens are drafted.
    JetSpec's training mask (Hu et al. 2026, arXiv 2606.18394), where a draft is an anchor and the tokens
    after it; its decoding is ``tree_decoding``.

    >>> draft_training(2, 2, 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    prefix, blocks = checks.size("prefix", prefix), checks.size("blocks", blocks)
    block = checks.size("block", block, 1)
    name = f"draft_training({prefix}, {blocks}, {block})"
    return replace(shared_prefix(prefix, [block] * blocks), name=name)


def media_cross(n: int, media: Sequence[int], tokens: int, last: bool = True) -> TokenGraph:
    """Text attends to the last image before it.

    ``n`` text tokens receive from ``len(media) * tokens`` visual ones (bipartite). ``media[k]`` is the text
    position at which image (or video) k stands, in increasing order; its ``tokens`` visual tokens are the
    senders ``k * tokens .. (k + 1) * tokens - 1``. Text token dst attends to image k if
    ``media[k] <= dst < media[k + 1]``; before the first image to none. ``last=False``: all images so far,
    ``media[k] <= dst``. Flamingo (Alayrac et al. 2022, arXiv 2204.14198). IndexError for a position outside.

    >>> media_cross(4, [1, 3], 2).edge_index.tolist()
    [[0, 1, 0, 1, 2, 3], [1, 1, 2, 2, 3, 3]]
    """
    n, tokens = checks.size("n", n), checks.size("tokens", tokens, 1)
    places = _operands.positions("media", media, n, "text positions")
    if any(later <= earlier for earlier, later in pairwise(places)):
        got = text.listed(places, "positions")
        raise ValueError(f"media must be strictly increasing positions, got {got}")
    so_far = look_up(_data.marked(places, n).cumsum(0), dst)
    medium = src // tokens + 1
    rule = medium == so_far if last else medium <= so_far
    name = text.call("media_cross", True, n, text.listed(places, "media"), tokens, last=(last, True))
    return TokenGraph.from_rule(rule, n, len(places) * tokens, name=name)
