"""The file of a results store: made whole, recognized before SQLite may touch it, and saved when it is lost."""

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
# Pictures belong to a stream, not to a cell: all methods that met the stream share them.
_PICTURES = """
CREATE TABLE pictures (
    fingerprint TEXT NOT NULL,
    place INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (fingerprint, place)
) WITHOUT ROWID;
CREATE TABLE classes (dataset TEXT PRIMARY KEY, names TEXT NOT NULL) WITHOUT ROWID;
"""
NO_CLAIM = "token = NULL, claimant = NULL, expires = NULL"
RELEASE = f"UPDATE cells SET status = 'pending', {NO_CLAIM}"
_LABELS = "ALTER TABLE cells ADD COLUMN label TEXT"
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
    CHECK ((status = 'done') = (result IS NOT NULL AND course IS NOT NULL AND facts IS NOT NULL)),
    CHECK ((status = 'running') = (token IS NOT NULL AND claimant IS NOT NULL AND expires IS NOT NULL)),
    CHECK (status != 'failed' OR message IS NOT NULL)
) WITHOUT ROWID;
{_LABELS};
{_PICTURES}
"""

_FOREIGN = "SELECT type, name FROM sqlite_schema WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"


def create_file(path: Path) -> None:
    """Make an empty store at `path`, unless another process makes it first."""
    with _new_file(path) as temporary:
        with explained(path), closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN; {_TABLES} COMMIT; PRAGMA journal_mode = WAL;")
        _publish(temporary, path)


def open_file(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Open an existing store; one that is none, damaged or newer is refused and left alone.

    An older one is brought to the present version, unless it is only read. For `reading` it need not be possible to
    write beside the store, as long as nobody else is writing.
    """
    _check_header(path)
    address = path.absolute().as_uri()
    alone = not path.with_name(f"{path.name}-wal").exists()
    try:
        return _connect(path, address, upgrade=not reading)
    except StateError:
        if reading and alone:
            return _connect(path, f"{address}?mode=ro&immutable=1", upgrade=False)
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of an open store."""
    row: tuple[int] | None = connection.execute("SELECT schema_version FROM store").fetchone()
    return row[0] if row else 0


def identity(path: Path) -> tuple[int, int] | None:
    """What tells the file at `path` from any other, or None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def save_elsewhere(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy an open store whose file is gone from `path` to a new file beside it, and say which."""
    with _new_file(path) as temporary:
        with explained(path), closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
            connection.backup(copy)
            copy.execute(f"{RELEASE} WHERE status = 'running'")  # they are held in the file that is gone
            copy.execute("PRAGMA journal_mode = WAL")
        names = (path.with_name(f"{path.stem}.saved{'' if n == 1 else f'-{n}'}{path.suffix}") for n in count(1))
        return next(name for name in names if _publish(temporary, name))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What SQLite's errors mean: trouble with the surroundings, or a broken file."""
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


def _connect(path: Path, address: str, *, upgrade: bool) -> sqlite3.Connection:
    with explained(path):
        connection = sqlite3.connect(address, isolation_level=None, timeout=BUSY_SECONDS, uri=True)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            if odd := connection.execute(_FOREIGN).fetchone():  # a view may never end, a trigger may change anything
                raise damaged(path, f"it holds the {odd[0]} {odd[1]!r}, which no store has")
            check_schema(version_of(connection), what=f"the results store '{path}'")
            (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise damaged(path, health)
            if upgrade:
                _upgrade(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Add what stores of earlier versions lack, unless another process has."""
    if version_of(connection) == SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = version_of(connection)
        steps = [*_PICTURES.split(";")] if version < 2 else []
        steps += [_LABELS] if version < 3 else []
        for statement in filter(str.strip, steps):
            connection.execute(statement)
        connection.execute("UPDATE store SET schema_version = ?", [SCHEMA_VERSION])
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _check_header(path: Path) -> None:
    """Recognize a store by its first bytes, read as a plain file so that nothing can change it."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write
            raise OSError(0, "it is a folder, a pipe or a device")
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DataError(f"the results store '{path}' cannot be opened ({error.strerror}); give a file path") from error
    if header[:16] != _MAGIC or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise DataError(f"'{path}' is not a results store of trust-tta; give another path, this file was left as it is")


def _publish(temporary: Path, path: Path) -> bool:
    """Give the finished file its name; False where there is a file of that name, which is left as it is."""
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
    """A temporary name beside `path`; what is left of the file at the end is removed."""
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
