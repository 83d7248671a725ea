"""Helpers for tests of the HTML report: read its embedded data, and load it in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)


def embedded(page: Path) -> dict[str, Any]:
    found = re.search(r'id="payload">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def opened(page: Path, profile: Path) -> str:
    """Return the HTML of the page after its script ran in headless Chromium. Skips the test without Chromium."""
    if BROWSER is None:
        pytest.skip("no Chromium here: the report is not opened in a browser")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--virtual-time-budget=4000",
    ]
    command = [BROWSER, *flags, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


def assert_drawn(document: str) -> None:
    root = document[: document.index("<head>")]
    assert 'data-ready="true"' in root
    assert "data-error" not in root
