"""One connection of a client: HTTP/1.1 by uvicorn and httptools, with limits on what is slow, large or too many."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trust_tta.serve.settings import Settings

MOST_HEADER = 1 << 16  # bytes


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a deadline for each request, and limits on connections and headers."""

    settings: ClassVar[Settings]
    _timer: asyncio.TimerHandle | None = None
    _in_header = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.most_connections:
            transport.close()
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data) if self._in_header else 0
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except (HttpParserError, HttpParserUpgrade):
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._in_header and self._header_bytes > MOST_HEADER:
                self.send_400_response("The header is too large.")
        # Nothing is being answered: part of a header has come, or of a body that was answered before its end.
        waiting = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing() or not waiting:
            self._stop_timer()
        elif self._timer is None:  # it does not begin anew with every byte
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:  # of another protocol: the parser leaves the body to that
            kept = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            line = b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
            self.parser = HttpRequestParser(self)
            self.parser.feed_data(b"".join([line, *kept, b"\r\n", data[offer.args[0] :]]))

    # What the parser calls

    def on_message_begin(self) -> None:
        self._in_header, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_header = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.settings.read_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(limits: Settings) -> type[Connection]:
    """The class of connections that keep these limits, as uvicorn wants it."""

    class Bounded(Connection):
        settings = limits

    return Bounded
