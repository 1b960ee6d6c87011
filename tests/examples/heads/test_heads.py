"""``python -m examples.heads`` prints sentences about heads in a table or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.heads.__main__ import main

CODE = "".join(
    f"def read_{name}(self, {name}):\n    return self.{name} if {name} else None\n"
    for name in ["key", "name", "path"] * 8
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("heads") / "text.py"
    file.write_text(CODE, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def record(text: Path) -> Any:
    file = text.with_suffix(".json")
    sizes = ["--passages", "24", "--length", "16"]
    assert main(["1.0", "0.2", "1.3", "--text", str(text), *sizes, "--json", str(file)]) == 0
    return json.loads(file.read_text(encoding="utf-8"))


def test_rows_of_selected_heads(record):
    rows = record["rows"]
    assert [(row["model"], row["layer"], row["head"]) for row in rows] == [
        ("trained", layer, head) for layer, head in ((0, 2), (1, 0), (1, 3))
    ]
    assert [row["job"] for row in rows] == ["previous token", "induction", "self"]
    for row in rows:
        p = [row[claim]["p_holm"] for claim in ("looks", "said")]
        assert row["holds"] == (max(p) <= 0.05)
        assert all(row[claim]["p"] <= row[claim]["p_holm"] for claim in ("looks", "said", "loss"))


def test_the_table(text, capsys):
    assert main(["0", "--text", str(text), "--passages", "12", "--length", "16"]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("trained: 4 heads (")
    assert lines[::2][2].startswith("layer 0, head 2, previous token: looks for the token just before, says ")
    assert all(line.endswith(": holds") or ": WRONG or not shown (" in line for line in lines[::2])


@pytest.mark.parametrize("head", ["2", "0.4", "x", "1."])
def test_unknown_heads(head, text, capsys):
    assert main(["--text", str(text), "--", head]) == 2
    message = "HEAD must be a layer such as 5"
    if head in ("2", "0.4"):
        message = "heads must be pairs (layer, head) of 2 layers of 4 heads, got"
    assert message in capsys.readouterr().err
