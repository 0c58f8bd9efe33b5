"""Progress as it is drawn: plain lines with a clock of the test's own, or a bar."""

from __future__ import annotations

import io

import pytest

from trust_tta.cli.output import ProgressDisplay
from trust_tta.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_at_most_every_five_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    display: Progress = ProgressDisplay(stream, clock)
    display.start(40, "fog")
    for _ in range(12):
        clock.now += 1
        display.advance()
    clock.now += 8
    display.advance(8)
    assert stream.getvalue().splitlines() == [
        "fog: 5 of 40, 5 s, about 35 s left",
        "fog: 10 of 40, 10 s, about 30 s left",
        "fog: 20 of 40, 20 s, about 20 s left",
    ]


def test_without_a_total() -> None:
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(stream, clock)
    display.start(None, "files")
    clock.now += 60
    display.advance(3)
    assert stream.getvalue() == "files: 3, 60 s\n"


def test_start_resets_the_count() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as display:
        display.start(9, "one")
        display.advance(4)
        display.start(2, "two")
        clock.now += 6
        display.advance()
        display.finish()
        clock.now += 6
        display.advance()  # no steps were started
    assert stream.getvalue() == "two: 1 of 2, 6 s\n"


def test_time_before_the_first_step_is_not_part_of_the_rate() -> None:
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(stream, clock)
    display.start(100, "")
    display.advance(0)  # alive
    clock.now += 60  # imports, compilation
    for _ in range(6):
        display.advance(4)
        clock.now += 1
    assert stream.getvalue().splitlines() == ["4 %", "24 %, about 19 s left"]


def test_notes_are_output_and_quick_work_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        display.start(2, "steps")
        display.advance()
        display.note("half \x1b[31mway\x07")
    assert capsys.readouterr() == ("half ?[31mway?\n", "")


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError), ProgressDisplay():
        raise KeyError("x")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with ProgressDisplay(terminal) as display:
        display.start(4, "[red]fog")
        display.advance(4)
    assert "4/4" in terminal.getvalue()
    assert "[red]fog" in terminal.getvalue()  # a name is no markup
