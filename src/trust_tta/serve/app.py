"""The routes of the service and their protection: limits on size and time, the token, one line for every refusal."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jinja2 import Environment, StrictUndefined
from python_multipart.exceptions import FormParserError
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trust_tta import __version__
from trust_tta.config_io import parse_json, read_asset
from trust_tta.errors import DataError, ShapeError, TrustError
from trust_tta.serve import protocol
from trust_tta.serve.answers import Answers
from trust_tta.serve.images import decode, decode_if_quick, from_floats, from_pixels
from trust_tta.serve.metrics import CONTENT_TYPE
from trust_tta.serve.protocol import BadRequestError
from trust_tta.serve.service import ACTIONS, Service
from trust_tta.serve.settings import DEFAULT_STREAM, RequestError, check_stream_name

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

MOST_LABELS = 1000  # per request
QUIET = ("/metrics", "/v2/health/live", "/v2/health/ready", "/live")  # requested too often to log each time
DECODERS = 2
DISCARDED = 4  # times the largest body: how much of a refused one is still read
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
log = logging.getLogger("trust_tta.serve")


class Api:
    """The handlers of one service."""

    def __init__(self, service: Service, *, token: str, note: str = "") -> None:
        self.service, self.settings, self._token, self._note = service, service.settings, token, note
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decoder")
        self._answers = Answers()
        self._requests = self._bytes = 0  # in progress

    def routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        routes = [self._route(path, self.v2_infer, "POST") for path in _versions(f"{model}/infer")]
        routes += [self._route(path, self.v2_model) for path in _versions(model)]
        routes += [self._route(path, self.v2_model_ready) for path in _versions(f"{model}/ready")]
        routes += [
            self._route("/v2", self.v2_server),
            self._route("/v2/health/live", self.v2_live),
            self._route("/v2/health/ready", self.v2_ready),
            self._route("/predict", self.predict, "POST"),
            self._route("/feedback", self.feedback, "POST"),
            self._route("/metrics", self.metrics),
            self._route("/events", self.events),
            self._route("/streams", self.streams),
            self._route("/streams/{stream}", self.remove, "DELETE", private=True),
            self._route("/streams/{stream}/fork", self.fork, "POST", private=True),
            self._route("/streams/{stream}/state", self.state, private=True),
            self._route("/streams/{stream}/state", self.put_state, "PUT", private=True),
            self._route("/streams/{stream}/checkpoint", self.checkpoint, private=True),
            self._route("/streams/{stream}/{action}", self.act, "POST", private=True),
            self._route("/", self.page),
            self._route("/page.css", self.asset),
            self._route("/page.js", self.asset),
            self._route("/live", self.live),
        ]
        return routes

    # The Open Inference Protocol

    async def v2_server(self, request: Request) -> Response:
        return respond({"name": "trust-tta", "version": __version__, "extensions": list(protocol.EXTENSIONS)})

    async def v2_live(self, request: Request) -> Response:
        return respond({"live": True})

    async def v2_ready(self, request: Request) -> Response:
        ready = self.service.alive
        return respond({"ready": ready}, status=200 if ready else 503)

    async def v2_model(self, request: Request) -> Response:
        network = self._model(request)
        size = network.preprocessing.size
        return respond(protocol.model_metadata(network.name, size=size, output=network.outputs))

    async def v2_model_ready(self, request: Request) -> Response:
        ready = self.service.alive
        return respond({"name": self._model(request).name, "ready": ready}, status=200 if ready else 503)

    async def v2_infer(self, request: Request) -> Response:
        network, preprocessing = self._model(request), self.service.network.preprocessing
        body, length = await self._body(request), request.headers.get(protocol.LENGTH_HEADER)
        most_pixels = self.settings.most_pixels

        def read() -> tuple[protocol.InferRequest, Any]:
            asked = protocol.read_request(body, length, size=preprocessing.size, settings=self.settings)
            if asked.images.dtype.kind == "f":
                return asked, from_floats(asked.images)
            return asked, from_pixels(asked.images, preprocessing, most_pixels=most_pixels)

        asked, images = await self._in_thread(read)
        stream = asked.stream or _stream_of(request)
        answer = await self._wait(self.service.predict(images, stream=stream, adapt=asked.adapt))
        content, header = protocol.write_response(
            asked,
            {output.name: getattr(answer, output.name) for output in asked.outputs},
            model=network.name,
            parameters={"stream": stream, "adapted": answer.adapted, "prediction": answer.id},
        )
        if header is None:
            return Response(content, media_type="application/json")
        headers = {"Inference-Header-Content-Length": str(header)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    def _model(self, request: Request) -> Any:
        network = self.service.network
        if request.path_params["model"] != network.name:
            raise RequestError(
                404, f"there is no model '{request.path_params['model'][:80]}'; this service has '{network.name}'"
            )
        if request.path_params.get("version", protocol.VERSION) != protocol.VERSION:
            raise RequestError(404, f"the model has one version, '{protocol.VERSION}'")
        return network

    # Images and labels

    async def predict(self, request: Request) -> Response:
        network, most_pixels = self.service.network, self.settings.most_pixels
        if len(network.outputs) > 1:
            raise RequestError(400, f"'{network.name}' predicts maps; use /v2/models/{network.name}/infer")
        body = await self._body(request)
        stream, adapt = _stream_of(request), _flag(request.query_params.get("adapt"), "adapt")
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            body, fields = await _read_form(request, body)
            if "stream" in fields:
                stream = check_stream_name(fields["stream"])
            adapt = _flag(fields["adapt"], "adapt") if "adapt" in fields else adapt
        images = decode_if_quick(body, network.preprocessing, most_pixels=most_pixels)
        if images is None:
            images = await self._in_thread(lambda: decode(body, network.preprocessing, most_pixels=most_pixels))
        answer = await self._wait(self.service.predict(images, stream=stream, adapt=adapt))
        best = int(answer.probabilities[0].argmax())
        return respond(
            {
                "class": best,
                "label": self.service.board.label_of(best),
                "confidence": float(answer.probabilities[0, best]),
                "stream": stream,
                "adapted": answer.adapted,
                "id": answer.ids[0],
            }
        )

    async def feedback(self, request: Request) -> Response:
        content = read_json_body(await self._body(request))
        entries = content if isinstance(content, list) else [content]
        if not 1 <= len(entries) <= MOST_LABELS:
            raise RequestError(400, f"{len(entries)} labels were given; give 1 to {MOST_LABELS}")
        labels = [self._read_entry(entry) for entry in entries]
        found = await self._in_thread(lambda: self.service.give_feedback(labels))
        stored = [label for label in found if label is not None]
        unknown = [name for (name, _), label in zip(labels, found, strict=True) if label is None]
        if not stored:
            raise RequestError(404, f"there is no prediction {unknown[0][:80]!r}; only the most recent ones are kept")
        return respond({"stored": len(stored), "right": sum(label.right for label in stored), "unknown": unknown})

    def _read_entry(self, entry: Any) -> tuple[str, int]:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not (isinstance(name, str) and name.isascii() and "label" in entry):
            raise RequestError(
                400, 'feedback is {"id": the id of a prediction, "label": its class}, or a list of these'
            )
        return name, self.service.network.read_label(entry["label"])

    # Streams

    async def streams(self, request: Request) -> Response:
        return respond({"streams": await self._in_thread(self.service.streams)})

    async def events(self, request: Request) -> Response:
        most, stream = request.query_params.get("most", "100"), request.query_params.get("stream")
        if not (most.isascii() and most.isdigit() and 1 <= int(most[:9]) <= 10_000):
            raise RequestError(400, f"most is {most[:40]!r}; give an integer from 1 to 10000")
        return respond({"events": await self._in_thread(lambda: self.service.events(stream, int(most)))})

    async def act(self, request: Request) -> Response:
        action = request.path_params["action"]
        if action not in ACTIONS:
            raise RequestError(404, f"a stream cannot {action[:40]!r}; it can {', '.join(ACTIONS)} and fork")
        return respond(await self._wait(self.service.act(_named(request), action)))

    async def fork(self, request: Request) -> Response:
        content = read_json_body(await self._body(request))
        new = content.get("to") if isinstance(content, dict) else None
        if not isinstance(new, str):
            raise RequestError(400, 'give the name of the new stream as {"to": "name"}')
        return respond(await self._wait(self.service.fork(_named(request), check_stream_name(new))))

    async def remove(self, request: Request) -> Response:
        name = _named(request)
        await self._wait(self.service.remove(name))
        return respond({"stream": name, "action": "remove"})

    async def state(self, request: Request) -> Response:
        return _file(await self._wait(self.service.read_state(_named(request))), f"{_named(request)}.safetensors")

    async def put_state(self, request: Request) -> Response:
        content = await self._body(request)
        return respond(await self._wait(self.service.write_state(_named(request), content)))

    async def checkpoint(self, request: Request) -> Response:
        name = f"{self.service.network.name}-{_named(request)}.safetensors"
        return _file(await self._wait(self.service.read_checkpoint(_named(request))), name)

    # The live page and Prometheus

    async def metrics(self, request: Request) -> Response:
        return Response(await self._in_thread(self.service.metrics.text), headers={"content-type": CONTENT_TYPE})

    async def page(self, request: Request) -> Response:
        network = self.service.network
        html = _template().render(
            model=network.name,
            method=network.method_name,
            version=__version__,
            calibrated=self.service.calibrated,
            note=self._note,
        )
        return Response(html, media_type="text/html", headers={"content-security-policy": POLICY})

    async def asset(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        return Response(
            read_asset(name, room="serve"), media_type="text/css" if name.endswith(".css") else "text/javascript"
        )

    async def live(self, request: Request) -> Response:
        """Server-sent events: the whole board first, then what is new."""
        board = self.service.board
        if board.listeners >= self.settings.most_requests // 2:
            raise RequestError(503, "too many pages are open", retry_after=10)

        async def messages() -> AsyncIterator[str]:
            queue = board.listen()
            try:
                yield f"retry: 2000\ndata: {await asyncio.to_thread(board.everything)}\n\n"
                while not await request.is_disconnected():
                    try:
                        message = await asyncio.wait_for(queue.get(), 15)
                    except TimeoutError:
                        yield ": still here\n\n"
                        continue
                    if message is None:
                        return
                    yield f"data: {message}\n\n"
            finally:
                board.leave(queue)

        return StreamingResponse(messages(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    # How a request is handled

    def _route(self, path: str, handler: Handler, method: str = "GET", *, private: bool = False) -> Route:
        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            response = await self._answer(request, handler, private=private)
            seconds = time.perf_counter() - start
            self.service.metrics.requests.labels(path, str(response.status_code)).inc()
            self.service.metrics.request_seconds.labels(path).observe(seconds)
            if path not in QUIET or response.status_code >= 400:
                fields = {"method": method, "route": path, "status": response.status_code}
                log.info("request", extra={**fields, "milliseconds": round(1000 * seconds, 2)})
            return response

        return Route(path, answer, methods=[method])

    async def _answer(self, request: Request, handler: Handler, *, private: bool) -> Response:
        request.state.bytes = 0
        try:
            if self._requests >= self.settings.most_requests:
                raise RequestError(503, f"{self._requests} requests are being answered; try again", retry_after=1)
            self._requests += 1
            try:
                _check_origin(request)
                if private:
                    self._check_token(request)
                return await handler(request)
            finally:
                self._requests -= 1
                self._bytes -= request.state.bytes
        except RequestError as refused:
            return refusal(refused)
        except ClientDisconnect:
            return respond({"error": "the client went away"}, status=400)
        except (DataError, ShapeError) as error:
            return refusal(RequestError(400, str(error)))
        except TrustError as error:
            log.error("failed", extra={"reason": str(error)})
            return refusal(RequestError(500, str(error)))
        except Exception as error:
            log.error("an error in trust-tta itself", exc_info=error)
            return refusal(RequestError(500, "an internal error; see the log of the service"))

    async def _body(self, request: Request) -> bytes:
        """The whole body, within the limits on size and time."""
        settings, encoding = self.settings, request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise RequestError(415, f"the body is compressed ({encoding[:40]!r}); send it as it is")
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated[:18]) > settings.most_bytes:
            await self._discard(request)
            raise RequestError(413, f"the body has {stated[:18]} bytes; at most {settings.most_bytes} are accepted")
        chunks = []
        try:
            async with asyncio.timeout(settings.read_seconds):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    request.state.bytes += len(chunk)
                    self._bytes += len(chunk)
                    if request.state.bytes > settings.most_bytes:
                        await self._discard(request)
                        raise RequestError(413, f"the body has more than {settings.most_bytes} bytes")
                    if self._bytes > settings.most_bytes_in_all:
                        raise RequestError(503, "too much data is being received; try again", retry_after=2)
        except TimeoutError:
            raise RequestError(408, f"the request was not complete within {settings.read_seconds:g} seconds") from None
        return b"".join(chunks)

    async def _discard(self, request: Request) -> None:
        """Read part of a body that is too large, so that a client that is still sending gets to see the answer."""
        left = DISCARDED * self.settings.most_bytes
        with suppress(TimeoutError, RuntimeError):  # the stream was consumed already
            async with asyncio.timeout(self.settings.read_seconds):
                async for chunk in request.stream():
                    left -= len(chunk)
                    if left < 0:
                        return

    async def _in_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, do)

    async def _wait(self, future: Future[T]) -> T:
        try:
            async with asyncio.timeout(self.settings.answer_seconds):
                return await self._answers.wait_for(future)
        except TimeoutError:
            raise RequestError(503, "the answer took too long; try again", retry_after=5) from None

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise RequestError(401, "this needs the token; send it as 'Authorization: Bearer TOKEN'")
        if not secrets.compare_digest(given.strip().encode(), self._token.encode()):
            raise RequestError(403, "this is not the token")


def make_app(service: Service, *, token: str, note: str = "", api: type[Api] = Api) -> Starlette:
    """The application; the engine starts and stops with it. `note`: shown at the top of the page."""
    routes = api(service, token=token, note=note).routes()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        board = asyncio.create_task(service.board.run())
        try:
            yield
        finally:
            service.board.close()
            board.cancel()
            await asyncio.to_thread(service.stop)

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = getattr(error, "headers", None)
        service.metrics.requests.labels("other", str(status)).inc()
        words = {404: f"there is no {request.url.path[:80]!r}", 405: f"{request.method[:20]!r} is not allowed here"}
        return respond({"error": words.get(status, "this cannot be served")}, status=status, headers=headers)

    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: unknown})


def with_shortcut(app: Starlette, path: str) -> ASGIApp:
    """The application; requests to one path go straight to its route, past layers that take a tenth of their time."""
    (route,) = [route for route in app.routes if isinstance(route, Route) and route.path == path]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope["type"] == "http" and scope["path"] == path and scope["method"] in (route.methods or ())
        await (route.app if direct else app)(scope, receive, send)

    return answer


def refusal(refused: RequestError) -> Response:
    """A status and one line that says why."""
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after is not None else {}
    headers |= {"www-authenticate": "Bearer"} if refused.status == 401 else {}
    headers |= {"connection": "close"} if refused.status in (408, 413) else {}  # the rest of the body is not read
    return respond({"error": " ".join(str(refused).split())}, status=refused.status, headers=headers)


def respond(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(content, status_code=status, headers=headers)


def _file(content: bytes, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _versions(path: str) -> tuple[str, str]:
    """A path of a model, without and with its version."""
    return path, path.replace("{model}", "{model}/versions/{version}")


def _named(request: Request) -> str:
    return check_stream_name(request.path_params["stream"])


def _stream_of(request: Request) -> str:
    """The stream that a request names in its query or its headers."""
    return check_stream_name(request.query_params.get("stream") or request.headers.get("x-stream") or DEFAULT_STREAM)


def _flag(text: str | None, name: str) -> bool:
    if text not in (None, "true", "false"):
        raise RequestError(400, f"{name} is {text[:40]!r}; give true or false")
    return text != "false"


def read_json_body(body: bytes) -> Any:
    try:
        return parse_json(body.decode("utf-8"), where="the body", error=BadRequestError)
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not UTF-8 JSON") from None


def _check_origin(request: Request) -> None:
    """Refuse requests that a page of another site makes a browser send."""
    origin = request.headers.get("origin")
    if request.method not in ("GET", "HEAD") and origin is not None:
        try:
            host = urlsplit(origin).netloc
        except ValueError:
            host = ""
        if host != request.headers.get("host"):
            raise RequestError(403, "this request comes from a page of another site")


class _Form(MultiPartParser):
    """Keeps files in memory, where the body already is."""

    spool_max_size = 1 << 40


async def _read_form(request: Request, body: bytes) -> tuple[bytes, dict[str, str]]:
    """The field 'image' of a multipart body, and the text fields."""

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    parser = _Form(request.headers, chunks(), max_files=1, max_fields=8, max_part_size=1 << 10)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError, ValueError, LookupError) as error:
        reason = " ".join(str(getattr(error, "message", error)).split())[:200]
        raise RequestError(400, f"the form cannot be read: {reason}") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RequestError(400, "the form has no file 'image'; send it as curl -F image=@photo.jpg does")
        return await image.read(), {name: value for name, value in form.items() if isinstance(value, str)}
    finally:
        await form.close()


@cache
def _template() -> Any:
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(read_asset("page.html", room="serve"))
