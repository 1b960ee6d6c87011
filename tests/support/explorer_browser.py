"""Open pages of the explorer in Chromium or Firefox, and run the scenarios of ``tests/explorer/*.mjs``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.explorer_engine import WEB, needs_node, tool

SCRIPT = Path(__file__).parents[1] / "explorer" / "run.mjs"
BROWSERS = {"chromium": ("chromium", "chromium-browser"), "firefox": ("firefox-esr", "firefox")}


def run_jobs(jobs: list[dict[str, Any]], seconds: int = 240, browser: str = "chromium") -> list[Any]:
    """Run scenarios in one browser, assert that all passed, and return their results."""
    node, names = needs_node(), BROWSERS[browser]
    path = next((path for name in names if (path := shutil.which(name))), None)
    executable = tool(browser, path, f"apt-get install {names[0]}")
    tool("playwright-core", WEB / "node_modules" / "playwright-core", f"npm ci in {WEB}")
    text, script = json.dumps({browser: executable, "jobs": jobs}), str(SCRIPT)
    options: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": seconds}
    process = subprocess.run([node, script], input=text, **options)
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    assert [outcome.get("error") for outcome in outcomes] == [None] * len(jobs)
    return [outcome["result"] for outcome in outcomes]


def assert_quiet(result: dict[str, Any]) -> None:
    """Assert that a page had no errors and requested nothing but itself."""
    assert result["errors"] == []
    for url in result["requests"]:
        assert url.startswith("file://"), url
        assert url.split("#")[0].endswith(".html"), url
