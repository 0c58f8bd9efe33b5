"""A table of a configuration, read field by field; mistakes are gathered, so that all can be told at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trust_tta.errors import ConfigError

T = TypeVar("T")


class Fields:
    """One table. Every reader returns a usable value, and notes a mistake where the given one is none."""

    def __init__(self, content: Mapping[str, Any], mistakes: list[str], *, where: str = "") -> None:
        self.content, self.mistakes, self.where = dict(content), mistakes, where
        self.known: list[str] = []

    def text(self, name: str, default: str) -> str:
        return str(self._read(name, default, "a text", _is_text))

    def optional_text(self, name: str) -> str | None:
        value = self._read(name, None, "a text", _is_text)
        return None if value is None else str(value)

    def choice(self, name: str, default: T, allowed: Sequence[T]) -> T:
        expected = f"one of {', '.join(map(str, allowed))}"
        chosen: T = self._read(name, default, expected, lambda v: type(v) is type(default) and v in allowed)
        return chosen

    def whole(self, name: str, default: int, *, least: int = 0) -> int:
        return int(self._read(name, default, f"a whole number from {least} on", _is_at_least(least)))

    def optional_whole(self, name: str, *, least: int = 1) -> int | None:
        value = self._read(name, None, f"a whole number from {least} on", _is_at_least(least))
        return None if value is None else int(value)

    def number(self, name: str, default: float) -> float:
        return float(self._read(name, default, "a number above zero", _is_positive))

    def numbers(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Three numbers, one for each colour."""
        red, green, blue = self._read(name, default, "three numbers above zero", _are_three)
        return float(red), float(green), float(blue)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._read(name, default, "true or false", lambda value: isinstance(value, bool)))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Several texts, or a single one; None where the field is missing."""
        value = self._read(name, None, "a list of one or more texts", _are_texts)
        return None if value is None else tuple(self._distinct(name, _listed(value)))

    def wholes(self, name: str, default: int, *, least: int = 0) -> tuple[int, ...]:
        """Several whole numbers, or a single one."""
        fits, expected = _is_at_least(least), f"one or more whole numbers from {least} on"
        value = self._read(name, default, expected, lambda v: _listed(v) != [] and all(map(fits, _listed(v))))
        return tuple(self._distinct(name, _listed(value)))

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._read(name, {}, "a table", lambda value: isinstance(value, Mapping)))

    def table(self, name: str) -> Fields:
        """The fields of an inner table."""
        return Fields(self.mapping(name), self.mistakes, where=f"{self.where}{name}.")

    def try_to(self, name: str, make: Callable[[], T], default: T) -> T:
        """What `make` gives, or `default` and a note of why it refused."""
        try:
            return make()
        except ConfigError as error:
            self.complain(name, str(error))
            return default

    def complain(self, name: str, problem: str) -> None:
        self.mistakes.append(f"{self.where}{name}: {problem}")

    def close(self) -> None:
        """Note the fields that nothing has asked for."""
        for name in self.content.keys() - self.known:
            close = difflib.get_close_matches(name, self.known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(self.known)}"
            self.complain(name, f"there is no such field; {hint}")

    def _read(self, name: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        self.known.append(name)
        if name not in self.content:
            return default
        value = self.content[name]
        if not fits(value):
            self.complain(name, f"{value!r} is not {expected}")
            return default
        return value

    def _distinct(self, name: str, values: list[T]) -> list[T]:
        if len(set(values)) != len(values):
            self.complain(name, f"{values} names something twice; give each once")
        return values


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: object) -> bool:
    return _listed(value) != [] and all(map(_is_text, _listed(value)))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _are_three(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_positive, value))


def _is_at_least(least: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
