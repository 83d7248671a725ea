"""Draws `report.png`, the picture of a report in the README: `python docs/assets/report.py runs/quickstart`.

It needs Chromium. The picture shows the top of the report that `gleanrl report` makes of a finished run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.report import build

SIZE = "1280,850"  # width and height in pixels

if __name__ == "__main__":
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None or len(sys.argv) != 2:
        sys.exit("usage: python docs/assets/report.py RUN, with Chromium installed")
    page = build(RunFolder.existing(sys.argv[1])).resolve()
    target = Path(__file__).with_suffix(".png").resolve()
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}", "--virtual-time-budget=5000"]
    subprocess.run([browser, *options, f"--screenshot={target}", page.as_uri()], check=True)
