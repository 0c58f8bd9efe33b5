"""Says at the end how many inputs there were."""

from __future__ import annotations

from typing import Any

from tests.fuzz.harness import counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if counted:
        terminalreporter.write_line(f"hostile inputs: {sum(counted.values())} in {len(counted)} tests")
