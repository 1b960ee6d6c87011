"""Files are written atomically, and texts are made printable."""

import os
import subprocess
from contextlib import suppress

import pytest

from gnn_attention._support import atomic_files
from gnn_attention._support.text import make_printable


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, OSError])
def test_a_file_is_replaced_when_all_is_written(tmp_path, stop):
    """An interrupt keeps the old content; no temporary file remains, and the link and mode are kept."""
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    with suppress(stop or ()), atomic_files.replace_file(link) as file:
        file.write(b"after")
        assert path.read_text() == "before"
        if stop is not None:
            raise stop
    assert path.read_text() == ("after" if stop is None else "before")
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o640)
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", "link.txt"}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    """The same holds for `--json /dev/stdout`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    atomic_files.write(pipe, "through it")
    assert reader.communicate(timeout=30)[0] == "through it"
    assert pipe.is_fifo()


def test_paths_that_cannot_be_written_are_refused(tmp_path):
    message = r"--json .*no/a\.json: expected a folder that exists; create .*no first"
    with pytest.raises(ValueError, match=message):
        atomic_files.check_output_path("--json", str(tmp_path / "no" / "a.json"))
    with pytest.raises(ValueError, match=r"-o .* is a folder; expected the path of a file"):
        atomic_files.check_output_path("-o", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("a\r\nb\u2028c", "a b c"),
        ("\x00\x1b[2J\x7f\x9b", "  [2J  "),
        ("\ud83d!", "\ufffd!"),
        ("\ud83d\udc68", "\U0001f468"),
        ("\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c", "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c"),
        ("\u202e\u2066\u200b\u00ad\ufeff", "     "),
    ],
)
def test_unprintable_characters_are_replaced(text, printable):
    assert make_printable(text) == printable
    make_printable(text).encode()
