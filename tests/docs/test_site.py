"""The site builds without a warning, and reading it needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trust_tta as tt
from tests.docs.pages import DOCS, ROOT
from tests.report.browser import CHROMIUM, FLAGS

pytest.importorskip("material", reason="the site needs the extra 'docs'")

_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.parent.relative_to(DOCS) / name).is_file(), page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert _LOADED.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_equations_are_mathml(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        equations = len(re.findall(r"\$\$.+?\$\$", page.read_text(encoding="utf-8"), re.DOTALL))
        if equations:
            built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text(encoding="utf-8")
            assert built.count('<div class="equation"><math') == equations, page
            assert "arithmatex" not in built
            assert "\\" not in "".join(re.findall(r"<math.*?</math>", built, re.DOTALL)), f"{page}: an unknown command"


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
def test_the_search_works_from_a_folder(site: Path, tmp_path: Path) -> None:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000", "--dump-dom"]
    address = f"{(site / 'index.html').as_uri()}?q=entropy"
    page = subprocess.run([*command, address], check=True, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"md-search-result__meta[^>]*>\s*(\d+) matching document", page)
    assert found
    assert int(found[1]) > 0


def test_the_tools_of_the_site_are_not_part_of_it(site: Path) -> None:
    assert not list(site.rglob("*.py"))


def test_the_reference_has_every_public_name_and_shows_examples_as_code(site: Path) -> None:
    reference = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in tt.__all__:
        if not name.startswith("__") and not isinstance(getattr(tt, name), ModuleType):
            assert re.search(rf'id="trust_tta[\w.]*\.{name}"', reference), name
    assert "<blockquote>" not in reference
    assert '<span class="gp">&gt;&gt;&gt;' in reference
