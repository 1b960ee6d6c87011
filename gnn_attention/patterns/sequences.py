"""Graphs over sequences: prefixes, packed documents, generation orders, training layouts, media."""

from collections.abc import Sequence
from itertools import pairwise

from gnn_attention._support import checks
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules, text
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["bidirectional_groups", "block_causal", "block_diffusion", "documents", "draft_training"]
__all__ += ["fill_in_the_middle", "media_cross", "permutation", "prefix", "shared_prefix"]


@builder()
def prefix(n: int, p: int) -> TokenGraph:
    """All tokens attend to the first ``p`` tokens and their own past: ``src < p or src <= dst``.

    This is the graph of a prefix language model (Raffel et al. 2020, arXiv 1910.10683, section
    3.2.1) and, with a source of ``p`` tokens, the sequence-to-sequence mask of UniLM (Dong et al.
    2019, arXiv 1905.03197). It is not causal within the prefix.

    >>> prefix(4, 2).in_degree().tolist()
    [2, 2, 3, 4]
    """
    return TokenGraph.from_rule((src < p) | (src <= dst), n)


@builder()
def documents(lengths: Sequence[int], causal: bool = True) -> TokenGraph:
    """Several documents are packed in one sequence; each token attends to the past of its own document.

    The edges are ``doc(src) = doc(dst)`` and ``src <= dst``; ``causal=False`` drops the second
    condition. ``lengths`` are the sizes of the documents in order (0 is allowed). The graph is the
    disjoint sum of one graph for each document, as in a torch_geometric batch.

    >>> documents([2, 1]).edge_index.tolist()
    [[0, 0, 1, 2], [0, 1, 1, 2]]
    """
    sizes = checks.sizes("lengths", lengths)
    rule = _data.has_same_label(_data.segment_ids(sizes))
    return TokenGraph.from_rule(rules.drop_future(rule, causal), sum(sizes))


@builder()
def shared_prefix(prompt: int, answers: Sequence[int]) -> TokenGraph:
    """Several answers to one prompt attend to the prompt and to their own past, not to each other.

    The edges are ``src <= dst`` with src in the prompt or in the answer of dst. So each answer is
    computed as if it alone followed the prompt, and the prompt is computed once. The t-th token of
    an answer, counted from 0, has in-degree ``prompt + t + 1``. The positions of every answer,
    rotary or other, must begin after the prompt. ``answers`` holds the sizes of the answers. With
    :func:`prefix_tree` there may be several prompts, also prompts that continue others. Sources:
    Prefix Grouper (Liu et al. 2025, arXiv 2506.05433) for the samples of a group in GRPO;
    attention-gym's ``shared_prefix``.

    >>> shared_prefix(2, [2, 1]).in_degree().tolist()
    [1, 2, 3, 4, 3]
    """
    sizes = checks.sizes("answers", answers)
    rule = (src <= dst) & ((src < prompt) | _data.has_same_label(_data.segment_ids([prompt, *sizes])))
    return TokenGraph.from_rule(rule, prompt + sum(sizes))


@builder(block=1)
def block_causal(n: int, block: int) -> TokenGraph:
    """Each token attends to its whole block of ``block`` tokens and to all earlier blocks.

    The edges are ``src // block <= dst // block``, so the graph is not causal within a block. The
    in-degree is ``min((dst // block + 1) * block, n)``. ``block=1`` is causal, ``block=n`` is full.
    For blocks of different sizes use ``bidirectional_groups``. Source: BD3-LM (Arriola et al. 2025,
    arXiv 2503.09573), a model that generates block after block and is trained with
    ``block_diffusion``.

    >>> block_causal(5, 2).in_degree().tolist()
    [2, 2, 4, 4, 5]
    """
    return TokenGraph.from_rule(src // block <= dst // block, n)


@builder()
def bidirectional_groups(groups: Sequence[int]) -> TokenGraph:
    """Each token attends to its past and to its whole group, such as the tokens of an image in a text.

    The edges are ``src <= dst or group(src) = group(dst) >= 0``. ``groups`` holds a number for each
    token, negative for a token without a group; the tokens of a group need not be adjacent. Source:
    Transfusion (Zhou et al. 2024, arXiv 2408.11039), which mixes text and images. In Hugging Face
    the mask is ``or_masks(causal_mask_function, blockwise_overlay(block_sequence_ids))``.

    >>> bidirectional_groups([-1, 0, 0, -1, 1, 1]).in_degree().tolist()
    [1, 3, 3, 4, 6, 6]
    """
    labels = checks.integers("groups", groups, "group numbers, one for each token")
    # Groups are renumbered in order of appearance. If their tokens are adjacent, the table is sorted, so its
    # bounds on every tile are tight. A token without a group becomes a group of one token.
    new_labels: dict[tuple[bool, int], int] = {}
    keys = ((label >= 0, label if label >= 0 else token) for token, label in enumerate(labels))
    group = _data.int64_tensor([new_labels.setdefault(key, len(new_labels)) for key in keys])
    return TokenGraph.from_rule((src <= dst) | _data.has_same_label(group), len(labels))


@builder()
def permutation(order: Sequence[int], context: int = 0) -> TokenGraph:
    """Tokens are generated in any ``order``; each attends to itself and to the tokens generated before it.

    This is a relabelled causal graph: ``order[k]`` is the position that is generated k-th. If ``rank`` is the
    inverse of ``order``, the edges are ``rank(src) < context or rank(src) <= rank(dst)``. So all
    tokens attend to the first ``context`` tokens of the order. A later token of rank r has in-degree r + 1.

    Sources: the content stream of XLNet (Yang et al. 2019, arXiv 1906.08237), whose context holds
    the tokens that need not be predicted. Its query stream, in which a token must not attend to
    itself, is this graph ``- self_loops(n)``. In GLM (Du et al. 2021, arXiv 2103.10360), which
    fills blanks autoregressively, the context is the corrupted text. Raises ValueError unless
    ``order`` is a permutation.

    >>> permutation([2, 0, 3, 1]).edge_index.tolist()
    [[0, 2, 0, 1, 2, 3, 2, 0, 2, 3], [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]]
    """
    positions = checks.integers("order", order, "positions")
    if sorted(positions) != list(range(len(positions))):
        raise ValueError(
            f"order must hold each of 0 .. {len(positions) - 1} once, in any order, "
            f"got {text.format_list(positions, 'positions', 8)}"
        )
    rank = _data.int64_tensor(positions).argsort()
    rule = look_up(rank, src) <= look_up(rank.clamp(min=context - 1), dst)
    return TokenGraph.from_rule(rule, len(positions))


@builder()
def fill_in_the_middle(n: int, start: int, stop: int, order: str = "psm") -> TokenGraph:
    """The tokens ``start .. stop - 1`` are generated last, after prefix and suffix.

    This is a causal graph in the order prefix, suffix, middle (``"psm"``) or suffix, prefix, middle
    (``"spm"``), so it has as many edges as ``causal(n)``: the middle attends to everything else and
    its own past, and the first part of the order attends to itself only. Source: Bavarian et al.
    2022 (arXiv 2207.14255, section 3; SPM is section 3.1), who move the tokens and add sentinels;
    here the tokens keep their positions. Raises IndexError unless ``0 <= start <= stop <= n``.

    >>> fill_in_the_middle(5, 1, 3).in_degree().tolist()
    [1, 4, 5, 2, 3]
    """
    if not start <= stop <= n:
        raise IndexError(f"start <= stop <= n must hold for n = {n}, got start {start} and stop {stop}")
    parts = {"p": range(start), "s": range(stop, n), "m": range(start, stop)}
    order = checks.choice("order", order, ("psm", "spm"))
    return permutation([position for letter in order for position in parts[letter]])


@builder(block=1)
def block_diffusion(n: int, block: int) -> TokenGraph:
    """Noised tokens attend to their noised block and the clean blocks before it.

    The 2 n nodes are ``n`` noised tokens, then the same tokens without noise, both in blocks of ``block``.
    A noised token attends to the noised tokens of its own block and to the clean tokens of earlier blocks,
    ``blk(src) < blk(dst)``. A clean token attends to the clean tokens with ``blk(src) <= blk(dst)``
    and to no noised token. Both have in-degree ``min((blk + 1) * block, n)``. ``block=1`` is a causal model,
    and ``block=n`` denoises all tokens at once. The last block may be short. This graph is for training; the
    graph for decoding is ``block_causal(n, block)``. Source: BD3-LM (Arriola et al. 2025, arXiv 2503.09573).

    >>> block_diffusion(3, 2).in_degree().tolist()
    [2, 2, 3, 2, 2, 3]
    """
    noised_to_noised = (dst < n) & (src < n) & (src // block == dst // block)
    clean_to_noised = (dst < n) & (src >= n) & ((src - n) // block < dst // block)
    clean_to_clean = (dst >= n) & (src >= n) & ((src - n) // block <= (dst - n) // block)
    return TokenGraph.from_rule(noised_to_noised | clean_to_noised | clean_to_clean, 2 * n)


@builder(block=1)
def draft_training(prefix: int, blocks: int, block: int) -> TokenGraph:
    """Each token attends to the whole verified prefix and the past of its own draft.

    After one prefix there are ``blocks`` drafts of ``block`` tokens. The edges are
    ``src <= dst and (src < prefix or draft(src) = draft(dst))`` with ``draft(i) = (i - prefix) // block``.
    The t-th token of a draft, counted from 0, has in-degree ``prefix + t + 1``. The receivers of a
    draft head are ``.rows(prefix, prefix + blocks * block)``, since the prefix comes from the model
    whose tokens are drafted. Source: JetSpec's training mask (Hu et al. 2026, arXiv 2606.18394),
    where a draft is an anchor and the tokens after it; JetSpec decodes with ``tree_decoding``.

    >>> draft_training(2, 2, 2).in_degree().tolist()
    [1, 2, 3, 4, 3, 4]
    """
    return shared_prefix(prefix, [block] * blocks)


@builder(tokens=1)
def media_cross(n: int, media: Sequence[int], tokens: int) -> TokenGraph:
    """Each text token attends to the last image at or before its position.

    The graph is bipartite: ``n`` text tokens receive from ``len(media) * tokens`` visual tokens.
    ``media`` lists in increasing order the text positions at which images (or videos) appear. Image
    k has the senders ``k * tokens .. (k + 1) * tokens - 1``, and text token dst attends to it if
    ``media[k] <= dst < media[k + 1]``. Tokens before the first image are isolated. Source: Flamingo
    (Alayrac et al. 2022, arXiv 2204.14198). Raises IndexError for a position outside ``0 .. n - 1``.

    >>> media_cross(4, [1, 3], 2).edge_index.tolist()
    [[0, 1, 0, 1, 2, 3], [1, 1, 2, 2, 3, 3]]
    """
    positions = _operands.check_positions("media", media, n, "text positions")
    if any(after <= before for before, after in pairwise(positions)):
        listing = text.format_list(positions, "media")
        raise ValueError(f"media must be strictly increasing positions, got {listing}")
    num_images_before = look_up(_data.index_to_mask(positions, n).cumsum(0), dst)
    return TokenGraph.from_rule(src // tokens + 1 == num_images_before, n, len(positions) * tokens)
