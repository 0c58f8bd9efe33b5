"""The limits of the service, and the error that refuses what exceeds them."""

from __future__ import annotations

import re

from pydantic import Field

from trust_tta.errors import TrustError
from trust_tta.schema import Count, Positive, Rate, Schema

DEFAULT_STREAM = "default"
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # also the name of its folder


class Settings(Schema):
    """The most that the service accepts, and how long anyone waits."""

    batch_size: Count = Field(default=32, description="largest number of images in a batch")
    max_wait: Rate = Field(default=0.01, description="seconds that a request waits for others to join its batch")
    most_queued: Count = Field(default=256, description="images that may be queued per stream")
    most_queued_in_all: Count = Field(default=1024, description="images that may be queued in all")
    most_images: Count = Field(default=256, description="images per request")
    most_bytes: Count = Field(default=16 << 20, description="bytes per request")
    most_bytes_in_all: Count = Field(default=256 << 20, description="bytes of all requests in progress")
    most_pixels: Count = Field(default=1 << 25, description="pixels per image, checked before it is decoded")
    most_requests: Count = Field(default=512, description="requests answered at the same time")
    most_connections: Count = Field(default=1024, description="open connections")
    read_seconds: Positive = Field(default=10.0, description="seconds within which a client must have sent its request")
    answer_seconds: Positive = Field(default=60.0, description="seconds within which a prediction must be ready")
    most_loaded: Count = Field(default=16, description="streams in memory; the least recently used go to disk")
    most_streams: Count = Field(default=1000, description="streams in all")
    predictions_kept: Count = Field(default=100_000, description="predictions for which feedback is accepted")
    events_kept: Count = Field(default=100_000, description="events in the journal; the oldest are removed")


class RequestError(TrustError):
    """A refused request: an HTTP status, one line, and how long to wait where trying again may help."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def check_stream_name(name: str) -> str:
    """The name, refused where it would not be a safe folder name."""
    if not STREAM_NAME.fullmatch(name):
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise RequestError(
            400, f"the stream {shown!r} has no valid name; use 1 to 64 letters, digits, _ and -, not - or _ first"
        )
    return name
