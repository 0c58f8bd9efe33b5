"""What is done with a batch before its first pass, recorded as a CUDA graph.

It is a hundred small kernels, and the device would wait while the host launches each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from trust_tta.errors import reason_of
from trust_tta.ops.cuda_graphs import MOST_RECORDINGS, MOST_SEEN, one_at_a_time

Work = Callable[[Tensor, float], tuple[Tensor, ...]]


class Prelude:
    """Calls `work` with images (n, ...) and a number; on a CUDA device, from the second of a kind on, by a replay.

    `work` changes tensors at fixed addresses, and neither asks the device for a value nor feeds it one. What it gives
    is valid until the next call.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.recordings: dict[Hashable, Recording] = {}
        self.seen: set[Hashable] = set()
        self.failed = False  # a recording that broke off may leave the device unusable for another: no second try
        self.stream: torch.cuda.Stream | None = None  # of the last replay

    def __call__(self, images: Tensor, number: float) -> tuple[Tensor, ...]:
        recording = self._recording(images, number)
        if recording is None:
            return self.work(images, number)
        stream = torch.cuda.current_stream(images.device)
        if self.stream is not None and self.stream != stream:  # one on another stream begins when the last has ended
            stream.wait_stream(self.stream)
        self.stream = stream
        return recording.replay(images)

    def _recording(self, images: Tensor, number: float) -> Recording | None:
        if not images.is_cuda or self.failed or torch.cuda.is_current_stream_capturing():
            return None
        key = (images.shape, images.stride(), images.dtype, images.device, number)
        if key not in self.recordings and key in self.seen and len(self.recordings) < MOST_RECORDINGS:
            try:
                self.recordings[key] = Recording(self.work, images, number)
            except Exception as error:  # whatever it was, plain work will raise it again or not need it
                self.failed, self.recordings = True, {}
                problem = reason_of(error)
                warnings.warn(f"statistics are not recorded as CUDA graphs and stay slow ({problem})", stacklevel=2)
        if len(self.seen) < MOST_SEEN:  # the first of a kind loads kernels, which cannot be recorded
            self.seen.add(key)
        return self.recordings.get(key)


class Recording:
    """The work on one kind of batch, which is not done while it is recorded."""

    def __init__(self, work: Work, images: Tensor, number: float) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # A recording that breaks off can leave its stream in place; tensors of inference mode cannot be written to.
        back = torch.cuda.stream(torch.cuda.current_stream(images.device))
        with one_at_a_time, back, torch.inference_mode(False), torch.no_grad():
            self.images = images.detach().clone()
            stream = torch.cuda.Stream(images.device)
            stream.wait_stream(torch.cuda.current_stream(images.device))
            # Work that other threads start meanwhile does not break the recording, unless it waits for the device.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.results = work(self.images, number)

    def replay(self, images: Tensor) -> tuple[Tensor, ...]:
        self.images.copy_(images)
        self.graph.replay()
        return self.results
