"""Commands write to streams that take only ASCII, that are closed, or whose reader has gone."""

import io
import subprocess
import sys

import pytest

from gnn_attention.__main__ import main


def test_letters_that_a_stream_cannot_encode_are_their_codes(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["draw", "causal(2)"]) == 0
    stream.flush()
    assert stream.buffer.getvalue().splitlines()[1:] == [
        rb"0 \u25a0 \xb7   0 <- 0",
        rb"1 \u25a0 \u25a0   1 <- 0 1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&-", ">&-", ">&- 2>&-", "> >(true)"])
def test_a_closed_stream_or_a_reader_that_has_gone_is_no_error(streams):
    command = f"{sys.executable} -W ignore -m gnn_attention draw 'causal(2)' {streams}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (process.returncode, process.stdout != "", process.stderr) == (0, streams == "2>&-", "")
