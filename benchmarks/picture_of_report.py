"""The README's picture of a report: the top of a page, light, 1200 pixels wide.

    trust-tta demo --out demo
    python -m benchmarks.picture_of_report demo/report.html docs/assets/report.png

Needs Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000")
WIDTH, HEIGHT = 1200, 1180


def take_picture(page: Path, out: Path, *, browser: str, height: int = HEIGHT) -> None:
    """Open the page, and save what a window of that height shows as PNG."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        size = [f"--window-size={WIDTH},{height}", f"--user-data-dir={folder}/profile"]
        command = [browser, *FLAGS, *size, f"--screenshot={raw}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(raw) as picture:
            out.parent.mkdir(parents=True, exist_ok=True)
            picture.convert("RGB").save(out, "PNG", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="take the picture of a report for the README")
    parser.add_argument("page", type=Path, help="what `trust-tta demo` or `trust-tta report` wrote")
    parser.add_argument("out", type=Path, help="the PNG file")
    parser.add_argument("--height", type=int, default=HEIGHT, help=f"in pixels (default {HEIGHT})")
    arguments = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser found; install one of {', '.join(BROWSERS)}")
    take_picture(arguments.page, arguments.out, browser=browser, height=arguments.height)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
