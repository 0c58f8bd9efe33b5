"""The results store: one SQLite file that several processes may fill, whole cells only, through any crash."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from trust_tta.errors import DataError, StateError
from trust_tta.results.claimant import Claimant
from trust_tta.results.codec import from_json, to_json
from trust_tta.results.ordering import key_rank
from trust_tta.results.record import Cell, CellKey, CellResult, Course, Facts
from trust_tta.results.schema import create_file, damaged, open_file, unusable

Status: TypeAlias = Literal["pending", "running", "done", "failed"]
Where: TypeAlias = Callable[[CellKey], bool]

LEASE_SECONDS = 120.0


@dataclass(frozen=True)
class Failure:
    """A cell whose last attempt ended in an error."""

    key: CellKey
    message: str


@dataclass(frozen=True)
class Counts:
    """How many cells a store holds in each state."""

    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


class ResultStore:
    """An open store. One object serves one thread of one process; open another elsewhere.

    A claim lasts as long as its process where this machine can tell, else `lease` seconds from the last `heartbeat`;
    after that the cell may be claimed again. Whoever finishes a cell first has it recorded.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, lease: float = LEASE_SECONDS) -> None:
        self.path = Path(path)
        if not self.path.exists():
            if not create:
                raise DataError(f"there is no results store at '{self.path}'; run a benchmark first or give its path")
            create_file(self.path)
        self._lease = lease
        self._renewed = 0.0
        self._me = Claimant.current()
        self._claims = False
        self._connection: sqlite3.Connection | None = open_file(self.path, reading=not create)

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is claimed but not finished, and close the file; closing twice is fine."""
        if self._connection is None:
            return
        try:
            if self._claims:  # whoever only reads may not be allowed to write
                with self._transaction() as connection:
                    connection.execute(
                        f"UPDATE cells SET status = 'pending', {_NO_CLAIM} WHERE token = ?", [self._me.token]
                    )
        finally:
            self._connection.close()
            self._connection = None

    def plan(self, keys: Iterable[CellKey]) -> None:
        """Note cells that are to be run, so that a report can say which are missing."""
        rows = [(key.digest, to_json(key)) for key in keys]
        with self._transaction() as connection:
            connection.executemany(
                "INSERT INTO cells (digest, key, status) VALUES (?, ?, 'pending') ON CONFLICT DO NOTHING", rows
            )

    def claim(self, key: CellKey) -> bool:
        """Take a cell for this process; False when it is finished, failed, or held by another."""
        return bool(self.claim_all([key]))

    def claim_all(self, keys: Sequence[CellKey]) -> tuple[CellKey, ...]:
        """Take all unfinished cells among `keys`, as one stream needs; none when one of them failed or is held."""
        now = time.time()
        with self._transaction() as connection:
            states = {key: self._state(connection, key, now) for key in keys}
            if "taken" in states.values():
                return ()
            wanted = tuple(key for key, state in states.items() if state == "free")
            self._claims |= bool(wanted)
            rows = [(key.digest, to_json(key), self._me.token, to_json(self._me), now + self._lease) for key in wanted]
            connection.executemany(_CLAIM, rows)
        return wanted

    def heartbeat(self) -> None:
        """Renew this process's claims; cheap enough to call at every batch."""
        now = time.time()
        if abs(now - self._renewed) < self._lease / 8:
            return
        with self._transaction() as connection:
            connection.execute("UPDATE cells SET expires = ? WHERE token = ?", [now + self._lease, self._me.token])
        self._renewed = now

    def finish(self, key: CellKey, result: CellResult, facts: Facts) -> bool:
        """Record a finished cell for good; False when another process had already recorded it."""
        bare = replace(result, course=Course())
        row = (key.digest, to_json(key), to_json(bare), _pack(result.course), to_json(facts))
        with self._transaction() as connection:
            return connection.execute(_FINISH, row).rowcount == 1

    def keep_pictures(self, key: CellKey, pictures: Mapping[int, bytes], *, class_names: Sequence[str] = ()) -> None:
        """Keep encoded pictures of images of the key's stream, by index, once for all cells of that stream."""
        rows = [(key.fingerprint, index, content) for index, content in pictures.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT INTO pictures VALUES (?, ?, ?) ON CONFLICT DO NOTHING", rows)
            if class_names:
                names = json.dumps(list(class_names))
                connection.execute("INSERT INTO classes VALUES (?, ?) ON CONFLICT DO NOTHING", [key.dataset, names])

    def pictures(self) -> dict[tuple[str, int], bytes]:
        """The kept pictures by the fingerprint of their stream and their index in the data set."""
        with self._reading() as connection:
            rows = connection.execute("SELECT fingerprint, place, content FROM pictures").fetchall()
        return {(fingerprint, place): content for fingerprint, place, content in rows}

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes of each data set of which pictures were kept."""
        with self._reading() as connection:
            rows = connection.execute("SELECT dataset, names FROM classes").fetchall()
        return {dataset: tuple(json.loads(names)) for dataset, names in rows}

    def fail(self, key: CellKey, message: str) -> None:
        """Record that a cell ended in an error; a cell another process holds or has finished stays as it is."""
        said = message.encode("utf-8", "replace").decode("utf-8")  # a file's name need not be text
        with self._transaction() as connection:
            connection.execute(_FAIL, (key.digest, to_json(key), said, self._me.token))

    def retry_failed(self, where: Where | None = None) -> int:
        """Make failed cells claimable again, and say how many."""
        rows = [(key.digest,) for key in self.keys("failed", where=where)]
        with self._transaction() as connection:
            connection.executemany("UPDATE cells SET status = 'pending' WHERE digest = ? AND status = 'failed'", rows)
        return len(rows)

    def results(self, where: Where | None = None, *, course: bool = True) -> list[Cell]:
        """The finished cells, in an order that does not depend on when they ran; without `course` it is left empty."""
        keys = self.keys("done", where=where)
        with self._reading() as connection:
            return [self._read(connection, key, course) for key in keys]

    def failures(self, where: Where | None = None) -> list[Failure]:
        """The failed cells with their messages."""
        with self._reading() as connection:
            rows = connection.execute("SELECT key, message FROM cells WHERE status = 'failed'").fetchall()
        found = [Failure(from_json(CellKey, text), message) for text, message in rows]
        return sorted((f for f in found if where is None or where(f.key)), key=lambda f: key_rank(f.key))

    def keys(self, status: Status | None = None, *, where: Where | None = None) -> list[CellKey]:
        """The keys of all cells, or of those in one state, in the order of `results`."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT key FROM cells WHERE ? IS NULL OR status = ?", [status, status]
            ).fetchall()
        found = [from_json(CellKey, text) for (text,) in rows]
        return sorted((key for key in found if where is None or where(key)), key=key_rank)

    def counts(self) -> Counts:
        """How many cells are in each state."""
        with self._reading() as connection:
            return Counts(**dict(connection.execute("SELECT status, count(*) FROM cells GROUP BY status").fetchall()))

    def _state(self, connection: sqlite3.Connection, key: CellKey, now: float) -> Literal["free", "taken", "done"]:
        query = "SELECT status, claimant, expires FROM cells WHERE digest = ?"
        row = connection.execute(query, [key.digest]).fetchone()
        if row is None:
            return "free"
        status, claimant, expires = row
        if status == "done":
            return "done"
        if status == "running":
            lives = from_json(Claimant, claimant).lives()
            return "taken" if lives or (lives is None and expires >= now) else "free"
        return "taken" if status == "failed" else "free"

    def _read(self, connection: sqlite3.Connection, key: CellKey, course: bool) -> Cell:
        columns = "result, facts, course" if course else "result, facts, NULL"
        row = connection.execute(f"SELECT {columns} FROM cells WHERE digest = ?", [key.digest]).fetchone()
        try:
            result, facts = from_json(CellResult, row[0]), from_json(Facts, row[1])
            return Cell(key, replace(result, course=_unpack(row[2])) if course else result, facts)
        except (zlib.error, struct.error) as error:
            raise damaged(self.path, error) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            raise StateError(f"the results store '{self.path}' is closed; open it again")
        if os.getpid() != self._me.pid:
            raise StateError(f"the results store '{self.path}' was opened before a fork; open it in each process")
        try:
            yield self._connection
        except sqlite3.DatabaseError as error:
            raise unusable(self.path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")


_NO_CLAIM = "token = NULL, claimant = NULL, expires = NULL"
_CLAIM = """
INSERT INTO cells (digest, key, status, token, claimant, expires) VALUES (?, ?, 'running', ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET status = 'running', message = NULL,
    token = excluded.token, claimant = excluded.claimant, expires = excluded.expires
"""
_FINISH = f"""
INSERT INTO cells (digest, key, status, result, course, facts) VALUES (?, ?, 'done', ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET status = 'done', message = NULL, {_NO_CLAIM},
    result = excluded.result, course = excluded.course, facts = excluded.facts
WHERE status != 'done'
"""
_FAIL = f"""
INSERT INTO cells (digest, key, status, message) VALUES (?, ?, 'failed', ?)
ON CONFLICT (digest) DO UPDATE SET status = 'failed', message = excluded.message, {_NO_CLAIM}
WHERE status = 'running' AND token = ?
"""


def _pack(course: Course) -> bytes:
    """Little-endian: number of batches, whether there is a before, then each column in turn; compressed."""
    n, before = len(course.samples), course.accuracy_before
    columns = [course.accuracy, course.entropy, course.seconds, *([before] if before is not None else [])]
    numbers = [number for column in columns for number in column]
    return zlib.compress(struct.pack(f"<q?{n}q{len(numbers)}d", n, before is not None, *course.samples, *numbers))


def _unpack(blob: bytes) -> Course:
    data = zlib.decompress(blob)
    n, has_before = struct.unpack_from("<q?", data)
    samples = struct.unpack_from(f"<{n}q", data, 9)
    offsets = range(9 + 8 * n, len(data), 8 * n) if n else range(0)
    columns = [struct.unpack_from(f"<{n}d", data, offset) for offset in offsets] or [()] * (3 + has_before)
    accuracy, entropy, seconds, *before = columns
    return Course(
        samples=samples,
        accuracy=accuracy,
        accuracy_before=before[0] if has_before else None,
        entropy=entropy,
        seconds=seconds,
    )
