"""The images of an experiment: data sets on disk, or clean images that are corrupted as they are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trust_tta.bench.config import ARRAY, CLEAN, DataConfig, StreamsConfig
from trust_tta.data.arrays import open_images, open_labels
from trust_tta.data.class_matching import numeric_class_names
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS, CORRUPTIONS, SEVERITIES
from trust_tta.data.dataset import Dataset, Images, array_dataset, join_datasets
from trust_tta.data.file_io import hash_array, hash_strings
from trust_tta.data.loading import available_domains, open_dataset
from trust_tta.data.masks import ResizeProtocol
from trust_tta.data.registry import DiskLayout, find_spec
from trust_tta.data.sample import load_sample
from trust_tta.data.segmentation import OWN_MASKS, SegmentationDataset
from trust_tta.data.streams import (
    GRADUAL_SEVERITIES,
    Domain,
    StreamConfig,
    draw_sequence,
    parse_setting,
    stream_datasets,
)
from trust_tta.errors import ConfigError

_PROBES = 8  # corrupted images hashed into a fingerprint, which then depends on the code
_CLEAN_SETS = {"cifar10-c": "cifar10", "cifar100-c": "cifar100"} | dict.fromkeys(
    ("imagenet-c", "imagenet-sketch", "imagenet-v2", "imagenet-r"), "imagenet"
)
_LEFT_OUT = ("pacs",)  # data sets whose networks were trained on all domains but the target


@dataclass(frozen=True, eq=False)
class CorruptedImages:
    """Clean images, each corrupted on first access; the random numbers depend on its index and the seed.

    Segmentation images are corrupted at their own size and then resized by their protocol.
    """

    clean: Images
    corruption: str
    severity: int
    seed: int
    protocol: ResizeProtocol | None = None
    made: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clean)

    def read(self, index: int) -> NDArray[np.uint8]:
        if index not in self.made:
            image = self.clean.read(index)[None]
            made = corrupt(image, self.corruption, self.severity, self.seed, first_index=index)[0]
            self.made[index] = self.protocol.resize_image(made) if self.protocol else made
        return self.made[index]

    def digest(self) -> str:
        """Hash of the clean images, the corruption, and the first corrupted images."""
        probes = 1 if self.protocol else _PROBES  # pictures differ in size
        first = np.stack([self.read(index) for index in range(min(probes, len(self)))])
        recipe = f"{self.corruption} {self.severity} {self.seed}"
        return hash_strings((self.clean.digest(), recipe, hash_array(first)))


class ExperimentData:
    """The data of one experiment. Data sets are opened once; corrupted images are kept as long as their stream."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self._open_on_disk = partial(open_dataset, config.dataset, config.folder, options=config.options)
        arrays = config.corrupts and not config.is_segmentation
        self.layout: DiskLayout = "array-c" if arrays else find_spec(config.dataset).layout
        self._by_domain: dict[tuple[str, int], Dataset] = {}
        self._clean: dict[str | None, Dataset] = {}

    def domains(self) -> tuple[str, ...]:
        """The domains of the experiment, in order."""
        config = self.config
        if config.domains is not None:
            return config.domains
        if config.corrupts and config.dataset != OWN_MASKS:
            return CORRUPTIONS
        found = available_domains(config.dataset, config.folder, options=config.options)
        if not found:
            raise ConfigError(f"{config.folder} has no domain of {config.dataset}; run `trust-tta data check` on it")
        return found

    def open(self, domain: str, *, severity: int, seed: int) -> Dataset:
        """One domain at one severity; `seed` is for corruptions applied on reading."""
        config = self.config
        if config.is_segmentation and domain not in (CLEAN, *ALL_CORRUPTIONS):
            return self._open_on_disk(domain=domain)
        if config.corrupts:
            clean = self.clean()
            if domain == CLEAN:
                return clean
            protocol = clean.protocol if isinstance(clean, SegmentationDataset) else None
            images = CorruptedImages(clean.images, domain, severity, seed, protocol)
            return replace(clean, domain=domain, images=images, severity=severity)
        if (domain, severity) not in self._by_domain:
            self._by_domain[domain, severity] = self._open_on_disk(domain=domain, severity=severity)
        return self._by_domain[domain, severity]

    def clean(self, target: str | None = None) -> Dataset:
        """The clean images of the data set; for leave-one-domain-out networks, those of all domains but `target`."""
        left_out = target if self.config.dataset in _LEFT_OUT and self.config.clean is None else None
        if left_out not in self._clean:
            self._clean[left_out] = self._open_clean(left_out)
        return self._clean[left_out]

    def _open_clean(self, left_out: str | None) -> Dataset:
        config = self.config
        if left_out is not None:
            names = available_domains(config.dataset, config.folder, options=config.options)
            others = [self._open_on_disk(domain=name) for name in names if name != left_out]
            if not others:
                raise ConfigError(f"{config.folder} has no domain of {config.dataset} but {left_out}; add the others")
            return join_datasets(others, domain=CLEAN)
        if config.dataset == ARRAY:
            images, labels = open_images(Path(str(config.images))), open_labels(Path(str(config.labels)))
            names = numeric_class_names(labels, where=config.labels)
            return array_dataset(images, labels, names, name=ARRAY, domain=CLEAN)
        if config.is_segmentation:
            return replace(self._open_on_disk(), domain=CLEAN)
        if config.corrupts:
            images, labels = load_sample()
            return array_dataset(images, labels, CIFAR10_CLASSES, name=config.dataset, domain=CLEAN)
        if config.clean is not None:
            return replace(self._open_on_disk(domain=config.clean), domain=CLEAN)
        if config.dataset not in _CLEAN_SETS:
            raise ConfigError(
                f"it is not known which images of {config.dataset} are clean; name their domain (--clean DOMAIN), "
                "or omit clean_after and methods that need clean images"
            )
        return open_dataset(_CLEAN_SETS[config.dataset], config.folder)

    def stream(self, streams: StreamsConfig, *, batch_size: int, seed: int, workers: int) -> list[Domain]:
        """The domains in stream order, without preprocessing."""
        setting = parse_setting(streams.setting)
        severities: tuple[int, ...] = (self.config.severity,)
        if setting.gradual:
            severities = GRADUAL_SEVERITIES
        elif setting.sequence and (self.config.corrupts or find_spec(self.config.dataset).has_severities):
            severities = SEVERITIES
        pairs = [(domain, severity) for domain in self.domains() for severity in severities]
        if setting.sequence:
            pairs = draw_sequence(pairs, count=streams.segments, seed=seed)
        datasets = (self.open(domain, severity=severity, seed=seed) for domain, severity in pairs)
        config = StreamConfig(
            setting=streams.setting,
            batch_size=batch_size,
            seed=seed,
            shuffle=streams.shuffle,
            limit=self.config.limit,
            drop_last=streams.drop_last,
            gamma=streams.gamma,
        )
        return list(stream_datasets(datasets, config, workers=workers))

    def clean_stream(self, target: str | None = None, *, batch_size: int, limit: int | None, workers: int) -> Domain:
        """At most `limit` of the clean images, in a fixed order."""
        config = StreamConfig(batch_size=batch_size, limit=limit)
        (domain,) = stream_datasets([self.clean(target)], config, workers=workers)
        return domain
