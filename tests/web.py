"""A web server on localhost with scripted failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One answer. `cut`: so many bytes of the body are sent, then the connection closes."""

    status: int = 200
    body: bytes | None = None  # None: the content of the site
    cut: int | None = None


@dataclass
class Site:
    """The replies in turn, the last one repeated; `requests` has the headers of every request."""

    content: bytes
    replies: list[Reply]
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


def _answer(site: Site, handler: BaseHTTPRequestHandler) -> None:
    site.requests.append(dict(handler.headers.items()))
    reply = site.replies[min(len(site.requests), len(site.replies)) - 1]
    body = site.content if reply.body is None else reply.body
    handler.send_response(reply.status)
    handler.send_header("Content-Type", "application/octet-stream")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: reply.cut])
    handler.close_connection = True


@contextmanager
def serving(content: bytes, *replies: Reply) -> Iterator[Site]:
    """Serve `content` over HTTP, after the given `replies`."""
    site = Site(content, list(replies) or [Reply()])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(site, self)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}/net.pth"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
