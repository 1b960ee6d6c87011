"""The README tells the truth: its code runs, its numbers hold, its two commands are there."""

import doctest
import json
import re
from pathlib import Path

import torch
from support.extras import needs

import gnn_attention as ga
from gnn_attention import bench
from gnn_attention.model import TRAINED
from gnn_attention.verify.cases import GRAPHS
from tests import guarantees

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
RECORDS = README.parent / "tests" / "records"


def test_its_code_runs():
    """Every line after >>> prints what it says."""
    needs("transformers")
    with torch.random.fork_rng():
        found = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert found.attempted > 15
    assert found.failed == 0


def test_it_is_short_and_holds_two_commands():
    """Under 230 lines; .ci/run reads the commands from here."""
    assert len(TEXT.splitlines()) < 230
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    install_and_verify, test = block.splitlines()
    assert install_and_verify == 'pip install "torch==2.13.*" -e . && gnn-attention verify'
    assert test == 'pip install -e ".[test]" && pytest -n auto'


def test_its_numbers_hold():
    """Graphs and builders are counted, the model is weighed."""
    assert f"{len(GRAPHS)} graphs" in TEXT
    assert f"holds {len(ga.patterns.__all__)} builders" in TEXT
    model, _ = ga.model.load_trained()
    parameters = sum(p.numel() for p in model.parameters())
    induction, previous = ga.model.induction_scores(model).max(), ga.model.previous_token_scores(model)[0].max()
    assert f"induction score of {induction:.2f}" in TEXT
    assert f"previous-token head of {previous:.2f}" in TEXT
    assert f"{parameters / 1e3:.0f} k parameters, {TRAINED.stat().st_size / 1e6:.1f} MB" in TEXT


def test_its_benchmark_is_the_newest_record():
    """The table and the targets are what the record says, and the text names the record."""
    newest = max(RECORDS.glob("*-bench-attention.json"))
    record = json.loads(newest.read_text(encoding="utf-8"))
    assert bench.table.table(record, only=bench.table.README) in TEXT
    assert bench.table.kept_targets(record) in " ".join(TEXT.split())
    assert f"`tests/records/{newest.name}`" in TEXT


def test_its_training_is_the_newest_record():
    """What it says of training on long windows."""
    newest = max(RECORDS.glob("*-bench-training.json"))
    record = json.loads(newest.read_text(encoding="utf-8"))
    auto, peer = record["runs"]
    recipe, step = record["recipe"], auto["seconds"] / record["recipe"]["steps"]
    told = (
        f"{recipe['steps']} steps of {recipe['length']:,} tokens over `{recipe['graph']}`, {record['faster']:.1f} times faster "
        f"and {record['smaller']:.1f} times smaller than with SDPA and a mask "
        f"({step:.1f} s and {auto['peak_memory_mb'] / 1e3:.1f} GB a step), no loss apart by more than 0.0001"
    )
    assert record["apart"] < 1e-4
    assert peer["method"] == "SDPA mask"
    assert told in " ".join(TEXT.split())
    assert f"`tests/records/{newest.name}`" in TEXT


def test_its_guarantees_are_the_newest_record():
    """Every row, as it was measured."""
    assert guarantees.record.readme(RECORDS) in TEXT
    found = guarantees.record.newest(RECORDS)
    if found is not None:
        file, measured = found
        assert f"`tests/records/{file.name}`" in TEXT
        assert [result.name for result in measured.results] == list(guarantees.GUARANTEES)
        assert all(result.full for result in measured.results)


def test_its_files_exist():
    """Every path it names."""
    for path in re.findall(r"`((?:notebooks|tests)/[\w./]+)`", TEXT):
        assert (README.parent / path).exists(), path
