"""Follow every link of a built site inside it: each file must be there, and each anchor in it. No network is asked.

python docs/links.py build/site
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src", "source": "src"}
# one file with all of the explorer: its links are made by its script
NOT_READ = ("explore.html",)


@dataclass(frozen=True)
class Found:
    """What a site has: ``broken`` are the links that lead nowhere, each with its page."""

    pages: int
    links: int
    broken: tuple[str, ...]
    megabytes: float


class Page(HTMLParser):
    """The links and the anchors of a page.

    >>> page = Page(); page.feed('<a id="one" href="two.html#three">'); page.links, page.anchors
    (['two.html#three'], {'one'})
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the id, and the link."""
        found = dict(attrs)
        self.anchors |= {name for name in (found.get("id"), found.get("name")) if name}
        if target := found.get(LINKS.get(tag, "")):
            self.links.append(target)


@cache
def read(path: Path) -> Page:
    """A page; an explorer's is not read."""
    page = Page()
    if path.suffix == ".html" and path.name not in NOT_READ:
        page.feed(path.read_text(encoding="utf-8"))
    return page


def check(site: Path) -> Found:
    """Every link of every page."""
    site = site.resolve()
    pages = sorted(site.rglob("*.html"))
    links = [(page, link) for page in pages for link in read(page).links]
    broken = dict.fromkeys(
        f"{page.relative_to(site)}: {why}" for page, link in links if (why := problem(site, page, link))
    )
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    return Found(len(pages), len(links), tuple(broken), size / 1e6)


def problem(site: Path, page: Path, link: str) -> str:
    """Why a link leads nowhere, or nothing; other sites are not asked."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site) or not target.is_file():
        return f"{link} is no file"
    if parts.fragment and target.name not in NOT_READ and unquote(parts.fragment) not in read(target).anchors:
        return f"{link} has no such anchor"
    return ""


if __name__ == "__main__":
    result = check(Path(sys.argv[1]))
    print("\n".join(result.broken) or f"{result.pages} pages, {result.links} links, none broken")
    sys.exit(1 if result.broken else 0)
