"""Sequences in one row of tokens: prefixes, packing, orders of generation, layouts of training, media."""

from collections.abc import Sequence
from itertools import pairwise

from gnn_attention._support import checks
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules, text
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["bidirectional_groups", "block_causal", "block_diffusion", "documents"]
__all__ += ["draft_training", "fill_in_the_middle", "media_cross", "permutation", "prefix"]
__all__ += ["shared_prefix"]


@builder()
def prefix(n: int, p: int) -> TokenGraph:
    """The first ``p`` tokens attend to each other, the rest is causal: ``src < p or src <= dst``.

    Not causal inside the prefix. The prefix language model (Raffel et al. 2020, arXiv 1910.10683, section
    3.2.1); with a source of ``p`` tokens it is also the sequence-to-sequence mask of UniLM (Dong et al. 2019,
    arXiv 1905.03197).

    >>> prefix(4, 2).in_degree().tolist()
    [2, 2, 3, 4]
    """
    return TokenGraph.from_rule((src < p) | (src <= dst), n)


@builder()
def documents(lengths: Sequence[int], causal: bool = True) -> TokenGraph:
    """Packed documents: ``doc(src) = doc(dst)`` and ``src <= dst``.

    ``lengths`` are the documents' sizes in order (0 allowed); ``causal=False`` drops the second condition.
    The disjoint sum of graphs, as in torch_geometric's batches.

    >>> documents([2, 1]).edge_index.tolist()
    [[0, 0, 1, 2], [0, 1, 1, 2]]
    """
    sizes = checks.sizes("lengths", lengths)
    return TokenGraph.from_rule(rules.drop_future(_data.same(_data.owners(sizes)), causal), sum(sizes))


@builder()
def shared_prefix(prompt: int, answers: Sequence[int]) -> TokenGraph:
    """One prompt, several answers: ``src <= dst``, and src in the prompt or in dst's own answer.

    No answer attends to another. Each answer is computed as if it followed the prompt alone, and the prompt
    only once. The t-th token of an answer, counted from 0, has in-degree ``prompt + t + 1``. Rotary or other
    positions must restart after the prompt in every answer. ``answers`` are their sizes; several prompts, and
    prompts of prompts, are ``prefix_tree``. Prefix Grouper (Liu et al. 2025, arXiv 2506.05433) for the
    samples of one group in GRPO; attention-gym's ``shared_prefix`` mask.

    >>> shared_prefix(2, [2, 1]).in_degree().tolist()
    [1, 2, 3, 4, 3]
    """
    sizes = checks.sizes("answers", answers)
    rule = (src <= dst) & ((src < prompt) | _data.same(_data.owners([prompt, *sizes])))
    return TokenGraph.from_rule(rule, prompt + sum(sizes))


@builder(block=1)
def block_causal(n: int, block: int) -> TokenGraph:
    """Blocks of ``block`` tokens attend to themselves both ways and all earlier blocks.

    ``src // block <= dst // block``. In-degree ``min((dst // block + 1) * block, n)``; not causal inside a
    block. ``block=1`` is causal, ``block=n`` full. The graph of a model that generates block after block
    (BD3-LM, Arriola et al. 2025, arXiv 2503.09573; its training is ``block_diffusion``). Blocks of other
    sizes: ``bidirectional_groups``.

    >>> block_causal(5, 2).in_degree().tolist()
    [2, 2, 4, 4, 5]
    """
    return TokenGraph.from_rule(src // block <= dst // block, n)


@builder()
def bidirectional_groups(groups: Sequence[int]) -> TokenGraph:
    """Causal text with groups (images) that attend to themselves both ways.

    ``src <= dst or group(src) = group(dst) >= 0``. ``groups`` holds a number for each token, a negative one
    for a token of no group; the tokens of a group need not stand together. Text and images in one sequence:
    Transfusion (Zhou et al. 2024, arXiv 2408.11039); in Hugging Face
    ``or_masks(causal_mask_function, blockwise_overlay(block_sequence_ids))``.

    >>> bidirectional_groups([-1, 0, 0, -1, 1, 1]).in_degree().tolist()
    [1, 3, 3, 4, 6, 6]
    """
    numbers = checks.integers("groups", groups, "group numbers, one for each token")
    # Groups are numbered as they come, so that those of tokens that stand together are a sorted table.
    places: dict[tuple[bool, int], int] = {}
    keys = ((number >= 0, number if number >= 0 else token) for token, number in enumerate(numbers))
    group = _data.table([places.setdefault(key, len(places)) for key in keys])
    return TokenGraph.from_rule((src <= dst) | _data.same(group), len(numbers))


@builder()
def permutation(order: Sequence[int], context: int = 0) -> TokenGraph:
    """Generation in any order: each token attends to those that come before it in ``order``, and itself.

    A causal graph, relabelled. ``order[k]`` is the position generated k-th. With ``rank`` the inverse of
    ``order`` the edges are ``rank(src) < context or rank(src) <= rank(dst)``: the first ``context`` tokens of
    the order are given, attend to each other and are attended to by all. A token of rank r beyond the context
    has in-degree r + 1.

    The content stream of XLNet (Yang et al. 2019, arXiv 1906.08237), whose context are the tokens that are
    not to be predicted. Its query stream, in which who predicts a token must not attend to it, is this graph
    ``- self_loops(n)``. Autoregressive blank infilling, GLM (Du et al. 2021, arXiv 2103.10360), is the
    content stream with the corrupted text as context. ValueError unless ``order`` is a permutation.

    >>> permutation([2, 0, 3, 1]).edge_index.tolist()
    [[0, 2, 0, 1, 2, 3, 2, 0, 2, 3], [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]]
    """
    places = checks.integers("order", order, "positions")
    if sorted(places) != list(range(len(places))):
        got = f"got {text.format_list(places, 'positions', 8)}"
        raise ValueError(f"order must hold each of 0 .. {len(places) - 1} once, in any order, {got}")
    rank = _data.table(places).argsort()
    return TokenGraph.from_rule(look_up(rank, src) <= look_up(rank.clamp(min=context - 1), dst), len(places))


@builder()
def fill_in_the_middle(n: int, start: int, stop: int, order: str = "psm") -> TokenGraph:
    """The tokens ``start .. stop - 1`` are generated last, after prefix and suffix.

    Tokens stand where they do in the text. A causal graph in the order prefix, suffix, middle (``"psm"``) or
    suffix, prefix, middle (``"spm"``): the middle attends to everything outside it and its own past, the
    first part of the order attends to itself only. As many edges as ``causal(n)``. Bavarian et al. 2022
    (arXiv 2207.14255, section 3; SPM is section 3.1), who move the tokens and add sentinels; here they stay
    and the graph is relabelled. IndexError unless ``0 <= start <= stop <= n``.

    >>> fill_in_the_middle(5, 1, 3).in_degree().tolist()
    [1, 4, 5, 2, 3]
    """
    if not start <= stop <= n:
        raise IndexError(f"start <= stop <= n must hold for n = {n}, got start {start} and stop {stop}")
    parts = {"p": range(start), "s": range(stop, n), "m": range(start, stop)}
    places = [place for part in checks.choice("order", order, ("psm", "spm")) for place in parts[part]]
    return permutation(places)


@builder(block=1)
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
    among_noised = (dst < n) & (src < n) & (src // block == dst // block)
    earlier = (dst < n) & (src >= n) & ((src - n) // block < dst // block)
    among_clean = (dst >= n) & (src >= n) & ((src - n) // block <= (dst - n) // block)
    return TokenGraph.from_rule(among_noised | earlier | among_clean, 2 * n)


@builder(block=1)
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
    return shared_prefix(prefix, [block] * blocks)


@builder(tokens=1)
def media_cross(n: int, media: Sequence[int], tokens: int) -> TokenGraph:
    """Text attends to the last image before it.

    ``n`` text tokens receive from ``len(media) * tokens`` visual ones (bipartite). ``media[k]`` is the text
    position at which image (or video) k stands, in increasing order; its ``tokens`` visual tokens are the
    senders ``k * tokens .. (k + 1) * tokens - 1``. Text token dst attends to image k if
    ``media[k] <= dst < media[k + 1]``; before the first image to none. Flamingo (Alayrac et al. 2022, arXiv
    2204.14198). IndexError for a position outside.

    >>> media_cross(4, [1, 3], 2).edge_index.tolist()
    [[0, 1, 0, 1, 2, 3], [1, 1, 2, 2, 3, 3]]
    """
    places = _operands.positions("media", media, n, "text positions")
    if any(later <= earlier for earlier, later in pairwise(places)):
        raise ValueError(
            f"media must be strictly increasing positions, got {text.format_list(places, 'media')}"
        )
    so_far = look_up(_data.mark_positions(places, n).cumsum(0), dst)
    return TokenGraph.from_rule(src // tokens + 1 == so_far, n, len(places) * tokens)
