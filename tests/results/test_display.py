"""Labels of methods, and images that only one of two cells has right."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.results.samples import KEY, PROVENANCE, RESULT
from trust_tta.results import Cell, discordant, make_label


def test_a_label_shows_what_sets_a_method_apart() -> None:
    assert make_label("trust", {}) == "trust"
    assert make_label("trust", {"merge": "slerp", "k": 2}) == "trust (k=2, merge=slerp)"
    assert make_label("my\x1b[31m", {"a": "\n"}) == "my?[31m (a=?)"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_discordant_images_are_counted(pairs: list[tuple[bool, bool]]) -> None:
    def cell(right: list[bool], method: str = "trust", fingerprint: str = "abc") -> Cell:
        bits = "".join("1" if r else "0" for r in right).ljust(-(-len(right) // 8) * 8, "0")
        correct = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
        key = replace(KEY, method=method, fingerprint=fingerprint)
        return Cell(key, replace(RESULT, samples=len(right), correct=correct), PROVENANCE)

    one, other = cell([a for a, _ in pairs]), cell([b for _, b in pairs], method="tent")
    assert discordant(one, other) == (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    assert discordant(one, cell([b for _, b in pairs], fingerprint="other")) is None
    assert discordant(one, Cell(KEY, RESULT, PROVENANCE)) is None
