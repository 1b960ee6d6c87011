"""Test the commands graphs and draw, wrong arguments, and how a command starts and ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from support.extras import needs

from gnn_attention import patterns
from gnn_attention.__main__ import main
from gnn_attention.convert import catalogue, files


class TestGraphs:
    def test_lists_every_builder_under_its_family(self, capsys):
        assert main(["graphs"]) == 0
        out = capsys.readouterr().out
        for entry in catalogue.entries():
            assert f"\n  {entry.example}\n    {entry.definition.replace('``', '`')}\n" in out
            assert f"\n{entry.family}: " in f"\n{out}"
        assert main(["graphs", "sinks", "window"]) == 0
        assert re.findall(r"^  (\w+)\(", capsys.readouterr().out, re.MULTILINE) == ["sinks", "window"]

    def test_json(self, capsys, tmp_path):
        assert main(["graphs", "--json"]) == 0
        entries = json.loads(capsys.readouterr().out)
        assert [entry["name"] for entry in entries] == list(patterns.__all__)
        (window,) = [entry for entry in entries if entry["name"] == "window"]
        assert (window["family"], window["example"]) == ("local", "window(64, 8)")
        assert main(["graphs", "window", "--json", str(tmp_path / "zoo.json")]) == 0
        assert json.loads((tmp_path / "zoo.json").read_text()) == [window]
        assert "window(64, 8)" in capsys.readouterr().out


class TestDraw:
    def test_a_small_graph_in_text(self, capsys):
        assert main(["draw", "window(6, 2) | sinks(6, 1)"]) == 0
        assert capsys.readouterr().out == f"{patterns.window(6, 2) | patterns.sinks(6, 1)}\n"

    def test_a_file_with_labels(self, capsys, tmp_path):
        file = tmp_path / "words.csv"
        file.write_text("source,target\nthe,cat\ncat,sat\n", encoding="utf-8")
        assert main(["draw", str(file)]) == 0
        output = capsys.readouterr()
        assert output.out == f"{files.load(file).graph}\n0 the, 1 cat, 2 sat\n"
        assert output.err == "words.csv: 3 nodes, 2 directed edges\n"
        assert main(["draw", str(file), "--undirected"]) == 0
        output = capsys.readouterr()
        assert output.out.startswith(f"{files.load(file, undirected=True).graph}\n")
        assert output.err == "words.csv: 3 nodes, 2 undirected edges = 4 directed\n"

    @pytest.mark.parametrize(
        ("kind", "ending"),
        [("arcs", "svg"), ("both", "png"), ("degrees", "svg"), (None, "png")],
    )
    def test_into_a_file(self, kind, ending, tmp_path, capsys):
        needs("matplotlib")
        file = tmp_path / f"picture.{ending}"
        assert main(["draw", "window(12, 3)", "-o", str(file), *(["--kind", kind] if kind else [])]) == 0
        assert file.read_bytes().startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
        assert capsys.readouterr().out == f"{file}: TokenGraph(window(12, 3): 12 src -> 12 dst)\n"

    def test_token_layers_and_labels(self, tmp_path, monkeypatch):
        """The picture shows them: token 5 depends on 1 + 2 * 2 tokens after 2 layers."""
        needs("matplotlib")
        figures = []
        save = "matplotlib.figure.Figure.savefig"
        monkeypatch.setattr(save, lambda figure, file, **options: figures.append(figure))
        (tmp_path / "words.edges").write_text("the cat\ncat sat\n", encoding="utf-8")
        command = ["draw", "window(12, 3)", "-o", str(tmp_path / "a.svg"), "--token", "5", "--kind"]
        assert main([*command, "layers", "--layers", "2"]) == main([*command, "hops"]) == 0
        assert main(["draw", str(tmp_path / "words.edges"), "-o", str(tmp_path / "a.svg")]) == 0
        assert [text.get_text() for text in figures[0].axes[0].texts] == ["5 of 12", "3 of 12", "1 of 12"]
        assert any(line.get_label() == "token 5" for line in figures[1].axes[0].lines)
        assert [text.get_text() for text in figures[2].axes[0].get_yticklabels()] == ["the", "cat", "sat"]


# Each line has a command and a part of its error.
WRONG = """
graphs wndow | there is no builder 'wndow'; did you mean 'window'?
graphs --json no/such/file | --json no/such/file: expected a folder that exists
draw 'window(64, 8)' | text shows one head and at most 32 tokens, got TokenGraph(window(64, 8)
draw no/such.graphml | No such file or directory: 'no/such.graphml'
draw 'window(6, 2)' --undirected | --undirected needs a file of edges, got the expression 'window(6, 2)'
audit no/such.edges | No such file or directory: 'no/such.edges'
draw 'window(6, 2)' --kind arcs | --kind arcs needs a file to draw into
draw 'window(6, 2)' -o no/such/folder.svg | -o no/such/folder.svg: expected a folder that exists
draw 'window(6, 2)' -o {}/a.xyz | 'xyz' is not supported
draw 'window(6, 2)' -o {}/a | Format '' is not supported
draw 'window(6, 2)' -o {}/a.svg --token 3 | --token belongs to --kind layers and --kind hops, not to mask
bench --tokens 0 | --tokens must be at least 1, got 0
verify --device nope | device must be one that torch knows, got 'nope'
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_arguments(line, tmp_path, capsys):
    command, message = line.split(" | ")
    if " -o" in command:
        needs("matplotlib")
    assert main(shlex.split(command.format(tmp_path))) == 2
    output = capsys.readouterr()
    assert re.match(rf"gnn-attention {command.split()[0]}[\w ]*: ", output.err)
    assert message in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["karate.graphml.gz", "a.txt", "folder"])
@pytest.mark.parametrize("command", ["draw", "audit"])
def test_a_path_with_an_ending_that_is_not_read(command, name, tmp_path, capsys):
    (tmp_path / name).mkdir() if name == "folder" else (tmp_path / name).write_text("0 1\n")
    assert main([command, str(tmp_path / name)]) == 2
    assert f"{tmp_path / name}: expected a file that ends in .edges, .edgelist" in capsys.readouterr().err


COMMANDS = "verify audit bench graphs draw explore attribute"


PROGRAM = """
import contextlib, io, json, sys
import gnn_attention
before, loaded = set(sys.modules), []
from gnn_attention.__main__ import main
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
    loaded.append(sorted(set(sys.modules) - before))
json.dump(loaded, sys.stdout)
"""
SLOW_TO_LOAD = {"matplotlib", "torch._dynamo", "torch_geometric", "transformers"}
SLOW_TO_LOAD |= {f"gnn_attention.{name}" for name in ("explorer", "interpret", "layer", "model", "verify")}


def test_a_command_loads_its_own_module_and_no_slow_package():
    """The commands run one after the other in a new process, so its loaded modules add up."""
    cases = [(["--help"], set()), (["draw", "window(6, 2)"], {"draw"}), (["graphs"], {"draw", "graphs"})]
    command, stdin = [sys.executable, "-c", PROGRAM], json.dumps([arguments for arguments, _ in cases])
    process = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True)
    for (arguments, modules), names in zip(cases, json.loads(process.stdout), strict=True):
        commands = {name.removeprefix("gnn_attention.cli.") for name in names if ".cli." in name}
        assert commands == modules | {"main"}, arguments
        assert not SLOW_TO_LOAD & set(names), arguments


class TestMain:
    @pytest.mark.parametrize("command", COMMANDS.split())
    def test_every_command_has_help(self, command, capsys):
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--help"])
        assert exit_info.value.code == 0
        assert f"gnn-attention {command}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["paint"],
            ["draw"],
            ["draw", "causal(3)", "--kind", "poem"],
            ["bench", "--device", "tpu7"],
            ["bench", "--device", "cuda:99"],
        ],
    )
    def test_argparse_refuses_with_2(self, arguments, capsys):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        assert "usage: gnn-attention" in capsys.readouterr().err

    # The catalogue, longer than a buffer, fails while it is printed; the drawing fails at the last flush.
    @pytest.mark.parametrize("arguments", [["graphs"], ["draw", "causal(2)"]])
    def test_a_reader_that_has_seen_enough_is_no_error(self, arguments, monkeypatch, capsys):
        """In ``gnn-attention graphs | head``, the reader closes its end of the pipe."""
        read_end, write_end = os.pipe()
        os.close(read_end)
        with os.fdopen(write_end, "w") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert main(arguments) == 0
        assert capsys.readouterr().err == ""
