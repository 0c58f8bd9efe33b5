"""The evaluation loop: run a method on a stream and measure it batch by batch."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trust_tta.bench.environment import autocast, synchronize
from trust_tta.bench.metrics import MASK_SIDE, ClassificationMeter, Meter, PixelMeter
from trust_tta.data.dataset import Dataset, spread
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.data.streams import Domain
from trust_tta.methods.base import Method
from trust_tta.progress import SILENT, Progress
from trust_tta.results.record import CellResult

THUMBNAIL_SIDE = 64  # pixels of the longer side of a kept image; kept masks are larger


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationOptions:
    """Device, number format and optional measures of a run."""

    device: torch.device
    dtype: str = "float32"  # or "bf16": the network computes under autocast
    class_mask: bool = True
    clean: Domain | None = None  # images on which forgetting is measured after each domain
    keep_samples: int = 0
    confusion: bool = False


def run_domain(
    method: Method, domain: Domain, options: EvaluationOptions, *, progress: Progress = SILENT
) -> CellResult:
    """Adapt to and predict each batch once; a step of progress is a batch of the domain."""
    present = np.sort(domain.batches.order[: domain.batches.images])
    kept = present[spread(len(present), options.keep_samples)].tolist()  # at even distances
    meter = make_meter(domain, options, probabilities=method.probabilities, keep=kept)
    costs: Counter[str] = Counter()
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(options.device)
    for batch in domain.batches:
        if domain.reset_each_batch:
            method.restore_source()
        images = batch.images.to(options.device)
        earlier = asdict(method.counters)
        synchronize(options.device)
        start = time.perf_counter()  # moving images to the device does not count
        with autocast(options.device, options.dtype):
            outputs: Tensor = method(images)
        synchronize(options.device)
        seconds = time.perf_counter() - start
        costs.update({name: count - earlier[name] for name, count in asdict(method.counters).items()})
        meter.update(outputs, batch.labels, before=method.prediction_before, indices=batch.indices, seconds=seconds)
        progress.advance()
    return meter.result(
        forwards=costs["forwards"],
        backwards=costs["backwards"],
        updates=costs["updates"],
        skipped_updates=costs["skipped"],
        # on a CPU, only the whole process could be measured
        peak_memory=torch.cuda.max_memory_allocated(options.device) if on_gpu else None,
        clean_accuracy=clean_accuracy(method, options, progress=progress),
    )


def make_meter(
    domain: Domain, options: EvaluationOptions, *, probabilities: bool = False, keep: Iterable[int] = ()
) -> Meter:
    """The metrics of the domain's task."""
    if isinstance(domain.dataset, SegmentationDataset):
        return PixelMeter(
            classes=len(domain.dataset.class_names),
            probabilities=probabilities,
            keep=frozenset(keep),
            palette=domain.dataset.palette,
        )
    mask = domain.dataset.class_mask
    return ClassificationMeter(
        probabilities=probabilities,
        classes=mask.tolist() if mask is not None and options.class_mask else None,
        confusion=options.confusion,
        keep=set(keep),
    )


def clean_accuracy(method: Method, options: EvaluationOptions, *, progress: Progress = SILENT) -> float | None:
    """The accuracy of the adapted weights on clean images, normalized as the next batch of the stream would be."""
    if options.clean is None:
        return None
    meter = make_meter(options.clean, options)
    for batch in options.clean.batches:
        with autocast(options.device, options.dtype):
            outputs = method.evaluate(batch.images.to(options.device), include_in_stats=True)
        meter.update(outputs, batch.labels)
        progress.advance(0)
    return meter.accuracy


def small_picture(image: NDArray[np.uint8], *, side: int = THUMBNAIL_SIDE) -> bytes:
    """Encode an image uint8 (h, w, 3) as WebP with at most `side` pixels on its longer side; lossless up to 64."""
    picture = Image.fromarray(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    with io.BytesIO() as file:
        picture.save(file, "WEBP", lossless=side <= THUMBNAIL_SIDE, quality=100 if side <= THUMBNAIL_SIDE else 90)
        return file.getvalue()


def kept_pictures(dataset: Dataset, result: CellResult) -> dict[int, bytes]:
    """Small pictures of the images whose predictions were kept, by index."""
    if isinstance(dataset, SegmentationDataset):
        return {kept.index: small_picture(dataset.image(kept.index), side=MASK_SIDE) for kept in result.masks}
    return {kept.index: small_picture(dataset.image(kept.index)) for kept in result.predictions}
