"""An anytime-valid test of whether adaptation harms: an e-process that bets on bounded evidence.

The null hypothesis is E[x_t | past] <= 0 for evidence x_t in [-1, 1], where positive values speak for the source. For a
fixed stake s in (0, 1), the wealth prod_{i=j..t} (1 + s x_i) of a gambler who starts at time j is a nonnegative
supermartingale under the null hypothesis. Gamblers start at every j with capital 1 / (j (j + 1)), which sums to 1, and
share it among a few stakes, so that harm that begins late is found without waiting for earlier gains to be lost again.
Their total, with the capital that has not started, 1 / (t + 1), is a supermartingale that begins at 1. By Ville's
inequality it ever reaches 1 / alpha with probability at most alpha, at whatever batch one looks.

Testing by betting: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B, 2024).
Tracking the risk of a deployed model: Podkopaev and Ramdas (ICLR 2022); of one that adapts, without labels: Schirmer
et al., "Monitoring Risks in Test-Time Adaptation" (NeurIPS 2025, arXiv 2507.08721).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trust_tta.errors import StateError
from trust_tta.live.snapshots import check_keys, check_number
from trust_tta.schema import show

STAKES = (0.2, 0.5, 0.9)
MAX_WEALTH = 1e12  # beyond this the alarm has long been raised


class HarmTest:
    """e-process against "adaptation does no harm"; an e-value of 1 / alpha is an alarm at level alpha."""

    def __init__(self) -> None:
        self.steps = 0
        self.e_value = self.peak = 1.0
        self._wealth = [0.0] * len(STAKES)

    def add(self, evidence: float) -> float:
        """Add one value in [-1, 1], positive if it speaks for the source; returns the e-value."""
        self.steps += 1
        t, x = self.steps, min(max(evidence, -1.0), 1.0)
        new = 1 / (t * (t + 1))
        self._wealth = [
            min((wealth + new) * (1 + stake * x), MAX_WEALTH)
            for wealth, stake in zip(self._wealth, STAKES, strict=True)
        ]
        self.e_value = sum(self._wealth) / len(STAKES) + 1 / (t + 1)
        self.peak = max(self.peak, self.e_value)
        return self.e_value

    @property
    def certainty(self) -> float:
        """1 - p, with the anytime-valid p-value of "adaptation does no harm"."""
        return 1 - 1 / self.peak

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "e_value": self.e_value, "peak": self.peak, "wealth": list(self._wealth)}

    @staticmethod
    def check_state(state: Any) -> None:
        """Refuse what `state` cannot have returned."""
        check_keys(state, ("steps", "e_value", "peak", "wealth"), "test")
        wealth = state["wealth"]
        if not isinstance(wealth, list) or len(wealth) != len(STAKES):
            raise StateError(f"the snapshot's test.wealth is {show(wealth)}, not a list of {len(STAKES)} numbers")
        check_number(state["steps"], "test.steps", int)
        check_number(state["peak"], "test.peak", float, low=1, high=2 * MAX_WEALTH)
        check_number(state["e_value"], "test.e_value", float, high=2 * MAX_WEALTH)
        for value in wealth:
            check_number(value, "test.wealth", float, high=2 * MAX_WEALTH)

    def load(self, state: Mapping[str, Any]) -> None:
        self.steps, self.e_value, self.peak = state["steps"], state["e_value"], state["peak"]
        self._wealth = list(state["wealth"])
