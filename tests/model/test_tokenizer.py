"""The vocabulary has the ids of version 0.1.0 and the merges of the theory, and restores every text."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import model as lm
from gnn_attention.model.tokenizer import BytePair

tokenizers = needs("tokenizers")

SENTENCE = "Llamas do not output words"
TOKENS = (76, 333, 109, 390, 568, 363, 868, 749, 308, 268, 636)

# These are the words of the paper's example. Each ends a line, and no pair crosses the end of a line, so the
# counts are those of the paper.
PAPER = "low\n" * 5 + "lower\n" * 2 + "newest\n" * 6 + "widest\n" * 3

# The pure Python code of version 0.1.0 computed these ids with the vocabulary that ships.
OLD_IDS = {
    SENTENCE: TOKENS,
    "def read(self, size=-1):\n    return self.buffer\n": (
        *(446, 778, 40, 275, 44, 297, 515, 61, 45, 49, 304, 10, 258, 326, 288, 46, 449, 798, 10),
    ),
}

fixed = settings(derandomize=True, deadline=None, max_examples=60)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MIXED = BytePair.learn("def größe(self):\n        return '→ 東京 12'\n" * 3 + PAPER, 330)


def join(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    if len(word) < 2:
        return word
    if word[:2] == pair:
        return (word[0] + word[1], *join(word[2:], pair))
    return (word[0], *join(word[1:], pair))


def test_the_shipped_vocabulary_gives_the_ids_of_version_0_1_0() -> None:
    _, vocabulary = lm.load_trained()
    for text, ids in OLD_IDS.items():
        assert tuple(vocabulary.encode(text)) == ids
        assert vocabulary.decode(ids) == text
    tokenizer = tokenizers.Tokenizer.from_str(lm.load_trained()[1].to_json())
    assert (tuple(tokenizer.encode(SENTENCE).ids), tokenizer.decode(TOKENS)) == (TOKENS, SENTENCE)


def test_every_merge_joins_a_most_frequent_pair() -> None:
    split = [tuple(bytes([value]) for value in word.encode()) for word in PAPER.splitlines()]
    vocabulary = BytePair.learn(PAPER, 1000)
    for pair in vocabulary.merges:
        counts = [pair for word in split for pair in pairwise(word)]
        assert counts.count(pair) == max(map(counts.count, counts)) >= 2
        split = [join(word, pair) for word in split]
    # Of equal counts either pair may come first, but after 12 merges (by hand) every word is one piece.
    assert {b"est", b"low", b"lower", b"newest", b"widest"} <= set(vocabulary.vocabulary)
    assert len(vocabulary) == 256 + 12
    assert all(len(word) == 1 for word in split)


@given(texts)
@fixed
def test_every_text_comes_back(text: str) -> None:
    for vocabulary in (BytePair(), MIXED, BytePair.learn(text * 2, 300)):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    pieces = MIXED.pieces(text)
    assert len(pieces) == len(MIXED.encode(text))
    assert all(piece.isprintable() for piece in pieces)


WORDS = [
    ["low", " lower"],
    # A word takes the last space of its indentation.
    ["       ", " return", " x"],
    ["\n", "\n", "    ", "\n"],
    ["\t", "if", " a", " ", " ==", " b", ":"],
    ["self", ".__", "init", "__()"],
    ["a", "\r", "\n", "b"],
    ["größer", " 東京"],
    ["y" * 32, "y" * 8],
]


@pytest.mark.parametrize("words", WORDS)
def test_no_piece_is_longer_than_a_word(words: list[str]) -> None:
    # A vocabulary that is learned from many copies has every word as one piece, and no longer piece.
    text = "".join(words)
    vocabulary = BytePair.learn((text + "\n") * 50, 2000)
    assert [vocabulary.vocabulary[token].decode() for token in vocabulary.encode(text)] == words


def test_json_pickle_and_copies_give_an_equal_vocabulary() -> None:
    tokens = MIXED.encode(PAPER)
    assert MIXED.vocabulary[255:257] == (b"\xff", b"".join(MIXED.merges[0]))
    copies = BytePair.from_json(MIXED.to_json()), pickle.loads(pickle.dumps(MIXED)), copy.deepcopy(MIXED)
    for vocabulary in copies:
        assert vocabulary == MIXED
        assert vocabulary.encode(PAPER) == tokens
    assert BytePair() != MIXED


def test_labels_and_cut_characters() -> None:
    tokens = BytePair().encode("né")
    assert BytePair().decode(tokens[:-1]) == "n\N{REPLACEMENT CHARACTER}"
    assert BytePair().pieces("é \n\x00") == ["\\xc3", "\\xa9", " ", "\\n", "\\x00"]
    assert repr(MIXED) == f"BytePair({len(MIXED)} pieces)"


REFUSED = [
    (lambda: BytePair([(b"a", b"bc")]), ValueError, r"merges\[0\] must join two .* \(b'a', b'bc'\)"),
    (lambda: BytePair([(b"a", b"b"), (b"a", b"b")]), ValueError, r"merges\[1\] .* into a new one"),
    (lambda: BytePair([(b"a", b"b"), b"ab"]), ValueError, r"merges\[1\] must join .* \(97, 98\)"),
    (lambda: BytePair.learn("a", 255), ValueError, "size must be at least 256, got 255"),
    (lambda: MIXED.encode("ab\ud800"), ValueError, r"'\\ud800' in position 2: surrogates not allowed"),
    (lambda: BytePair().decode([0, 256]), IndexError, r"ids\[1\] is 256: expected a token from 0 to 255"),
    (lambda: BytePair().decode([1.0]), TypeError, "each entry of ids must be an integer, got 1.0"),
]


def test_what_is_refused() -> None:
    assert_refusals(REFUSED)


TOKENIZER = json.loads(MIXED.to_json())

WRONG_TEXTS = [
    *("", "[]"),
    json.dumps(TOKENIZER | {"pre_tokenizer": {"type": "ByteLevel"}}),
    json.dumps(TOKENIZER | {"model": TOKENIZER["model"] | {"merges": [["a", "日"]]}}),
    json.dumps(TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": {}}}),
]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=range(len(WRONG_TEXTS)))
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text is not a vocabulary that to_json wrote") as error:
        BytePair.from_json(text)
    assert len(str(error.value)) < 300


def test_without_tokenizers_a_model_loads_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    _, vocabulary = lm.load_trained()
    assert vocabulary.decode(TOKENS) == SENTENCE
    with pytest.raises(ImportError, match=r'pip install "gnn_attention\[model\]"'):
        vocabulary.encode(SENTENCE)
