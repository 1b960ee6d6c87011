"""The vocabulary against theory worked by hand, against a learner that counts anew each time, and its round trips."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention.model.tokenizer import BytePair

# The words of the paper's example. Each ends a line, and a line's end joins nothing, so the counts are the paper's.
PAPER = "low\n" * 5 + "lower\n" * 2 + "newest\n" * 6 + "widest\n" * 3

# By hand, as count and pair; of equal counts the smaller pair comes first.
PAPER_MERGES = (
    (b"e", b"s"),  # 9, newest and widest; (s, t) has 9 too
    (b"es", b"t"),  # 9
    (b"l", b"o"),  # 7, low and lower; (o, w) has 7 too; w e has lost newest to w es and is down from 8 to 2
    (b"lo", b"w"),  # 7
    (b"e", b"w"),  # 6, newest; (n, e) and (w, est) too
    (b"ew", b"est"),  # 6; (n, ew) too
    (b"n", b"ewest"),  # 6
    (b"d", b"est"),  # 3, widest; (i, d) and (w, i) too
    (b"i", b"dest"),  # 3; (w, i) too
    (b"w", b"idest"),  # 3
    (b"e", b"r"),  # 2, lower; (low, e) too
    (b"low", b"er"),  # 2
)

fixed = settings(derandomize=True, deadline=None, max_examples=60)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
small_texts = st.text("ab \n", max_size=80)  # few letters: many repeats, ties and overlaps
MIXED = BytePair.learn("def größe(self):\n        return '→ 東京 12'\n" * 3 + PAPER, 330)


def join(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    if len(word) < 2:
        return word
    if word[:2] == pair:
        return (word[0] + word[1], *join(word[2:], pair))
    return (word[0], *join(word[1:], pair))


def learn_slowly(words: list[str], size: int) -> tuple[tuple[bytes, bytes], ...]:
    """The paper's algorithm 1 as it stands: every pair of every word is counted anew before each merge."""
    split = [tuple(bytes([value]) for value in word.encode()) for word in words]
    merges: list[tuple[bytes, bytes]] = []
    while 256 + len(merges) < size:
        counts = Counter(pair for word in split for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if pair is None or counts[pair] < 2:
            break
        merges.append(pair)
        split = [join(word, pair) for word in split]
    return tuple(merges)


def test_learns_the_paper_s_example_as_worked_by_hand() -> None:
    assert BytePair.learn(PAPER, 1000).merges == PAPER_MERGES


@pytest.mark.parametrize("count", range(len(PAPER_MERGES) + 1))
def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one(count: int) -> None:
    vocabulary = BytePair.learn(PAPER, 256 + count)
    assert vocabulary.merges == PAPER_MERGES[:count]
    assert len(vocabulary) == 256 + count


def test_an_unseen_word_takes_the_pieces_it_shares() -> None:
    vocabulary = BytePair.learn(PAPER, 1000)
    # The paper's own point: "lowest" was never seen.
    assert vocabulary.pieces("lowest") == ["low", "est"]
    assert vocabulary.encode("lowest") == [256 + 3, 256 + 1]
    assert vocabulary.encode("A") == [65]


@given(st.lists(st.text("abc", min_size=1, max_size=12), max_size=12), st.integers(256, 290))
@fixed
def test_learn_agrees_with_counting_anew(words: list[str], size: int) -> None:
    assert BytePair.learn("\n".join(words), size).merges == learn_slowly(words, size)


@given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=8), st.text("ab", max_size=12))
@fixed
def test_encode_replays_the_merges_in_order(words: list[str], word: str) -> None:
    vocabulary = BytePair.learn("\n".join(words), 300)
    parts = tuple(bytes([value]) for value in word.encode())
    for pair in vocabulary.merges:
        parts = join(parts, pair)
    assert [vocabulary.vocabulary[token] for token in vocabulary.encode(word)] == list(parts)


@given(texts)
@fixed
def test_every_text_comes_back(text: str) -> None:
    assert BytePair().decode(BytePair().encode(text)) == text
    assert MIXED.decode(MIXED.encode(text)) == text


@given(texts, st.integers(256, 320))
@fixed
def test_a_text_comes_back_from_its_own_vocabulary(text: str, size: int) -> None:
    vocabulary = BytePair.learn(text * 2, size)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert len(vocabulary) <= size
    assert all(0 <= token < len(vocabulary) for token in tokens)


@given(small_texts, st.integers(256, 400))
@fixed
def test_every_merge_makes_a_new_piece(text: str, size: int) -> None:
    vocabulary = BytePair.learn(text, size)
    assert len(set(vocabulary.vocabulary)) == len(vocabulary)


@given(small_texts)
@fixed
def test_learning_twice_gives_the_same(text: str) -> None:
    assert BytePair.learn(text, 280) == BytePair.learn(text, 280)


def test_the_order_of_the_words_does_not_matter() -> None:
    lines = PAPER.splitlines()
    random.Random(0).shuffle(lines)
    assert BytePair.learn("\n".join(lines), 1000).merges == PAPER_MERGES


@given(small_texts, texts)
@fixed
def test_json_and_pickle_give_an_equal_vocabulary(learned: str, text: str) -> None:
    vocabulary = BytePair.learn(learned + text * 2, 300)
    tokens = vocabulary.encode(text)  # fills the caches, which must not travel
    for other in (
        BytePair.from_json(vocabulary.to_json()),
        pickle.loads(pickle.dumps(vocabulary)),
        copy.deepcopy(vocabulary),
    ):
        assert other == vocabulary
        assert other.encode(text) == tokens


def test_use_changes_neither_pickle_nor_equality() -> None:
    fresh, used = BytePair(PAPER_MERGES), BytePair(PAPER_MERGES)
    used.encode(PAPER)
    assert pickle.dumps(used) == pickle.dumps(fresh)
    assert used == fresh != BytePair()


def test_merges_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError, match="merges"):
        MIXED.merges = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("low lower", ["low", " lower"]),
        ("        return x", ["       ", " return", " x"]),  # the word takes the last space of its indentation
        ("\n\n    \n", ["\n", "\n", "    ", "\n"]),
        ("\tif a  == b:", ["\t", "if", " a", " ", " ==", " b", ":"]),
        ("self.__init__()", ["self", ".__", "init", "__()"]),
        ("x = 31415", ["x", " =", " ", "31", "41", "5"]),
        ("a\r\nb", ["a", "\r", "\n", "b"]),
        ("größer 東京", ["größer", " 東京"]),
        ("#" * 9, ["####", "####", "#"]),
        ("y" * 40, ["y" * 32, "y" * 8]),
    ],
)
def test_no_piece_is_longer_than_a_word(text: str, words: list[str]) -> None:
    # Learned from many copies, a vocabulary holds every word whole and nothing beyond it.
    vocabulary = BytePair.learn((text + "\n") * 50, 2000)
    found = [vocabulary.vocabulary[token].decode() for token in vocabulary.encode(text)]
    assert found == words


def test_a_text_that_is_one_long_run_takes_linear_time() -> None:
    # Joined pair by pair as one word, this would take hours.
    for character in ("a", " ", "\t", "_", "1", "é"):
        text = character * 100_000
        assert MIXED.decode(MIXED.encode(text)) == text


def test_a_cut_character_is_replaced() -> None:
    tokens = BytePair().encode("né")
    assert BytePair().decode(tokens[:-1]) == "n\N{REPLACEMENT CHARACTER}"
    assert BytePair().decode([]) == ""


def test_pieces_are_labels_for_a_reader() -> None:
    assert BytePair().pieces("é \n\x00") == ["\\xc3", "\\xa9", " ", "\\n", "\\x00"]
    assert BytePair(((b"\xc3", b"\xa9"),)).pieces("é") == ["é"]
    assert MIXED.pieces(MIXED.encode(PAPER)) == MIXED.pieces(PAPER)


@given(texts)
@fixed
def test_each_token_has_one_printable_piece(text: str) -> None:
    pieces = MIXED.pieces(text)
    assert len(pieces) == len(MIXED.encode(text))
    assert all(piece.isprintable() for piece in pieces)


def test_repr_says_how_many_pieces() -> None:
    assert repr(BytePair(PAPER_MERGES)) == "BytePair(268 pieces)"


@pytest.mark.parametrize(
    ("merges", "error", "match"),
    [
        ([(b"a", b"bc")], ValueError, r"merges\[0\] joins b'bc': expected a byte or what an earlier merge makes"),
        ([(b"a", b"")], ValueError, r"merges\[0\] joins b''"),
        ([(b"a", b"b"), (b"a", b"b")], ValueError, r"merges\[1\] makes b'ab' a second time"),
        ([(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")], ValueError, r"merges\[3\] makes b'abc' a second"),
        ([(b"a", b"b"), b"ab"], TypeError, r"merges\[1\] is b'ab': expected a pair of bytes"),
        ([("a", "b")], TypeError, r"merges\[0\] is \('a', 'b'\): expected a pair of bytes"),
    ],
)
def test_merges_that_make_no_vocabulary(merges: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        BytePair(merges)


@pytest.mark.parametrize(
    ("text", "size", "error", "match"),
    [
        ("a", 255, ValueError, "size is 255: expected at least 256"),
        ("a", 256.0, TypeError, "size is a float: expected an int"),
        ("a", True, TypeError, "size is a bool: expected an int"),
        (b"a", 300, TypeError, "text is a bytes: expected a str"),
        ("ab\ud800", 300, ValueError, r"text\[2\] is '\\ud800', a lone surrogate"),
    ],
)
def test_wrong_input_of_learn(text: Any, size: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        BytePair.learn(text, size)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([0, 268], IndexError, r"ids\[1\] is 268: expected a token from 0 to 267"),
        ([-1], IndexError, r"ids\[0\] is -1: expected a token from 0 to 267"),
        ([1.0], TypeError, "ids is a list: expected an iterable of integers"),
        ("low", TypeError, "ids is a str: expected an iterable of integers"),
        (7, TypeError, "ids is a int: expected an iterable of integers"),
    ],
)
def test_wrong_input_of_decode(ids: Any, error: type[Exception], match: str) -> None:
    vocabulary = BytePair(PAPER_MERGES)
    with pytest.raises(error, match=match):
        vocabulary.decode(ids)
    assert vocabulary.decode([259]) == "low"


def test_wrong_input_of_encode() -> None:
    with pytest.raises(ValueError, match=r"text\[1\] is '\\udfff', a lone surrogate"):
        MIXED.encode("a\udfff")
    with pytest.raises(TypeError, match="text is a list: expected a str"):
        MIXED.encode([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no byte-pair vocabulary: Expecting value"),
        ("[" * 100_000, "no byte-pair vocabulary: .*recursion"),
        ("[]", "it is a list, expected a JSON object"),
        ('{"kind": "words", "merges": []}', 'expected a JSON object with "kind": "byte pairs"'),
        ('{"kind": "byte pairs"}', r"it has the keys \['kind'\]: expected"),
        ('{"kind": "byte pairs", "merges": [], "size": 3}', "it has the keys .*'size'"),
        ('{"kind": "byte pairs", "merges": {}}', "merges is a dict: expected a list of pairs"),
        ('{"kind": "byte pairs", "merges": ["ab"]}', r"merges\[0\] is 'ab': expected a list of two strings"),
        ('{"kind": "byte pairs", "merges": [["a"]]}', r"merges\[0\] is \['a'\]: expected a list of two strings"),
        ('{"kind": "byte pairs", "merges": [["a", 1]]}', r"merges\[0\] is \['a', 1\]: expected a list of two strings"),
        ('{"kind": "byte pairs", "merges": [["a", "→"]]}', r"merges\[0\] is .*: expected characters up to U\+00FF"),
        ('{"kind": "byte pairs", "merges": [["a", "bc"]]}', r"merges\[0\] joins b'bc'"),
    ],
)
def test_malformed_json_is_named(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        BytePair.from_json(text)


def test_json_from_what_is_no_text() -> None:
    with pytest.raises(TypeError, match="text is a bytes: expected a str"):
        BytePair.from_json(b"{}")  # type: ignore[arg-type]


def test_mutated_json_is_refused_or_read() -> None:
    dice, valid, refusals = random.Random(0), MIXED.to_json(), []
    for _ in range(300):
        place = dice.randrange(len(valid))
        text = valid[:place] + dice.choice(["", '"', "[", "]", ",", "7", "é", "\\"]) + valid[place + dice.randrange(3) :]
        try:
            found = BytePair.from_json(text)
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert BytePair.from_json(found.to_json()) == found
    assert 0 < len(refusals) < 300
    assert all("no byte-pair vocabulary" in refusal for refusal in refusals)


def test_json_is_plain() -> None:
    found = json.loads(MIXED.to_json())
    assert set(found) == {"kind", "merges"}
    assert MIXED.to_json().isascii()
