"""JSON of this package: read, or refused in one short sentence, in every reader of records."""

import json

import pytest

from gnn_attention._support import json_files
from gnn_attention._support.text import one_line, printable
from gnn_attention.verify.report import Report, Result

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


def test_a_file_that_is_not_there_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        json_files.read(tmp_path / "none.json")


RECORD = json.loads(
    Report((Result("attend", "dense", "float64", "causal", passed=True, output=0.5),), {"device": "CPU"}).to_json()
)
CHANGES = [
    ({"results": None}, "the record has null for 'results'"),
    ({"results": [3]}, r"results\[0\] is 3, expected an object"),
    ({"environment": []}, r"the record has \[\] for 'environment'"),
    ({"summary": []}, r"the record has \[\] for 'summary'"),
    ({"summary": {"not_started": "2"}}, "the record has .* for 'summary'"),
    ({"results": [{"group": "a"}]}, r"results\[0\] has no 'backend'"),
    ({"results": [RECORD["results"][0] | {"passed": 1}]}, r"results\[0\] has 1 for 'passed'"),
    ({"results": [RECORD["results"][0] | {"output": "0.5"}]}, r"results\[0\] has \"0.5\" for 'output'"),
    ({"results": [RECORD["results"][0] | {"output": 10**400}]}, r"results\[0\] has a large number for 'output'"),
    ({"results": [RECORD["results"][0] | {"skipped": ""}]}, r"results\[0\] has \"\" for 'skipped'"),
    ({"results": [RECORD["results"][0] | {"more": 1}]}, r"results\[0\] has a field 'more', which no result has"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=range(len(CHANGES)))
def test_a_record_of_verify_is_checked_field_by_field(change, message, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(json.dumps(RECORD | change))
    with pytest.raises(ValueError, match=rf"record\.json: expected a record that verify --json wrote; {message}"):
        Report.from_file(file)
    file.write_text(json.dumps(RECORD))
    assert Report.from_file(file).ok


def test_a_result_without_a_name_is_written_so_that_it_can_be_read():
    """Empty fields are left out of a record, but for those that every result has."""
    report = Report((Result("", "", "", "", passed=False),))
    assert Report.from_json(report.to_json()) == report


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


def test_lines_are_kept_where_they_are_wanted():
    assert printable("a\r\nb\x85c\n", line_ends=True) == "a\nb\nc\n"
    assert one_line("a\n\tb" + "x" * 500).startswith("a bxx")
    assert len(one_line("x" * 500)) == 400
