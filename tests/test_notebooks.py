"""The notebooks: what is committed is what their sources say, and running them raises nothing.

A notebook is written as ``notebooks/NAME.py`` (jupytext's percent format). ``notebooks/NAME.ipynb`` is made from it, run, and
committed with its outputs. After a change of a source, of the trained weights, or of code that a notebook prints:

    python tests/test_notebooks.py

``jupytext --to ipynb --execute notebooks/NAME.py`` does the same where nbconvert is installed, but writes the time of
every cell and new random cell ids into the file.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))
RENEW = "run: python tests/test_notebooks.py"
ABSOLUTE = re.compile(r"(?<![\w.~/-])/(home|root|tmp|usr|opt|var|work|mnt|private|Users|Volumes)/|\b[A-Z]:\\")
NUMBER = re.compile(r"-?\d+\.\d+")

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


def run(source: Path, timeout: int = 120) -> Any:
    """The notebook of a source, with the outputs of a fresh run; an error in a cell is raised."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # not random: the same source gives the same file
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with tempfile.TemporaryDirectory() as settings:  # nobody's own IPython settings, and no history written into them
        backend = "module://matplotlib_inline.backend_inline"
        client.execute(env={**os.environ, "MPLBACKEND": backend, "IPYTHONDIR": settings})
    for data in (output["data"] for cell in code_cells(notebook) for output in cell.outputs if "data" in output):
        if "image/png" in data:
            data["image/png"] = small(data["image/png"])
    return notebook


def small(picture: str) -> str:
    """The same picture in 64 colours: a third of the size, and no difference to be seen in lines and text."""
    stream = io.BytesIO()
    plain = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    plain.quantize(64, dither=Image.Dither.NONE).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def committed(source: Path) -> Any:
    """The notebook beside its source."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[list[str]]:
    """What sort of outputs a cell has."""
    return [[output.output_type, output.get("name", ""), *sorted(output.get("data", ()))] for output in cell.outputs]


def texts(notebook: Any) -> list[str]:
    """Everything that can be read in the outputs; pictures are left out."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    plain = [text for o in outputs for kind, text in o.get("data", {}).items() if kind.startswith("text/")]
    return [output["text"] for output in outputs if "text" in output] + plain


def test_every_notebook_has_a_source_and_is_committed() -> None:
    assert SOURCES
    assert [notebook.stem for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))] == [source.stem for source in SOURCES]


@each_notebook
def test_cells_are_those_of_the_source(source: Path) -> None:
    wanted, found = ([(c.cell_type, c.source) for c in nb.cells] for nb in (jupytext.read(source), committed(source)))
    assert found == wanted, RENEW


@each_notebook
def test_committed_outputs_come_from_one_clean_run(source: Path) -> None:
    notebook = committed(source)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), RENEW
    assert any(cell.outputs for cell in cells), RENEW
    for kind, name, *_ in (kind for cell in cells for kind in kinds(cell)):
        assert kind != "error"
        assert name != "stderr"
    assert not any("execution" in cell.metadata for cell in cells), "the times of a run are in the file; " + RENEW


@each_notebook
def test_pictures_are_small(source: Path) -> None:
    assert source.with_suffix(".ipynb").stat().st_size < 700_000, RENEW


@each_notebook
def test_no_absolute_paths(source: Path) -> None:
    notebook = committed(source)
    for text in [source.read_text(encoding="utf-8"), str(notebook.metadata), *texts(notebook)]:
        assert not ABSOLUTE.search(text)


@pytest.mark.slow
@each_notebook
def test_runs_and_prints_what_is_committed(source: Path) -> None:
    fresh, old = run(source), committed(source)
    assert [kinds(cell) for cell in code_cells(fresh)] == [kinds(cell) for cell in code_cells(old)], RENEW
    for new_text, old_text in zip(texts(fresh), texts(old), strict=True):
        assert NUMBER.sub("#", new_text) == NUMBER.sub("#", old_text), RENEW
        new_numbers, old_numbers = ([float(n) for n in NUMBER.findall(text)] for text in (new_text, old_text))
        assert new_numbers == pytest.approx(old_numbers, rel=0.02, abs=0.02), RENEW


if __name__ == "__main__":
    for path in SOURCES:
        nbformat.write(run(path), path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb").name)
