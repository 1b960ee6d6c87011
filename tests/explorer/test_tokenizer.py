"""The page's tokenizer equals Python's, for random texts and for every character."""

from __future__ import annotations

import base64
import random
import sys
import unicodedata
from collections.abc import Callable

import pytest
from support.explorer_engine import ask
from support.extras import needs

from gnn_attention import explorer
from gnn_attention import model as lm

pytestmark = pytest.mark.slow  # node is started

VOCABULARY = lm.load_trained()[1]
# Other characters are left out, because a newer Unicode may make letters of them.
ASSIGNED = [
    chr(code) for code in range(sys.maxunicode) if unicodedata.category(chr(code)) not in ("Cn", "Cs")
]
SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000"


def texts(count: int, seed: int = 0) -> list[str]:
    """Draw texts of any characters, of characters where words and runs end, or of vocabulary pieces."""
    draw = random.Random(seed)
    pieces = [piece.decode("utf-8", errors="ignore") for piece in VOCABULARY.vocabulary]

    kinds: list[Callable[[], str]] = [
        lambda: "".join(draw.choices(ASSIGNED, k=draw.randrange(30))),
        lambda: "".join(draw.choices(SPACES + "    ab1٣½Ⅷ.(_\u0301é中😀\u200d", k=draw.randrange(60))),
        lambda: "".join(draw.choices(pieces, k=draw.randrange(40))),
    ]
    return [draw.choice(kinds)() for _ in range(count)]


def test_the_tokens_of_random_texts() -> None:
    needs("tokenizers")
    random_texts = ["", *texts(2_000)]
    expected = [VOCABULARY.encode(text) for text in random_texts]
    questions = [{"ask": "encode", "texts": random_texts}, {"ask": "decode", "lists": expected}]
    encoded, decoded, surrogate, cut = ask(
        explorer.page("a"),
        [*questions, {"ask": "encode", "texts": ["a\ud83d"]}, {"ask": "decode", "lists": [[0xE4]]}],
    )
    assert encoded["said"] == expected
    assert decoded["said"] == random_texts
    assert surrogate["error"] == "RangeError: character 1 is half a character (a lone surrogate)"
    assert cut["said"] == [VOCABULARY.decode([0xE4])]


def test_letters_digits_and_spaces_have_the_same_classes() -> None:
    """A letter is one word with the "a" before it, a digit with a "1", and a space with a tab."""
    needs("tokenizers")
    split = VOCABULARY._tokenizer.pre_tokenizer.pre_tokenize_str
    (answer,) = ask(explorer.page("a"), [{"ask": "classes"}])
    classes = base64.b64decode(answer["said"])
    for kind, first in enumerate("a1\t", start=1):
        same_kind = set()
        for start in range(0, len(ASSIGNED), 20_000):
            chars = ASSIGNED[start : start + 20_000]
            ends = {end for _, (_, end) in split("".join(f"{first}{char}\n" for char in chars))}
            same_kind |= {char for index, char in enumerate(chars) if 3 * index + 1 not in ends}
        assert same_kind == {char for char in ASSIGNED if classes[ord(char)] == kind} - {"\n"}
