"""Statistics and Fisher weights of clean source images, gathered before the stream begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from pydantic import PlainValidator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.forward import NetworkForward
from trust_tta.methods.losses import pseudo_label_loss
from trust_tta.methods.parameters import ParameterSet, select, share_tensors
from trust_tta.methods.prompts import take_prompts
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.validation import check_batch, check_network, network_passes
from trust_tta.schema import show

T = TypeVar("T")


@dataclass(frozen=True)
class SourceStatistics:
    """Mean and standard deviation over clean images of a token of every layer, concatenated, and of the pooled
    features."""

    mean: Tensor
    std: Tensor
    features: Tensor
    features_std: Tensor

    def like(self, tensor: Tensor) -> SourceStatistics:
        """On the device and in the dtype of `tensor`."""
        return SourceStatistics(*(value.to(tensor) for value in vars(self).values()))


@dataclass(frozen=True)
class FisherWeights:
    """Diagonal Fisher information on clean images: squared gradients by parameter name."""

    values: dict[str, Tensor] = field(repr=False)


def gather_source_statistics(
    model: nn.Module, batches: Iterable[Tensor], *, statistics: StatisticsKind = "batch"
) -> SourceStatistics:
    """Statistics over batches of clean images (n, c, h, w); forward passes only, the model is left as it was."""
    model = check_network(model)
    take_prompts(model)
    network = share_tensors(model)
    prompted = take_prompts(network)
    images, sums, squares, width = 0, torch.zeros(()), torch.zeros(()), 0
    with torch.no_grad():
        for batch in _normalized(network, batches, statistics):
            with network_passes(batch):
                seen = prompted.forward(prompted.embed(batch))
            values = torch.cat(seen, dim=1).double().cpu()
            images, width = images + len(values), seen.features.shape[1]
            sums, squares = sums + values.sum(0), squares + values.square().sum(0)
    if images < 2:
        raise ConfigError(f"{images} clean images were given; source statistics need at least two")
    mean = sums / images
    variance = (squares / images - mean.square()).clamp_min(0) * images / (images - 1)
    (tokens, features), (tokens_std, features_std) = (
        values.float().split([len(values) - width, width]) for values in (mean, variance.sqrt())
    )
    return SourceStatistics(tokens, tokens_std, features, features_std)


def gather_fisher(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    parameters: ParameterSet = "bn",
    statistics: StatisticsKind = "batch",
) -> FisherWeights:
    """The mean over batches of clean images of the squared gradient of the cross-entropy to the network's own labels.

    The gradient is that of a batch, as in the official code; the model is left as it was.
    """
    model = check_network(model)
    names, count = select(model, parameters), 0
    with torch.inference_mode(False), torch.enable_grad():
        network = share_tensors(model, names)
        run = NetworkForward(network)
        weights = [network.get_parameter(name) for name in names]
        sums = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
        for batch in _normalized(network, batches, statistics):
            with network_passes(batch):
                loss = pseudo_label_loss(run(batch, capture=False))
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                total += 0 if gradient is None else gradient.square()
            count += 1
    if count == 0:
        raise ConfigError("no clean batches were given; the Fisher weights need at least one")
    return FisherWeights({name: total / count for name, total in zip(names, sums, strict=True)})


def gather_from_clean(name: str, model: nn.Module, batches: Iterable[Tensor], options: Mapping[str, Any]) -> Any:
    """The value of the option `name`, one of `source_statistics` and `fisher`, for a method with these options."""
    if name == "fisher":
        return gather_fisher(model, batches, parameters=options["parameters"], statistics=options["statistics"])
    return gather_source_statistics(model, batches, statistics=options["statistics"])


def required(value: T | None, method: str, option: str, *, hint: str = "") -> T:
    """The value of an option that needs clean images; refused where it is None."""
    if value is None:
        raise ConfigError(
            f"{method} needs {option.replace('_', ' ')} of clean images; give {option}="
            f"trust_tta.methods.gather_{option}(model, clean_batches){hint}"
        )
    return value


def _normalized(network: nn.Module, batches: Iterable[Tensor], kind: StatisticsKind) -> Iterator[Tensor]:
    """Yield the checked batches, with the network's norms set to statistics of this kind."""
    statistics = Statistics(network, kind, updating_without_grad=True)
    for batch in batches:
        images = check_batch(batch, network)
        statistics.start_batch(images)
        yield images


def _made_by(function: Callable[..., object], kind: type) -> PlainValidator:
    """A validator that accepts None and results of the function."""

    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"it is {show(value)}; give what {function.__name__}(model, clean_batches) returns")
        return value

    return PlainValidator(check)


StatisticsOption: TypeAlias = Annotated[SourceStatistics | None, _made_by(gather_source_statistics, SourceStatistics)]
FisherOption: TypeAlias = Annotated[FisherWeights | None, _made_by(gather_fisher, FisherWeights)]
