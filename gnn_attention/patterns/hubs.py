"""Tokens that every token attends to: sinks, global tokens, and the block-sparse graphs built around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph, rules, text
from gnn_attention.patterns import _data
from gnn_attention.patterns._symbols import any_of, compute, dst, look_up, src

__all__ = ["bigbird", "bigbird_etc", "etc", "global_tokens", "longformer", "sinks"]


def sinks(n: int, s: int, causal: bool = True) -> TokenGraph:
    """Every token attends to the first ``s`` tokens: ``src < s and src <= dst``.

    ``causal=False`` drops the second condition. ``window(n, w) | sinks(n, 4)`` is StreamingLLM (Xiao et al.
    2023, arXiv 2309.17453); as one builder, ``sink_window``.

    >>> sinks(5, 2).in_degree().tolist()
    [1, 2, 2, 2, 2]
    """
    n, s = checks.size("n", n), checks.size("s", s)
    rule = rules.past((src < s) & (dst >= 0), causal)
    return TokenGraph.from_rule(rule, n, name=text.call("sinks", causal, n, s))


def global_tokens(n: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """Chosen tokens G attend to all and are attended to by all.

    ``src in G or dst in G``, and ``src <= dst`` unless ``causal=False``. ``tokens``: their positions, or a
    number m for the first m. Longformer's global attention (Beltagy et al. 2020, arXiv 2004.05150, section
    3.1) is ``causal=False``. IndexError for a position outside ``0 .. n - 1``.

    >>> global_tokens(4, [1]).edge_index.tolist()
    [[0, 1, 1, 1], [1, 1, 2, 3]]
    """
    n = checks.size("n", n)
    table, shown = _token_table(n, tokens)
    rule = rules.past(look_up(table, dst) | look_up(table, src), causal)
    return TokenGraph.from_rule(rule, n, name=text.call("global_tokens", causal, n, shown))


def longformer(n: int, w: int, tokens: int | Iterable[int], causal: bool = True) -> TokenGraph:
    """A window and global tokens G: ``|dst - src| < w or src in G or dst in G``.

    ``src <= dst`` unless ``causal=False``. The union of ``window(n, w)`` and ``global_tokens(n, tokens)``.
    The paper's encoder is ``causal=False``; others count w differently: with the paper's and Hugging Face's
    ``attention_window`` W each token attends to W / 2 tokens on each side, which is ``w = W // 2 + 1`` here;
    attention-gym's ``global_sliding_window(r)`` is ``w = r + 1``. In the paper global tokens have weights of
    their own, which no graph says. Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.
    IndexError for a position outside ``0 .. n - 1``.

    >>> longformer(5, 2, [0], causal=False).in_degree().tolist()
    [5, 3, 4, 4, 3]
    """
    n, w = checks.size("n", n), checks.size("w", w)
    table, shown = _token_table(n, tokens)
    rule = (abs(dst - src) < w) | look_up(table, dst) | look_up(table, src)
    return TokenGraph.from_rule(
        rules.past(rule, causal), n, name=text.call("longformer", causal, n, w, shown)
    )


def etc(n: int, w: int, num_global: int, owner: Sequence[int] | None = None) -> TokenGraph:
    """``num_global`` extra tokens stand before ``n`` long ones, attend to all and are attended to by all.

    Long ones attend to a window. Nodes ``0 .. g - 1`` are global (g = num_global), ``g .. g + n - 1`` long:
    ``src < g or dst < g or |dst - src| < w``. ``owner[i]`` is the global token of long token i (of its
    sentence); with it a global token attends to, next to the global ones, only the long tokens that it owns:
    the released models' "hard g2l" mask, one global token for each sentence. Never causal. The code's
    ``local_radius`` r is ``w = r + 1``. Ainslie et al. 2020, ETC (arXiv 2004.08483) and its code,
    google-research/etcmodel. ValueError unless there is one owner for each long token, IndexError for an
    owner outside ``0 .. g - 1``.

    >>> etc(4, 1, 2, owner=[0, 0, 1, 1]).in_degree().tolist()
    [4, 4, 3, 3, 3, 3]
    """
    n, w, first = checks.size("n", n), checks.size("w", w), checks.size("num_global", num_global)
    near = abs(dst - src) < w
    if owner is None:
        rule = (dst < first) | (src < first) | near
        return TokenGraph.from_rule(rule, first + n, name=f"etc({n}, {w}, {first})")
    owners = _operands.positions("owner", owner, first, "global tokens")
    if len(owners) != n:
        raise ValueError(f"owner must name one for each of the {n} long tokens, got {len(owners)} of them")
    table = _data.table([*range(first), *owners])
    rule = (src < first) | ((dst >= first) & near) | (look_up(table, src) == dst)
    name = f"etc({n}, {w}, {first}, owner={text.listed(owners, 'owners')})"
    return TokenGraph.from_rule(rule, first + n, name=name)


def bigbird(n: int, block: int, num_random: int = 3, heads: int | None = None, seed: int = 0) -> TokenGraph:
    """Blocks of tokens attend to themselves, both neighbours, the first and last block, and random ones.

    Those two attend to every token. With ``i = dst // block``, ``j = src // block`` and L the last block:
    ``i in {0, L} or j in {0, L} or |i - j| <= 1 or j in R(i)``, where R(i) holds ``num_random`` further
    blocks, drawn without repetition from those that i does not attend to anyway (all of them, if there are
    fewer). ``heads`` draws R for each head; head 0 has the same as ``heads=None``, and a larger
    ``num_random`` only adds edges. The last block may be short. Never causal.

    Others draw otherwise: google-research/bigbird and Hugging Face take R(i) from the first
    ``2 num_random + 5`` blocks where there are more (from the first 1024 tokens at lengths 1024, 3072 and
    4096), and Hugging Face in evaluation replaces all of R(i) by copies of block 0: ``num_random=0`` with
    ``log(1 + num_random)`` on the logits from block 0 to the middle blocks. Zaheer et al. 2020, Big Bird
    (arXiv 2007.14062): the internal construction, ITC.

    >>> bigbird(6, 1, num_random=1).in_degree().tolist()
    [6, 5, 6, 6, 5, 6]
    """
    n, size = checks.size("n", n), checks.size("block", block, 1)
    last = -(-n // size) - 1
    row, column = dst // size, src // size
    hubs = (row == 0) | (row == last) | (column == 0) | (column == last)
    near = abs(row - column) <= 1
    rule = hubs | near | _drawn(row, column, last + 1, {0, last}, num_random, heads, seed)
    name = text.call("bigbird", True, n, size, **_draw_options(num_random, heads, seed))
    return TokenGraph.from_rule(rule, n, heads=heads, name=name)


def bigbird_etc(
    n: int, block: int, num_global: int, num_random: int = 3, heads: int | None = None, seed: int = 0
) -> TokenGraph:
    """``num_global`` extra tokens stand before ``n`` attend to all and are attended to by all.

    The n attend to three blocks and random ones. Nodes ``0 .. g - 1`` are global (g = num_global). With
    ``i = (dst - g) // block`` and ``j = (src - g) // block``:
    ``dst < g or src < g or |i - j| <= 1 or j in R(i)``, R(i) as in :func:`bigbird`, drawn from the blocks
    outside the window. Never causal. Zaheer et al. 2020, Big Bird (arXiv 2007.14062), extended: ETC.

    >>> bigbird_etc(8, 2, num_global=1, num_random=0).in_degree().tolist()
    [9, 5, 5, 7, 7, 7, 7, 5, 5]
    """
    n, size = checks.size("n", n), checks.size("block", block, 1)
    first = checks.size("num_global", num_global)
    row, column = (compute(torch.clamp, token - first, 0) // size for token in (dst, src))
    near = abs(row - column) <= 1
    drawn = _drawn(row, column, -(-n // size), set(), num_random, heads, seed)
    name = text.call("bigbird_etc", True, n, size, first, **_draw_options(num_random, heads, seed))
    rule = (dst < first) | (src < first) | near | drawn
    return TokenGraph.from_rule(rule, first + n, heads=heads, name=name)


def _token_table(n: int, tokens: int | Iterable[int]) -> tuple[Bool[Tensor, " n"], object]:
    given = tokens if isinstance(tokens, Iterable) else range(checks.size("tokens", tokens))
    places = _operands.positions("tokens", given, n, any_order=True)
    return _data.marked(places, n), text.listed(places, "tokens") if isinstance(tokens, Iterable) else tokens


def _drawn(
    row: Any, column: Any, blocks: int, hubs: set[int], num_random: int, heads: int | None, seed: int
) -> Any:
    """Whether the block ``column`` is in R(row): drawn, or the row itself where there are fewer blocks."""
    wanted = min(checks.size("num_random", num_random), blocks)
    copies = 1 if heads is None else checks.size("heads", heads, 1)
    generator = torch.Generator().manual_seed(checks.size("seed", seed))
    every = torch.arange(blocks, device="cpu")
    table = every[None, :, None].repeat(copies, 1, wanted)
    lonely = torch.tensor([block not in hubs for block in range(blocks)], dtype=torch.bool, device="cpu")
    for head in range(copies):
        for place in every[lonely].tolist():
            far = every[lonely & ((every - place).abs() > 1)]
            picks = far[torch.randperm(len(far), generator=generator, device="cpu")[:wanted]]
            table[head, place, : len(picks)] = picks
    tables = (table[0] if heads is None else table).unbind(-1)
    return any_of(look_up(drawn, row) == column for drawn in tables)


def _draw_options(num_random: int, heads: int | None, seed: int) -> dict[str, tuple[object, object]]:
    return {"num_random": (num_random, 3), "heads": (heads, None), "seed": (seed, 0)}
