"""Decode images and JSON tensors in worker processes, which are killed when they take too long.

A hostile image file or JSON tensor costs a worker its time and its memory limit, and nothing else waits. Only images of
a few kilobytes that need no resizing are decoded in the service itself. Workers do not load PyTorch.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

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

Worker: TypeAlias = tuple[BaseProcess, Connection]


# In the worker


def decode_image(data: bytes | bytearray, preprocessing: Preprocessing, *, max_pixels: int) -> NDArray[np.uint8]:
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
    body: bytes | bytearray, header_length: str | None, preprocessing: Preprocessing, settings: Settings
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


def _is_quick(data: bytes | bytearray, preprocessing: Preprocessing) -> bool:
    """Whether a small file needs no resizing: decoding it takes less time than sending it to a worker."""
    if len(data) > MAX_QUICK_BYTES or preprocessing.size > MAX_QUICK_SIDE:
        return False
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return preprocessing.fits(image.size)
    except Exception:  # the worker reports the error
        return False


def _check_size(width: int, height: int, *, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise RequestError(413, f"the image has {width * height} pixels; at most {max_pixels} are accepted")
    if max(width, height) > MAX_SIDE:
        raise RequestError(413, f"the image is {width}x{height} pixels; at most {MAX_SIDE} per side are accepted")


def run_worker(settings: Settings, preprocessing: Preprocessing, connection: Connection) -> None:
    """Report that the worker is ready, then answer (body, header_length) or (body,) until the service ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service
    if sys.platform == "linux":
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
    with suppress(EOFError, ConnectionError):
        connection.send("ready")
        while True:
            body, *header_length = connection.recv()
            answer: Any
            try:
                if header_length:
                    answer = decode_request(body, header_length[0], preprocessing, settings)
                else:
                    answer = decode_image(body, preprocessing, max_pixels=settings.max_pixels)
            except RequestError as error:
                answer = error.status, str(error)
            connection.send(answer)


# In the service


class Decoder:
    """Worker processes, each with a thread that waits for it."""

    def __init__(self, preprocessing: Preprocessing, settings: Settings) -> None:
        self.preprocessing, self.settings = preprocessing, settings
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="decoder")
        self._own = threading.local()  # the worker of each thread
        self._processes: set[BaseProcess] = set()
        self._closed = False

    def start(self) -> None:
        """Start the workers; requests wait until they are ready."""
        for _ in range(WORKERS):
            self._threads.submit(self._exchange, (b"",))

    async def decode_image(self, data: bytes | bytearray) -> NDArray[np.uint8]:
        """Pixels (1, size, size, 3) of an image file."""
        if _is_quick(data, self.preprocessing):
            return decode_image(data, self.preprocessing, max_pixels=self.settings.max_pixels)
        pixels: NDArray[np.uint8] = await self._ask(data)
        return pixels

    async def decode_request(self, body: bytes | bytearray, header_length: str | None) -> InferRequest:
        """An inference request; its pixels are resized to (n, size, size, 3)."""
        if header_length is not None and header_length.isdigit() and len(header_length) < 6:  # little JSON
            request = protocol.read_request(body, header_length, size=self.preprocessing.size, settings=self.settings)
            if request.images.dtype.kind == "f" or self.preprocessing.fits(request.images.shape[1:3]):
                return request
        decoded: InferRequest = await self._ask(body, header_length)
        return decoded

    async def _ask(self, *message: Any) -> Any:
        """A worker's answer to a message; raises its refusal."""
        if self._closed:
            raise RequestError(503, "the service is stopping", retry_after=5)
        future = asyncio.wrap_future(self._threads.submit(self._exchange, message))
        try:
            answer = await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            raise RequestError(503, "too many requests are being decoded; try again", retry_after=5) from None
        if isinstance(answer, tuple):
            raise RequestError(*answer)
        return answer

    def _exchange(self, message: Any) -> Any:
        """Send a message to the thread's worker and wait; one that takes too long is killed, and replaced."""
        worker: Worker = getattr(self._own, "worker", None) or self._start()
        process, connection = worker
        self._own.worker, seconds = None, self.settings.decode_seconds
        try:
            connection.send(message)
            if not connection.poll(seconds):
                return 413, f"decoding took more than {seconds:g} seconds; send less, or smaller images"
            answer = connection.recv()
            self._own.worker = worker
            return answer
        except (EOFError, OSError):
            return (503, "the service is stopping") if self._closed else (413, "decoding failed; send smaller images")
        finally:
            if self._own.worker is None:
                self._retire(process)

    def _start(self) -> Worker:
        context = get_context("spawn")
        connection, far_end = context.Pipe()
        given = self.settings, self.preprocessing, far_end
        process = context.Process(target=run_worker, args=given, name="decoder", daemon=True)
        process.start()
        self._processes.add(process)
        far_end.close()
        if self._closed:
            process.kill()
        with suppress(EOFError, OSError):
            if connection.poll(START_SECONDS):
                connection.recv()
                return process, connection
        self._retire(process)
        raise RequestError(503, "the image decoder does not start; try again", retry_after=5)

    def _retire(self, process: BaseProcess) -> None:
        process.kill()
        process.join()
        self._processes.discard(process)

    def kill(self) -> None:
        """Kill the workers; requests are refused from now on."""
        self._closed = True
        for process in list(self._processes):
            process.kill()

    async def close(self) -> None:
        """Kill the workers and wait for their end."""
        self.kill()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        for process in list(self._processes):
            self._retire(process)
