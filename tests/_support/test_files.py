"""Files whole or not at all, and texts that can be printed."""

import os
import subprocess
from contextlib import suppress

import pytest

from gnn_attention._support import atomic_files
from gnn_attention._support.text import printable


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, OSError])
def test_a_file_takes_its_place_when_all_is_written(tmp_path, stop):
    """An interrupt leaves what was there; either way nothing else is left, a link and a mode stay."""
    place, link = tmp_path / "a.txt", tmp_path / "link.txt"
    place.write_text("before")
    place.chmod(0o640)
    link.symlink_to(place)
    with suppress(stop or ()), atomic_files.replace_file(link) as file:
        file.write(b"after")
        assert place.read_text() == "before"
        if stop is not None:
            raise stop
    assert place.read_text() == ("after" if stop is None else "before")
    assert (link.is_symlink(), place.stat().st_mode & 0o777) == (True, 0o640)
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", "link.txt"}


def test_what_is_no_regular_file_is_written_to_and_never_replaced(tmp_path):
    """As `--json /dev/stdout` is: a pipe stays a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    atomic_files.write(pipe, "through it")
    assert reader.communicate(timeout=30)[0] == "through it"
    assert pipe.is_fifo()


def test_places_where_none_can_be_are_named(tmp_path):
    message = r"--json .*no/a\.json: expected a folder that exists, make .*no first"
    with pytest.raises(ValueError, match=message):
        atomic_files.check_place("--json", str(tmp_path / "no" / "a.json"))
    with pytest.raises(ValueError, match=r"-o .* is a folder: give a file in it"):
        atomic_files.check_place("-o", str(tmp_path))


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
