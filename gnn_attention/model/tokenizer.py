"""Byte-pair encoding: an ordered list of merges of UTF-8 bytes, applied by ``tokenizers``.

All 256 bytes are pieces, so every text can be encoded and is decoded exactly. Decoding does not
need ``tokenizers``. Source: Sennrich, Haddow and Birch 2016, arXiv 1508.07909.
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
from gnn_attention._support.text import one_line

Pair = tuple[bytes, bytes]

_BYTES = tuple(bytes([value]) for value in range(256))

# tokenizers writes printable bytes of Latin-1 as themselves, and others as characters from U+0100 on.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_UNPRINTABLE_BYTES = [value for value in range(256) if value not in _PRINTABLE_BYTES]
_BYTE_TO_CHAR = {value: chr(value) for value in _PRINTABLE_BYTES}
_BYTE_TO_CHAR |= {value: chr(256 + index) for index, value in enumerate(_UNPRINTABLE_BYTES)}
_CHAR_TO_BYTE = {char: value for value, char in _BYTE_TO_CHAR.items()}

# A merge stays inside a word, and words are short, so that a long run of letters takes linear time.
_LETTER = r"\p{L}\p{Nl}\p{No}"
_SPACE = r"\x09-\x0d\x1c-\x20\x{85}\p{Z}"
_WORDS = (
    rf" ?[{_LETTER}]{{1,32}}",  # letters, with the space before them
    rf" ?[^{_LETTER}\p{{Nd}}{_SPACE}]{{1,4}}",  # punctuation, with the space before it
    r"\p{Nd}{1,2}",  # digits
    r"\n",  # the end of a line
    rf" {{1,32}}(?= [^{_SPACE}\p{{Nd}}])",  # an indentation, without the next word's space
    rf"[{_SPACE}&&[^\n]]{{1,32}}",  # other white space
)
_SPLIT = {"type": "Split", "pattern": {"Regex": "|".join(_WORDS)}, "behavior": "Isolated", "invert": False}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_PRE_TOKENIZER = {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTE_LEVEL]}
# Text is encoded in groups of lines, since tokenizers needs 200 bytes of memory per character.
_LINE_GROUPS = re.compile(r"(?:[^\n]*+\n){1,200}|[^\n]+")


@dataclass(frozen=True, repr=False)
class BytePair:
    r"""A byte-pair vocabulary: the 256 bytes, then the piece of each merge, in learning order.

    `len` is the number of pieces. Token `256 + i` is the piece of `merges[i]`, which joins two
    earlier pieces into a new one; other merges raise ValueError.

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
        pieces = set(_BYTES)
        for index, (left, right) in enumerate(self.merges):
            if not {left, right} <= pieces or left + right in pieces:
                pair = checks.quote((left, right))
                raise ValueError(f"merges[{index}] must join two earlier pieces into a new one, got {pair}")
            pieces.add(left + right)
        object.__setattr__(self, "merges", tuple((left, right) for left, right in self.merges))

    @classmethod
    def learn(cls, text: str, size: int) -> BytePair:
        r"""Learn at most `size` pieces: repeatedly join the most frequent pair in the text.

        Learning ends early if no pair occurs twice; ``tokenizers`` breaks ties. TypeError or
        ValueError if `text` is not a str that UTF-8 can encode, or if `size` is below 256.
        """
        size = checks.size("size", size, len(_BYTES))
        tokenizers = _import_tokenizers()
        tokenizer = BytePair()._tokenizer
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": size, "min_frequency": 2, "show_progress": False}
        trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **options)
        tokenizer.train_from_iterator(_split_lines(text), trainer)
        return cls(_read_merges(json.loads(tokenizer.to_str())["model"]["merges"]))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The pieces as bytes, indexed by token."""
        return _BYTES + tuple(left + right for left, right in self.merges)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`: merges are applied in each word, in the order of learning.

        TypeError if `text` is not a str, ValueError if it has a lone surrogate, which UTF-8 cannot
        encode, and ImportError without ``tokenizers``.
        """
        return list(chain.from_iterable(self._tokenizer.encode(lines).ids for lines in _split_lines(text)))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of tokens, with U+FFFD in place of incomplete characters.

        TypeError if `ids` are not integers, IndexError if an id is not a token of this vocabulary.
        """
        return b"".join(self._to_bytes(ids)).decode("utf-8", errors="replace")

    def pieces(self, ids_or_text: str | Iterable[SupportsIndex]) -> list[str]:
        r"""Return the piece of each token, with unprintable characters escaped as in Python (`\n`).

        The errors are those of `encode` for text and of `decode` for tokens.
        """
        ids = self.encode(ids_or_text) if isinstance(ids_or_text, str) else ids_or_text
        texts = (piece.decode("utf-8", errors="backslashreplace") for piece in self._to_bytes(ids))
        return ["".join(char if char.isprintable() else ascii(char)[1:-1] for char in text) for text in texts]

    def to_json(self) -> str:
        """Return the vocabulary as JSON for :meth:`from_json` and ``tokenizers.Tokenizer.from_str``."""
        pieces = {_write_piece(piece): token for token, piece in enumerate(self.vocabulary)}
        merges = [[_write_piece(left), _write_piece(right)] for left, right in self.merges]
        model = {"type": "BPE", "vocab": pieces, "merges": merges}
        steps = {"decoder": _BYTE_LEVEL, "pre_tokenizer": _PRE_TOKENIZER, "model": model}
        tokenizer = {"version": "1.0", "added_tokens": [], **steps}
        return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BytePair:
        """Read a vocabulary that `to_json` wrote; TypeError or ValueError for any other text."""
        checks.instance("text", text, str)
        try:
            tokenizer = json.loads(text)
            vocabulary = cls(_read_merges(tokenizer["model"]["merges"]))
            pieces = json.loads(vocabulary.to_json())["model"]["vocab"]
            if (tokenizer["pre_tokenizer"], tokenizer["model"]["vocab"]) != (_PRE_TOKENIZER, pieces):
                raise ValueError("it does not split words and number pieces as this package does")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"text is not a vocabulary that to_json wrote: {reason}") from error
        return vocabulary

    def __len__(self) -> int:
        return len(_BYTES) + len(self.merges)

    def __repr__(self) -> str:
        return f"BytePair({len(self)} pieces)"

    @cached_property
    def _tokenizer(self) -> Any:
        return _import_tokenizers().Tokenizer.from_str(self.to_json())

    def _to_bytes(self, ids: Iterable[SupportsIndex]) -> list[bytes]:
        tokens = checks.integers("ids", ids, kind="tokens")
        for index, token in enumerate(tokens):
            # Without this check a negative token would count from the end.
            if not 0 <= token < len(self):
                raise IndexError(f"ids[{index}] is {token}: expected a token from 0 to {len(self) - 1}")
        return [self.vocabulary[token] for token in tokens]


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError('encode and learn need tokenizers: pip install "gnn_attention[model]"') from error
    return tokenizers


def _split_lines(text: str) -> list[str]:
    # encode() raises an error that names the position of a lone surrogate.
    checks.instance("text", text, str).encode()
    return [lines.group() for lines in _LINE_GROUPS.finditer(text)]


def _write_piece(piece: bytes) -> str:
    return "".join(_BYTE_TO_CHAR[value] for value in piece)


def _read_merges(merges: Iterable[Iterable[str]]) -> Any:
    return tuple(tuple(bytes(_CHAR_TO_BYTE[char] for char in piece) for piece in pair) for pair in merges)
