"""Turn notebooks whose checks hold their solutions into exercises, checks, and files of solutions.

    python .ci/split_solutions.py notebooks/17_*.py      # sources; the .ipynb beside each follows, without a run

Old form: an exercise (``answer = None``) and below it a cell tagged "solution", which begins with the answer
(``answer = ... if answer is None else answer``) and checks it. New form: the cells are tagged "exercise" and
"check", the check begins with ``assert answer is not None``, and the answer stands in
``notebooks/solutions/NAME.py``. Outputs of checks are dropped; all others stay as they are.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import jupytext
import nbformat

UNSOLVED = 'assert answer is not None, "no answer yet: replace None in the cell above"'
CELL = re.compile(r"(?m)^(?=# %%)")
OLD_TEXT = re.compile(r"# Replace `None` by your answer, then run the cell below it.*?(?=\n#\n)", re.DOTALL)
TEXT = """# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/{name}.py)."""


def source_of(code: str, node: ast.AST) -> str:
    return ast.get_source_segment(code, node) or ""


def names_in(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def split(code: str) -> tuple[str, str]:
    """The solution and the check of an old cell."""
    body = ast.parse(code).body
    at = next(i for i, node in enumerate(body) if "if answer is None else" in source_of(code, node))
    before = [source_of(code, node) for node in body[:at]]
    choice = body[at].value  # type: ignore[attr-defined]
    value, other = source_of(code, choice.body), source_of(code, choice.orelse)
    lines = code.splitlines(keepends=True)
    check = "".join(lines[body[at].end_lineno :]).lstrip("\n")
    needed = [text for text in before if names_in(text.split("=")[0]) & names_in(check)]
    if value == "solution":
        value = before.pop().partition("=")[2].strip()
        needed = [text for text in needed if not text.startswith("solution =")]
    if other != "answer":
        needed.append(f"answer = {other}")
    return "\n".join([*before, f"answer = {value}"]), "\n".join([UNSOLVED, *needed, "", check])


def title_of(cell: str) -> str:
    """The title of the exercise that a cell of text sets."""
    found = re.search(r"\*\*(\d\. .*?)\*\*", cell.replace("\n# ", " "))
    return found[1] if found else ""


def convert(path: Path) -> str:
    """The new source; the file of solutions is written."""
    cells = CELL.split(path.read_text(encoding="utf-8"))
    solutions = [f"# %% [markdown]\n# # Solutions of [notebook {path.stem[:2]}](../{path.stem}.ipynb)\n"]
    for number, cell in enumerate(cells):
        head, _, code = cell.partition("\n")
        if '"solution"' not in head:
            cells[number] = OLD_TEXT.sub(TEXT.format(name=path.stem), cell)
            continue
        solution, check = split(code.strip("\n"))
        cells[number - 1] = cells[number - 1].replace("# %%\n", '# %% tags=["exercise"]\n', 1)
        cells[number] = f'# %% tags=["check", "raises-exception"]\n{check}\n\n'
        solutions += [f"# %% [markdown]\n# **{title_of(cells[number - 2])}**\n", f"# %%\n{solution}\n"]
    folder = path.parent / "solutions"
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_text("\n".join(solutions), encoding="utf-8")
    return "".join(cells).rstrip("\n") + "\n"


def follow(path: Path) -> None:
    """The committed notebook with the cells of its source, and the outputs that it had."""
    old = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    new = jupytext.read(path)
    for number, cell in enumerate(new.cells):
        cell["id"] = f"cell-{number}"
    pairs = ([cell for cell in notebook.cells if cell.cell_type == "code"] for notebook in (new, old))
    for cell, before in zip(*pairs, strict=True):
        if not {"exercise", "check"} & set(cell.metadata.get("tags", ())):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
    new.metadata = old.metadata
    count = 0
    for cell in new.cells:
        if cell.get("execution_count"):
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = count
    nbformat.write(new, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        if '"solution"' in (text := source.read_text(encoding="utf-8")):
            source.write_text(convert(source), encoding="utf-8")
        follow(source)
        print(source.name)
