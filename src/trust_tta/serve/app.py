"""The HTTP routes: size and time limits, the token, allowed hosts, and one line for every refusal."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from jinja2 import Environment, StrictUndefined
from python_multipart.exceptions import FormParserError
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from trust_tta import __version__
from trust_tta.config_io import parse_json, read_asset
from trust_tta.errors import DataError, ShapeError, TrustError
from trust_tta.live.stream_statistics import MAX_MAGNITUDE
from trust_tta.serve import protocol
from trust_tta.serve.decoding import Decoder
from trust_tta.serve.metrics import CONTENT_TYPE
from trust_tta.serve.network import NetworkInfo
from trust_tta.serve.service import ACTIONS, Service
from trust_tta.serve.settings import ANSWER_SECONDS, DEFAULT_STREAM, BadRequestError, RequestError, check_stream_name

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response | dict[str, Any]]]

MAX_LABELS = 1000  # per request
MAX_JSON_BYTES = 1 << 18  # of a body that is parsed in the event loop: labels
MAX_BYTES_TOTAL = 256 << 20  # of all requests in progress
MAX_DISCARDED = 4  # times the largest body: how much of a refused one is still read
UNLOGGED = ("/metrics", "/v2/health/live", "/v2/health/ready", "/live")  # requested too often to log each time
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
ADDRESS = r"[0-9.]+|\[[0-9a-f:.]+\]"  # as a host: no foreign page can have it as its own name
log = logging.getLogger("trust_tta.serve")


class Api:
    """The handlers of one service."""

    def __init__(self, service: Service, *, token: str, note: str = "", allowed_hosts: Iterable[str] = ()) -> None:
        self.service, self.settings, self._token, self._note = service, service.settings, token, note
        names = "|".join(map(re.escape, ["localhost", socket.gethostname(), *allowed_hosts]))
        self._hosts = re.compile(f"({names}|{ADDRESS})(:[0-9]+)?", re.IGNORECASE)
        self.decoder = Decoder(service.network.preprocessing, service.settings)
        template = read_asset("page.html", room="serve")
        self._page = Environment(autoescape=True, undefined=StrictUndefined).from_string(template)
        self._bytes = 0  # of requests in progress

    def start(self) -> None:
        """Called in the event loop, before the first request."""
        self.decoder.start()

    def routes(self) -> list[Route]:
        routes = []
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                self._route(f"{model}/infer", self.v2_infer, "POST"),
                self._route(model, self.v2_model),
                self._route(f"{model}/ready", self.v2_ready),
            ]
        return [
            *routes,
            self._route("/v2", self.v2_server),
            self._route("/v2/health/live", self.v2_live),
            self._route("/v2/health/ready", self.v2_ready),
            self._route("/predict", self.predict, "POST"),
            self._route("/feedback", self.feedback, "POST"),
            self._route("/metrics", self.metrics),
            self._route("/events", self.events),
            self._route("/streams", self.streams),
            self._route("/streams/{stream}", self.remove, "DELETE", private=True),
            self._route("/streams/{stream}/state", self.state, private=True),
            self._route("/streams/{stream}/state", self.put_state, "PUT", private=True),
            self._route("/streams/{stream}/checkpoint", self.checkpoint, private=True),
            self._route("/streams/{stream}/{action}", self.act, "POST", private=True),
            self._route("/", self.page),
            self._route("/page.css", self.asset),
            self._route("/page.js", self.asset),
            self._route("/live", self.live),
        ]

    async def v2_server(self, request: Request) -> dict[str, Any]:
        return {"name": "trust-tta", "version": __version__, "extensions": list(protocol.EXTENSIONS)}

    async def v2_live(self, request: Request) -> dict[str, Any]:
        return {"live": True}

    async def v2_ready(self, request: Request) -> Response:
        about = {"name": self._model(request).name} if "model" in request.path_params else {}
        ready = self.service.ready
        return JSONResponse(about | {"ready": ready}, status_code=200 if ready else 503)

    async def v2_model(self, request: Request) -> dict[str, Any]:
        network = self._model(request)
        return protocol.model_metadata(network.name, network.preprocessing.size, network.outputs)

    async def v2_infer(self, request: Request) -> Response:
        network = self._model(request)
        body = await self._body(request)
        inference = await self.decoder.decode_request(body, request.headers.get(protocol.LENGTH_HEADER))
        images = torch.from_numpy(inference.images)
        if images.is_floating_point() and not (images.abs() <= MAX_MAGNITUDE).all():
            raise BadRequestError(f"the images hold values that are not finite, or beyond {MAX_MAGNITUDE:g}")
        stream = inference.stream or _stream_of(request)
        prediction = await self._wait(self.service.predict(images, stream=stream, adapt=inference.adapt))
        parameters = {"stream": stream, "adapted": prediction.adapted, "prediction": prediction.id}
        content, length = protocol.write_response(inference, prediction, model=network.name, parameters=parameters)
        headers = {} if length is None else {protocol.LENGTH_HEADER: str(length)}
        media_type = "application/json" if length is None else "application/octet-stream"
        return Response(content, media_type=media_type, headers=headers)

    def _model(self, request: Request) -> NetworkInfo:
        network = self.service.network
        if (name := request.path_params["model"]) != network.name:
            raise RequestError(404, f"there is no model '{name[:80]}'; this service has '{network.name}'")
        if request.path_params.get("version", protocol.VERSION) != protocol.VERSION:
            raise RequestError(404, f"the model has one version, '{protocol.VERSION}'")
        return network

    async def predict(self, request: Request) -> dict[str, Any]:
        network = self.service.network
        if len(network.outputs) > 1:
            raise BadRequestError(f"'{network.name}' is a segmentation network; use /v2/models/{network.name}/infer")
        body: bytes | bytearray = await self._body(request)
        stream, adapt = _stream_of(request), _flag(request.query_params.get("adapt"), "adapt")
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            body, fields = await _read_form(request, body)
            stream = check_stream_name(fields.get("stream", stream))
            adapt = _flag(fields["adapt"], "adapt") if "adapt" in fields else adapt
        pixels = torch.from_numpy(await self.decoder.decode_image(body))
        prediction = await self._wait(self.service.predict(pixels, stream=stream, adapt=adapt))
        confidence, best = prediction.probabilities[0].max(0)
        return {
            "class": int(best),
            "label": network.label_of(int(best)),
            "confidence": float(confidence),
            "stream": stream,
            "adapted": prediction.adapted,
            "id": f"{prediction.id}-0",
        }

    async def feedback(self, request: Request) -> dict[str, Any]:
        body = await self._body(request, MAX_JSON_BYTES)
        content = parse_json(body, where="the body", error=BadRequestError)
        entries = content if isinstance(content, list) else [content]
        if not 1 <= len(entries) <= MAX_LABELS:
            raise BadRequestError(f"{len(entries)} labels were given; give 1 to {MAX_LABELS}")
        labels = []
        for entry in entries:
            name = entry.get("id") if isinstance(entry, dict) else None
            if not (isinstance(name, str) and name.isascii() and "label" in entry):
                raise BadRequestError('feedback is {"id": id of a prediction, "label": its class}, or a list of these')
            labels.append((name, self.service.network.read_label(entry["label"])))
        found = await asyncio.to_thread(self.service.give_feedback, labels)
        stored = [feedback for feedback in found if feedback is not None]
        unknown = [name for (name, _), feedback in zip(labels, found, strict=True) if feedback is None]
        if not stored:
            raise RequestError(404, f"there is no prediction {unknown[0][:80]!r}; only the most recent ones are kept")
        return {"stored": len(stored), "right": sum(feedback.correct for feedback in stored), "unknown": unknown}

    async def streams(self, request: Request) -> dict[str, Any]:
        return {"streams": await asyncio.to_thread(self.service.list_streams)}

    async def events(self, request: Request) -> dict[str, Any]:
        limit, stream = request.query_params.get("most", "100"), request.query_params.get("stream")
        if not re.fullmatch("[1-9][0-9]{0,3}|10000", limit):
            raise BadRequestError(f"most is {limit[:40]!r}; give an integer from 1 to 10000")
        return {"events": await asyncio.to_thread(self.service.events, stream, int(limit))}

    async def act(self, request: Request) -> dict[str, Any]:
        action = request.path_params["action"]
        if action not in ACTIONS:
            raise RequestError(404, f"a stream cannot {action[:40]!r}; it can {', '.join(ACTIONS)}")
        return await self._wait(self.service.act(_named(request), action))

    async def remove(self, request: Request) -> dict[str, Any]:
        await self._wait(self.service.remove(_named(request)))
        return {"stream": _named(request), "action": "remove"}

    async def state(self, request: Request) -> Response:
        return _file(await self._wait(self.service.read_state(_named(request))), f"{_named(request)}.safetensors")

    async def put_state(self, request: Request) -> dict[str, Any]:
        content = await self._body(request)
        return await self._wait(self.service.write_state(_named(request), content))

    async def checkpoint(self, request: Request) -> Response:
        name = f"{self.service.network.name}-{_named(request)}.safetensors"
        return _file(await self._wait(self.service.read_checkpoint(_named(request))), name)

    async def metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self.service.metrics_text), headers={"content-type": CONTENT_TYPE})

    async def page(self, request: Request) -> Response:
        network = self.service.network
        html = self._page.render(
            network=network, version=__version__, calibrated=self.service.calibrated, note=self._note
        )
        return Response(html, media_type="text/html", headers={"content-security-policy": POLICY})

    async def asset(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(read_asset(name, room="serve"), media_type=kind)

    async def live(self, request: Request) -> Response:
        """The points and events newer than `since`, in seconds since 1970, for the live page."""
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            raise BadRequestError("since is not a number; give seconds since 1970") from None
        updates = await asyncio.to_thread(self.service.page_updates, since)
        return JSONResponse(updates, headers={"cache-control": "no-store"})

    def _route(self, path: str, handler: Handler, method: str = "GET", *, private: bool = False) -> Route:
        async def answer(request: Request) -> Response:
            start, request.state.bytes = time.perf_counter(), 0
            try:
                self._check_access(request, private=private)
                found = await handler(request)
                response = JSONResponse(found) if isinstance(found, dict) else found
            except Exception as error:
                response = refusal(error)
            finally:
                self._bytes -= request.state.bytes
            seconds = time.perf_counter() - start
            self.service.metrics.requests.labels(path, str(response.status_code)).inc()
            self.service.metrics.request_seconds.labels(path).observe(seconds)
            if path not in UNLOGGED or response.status_code >= 400:
                fields = {"method": method, "route": path, "status": response.status_code}
                log.info("request", extra={**fields, "milliseconds": round(1000 * seconds, 2)})
            return response

        return Route(path, answer, methods=[method])

    def _check_access(self, request: Request, *, private: bool) -> None:
        """Refuse foreign hosts and origins, and changes to streams without the token.

        A foreign page may rebind its own name to this address, so only known names and IP addresses, which no other
        page can have as its origin, are accepted as the host.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._hosts.fullmatch(host):
            raise RequestError(403, f"the host {host[:80]!r} is not allowed; serve with --allowed-host NAME")
        if request.method not in ("GET", "HEAD") and origin is not None and origin.partition("://")[2] != host:
            raise RequestError(403, "this request comes from a page of another site")
        if private:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                raise RequestError(401, "this needs the token; send it as 'Authorization: Bearer TOKEN'")
            if not secrets.compare_digest(token.strip().encode(), self._token.encode()):
                raise RequestError(403, "this is not the token")

    async def _body(self, request: Request, limit: int | None = None) -> bytearray:
        """The whole body, within the limits on size and time."""
        limit, encoding = limit or self.settings.max_bytes, request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise RequestError(415, f"the body is compressed ({encoding[:40]!r}); send it uncompressed")
        body, received = bytearray(), 0
        try:
            async with asyncio.timeout(self.settings.read_seconds):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received <= limit:
                        body += chunk
                        request.state.bytes += len(chunk)
                        self._bytes += len(chunk)
                    elif received > MAX_DISCARDED * limit:
                        break  # not earlier: a client that is still sending does not see the answer
                    if self._bytes > MAX_BYTES_TOTAL:
                        raise RequestError(503, "too much data is being received; try again", retry_after=2)
        except TimeoutError:
            seconds = self.settings.read_seconds
            raise RequestError(408, f"the request was not complete within {seconds:g} seconds") from None
        if received > limit:
            raise RequestError(413, f"the body has more than {limit} bytes")
        return body

    async def _wait(self, future: Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
        except TimeoutError:
            raise RequestError(503, "the answer took too long; try again", retry_after=5) from None


def make_app(api: Api) -> Starlette:
    """The ASGI application; it starts the decoder and stops the service."""
    service = api.service

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.start()
        try:
            yield
        finally:
            await api.decoder.close()
            await asyncio.to_thread(service.stop)

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        service.metrics.requests.labels("other", str(status)).inc()
        reasons = {404: f"there is no {request.url.path[:80]!r}", 405: f"{request.method[:20]!r} is not allowed here"}
        content = {"error": reasons.get(status, "this cannot be served")}
        return JSONResponse(content, status_code=status, headers=getattr(error, "headers", None))

    app = Starlette(routes=api.routes(), lifespan=lifespan, exception_handlers={HTTPException: unknown})
    app.router.redirect_slashes = False  # a redirect would repeat the host that the client gave
    return app


def refusal(error: Exception) -> Response:
    """The response to an error: a status and one line."""
    refused = error if isinstance(error, RequestError) else BadRequestError(str(error))
    if isinstance(error, ClientDisconnect):
        refused = BadRequestError("the client disconnected")
    elif not isinstance(error, TrustError):
        log.error("an error in trust-tta itself", exc_info=error)
        refused = RequestError(500, "an internal error; see the log of the service")
    elif not isinstance(error, RequestError | DataError | ShapeError):
        log.error("failed", extra={"reason": str(error)})
        refused = RequestError(500, str(error))
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after is not None else {}
    headers |= {"www-authenticate": "Bearer"} if refused.status == 401 else {}
    headers |= {"connection": "close"} if refused.status in (408, 413) else {}  # the rest of the body is not read
    return JSONResponse({"error": " ".join(str(refused).split())}, status_code=refused.status, headers=headers)


def _file(content: bytes, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _named(request: Request) -> str:
    return check_stream_name(request.path_params["stream"])


def _stream_of(request: Request) -> str:
    """The stream that a request names in its query or its headers."""
    return check_stream_name(request.query_params.get("stream") or request.headers.get("x-stream") or DEFAULT_STREAM)


def _flag(text: str | None, name: str) -> bool:
    if text not in (None, "true", "false"):
        raise BadRequestError(f"{name} is {text[:40]!r}; give true or false")
    return text != "false"


async def _read_form(request: Request, body: bytes | bytearray) -> tuple[bytes, dict[str, str]]:
    """The file 'image' of a form, and the text fields."""

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(body)}

    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=8, max_part_size=1 << 10) as form:
            image = form.get("image")
            if isinstance(image, UploadFile):
                return await image.read(), {name: value for name, value in form.items() if isinstance(value, str)}
    except (HTTPException, FormParserError, ValueError, LookupError) as error:
        reason = " ".join(str(getattr(error, "detail", error)).split())[:200]
        raise BadRequestError(f"the form cannot be read: {reason}") from None
    raise BadRequestError("the form has no file 'image'; send it as curl -F image=@photo.jpg does")
