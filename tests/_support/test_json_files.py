"""JSON of this package: read, or refused in one short sentence, in every reader of records."""

import pytest

from gnn_attention._support import json_files
from gnn_attention._support.text import printable

REFUSED = [
    ("", "Expecting value"),
    ("[]", "it is a list, expected a JSON object"),
    ("null", "it is a NoneType, expected a JSON object"),
    ("[" * 100_000, "it nests deeper"),
    ('{"a": ' + "1" * 100_000 + "}", "Exceeds the limit"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_one_short_sentence(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        json_files.read(tmp_path / "a.json")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nb\u2028c", "a b c"),
        ("\x00\x1b[2J\x7f\x9b", "  [2J  "),
        ("\ud83d!", "\ufffd!"),
        ("\ud83d\udc68", "\U0001f468"),
        ("\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c", "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c"),
        ("\u202e\u2066\u200b\u00ad\ufeff", "     "),
    ],
)
def test_texts_that_can_be_printed(text, shown):
    assert printable(text) == shown
    printable(text).encode()
