"""A web server on the loopback that misbehaves as it is told."""

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
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # None: the file, from where the request asks for it
    cut: int | None = None
    ranges: bool = True
    length: int | None = None  # stated instead of the true one
    silent: bool = False  # about the length


@dataclass
class Site:
    """The replies in turn, the last one ever after; what was asked is kept."""

    content: bytes
    replies: list[Reply]
    etag: str | None = '"one"'
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


def _answer(site: Site, handler: BaseHTTPRequestHandler) -> None:
    site.requests.append(dict(handler.headers.items()))
    reply = site.replies[min(len(site.requests), len(site.replies)) - 1]
    asked, start, status = handler.headers.get("Range"), 0, reply.status
    headers = {"Content-Type": "application/octet-stream"}
    body = site.content if reply.body is None else reply.body
    same = handler.headers.get("If-Range") in (None, site.etag)
    if asked and reply.ranges and status == 200 and same:
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            status, body, start = 416, b"", 0
            headers["Content-Range"] = f"bytes */{len(site.content)}"
        else:
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(body) - 1}/{len(body)}"
    if site.etag:
        headers["ETag"] = site.etag
    if not reply.silent:
        headers["Content-Length"] = str(len(body) - start if reply.length is None else reply.length)
    handler.send_response(status)
    for name, value in (headers | reply.headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body[start:][: reply.cut])
    handler.close_connection = True


@contextmanager
def serving(content: bytes, *replies: Reply, etag: str | None = '"one"', name: str = "net.pth") -> Iterator[Site]:
    site = Site(content, list(replies) or [Reply()], etag)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(site, self)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}/{name}"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
