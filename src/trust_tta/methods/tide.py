"""TIDE: test-time inference under drift, by evidence.

A method of this project, made of parts that each help in one kind of stream:

- statistics of the stream whose memory follows the evidence (`statistics.py`): small batches, short domains;
- a share of the source's statistics, as each norm's slope of the loss asks (`shares.py`): other styles;
- statistics for each kind of image where several come mixed (`mixtures.py`);
- minimum class confusion (Jin et al., ECCV 2020) on the SS2D weights, with a memory of the confusion: one update per
  batch, of any size, in place of six;
- the mirror image as a second view of every image;
- a pull back to the source, so that long streams do not wear the network out, and longer steps where a domain is new;
- restraint where few errors are expected: shorter steps and a stronger pull, for there is little to gain;
- the frequencies of the classes, where they differ from even ones beyond chance (Saerens et al., 2002): labels that
  come in short runs. As they do, updates slow down: the confusion of a few classes says little about the others.

Rates and memories are counted in images: no option depends on the size of a batch. A picture whose pixels are labeled
counts for sixteen.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.ensembling import log_mean_probability, mean_log_probability, mirrored, single
from trust_tta.methods.losses import class_confusion, confusion_loss, entropy, mean_entropy
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits
from trust_tta.schema import Fraction, Positive, Rate

BATCH = 128  # images for which `lr` and `pull` are stated
CONFUSION_HALF_LIFE = 256.0  # images of a class-balanced stream after which half of the confusion is new
FREQUENCY_HALF_LIFE = 128.0  # images after which half of the class frequencies are new
EVEN = 10.0  # images of an even class distribution that the frequencies start with
LEAST_LOG_P = math.log(1e-12)
EAGER = 1.0  # steps are longer by this share when a domain begins
NEW = 1024.0  # images of a domain after which half of this is left
DOUBT = 3.0  # excess of the skew, in its standard, at which it is half believed
FEW = 0.12  # share of errors below which there is restraint
EXTRA_PULL = 2.0  # where no errors are expected, the pull is stronger by this multiple
ERROR_MEMORY = 256.0  # images of a domain over which the expected errors are averaged


class TideOptions(LearningOptions):
    """`lr` and `pull` are per 128 images. `views`: average with the mirror image, or not, where left and right matter.

    `shares`: learn how much the statistics of the stream count beside the source's. `mixtures`: tell the domains of a
    mixed stream apart. `frequencies`: follow the class frequencies of correlated streams. `restraint`: learn less where
    few errors are expected.
    """

    lr: Rate = 5e-4
    parameters: ParameterSet = "auto"
    statistics: StatisticsKind = "stream"
    shares: bool = True
    mixtures: bool = True
    predict: Literal["before", "after"] = "before"
    views: Literal["mirror", "none"] = "mirror"
    loss: Literal["confusion", "information", "entropy"] = "confusion"
    temperature: Positive = 2.5
    pull: Fraction = 0.02
    frequencies: bool = True
    restraint: bool = True


class Believed(NamedTuple):
    """Log-probabilities (n, classes) under the frequencies of the stream, and how skewed these are, from 0 to 1."""

    log_p: Logits
    frequencies: Tensor
    skew: Tensor


class Tide(Learner):
    """One pass over two views, one update, and the prediction of that pass."""

    Options: ClassVar[type[LearningOptions]] = TideOptions
    pooled: ClassVar[tuple[str, ...]] = ("confusion",)
    options: TideOptions
    chunked_loss = True
    confusion: Tensor | None
    frequencies: Tensor | None
    error: Tensor | None

    def make_statistics(self) -> Statistics:
        options = self.options
        return Statistics(self.model, options.statistics, learn_shares=options.shares, split_mixtures=options.mixtures)

    def reset_state(self) -> None:
        self.confusion = self.frequencies = self.error = None

    def state_spec(self) -> dict[str, Spec]:
        error = Array((), least=0, most=1)
        return {"confusion": Array((None, None), least=0), "frequencies": Array((None,), least=0), "error": error}

    def adapt(self, images: Tensor) -> Logits:
        for _ in range(self.options.steps):
            views = self.views_of(images)
            believed = self.believe(views.detach())
            error = self.expect_errors(believed.log_p)
            need = believed.skew.new_ones(()) if error is None else (error / FEW).clamp_max(1)
            self.learn_from(views, len(images), pace=(1 - believed.skew) * self.eagerness, need=need)
            if self.prediction_before is None:
                self.prediction_before = believed.log_p
        if self.options.predict == "after":
            with torch.no_grad():
                believed = self.believe(self.views_of(images))
        self.frequencies, self.error = believed.frequencies, error
        return believed.log_p

    def views_of(self, images: Tensor) -> Logits:
        """Log-probabilities (views, n, classes) of the images and of their mirror images, in one pass."""
        if self.options.views == "none":
            return single(self.adapting_logits(images))
        self.counters.forwards += 1  # counted in passes over the batch
        return mirrored(self.adapting_logits, images)

    def adapting_logits(self, images: Tensor) -> Logits:
        return self.logits(images, stochastic_depth=self.options.stochastic_depth and torch.is_grad_enabled())

    def learn_from(self, views: Logits, images: int, *, pace: Tensor, need: Tensor) -> None:
        """One step, as long as the images are worth, `pace` () allows and `need` () asks; then back to the source."""
        start, confusion = self.weights.snapshot(), self.confusion
        finite = self.step(self.loss(mean_log_probability(views)))
        self.counters.backwards += self.options.views == "mirror"
        if self.statistics.shares is not None and self.weights.extra_gradient is not None:
            self.statistics.shares.learn(self.weights.extra_gradient, images, finite=finite, pace=pace * need)
        share = images * self.statistics.samples_per_image / BATCH
        moved = start + (self.weights.snapshot() - start) * (pace * need * math.sqrt(share))
        pull = self.options.pull * (1 + EXTRA_PULL * (1 - need))
        pulled = moved.lerp(self.weights.source_vector, 1 - (1 - pull).clamp_min(0) ** share)
        self.weights.load(torch.where(finite, pulled, start))
        if self.confusion is not None:  # as it was, unless the step was made
            old = torch.zeros_like(self.confusion) if confusion is None else confusion
            self.confusion = torch.where(finite, self.confusion, old)

    @property
    def eagerness(self) -> Tensor | float:
        """By how much steps are longer, the fewer images of this domain were seen."""
        watch = self.statistics.watch
        return 1.0 if watch is None else 1 + EAGER * torch.exp2(-watch.images * self.statistics.samples_per_image / NEW)

    def expect_errors(self, log_p: Logits) -> Tensor | None:
        """The share of errors, (), that the predictions (n, classes) of this domain's images expect of themselves."""
        if isinstance(log_p, CoarseLogits) or log_p.dim() > 2 or not self.options.restraint:
            return None
        now = (1 - log_p.amax(1).exp()).mean().clamp_min(0)
        if self.error is None:
            return now
        watch = self.statistics.watch
        seen = now.new_tensor(ERROR_MEMORY) if watch is None else watch.images.clamp_max(ERROR_MEMORY)
        return self.error.lerp(now, (len(log_p) / seen).clamp_max(1))

    def loss(self, logits: Logits) -> Tensor:
        if self.options.loss == "entropy":
            return entropy(logits).mean()
        if self.options.loss == "information":
            return entropy(logits).mean() - mean_entropy(logits)
        confusion = class_confusion(logits, temperature=self.options.temperature)
        total = confusion if self.confusion is None else confusion + self.confusion
        self.confusion = self._remember(confusion.detach())
        return confusion_loss(total)

    def _remember(self, confusion: Tensor) -> Tensor:
        """The memory with the confusion (classes, classes) of a batch: the rows of classes that come forget."""
        confusion = self.samples_per_image * confusion
        if self.confusion is None:
            return confusion
        kept = torch.exp2(-confusion.sum(1, keepdim=True) * len(confusion) / CONFUSION_HALF_LIFE)
        return self.confusion * kept + confusion

    def believe(self, views: Logits) -> Believed:
        """The mean probability of the views (views, n, classes), weighed by how frequent the classes are now."""
        if isinstance(views, CoarseLogits):
            nothing = views.coarse.new_zeros(())
            return Believed(log_mean_probability(views, least=LEAST_LOG_P), nothing.expand(views.shape[1]), nothing)
        mean = views[0].exp()
        for view in views[1:]:
            mean += view.exp()
        mean /= len(views)
        classes = mean.shape[1]
        even = mean.new_zeros(classes) if self.frequencies is None else self.frequencies
        before = even * 2 ** (-len(mean) / FREQUENCY_HALF_LIFE)
        if not self.options.frequencies or mean.dim() > 2:
            return Believed(mean.clamp_min_(1e-12).log(), before, mean.new_zeros(()))
        frequencies = mean.sum(0)
        for _ in range(5):  # expectation maximization: from frequencies to probabilities and back
            prior = before + frequencies + EVEN / classes
            posterior = mean * prior
            posterior = posterior / posterior.sum(1, keepdim=True)
            frequencies = posterior.sum(0)
        skew = self.skew_of(before + frequencies)
        weighed = mean * (prior / prior.sum()).pow(skew)
        weighed = (weighed / weighed.sum(1, keepdim=True)).clamp_min(1e-12)
        return Believed(weighed.log(), before + weighed.sum(0), skew)

    def skew_of(self, frequencies: Tensor) -> Tensor:
        """How sure it is, (), from 0 to 1, that frequencies (classes,) are not those of even classes.

        Twice the likelihood ratio is spread, for even classes, like chi-square about classes - 1.
        """
        freedom = len(frequencies) - 1
        shares = frequencies / frequencies.sum().clamp_min(1e-12)
        ratio = 2 * (frequencies * (shares * len(shares)).clamp_min(1e-12).log()).sum()
        excess = (ratio - 2 * freedom).clamp_min(0) / max(freedom, 1)
        return excess / (excess + DOUBT)

    def infer(self, images: Tensor) -> Logits:
        """Logits (n, classes, ...) for even classes."""
        alone = self.options.views == "none"
        views = single(self.frozen_logits(images)) if alone else mirrored(self.frozen_logits, images)
        return log_mean_probability(views, least=LEAST_LOG_P)
