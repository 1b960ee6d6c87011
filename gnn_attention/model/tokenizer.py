"""A vocabulary is an ordered list of merges: start from single bytes and join the most frequent pair, again and again.

Byte-pair encoding of Sennrich, Haddow and Birch (2016, arXiv 1508.07909), over utf-8 bytes instead of characters: all
256 bytes are pieces from the start, so no text is unknown and every text comes back exactly.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from typing import Any, SupportsIndex

from gnn_attention._support import json_files
from gnn_attention._support.checks import quoted

__all__ = ["BytePair"]

Pair = tuple[bytes, bytes]

_BYTES = tuple(bytes([value]) for value in range(256))

# No merge crosses a word, and no word is long: so a word's spelling can be cached, and encoding takes linear time even
# for a text that is one run of letters. Each character is a letter, digit or underscore (\w), white (\s), or neither.
_WORD = re.compile(
    r"""
      [ ]? [^\W\d_]{1,32}           # letters, with the space before them
    | [ ]? (?: [^\w\s] | _ ){1,4}   # punctuation, likewise
    | \d{1,2}                       # digits
    | \n                            # the end of a line
    | [ ]{1,32} (?= [ ][^\s\d] )    # an indentation, less the space that the next word takes
    | [^\S\n]{1,32}                 # other white space
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, repr=False)
class BytePair:
    r"""A byte-pair vocabulary: the 256 bytes, then one piece for each merge, in the order in which they were learned.

    `len` is the number of pieces; token `256 + i` is what `merges[i]` makes. A piece has one spelling: a merge joins
    two pieces that exist before it and makes a new one, else ValueError (TypeError where a merge is no pair of bytes).

    Source: Sennrich et al. 2016, arXiv 1508.07909, section 3.2, on bytes and without the end-of-word mark: a word
    carries the space before it instead.

    >>> vocabulary = BytePair.learn("low low low lower lowest", size=260)
    >>> vocabulary
    BytePair(260 pieces)
    >>> vocabulary.pieces("lower slow\n")
    ['low', 'e', 'r', ' ', 's', 'low', '\\n']
    >>> vocabulary.decode(vocabulary.encode("any text, größer too"))
    'any text, größer too'
    """

    merges: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        merges = tuple(_checked_pair(index, pair) for index, pair in enumerate(self.merges))
        known = set(_BYTES)
        for index, (left, right) in enumerate(merges):
            for part in (left, right):
                if part not in known:
                    raise ValueError(f"merges[{index}] joins {quoted(part)}: expected a byte or what an earlier merge makes")
            if left + right in known:
                raise ValueError(f"merges[{index}] makes {quoted(left + right)} a second time: expected a new piece")
            known.add(left + right)
        object.__setattr__(self, "merges", merges)

    @classmethod
    def learn(cls, text: str, size: int) -> BytePair:
        r"""The vocabulary of at most `size` pieces that joins, again and again, the most frequent pair of the text.

        Of equally frequent pairs the smaller one, compared as bytes, comes first. Learning ends early when no pair
        occurs twice. Raises TypeError and ValueError for a `text` that is no encodable str or a `size` below 256.

        Source: Sennrich et al. 2016, arXiv 1508.07909, algorithm 1, with counts kept instead of taken anew.

        >>> BytePair.learn("newest\nnewest\nwidest\n", size=258).merges
        ((b'e', b's'), (b'es', b't'))
        """
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size is a {type(size).__name__}: expected an int, the number of pieces")
        if size < len(_BYTES):
            raise ValueError(f"size is {size}: expected at least 256, the single bytes")
        table = _PairTable(Counter(_words(text)))
        merges: list[Pair] = []
        while len(_BYTES) + len(merges) < size and (pair := table.most_frequent()):
            table.merge(pair)
            merges.append(pair)
        return cls(tuple(merges))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The pieces as bytes, at their token's place.

        >>> BytePair(((b"a", b"b"),)).vocabulary[254:]
        (b'\\xfe', b'\\xff', b'ab')
        """
        return _BYTES + tuple(left + right for left, right in self.merges)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`: in each word the merges are made in the order in which they were learned.

        Raises TypeError if `text` is no str and ValueError if it holds a lone surrogate, which utf-8 cannot encode.

        >>> BytePair(((b"a", b"b"), (b"ab", b"c"))).encode("abcab")
        [257, 256]
        """
        return list(chain.from_iterable(map(self._spell, _words(text))))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of these tokens; where a character is cut it holds U+FFFD, the replacement character.

        Raises TypeError if `ids` are no integers and IndexError if one is not a token of this vocabulary.

        >>> BytePair().decode([104, 105, 32, 0xC3, 0xA9])
        'hi é'
        """
        return b"".join(self._look_up(ids)).decode("utf-8", errors="replace")

    def pieces(self, ids_or_text: str | Iterable[SupportsIndex]) -> list[str]:
        r"""Each token's piece as a label to read: what cannot be printed is an escape, as in a Python literal.

        A byte that is no utf-8 by itself is `\xNN`, the end of a line `\n`; a space stays a space. Raises as `encode`
        for a text and as `decode` for tokens.

        >>> print(*BytePair().pieces("é\n"))
        \xc3 \xa9 \n
        """
        ids = self.encode(ids_or_text) if isinstance(ids_or_text, str) else ids_or_text
        return [_label(piece) for piece in self._look_up(ids)]

    def to_json(self) -> str:
        """The vocabulary as JSON text, for `from_json`: a byte is the character of its number.

        >>> BytePair(((b"a", b"b"), (b"ab", b"c"))).to_json()
        '{"kind": "byte pairs", "merges": [["a", "b"], ["ab", "c"]]}'
        """
        merges = [[part.decode("latin-1") for part in pair] for pair in self.merges]
        return json.dumps({"kind": "byte pairs", "merges": merges})

    @classmethod
    def from_json(cls, text: str) -> BytePair:
        """The vocabulary that `to_json` wrote.

        Raises TypeError if `text` is no str and ValueError, which says what is wrong, if it is no such JSON.

        >>> BytePair.from_json('{"kind": "byte pairs", "merges": [["a", "b"]]}').merges
        ((b'a', b'b'),)
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}: expected a str, what to_json() returned")
        try:
            return cls(tuple(_pair_of_json(index, item) for index, item in enumerate(_merges_of_json(text))))
        except ValueError as error:
            raise ValueError(f"text is no byte-pair vocabulary: {error}") from error

    def __len__(self) -> int:
        return len(_BYTES) + len(self.merges)

    def __repr__(self) -> str:
        return f"BytePair({len(self)} pieces)"

    def __reduce__(self) -> tuple[type[BytePair], tuple[tuple[Pair, ...]]]:
        # The merges are the whole state: caches neither travel nor grow a pickle.
        return type(self), (self.merges,)

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.vocabulary)}

    @cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {pair: rank for rank, pair in enumerate(self.merges)}

    @cached_property
    def _spell(self) -> Callable[[str], tuple[int, ...]]:
        # One bounded cache for each vocabulary: most words of a text are words it has had before.
        return lru_cache(maxsize=1 << 16)(self._spell_anew)

    def _spell_anew(self, word: str) -> tuple[int, ...]:
        parts = _split(word)
        last = len(self.merges)
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda pair: self._ranks.get(pair, last))
            if pair not in self._ranks:
                break
            parts = _join(parts, pair)
        return tuple(self._tokens[part] for part in parts)

    def _look_up(self, ids: Iterable[SupportsIndex]) -> Iterator[bytes]:
        for place, token in enumerate(_integers(ids)):
            # A negative token would otherwise count from the end in silence.
            if not 0 <= token < len(self):
                raise IndexError(f"ids[{place}] is {token}: expected a token from 0 to {len(self) - 1}")
            yield self.vocabulary[token]


class _PairTable:
    """How often each pair stands in the words, kept up to date while pairs are joined."""

    def __init__(self, frequency: Counter[str]) -> None:
        self.words = [_split(word) for word in frequency]
        self.frequency = list(frequency.values())
        self.counts: defaultdict[Pair, int] = defaultdict(int)
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self._count(index, self.frequency[index])
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapify(self.heap)

    def most_frequent(self) -> Pair | None:
        # Each change pushes an entry, so an entry that disagrees with the counts is an old one.
        while self.heap:
            count, pair = heappop(self.heap)
            if -count == self.counts.get(pair):
                return pair if -count > 1 else None
        return None

    def merge(self, pair: Pair) -> None:
        changed: set[Pair] = set()
        for index in self.where.pop(pair):
            # A word that has lost the pair to another merge is joined to itself: nothing changes.
            changed.update(self._count(index, -self.frequency[index]))
            self.words[index] = _join(self.words[index], pair)
            changed.update(self._count(index, self.frequency[index]))
        for other in changed:
            heappush(self.heap, (-self.counts[other], other))

    def _count(self, index: int, times: int) -> Iterable[Pair]:
        pairs = list(pairwise(self.words[index]))
        for pair in pairs:
            self.counts[pair] += times
            self.where[pair].add(index)
        return pairs


def _words(text: str) -> Iterator[str]:
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}: expected a str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(f"text[{error.start}] is {found!r}, a lone surrogate: expected what utf-8 can encode") from error
    return (match.group() for match in _WORD.finditer(text))


def _split(word: str) -> list[bytes]:
    return [_BYTES[value] for value in word.encode("utf-8")]


def _join(parts: list[bytes], pair: Pair) -> list[bytes]:
    left, right = pair
    joined: list[bytes] = []
    place, last = 0, len(parts) - 1
    while place <= last:
        if parts[place] == left and place < last and parts[place + 1] == right:
            joined.append(left + right)
            place += 2
        else:
            joined.append(parts[place])
            place += 1
    return joined


def _label(piece: bytes) -> str:
    text = piece.decode("utf-8", errors="backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _integers(ids: Iterable[SupportsIndex]) -> Iterator[int]:
    try:
        yield from map(operator.index, ids)
    except TypeError as error:
        raise TypeError(f"ids is a {type(ids).__name__}: expected an iterable of integers, the tokens") from error


def _checked_pair(index: int, pair: Any) -> Pair:
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, bytes) for part in pair):
        return pair[0], pair[1]
    raise TypeError(f"merges[{index}] is {quoted(pair)}: expected a pair of bytes")


def _merges_of_json(text: str) -> list[Any]:
    found = json_files.parsed(text)
    if found.get("kind") != "byte pairs":
        raise ValueError('expected a JSON object with "kind": "byte pairs"')
    if set(found) != {"kind", "merges"}:
        raise ValueError(f'it has the keys {quoted(sorted(found))}: expected "kind" and "merges"')
    if not isinstance(found["merges"], list):
        raise ValueError(f"merges is a {type(found['merges']).__name__}: expected a list of pairs")
    merges: list[Any] = found["merges"]
    return merges


def _pair_of_json(index: int, item: Any) -> Pair:
    if not isinstance(item, list) or len(item) != 2 or not all(isinstance(part, str) for part in item):
        raise ValueError(f"merges[{index}] is {quoted(item)}: expected a list of two strings")
    try:
        return item[0].encode("latin-1"), item[1].encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f"merges[{index}] is {quoted(item)}: expected characters up to U+00FF, one for each byte") from error
