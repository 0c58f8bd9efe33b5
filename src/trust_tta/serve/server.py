"""The HTTP server: uvicorn with deadlines for slow clients, JSON logs, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trust_tta.errors import TrustError
from trust_tta.serve.app import Api, make_app
from trust_tta.serve.settings import Settings

SHUTDOWN_SECONDS = 30
DECODE_SECONDS = 2.0  # of these, for requests that are being decoded
MAX_HEADER = 1 << 16  # bytes; also of the trailers after a chunked body
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object per line. Exceptions are logged as message and place, without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            line["where"] = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        return json.dumps(line, default=str)


def log_as_json() -> None:
    """Write all logs of this process, warnings too, as JSON lines to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trust_tta").setLevel(logging.INFO)
    logging.captureWarnings(True)


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before anything heavy is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol named, asyncio sends without delay; without it, every answer takes 40 ms more.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise TrustError(f"--host {host} --port {port}: {error.strerror or error}; give another") from error


def address_of(listener: socket.socket) -> str:
    """The address to type into a browser."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, closed when a client takes too long to send a request, or there are too many."""

    settings: ClassVar[Settings]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.close()
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._update_deadline()

    def _update_deadline(self) -> None:
        """Set a deadline while no request is being answered; more bytes do not extend it."""
        waiting = (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()
        if self._deadline is None and waiting:
            self._deadline = self.loop.call_later(self.settings.read_seconds, self.transport.close)
        elif self._deadline is not None and not waiting:
            self._deadline.cancel()
            self._deadline = None


def run_server(server: Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then answer accepted requests, write snapshots, and return."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn handles them, and raises them once more when it is done
    gc.collect()
    gc.freeze()  # what was loaded stays: to look through it for garbage would stop all threads for 0.2 s each time
    server.run(sockets=[listener])


class Server(uvicorn.Server):
    """The server of an API: reports when it is ready; when it is to stop, it ends slow decoding."""

    def __init__(self, api: Api, *, on_ready: Callable[[], None] = lambda: None) -> None:
        class Limited(Connection):
            settings = api.settings

        config = uvicorn.Config(
            make_app(api),
            http=Limited,
            h11_max_incomplete_event_size=MAX_HEADER,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        super().__init__(config)
        self._decoder, self._on_ready = api.decoder, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """Stop as on SIGTERM; may be called from any thread."""
        self.should_exit = True
        timer = threading.Timer(DECODE_SECONDS, self._decoder.kill)
        timer.daemon = True
        timer.start()
