"""What a batch must be before anything is done with it, and the modes in which it is worked on."""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from trust_tta.errors import (
    ConfigError,
    DataError,
    ShapeError,
    StateError,
    TrustError,
    TrustWarning,
    reason_of,
    users_level,
)
from trust_tta.preprocessing import network_input

if TYPE_CHECKING:
    from trust_tta.methods.base import Method

T = TypeVar("T")

FEW_IMAGES = 8  # below so many, the statistics of a batch say little

_drawing = threading.Lock()  # from PyTorch's random numbers, which all threads share


def check_images(images: Tensor, model: nn.Module) -> None:
    """Refuse a batch that `check_shape` refuses, or that is not finite."""
    check_shape(images, model)
    _check_finite(images, images.sum())


def check_shape(images: Tensor, model: nn.Module) -> None:
    """Refuse a batch that is no float tensor (n, c, h, w), is empty, or does not fit the network."""
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        given = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images)
        raise ShapeError(f"images are {given}; give a float tensor of shape (n, channels, h, w)")
    if images.numel() == 0:
        raise ShapeError(f"the batch is empty (shape {tuple(images.shape)}); give at least one image")
    first = next(model.parameters(), images)
    if (images.dtype, images.device) != (first.dtype, first.device):
        raise ShapeError(
            f"images are {images.dtype} on {images.device} and the network is {first.dtype} on {first.device}; "
            "give both the same dtype and device"
        )


@contextmanager
def finite(images: Tensor) -> Iterator[None]:
    """Refuse images that are not finite when the work inside is done, or broke off: it does not wait for the device."""
    total = images.sum()
    try:
        yield
    except Exception:
        _check_finite(images, total)
        raise
    _check_finite(images, total)


def _check_finite(images: Tensor, total: Tensor) -> None:
    # A finite sum has finite terms, and takes one pass; large ones may sum to infinity.
    if not math.isfinite(total.item()) and not bool(images.isfinite().all()):
        raise ShapeError("the images hold values that are not finite; drop or repair them before adapting")


def check_outputs(fine: Tensor, images: Tensor) -> None:
    """Refuse predictions that are not finite, as `fine` () says: pixels too large, or the last update too long."""
    if not bool(fine):
        largest = float(images.abs().max())
        raise DataError(
            f"the predictions of this batch are not finite (its largest pixel is {largest:.3g}); nothing was changed: "
            "check the preprocessing, the network's weights and the learning rate"
        )


def are_finite(outputs: Tensor) -> Tensor:
    """Whether every value is finite, as a tensor () on their device; nothing of their size is made."""
    extremes = torch.stack(torch.aminmax(outputs)) if outputs.numel() else outputs  # of NaN: NaN
    return extremes.isfinite().all()


class Admission:
    """Takes a batch as its network does, or refuses it; warns once of those too small to have statistics of their own.

    At the first batch, or the second small one in a row: the rest of a stream may be small.
    """

    def __init__(self) -> None:
        self.likely, self.warned = True, False

    def __call__(self, images: Any, method: Method) -> Tensor:
        """The float batch (n, c, h, w): pixels and pictures go through the network's preprocessing."""
        if getattr(method.model, "preprocessing", None) is not None:
            images = network_input(method.model, images)
        check_shape(images, method.model)
        if method.statistics.of_batches and not getattr(method.model, "dense", False):  # pixels make up for images
            self._warn_of_few(len(images), method.name)
        checked: Tensor = images
        return checked

    def _warn_of_few(self, images: int, method: str) -> None:
        few = images < FEW_IMAGES
        if few and self.likely and not self.warned:
            self.warned = True
            warnings.warn(
                f"'{method}' normalizes with the statistics of the batch, poor for a batch of {images} (below "
                f'{FEW_IMAGES}); use statistics="stream", which follows all batches so far, or larger batches',
                TrustWarning,
                stacklevel=users_level(),
            )
        self.likely = few


class Turns:
    """A lock for `with`, of which copies and pickles get one of their own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function as torch.compile must leave it: a method changes weights and modes, which no graph can hold."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # not loaded: nothing was compiled
    disabled: Callable[..., T] = function if dynamo is None else dynamo.disable(function)
    return disabled


def check_one_label(logits: Tensor, method: str) -> None:
    """Refuse dense predictions where a method takes one for each image."""
    if logits.dim() != 2:
        raise ShapeError(
            f"'{method}' takes one prediction for each image and the network gave {tuple(logits.shape)}; "
            "for dense predictions use 'tent', 'eta', 'sar', 'shot', 'trust' or 'tide'"
        )


def check_classes(kept: Tensor, classes: int) -> None:
    """Refuse a state that was saved with another number of classes, (classes,), which shows only now."""
    if len(kept) != classes:
        raise StateError(f"the state is of {len(kept)} classes and there are {classes}")


@contextmanager
def adapting(images: Tensor) -> Iterator[None]:
    """Whatever modes the caller is in: gradients, casts of the weights as they are, PyTorch's refusals in one line."""
    with torch.inference_mode(False), torch.enable_grad(), _fresh_casts(images), _one_line(images):
        yield


@contextmanager
def stochastic_depth_on(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Stochastic depth live inside, drawn from `seed` so that the caller's random numbers are left alone."""
    switch = getattr(model, "set_stochastic_depth", None)
    if switch is None:
        raise ConfigError(f"{type(model).__name__} has no stochastic depth; set stochastic_depth=False")
    switch(True)
    try:
        with _drawing, torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        switch(False)


@contextmanager
def _fresh_casts(images: Tensor) -> Iterator[None]:
    """Autocast as it is around us, but without its cache: weights cast before an update must not serve after it."""
    device = images.device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    try:
        with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()  # the caller's network has the same weights


@contextmanager
def _one_line(images: Tensor) -> Iterator[None]:
    """Say in one line what PyTorch refuses: norms of one number per channel, images smaller than a kernel."""
    size = f"{len(images)} images of {tuple(images.shape[2:])} pixels"
    try:
        yield
    except TrustError:
        raise
    except ValueError as error:
        raise ShapeError(
            f"{size} have no batch statistics ({reason_of(error)}); "
            'give more or larger images, or set statistics="stream"'
        ) from error
    except RuntimeError as error:
        if "size" not in str(error) or "memory" in str(error):
            raise
        raise ShapeError(f"the network does not take {size} ({reason_of(error)}); give larger images") from error
