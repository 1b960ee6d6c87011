"""The documentation uses one vocabulary: a token attends to others, and retired words do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/**/*.py")]
# Each expression is followed by the word that replaces it.
RETIRED = {
    r"listen(s|ed|er|ers)?|told(?! apart)": "attends to, receives",
    r"deaf|(nobody|somebody|anybody) hears": "isolated, without in-edges",
    r"surpris(e|es|ed|ing)": "loss",
    r"even guessing": "chance level",
    r"said twice": "repeated",
    r"hearsay|heard of|hears? of": "reach",
    r"alike": "equal, uniformly",
    r"anew": "again",
    r"(shortest|another|other|many|several|all) ways? (from|of|to|through|leads?)": "path, walk",
    r"most hardly|many an?|(edit|cut)s? holds?|what is no edge|are asked of": "a plain sentence",
}


def read_prose(path: Path) -> str:
    """Return the text of a page without code, quotations and the addresses of links."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n".join(line for line in text.splitlines() if line.startswith("# "))
    return re.sub(r"```.*?```|`[^`\n]*`|“[^”]*”|\"[^\"\n]*\"|\]\([^)]*\)", " ", text, flags=re.DOTALL)


PROSE = {str(path.relative_to(ROOT)): read_prose(path) for path in PAGES if path.name != "CHANGELOG.md"}


@pytest.mark.parametrize(("expression", "replacement"), RETIRED.items())
def test_retired_words_are_absent(expression: str, replacement: str) -> None:
    pattern = re.compile(rf".*\b({expression})\b.*", re.IGNORECASE)
    lines = {name: match[0] for name, text in PROSE.items() if (match := pattern.search(text))}
    assert not lines, f"write instead: {replacement}"


def test_hearing_is_a_metaphor_of_at_most_three_sentences() -> None:
    assert len(re.findall(r"\bhear(s|d|ing)?\b", " ".join(PROSE.values()), re.IGNORECASE)) <= 3
