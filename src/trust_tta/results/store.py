"""The results store: one SQLite file that several processes may write; crashes leave only whole cells."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trust_tta.atomic import flush_file, flush_folder, temporary_name
from trust_tta.errors import DataError, StateError, reason_of
from trust_tta.results.codec import SCHEMA_VERSION, check_schema, from_json, to_json
from trust_tta.results.display import cell_sort_key, plain_text
from trust_tta.results.record import Cell, CellKey, CellResult, History, Provenance

Status: TypeAlias = Literal["pending", "running", "done", "failed"]
Where: TypeAlias = Callable[[CellKey], bool]

APPLICATION_ID = 0x54727354  # "TrsT", at byte 68 of the file
BUSY_SECONDS = 60.0  # to wait for the lock of another process
LEASE_SECONDS = 120.0
CLOCK_SECONDS = 60.0  # largest clock difference between machines that share a store
MAX_HISTORY_BYTES = 1 << 26  # more than a million batches


@dataclass(frozen=True)
class Failure:
    """A cell whose last attempt ended in an error."""

    key: CellKey
    message: str
    label: str = ""


@dataclass(frozen=True)
class PlannedCell:
    """A cell that has not run yet, or is running."""

    key: CellKey
    label: str
    running: bool = False


@dataclass(frozen=True)
class Counts:
    """Numbers of cells by state."""

    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """The holder of a claim: one open store in one process."""

    token: str
    pid: int
    born: str | None  # start time of the process in ticks since boot, to detect a reused pid
    place: str | None  # boot id and pid namespace, in which the pid is meant; None if unknown

    @classmethod
    def current(cls) -> Claimant:
        state = _process_state(os.getpid())
        born = state[1] if state else None
        return cls(token=uuid.uuid4().hex, pid=os.getpid(), born=born, place=_machine())

    def is_alive(self) -> bool | None:
        """Whether the process still exists; None if unknown."""
        if self.place is None or self.place != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state = _process_state(self.pid)
        if state is None or self.born is None:
            return None
        return state[0] not in "ZX" and state[1] == self.born


class ResultStore:
    """An open store, for one thread of one process.

    A claim ends with its process, on another machine `lease` seconds after the last `heartbeat`; then the cell may be
    claimed again. Of several results of a cell, the first is kept.
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
        self._writes = False  # a reader may lack write permission
        self._connection: sqlite3.Connection | None = open_file(self.path, reading=not create)
        self._identity = identity(self.path)

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release unfinished claims and close the file; may be called twice."""
        if self._connection is None:
            return
        try:
            if self._writes:
                with self._transaction() as connection:
                    connection.execute(f"{RELEASE} WHERE token = ?", [self._me.token])
                self.check_file()
        finally:
            self._connection.close()
            self._connection = None

    def check_file(self) -> None:
        """Check that the file was not removed or replaced while open; else save its content beside it and raise."""
        if identity(self.path) == self._identity:
            return
        with self._reading() as connection:
            saved = save_elsewhere(connection, self.path)
        self._writes = False
        what = "replaced by another file" if self.path.exists() else "removed"
        raise StateError(
            f"the results store '{self.path}' was {what} during the run; "
            f"all results so far are in '{saved}': rename it and run the same command again"
        )

    def plan(self, keys: Iterable[CellKey], *, labels: Mapping[CellKey, str] | None = None) -> None:
        """Record planned cells and their labels, so that reports list missing ones."""
        rows = [(key.digest, to_json(key), (labels or {}).get(key)) for key in keys]
        with self._transaction() as connection:
            connection.executemany(_PLAN, rows)

    def claim(self, keys: Sequence[CellKey]) -> tuple[CellKey, ...]:
        """Claim all unfinished cells of one stream; none if one of them failed or is claimed by another process."""
        now, wanted = time.time(), []
        with self._transaction() as connection:
            for key in dict.fromkeys(keys):
                query = "SELECT status, claimant, expires FROM cells WHERE digest = ?"
                status, claimant, expires = connection.execute(query, [key.digest]).fetchone() or ("pending", "", 0.0)
                if status == "running":
                    with self._decoding():
                        lives = from_json(Claimant, claimant).is_alive()
                        # A claim that expires later than a lease from now was made before the clock was set back.
                        lasts = now <= expires <= now + self._lease + CLOCK_SECONDS
                    if lives or (lives is None and lasts):
                        return ()
                if status == "failed":
                    return ()
                wanted += [key] if status != "done" else []
            rows = [(key.digest, to_json(key), self._me.token, to_json(self._me), now + self._lease) for key in wanted]
            connection.executemany(_CLAIM, rows)
        return tuple(wanted)

    def heartbeat(self) -> None:
        """Renew the claims of this process, at most every `lease / 8` seconds."""
        now = time.time()
        if abs(now - self._renewed) < self._lease / 8:
            return
        with self._transaction() as connection:
            connection.execute("UPDATE cells SET expires = ? WHERE token = ?", [now + self._lease, self._me.token])
        self._renewed = now
        self.check_file()

    def finish(self, key: CellKey, result: CellResult, provenance: Provenance, *, label: str | None = None) -> bool:
        """Record a finished cell; False if another process has already recorded it."""
        bare = replace(result, history=History())
        row = (key.digest, to_json(key), to_json(bare), _pack(result.history), to_json(provenance), label)
        with self._transaction() as connection:
            recorded = connection.execute(_FINISH, row).rowcount == 1
        self.check_file()
        return recorded

    def keep_pictures(self, key: CellKey, pictures: Mapping[int, bytes], *, class_names: Sequence[str] = ()) -> None:
        """Store encoded pictures by image index, once for all cells of the key's stream."""
        rows = [(key.fingerprint, index, content) for index, content in pictures.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT INTO pictures VALUES (?, ?, ?) ON CONFLICT DO NOTHING", rows)
            if class_names:
                names = json.dumps(list(class_names))
                connection.execute("INSERT INTO classes VALUES (?, ?) ON CONFLICT DO NOTHING", [key.dataset, names])

    def pictures(self) -> dict[tuple[str, int], bytes]:
        """The stored pictures by fingerprint of the stream and image index."""
        rows = self._rows("SELECT fingerprint, place, content FROM pictures")
        if any(list(map(type, row)) != [str, int, bytes] for row in rows):
            raise damaged(self.path, "a picture is not stored as bytes")
        return {(fingerprint, place): content for fingerprint, place, content in rows}

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Class names by data set."""
        rows = self._rows("SELECT dataset, names FROM classes")
        with self._decoding():
            found = {dataset: tuple(json.loads(names)) for dataset, names in rows}
        if any(not isinstance(name, str) for names in found.values() for name in names):
            raise damaged(self.path, "the name of a class is not a string")
        return found

    def fail(self, key: CellKey, message: str) -> None:
        """Record the error of a cell that this process has claimed."""
        readable = message.encode("utf-8", "replace").decode("utf-8")  # file names in messages may not be UTF-8
        with self._transaction() as connection:
            connection.execute(_FAIL, (key.digest, to_json(key), readable, self._me.token))

    def retry_failed(self, where: Where | None = None) -> int:
        """Make failed cells claimable again; returns their number."""
        rows = [(key.digest,) for key in self.keys("failed", where=where)]
        with self._transaction() as connection:
            connection.executemany("UPDATE cells SET status = 'pending' WHERE digest = ? AND status = 'failed'", rows)
        return len(rows)

    def results(self, where: Where | None = None, *, history: bool = True) -> list[Cell]:
        """The finished cells, sorted by key; `history=False` leaves their histories empty."""
        rows = self._cells("done", f", result, facts, {'course' if history else 'NULL'}", where=where)
        with self._decoding():
            return [
                Cell(
                    key,
                    replace(from_json(CellResult, result), history=_unpack(packed) if history else History()),
                    from_json(Provenance, provenance),
                    label,
                )
                for key, label, result, provenance, packed in rows
            ]

    def find(self, key: CellKey) -> CellResult | None:
        """The result of one cell without its history, or None if it is not finished."""
        rows = self._rows("SELECT result FROM cells WHERE digest = ? AND status = 'done'", key.digest)
        with self._decoding():
            return from_json(CellResult, rows[0][0]) if rows else None

    def failures(self, where: Where | None = None) -> list[Failure]:
        rows = self._cells("failed", ", message", where=where)
        return [Failure(key, str(message), label) for key, label, message in rows]

    def planned(self) -> list[PlannedCell]:
        """The cells that have not run yet, then those that are running."""
        states: tuple[Status, ...] = ("pending", "running")
        return [PlannedCell(key, label, state == "running") for state in states for key, label in self._cells(state)]

    def keys(self, status: Status | None = None, *, where: Where | None = None) -> list[CellKey]:
        """The keys of all cells, or of those in one state, sorted."""
        return [key for key, _ in self._cells(status, where=where)]

    def states(self) -> dict[str, str]:
        """The state of each cell by digest: "died" if it was running in a process that has ended, as after a kill."""
        rows = self._rows("SELECT digest, status, claimant FROM cells")
        with self._decoding():
            lives = {digest: from_json(Claimant, who).is_alive() for digest, status, who in rows if status == "running"}
        return {digest: "died" if lives.get(digest) is False else status for digest, status, _ in rows}

    def counts(self) -> Counts:
        with self._decoding():
            return Counts(**dict(self._rows("SELECT status, count(*) FROM cells GROUP BY status")))

    def _cells(self, status: Status | None, more: str = "", *, where: Where | None = None) -> list[tuple[Any, ...]]:
        """Key, label and `more` columns of all cells, or of those in one state, sorted by key."""
        query = f"SELECT digest, key, label{more} FROM cells WHERE ? IS NULL OR status = ?"
        found = []
        with self._reading() as connection:
            for digest, text, label, *rest in connection.execute(query, (status, status)):
                with self._decoding():
                    key = from_json(CellKey, text)
                if key.digest != digest:
                    raise damaged(self.path, "a key is not that of its cell")
                if where is None or where(key):
                    found.append((key, plain_text(str(label)) if label else key.method, *rest))
        return sorted(found, key=lambda row: cell_sort_key(row[0]))

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._reading() as connection:
            return connection.execute(query, values).fetchall()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn decoding errors into a DataError about a damaged store."""
        try:
            yield
        except _UNDECODABLE as error:
            raise damaged(self.path, error) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            raise StateError(f"the results store '{self.path}' is closed; open it again")
        if os.getpid() != self._me.pid:
            raise StateError(f"the results store '{self.path}' was opened before a fork; open it in each process")
        with explained(self.path):
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
                self._writes = True
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")


_UNDECODABLE = (
    ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError, zlib.error,
    struct.error,
)  # fmt: skip

NO_CLAIM = "token = NULL, claimant = NULL, expires = NULL"
RELEASE = f"UPDATE cells SET status = 'pending', {NO_CLAIM}"
_TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
CREATE TABLE store (schema_version INTEGER NOT NULL);
INSERT INTO store VALUES ({SCHEMA_VERSION});
CREATE TABLE cells (
    digest TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'done', 'failed')),
    token TEXT,
    claimant TEXT,
    expires REAL,
    message TEXT,
    result TEXT,
    course BLOB,
    facts TEXT,
    label TEXT,
    CHECK ((status = 'done') = (result IS NOT NULL AND course IS NOT NULL AND facts IS NOT NULL)),
    CHECK ((status = 'running') = (token IS NOT NULL AND claimant IS NOT NULL AND expires IS NOT NULL)),
    CHECK (status != 'failed' OR message IS NOT NULL)
) WITHOUT ROWID;
-- Pictures belong to a stream: all methods that ran on it share them.
CREATE TABLE pictures (
    fingerprint TEXT NOT NULL,
    place INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (fingerprint, place)
) WITHOUT ROWID;
CREATE TABLE classes (dataset TEXT PRIMARY KEY, names TEXT NOT NULL) WITHOUT ROWID;
"""

_FOREIGN = "SELECT type, name FROM sqlite_schema WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"
_PLAN = """
INSERT INTO cells (digest, key, status, label) VALUES (?, ?, 'pending', ?)
ON CONFLICT (digest) DO UPDATE SET label = excluded.label WHERE excluded.label IS NOT NULL
"""
_CLAIM = """
INSERT INTO cells (digest, key, status, token, claimant, expires) VALUES (?, ?, 'running', ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET status = 'running', message = NULL,
    token = excluded.token, claimant = excluded.claimant, expires = excluded.expires
"""
_FINISH = f"""
INSERT INTO cells (digest, key, status, result, course, facts, label) VALUES (?, ?, 'done', ?, ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET status = 'done', message = NULL, {NO_CLAIM},
    result = excluded.result, course = excluded.course, facts = excluded.facts,
    label = coalesce(excluded.label, label)
WHERE status != 'done'
"""
_FAIL = f"""
INSERT INTO cells (digest, key, status, message) VALUES (?, ?, 'failed', ?)
ON CONFLICT (digest) DO UPDATE SET status = 'failed', message = excluded.message, {NO_CLAIM}
WHERE status = 'running' AND token = ?
"""


def _machine() -> str | None:
    # Linux only: elsewhere signal 0 may end the process, or there is no boot id.
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time from /proc, or None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name may itself hold spaces and brackets
    return after_name[0], after_name[19]


def _pack(history: History) -> bytes:
    """Little-endian: number of batches, whether there is `accuracy_before`, then each column; compressed."""
    n, before = len(history.samples), history.accuracy_before
    columns = [history.accuracy, history.entropy, history.seconds, *([before] if before is not None else [])]
    numbers = [number for column in columns for number in column]
    return zlib.compress(struct.pack(f"<q?{n}q{len(numbers)}d", n, before is not None, *history.samples, *numbers))


def _unpack(blob: bytes) -> History:
    stream = zlib.decompressobj()
    data = stream.decompress(blob, MAX_HISTORY_BYTES)
    if not stream.eof:
        raise ValueError("a history is cut or too large")
    n, has_before = struct.unpack_from("<q?", data)
    samples = struct.unpack_from(f"<{n}q", data, 9)
    offsets = range(9 + 8 * n, len(data), 8 * n) if n else range(0)
    columns = [struct.unpack_from(f"<{n}d", data, offset) for offset in offsets] or [()] * (3 + has_before)
    names = ("accuracy", "entropy", "seconds", *(("accuracy_before",) if has_before else ()))
    return History(samples=samples, **dict(zip(names, columns, strict=True)))


# the file


def create_file(path: Path) -> None:
    """Make an empty store at `path`, unless another process makes it first."""
    with _new_file(path) as temporary:
        with explained(path), closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN; {_TABLES} COMMIT; PRAGMA journal_mode = WAL;")
        _publish(temporary, path)


def open_file(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Open an existing store; a file that is not one, is damaged or has another version is refused and not changed.

    With `reading`, the folder need not be writable as long as no other process has the store open.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError(0, "it is a folder, a pipe or a device")
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DataError(f"the results store '{path}' cannot be opened ({error.strerror}); give a file path") from error
    if header[:16] != b"SQLite format 3\x00" or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise DataError(f"'{path}' is not a results store of trust-tta; give another path, this file was left as it is")
    address = path.absolute().as_uri()
    alone = not path.with_name(f"{path.name}-wal").exists()
    try:
        return _connect(path, address)
    except StateError:
        if reading and alone:
            return _connect(path, f"{address}?mode=ro&immutable=1")
        raise


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at `path`, or None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def save_elsewhere(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy an open store whose file was removed from `path` to a new file beside it; returns its path."""
    with _new_file(path) as temporary:
        with explained(path), closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
            connection.backup(copy)
            copy.execute(f"{RELEASE} WHERE status = 'running'")  # their claims are in the removed file
            copy.execute("PRAGMA journal_mode = WAL")
        names = (path.with_name(f"{path.stem}.saved{'' if n == 1 else f'-{n}'}{path.suffix}") for n in count(1))
        return next(name for name in names if _publish(temporary, name))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a StateError (disk, permissions, locks) or a DataError (damaged file)."""
    try:
        yield
    except UnicodeDecodeError as error:  # not even the message about a broken file is text
        raise damaged(path, error) from error
    except sqlite3.DatabaseError as error:
        text = reason_of(error)
        if isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError) and "decode to UTF-8" not in text:
            raise _unwritable(path, text) from error
        raise damaged(path, error) from error


def damaged(path: Path, reason: object) -> DataError:
    """The error for a store whose content cannot be read."""
    why = " ".join(str(reason).split())
    why = why if len(why) <= 160 else why[:157] + "..."
    return DataError(f"the results store '{path}' is damaged ({why}); restore it from a copy or start a new one")


def _unwritable(path: Path, why: object) -> StateError:
    return StateError(
        f"the results store '{path}' cannot be used now ({why}); check that its folder is writable and try again"
    )


def _connect(path: Path, address: str) -> sqlite3.Connection:
    with explained(path):
        connection = sqlite3.connect(address, isolation_level=None, timeout=BUSY_SECONDS, uri=True)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            if odd := connection.execute(_FOREIGN).fetchone():  # a view may never end, a trigger may change anything
                raise damaged(path, f"it holds the {odd[0]} {odd[1]!r}, which no store has")
            row = connection.execute("SELECT schema_version FROM store").fetchone()
            check_schema(row[0] if row else 0, what=f"the results store '{path}'")
            (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise damaged(path, health)
        except BaseException:
            connection.close()
            raise
        return connection


def _publish(temporary: Path, path: Path) -> bool:
    """Move the finished file to `path`; False if there is a file already, which stays as it is."""
    flush_file(temporary)
    try:
        os.link(temporary, path)  # unlike a rename it never replaces a store that another process has just made
    except FileExistsError:
        return False
    except OSError:
        if path.exists():
            return False
        os.replace(temporary, path)  # a file system without links
    flush_folder(path.parent)
    return True


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A temporary file name beside `path`, removed at the end."""
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):  # what cannot be removed was never made
                os.unlink(f"{temporary}{suffix}")
