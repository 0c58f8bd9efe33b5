"""What a batch must be before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from trust_tta.errors import ShapeError, TrustError


def check_images(images: Tensor, model: nn.Module) -> None:
    """Refuse a batch that is no float tensor (n, c, h, w), is empty, not finite, or does not fit the network."""
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
    if not bool(images.isfinite().all()):
        raise ShapeError("the images hold values that are not finite; drop or repair them before adapting")


@contextmanager
def statistics_wanted(images: Tensor) -> Iterator[None]:
    """Say in one line where PyTorch refuses to normalise maps that have one number a channel."""
    try:
        yield
    except TrustError:
        raise
    except ValueError as error:
        raise ShapeError(
            f"{len(images)} images of {tuple(images.shape[2:])} pixels have no batch statistics "
            f"({str(error).splitlines()[0]}); give more or larger images, or set batch_statistics=False"
        ) from error
