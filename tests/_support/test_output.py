"""What commands write: on streams that hold ASCII alone, that are closed, or whose reader has gone."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from gnn_attention.__main__ import main


def stream(encoding, errors="strict"):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)


def written(made):
    made.flush()
    return made.buffer.getvalue()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_picture_in_ascii(errors, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := stream("ascii", errors))
    assert main(["draw", "causal(2)"]) == 0
    assert written(out).splitlines()[1:] == [b"0 # .   0 <- 0", b"1 # #   1 <- 0 1"]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_leads_nowhere(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, name, None)
    assert main(["draw", "causal(2)"]) == 0
    assert main(["draw", "causal(2"]) == 2
    getattr(sys, name).close()
    streams = capsys.readouterr()
    assert (streams.out, streams.err)[name == "stdout"] != ""
    assert (streams.out, streams.err)[name == "stderr"] == ""


@pytest.fixture
def without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as made:
        yield made


@pytest.fixture
def file(tmp_path):
    """Its picture goes to stdout, a line about what was read to stderr."""
    (tmp_path / "words.csv").write_text("source,target\nthe,cat\n", encoding="utf-8")
    return str(tmp_path / "words.csv")


def test_a_stderr_without_a_reader_changes_nothing_else(without_reader, file, monkeypatch, capsys):
    without_reader.reconfigure(line_buffering=True)
    monkeypatch.setattr(sys, "stderr", without_reader)
    assert main(["draw", "causal(2"]) == 2
    assert main(["draw", file]) == 0
    assert capsys.readouterr().out.endswith("0 the, 1 cat\n")


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&-", ">&-", ">&- 2>&-", "2> >(true)", "> >(true)"])
def test_as_a_program(streams, file):
    """In particular at the end, when Python flushes what is left: no exit code 120."""
    command = f"{sys.executable} -W ignore -m gnn_attention draw {file} {streams}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout.endswith("0 the, 1 cat\n")) == (0, streams.startswith("2"))
    assert "Error" not in done.stderr
