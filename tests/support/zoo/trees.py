"""Theorems of ``patterns.trees``."""

import math
from itertools import accumulate, chain


def parents(n: int) -> list[int]:
    """Return the parents in a forest of binary trees: 0 and 1 are roots, the parent of i is i // 2 - 1."""
    return [-1 if i < 2 else i // 2 - 1 for i in range(n)]


def depth(i: int) -> int:
    """Return the depth of a token in that forest: 0 for the tokens 0 and 1, 1 for 2 to 5, 2 for 6 to 13."""
    return math.floor(math.log2(i + 2)) - 1


def ancestors(n: int, i: int) -> list[int]:
    """Return the path from i to its root, which begins with i."""
    path = [i]
    while parents(n)[path[-1]] >= 0:
        path.append(parents(n)[path[-1]])
    return path


def decoding_senders(n: int, i: int) -> list[int]:
    """Return the tokens up to i on its path, in a prompt of ``n // 2`` tokens with such a forest below it."""
    prompt = n // 2
    return (
        [*range(prompt), *(prompt + token for token in ancestors(n, i - prompt))]
        if i >= prompt
        else [*range(i + 1)]
    )


# Segment 0 is a prompt, 1 and 2 are answers to it, and 3 and 4 continue them.
PATHS = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 2, 4]}


def segments(n: int) -> list[range]:
    sizes = [n // 4, n // 4, 0, n // 4, n - 3 * (n // 4)]
    return [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def segment(n: int, i: int) -> int:
    return next(k for k, tokens in enumerate(segments(n)) if i in tokens)


def conversation_senders(n: int, i: int) -> list[int]:
    """Return the sequence that ends with the segment of token i, cut off after i."""
    sequence = list(chain.from_iterable(segments(n)[k] for k in PATHS[segment(n, i)]))
    return sequence[: sequence.index(i) + 1]


DOCUMENTS: dict[int, list[list[int]]] = {
    0: [],
    1: [[]],
    2: [[2], [1, 0]],
    5: [[1], [2, 0]],
    17: [[3, 0, 2], [], [1, 4], [2]],
}


def anchor_groups(n: int) -> list[list[int]]:
    """Return groups, each an anchor with the next smaller anchors or words; a token attends to its groups."""
    token = iter(range(num_tokens(n)))
    groups = [[next(token)]]
    for section in DOCUMENTS[n]:
        inner = [next(token)]
        groups[0].append(inner[0])
        groups.append(inner)
        for words in section:
            sentence = [next(token) for _ in range(1 + words)]
            inner.append(sentence[0])
            groups.append(sentence)
    return groups


def num_tokens(n: int) -> int:
    return 1 + sum(1 + len(section) + sum(section) for section in DOCUMENTS[n])


ROWS = """
tree(parents(n)): j in ancestors(n, i)
    degree=depth(i) + 1; layers=never(n)
tree(parents(n), causal=False): j in ancestors(n, i) or i in ancestors(n, j)
    layers=never(n); symmetric=True
tree_decoding(n // 2, parents(n - n // 2)): j in decoding_senders(n, i)
    degree=i + 1 if i < n // 2 else n // 2 + depth(i - n // 2) + 1; layers=once(n) if n <= 2 else None
prefix_tree([len(tokens) for tokens in segments(n)], [-1, 0, 0, 1, 2]): j in conversation_senders(n, i)
    degree=i + 1 if i < 3 * (n // 4) else i + 1 - 2 * (n // 4); layers=once(n) if n < 4 else None
family(parents(n)): j in (i, i ^ 1, 2 * i + 2, 2 * i + 3) or (i > 1 and j == i // 2 - 1)
    degree=1 + (i ^ 1 < n) + (i > 1) + (2 * i + 2 < n) + (2 * i + 3 < n); layers={0: 0, 1: 0, 2: 1, 17: 3 + 1
    + 2}[n]; symmetric=True
hierarchical_document(DOCUMENTS[n]): any(i in circle and j in circle for circle in anchor_groups(n))
    layers={0: 0, 1: 1, 2: 5, 17: 5}[n]; nodes=num_tokens(n); symmetric=True
"""
