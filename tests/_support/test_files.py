"""Files whole or not at all: what was there stays until everything is written."""

import os
import subprocess
from contextlib import suppress

import pytest

from gnn_attention._support import atomic_files


def test_a_file_takes_its_place_when_all_is_written(tmp_path):
    place = tmp_path / "a.json"
    place.write_text("before")
    with atomic_files.written(place) as file:
        file.write(b"after")
        assert place.read_text() == "before"
    assert place.read_bytes() == b"after"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupt_leaves_what_was_there_and_nothing_else(tmp_path, stop):
    place = tmp_path / "a.json"
    place.write_text("before")
    with suppress(stop), atomic_files.written(place) as file:
        file.write(b"half of ")
        raise stop
    assert place.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_and_a_mode_stays(tmp_path):
    place, link = tmp_path / "a.txt", tmp_path / "link.txt"
    place.write_text("before")
    place.chmod(0o640)
    link.symlink_to(place)
    atomic_files.write(link, "after")
    assert (link.is_symlink(), place.read_text(), place.stat().st_mode & 0o777) == (True, "after", 0o640)


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
