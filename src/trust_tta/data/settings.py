"""The settings a stream can have, and the field's names for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trust_tta.errors import ConfigError

Reset: TypeAlias = Literal["domain", "never", "batch"]

GRADUAL_SEVERITIES = (1, 2, 3, 4, 5, 4, 3, 2, 1)
SETTINGS = ("online", "continual", "standard", "mixed", "correlated", "gradual")

_RESETS: dict[str, Reset] = {"online": "domain", "continual": "never", "standard": "batch"}
_ALIASES = {
    "reset_each_shift": "online",
    "episodic": "standard",
    "mixed_domains": "mixed",
    "dirichlet": "correlated",
    "non_iid": "correlated",
}


@dataclass(frozen=True)
class Setting:
    """When the network goes back to its source, and in which order images come."""

    reset: Reset
    mixed: bool = False
    correlated: bool = False
    gradual: bool = False

    @property
    def name(self) -> str:
        """The one spelling of this setting: `parse_setting(s.name) == s`."""
        traits = [trait for trait in ("mixed", "correlated", "gradual") if getattr(self, trait)]
        word = next(word for word, reset in _RESETS.items() if reset == self.reset)
        return "+".join(traits if traits and self.reset == "never" else [word, *traits])


def parse_setting(text: str) -> Setting:
    """A setting from its name, an alias of the field, or several joined by `+` or `_`, as "online+correlated".

    Without a word for the reset, mixed, correlated and gradual streams never reset.
    """
    words = _words(text)
    resets = [_RESETS[word] for word in words if word in _RESETS]
    if not words or len(resets) > 1 or len(words) != len(set(words)):
        raise ConfigError(
            f"the setting {text!r} is not known; choose one of {', '.join(SETTINGS)}, "
            "or join them with '+', at most one of online, continual and standard"
        )
    setting = Setting(
        reset=resets[0] if resets else "never",
        mixed="mixed" in words,
        correlated="correlated" in words,
        gradual="gradual" in words,
    )
    if setting.mixed and setting.gradual:
        raise ConfigError(f"the setting {text!r} mixes domains and raises severity gradually; choose one of the two")
    return setting


def _words(text: str) -> list[str]:
    """The setting's words, aliases replaced; empty where one of them is unknown."""
    rest = text.lower().replace("-", "_").replace(" ", "").replace("+", "_")
    words = []
    while rest:
        known = (name for name in (*_ALIASES, *SETTINGS) if rest == name or rest.startswith(f"{name}_"))
        name = max(known, key=len, default=None)
        if name is None:
            return []
        words.append(_ALIASES.get(name, name))
        rest = rest[len(name) + 1 :]
    return words
