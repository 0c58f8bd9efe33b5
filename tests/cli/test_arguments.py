"""The setup of the commands before they import PyTorch."""

from __future__ import annotations

import os

import pytest

from trust_tta.cli.arguments import use_passive_threads


@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [
        ({}, "passive", "2000"),
        ({"GOMP_SPINCOUNT": "7"}, "passive", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "active", None),
    ],
    ids=["by-itself", "spins-as-the-user-says", "policy-as-the-user-says"],
)
def test_commands_let_threads_sleep(
    given: dict[str, str], policy: str, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    use_passive_threads()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == (policy, spins)
