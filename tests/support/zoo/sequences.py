"""Theorems of ``patterns.sequences``."""


def lengths(n: int) -> list[int]:
    """Return the lengths of three documents, one of which is empty."""
    return [n // 3, 0, n - n // 3]


def document(n: int, i: int) -> int:
    return 0 if i < n // 3 else 2


def answers(n: int) -> list[int]:
    """Return the lengths of three answers to a prompt of ``n // 2`` tokens; one answer is empty."""
    return [n // 4, 0, n - n // 2 - n // 4]


def dialogue_senders(n: int, i: int) -> list[int]:
    """Return the tokens up to i of the prompt and, if i is in an answer, of this answer."""
    prompt, first = range(n // 2), range(n // 2, n // 2 + n // 4)
    answer = first if i in first else range(n // 2 + n // 4, n)
    return list(range(i + 1)) if i in prompt else [*prompt, *range(answer.start, i + 1)]


# Of seven tokens - text, an image of two, text, an image of three - the last token of the group of each.
LAST = [0, 2, 2, 3, 6, 6, 6]


def groups(n: int) -> list[int]:
    return [-i - 1 if i % 7 in (0, 3) else 2 * (i // 7) + (i % 7 > 3) for i in range(n)]


def rank(n: int, i: int) -> int:
    return (7 * i + 3) % n


def order(n: int) -> list[int]:
    """Return the permutation whose inverse is ``rank``; 7 and n must have no common divisor."""
    return sorted(range(n), key=lambda i: rank(n, i))


def middle(n: int) -> tuple[int, int]:
    return n // 4, n - n // 3


def psm_senders(n: int, i: int) -> list[int]:
    """Return the tokens generated up to token i, in the order prefix, suffix, middle."""
    start, stop = middle(n)
    if i < start:
        return [*range(i + 1)]
    return [*range(start), *range(stop, i + 1)] if i >= stop else [*range(i + 1), *range(stop, n)]


def spm_senders(n: int, i: int) -> list[int]:
    """Return the tokens generated up to token i, in the order suffix, prefix, middle."""
    stop = middle(n)[1]
    return [*range(stop, i + 1)] if i >= stop else [*range(i + 1), *range(stop, n)]


def diffusion_edge(n: int, i: int, j: int) -> bool:
    """Return whether noised j is in the noised block of i, or clean j in an earlier or i's clean block."""
    (receiver_is_clean, x), (sender_is_clean, y) = divmod(i, n), divmod(j, n)
    if not sender_is_clean:
        return not receiver_is_clean and y // 3 == x // 3
    return y // 3 < x // 3 + receiver_is_clean


ROWS = """
prefix(n, 4): j < 4 or j <= i
    degree=max(i + 1, min(4, n)); layers=once(n) if n <= 4 else None; causal=False
documents(lengths(n)): j <= i and document(n, i) == document(n, j)
    degree=i + 1 if i < n // 3 else i + 1 - n // 3; layers=once(n) if n < 3 else None
documents(lengths(n), causal=False): document(n, i) == document(n, j)
    degree=lengths(n)[document(n, i)]; layers=once(n) if n < 3 else None; symmetric=True
shared_prefix(n // 2, answers(n)): j in dialogue_senders(n, i)
    degree=i + 1 if i < n // 2 + n // 4 else i + 1 - n // 4; layers=once(n) if n < 4 else None
block_causal(n, 3): j < i - i % 3 + 3
    degree=min(i - i % 3 + 3, n); layers=once(n) if n <= 3 else None; causal=False
bidirectional_groups(groups(n)): j <= i - i % 7 + LAST[i % 7]
    degree=min(i - i % 7 + LAST[i % 7] + 1, n); layers=never(n); causal=False
bidirectional_groups([i % 3 - 1 for i in range(n)]): j <= i or (i % 3 > 0 and (j - i) % 3 == 0)
    degree=i + 1 + (n - 1 - i) // 3 * (i % 3 > 0); layers=never(n); causal=False
permutation(order(n)): rank(n, j) <= rank(n, i)
    degree=rank(n, i) + 1; layers=never(n); causal=False; acyclic=True
permutation(order(n), context=4): j in order(n)[: max(rank(n, i) + 1, 4)]
    degree=max(rank(n, i) + 1, min(4, n)); layers=once(n) if n <= 4 else None; causal=False
fill_in_the_middle(n, *middle(n)): j in psm_senders(n, i)
    layers=never(n); causal=False; acyclic=True
fill_in_the_middle(n, *middle(n), order="spm"): j in spm_senders(n, i)
    layers=never(n); causal=False; acyclic=True
block_diffusion(n, 3): diffusion_edge(n, i, j)
    degree=min(i % n - i % n % 3 + 3, n); layers=None if n else 0; nodes=2 * n; causal=False
draft_training(3, n, 2): j <= i and (j < 3 or i - j <= (i - 3) % 2)
    degree=i + 1 if i < 3 else 4 + (i - 3) % 2; layers=1 if n < 2 else None; nodes=3 + 2 * n; sizes=(0, 1, 2,
    7)
media_cross(n, range(1, n, 3), 3): i >= 1 and j // 3 == (i - 1) // 3
    degree=3 * (i >= 1); layers=once(n); nodes=(n, 3 * len(range(1, n, 3))); causal=False
"""
