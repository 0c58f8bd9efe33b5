"""RoTTA: teacher and student learn from a small, class-balanced memory of recent images.

Yuan et al., "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from trust_tta.errors import ShapeError, StateError
from trust_tta.methods.augmentations import random_augmentation
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import cross_entropy_to
from trust_tta.methods.norms import RobustNorm, check_moved
from trust_tta.methods.state import Array, Number, Spec
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.validation import check_image_logits, check_outputs
from trust_tta.ops.segmentation_logits import upsample
from trust_tta.schema import Count, Fraction, Natural, Rate


class RottaOptions(LearningOptions):
    """`alpha`: share of a batch in the running statistics. `nu`: share of the student in the teacher. `memory_size`
    images are remembered, and learned from after every `update_frequency` images. `lambda_t`, `lambda_u`: weights of
    age and uncertainty in what is forgotten. `seed` of the views."""

    lr: Rate = 1e-3
    statistics: StatisticsKind = "stream"
    alpha: Fraction = 0.05
    nu: Fraction = 0.001
    memory_size: Count = 64
    update_frequency: Count = 64
    lambda_t: Rate = 1.0
    lambda_u: Rate = 1.0
    seed: Natural = 0


@dataclass
class MemoryItem:
    """An image of the memory: its index in the present images, label, uncertainty, and age in images."""

    place: int
    label: int
    entropy: float
    age: int = 0


@dataclass
class BalancedMemory:
    """At most `capacity` items, as evenly over the classes as they come; old and uncertain ones go first.

    `items` are in the order of their classes, and within a class in the order in which they came.
    """

    items: list[MemoryItem]
    capacity: int
    classes: int
    lambda_t: float
    lambda_u: float

    def offer(self, item: MemoryItem) -> None:
        """Add the item, replace another by it, or drop it; all items age by one."""
        counts = Counter(kept.label for kept in self.items)
        if counts[item.label] >= self.capacity / self.classes:
            self._replace(item, {item.label})
        elif len(self.items) < self.capacity:
            self._add(item)
        else:
            most = max(counts.values())
            self._replace(item, {label for label, count in counts.items() if count == most})
        for kept in self.items:
            kept.age += 1

    def _replace(self, item: MemoryItem, labels: set[int]) -> None:
        """Replace the worst item of these classes, the last of equals, if it is worse than the new one."""
        worst = max((kept for kept in reversed(self.items) if kept.label in labels), key=self._score)
        if self._score(worst) > self._score(item):
            self.items = [kept for kept in self.items if kept is not worst]
            self._add(item)

    def _add(self, item: MemoryItem) -> None:
        self.items = sorted([*self.items, item], key=lambda kept: kept.label)  # equal labels stay in order

    def _score(self, item: MemoryItem) -> float:
        age = 1 / (1 + math.exp(-item.age / self.capacity))
        return self.lambda_t * age + self.lambda_u * item.entropy / math.log(max(self.classes, 2))


class Rotta(Learner):
    """The student learns the teacher's predictions on views of the memory; the teacher is its moving average.

    The network holds the weights and statistics of the teacher: it is what predicts, and what `detach()` gives the
    weights of. With `statistics="stream"` both have running statistics of their own.
    """

    Options: ClassVar[type[LearningOptions]] = RottaOptions
    options: RottaOptions
    student: Tensor
    images: Tensor | None
    labels: Tensor | None
    entropies: Tensor | None
    ages: Tensor | None

    def make_statistics(self) -> Statistics:
        if self.options.statistics != "stream":
            return super().make_statistics()
        return Statistics(self.model, "stream", make_norm=partial(RobustNorm, momentum=self.options.alpha))

    def reset_state(self) -> None:
        self.student = self.weights.source_vector
        self.student_statistics = self.statistics.state()
        self.offered = 0
        self.images = self.labels = self.entropies = self.ages = None

    def state_spec(self) -> dict[str, Spec]:
        return {
            "student": Array.like(self.weights.vector),
            "student_statistics": self.statistics.spec(),
            "offered": Number(int, least=0, most=2.0**53),
            "images": Array((None, None, None, None)),
            "labels": Array((None,), torch.int64, least=0),
            "entropies": Array((None,), torch.float64, least=-1e-3),
            "ages": Array((None,), torch.int64, least=0),
        }

    def adapt(self, images: Tensor) -> Tensor:
        if self.images is not None and self.images.shape[1:] != images.shape[1:]:
            raise ShapeError(
                f"'rotta' remembers images of shape {tuple(self.images.shape[1:])} and these have "
                f"{tuple(images.shape[1:])}; give images of one shape, or reset() before"
            )
        logits = upsample(self.predict(images))
        check_image_logits(logits, self.name)
        check_outputs(logits, images)  # before the memory takes their entropies
        self.prediction_before = logits
        self.remember(images, logits)
        check_moved(self.statistics, images)
        return logits if self.options.predict == "before" else upsample(self.predict(images))

    def remember(self, images: Tensor, logits: Tensor) -> None:
        """Offer images (n, c, h, w) to the memory one by one, and learn from it after every `update_frequency`."""
        p = logits.double().softmax(1)
        labels, entropies = p.argmax(1).tolist(), (-p * (p + 1e-6).log()).sum(1).tolist()
        at_hand = images if self.images is None else torch.cat([self.images.to(images), images])
        memory = self.recall(logits.shape[1])
        first = len(memory.items)
        for i, (label, uncertainty) in enumerate(zip(labels, entropies, strict=True)):
            memory.offer(MemoryItem(first + i, label, uncertainty))
            self.offered += 1
            if self.offered % self.options.update_frequency == 0:
                for _ in range(self.options.steps):
                    self.learn_from(at_hand[[item.place for item in memory.items]], [i.age for i in memory.items])
        self.images = at_hand[[item.place for item in memory.items]]
        self.labels = torch.tensor([item.label for item in memory.items])
        self.entropies = torch.tensor([item.entropy for item in memory.items], dtype=torch.float64)
        self.ages = torch.tensor([item.age for item in memory.items])

    def recall(self, classes: int) -> BalancedMemory:
        """The memory of the state."""
        items = []
        if self.labels is not None and self.entropies is not None and self.ages is not None:
            kept = zip(self.labels.tolist(), self.entropies.tolist(), self.ages.tolist(), strict=True)
            items = [MemoryItem(place, *facts) for place, facts in enumerate(kept)]
        options = self.options
        return BalancedMemory(items, options.memory_size, classes, options.lambda_t, options.lambda_u)

    def learn_from(self, images: Tensor, ages: list[int]) -> None:
        """One update of student and teacher on views of the memory; a skipped step changes neither."""
        teacher, before = self.weights.snapshot(), self.statistics.state()
        target = upsample(self.observe_statistics(images))
        followed = self.statistics.state()
        self.weights.load(self.student)
        self.statistics.load(self.student_statistics)
        with self.statistics.updating():
            views = self.augment(images)
            logits = upsample(self.logits(views, stochastic_depth=self.options.stochastic_depth))
        weights = torch.sigmoid(-torch.tensor(ages, dtype=torch.float64) / self.options.memory_size).to(logits)
        if bool(self.step((weights * cross_entropy_to(target, logits)).mean())):
            self.student, self.student_statistics = self.weights.snapshot(), self.statistics.state()
            teacher, before = (1 - self.options.nu) * teacher + self.options.nu * self.student, followed
        self.weights.load(teacher)
        self.statistics.load(before)

    def augment(self, images: Tensor) -> Tensor:
        """A view of images (n, c, h, w)."""
        seed = self.options.seed * 1_000_003 + self.counters.backwards
        return random_augmentation(images, self.model, seed=seed, soft=True)

    def check_state(self, state: Mapping[str, Any]) -> None:
        sizes = {len(state["extra"].get(name, ())) for name in ("images", "labels", "entropies", "ages")}
        if len(sizes) > 1 or max(sizes) > self.options.memory_size:
            raise StateError(
                f"the state does not fit: its memory holds {sorted(sizes)} images, labels, entropies and ages; "
                f"equal numbers up to {self.options.memory_size} are wanted"
            )
