"""The commands graphs and draw, and the list of the zoo behind them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys

import pytest
from support.extras import needs

from gnn_attention import TokenGraph, patterns
from gnn_attention.__main__ import main
from gnn_attention.convert import catalogue, expressions


class TestCatalogue:
    def test_every_builder_has_an_example(self):
        missing = sorted(set(patterns.__all__) - set(catalogue.EXAMPLES))
        left_over = sorted(set(catalogue.EXAMPLES) - set(patterns.__all__))
        assert not missing, (
            f"no example in gnn_attention/convert/catalogue.py, EXAMPLES, for: {', '.join(missing)}"
        )
        assert not left_over, f"examples of builders that the zoo does not have: {', '.join(left_over)}"

    def test_an_example_shows_its_builder(self):
        for name in patterns.__all__:
            (entry,) = catalogue.entries([name])
            assert entry.example.startswith(f"{name}(")
            assert entry.call.startswith(f"{name}(")
            assert entry.definition.endswith((".", ":")), name
            assert ":func:" not in entry.definition, name
            if entry.edges is not None:
                graph = expressions.parse(entry.example)
                assert graph.num_edges == entry.edges > 0, name
                assert 4 <= max(graph.num_dst, graph.num_src) <= 80, name

    def test_only_values_for_each_edge_are_no_graphs(self):
        no_graphs = {entry.name for entry in catalogue.entries() if entry.edges is None}
        assert no_graphs == {"edge_types", "shortest_paths"}

    def test_edges_per_token(self):
        """Window: a triangle of 8, then 8 for each; two kinds of heads are averaged."""
        (entry,) = catalogue.entries(["window"])
        assert entry.example == "window(64, 8)"
        assert entry.edges_per_token == (36 + 56 * 8) / 64
        (entry,) = catalogue.entries(["duo_attention"])
        assert entry.heads == 4
        one, other = (expressions.parse(entry.example).select(0, head).num_edges for head in (1, 0))
        assert entry.edges_per_token == (one + 3 * other) / (4 * 64)


class TestGraphs:
    def test_lists_every_builder_under_its_family(self, capsys):
        assert main(["graphs"]) == 0
        out = capsys.readouterr().out
        for entry in catalogue.entries():
            assert f"\n  {entry.example} " in out
            assert f"\n{entry.family}: " in f"\n{out}"
        assert max(map(len, out.splitlines())) <= 120

    def test_chosen_ones(self, capsys):
        assert main(["graphs", "sinks", "window"]) == 0
        out = capsys.readouterr().out
        assert [
            line.split("(")[0].strip()
            for line in out.splitlines()
            if line.startswith("  ") and line[2] != " "
        ] == [
            "sinks",
            "window",
        ]

    def test_json(self, capsys, tmp_path):
        assert main(["graphs", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [entry["name"] for entry in listed] == list(patterns.__all__)
        (window,) = [entry for entry in listed if entry["name"] == "window"]
        assert window["call"] == "window(n, w, causal=True)"
        assert (window["family"], window["tokens"], window["edges"], window["edges_per_token"]) == (
            "local",
            64,
            484,
            7.5625,
        )
        assert main(["graphs", "window", "--json", str(tmp_path / "zoo.json")]) == 0
        assert json.loads((tmp_path / "zoo.json").read_text()) == [window]
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["wndow"], "there is no builder 'wndow'; did you mean 'window'?"),
            (["qqqq"], "there is no builder 'qqqq'; 'gnn-attention graphs' lists them"),
            (["--json", "no/such/file"], "expected a folder that exists"),
        ],
    )
    def test_wrong_arguments(self, arguments, words, capsys):
        assert main(["graphs", *arguments]) == 2
        assert words in capsys.readouterr().err


class TestDraw:
    def test_a_small_graph_in_text(self, capsys):
        assert main(["draw", "window(6, 2) | sinks(6, 1)"]) == 0
        assert capsys.readouterr().out == f"{patterns.window(6, 2) | patterns.sinks(6, 1)}\n"

    @pytest.mark.parametrize(
        ("kind", "ending"),
        [
            *(("mask", "png"), ("graph", "svg"), ("both", "png"), ("arcs", "svg")),
            *(("layers", "png"), ("degrees", "svg"), ("hops", "svg"), (None, "png")),
        ],
    )
    def test_into_a_file(self, kind, ending, tmp_path, capsys):
        needs("matplotlib")
        file = tmp_path / f"picture.{ending}"
        assert main(["draw", "window(12, 3)", "-o", str(file), *(["--kind", kind] if kind else [])]) == 0
        assert file.read_bytes().startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
        assert capsys.readouterr().out == f"{file}: TokenGraph(window(12, 3): 12 src -> 12 dst)\n"

    def test_token_and_layers(self, tmp_path, monkeypatch):
        """They reach the picture: token 5 has heard of 1 + 2 * 2 tokens after 2 layers."""
        needs("matplotlib")
        seen = []
        monkeypatch.setattr(
            "matplotlib.figure.Figure.savefig", lambda figure, file, **more: seen.append(figure)
        )
        assert (
            main(
                [
                    "draw",
                    "window(12, 3)",
                    "-o",
                    str(tmp_path / "a.svg"),
                    "--kind",
                    "layers",
                    "--token",
                    "5",
                    "--layers",
                    "2",
                ]
            )
            == 0
        )
        assert (
            main(["draw", "window(12, 3)", "-o", str(tmp_path / "a.svg"), "--kind", "hops", "--token", "5"])
            == 0
        )
        assert [text.get_text() for text in seen[0].axes[0].texts] == ["5 of 12", "3 of 12", "1 of 12"]
        assert any(line.get_label() == "token 5" for line in seen[1].axes[0].lines)

    def test_heads_are_drawn_side_by_side(self, tmp_path):
        needs("matplotlib")
        assert main(["draw", "duo_attention(16, 4, [1], 4)", "-o", str(tmp_path / "heads.svg")]) == 0
        assert all(f"head {head}" in (tmp_path / "heads.svg").read_text() for head in range(4))

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["windw(6, 2)"], "column 1, 'windw(6, 2)': there is no builder 'windw'; did you mean 'window'?"),
            (
                ["window(64, 8)"],
                "has no picture in text, which is for one head and at most 32 tokens; add for example -o",
            ),
            (["duo_attention(16, 4, [1], 4)"], "has no picture in text"),
            (["window(6, 2)", "--kind", "arcs"], "--kind arcs needs a file to draw into"),
            (
                ["window(6, 2)", "-o", "no/such/folder.svg"],
                "-o no/such/folder.svg: expected a folder that exists",
            ),
            (["window(6, 2)", "-o", "{}/a.xyz"], "'xyz' is not supported"),
            (
                ["window(6, 2)", "-o", "{}/a"],
                "/a: expected a file name whose ending says what to write, such as picture.svg",
            ),
            (["window(6, 2)", "-o", "{}"], "expected a file name whose ending says what to write"),
            (
                ["window(6, 2)", "-o", "{}/a.svg", "--token", "3"],
                "--token belongs to --kind layers and --kind hops, not to mask",
            ),
            (["window(6, 2)", "-o", "{}/a.svg", "--kind", "arcs", "--layers", "3"], "--layers belongs to"),
            (
                ["window(6, 2)", "-o", "{}/a.svg", "--kind", "layers", "--token", "6"],
                "token must be a position in 0 .. 5, got 6",
            ),
            (["window(9000, 2)", "-o", "{}/a.svg"], "mask() draws at most 4096 tokens a side"),
            (
                ["cross(3, 4)", "-o", "{}/a.svg", "--kind", "arcs"],
                "arcs() draws graphs whose senders are their receivers",
            ),
        ],
    )
    def test_wrong_arguments(self, arguments, words, tmp_path, capsys):
        if "-o" in arguments:
            needs("matplotlib")
        assert main(["draw", *(argument.format(tmp_path) for argument in arguments)]) == 2
        seen = capsys.readouterr()
        assert seen.err.startswith("gnn-attention draw: ")
        assert words in seen.err
        assert seen.err.count("\n") == 1
        assert seen.out == ""
        assert not list(tmp_path.iterdir())

    def test_without_matplotlib(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["draw", "window(6, 2)", "-o", str(tmp_path / "a.svg")]) == 2
        assert "pictures need matplotlib" in capsys.readouterr().err


class TestMain:
    @pytest.mark.parametrize(
        "command",
        [
            "verify",
            "audit",
            "bench",
            "explore",
            "graphs",
            "draw",
            "cost",
            "generate",
            "train",
            "compare",
            "reach",
        ],
    )
    def test_every_command_has_help(self, command, capsys):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        assert f"gnn-attention {command}" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [[], ["paint"], ["draw"], ["draw", "causal(3)", "--kind", "poem"]])
    def test_argparse_refuses_with_2(self, arguments, capsys):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        assert "usage: gnn-attention" in capsys.readouterr().err

    def test_as_a_module(self, capsys, monkeypatch):
        """``python -m gnn_attention``: the exit code is that of main."""
        monkeypatch.setattr(sys, "argv", ["gnn-attention", "draw", "causal(2)"])
        monkeypatch.delitem(sys.modules, "gnn_attention.__main__")
        interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as left:
            runpy.run_module("gnn_attention", run_name="__main__")
        signal.signal(signal.SIGINT, interrupt)  # which a program that ends ignores
        assert (left.value.code, capsys.readouterr().out) == (0, f"{patterns.causal(2)}\n")

    @pytest.mark.slow
    def test_as_a_program(self):
        command = [sys.executable, "-W", "ignore", "-m", "gnn_attention", "draw", "causal(2)"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{patterns.causal(2)}\n", "")

    # The catalogue is longer than a buffer and fails while it is printed, the drawing fails when it is
    # flushed at the end.
    @pytest.mark.parametrize("arguments", [["graphs"], ["draw", "causal(2)"]])
    def test_a_reader_that_has_seen_enough_is_no_error(self, arguments, monkeypatch, capsys):
        """``gnn-attention graphs | head``: the other end of the pipe is closed."""
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as out, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            assert main(arguments) == 0
        assert capsys.readouterr().err == ""


def test_examples_are_read_as_python_reads_them():
    """The examples are Python: read by it, they build the same graphs."""
    known = {name: getattr(patterns, name) for name in patterns.__all__} | {
        "tensor": expressions.tensor,
        "randn": expressions.randn,
    }
    for text in catalogue.EXAMPLES.values():
        value = expressions.evaluate(text)
        if isinstance(value, TokenGraph):
            assert eval(text, dict(known)) == value
