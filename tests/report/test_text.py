from __future__ import annotations

import io
import sys

import pytest

from trust_tta.report.text import counted, domain_name, duration, joined, printable, safe, safe_line, short_name

ATTACK = "\x1b]0;owned\x07\x1b[2J\u202eback\x9b1m\r\u200b"


def test_control_characters_are_replaced() -> None:
    assert safe(ATTACK + "a\tb\n") == "?]0;owned??[2J?back?1m??a\tb\n"
    assert safe_line("one\n two\t three") == "one two three"
    assert domain_name("gaussian_noise\x1b") == "gaussian noise?"
    assert safe("ni\udcf1o") == "ni?o"
    assert safe("76 % ± 1 – é 漢") == "76 % ± 1 – é 漢"


def test_a_plain_terminal_gets_plain_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("1.0 ± 0.2 – é\x1b") == "1.0 +-0.2 - ??"


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("trust (k=2)", "trust (k=2)"),
        ("trust (evaluate_order=badc)", "trust (badc)"),
        ("trust (orders=['abcd', 'badc', 'dcba'])", "trust (3 orders)"),
        ("trust (stochastic_depth=True)", "trust (stochasti…"),
        ("trust (stochastic_depth=False)", "trust (stochasti…"),
    ],
    ids=["short", "long", "a list", "on", "off"],
)
def test_names_in_charts_are_short_and_distinct(label: str, short: str) -> None:
    assert short_name(label, 17) == short


def test_numbers_in_words() -> None:
    assert [counted(n, noun) for n, noun in ((1, "update"), (6, "pass"), (0.5, "seed"))] == [
        "1 update",
        "6 passes",
        "0.5 seeds",
    ]
    assert [duration(s) for s in (4.25, 48, 720, 12_240)] == ["4.2 s", "48 s", "12 min", "3.4 h"]
    assert joined(["a", "b", "c"]) == "a, b and c"
