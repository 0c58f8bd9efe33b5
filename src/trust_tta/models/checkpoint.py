"""Checkpoints: weights with the variant, the classes and the preprocessing of their network.

A file names its variant in its metadata, or is recognized by the names and shapes of its parameters.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from trust_tta.config_io import read_asset
from trust_tta.errors import CheckpointError, ConfigError, TrustWarning, users_level
from trust_tta.models.base import ScanNetwork
from trust_tta.models.config import NetworkConfig, VMambaConfig
from trust_tta.models.metadata import NO_FIELDS, Fields, ModelInfo
from trust_tta.models.networks import FAMILIES, build_network, find_network, outputs_of
from trust_tta.models.pretrained import PRETRAINED, Pretrained, check_pretrained, find_file
from trust_tta.models.upernet import UPerNet
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.models.vmamba import VMamba
from trust_tta.models.weights import (
    AUXILIARY,
    HEADS,
    WeightsFile,
    load_state,
    pick_state,
    read_weights,
    rename,
    state_digest,
    strip_prefixes,
)
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import did_you_mean, show

Source: TypeAlias = str | PathLike[str] | Mapping[str, Any]

CHECKED_BATCHES = 3  # of a loaded network, before its input is trusted
NO_WEIGHTS = WeightsFile({}, {}, "")  # of networks whose own factory loads them
MIN_CHECKED_PARAMETERS = 10_000_000  # smaller networks are built whatever the size of the file

_TOLERANCE = 2e-3  # of a mean or deviation: how far published figures of one data set lie apart


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint(ModelInfo):
    """Weights of a file and the facts about their network that its name, metadata or variant states.

    >>> checkpoint = Checkpoint.open("vmamba_nano_cifar10")
    >>> checkpoint.variant, checkpoint.num_classes, checkpoint.classes[:2]
    ('vmamba_nano', 10, ('airplane', 'automobile'))
    >>> model = checkpoint.load()
    """

    variant: str
    preprocessing: Preprocessing
    file: Path | None  # None: the weights that the network's own factory gives it
    sha256: str
    metadata: Mapping[str, str] = field(repr=False)  # of the file
    ema: bool  # the moving average of the weights, where the file holds both
    _state: dict[str, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        source: str | PathLike[str] | None,
        *,
        variant: str | None = None,
        num_classes: int | None = None,
        preprocessing: Preprocessing | None = None,
        classes: tuple[str, ...] | None = None,
        fields: Fields = NO_FIELDS,
    ) -> Checkpoint:
        """Read the checkpoint `source`: a known name, the path of a .pth or .safetensors file, or "hf:owner/name".

        `source` may be None for a network from outside whose factory loads weights itself. What is given here takes
        precedence over what the file states; a preprocessing that contradicts the one of training is refused.
        """
        _check_request(source, variant, fields)
        file, published = (None, None) if source is None else find_file(source)
        ema = published is not None and published.is_average
        weights = NO_WEIGHTS if file is None else read_weights(file, ema=ema)
        if file is not None and published is not None and str(source) == published.name:
            check_pretrained(published, file, weights.sha256)
            stated = published.info
        else:
            stated = ModelInfo.from_metadata(weights.metadata, file)
        variant = _choose_variant(variant, stated.variant, weights.state, file, published)
        own_fields = {**stated.fields, **fields}
        given = _first(num_classes, own_fields.pop("num_classes", None))
        if variant not in VARIANTS and given is not None:
            own_fields["num_classes"] = given
        default, state = _examine(variant, own_fields, weights)
        count = _first(given, stated.num_classes, default.num_classes)
        if classes is not None and count not in (None, len(classes)):
            raise ConfigError(
                f"the network outputs {count} classes, but {len(classes)} names are given; name each output"
            )
        count = count if classes is None else len(classes)
        names = classes or stated.classes or default.classes
        return cls(
            variant=variant,
            fields=MappingProxyType(own_fields),
            num_classes=count,
            classes=names if names and len(names) == count else None,
            preprocessing=_choose_preprocessing(preprocessing, stated, default, file),
            license=stated.license or (published.license if published else None),
            file=file,
            sha256=weights.sha256 or state_digest(state),
            metadata=MappingProxyType(weights.metadata),
            ema=ema,
            _state=state,
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """State dict under the network's names; read again after `release`, if the file is unchanged."""
        if self._state is None:
            weights = NO_WEIGHTS if self.file is None else read_weights(self.file, ema=self.ema)
            _, state = _examine(self.variant, self.fields, weights)
            if self.sha256 != (weights.sha256 or state_digest(state)):
                raise CheckpointError(f"{self.origin} has changed since it was first read; start again")
            object.__setattr__(self, "_state", state)
        return self._state or {}

    @property
    def origin(self) -> str:
        """Source of the weights, for messages."""
        return f"'{self.file}'" if self.file else f"the factory '{self.variant}'"

    def load(
        self, *, device: str | torch.device = "cpu", num_classes: int | None = None, head: bool = True
    ) -> nn.Module:
        """The network with these weights, in evaluation mode; everything must fit.

        `head=False` leaves the classifier of our networks at its random weights, of `num_classes` classes.
        """
        fields, ours = dict(self.fields), self.variant in VARIANTS
        count = _first(num_classes, self.num_classes)
        if count is not None and (ours or self.num_classes not in (None, count)):
            fields["num_classes"] = count
        try:
            if ours:
                config = VARIANTS[self.variant].override(fields)
                stored, wanted = sum(t.numel() for t in self.state.values()), config.rough_size()
                if wanted > 2 * stored + MIN_CHECKED_PARAMETERS:  # before its memory is taken
                    raise CheckpointError(
                        f"{self.origin} holds {stored:.1e} numbers and the network '{self.variant}' has about "
                        f"{wanted:.1e}; give the variant and the fields that it was trained with"
                    )
                network = FAMILIES[type(config)](config)
            else:
                network = _build_external(self.variant, fields)
            load_state(network, self.state, origin=self.origin, head=head)
        except CheckpointError as error:
            found = matching_variants(read_weights(self.file, ema=self.ema).state) if ours and self.file else []
            if not found or self.variant in found:
                raise
            raise CheckpointError(
                f"{self.origin} holds the weights of '{found[0]}', not of '{self.variant}'; give the name '{found[0]}'"
            ) from error
        known = cast(ScanNetwork, network)
        known.preprocessing, known.classes = self.preprocessing, self.classes if head else None
        known.unchecked_batches = CHECKED_BATCHES
        set_license(network, self.license, origin=self.origin)
        return network.to(device).eval()

    def release(self) -> Checkpoint:
        """Free the weights; `load` reads them again."""
        object.__setattr__(self, "_state", None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickles hold no weights: another process reads the file."""
        plain = {"fields": dict(self.fields), "metadata": dict(self.metadata), "_state": None}
        return {**self.__dict__, **plain}


def load_checkpoint(model: nn.Module, source: Source, *, ema: bool = False, head: bool = True) -> nn.Module:
    """Load `source` (.pth, .safetensors or a state dict under upstream's names) into `model`, strictly.

    `ema` takes the moving average of the weights where a file holds both; `head=False` leaves the classifier
    as it is. Nothing is changed when anything does not fit. The preprocessing and classes that a file states
    are set on the model.

    >>> from trust_tta import create_model
    >>> model = create_model("vmamba_nano")
    >>> _ = load_checkpoint(model, create_model("vmamba_nano").state_dict())
    """
    if isinstance(source, Mapping):
        origin = "the given state dict"
        load_state(model, _rename_for(model, pick_state(source, origin=origin, ema=ema)), origin=origin, head=head)
        return model
    file, published = find_file(source)
    weights = read_weights(file, ema=ema or (published is not None and published.is_average))
    stated = ModelInfo.from_metadata(weights.metadata, file)
    load_state(model, _rename_for(model, weights.state), origin=f"'{file}'", head=head)
    if isinstance(model, ScanNetwork | UPerNet):
        model.preprocessing = stated.preprocessing or model.preprocessing
        model.classes = stated.classes if head else model.classes
        license = stated.license or (published.license if published else None)
        set_license(model, license, origin=f"'{file}'")
    return model


def describe(network: nn.Module) -> ModelInfo:
    """Facts from the attributes of a network; for ours, also the nearest variant and the fields that differ from it."""
    config, preprocessing = getattr(network, "config", None), getattr(network, "preprocessing", None)
    classes, license = getattr(network, "classes", None), getattr(network, "license", None)
    classes = tuple(classes) if classes else None
    if not isinstance(config, NetworkConfig):
        return ModelInfo(None, NO_FIELDS, outputs_of(network), classes, preprocessing, license)
    changes = {v: config.changes_from(known) for v, known in VARIANTS.items() if type(known) is type(config)}
    nearest = min(changes, key=lambda variant: len(changes[variant]))
    return ModelInfo(nearest, changes[nearest], config.num_classes, classes, preprocessing, license)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Digest of the names and shapes of a network's parameters, without classifier and auxiliary head."""
    ignored = (*HEADS, AUXILIARY)
    kept = (name for name in state if not name.startswith(ignored) and not name.endswith("num_batches_tracked"))
    lines = sorted(f"{name} {tuple(state[name].shape)}" for name in kept)
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:16]


def matching_variants(state: Mapping[str, Tensor]) -> list[str]:
    """Our variants whose parameters, but for the classifier, have the names and shapes of `state`."""
    known: dict[str, list[str]] = json.loads(read_asset("architectures.json"))
    return known.get(fingerprint(strip_prefixes(state))) or known.get(fingerprint(rename(state)), [])


def _check_request(source: object, variant: str | None, fields: Fields) -> None:
    """Refuse a checkpoint and a variant that do not fit each other, before a large file is read."""
    known = PRETRAINED.get(str(source))
    if known is not None and variant not in (None, known.variant):
        raise ConfigError(f"checkpoint '{known.name}' is for the network '{known.variant}', not '{variant}'")
    if variant is not None and variant not in VARIANTS:
        find_network(variant)
    if source is None and (variant is None or variant in VARIANTS):
        raise ConfigError(f"the network '{variant}' has no weights of its own; give a checkpoint")
    if source is None and str(variant).startswith("timm:") and not fields.get("pretrained"):
        raise ConfigError(f"'{variant}' has random weights; override it with pretrained = true, or give a checkpoint")


def _choose_variant(
    given: str | None,
    stated: str | None,
    state: Mapping[str, Tensor],
    file: Path | None,
    published: Pretrained | None,
) -> str:
    """The given variant, else the one that the file states or whose parameters it has.

    A given variant of another family than the stated one is refused, and so is a file that states a network of another
    package: a file must not choose which code runs.
    """
    if given is not None:
        if given in VARIANTS and stated in VARIANTS and type(VARIANTS[given]) is not type(VARIANTS[stated]):
            raise CheckpointError(
                f"'{file}' holds the weights of '{stated}', not of '{given}'; give the name '{stated}'"
            )
        return given
    if stated in VARIANTS:
        return stated
    if stated:
        raise ConfigError(
            f"'{file}' names a network outside of this package, {show(stated)} ({did_you_mean(stated, VARIANTS)}); "
            "if you trust it, give this name as the variant"
        )
    found = matching_variants(state)
    if published is not None and published.variant in found:
        return published.variant
    if not found:
        raise ConfigError(
            f"'{file}' does not say which network it is of, and no variant of this package has its parameters; "
            "name its variant and the fields in which it differs, or your own network as package.module:Class"
        )
    if len(found) > 1:
        warnings.warn(
            f"'{file}' fits {', '.join(found)}, which differ in windows or preprocessing; assuming {found[0]}, "
            "give the name if it is another",
            TrustWarning,
            stacklevel=users_level(),
        )
    return found[0]


def set_license(network: nn.Module, license: str | None, *, origin: str) -> None:
    """Set the license of the weights on a network; warn once where it forbids commercial use."""
    cast(ScanNetwork, network).license = license
    if license and "-NC" in license.upper():
        _warn_of_license(origin, license)


@cache
def _warn_of_license(origin: str, license: str) -> None:
    """Warn once that the weights may not be used commercially."""
    warnings.warn(
        f"{origin}: the license of these weights, {license}, forbids commercial use",
        TrustWarning,
        stacklevel=users_level(),
    )


def _build_external(name: str, fields: Fields) -> nn.Module:
    """Build a network of another package under a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_network(name, fields)


def _rename_for(network: object, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict with the parameter names of a network, or of the network of a configuration."""
    return rename(state) if isinstance(network, VMambaConfig | VMamba | UPerNet) else strip_prefixes(state)


def _examine(variant: str, fields: Fields, weights: WeightsFile) -> tuple[ModelInfo, dict[str, Tensor]]:
    """What a network states itself, and its state dict: the file's under its names, else its own."""
    if variant not in VARIANTS:
        network = _build_external(variant, fields)
        state = _rename_for(network, weights.state) or network.state_dict()
        return replace(describe(network), variant=variant), state
    state = _rename_for(VARIANTS[variant], weights.state)
    classifier = [f"{head}{leaf}" for head in HEADS for leaf in ("bias", "weight")]
    sizes = (int(state[name].shape[0]) for name in classifier if name in state and state[name].dim())
    return ModelInfo(variant, NO_FIELDS, next(sizes, None), None, default_preprocessing(variant)), state


def _first(*values: int | None) -> int | None:
    """The first value that is known."""
    return next((value for value in values if value is not None), None)


def _choose_preprocessing(
    given: Preprocessing | None, stated: ModelInfo, default: ModelInfo, file: Path | None
) -> Preprocessing:
    """The given preprocessing, else the one stated in the file, else the network's; refused if training used another.

    A network of another package states the preprocessing of its own weights, not of those in a file.
    """
    known = stated.preprocessing or default.preprocessing
    if given is None and known is None:
        warnings.warn(
            f"the network '{default.variant}' does not say how its images are preprocessed; assuming ImageNet's "
            "preprocessing, set --preprocessing, or the attribute .preprocessing of the network",
            TrustWarning,
            stacklevel=users_level(),
        )
    trained_with = stated.preprocessing if file else known
    if given is not None and trained_with is not None:
        pairs = zip((*given.mean, *given.std), (*trained_with.mean, *trained_with.std), strict=True)
        if not all(abs(a - b) <= _TOLERANCE for a, b in pairs):
            raise ConfigError(
                f"'{file or default.variant}' was trained with mean {trained_with.mean} and std {trained_with.std}, "
                f"and mean {given.mean} and std {given.std} are given; omit the preprocessing or give these"
            )
    return given or known or Preprocessing()
