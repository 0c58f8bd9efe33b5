"""Progress as it is drawn: plain lines with a clock of the test's own, or a bar."""

from __future__ import annotations

import io

import pytest

from trust_tta.cli.output import Drawer
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
    drawer: Progress = Drawer(stream, clock)
    drawer.start(40, "fog")
    for _ in range(12):
        clock.now += 1
        drawer.advance()
    clock.now += 8
    drawer.advance(8)
    assert stream.getvalue().splitlines() == [
        "fog: 5 of 40, 5 s, about 35 s left",
        "fog: 10 of 40, 10 s, about 30 s left",
        "fog: 20 of 40, 20 s, about 20 s left",
    ]


def test_without_a_total() -> None:
    clock, stream = Clock(), io.StringIO()
    drawer = Drawer(stream, clock)
    drawer.start(None, "files")
    clock.now += 60
    drawer.advance(3)
    assert stream.getvalue() == "files: 3, 60 s\n"


def test_each_stretch_counts_anew() -> None:
    clock, stream = Clock(), io.StringIO()
    with Drawer(stream, clock) as drawer:
        drawer.start(9, "one")
        drawer.advance(4)
        drawer.start(2, "two")
        clock.now += 6
        drawer.advance()
        drawer.finish()
        clock.now += 6
        drawer.advance()  # nobody asked for a stretch
    assert stream.getvalue() == "two: 1 of 2, 6 s\n"


def test_a_slow_start_does_not_count_in_the_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    drawer = Drawer(stream, clock)
    drawer.start(100, "passes")
    drawer.advance(0)  # alive
    clock.now += 60  # imports, compilation
    for _ in range(6):
        drawer.advance(4)
        clock.now += 1
    assert stream.getvalue().splitlines() == ["passes: 4 of 100, 60 s", "passes: 24 of 100, 65 s, about 19 s left"]


def test_notes_are_output_and_quick_work_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Drawer() as drawer:
        drawer.start(2, "steps")
        drawer.advance()
        drawer.note("half \x1b[31mway\x07")
    assert capsys.readouterr() == ("half ?[31mway?\n", "")


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError), Drawer():
        raise KeyError("x")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Drawer(terminal) as drawer:
        drawer.start(4, "[red]fog")
        drawer.advance(4)
    assert "4/4" in terminal.getvalue()
    assert "[red]fog" in terminal.getvalue()  # a name is no markup
