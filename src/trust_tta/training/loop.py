"""The training loop: the data set on the device, AdamW, an average of the weights, a saved state after each epoch."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.atomic import write_whole
from trust_tta.data.file_io import hash_array
from trust_tta.errors import CheckpointError, ConfigError, StateError, reason_of
from trust_tta.models.base import ScanNetwork
from trust_tta.models.layers import StochasticDepth
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.progress import SILENT, Progress
from trust_tta.training.recipe import Recipe
from trust_tta.training.tasks import R, Samples, Task, channel_constants, label_type

Model = TypeVar("Model", bound=nn.Module)

_FORMAT = 1  # of a saved state

# No weight decay: the first ones set time scales, the others are initial values of tokens.
_UNDECAYED = ("A_", "D", "dt_projs_bias", "cls_token", "pos_embed")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 0: mean loss, the learning rate of its last step, the score of the averaged weights."""

    epoch: int
    loss: float
    lr: float
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class FitResult(Generic[Model]):
    """The averaged network in evaluation mode, and the history; the network given to `fit` holds the last weights."""

    average: Model
    history: tuple[EpochRecord, ...]
    first_epoch: int  # 0, or where a saved state let the run continue


@dataclass
class _Run(Generic[Model]):
    """The mutable state of a training; `network` calls the model, compiled or as a CUDA graph."""

    model: Model
    average: Model
    network: Callable[[Tensor], Any]
    optimizer: torch.optim.Optimizer
    history: list[EpochRecord] = field(default_factory=list)


def fit(
    model: Model,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    recipe: R,
    *,
    task: Task[R],
    init: str | None = None,
    state_path: str | PathLike[str] | None = None,
    evaluate: Callable[[Model], float] | None = None,
    progress: Progress = SILENT,
) -> FitResult[Model]:
    """Train `model` in place, on the device it is on, with images uint8 (n, h, w, 3) and labels (n, ...).

    With a `state_path` the state is saved after each epoch, and a saved run is continued if it started from the same
    weights: `init` is their digest, None for random ones. `evaluate(average)` is the score of each epoch.
    """
    task.check(images, labels, recipe)
    if len(images) < 2:
        raise ConfigError("there is 1 image to train on; give at least 2")
    device = next(model.parameters()).device
    pixels = torch.from_numpy(np.array(images)).to(device)
    truth = torch.from_numpy(np.array(labels, dtype=label_type(labels))).to(device)
    samples = Samples(pixels, truth, *channel_constants(recipe.mean, recipe.std, device))
    run = _start(model, recipe, task)
    path = Path(state_path) if state_path is not None else None
    identity = identify(model, images, labels, recipe) | {"init": init} if path else {}
    if path and path.is_file():
        state = load_state(path, identity, device)
        run.model.load_state_dict(state["model"])
        run.average.load_state_dict(state["average"])
        run.optimizer.load_state_dict(state["optimiser"])
        run.history[:] = [EpochRecord(**record) for record in state["history"]]
    first = len(run.history)
    steps = len(images) // min(recipe.batch_size, len(images))  # the rest waits for the next epoch's shuffle
    if first:
        progress.note(f"continued after epoch {first} of an earlier run")
    progress.start((recipe.epochs - first) * steps, "training")
    with _deterministic(device):
        for epoch in range(first, recipe.epochs):
            start_time = time.perf_counter()
            loss, lr = _run_epoch(run, samples, recipe, epoch, steps=steps, task=task, progress=progress)
            score = evaluate(run.average.eval()) if evaluate else None
            seconds = time.perf_counter() - start_time
            run.history.append(EpochRecord(epoch, loss, lr, score, seconds))
            if path:
                state = {
                    "model": run.model.state_dict(),
                    "average": run.average.state_dict(),
                    "optimiser": run.optimizer.state_dict(),  # the key of states written earlier
                    "history": [asdict(record) for record in run.history],
                }
                save_state(path, state, identity)
            count = f"{epoch + 1:{len(str(recipe.epochs))}d}/{recipe.epochs}"
            scored = "" if score is None else f"{task.score} {100 * score:.2f} %  "
            progress.note(f"epoch {count}  loss {loss:.4f}  lr {lr:.2e}  {scored}{seconds:.2f} s")
    progress.finish()
    return FitResult(run.average.eval(), tuple(run.history), first)


def set_drop_path(model: nn.Module, rate: float) -> None:
    """Give the blocks rates of stochastic depth from 0 to `rate`, linear in their depth."""
    layers = [m for m in model.modules() if isinstance(m, StochasticDepth)]
    for i, layer in enumerate(layers):
        layer.rate = rate * i / max(1, len(layers) - 1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters with decay, and those without: norms, biases, the scan's A, D and step biases."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            leaf = name.rpartition(".")[2]
            (free if parameter.dim() <= 1 or leaf.startswith(_UNDECAYED) else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def learning_rate(step: int, steps_per_epoch: int, recipe: Recipe) -> float:
    """Linear from lr/warmup to lr over the warm-up steps, then down to zero after the last step."""
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    return recipe.lr * recipe.decay_lr(step - warmup, recipe.epochs * steps_per_epoch - warmup)


def decay_at(step: int, decay: float) -> float:
    """The decay of the average at a step counted from 0, lower at first to forget the initial weights."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average = decay * average + (1 - decay) * model, over the parameters."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


@torch.no_grad()
def copy_buffers(average: nn.Module, model: nn.Module) -> None:
    """Copy the running statistics of the model, which are averages already."""
    for own, other in zip(average.buffers(), model.buffers(), strict=True):
        own.copy_(other)


def _start(model: Model, recipe: R, task: Task[R]) -> _Run[Model]:
    set_drop_path(model, recipe.drop_path)
    device = next(model.parameters()).device
    network: Callable[[Tensor], Any] = functools.partial(task.forward, model) if task.forward else model
    if task.forward is None and isinstance(model, ScanNetwork):
        # Captured as a CUDA graph: launching the kernels of a small network takes longer than running them.
        graphed = GraphedNetwork(model, list(model.parameters()))
        network = lambda inputs: graphed(inputs, model.scan_directions(None, len(inputs)))  # noqa: E731
    average = copy.deepcopy(model).requires_grad_(False)
    groups = parameter_groups(model, recipe.weight_decay)
    return _Run(model, average, network, torch.optim.AdamW(groups, lr=recipe.lr, fused=device.type == "cuda"))


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic convolutions, and restore the caller's random state afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before


def _seed_epoch(seed: int, epoch: int, device: torch.device) -> torch.Generator:
    """A generator seeded by seed and epoch, so that a resumed run draws the same numbers."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64) >> 1
    torch.manual_seed(int(words[0]))  # stochastic depth draws from the default generator
    return torch.Generator(device).manual_seed(int(words[1]))


def _run_epoch(
    run: _Run[Model], samples: Samples, recipe: R, epoch: int, *, steps: int, task: Task[R], progress: Progress
) -> tuple[float, float]:
    """One pass over the shuffled data: mean loss and last learning rate."""
    device, size = samples.images.device, min(recipe.batch_size, len(samples.images))
    generator = _seed_epoch(recipe.seed, epoch, device)
    shuffled = torch.randperm(len(samples.images), generator=generator, device=device)
    losses = torch.empty(steps, device=device)
    plain = epoch >= recipe.plain_from
    run.model.train()
    for i in range(steps):
        step = epoch * steps + i
        lr = learning_rate(step, steps, recipe)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = task.augment(samples, shuffled[i * size : (i + 1) * size], recipe, generator, plain)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
            outputs = run.network(inputs)
        loss = task.loss(outputs, targets if targets.is_floating_point() else targets.long(), recipe)
        run.optimizer.zero_grad()
        loss.backward()
        if recipe.grad_clip:
            nn.utils.clip_grad_norm_(run.model.parameters(), recipe.grad_clip)
        run.optimizer.step()
        losses[i] = loss.detach()
        update_average(run.average, run.model, decay_at(step, recipe.ema_decay))
        progress.advance()
    copy_buffers(run.average, run.model)
    values: list[float] = losses.tolist()  # once per epoch: reading each loss would stall the device
    for i, value in enumerate(values):
        if not math.isfinite(value):  # before a broken state replaces the last good one
            raise ConfigError(
                f"the loss is {value} at step {epoch * steps + i} (epoch {epoch}) with lr {recipe.lr:g} and "
                f"grad_clip {recipe.grad_clip:g}; lower lr or clip harder; the state of the epoch before is kept"
            )
    return sum(values) / steps, lr


# the state of an unfinished run, on disk


def identify(
    model: nn.Module, images: NDArray[np.uint8], labels: NDArray[Any], recipe: Recipe
) -> dict[str, str | None]:
    """The values that a saved run must share to be resumed: recipe, data and shapes of the network."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        **{name: json.dumps(value) for name, value in recipe.model_dump().items()},
        "images": hash_array(images),
        "labels": hash_array(labels.astype(label_type(labels))),
        "network": hash_array(np.frombuffer(repr(shapes).encode(), np.uint8)),
    }


def save_state(path: Path, state: Mapping[str, Any], identity: Mapping[str, str | None]) -> None:
    """Write tensors and plain values; a crash leaves the last complete state."""
    content = io.BytesIO()  # written as bytes, so that a full disk is reported as such
    torch.save({"format": _FORMAT, "identity": dict(identity), **state}, content)
    write_whole(path, content.getbuffer())


def load_state(path: Path, identity: Mapping[str, str | None], device: torch.device) -> dict[str, Any]:
    """Read a state of `save_state`; a state of another run is refused with the differences."""
    try:
        state: Any = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the reader raises many types; each means the same to a user
        reason = reason_of(error)
        raise CheckpointError(f"'{path}' cannot be read as a training state ({reason}); delete this file") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise CheckpointError(f"'{path}' is not a training state of this version; delete it or give another folder")
    saved = state["identity"]
    changed = [f"{key} was {saved.get(key)}, is {value}" for key, value in identity.items() if saved.get(key) != value]
    if changed:
        raise StateError(
            f"'{path}' belongs to another run: {'; '.join(changed)}; give another folder, or delete this file"
        )
    return state
