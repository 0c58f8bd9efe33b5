"""The training loop: the whole data set on the device, one seed for each epoch, one checkpoint after each."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.models.layers import StochasticDepth
from trust_tta.models.vmamba import VMamba
from trust_tta.recording import Recorder
from trust_tta.training import augment
from trust_tta.training.checkpointing import identify, load_state, save_state
from trust_tta.training.ema import copy_buffers, decay_at, update_average
from trust_tta.training.evaluation import check_images
from trust_tta.training.optimiser import learning_rate, make_optimiser, set_learning_rate
from trust_tta.training.recipe import TrainRecipe


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 0: mean loss, the learning rate of its last step, accuracy of the averaged weights."""

    epoch: int
    loss: float
    lr: float
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """The averaged network in evaluation mode and the course; the network given to `train` holds the last weights."""

    average: VMamba
    history: tuple[EpochRecord, ...]
    first_epoch: int  # 0, or where a checkpoint let it go on


Evaluate: TypeAlias = Callable[[VMamba], float]
Progress: TypeAlias = Callable[[EpochRecord], None]


@dataclass
class _Run:
    """What changes while training; `network` calls the model, compiled or recorded."""

    model: VMamba
    average: VMamba
    network: Callable[[Tensor], Tensor]
    optimiser: torch.optim.Optimizer
    history: list[EpochRecord] = field(default_factory=list)


@dataclass(frozen=True)
class _Data:
    """Images uint8 (N, h, w, 3) and labels (N,) on the device, and the constants that normalise them."""

    images: Tensor
    labels: Tensor
    scale: Tensor
    shift: Tensor
    classes: int

    def batch_size(self, recipe: TrainRecipe) -> int:
        return min(recipe.batch_size, len(self.images))

    def steps(self, recipe: TrainRecipe) -> int:
        """Whole batches in an epoch; the rest waits for the next epoch's shuffle."""
        return len(self.images) // self.batch_size(recipe)


def train(
    model: VMamba,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    recipe: TrainRecipe,
    *,
    device: str | torch.device = "cpu",
    checkpoint_path: str | PathLike[str] | None = None,
    resume: bool = True,
    evaluate: Evaluate | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train `model` in place on images uint8 (n, h, w, 3) and labels (n,).

    With a `checkpoint_path` the state is saved after each epoch, and a run found there goes on where it was.
    `evaluate` gets the averaged network after each epoch; its number goes into the history.
    """
    target = torch.device(device)
    data = _load(images, labels, recipe, model.config.num_classes, target)
    run = _start(model, recipe, target)
    path = Path(checkpoint_path) if checkpoint_path is not None else None
    identity = identify(model, images, labels, recipe) if path else {}
    if path and resume and path.is_file():
        _restore(run, load_state(path, identity, target))
    first = len(run.history)
    with _own_randomness(target):
        for epoch in range(first, recipe.epochs):
            begun = time.perf_counter()
            loss, lr = _run_epoch(run, data, recipe, epoch)
            value = evaluate(run.average.eval()) if evaluate else None
            run.history.append(EpochRecord(epoch, loss, lr, value, time.perf_counter() - begun))
            if path:
                save_state(path, _snapshot(run), identity)
            if progress:
                progress(run.history[-1])
    return TrainResult(run.average.eval(), tuple(run.history), first)


def set_drop_path(model: nn.Module, rate: float) -> None:
    """Give the blocks rates of stochastic depth from 0 to `rate`, linear in their depth."""
    layers = [m for m in model.modules() if isinstance(m, StochasticDepth)]
    for i, layer in enumerate(layers):
        layer.rate = rate * i / max(1, len(layers) - 1)


def _load(
    images: NDArray[np.uint8], labels: NDArray[Any], recipe: TrainRecipe, classes: int, device: torch.device
) -> _Data:
    check_images(images, labels, classes=classes)
    if len(images) < 2 or recipe.crop_padding >= min(images.shape[1:3]):
        raise ConfigError(
            f"{len(images)} images of {images.shape[1]}x{images.shape[2]} pixels with crop_padding "
            f"{recipe.crop_padding}; give at least 2 images, larger than the padding"
        )
    pixels = torch.from_numpy(np.array(images)).to(device)
    truth = torch.from_numpy(np.array(labels, dtype=np.int64)).to(device)
    return _Data(pixels, truth, *augment.channel_constants(recipe.mean, recipe.std, device), classes)


def _start(model: VMamba, recipe: TrainRecipe, device: torch.device) -> _Run:
    set_drop_path(model, recipe.drop_path)
    model.to(device)
    network = torch.compile(model) if recipe.compile else _recorded(model)
    average = copy.deepcopy(model).requires_grad_(False)
    return _Run(model, average, network, make_optimiser(model, recipe, device))


def _recorded(model: VMamba) -> Callable[[Tensor], Tensor]:
    """On a CUDA device the host takes longer to ask for a small network's kernels than the device to run them."""
    call = Recorder(model, list(model.parameters()))
    return lambda inputs: call(inputs, model.slots(None, len(inputs)))


def _snapshot(run: _Run) -> dict[str, Any]:
    parts = {name: getattr(run, name).state_dict() for name in ("model", "average", "optimiser")}
    return {**parts, "history": [asdict(record) for record in run.history]}


def _restore(run: _Run, state: dict[str, Any]) -> None:
    for name in ("model", "average", "optimiser"):
        getattr(run, name).load_state_dict(state[name])
    run.history[:] = [EpochRecord(**record) for record in state["history"]]


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state as it was, and choose convolutions that repeat."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before


def _seed_epoch(seed: int, epoch: int, device: torch.device) -> torch.Generator:
    """A generator that depends on seed and epoch alone, so that a resumed run draws what an undisturbed one does."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64) >> 1
    torch.manual_seed(int(words[0]))  # stochastic depth draws from the default generator
    return torch.Generator(device).manual_seed(int(words[1]))


def _run_epoch(run: _Run, data: _Data, recipe: TrainRecipe, epoch: int) -> tuple[float, float]:
    """One pass over the shuffled data: mean loss and last learning rate."""
    device, size, steps = data.images.device, data.batch_size(recipe), data.steps(recipe)
    generator = _seed_epoch(recipe.seed, epoch, device)
    shuffled = torch.randperm(len(data.images), generator=generator, device=device)
    losses = torch.empty(steps, device=device)
    plain = epoch >= recipe.plain_from
    run.model.train()
    for i in range(steps):
        step = epoch * steps + i
        lr = learning_rate(step, steps, recipe)
        set_learning_rate(run.optimiser, lr)
        inputs, targets = _sample(data, shuffled[i * size : (i + 1) * size], recipe, generator, plain=plain)
        losses[i] = _step(run, inputs, targets, recipe, step)
    copy_buffers(run.average, run.model)
    values: list[float] = losses.tolist()  # once an epoch: reading each loss would stall the device
    _check_finite(values, epoch, recipe)
    return sum(values) / steps, lr


def _sample(
    data: _Data, chosen: Tensor, recipe: TrainRecipe, generator: torch.Generator, *, plain: bool
) -> tuple[Tensor, Tensor]:
    """Augmented inputs (n, 3, h, w) and target distributions (n, classes) of the images at `chosen` (n,)."""
    pixels = augment.crop_and_flip(
        data.images, chosen, padding=recipe.crop_padding, flip=recipe.flip, generator=generator
    )
    inputs = augment.normalise(pixels, data.scale, data.shift)
    targets = F.one_hot(data.labels[chosen], data.classes).float()
    if not plain and recipe.cutout:
        inputs = augment.cut_out(inputs, side=recipe.cutout, generator=generator)
    if not plain and recipe.mixup + recipe.cutmix > 0:
        inputs, targets = augment.mix(inputs, targets, mixup=recipe.mixup, cutmix=recipe.cutmix, generator=generator)
    return inputs, targets


def _step(run: _Run, inputs: Tensor, targets: Tensor, recipe: TrainRecipe, step: int) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
        logits = run.network(inputs)
    loss = F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing)
    run.optimiser.zero_grad()
    loss.backward()
    if recipe.grad_clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), recipe.grad_clip)
    run.optimiser.step()
    update_average(run.average, run.model, decay_at(step, recipe.ema_decay))
    return loss.detach()


def _check_finite(losses: list[float], epoch: int, recipe: TrainRecipe) -> None:
    """Stop before a broken state replaces the last good checkpoint."""
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss is {loss} at step {epoch * len(losses) + i} (epoch {epoch}) with lr {recipe.lr:g} and "
                f"grad_clip {recipe.grad_clip:g}; lower lr or clip harder; a checkpoint holds the epoch before"
            )
