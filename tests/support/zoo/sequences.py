"""Theorems of ``patterns.sequences``."""

from math import comb

from support.zoo.row import Row, never, once, triangle

from gnn_attention import patterns


def lengths(n: int) -> list[int]:
    """Three documents, one of them empty."""
    return [n // 3, 0, n - n // 3]


def document(n: int, i: int) -> int:
    return 0 if i < n // 3 else 2


def answers(n: int) -> list[int]:
    """Three answers to a prompt of ``n // 2`` tokens, one of them empty."""
    return [n // 4, 0, n - n // 2 - n // 4]


def dialogue(n: int, i: int) -> list[int]:
    """The prompt, and of the answer that token i belongs to the tokens up to i; inside the prompt the tokens
    up to i.
    """
    prompt, first = range(n // 2), range(n // 2, n // 2 + n // 4)
    answer = first if i in first else range(n // 2 + n // 4, n)
    return list(range(i + 1)) if i in prompt else [*prompt, *range(answer.start, i + 1)]


LAST = [
    0,
    2,
    2,
    3,
    6,
    6,
    6,
]  # of seven tokens: text, an image of two, text, an image of three; the last token of each group


def groups(n: int) -> list[int]:
    return [-i - 1 if i % 7 in (0, 3) else 2 * (i // 7) + (i % 7 > 3) for i in range(n)]


def inside_images(n: int) -> int:
    """Pairs of two tokens of one image: whole sevens hold 1 + 3 of them, a rest of r holds those of its first
    r tokens.
    """
    return 4 * (n // 7) + [0, 0, 0, 1, 1, 1, 2][n % 7]


def rank(n: int, i: int) -> int:
    return (7 * i + 3) % n


def order(n: int) -> list[int]:
    """The permutation whose inverse is ``rank``; 7 and n have no common divisor."""
    return sorted(range(n), key=lambda i: rank(n, i))


def middle(n: int) -> tuple[int, int]:
    return n // 4, n - n // 3


def psm(n: int, i: int) -> list[int]:
    """Who is generated up to token i: prefix, then suffix, then middle."""
    start, stop = middle(n)
    if i < start:
        return [*range(i + 1)]
    return [*range(start), *range(stop, i + 1)] if i >= stop else [*range(i + 1), *range(stop, n)]


def spm(n: int, i: int) -> list[int]:
    """Who is generated up to token i: suffix, then prefix, then middle."""
    stop = middle(n)[1]
    return [*range(stop, i + 1)] if i >= stop else [*range(i + 1), *range(stop, n)]


ROWS = [
    Row(
        "prefix",
        lambda n: patterns.prefix(n, 4),
        lambda n, i, j: j < 4 or j <= i,
        lambda n: n * n if n <= 4 else 16 + triangle(n) - triangle(4),
        lambda n, i: max(i + 1, min(4, n)),
        causal=False,
        layers=lambda n: once(n) if n <= 4 else None,
    ),
    Row(
        "prefix of nothing",
        lambda n: patterns.prefix(n, 0),
        lambda n, i, j: j <= i,
        triangle,
        lambda n, i: i + 1,
        layers=once,
    ),
    Row(
        "documents",
        lambda n: patterns.documents(lengths(n)),
        lambda n, i, j: j <= i and document(n, i) == document(n, j),
        lambda n: sum(triangle(length) for length in lengths(n)),
        lambda n, i: i + 1 if i < n // 3 else i + 1 - n // 3,
        layers=lambda n: once(n) if n < 3 else None,
    ),
    Row(
        "documents on both sides",
        lambda n: patterns.documents(lengths(n), causal=False),
        lambda n, i, j: document(n, i) == document(n, j),
        lambda n: sum(length**2 for length in lengths(n)),
        lambda n, i: lengths(n)[document(n, i)],
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n < 3 else None,
    ),
    Row(
        "shared_prefix",
        lambda n: patterns.shared_prefix(n // 2, answers(n)),
        lambda n, i, j: j in dialogue(n, i),
        lambda n: triangle(n // 2) + sum(triangle(size) + size * (n // 2) for size in answers(n)),
        lambda n, i: i + 1 if i < n // 2 + n // 4 else i + 1 - n // 4,
        layers=lambda n: once(n) if n < 4 else None,
    ),
    Row(
        "block_causal",
        lambda n: patterns.block_causal(n, 3),
        lambda n, i, j: j < i - i % 3 + 3,
        lambda n: 9 * triangle(n // 3) + n % 3 * n,
        lambda n, i: min(i - i % 3 + 3, n),
        causal=False,
        layers=lambda n: once(n) if n <= 3 else None,
    ),
    Row(
        "bidirectional_groups",
        lambda n: patterns.bidirectional_groups(groups(n)),
        lambda n, i, j: j <= i - i % 7 + LAST[i % 7],
        lambda n: triangle(n) + inside_images(n),
        lambda n, i: min(i - i % 7 + LAST[i % 7] + 1, n),
        causal=False,
        layers=never,
    ),
    Row(
        "bidirectional_groups, interleaved",
        lambda n: patterns.bidirectional_groups([i % 3 - 1 for i in range(n)]),
        lambda n, i, j: j <= i or (i % 3 > 0 and (j - i) % 3 == 0),
        lambda n: triangle(n) + comb((n + 1) // 3, 2) + comb(n // 3, 2),
        lambda n, i: i + 1 + (n - 1 - i) // 3 * (i % 3 > 0),
        causal=False,
        layers=never,
    ),
    Row(
        "permutation",
        lambda n: patterns.permutation(order(n)),
        lambda n, i, j: rank(n, j) <= rank(n, i),
        triangle,
        lambda n, i: rank(n, i) + 1,
        causal=False,
        acyclic=True,
        layers=never,
    ),
    Row(
        "permutation, its queries",
        lambda n: patterns.permutation(order(n), stream="query"),
        lambda n, i, j: rank(n, j) < rank(n, i),
        lambda n: triangle(n) - n,
        lambda n, i: rank(n, i),
        causal=False,
        acyclic=True,
        layers=never,
    ),
    Row(
        "permutation with a context",
        lambda n: patterns.permutation(order(n), context=4),
        lambda n, i, j: j in order(n)[: max(rank(n, i) + 1, 4)],
        lambda n: n * n if n <= 4 else 16 + triangle(n) - triangle(4),
        lambda n, i: max(rank(n, i) + 1, min(4, n)),
        causal=False,
        layers=lambda n: once(n) if n <= 4 else None,
    ),
    Row(
        "permutation with a context, its queries",
        lambda n: patterns.permutation(order(n), context=4, stream="query"),
        lambda n, i, j: j in order(n)[: max(rank(n, i), 4)],
        lambda n: n * n if n <= 4 else 16 + triangle(n - 1) - triangle(3),
        lambda n, i: max(rank(n, i), min(4, n)),
        causal=False,
        layers=lambda n: once(n) if n <= 4 else None,
    ),
    Row(
        "fill_in_the_middle",
        lambda n: patterns.fill_in_the_middle(n, *middle(n)),
        lambda n, i, j: j in psm(n, i),
        triangle,
        lambda n, i: (
            i + 1 if i < n // 4 else n // 4 + i + 1 - (n - n // 3) if i >= n - n // 3 else n // 3 + i + 1
        ),
        causal=False,
        acyclic=True,
        layers=never,
    ),
    Row(
        "fill_in_the_middle, suffix first",
        lambda n: patterns.fill_in_the_middle(n, *middle(n), order="spm"),
        lambda n, i, j: j in spm(n, i),
        triangle,
        lambda n, i: n // 3 + i + 1 if i < n - n // 3 else i + 1 - (n - n // 3),
        causal=False,
        acyclic=True,
        layers=never,
    ),
]
