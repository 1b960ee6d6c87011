"""F10: damaged files are read or refused by name, and every way in which a reader could fail is seen."""

import os
import pickle
import signal
import time
from dataclasses import replace

import pytest

from tests.guarantees import mutated_files, mutations, sandbox
from tests.guarantees.file_forms import FORMS, Form
from tests.guarantees.guarantee import no_progress
from tests.guarantees.mutations import MARK

pytestmark = [
    pytest.mark.slow,  # a guarantee is measured: by default those of test_guarantees alone
    pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available())),
]


def test_a_few_files_see_every_mutation():
    for form in FORMS:
        assert mutated_files.GUARANTEE.quick >= len(set(form.mutations)), form.name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_case_is_its_number_and_differs_from_the_whole_file(form, tmp_path):
    whole = form.make(tmp_path).read_bytes()
    first = [mutated_files.mutated(form, whole, number) for number in range(30)]
    assert first == [mutated_files.mutated(form, whole, number) for number in range(30)]
    assert sum(content != whole for content in first) > 20


def read_all(path):
    return path.read_bytes()


def raising(text, kind=ValueError):
    """A reader that raises an error with this text of the path."""

    def read(path):
        raise kind(text(path))

    return read


def run_it(path):
    return pickle.loads(path.read_bytes())


def swallow(path):
    try:
        os.system("true")
    except BaseException:
        return


def secret(path):
    return (path.parent.parent / "secret.txt").read_text()


UNNAMED = raising(lambda path: "it is damaged")
READERS = {
    "a refusal without a name": (UNNAMED, "refused without a name: 'it is damaged'"),
    "a raw error": (raising(lambda path: "config", KeyError), "raised KeyError: 'config'"),
    "a refusal without end": (raising(lambda path: f"{path}: {'x' * 5000}"), "refused in 5,0"),
    "an escape of a terminal": (
        raising(lambda path: f"{path}: \x1b[31m"),
        "refused with what cannot be printed",
    ),
    "another file": (raising(lambda path: f"{path}: {secret(path)}"), "refused with what is in another file"),
    "a crash": (lambda path: signal.raise_signal(signal.SIGSEGV), "its process was killed by SIGSEGV"),
    "an exit": (lambda path: os._exit(3), "its process ended with code 3"),
    "too much memory": (lambda path: bytearray(2**29), "raised MemoryError"),
    "a program": (lambda path: os.system("true"), "its reader did os.system"),
    "a program, its output swallowed": (swallow, "its reader did os.system"),
    "a change of a file": (lambda path: path.with_name("other").write_text("a"), "its reader did open"),
}


def first_time_well(read, well=lambda path: None):
    """A reader that fails from the second time on: the first is the whole file."""
    times = []

    def well_then(path):
        times.append(path)
        return well(path) if len(times) == 1 else read(path)

    return well_then


def planted(read, mutation=None):
    def make(folder):
        (folder / "a.txt").write_text("whole")
        return folder / "a.txt"

    return Form("planted", make, first_time_well(read), (mutation or (lambda content, rng: b"other"),))


@pytest.mark.parametrize("fault", READERS)
def test_planted_faults_are_seen(fault):
    read, message = READERS[fault]
    found = mutated_files.measure(2, no_progress, [planted(read)])
    assert len(found.failures) == 2
    assert message in found.failures[1]
    assert found.failures[1].startswith("planted, file 1: ")


def test_a_pickle_that_is_run_is_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = next(other for other in mutations._OTHERS if other.startswith(b"\x80"))
    found = mutated_files.measure(1, no_progress, [planted(run_it, lambda content, rng: payload)])
    assert "its reader did open" in found.failures[0]
    assert not (tmp_path / MARK).exists()
    monkeypatch.setattr(sandbox, "_changes", lambda event, arguments: False)  # even without the hook
    found = mutated_files.measure(1, no_progress, [planted(run_it, lambda content, rng: payload)])
    assert any("was run" in failure for failure in found.failures)


def test_time_is_limited(monkeypatch):
    """Of the processor, and of a process that says nothing."""

    def busy(path):
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass

    monkeypatch.setattr(mutated_files, "MOST_SECONDS", 0.2)
    assert "of the processor" in mutated_files.measure(1, no_progress, [planted(busy)]).failures[0]
    (found,) = sandbox.seen(lambda number: lambda: time.sleep(60), [7], 2**28, wait=0.3)
    assert (found.number, found.complaint) == (7, "hung: no answer within 0.3 s")


@pytest.mark.parametrize("name", ["edge list", "adjacency list", "GraphML"])
def test_what_is_read_wrongly_is_seen(name):
    """Edges that run the other way round."""
    form = next(form for form in FORMS if form.name == name)
    turned = replace(form, read=first_time_well(lambda path: form.read(path).T, form.read))
    found = mutated_files.measure(40, no_progress, [turned])
    assert any("other edges than in the file were read" in failure for failure in found.failures)


def test_a_whole_file_that_is_refused_stops_the_figure():
    form = Form("planted", planted(UNNAMED).make, UNNAMED, (lambda content, rng: content,))
    with pytest.raises(ValueError, match="planted: the whole file: refused without a name"):
        mutated_files.measure(1, no_progress, [form])
