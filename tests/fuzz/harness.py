"""Hostile input: what is drawn, and what must hold whatever is drawn.

Either it works, or it raises a TrustError of one short printable line: in little memory, without waiting, and without a
change on disk. Each test runs twice: `few` inputs, always the same, and `all` of them, new ones each time, as `slow`.
"""

from __future__ import annotations

import datetime
import faulthandler
import math
import resource
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trust_tta.errors import LONGEST_MESSAGE, TrustError
from trust_tta.schema import show

FEW = 40  # of `all` inputs, one in so many is among the `few`
MOST_SECONDS = 60  # of one input, which takes milliseconds: a hang, however loaded the machine is
MOST_BYTES = 1 << 29  # by which the process may grow while one test runs

Check: TypeAlias = Callable[..., None]
Edit: TypeAlias = "tuple[list[int], Drawn]"

counted: dict[str, int] = {}
"""How many inputs each test has had."""


def fuzz(inputs: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Check], Callable[[int, Path], None]]:
    """A test of `check(folder, **drawn)` on that many drawn inputs."""

    def decorate(check: Check) -> Callable[[int, Path], None]:
        @pytest.mark.filterwarnings("ignore")
        @pytest.mark.parametrize(
            "count",
            [pytest.param(inputs // FEW, id="few"), pytest.param(inputs, id="all", marks=pytest.mark.slow)],
        )
        def test(count: int, tmp_path: Path) -> None:
            def one(**drawn: Any) -> None:
                counted[check.__name__] = counted.get(check.__name__, 0) + 1
                with _hanging_ends():
                    check(tmp_path, **drawn)

            few = count < inputs
            phases = [Phase.generate] if few else [Phase.generate, Phase.shrink]
            profile = settings(
                max_examples=count,
                derandomize=few,
                database=None,
                deadline=None,
                phases=phases,
                print_blob=not few,
                suppress_health_check=list(HealthCheck),
            )
            with _little_memory():
                profile(given(**strategies)(one))()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate


@contextmanager
def refusal() -> Iterator[None]:
    """Accept success and the promised refusals; any other exception is a failure."""
    try:
        yield
    except TrustError as error:
        refused = error
    else:
        return
    message = str(refused)
    assert message.strip(), f"a {type(refused).__name__} that says nothing"
    odd = sorted({c for c in message if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")})
    assert not odd, f"{odd} in {message[:300]!r}"
    assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message[:300]!r}"


@contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    """The files of `folder` are afterwards what they were."""
    before = _content(folder)
    yield
    assert _content(folder) == before, "reading has changed something on disk"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@contextmanager
def _hanging_ends() -> Iterator[None]:
    """Ends the process, with the stacks of all threads: nothing else interrupts what hangs outside of Python."""
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_BYTES, f"{grown >> 20} MiB were taken"


# What is drawn


TEXTS = (
    "", " ", "\x00", "\n", "\x1b[31mred\x1b[0m", "\u202e", "\u2028", "\udcff", "é" * 3, "x" * 5000, "a\nb" * 1000,
    "auto", "none", "nan", "{domain}", "{0}", "%s", "../../etc", "/dev/zero", ":", "a:", ":b", ".a:b", "a..b:c",
    "os:path", "os:path.join", "os:nope", "a\x00b:c", "trust_tta:Method", "trust_tta.methods.tent:Tent", "é:é",
    "__main__:x", "Tent", "vmamba_tiny",
)  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _tables(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"name": value}
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, 10**5000, 0.0, -0.0, 0.5, 1e-320,
    1e300, -1e300, math.nan, math.inf, -math.inf, [], {}, [[]], [{}], {"": 1}, {"name": 1}, {"name": "tent", "lr": {}},
    [1, "a"], [0] * 2000, ["a"] * 2000, {str(i): i for i in range(300)}, {"x" * 5000: 1}, {"a\nb": 1}, _nested(60),
    _nested(3000), _tables(60), _tables(900), datetime.date(1979, 5, 27), datetime.datetime(1979, 5, 27, 7, 32),
    datetime.time(7, 32), b"\xff\x00", (1, 2), {1, 2}, 1j, object(), int, Path("/dev/zero"), range(10**9),
)  # fmt: skip


class Drawn:
    """A value that may be too deep or too long to be printed when a test fails."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return show(self.value)


texts = st.sampled_from(TEXTS) | st.text(max_size=20)
values = (
    st.sampled_from(VALUES)
    | texts
    | st.integers()
    | st.floats()
    | st.lists(st.sampled_from(VALUES) | texts, max_size=3)
    | st.dictionaries(texts, st.sampled_from(VALUES), max_size=3)
).map(Drawn)
steps = st.lists(st.integers(0, 40), min_size=1, max_size=4)


def edited(tree: Any, edits: list[Edit], *, more: tuple[str, ...] = ()) -> Any:
    """A copy of nested tables and lists with values put in at places that numbers choose.

    A path leads down from table to table; at its end a value is replaced, or a key of `more` is added.
    """
    for path, value in edits:
        tree = _edit(tree, path, value.value, more)
    return tree


def _edit(tree: Any, path: list[int], value: Any, more: tuple[str, ...]) -> Any:
    if not path:
        return value
    step, *rest = path
    if isinstance(tree, Mapping) and (keys := [*tree, *(key for key in more if key not in tree)]):
        key = keys[step % len(keys)]
        inner = _edit(tree[key], rest, value, more) if key in tree else value
        return {**tree, key: inner}
    if isinstance(tree, list | tuple) and tree:
        place = step % len(tree)
        return [*tree[:place], _edit(tree[place], rest, value, more), *tree[place + 1 :]]
    return value


def edits(of: st.SearchStrategy[Drawn] = values, *, most: int = 3) -> st.SearchStrategy[list[Edit]]:
    return st.lists(st.tuples(steps, of), min_size=1, max_size=most)


_PIECES = (
    b"", b"\x00", b"\xff", b"\x00" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"[" * 300, b"{", b'"',
    b"9" * 400,
)  # fmt: skip
_changes = st.tuples(
    st.integers(0, 1 << 20), st.integers(0, 64), st.sampled_from(_PIECES) | st.binary(max_size=8), st.booleans()
)


def damaged(contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The contents of good files with some bytes replaced, removed or added, or cut off at an end."""
    return st.builds(_damage, contents, st.lists(_changes, max_size=5), st.none() | st.integers(0, 1 << 20))


def _damage(content: bytes, changes: list[tuple[int, int, bytes, bool]], cut: int | None) -> bytes:
    for place, length, piece, near_start in changes:
        at = place % (min(len(content), 512 if near_start else 1 << 30) + 1)
        content = content[:at] + piece + content[at + (len(piece) if length > 32 else length) :]
    return content if cut is None or cut % 4 else content[: cut % (len(content) + 1)]
