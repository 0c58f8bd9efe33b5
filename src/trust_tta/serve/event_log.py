"""Events and feedback in SQLite, on disk before they are acknowledged.

Predictions are stored too, so that feedback can refer to them; they survive the process, not a power failure.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trust_tta.errors import StateError
from trust_tta.live.guard import Event

FORMAT = 1
MAX_PREDICTIONS = 100_000  # for which feedback is accepted
MAX_EVENTS = 100_000
RECENT_LABELS = 100  # over which accuracy is shown
_TABLES = """
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY AUTOINCREMENT, stream TEXT NOT NULL, time REAL NOT NULL, batch INTEGER NOT NULL,
  kind TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL, evidence TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS predictions (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, stream TEXT NOT NULL, time REAL NOT NULL,
  class INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS feedback (
  prediction TEXT PRIMARY KEY, stream TEXT NOT NULL, time REAL NOT NULL, class INTEGER NOT NULL, label INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS feedback_by_stream ON feedback (stream);
CREATE INDEX IF NOT EXISTS feedback_counts ON feedback (stream, class, label);
"""
_COMPARED_COLUMNS = ("batch", "adapted", "source")  # of predictions; not in files of earlier versions


@dataclass(frozen=True)
class Feedback:
    """The label that a client gave for a prediction. `previous`: the label given before, if any.

    `compared`: the stream's batch, and the classes that its adapted network and the source predicted; None if the
    source did not predict the image.
    """

    prediction: str
    stream: str
    predicted: int
    label: int
    previous: int | None = None
    compared: tuple[int, int, int] | None = None

    @property
    def correct(self) -> bool:
        return self.predicted == self.label


class StoredPrediction(NamedTuple):
    """Id and class of a prediction, and `Feedback.compared`."""

    id: str
    predicted: int
    compared: tuple[int, int, int] | None = None


class LabelCounts(NamedTuple):
    """The labels of a stream: how many, how many were predicted correctly, and the accuracy over the last ones."""

    labels: int = 0
    correct: int = 0
    recent: float | None = None


class EventLog:
    """One SQLite file, used from any thread. Commits of events and feedback wait for the disk; predictions do not."""

    def __init__(self, path: Path, *, max_predictions: int = MAX_PREDICTIONS, max_events: int = MAX_EVENTS) -> None:
        self.path, self._max_predictions, self._max_events = path, max_predictions, max_events
        self._since_pruning = 0
        self._lock = threading.Lock()
        try:
            self._durable, self._quick = self._connect("FULL"), self._connect("NORMAL")
            (sound,) = self._durable.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise sqlite3.DatabaseError(" ".join(sound.split()))
            with self._durable:
                self._durable.executescript(_TABLES)
                present = {row[1] for row in self._durable.execute("PRAGMA table_info(predictions)")}
                for column in _COMPARED_COLUMNS:
                    if column not in present:
                        self._durable.execute(f"ALTER TABLE predictions ADD COLUMN {column} INTEGER")
            (version,) = self._durable.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise StateError(f"the event log {path} has format {version}; this version reads {FORMAT}")
            self._durable.execute(f"PRAGMA user_version = {FORMAT}")
            self._opened = os.stat(path)
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"the event log {path} cannot be used ({error}); restore a copy, or move it away to start an empty one"
            ) from error

    def _connect(self, synchronous: str) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        return connection

    def in_place(self) -> bool:
        """Whether the file is still where it was opened: SQLite goes on writing to one that was moved or removed."""
        try:
            return os.path.samestat(os.stat(self.path), self._opened)
        except OSError:
            return False

    def _check_in_place(self) -> None:
        if not self.in_place():
            raise sqlite3.OperationalError(f"{self.path} was moved or removed; put it back, or restart the service")

    def add_event(self, stream: str, event: Event) -> int:
        """Store an event; returns its id."""
        evidence = json.dumps(event.evidence, sort_keys=True)
        row = (stream, event.time, event.batch, event.kind, event.action, event.reason, evidence)
        with self._lock, self._durable:
            self._check_in_place()
            columns = "stream, time, batch, kind, action, reason, evidence"
            cursor = self._durable.execute(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            number = int(cursor.lastrowid or 0)
            if number % (self._max_events // 10 + 1) == 0:
                self._durable.execute("DELETE FROM events WHERE id <= ?", (number - self._max_events,))
        return number

    def add_predictions(self, stream: str, predictions: Sequence[StoredPrediction]) -> None:
        """Store predictions; the oldest are removed when there are too many."""
        now = time.time()
        rows = [(p.id, stream, now, p.predicted, *(p.compared or (None, None, None))) for p in predictions]
        columns = ", ".join(("id", "stream", "time", "class", *_COMPARED_COLUMNS))
        with self._lock, self._quick:
            self._quick.executemany(f"INSERT INTO predictions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._since_pruning += len(rows)
            if self._since_pruning > self._max_predictions // 10:
                self._since_pruning = 0
                newest = "(SELECT max(number) FROM predictions)"
                self._quick.execute(f"DELETE FROM predictions WHERE number <= {newest} - ?", (self._max_predictions,))

    def add_feedback(self, labels: Iterable[tuple[str, int]]) -> list[Feedback | None]:
        """Store labels of predictions in one transaction; None for each unknown prediction."""
        now, found = time.time(), list[Feedback | None]()
        query = (
            "SELECT p.stream, p.class, f.label, p.batch, p.adapted, p.source "
            "FROM predictions p LEFT JOIN feedback f ON f.prediction = p.id WHERE p.id = ?"
        )
        with self._lock, self._durable:
            self._check_in_place()
            for prediction, label in labels:
                row = self._durable.execute(query, (prediction,)).fetchone()
                compared = row[3:] if row and row[5] is not None else None
                found.append(Feedback(prediction, row[0], row[1], label, row[2], compared) if row else None)
                if row:
                    values = (prediction, row[0], now, row[1], label)
                    self._durable.execute(
                        "INSERT INTO feedback VALUES (?, ?, ?, ?, ?) "
                        "ON CONFLICT (prediction) DO UPDATE SET time = excluded.time, label = excluded.label",
                        values,
                    )
        return found

    def remove_stream(self, stream: str) -> None:
        """Remove the predictions and labels of a stream; its events stay."""
        with self._lock, self._durable:
            self._durable.execute("DELETE FROM predictions WHERE stream = ?", (stream,))
            self._durable.execute("DELETE FROM feedback WHERE stream = ?", (stream,))

    def events(self, *, stream: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """The newest events, oldest first, as plain values."""
        where, given = ("WHERE stream = ?", (stream,)) if stream is not None else ("", ())
        query = f"SELECT id, stream, time, batch, kind, action, reason, evidence FROM events {where} "
        with self._lock:
            rows = self._durable.execute(query + "ORDER BY id DESC LIMIT ?", (*given, limit)).fetchall()
        names = ("id", "stream", "time", "batch", "kind", "action", "reason")
        return [dict(zip(names, row[:-1], strict=True)) | {"evidence": json.loads(row[-1])} for row in rows[::-1]]

    def labeled_streams(self) -> list[str]:
        """The streams that have labels."""
        with self._lock:
            return [stream for (stream,) in self._durable.execute("SELECT DISTINCT stream FROM feedback")]

    def label_counts(self, stream: str) -> LabelCounts:
        counts = "SELECT count(*), coalesce(sum(class = label), 0) FROM feedback WHERE stream = ?1"
        newest = "SELECT class = label AS correct FROM feedback WHERE stream = ?1 ORDER BY rowid DESC LIMIT ?2"
        query = f"SELECT *, (SELECT avg(correct) FROM ({newest})) FROM ({counts})"
        with self._lock:
            return LabelCounts(*self._durable.execute(query, (stream, RECENT_LABELS)).fetchone())

    def close(self) -> None:
        with self._lock, closing(self._durable), closing(self._quick):
            pass
