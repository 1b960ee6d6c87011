"""Pages of the explorer in Chromium and Firefox, driven by the scenarios of ``tests/explorer/*.mjs``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.explorer_engine import WEB, needs_node, tool

SCRIPT = Path(__file__).parents[1] / "explorer" / "run.mjs"
BROWSERS = {"chromium": ("chromium", "chromium-browser"), "firefox": ("firefox-esr", "firefox")}


def results(jobs: list[dict[str, Any]], seconds: int = 240, browser: str = "chromium") -> list[Any]:
    """What scenarios that all ended well saw, in one browser."""
    node, names = needs_node(), BROWSERS[browser]
    path = next((path for name in names if (path := shutil.which(name))), None)
    found = tool(browser, path, f"apt-get install {names[0]}")
    tool("playwright-core", WEB / "node_modules" / "playwright-core", f"npm ci in {WEB}")
    text, script = json.dumps({browser: found, "jobs": jobs}), str(SCRIPT)
    options: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": seconds}
    done = subprocess.run([node, script], input=text, **options)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert [one.get("error") for one in ended] == [None] * len(jobs)
    return [one["result"] for one in ended]


def quiet(seen: dict[str, Any]) -> None:
    """No errors, and no request but for the page itself."""
    assert seen["errors"] == []
    for url in seen["requests"]:
        assert url.startswith("file://"), url
        assert url.split("#")[0].endswith(".html"), url
