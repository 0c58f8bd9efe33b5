"""CoTTA: a student learns from an averaged teacher, with stochastic restoration of source weights.

Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from trust_tta.methods.augmentations import random_augmentation
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import cross_entropy_to, symmetric_cross_entropy
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.validation import check_image_logits
from trust_tta.ops.segmentation_logits import upsample
from trust_tta.schema import Count, Fraction, Natural, Rate


class CottaOptions(LearningOptions):
    """`head`: with `parameters="all"` the classifier learns too. `decay` of the teacher; `restore`: chance of each
    weight of the student to return to the source; below the confidence `threshold` the teacher sees `augmentations`
    views; `symmetric`: the loss of the ImageNet code; `seed` of the views and returns."""

    lr: Rate = 1e-3
    parameters: ParameterSet = "all"
    head: bool = True
    decay: Fraction = 0.999
    restore: Fraction = 0.01
    threshold: Fraction = 0.92
    augmentations: Count = 32
    symmetric: bool = False
    seed: Natural = 0


class Cotta(Learner):
    """The student learns the predictions of the teacher, whose weights are the moving average of the student's.

    The network holds the weights of the teacher: it is what predicts, and what `detach()` gives.
    """

    Options: ClassVar[type[LearningOptions]] = CottaOptions
    options: CottaOptions
    student: Tensor

    def reset_state(self) -> None:
        self.student = self.weights.source_vector

    def state_spec(self) -> dict[str, Spec]:
        return {"student": Array.like(self.weights.vector)}

    def adapted_names(self, model: nn.Module) -> list[str]:
        if self.options.parameters == "all" and self.options.head:
            return [name for name, _ in model.named_parameters()]
        return super().adapted_names(model)

    def adapt(self, images: Tensor) -> Tensor:
        for _ in range(self.options.steps):
            target = self.learn_from_teacher(images)
            if self.prediction_before is None:
                self.prediction_before = target
        return target if self.options.predict == "before" else upsample(self.predict(images))

    def learn_from_teacher(self, images: Tensor) -> Tensor:
        """Update student and teacher; returns the teacher logits (n, classes) that were the target."""
        teacher, origin = self.weights.snapshot(), self.weights.source_vector
        target = self.target(images, teacher, origin)
        self.weights.load(self.student)
        logits = upsample(self.logits(images, stochastic_depth=self.options.stochastic_depth))
        symmetric = self.options.symmetric
        losses = symmetric_cross_entropy(logits, target) if symmetric else cross_entropy_to(target, logits)
        if not bool(self.step(losses.mean())):
            self.weights.load(teacher)
            return target
        student = self.weights.snapshot()
        self.weights.load(self.options.decay * teacher + (1 - self.options.decay) * student)
        self.student = torch.where(self.forgotten(student), origin, student) if self.options.restore else student
        return target

    @torch.no_grad()
    def target(self, images: Tensor, teacher: Tensor, origin: Tensor) -> Tensor:
        """Teacher logits (n, classes): of the images or, where the source is unsure of them, the mean over views."""
        self.weights.load(origin)
        anchor = upsample(self.predict(images))
        check_image_logits(anchor, self.name)
        self.weights.load(teacher)
        if float(anchor.softmax(1).amax(1).mean()) >= self.options.threshold:
            return upsample(self.predict(images))
        views = [upsample(self.predict(self.augment(images, number))) for number in range(self.options.augmentations)]
        return torch.stack(views).mean(0)

    def augment(self, images: Tensor, number: int) -> Tensor:
        """View `number` of images (n, c, h, w)."""
        seed = self.options.seed * 1_000_003 + self.counters.backwards * self.options.augmentations + number
        return random_augmentation(images, self.model, seed=seed, soft=True)

    def forgotten(self, student: Tensor) -> Tensor:
        """Mask (n,) of the student's weights that are restored to the source's."""
        generator = torch.Generator(student.device).manual_seed(self.options.seed * 1_000_003 + self.counters.backwards)
        return torch.rand(student.shape, generator=generator, device=student.device) < self.options.restore
