"""The file of a results store: made whole, and recognised before SQLite may touch it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from trust_tta.atomic import flush_file, flush_folder, temporary_name
from trust_tta.errors import DataError, StateError
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
{_PICTURES}
"""


def create_file(path: Path) -> None:
    """Make an empty store at `path`, unless another process makes it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN; {_TABLES} COMMIT; PRAGMA journal_mode = WAL;")
        flush_file(temporary)
        _publish(temporary, path)
        flush_folder(path.parent)
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_file(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Open an existing store, an older one made new; one that is none, damaged or newer is refused and left alone.

    For `reading` it need not be possible to write beside the store, as long as nobody else is writing.
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


def _connect(path: Path, address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, isolation_level=None, timeout=BUSY_SECONDS, uri=True)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("SELECT schema_version FROM store").fetchone() or (None,)
        check_schema(version, what=f"the results store '{path}'")
        (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if health == "ok":
            _upgrade(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise unusable(path, error) from error
    except DataError:
        connection.close()
        raise
    if health != "ok":
        connection.close()
        raise damaged(path, health)
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Bring a store of version 1, which has no pictures, to the present version, unless another process has."""
    query = "SELECT schema_version FROM store"
    if connection.execute(query).fetchone() == (SCHEMA_VERSION,):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute(query).fetchone() == (1,):
            for statement in filter(str.strip, _PICTURES.split(";")):
                connection.execute(statement)
            connection.execute("UPDATE store SET schema_version = ?", [SCHEMA_VERSION])
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def unusable(path: Path, error: sqlite3.DatabaseError) -> DataError | StateError:
    """What an error of SQLite means: trouble with the surroundings, or a broken file."""
    if isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
        why = " ".join(str(error).split())
        return StateError(
            f"the results store '{path}' cannot be used now ({why}); check that its folder is writable and try again"
        )
    return damaged(path, error)


def damaged(path: Path, reason: object) -> DataError:
    """The error for a store that SQLite cannot read."""
    why = " ".join(str(reason).split())
    return DataError(f"the results store '{path}' is damaged ({why}); restore it from a copy or start a new one")


def _check_header(path: Path) -> None:
    """Recognise a store by its first bytes, read as a plain file so that nothing can change it."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DataError(f"the results store '{path}' cannot be opened ({error.strerror}); give a file path") from error
    if header[:16] != _MAGIC or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise DataError(f"'{path}' is not a results store of trust-tta; give another path, this file was left as it is")


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # unlike a rename it never replaces a store that another process has just made
    except FileExistsError:
        pass
    except OSError:
        if not path.exists():  # a file system without links
            os.replace(temporary, path)
