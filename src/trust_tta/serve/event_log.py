"""Events and feedback in SQLite, on disk before anyone is told so.

Predictions are stored too, so that feedback can refer to them; they survive the process, not a power failure.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trust_tta.errors import StateError
from trust_tta.live.guard import Event

FORMAT = 1
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
"""


@dataclass(frozen=True)
class Label:
    """The label that a client gave for a prediction; `predicted` is what the stream had answered.

    `before`: the label that had been given before, if any.
    """

    prediction: str
    stream: str
    predicted: int
    label: int
    before: int | None = None

    @property
    def right(self) -> bool:
        return self.predicted == self.label


class Journal:
    """One file, used from any thread. Commits of events and feedback wait for the disk; those of predictions do not."""

    def __init__(self, path: Path, *, predictions_kept: int, events_kept: int) -> None:
        self._kept, self._since_pruning, self._events_kept = predictions_kept, 0, events_kept
        self._lock = threading.Lock()
        try:
            self._durable, self._quick = self._connect(path, "FULL"), self._connect(path, "NORMAL")
            with self._durable:
                self._durable.executescript(_TABLES)
            (version,) = self._durable.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise StateError(f"the journal {path} has format {version}; this version reads {FORMAT}")
            self._durable.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.Error as error:
            raise StateError(f"the journal {path} cannot be used ({error}); give another folder") from error

    @staticmethod
    def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        return connection

    def add_event(self, stream: str, event: Event) -> int:
        """Store an event; returns its number in the journal."""
        evidence = json.dumps(event.evidence, sort_keys=True)
        row = (stream, event.time, event.batch, event.kind, event.action, event.reason, evidence)
        with self._lock, self._durable:
            columns = "stream, time, batch, kind, action, reason, evidence"
            cursor = self._durable.execute(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            number = int(cursor.lastrowid or 0)
            if number % (self._events_kept // 10 + 1) == 0:
                self._durable.execute("DELETE FROM events WHERE id <= ?", (number - self._events_kept,))
        return number

    def add_predictions(self, stream: str, predictions: Sequence[tuple[str, int]]) -> None:
        """Store ids and classes; the oldest are removed when there are too many."""
        now = time.time()
        rows = [(name, stream, now, predicted) for name, predicted in predictions]
        with self._lock, self._quick:
            self._quick.executemany("INSERT INTO predictions (id, stream, time, class) VALUES (?, ?, ?, ?)", rows)
            self._since_pruning += len(rows)
            if self._since_pruning > self._kept // 10:
                self._since_pruning = 0
                newest = "(SELECT max(number) FROM predictions)"
                self._quick.execute(f"DELETE FROM predictions WHERE number <= {newest} - ?", (self._kept,))

    def add_feedback(self, labels: Iterable[tuple[str, int]]) -> list[Label | None]:
        """Store labels of predictions in one transaction; None for each unknown prediction."""
        now, found = time.time(), list[Label | None]()
        with self._lock, self._durable:
            for prediction, label in labels:
                query = (
                    "SELECT p.stream, p.class, f.label FROM predictions p LEFT JOIN feedback f ON f.prediction = p.id "
                    "WHERE p.id = ?"
                )
                row = self._durable.execute(query, (prediction,)).fetchone()
                found.append(Label(prediction, row[0], row[1], label, row[2]) if row else None)
                if row:
                    values = (prediction, row[0], now, row[1], label)
                    self._durable.execute("INSERT OR REPLACE INTO feedback VALUES (?, ?, ?, ?, ?)", values)
        return found

    def events(self, *, stream: str | None = None, most: int = 100) -> list[dict[str, Any]]:
        """The newest events, oldest first, as plain values."""
        where, given = ("WHERE stream = ?", (stream,)) if stream is not None else ("", ())
        query = f"SELECT id, stream, time, batch, kind, action, reason, evidence FROM events {where} "
        with self._lock:
            rows = self._durable.execute(query + "ORDER BY id DESC LIMIT ?", (*given, most)).fetchall()
        names = ("id", "stream", "time", "batch", "kind", "action", "reason")
        return [dict(zip(names, row[:-1], strict=True)) | {"evidence": json.loads(row[-1])} for row in reversed(rows)]

    def accuracy(self) -> dict[str, tuple[int, int]]:
        """By stream: how many labels came back, and how many of them had been predicted."""
        with self._lock:
            query = "SELECT stream, count(*), sum(class = label) FROM feedback GROUP BY stream"
            return {stream: (labels, right) for stream, labels, right in self._durable.execute(query)}

    def close(self) -> None:
        with self._lock:
            self._durable.close()
            self._quick.close()
