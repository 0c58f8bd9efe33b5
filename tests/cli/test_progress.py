"""Progress in plain lines, with a clock of the test's own."""

from __future__ import annotations

import io

import pytest

from trust_tta.cli.progress import plain_lines, progress, track


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_at_most_every_five_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    advance = plain_lines(40, "fog", stream, clock)
    for _ in range(12):
        clock.now += 1
        advance()
    clock.now += 8
    advance(8, note="accuracy 71.2")
    assert stream.getvalue().splitlines() == [
        "fog: 5 of 40, 5 s, about 35 s left",
        "fog: 10 of 40, 10 s, about 30 s left",
        "fog: 20 of 40, 20 s, about 20 s left, accuracy 71.2",
    ]


def test_without_a_total() -> None:
    clock, stream = Clock(), io.StringIO()
    advance = plain_lines(None, "files", stream, clock)
    clock.now += 60
    advance(3)
    assert stream.getvalue() == "files: 3, 60 s\n"


def test_tracking_hands_every_item_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2, 3], "items")) == [1, 2, 3]
    assert list(track(iter("ab"), "items", total=2)) == ["a", "b"]
    with progress(2, "steps") as advance:
        advance()
        advance(note="done")
    assert capsys.readouterr() == ("", "")  # quick work says nothing


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError), progress(2, "steps"):
        raise KeyError("x")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(4, "fog") as advance:
        advance(4, note="half")
    assert "4/4" in terminal.getvalue()
    assert "fog half" in terminal.getvalue()
