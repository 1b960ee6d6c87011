"""``gnn-attention audit`` has the right exit code and JSON, and refuses wrong arguments."""

from __future__ import annotations

import json

import gnn_attention as ga
from gnn_attention.__main__ import main


def test_the_exit_code_and_json_of_the_command(capsys, tmp_path):
    assert main(["audit", "window(12, 3) | sinks(12, 1)"]) == 0
    assert capsys.readouterr().out.startswith("window(12, 3) | sinks(12, 1), 2 layers: exact")
    assert main(["audit", "window(10, 2)", "--run-over", "window(10, 3)", "--json"]) == 1
    output = capsys.readouterr()
    record = json.loads(output.out)
    assert (record["ok"], record["exact"], record["layers"]) == (False, False, 2)
    assert (0, 3, [0, 1, 3]) in [(leak["src"], leak["dst"], leak["path"]) for leak in record["leaks"]]
    assert "leaks" in output.err
    file = tmp_path / "verdict.json"
    options = ["--run-over", "causal(10)", "--layers", "9", "--json", str(file)]
    assert main(["audit", "window(10, 2)", *options]) == 0
    assert json.loads(file.read_text())["exact"] is True
    ga.model.save(tmp_path / "mine.safetensors", *ga.model.load_trained(), {})
    assert main(["audit", "causal(6)", "--model", str(tmp_path / "mine.safetensors")]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["wndow(8, 2)"], "wndow"),
        (["causal(600)"], "at most 512 tokens"),
        (["causal(6)", "--model", "no_such_file"], "no_such_file"),
        (["causal(6)", "--run-over", "causal(7)"], "does not fit"),
    ):
        assert main(["audit", *arguments]) == 2
        assert message in capsys.readouterr().err
