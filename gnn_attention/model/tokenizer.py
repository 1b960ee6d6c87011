"""Byte-pair encoding: an ordered list of merges over UTF-8 bytes, run by the package ``tokenizers``.

All 256 bytes are pieces, so that no text is unknown and every text comes back exactly. Only encoding and
learning need ``tokenizers``, not decoding. Source: Sennrich, Haddow and Birch 2016, arXiv 1508.07909.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, SupportsIndex

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.text import one_line

Pair = tuple[bytes, bytes]

_BYTES = tuple(bytes([value]) for value in range(256))

# tokenizers writes a byte as a character: itself where it is printable in Latin-1, else the next from U+0100
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = enumerate(value for value in range(256) if value not in _PRINTABLE)
_CHAR_OF = {value: chr(value) for value in _PRINTABLE} | {value: chr(256 + i) for i, value in _OTHERS}
_BYTE_OF = {char: value for value, char in _CHAR_OF.items()}

# no merge crosses a word, and no word is long: a text that is one run of letters takes linear time too
_LETTER, _SPACE = r"\p{L}\p{Nl}\p{No}", r"\x09-\x0d\x1c-\x20\x{85}\p{Z}"
_WORDS = (
    rf" ?[{_LETTER}]{{1,32}}",  # letters, with the space before them
    rf" ?[^{_LETTER}\p{{Nd}}{_SPACE}]{{1,4}}",  # punctuation, likewise
    r"\p{Nd}{1,2}",  # digits
    r"\n",  # the end of a line
    rf" {{1,32}}(?= [^{_SPACE}\p{{Nd}}])",  # an indentation, less the space that the next word takes
    rf"[{_SPACE}&&[^\n]]{{1,32}}",  # other white space
)
_SPLIT = {"type": "Split", "pattern": {"Regex": "|".join(_WORDS)}, "behavior": "Isolated", "invert": False}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_PRE_TOKENIZER = {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTE_LEVEL]}
# no piece crosses a line, and a text is cut there: tokenizers takes 200 bytes for each character at a time
_LINES = re.compile(r"(?:[^\n]*+\n){1,200}|[^\n]+")


@dataclass(frozen=True, repr=False)
class BytePair:
    r"""A byte-pair vocabulary: the 256 bytes, then one piece for each merge, in the order of learning.

    `len` is the number of pieces; token `256 + i` is made by `merges[i]`, which joins two earlier pieces to a
    new one, else ValueError.

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
        checks.check_order("merges", self.merges)
        known = set(_BYTES)
        for index, (left, right) in enumerate(self.merges):
            if not {left, right} <= known or left + right in known:
                expected = "two pieces of bytes, each made before, that make a new one"
                raise ValueError(f"merges[{index}] is {quote((left, right))}: expected {expected}")
            known.add(left + right)
        object.__setattr__(self, "merges", tuple((left, right) for left, right in self.merges))

    @classmethod
    def learn(cls, text: str, size: int) -> BytePair:
        r"""The vocabulary of at most `size` pieces that joins the text's most frequent pair, again and again.

        It ends early when no pair occurs twice; ties are broken as by ``tokenizers``. Raises TypeError and
        ValueError for a `text` that is no encodable str or a `size` below 256.
        """
        size = checks.size("size", size, len(_BYTES))
        library, untrained = _library(), BytePair()._tokenizer
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": size, "min_frequency": 2, "show_progress": False}
        trainer = library.trainers.BpeTrainer(initial_alphabet=alphabet, **options)
        untrained.train_from_iterator(_lines(text), trainer)
        return cls(_pairs(json.loads(untrained.to_str())["model"]["merges"]))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The pieces as bytes, at their token's place."""
        return _BYTES + tuple(left + right for left, right in self.merges)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`: in each word the merges are made in the order of learning.

        Raises TypeError if `text` is no str, ValueError if it holds a lone surrogate, which UTF-8 cannot
        encode, and ImportError without ``tokenizers``.
        """
        return list(chain.from_iterable(self._tokenizer.encode(lines).ids for lines in _lines(text)))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of these tokens; where a character is cut it holds U+FFFD, the replacement character.

        Raises TypeError if `ids` are no integers and IndexError if one is not a token of this vocabulary.
        """
        return b"".join(self._bytes_of(ids)).decode("utf-8", errors="replace")

    def pieces(self, ids_or_text: str | Iterable[SupportsIndex]) -> list[str]:
        r"""Each token's piece as a label: what cannot be printed is escaped as in Python, `\xNN` or `\n`.

        Raises as `encode` for a text and as `decode` for tokens.
        """
        ids = self.encode(ids_or_text) if isinstance(ids_or_text, str) else ids_or_text
        texts = (piece.decode("utf-8", errors="backslashreplace") for piece in self._bytes_of(ids))
        return ["".join(char if char.isprintable() else ascii(char)[1:-1] for char in text) for text in texts]

    def to_json(self) -> str:
        """The vocabulary as JSON for :meth:`from_json` and tokenizers' ``Tokenizer.from_str``."""
        pieces = {_chars(piece): token for token, piece in enumerate(self.vocabulary)}
        merges = [[_chars(left), _chars(right)] for left, right in self.merges]
        model = {"type": "BPE", "vocab": pieces, "merges": merges}
        form = {"version": "1.0", "added_tokens": [], "decoder": _BYTE_LEVEL}
        whole = form | {"pre_tokenizer": _PRE_TOKENIZER, "model": model}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BytePair:
        """The vocabulary that `to_json` wrote; else TypeError or ValueError."""
        checks.instance("text", text, str)
        try:
            found = json.loads(text)
            made = cls(_pairs(found["model"]["merges"]))
            pieces = json.loads(made.to_json())["model"]["vocab"]
            if (found["pre_tokenizer"], found["model"]["vocab"]) != (_PRE_TOKENIZER, pieces):
                raise ValueError("it splits words or numbers pieces in another way than this package does")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"text is no vocabulary, expected what to_json wrote: {reason}") from error
        return made

    def __len__(self) -> int:
        return len(_BYTES) + len(self.merges)

    def __repr__(self) -> str:
        return f"BytePair({len(self)} pieces)"

    @cached_property
    def _tokenizer(self) -> Any:
        return _library().Tokenizer.from_str(self.to_json())

    def _bytes_of(self, ids: Iterable[SupportsIndex]) -> list[bytes]:
        tokens = checks.integers("ids", ids, kind="tokens")
        for place, token in enumerate(tokens):
            # a negative token would otherwise count from the end without an error
            if not 0 <= token < len(self):
                raise IndexError(f"ids[{place}] is {token}: expected a token from 0 to {len(self) - 1}")
        return [self.vocabulary[token] for token in tokens]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError('encode and learn need tokenizers: pip install "gnn_attention[model]"') from error
    return tokenizers


def _lines(text: str) -> list[str]:
    # a lone surrogate raises a UnicodeEncodeError, which names its place
    checks.instance("text", text, str).encode()
    return [lines.group() for lines in _LINES.finditer(text)]


def _chars(piece: bytes) -> str:
    return "".join(map(_CHAR_OF.__getitem__, piece))


def _pairs(merges: Iterable[Iterable[str]]) -> Any:
    return tuple(tuple(bytes(_BYTE_OF[char] for char in piece) for piece in pair) for pair in merges)
