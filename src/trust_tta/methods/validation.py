"""Checks of a batch, of its predictions, and the PyTorch modes in which a batch is adapted on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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

MIN_IMAGES = 8  # below this, the statistics of a batch are poor


def check_shape(images: Tensor, model: nn.Module) -> None:
    """Refuse a batch that is no dense float tensor (n, c, h, w), is empty, or has another dtype or device."""
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        given = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images)
        raise ShapeError(f"images are {given}; give a float tensor of shape (n, channels, h, w)")
    if images.numel() == 0:
        raise ShapeError(f"the batch is empty (shape {tuple(images.shape)}); give at least one image")
    if images.layout is not torch.strided:
        raise ShapeError(f"images are a {images.layout} tensor; give a dense one: images.to_dense()")
    first = next(model.parameters(), images)
    if (images.dtype, images.device) != (first.dtype, first.device):
        raise ShapeError(
            f"images are {images.dtype} on {images.device} and the network is {first.dtype} on {first.device}; "
            "give both the same dtype and device"
        )


def check_network(model: Any) -> None:
    """Refuse a network that cannot be copied or adapted, in one line."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("the network is scripted (torch.jit), which methods cannot change; give the original module")
    for name, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise ConfigError(
                f"the layer '{name}' of {type(model).__name__} is quantized and cannot be adapted; "
                "adapt the network before it is quantized"
            )
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(is_lazy(tensor) for tensor in tensors):
            raise ConfigError(
                f"the lazy layer '{name}' of {type(model).__name__} has no shape yet; "
                "run one batch through the network before it is adapted"
            )


def warn_of_half_precision(model: nn.Module, adapted: Iterable[str]) -> None:
    """Warn where parameters to adapt are too coarse for small updates."""
    dtypes = {model.get_parameter(name).dtype for name in adapted} & {torch.bfloat16, torch.float16}
    if dtypes:
        dtype = str(dtypes.pop()).removeprefix("torch.")
        warnings.warn(
            f"the weights of {type(model).__name__} are {dtype}, in which small updates are lost; "
            f"keep them in float32 and adapt under torch.autocast(device, torch.{dtype})",
            TrustWarning,
            stacklevel=users_level(),
        )


def check_finite(images: Tensor, total: Tensor | None = None) -> None:
    """Refuse images that are not finite; `total` is their sum, where it was computed before."""
    # A finite sum has finite terms, and takes one pass; large ones may sum to infinity.
    total = images.sum() if total is None else total
    if not math.isfinite(total.item()) and not bool(images.isfinite().all()):
        raise ShapeError("the images hold values that are not finite; drop or repair them before adapting")


def all_finite(outputs: Tensor) -> Tensor:
    """Whether every value is finite, () bool on the device; allocates nothing of the outputs' size."""
    extremes = torch.stack(torch.aminmax(outputs)) if outputs.numel() else outputs  # of NaN: NaN
    return extremes.isfinite().all()


def check_outputs(outputs: Tensor, images: Tensor) -> None:
    """Refuse a batch (n, c, h, w) whose predictions (n, classes, ...) are not finite."""
    if not bool(all_finite(outputs)):
        largest = float(images.abs().max())
        raise DataError(
            f"the predictions of this batch are not finite (its largest pixel is {largest:.3g}); nothing was changed: "
            "check the preprocessing, the network's weights and the learning rate"
        )


class InputCheck:
    """Preprocesses and validates a batch; warns once of batches too small for batch statistics.

    The warning comes at the first batch, or at the second small one in a row: the last batch of a stream may be small.
    """

    def __init__(self) -> None:
        self.last_was_small, self.warned = True, False

    def __call__(self, images: Any, method: Method) -> Tensor:
        """The float batch (n, c, h, w); uint8 pixels and PIL images go through the network's preprocessing."""
        if getattr(method.model, "preprocessing", None) is not None:
            images = network_input(method.model, images)
        check_shape(images, method.model)
        small = len(images) < MIN_IMAGES and not getattr(method.model, "dense", False)  # pixels make up for images
        if small and self.last_was_small and method.statistics.uses_batch and not self.warned:
            self.warned = True
            warnings.warn(
                f"'{method.name}' normalizes with the statistics of the batch, poor for a batch of {len(images)} "
                f'(below {MIN_IMAGES}); use statistics="stream", which follows all batches so far, or larger batches',
                TrustWarning,
                stacklevel=users_level(),
            )
        self.last_was_small = small
        checked: Tensor = images
        return checked


def check_image_logits(logits: Tensor, method: str) -> None:
    """Refuse dense predictions where a method needs one prediction per image."""
    if logits.dim() != 2:
        raise ShapeError(
            f"'{method}' takes one prediction for each image and the network gave {tuple(logits.shape)}; "
            "for dense predictions use 'tent', 'eta', 'sar', 'shot', 'trust' or 'tide'"
        )


def check_classes(kept: Tensor, classes: int) -> None:
    """Refuse a loaded state (classes,) that was saved with another number of classes."""
    if len(kept) != classes:
        raise StateError(f"the state is of {len(kept)} classes and there are {classes}")


@contextmanager
def adaptation_context(images: Tensor) -> Iterator[None]:
    """Autocast without its cache, and errors in one line; images that are not finite are refused at the end.

    Cached casts of weights would outlive their update. The finite check comes last, so that the host does not wait.
    """
    device, total = images.device.type, images.sum()
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else None
    try:
        with torch.autocast(device, dtype, cache_enabled=False) if autocast else nullcontext():
            yield
    except TrustError:
        check_finite(images, total)
        raise
    except Exception as error:
        check_finite(images, total)
        height, width = images.shape[2:]
        size = f"{len(images)} images of {height}x{width} pixels"
        if isinstance(error, ValueError):
            raise ShapeError(
                f"{size} have no batch statistics ({reason_of(error)}); "
                'give more or larger images, or set statistics="stream"'
            ) from error
        if isinstance(error, RuntimeError) and "size" in str(error) and "memory" not in str(error):
            raise ShapeError(f"the network does not take {size} ({reason_of(error)}); give larger images") from error
        raise
    finally:
        if autocast:
            torch.clear_autocast_cache()  # the user's network has the same weights
    check_finite(images, total)
