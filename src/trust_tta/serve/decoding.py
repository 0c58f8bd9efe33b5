"""Decode what clients send in worker processes that are killed when they take too long.

A hostile image file or JSON tensor costs a worker its time and its memory limit, and nothing else waits. Only images of
a few kilobytes that need no resizing are decoded in the service itself. `python -m trust_tta.serve.decoding` is the
worker; it does not load PyTorch.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from trust_tta.errors import DataError, ShapeError, reason_of
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve import protocol
from trust_tta.serve.protocol import InferRequest
from trust_tta.serve.settings import ANSWER_SECONDS, BadRequestError, RequestError, Settings

FORMATS = ("JPEG", "PNG", "WEBP")
WORKERS = 2
MAX_SIDE = 1 << 14  # pixels: decoders keep a pointer or more per row
MAX_SCANS = 64  # of a progressive JPEG, each as much work as a whole image; encoders write about ten
MAX_QUICK_BYTES, MAX_QUICK_SIDE = 1 << 12, 128  # of images that are decoded in the service itself
MAX_MEMORY = 1 << 30  # bytes by which a worker may grow
START_SECONDS = 60.0
STOP_SECONDS = 2.0  # left to requests that are being decoded when the service stops
_SIZES = struct.Struct(">QQ")  # of the JSON header and the array of a message


# In the worker


def decode_image(data: bytes, preprocessing: Preprocessing, *, max_pixels: int) -> NDArray[np.uint8]:
    """Decode an image file to pixels (1, size, size, 3); its header is checked before anything is decoded."""
    if not data:
        raise BadRequestError("there is no image; send one as the multipart field 'image' or as the body")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.width, image.height, max_pixels=max_pixels)
            if image.format == "JPEG" and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
                raise RequestError(413, f"the JPEG has {scans} scans; at most {MAX_SCANS} are accepted")
            return preprocessing.fit([ImageOps.exif_transpose(image)])
    except RequestError:
        raise
    except Image.DecompressionBombError:  # Pillow has a limit of its own
        raise RequestError(413, f"the image has too many pixels; at most {max_pixels} are accepted") from None
    except MemoryError:
        raise RequestError(413, "decoding the image takes too much memory; send a smaller one") from None
    except UnidentifiedImageError:
        raise RequestError(415, "this is not an image that can be read; send JPEG, PNG or WebP") from None
    except Exception as error:  # decoders raise errors of any type
        raise BadRequestError(f"the image cannot be decoded: {reason_of(error)}") from None


def decode_request(
    body: bytes, header_length: str | None, preprocessing: Preprocessing, settings: Settings
) -> InferRequest:
    """Parse an inference request; pixels are resized to (n, size, size, 3)."""
    try:
        request = protocol.read_request(body, header_length, size=preprocessing.size, settings=settings)
        if request.images.dtype.kind == "f":
            return request
        _, height, width, _ = request.images.shape
        _check_size(width, height, max_pixels=settings.max_pixels)
        return replace(request, images=preprocessing.fit(request.images))
    except MemoryError:
        raise RequestError(413, "decoding the request takes too much memory; send less, or binary tensors") from None
    except (DataError, ShapeError, ValueError) as error:
        raise BadRequestError(reason_of(error)) from None


def _is_quick(data: bytes, preprocessing: Preprocessing) -> bool:
    """Whether a small file needs no resizing: decoding it takes less time than sending it to a worker."""
    if len(data) > MAX_QUICK_BYTES or preprocessing.size > MAX_QUICK_SIDE:
        return False
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return preprocessing.fits(image.size)
    except Exception:  # the worker says what is wrong with it
        return False


def _check_size(width: int, height: int, *, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise RequestError(413, f"the image has {width * height} pixels; at most {max_pixels} are accepted")
    if max(width, height) > MAX_SIDE:
        raise RequestError(413, f"the image is {width}x{height} pixels; at most {MAX_SIDE} per side are accepted")


def work(settings: Settings, preprocessing: Preprocessing, requests: BinaryIO, answers: BinaryIO) -> None:
    """Report that the worker is ready, then answer messages until the pipe is closed."""
    _send(answers, {"dtype": "|u1", "shape": [0]}, b"")  # ready
    while len(sizes := requests.read(_SIZES.size)) == _SIZES.size:
        header_size, body_size = _SIZES.unpack(sizes)
        header, body = json.loads(requests.read(header_size)), requests.read(body_size)
        array: NDArray[Any] = np.empty(0, np.uint8)
        about: dict[str, Any] = {}
        try:
            if header["kind"] == "image":
                array = decode_image(body, preprocessing, max_pixels=settings.max_pixels)
            else:
                request = decode_request(body, header["header_length"], preprocessing, settings)
                array, about = request.images, request.to_json()
        except RequestError as error:
            about = {"error": [error.status, str(error)]}
        _send(answers, {**about, "dtype": array.dtype.str, "shape": array.shape}, np.ascontiguousarray(array).tobytes())


def _send(pipe: BinaryIO, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    pipe.write(_SIZES.pack(len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def main() -> None:
    given = json.loads(sys.argv[1])
    if sys.platform == "linux":
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
    with suppress(BrokenPipeError, KeyboardInterrupt):
        work(
            Settings(**given["settings"]),
            Preprocessing(**given["preprocessing"]),
            sys.stdin.buffer,
            sys.stdout.buffer,
        )


# In the service


class Decoder:
    """Worker processes, each of which decodes one request at a time; use it in one event loop."""

    def __init__(self, preprocessing: Preprocessing, settings: Settings) -> None:
        self.preprocessing, self.settings = preprocessing, settings
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()  # None: to be started
        self._workers: set[Process] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self) -> None:
        """Start the workers; requests wait until they are ready."""
        for _ in range(WORKERS):
            self._run(self._add_worker())

    async def decode_image(self, data: bytes) -> NDArray[np.uint8]:
        """Pixels (1, size, size, 3) of an image file."""
        if _is_quick(data, self.preprocessing):
            return decode_image(data, self.preprocessing, max_pixels=self.settings.max_pixels)
        return (await self._ask({"kind": "image"}, data))[1]

    async def decode_request(self, body: bytes, header_length: str | None) -> InferRequest:
        """An inference request; its pixels are resized to (n, size, size, 3)."""
        if header_length is not None and header_length.isdigit() and len(header_length) < 6:  # little JSON
            request = protocol.read_request(body, header_length, size=self.preprocessing.size, settings=self.settings)
            if request.images.dtype.kind == "f" or self.preprocessing.fits(request.images.shape[1:3]):
                return request
        about, images = await self._ask({"kind": "infer", "header_length": header_length}, body)
        return InferRequest.from_json(about, images)

    async def _ask(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], NDArray[Any]]:
        try:
            idle = await asyncio.wait_for(self._idle.get(), ANSWER_SECONDS)
        except TimeoutError:
            raise RequestError(503, "too many requests are being decoded; try again", retry_after=5) from None
        worker, done = None, False
        try:
            worker = idle or await self._start()
            about, array = await asyncio.wait_for(_exchange(worker, header, body), self.settings.decode_seconds)
            done = True
        except TimeoutError:
            seconds = self.settings.decode_seconds
            raise RequestError(
                413, f"decoding took more than {seconds:g} seconds; send less, or smaller images"
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            if self._closed:
                raise RequestError(503, "the service is stopping", retry_after=5) from None
            raise RequestError(413, "decoding failed; send less, or smaller images") from None
        finally:  # also where the client disconnects, which leaves a worker in the middle of its request
            if worker is not None and not done:
                self._retire(worker)
            self._idle.put_nowait(worker if done else None)
        if "error" in about:
            status, message = about["error"]
            raise RequestError(status, message)
        return about, array

    async def _add_worker(self) -> None:
        worker = None
        try:
            with suppress(RequestError, OSError):  # tried again with the next request
                worker = await self._start()
        finally:
            self._idle.put_nowait(worker)

    async def _start(self) -> Process:
        if self._closed:
            raise RequestError(503, "the service is stopping", retry_after=5)
        given = {
            "settings": self.settings.model_dump(mode="json"),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
        }
        path = os.pathsep.join(entry for entry in sys.path if entry)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "trust_tta.serve.decoding", json.dumps(given)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the service
        )
        self._workers.add(worker)
        ready = False
        try:
            await asyncio.wait_for(_receive(worker), START_SECONDS)
            ready = True
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            raise RequestError(503, "the image decoder does not start; try again", retry_after=5) from None
        finally:
            if not ready:
                self._retire(worker)
        return worker

    def _retire(self, worker: Process) -> None:
        _kill(worker)
        self._run(worker.wait()).add_done_callback(lambda _: self._workers.discard(worker))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop_soon(self) -> None:
        """Kill the workers after a moment in which they may finish."""
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._kill_all)

    def _kill_all(self) -> None:
        self._closed = True
        for worker in self._workers:
            _kill(worker)

    async def close(self) -> None:
        """Kill the workers and wait for their end; requests are refused from now on."""
        self._kill_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.wait() for worker in self._workers))


def _kill(worker: Process) -> None:
    with suppress(ProcessLookupError):
        worker.kill()


async def _exchange(worker: Process, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], NDArray[Any]]:
    stdin, text = cast(asyncio.StreamWriter, worker.stdin), json.dumps(header).encode()
    stdin.write(_SIZES.pack(len(text), len(body)) + text + body)
    await stdin.drain()
    return await _receive(worker)


async def _receive(worker: Process) -> tuple[dict[str, Any], NDArray[Any]]:
    stdout = cast(asyncio.StreamReader, worker.stdout)
    header_size, body_size = _SIZES.unpack(await stdout.readexactly(_SIZES.size))
    about = json.loads(await stdout.readexactly(header_size))
    content = bytearray(await stdout.readexactly(body_size))  # writable, as tensors must be
    return about, np.frombuffer(content, dtype=about["dtype"]).reshape(about["shape"])


if __name__ == "__main__":
    main()
