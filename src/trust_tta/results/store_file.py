"""The SQLite file of a results store: creation, checks before opening, and a copy when it is removed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

from trust_tta.atomic import flush_file, flush_folder, temporary_name
from trust_tta.errors import DataError, StateError, reason_of
from trust_tta.results.codec import SCHEMA_VERSION, check_schema

APPLICATION_ID = 0x54727354  # "TrsT", at byte 68 of the file
BUSY_SECONDS = 60.0

_MAGIC = b"SQLite format 3\x00"
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
    _check_header(path)
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
            if row[0] < SCHEMA_VERSION:
                raise DataError(f"the results store '{path}' is older than trust-tta 0.1.0; run the benchmark again")
            (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise damaged(path, health)
        except BaseException:
            connection.close()
            raise
        return connection


def _check_header(path: Path) -> None:
    """Recognize a store by its first bytes, before SQLite opens it."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError(0, "it is a folder, a pipe or a device")
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DataError(f"the results store '{path}' cannot be opened ({error.strerror}); give a file path") from error
    if header[:16] != _MAGIC or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise DataError(f"'{path}' is not a results store of trust-tta; give another path, this file was left as it is")


def _publish(temporary: Path, path: Path) -> bool:
    """Give the finished file its name; False if a file of that name exists, which is not changed."""
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
