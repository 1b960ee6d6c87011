"""The constants by which backends are chosen: what they add up to, and the file they are kept in."""

import json
import threading
from dataclasses import fields, replace

import pytest

from gnn_attention.backends import cost_model as module
from gnn_attention.backends.cost_model import Costs, Work, costs, path_of_costs, save
from gnn_attention.verify.measure import EXACT


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file of this test's own, and nothing read before it or left after it."""
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "costs.json"))
    costs.cache_clear()
    yield tmp_path / "costs.json"
    costs.cache_clear()


MEASURED = Costs(call=1.0, rectangle=2.0, cell=3.0, edge=4.0, node=5.0, masked_pair=6.0, plain_pair=7.0)


def test_work_adds_up_part_by_part():
    """One after the other."""
    names = [part.name for part in fields(Work)]
    one, two = Work(*range(1, len(names) + 1)), Work(*(10 * i for i in range(1, len(names) + 1)))
    assert one + two == Work(*(11 * i for i in range(1, len(names) + 1)))
    assert one + Work() == one


@pytest.mark.parametrize(
    ("work", "nanoseconds"),
    [
        (Work(), 0),
        (Work(calls=10), 10),  # once for all heads
        (Work(rectangles=10), 8 * 20),
        (Work(weighted_cells=10.0), 8 * 30),
        (Work(cells=10), 0),  # what they weigh counts
        (Work(edges=10), 8 * 40),
        (Work(nodes=10), 8 * 50),
        (Work(masked_pairs=10), 8 * 60),
        (Work(plain_pairs=10), 8 * 70),
    ],
)
def test_each_part_has_its_price(work, nanoseconds):
    """At 8 heads of 64 channels; twice the channels never cost more than twice as much."""
    found = MEASURED.seconds(work, heads=8)
    assert found == pytest.approx(nanoseconds * 1e-9, rel=EXACT)
    assert found <= MEASURED.seconds(work, heads=8, dim=128.0) <= 2 * found + 1e-30
    assert MEASURED.seconds(work + Work(calls=1), heads=8) == pytest.approx(
        (nanoseconds + 1) * 1e-9, rel=EXACT
    )


def test_without_a_file_the_constants_are_those_of_the_class(file):
    """And none is made."""
    assert costs() == Costs()
    assert not file.exists()
    assert all(getattr(Costs(), part.name) > 0 for part in fields(Costs))


def test_what_is_saved_is_found_by_the_next_call_and_the_next_process(file):
    """The round trip, also over what was there; no part of a file is left."""
    assert costs() == Costs()
    assert save(Costs()) == file
    assert save(MEASURED) == file
    assert costs() == MEASURED
    assert costs() is costs()
    costs.cache_clear()  # as a new process has it
    assert costs() == MEASURED
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_where_the_file_is(monkeypatch, tmp_path):
    """The variable, else the user's cache folder, which may have to be made."""
    assert path_of_costs() == tmp_path / "costs.json"
    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert path_of_costs() == tmp_path / "cache" / "gnn_attention" / "costs.json"
    assert save(MEASURED).is_file()
    assert costs() == MEASURED
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert path_of_costs() == tmp_path / "home" / ".cache" / "gnn_attention" / "costs.json"
    monkeypatch.setenv(module.VARIABLE, "")
    assert path_of_costs() == tmp_path / "home" / ".cache" / "gnn_attention" / "costs.json"


def test_another_path_may_be_given(file, tmp_path):
    """Whose folder is made."""
    assert save(MEASURED, tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
    assert not file.exists()
    assert json.loads((tmp_path / "a" / "b.json").read_text())["costs"]["edge"] == 4.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"costs": null}',
        '{"costs": {}}',
        '{"costs": {"call": 1}}',
        '{"cost": {}}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_named(file, text):
    """With what to do about it; after which the next call is right."""
    file.write_text(text, encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"costs\.json does not hold the constants of .*bench calibrate`, or remove the file"
    ):
        costs()
    save(MEASURED)
    assert costs() == MEASURED


@pytest.mark.parametrize("value", ["fast", None, [1.0]])
def test_a_constant_that_is_no_number_is_named(file, value):
    """In any place."""
    held = {part.name: 1.0 for part in fields(Costs)} | {"edge": value}
    file.write_text(json.dumps({"costs": held}))
    with pytest.raises(ValueError, match="does not hold the constants"):
        costs()


def test_what_more_a_file_says_is_left_alone(file):
    """As of a later version, or about the machine."""
    held = {part.name: getattr(MEASURED, part.name) for part in fields(Costs)}
    file.write_text(json.dumps({"costs": {**held, "new": 1.0}, "machine": "mine"}))
    assert costs() == MEASURED


def test_a_reader_never_sees_half_a_file(file):
    """While others write it, whole files only are read."""
    kinds, stop = {MEASURED, replace(MEASURED, edge=9.0)}, threading.Event()
    save(MEASURED)

    def write():
        while not stop.is_set():
            for kind in kinds:
                save(kind)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {Costs(**json.loads(file.read_text())["costs"]) for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= kinds
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_a_write_that_fails_leaves_what_was_there(file, monkeypatch):
    """The old constants, whole."""
    save(MEASURED)
    monkeypatch.setattr(
        module.Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space left"):
        save(Costs())
    costs.cache_clear()
    assert costs() == MEASURED
