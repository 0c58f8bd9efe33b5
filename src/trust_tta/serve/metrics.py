"""Metrics in the format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Gauges of each stream in memory: the field of a reading, and the name and text of its gauge.
OF_STREAMS = {
    "entropy": ("stream_entropy_nats", "mean entropy of the last batch's predictions"),
    "confidence": ("stream_confidence_ratio", "mean confidence of the last batch's predictions"),
    "weight": ("stream_adapted_weight_ratio", "weight of the adapted network in what is served"),
    "evidence": ("stream_harm_evidence_nats", "entropy of the source's predicted classes less the adapted network's"),
    "certainty": ("stream_harm_certainty_ratio", "1 - p of the test that adaptation does no harm"),
    "e_value": ("stream_harm_e_value", "present e-value of that test; 1 / alpha is an alarm"),
    "leading_since": ("stream_source_leading_since_batch", "batch since which the source has more weight"),
    "cost": ("stream_guard_cost_ratio", "passes that the guard adds, over those of the method alone"),
    "weight_distance": ("stream_weight_distance_ratio", "norm of what was learned over that of the source"),
    "agreement": ("stream_source_agreement_ratio", "agreement with the source network"),
}


class Metrics:
    """Counters and histograms that the service updates, and `gauges` that are computed when they are read."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]] = tuple) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series
        self.registry = CollectorRegistry()
        self.registry.register(_Metrics(gauges))

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"trust_tta_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"trust_tta_{name}", text, labels, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "answered requests", ("route", "code"))
        self.images = counter("images", "predicted images", ("adapted",))
        self.batches = counter("batches", "batches that the network ran")
        self.events = counter("events", "events of streams", ("kind", "action"))
        self.feedback = counter("feedback", "labels that came back", ("right",))
        self.event_log_errors = counter("journal_errors", "events or predictions that could not be written")
        self.request_seconds = histogram("request_duration_seconds", "time to answer", SECONDS, ("route",))
        self.batch_seconds = histogram("batch_duration_seconds", "time in the network", SECONDS)
        self.batch_images = histogram("batch_images", "images that shared a batch", IMAGES)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Metrics(Collector):
    """A collector that computes its metrics on each read."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def as_text(metrics: Iterable[Metric]) -> bytes:
    """Metrics in the format that Prometheus reads."""
    return generate_latest(_Metrics(lambda: metrics))


def gauge(name: str, text: str, label: str, values: Mapping[str, float | None]) -> Metric:
    """A gauge with a value for each value of one label; None leaves one out."""
    family = GaugeMetricFamily(f"trust_tta_{name}", text, labels=(label,))
    for place, value in values.items():
        if value is not None:
            family.add_metric([place], value)
    return family


def stream_gauges(readings: Mapping[str, Mapping[str, float | None]]) -> Iterator[Metric]:
    """The gauges of `OF_STREAMS`, from the last reading of each stream."""
    for key, (name, text) in OF_STREAMS.items():
        yield gauge(name, text, "stream", {stream: reading.get(key) for stream, reading in readings.items()})


def sum_metrics(texts: Iterable[bytes]) -> dict[str, Metric]:
    """The metrics of several processes by name, with equal series summed."""
    found: dict[str, Metric] = {}
    sums: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for family in (family for text in texts for family in text_string_to_metric_families(text.decode())):
        found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            key = family.name, sample.name, tuple(sorted(sample.labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
    for (name, series, labels), value in sums.items():
        found[name].add_sample(series, dict(labels), value)
    return found
