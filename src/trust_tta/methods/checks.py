"""What a batch must be before anything is done with it."""

from __future__ import annotations

from torch import Tensor, nn

from trust_tta.errors import ShapeError
from trust_tta.methods.parameters import has_batch_norm


def check_images(images: Tensor, model: nn.Module, *, batch_statistics: bool) -> None:
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
    if images.shape[0] == 1 and batch_statistics and has_batch_norm(model):
        raise ShapeError("a batch of one image has no batch statistics; give more images or set batch_statistics=False")
    if not bool(images.isfinite().all()):
        raise ShapeError("the images hold values that are not finite; drop or repair them before adapting")
