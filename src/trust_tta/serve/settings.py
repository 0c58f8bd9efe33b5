"""The limits of the service, and the errors of refused requests."""

from __future__ import annotations

import re

from pydantic import Field

from trust_tta.errors import TrustError
from trust_tta.schema import Count, Positive, Rate, Schema, show

DEFAULT_STREAM = "default"
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # also the name of its folder
ANSWER_SECONDS = 60.0  # within which a prediction must be ready
MAX_REQUESTS = 512  # that Ray Serve forwards to a replica at the same time


class Settings(Schema):
    """The limits of one service."""

    batch_size: Count = Field(default=32, description="largest number of images in a batch")
    max_wait: Rate = Field(default=0.01, description="seconds that a request waits for others to join its batch")
    max_queued: Count = Field(default=256, description="queued images per stream")
    max_queued_total: Count = Field(default=1024, description="queued images of all streams")
    max_images: Count = Field(default=256, description="images per request")
    max_bytes: Count = Field(default=16 << 20, description="bytes per request")
    max_pixels: Count = Field(default=1 << 25, description="pixels per image, checked before it is decoded")
    max_connections: Count = Field(default=1024, description="open connections")
    read_seconds: Positive = Field(default=10.0, description="seconds within which a client must have sent its request")
    decode_seconds: Positive = Field(default=10.0, description="seconds within which a request must be decoded")
    max_loaded: Count = Field(default=16, description="streams in memory; the least recently used are moved to disk")
    max_streams: Count = Field(default=1000, description="streams in memory and on disk")


class RequestError(TrustError):
    """A refused request: an HTTP status, one line, and how many seconds to wait where trying again may help."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class BadRequestError(RequestError):
    """A refused request with status 400, made from a message alone, as parsers raise it."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def check_stream_name(name: str) -> str:
    """Return the name; refuse one that is not a safe folder name."""
    if not STREAM_NAME.fullmatch(name):
        raise BadRequestError(
            f"{show(name)} is not a valid stream name; use 1 to 64 letters, digits, _ and -, a letter or digit first"
        )
    return name
