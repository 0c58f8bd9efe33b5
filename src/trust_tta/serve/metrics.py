"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trust_tta._version import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of each stream in memory: what a reading says, and its name here.
OF_STREAMS = {
    "entropy": ("trust_tta_stream_entropy_nats", "mean entropy of the last batch's predictions"),
    "confidence": ("trust_tta_stream_confidence_ratio", "mean confidence of the last batch's predictions"),
    "input_distance": ("trust_tta_stream_input_distance", "distance of the images from the reference"),
    "weight_distance": ("trust_tta_stream_weight_distance_ratio", "norm of what was learned over that of the source"),
    "agreement": ("trust_tta_stream_source_agreement_ratio", "agreement with the source network"),
}


class Metrics:
    """Counters that the service moves; gauges are asked for when they are read."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody reads
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"trust_tta_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "answered requests", ("route", "code"))
        self.images = counter("images", "predicted images", ("adapted",))
        self.batches = counter("batches", "batches that the network ran")
        self.events = counter("events", "events of streams", ("kind", "action"))
        self.feedback = counter("feedback", "labels that came back", ("right",))
        self.journal_errors = counter("journal_errors", "events or predictions that could not be written")
        self.request_seconds = self._histogram("request_duration_seconds", "time to answer", SECONDS, ("route",))
        self.batch_seconds = self._histogram("batch_duration_seconds", "time in the network", SECONDS)
        self.batch_images = self._histogram("batch_images", "images that shared a batch", IMAGES)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"trust_tta_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)

    def watch(
        self,
        *,
        queued: Callable[[], int],
        streams: Callable[[], tuple[int, int]],
        readings: Callable[[], Mapping[str, Mapping[str, float | int | None]]],
    ) -> None:
        """Where the gauges come from: images that wait, streams (in memory, in all), and their last readings."""
        self.registry.register(_Gauges(queued, streams, readings))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(
        self,
        queued: Callable[[], int],
        streams: Callable[[], tuple[int, int]],
        readings: Callable[[], Mapping[str, Mapping[str, float | int | None]]],
    ) -> None:
        self._queued, self._streams, self._readings = queued, streams, readings

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("trust_tta_build_info", "the version that runs", labels=("version",))
        build.add_metric([__version__], 1)
        yield build
        yield GaugeMetricFamily("trust_tta_queued_images", "images that wait", value=self._queued())
        loaded, total = self._streams()
        streams = GaugeMetricFamily("trust_tta_streams", "streams by where they are", labels=("place",))
        streams.add_metric(["memory"], loaded)
        streams.add_metric(["disk"], total - loaded)
        yield streams
        readings = self._readings()
        for key, (name, text) in OF_STREAMS.items():
            family = GaugeMetricFamily(name, text, labels=("stream",))
            for stream, reading in readings.items():
                value = reading.get(key)
                if value is not None:
                    family.add_metric([stream], value)
            yield family
