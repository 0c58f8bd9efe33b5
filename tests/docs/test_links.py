"""Links between documents lead somewhere, and so do the tests that the promises name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, table_rows

_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        assert goal.exists(), f"{page.name} links to {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


_PROMISES_PAGE = (DOCS / "develop" / "promises.md").read_text(encoding="utf-8")
PROMISES = [
    (promise, place) for promise, places in table_rows(_PROMISES_PAGE) for place in re.findall(r"`([^`]+)`", places)
]


@pytest.mark.parametrize(("promise", "place"), PROMISES, ids=[place for _, place in PROMISES])
def test_the_test_of_a_promise_exists(promise: str, place: str) -> None:
    file, _, test = place.partition("::")
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"no test {place} for: {promise}"
