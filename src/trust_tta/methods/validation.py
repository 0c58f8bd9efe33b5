"""Checks of a batch, of its predictions, and the PyTorch modes in which a batch is adapted on."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

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

MIN_IMAGES = 8  # below this, the statistics of a batch are poor


def check_batch(images: Any, model: nn.Module) -> Tensor:
    """The float batch (n, c, h, w); uint8 pixels and PIL images go through the network's preprocessing.

    Refused unless it is a dense tensor that is not empty, with the dtype and device of the network's weights.
    """
    if getattr(model, "preprocessing", None) is not None:
        images = network_input(model, images)
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        given = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else _type_name(images)
        raise ShapeError(f"images are {given}; give a float tensor of shape (n, channels, h, w)")
    if images.numel() == 0:
        raise ShapeError(f"the batch is empty (shape {tuple(images.shape)}); give at least one image")
    if images.layout is not torch.strided:
        raise ShapeError(f"images are a {images.layout} tensor; give a dense one: images.to_dense()")
    first = next((p for p in model.parameters() if p.is_floating_point()), images)
    if first.is_meta:
        raise ConfigError(f"{type(model).__name__} is on the meta device, without weights; load them first")
    if (images.dtype, images.device) != (first.dtype, first.device):
        raise ShapeError(
            f"images are {images.dtype} on {images.device} and the network is {first.dtype} on {first.device}; "
            "give both the same dtype and device"
        )
    return images


def _type_name(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")


def check_network(model: Any) -> nn.Module:
    """The network, or the one that torch.compile was given; refused in one line if it cannot be called or adapted."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is {_type_name(model)}; give a torch.nn.Module")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(f"the network is wrapped in {type(model).__name__}; give the network itself: model.module")
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
    _check_arguments(model)
    return model


def _check_arguments(model: nn.Module) -> None:
    """Refuse a network whose forward cannot be called with images alone."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__}.forward takes ({', '.join(signature.parameters)}) and methods call it with images "
            f"alone ({error}); give the other arguments defaults, or wrap the network"
        ) from error


def check_dtypes(model: nn.Module, adapted: Iterable[str]) -> None:
    """Refuse complex parameters to adapt; warn where they are too coarse for small updates."""
    dtypes = {model.get_parameter(name).dtype for name in adapted}
    if any(dtype.is_complex for dtype in dtypes):
        raise ConfigError(
            f"{type(model).__name__} has complex parameters, which are not adapted; pass parameters='bn' to adapt its "
            "normalizations alone"
        )
    if coarse := dtypes & {torch.bfloat16, torch.float16}:
        dtype = str(coarse.pop()).removeprefix("torch.")
        warnings.warn(
            f"the weights of {type(model).__name__} are {dtype}, in which small updates are lost; "
            f"keep them in float32 and adapt under torch.autocast(device, torch.{dtype})",
            TrustWarning,
            stacklevel=users_level(),
        )


def check_finite(images: Tensor) -> None:
    """Refuse images (n, c, h, w) that are not finite."""
    if not bool(images.isfinite().all()):
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


def warn_of_few_images(images: int, method: str) -> None:
    """Warn of a batch that is too small for batch statistics."""
    warnings.warn(
        f"'{method}' normalizes with the statistics of the batch, poor for a batch of {images} (below {MIN_IMAGES}); "
        'use statistics="stream", which follows all batches so far, or larger batches',
        TrustWarning,
        stacklevel=users_level(),
    )


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


def _explain(error: Exception, images: Tensor) -> TrustError | None:
    """One of the usual errors of a network on images (n, c, h, w) in one line with a remedy; None for others."""
    if isinstance(error, TrustError) or not isinstance(error, ValueError | AssertionError | RuntimeError):
        return None
    count, channels, height, width = images.shape
    reason = reason_of(error)
    if "more than 1 value per channel" in reason:
        return ShapeError(
            f"{count} images of {height}x{width} pixels have no batch statistics ({reason}); "
            'give more or larger images, or set statistics="stream"'
        )
    if "does not require grad" in reason:
        return ConfigError(
            "no gradient reaches the weights that are adapted: the network's forward runs without gradients "
            "(torch.no_grad, detach); remove that, or use a method that does not learn, such as 'bn' or 'neo'"
        )
    if "inplace operation" in reason:
        return ConfigError(f"the network cannot be differentiated ({reason}); remove that in-place operation")
    if reason.startswith("torch.utils.checkpoint"):
        return ConfigError(
            "gradient checkpointing repeats a forward after its statistics have moved; switch it off in the network"
        )
    misfit = re.search("size|shapes cannot be multiplied|channels", reason) and "memory" not in reason
    if misfit or not isinstance(error, RuntimeError):
        return ShapeError(
            f"the network does not take {count} images of {height}x{width} pixels and {channels} channels ({reason}); "
            "give images of the size and the channels that it takes"
        )
    return None


@contextmanager
def network_passes(images: Tensor) -> Iterator[None]:
    """Context of passes over a batch (n, c, h, w): autocast without its cache, and errors in one line.

    Cached casts of weights would outlive their update. Images that are not finite are refused at the end, so that the
    host does not wait: a finite sum has finite terms, and large terms may sum to infinity.
    """
    device, total = images.device.type, images.sum()
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else None
    try:
        with torch.autocast(device, dtype, cache_enabled=False) if autocast else nullcontext():
            yield
    except Exception as error:
        check_finite(images)
        explained = _explain(error, images)
        if explained is None:
            raise
        raise explained from error
    finally:
        if autocast:
            torch.clear_autocast_cache()  # the user's network has the same weights
    if not math.isfinite(total.item()):
        check_finite(images)
