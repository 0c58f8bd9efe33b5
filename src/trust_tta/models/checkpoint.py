"""Checkpoints: the weights of a file, the network they belong to, its classes and its preprocessing."""

from __future__ import annotations

import json
import math
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

from trust_tta.config_io import parse_json
from trust_tta.errors import CheckpointError, ConfigError, TrustWarning, users_level
from trust_tta.models.base import ScanNetwork
from trust_tta.models.config import NetworkConfig, UPerNetConfig, VMambaConfig
from trust_tta.models.networks import build_network, find_network, is_ours, outputs_of
from trust_tta.models.pretrained import (
    HUB_PREFIX,
    HUB_WEIGHTS,
    PRETRAINED,
    Pretrained,
    check_pretrained,
    find_published,
    hub_folder,
    locate,
)
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
Fields: TypeAlias = Mapping[str, Any]

_TOLERANCE = 2e-3  # of a mean or deviation: how far published figures of one data set lie apart
CHECKED_BATCHES = 3  # of a loaded network, before its input is trusted

MIN_CHECKED_PARAMETERS = 10_000_000  # smaller networks are built whatever the size of the file

_NOTHING: Fields = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights of a file, with the network, classes and preprocessing that its name, metadata or variant state.

    >>> checkpoint = Checkpoint.open("vmamba_nano_cifar10")
    >>> checkpoint.variant, checkpoint.num_classes, checkpoint.classes[:2]
    ('vmamba_nano', 10, ('airplane', 'automobile'))
    >>> model = checkpoint.load()
    """

    file: Path | None  # None: the weights that the network's own factory gives it
    variant: str  # ours, or "package.module:Name"
    fields: Fields  # in which the network differs from the variant; the arguments of a factory
    num_classes: int | None  # None: unknown, as of a file without a classifier
    classes: tuple[str, ...] | None  # names in label order
    preprocessing: Preprocessing
    sha256: str
    license: str | None
    metadata: Mapping[str, str] = field(repr=False)  # of the file
    ema: bool = False
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
        fields: Fields = _NOTHING,
        ema: bool = False,
    ) -> Checkpoint:
        """Read the checkpoint `source`: a known name, the path of a .pth or .safetensors file, or "hf:owner/name".

        `source` may be None for a network from outside whose factory loads weights itself. What is given here takes
        precedence over what the file states; a preprocessing that contradicts the one of training is refused. `ema`
        takes the moving average of the weights where a file holds both.
        """
        known = PRETRAINED.get(str(source)) if isinstance(source, str | PathLike) else None
        if known is not None and variant not in (None, known.variant):
            raise ConfigError(f"checkpoint '{known.name}' is for the network '{known.variant}', not '{variant}'")
        if variant is not None:
            find_network(variant)  # a wrong name is reported before a large file is read
        if source is None and str(variant).startswith("timm:") and not fields.get("pretrained"):
            raise ConfigError(
                f"'{variant}' has random weights; override it with pretrained = true, or give a checkpoint"
            )
        file = _locate(source, known, variant)
        weights = _read(file, ema=ema)
        if known is not None and file is not None:
            check_pretrained(known, file, weights.sha256)
        stated = read_info(weights, file, known)
        published = known or find_published(source, file)
        if variant is None:
            variant = _stated_variant(stated, file) if stated.variant else _recognize(weights.state, file, published)
        own_fields = {**stated.fields, **fields}
        given = _first(num_classes, own_fields.pop("num_classes", None))
        if given is not None and not is_ours(variant):
            own_fields["num_classes"] = given
        foreign = _make_foreign(variant, own_fields)
        trained_with = stated.preprocessing  # as the file says; a network's own is a default where weights are given
        if foreign is not None:
            stated = _complete(stated, foreign)
            trained_with = trained_with if file else stated.preprocessing
        state = _named(weights.state, foreign or variant)
        count = _first(given, stated.num_classes, _outputs(state))
        stated, count = _with_classes(stated, count, classes)
        return cls(
            file=file,
            variant=variant,
            fields=MappingProxyType(own_fields),
            num_classes=count,
            classes=stated.classes if stated.classes and len(stated.classes) == count else None,
            preprocessing=_choose(preprocessing, stated.preprocessing, trained_with, variant, file),
            sha256=weights.sha256 or state_digest(state),
            license=weights.metadata.get("license") or (published.license if published else None),
            metadata=MappingProxyType(weights.metadata),
            ema=ema,
            _state=state,
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """State dict under the network's names; read again after `release`, if the file is unchanged."""
        if self._state is None:
            weights = _read(self.file, ema=self.ema)
            state = _named(weights.state, _make_foreign(self.variant, self.fields) or self.variant)
            if self.sha256 != (weights.sha256 or state_digest(state)):
                raise CheckpointError(f"{self.origin} has changed since it was first read; start again")
            object.__setattr__(self, "_state", state)
        return self._state or {}

    @property
    def origin(self) -> str:
        """Source of the weights, for messages."""
        return f"'{self.file}'" if self.file else f"the factory '{self.variant}'"

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(self.variant, self.fields, self.num_classes, self.classes, self.preprocessing, self.license)

    @property
    def card(self) -> str | None:
        """The model card next to the file."""
        names = ("card.md", "README.md") if self.file and self.file.name == HUB_WEIGHTS else ("card.md",)
        candidates = [self.file.with_suffix(".md"), *map(self.file.with_name, names)] if self.file else []
        for path in candidates:
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
        return None

    def load(
        self, *, device: str | torch.device = "cpu", num_classes: int | None = None, head: bool = True, **overrides: Any
    ) -> nn.Module:
        """The network with these weights, in evaluation mode; everything must fit.

        `head=False` leaves the classifier of our networks at its random weights, of `num_classes` classes.
        """
        fields = {**self.fields, **overrides}
        count = _first(num_classes, fields.get("num_classes"), self.num_classes)
        if count is not None and (is_ours(self.variant) or count != self.num_classes):
            fields["num_classes"] = count
        if is_ours(self.variant):
            self._check_size(fields)
        network = _make_foreign(self.variant, fields) or build_network(self.variant, fields)
        try:
            load_state(network, self.state, origin=self.origin, head=head)
        except CheckpointError as error:
            found = matching_variants(_read(self.file, ema=self.ema).state) if is_ours(self.variant) else []
            if not found or self.variant in found:
                raise
            other = found[0]
            raise CheckpointError(
                f"{self.origin} holds the weights of '{other}', not of '{self.variant}'; give the name '{other}'"
            ) from error
        known = cast(ScanNetwork, network)
        known.preprocessing, known.classes = self.preprocessing, self.classes if head else None
        known.license = self.license
        if self.license and "-NC" in self.license.upper():
            _warn_of_license(self.origin, self.license)
        known.unchecked_batches = CHECKED_BATCHES
        return network.to(device).eval()

    def _check_size(self, fields: Fields) -> None:
        """Refuse a network that is far larger than the file before its memory is taken."""
        stored, wanted = (
            sum(t.numel() for t in self.state.values()),
            VARIANTS[self.variant].override(fields).rough_size(),
        )
        if wanted > 2 * stored + MIN_CHECKED_PARAMETERS:
            raise CheckpointError(
                f"{self.origin} holds {stored:.1e} numbers and the network '{self.variant}' has about {wanted:.1e}; "
                "give the variant and the fields that it was trained with"
            )

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
        load_state(model, _named(pick_state(source, origin=origin, ema=ema), model), origin=origin, head=head)
        return model
    file = _path(source)
    weights = read_weights(file, ema=ema)
    stated = read_info(weights, file, None)
    load_state(model, _named(weights.state, model), origin=f"'{file}'", head=head)
    if isinstance(model, ScanNetwork | UPerNet):
        model.preprocessing = stated.preprocessing or model.preprocessing
        model.classes = stated.classes if head else model.classes
    return model


@dataclass(frozen=True)
class ModelInfo:
    """Description of a network in a file's metadata or by a known checkpoint's name; fields may be unknown."""

    variant: str | None
    fields: Fields
    num_classes: int | None
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing | None
    license: str | None = None  # of the weights

    def to_metadata(self) -> dict[str, str]:
        """Metadata of a weights file; `read_info` is the inverse."""
        texts = {"variant": self.variant, "overrides": json.dumps(dict(self.fields))} if self.variant else {}
        texts |= {"num_classes": str(self.num_classes)} if self.num_classes else {}
        texts |= {"classes": json.dumps(self.classes)} if self.classes else {}
        texts |= {"license": self.license} if self.license else {}
        return texts | ({"preprocessing": self.preprocessing.to_json()} if self.preprocessing else {})


def describe(network: nn.Module) -> ModelInfo:
    """Description of a network; of ours, the nearest variant and the fields that differ from it."""
    config, preprocessing = getattr(network, "config", None), getattr(network, "preprocessing", None)
    classes, license = getattr(network, "classes", None), getattr(network, "license", None)
    if not isinstance(config, NetworkConfig):
        return ModelInfo(None, _NOTHING, outputs_of(network), classes, preprocessing, license)
    changes = {v: config.changes_from(known) for v, known in VARIANTS.items() if type(known) is type(config)}
    nearest = min(changes, key=lambda variant: len(changes[variant]))
    return ModelInfo(nearest, changes[nearest], config.num_classes, classes, preprocessing, license)


def _locate(source: str | PathLike[str] | None, known: Pretrained | None, variant: str | None) -> Path | None:
    """Path of a checkpoint's file; None where an outside network's factory loads its own weights."""
    if source is None:
        if variant is None or is_ours(variant):
            raise ConfigError(f"the network '{variant}' has no weights of its own; give a checkpoint")
        return None
    file = locate(known) if known else _path(source)
    if str(source).startswith(HUB_PREFIX):
        file = hub_folder(str(source).removeprefix(HUB_PREFIX)) / HUB_WEIGHTS
    if not file.is_file():
        raise CheckpointError(
            f"no checkpoint at '{file}'; give the path of a .pth or .safetensors file or a known name: "
            f"{did_you_mean(str(source), PRETRAINED)}"
        )
    return file


def _path(source: object) -> Path:
    if not isinstance(source, str | PathLike):
        raise CheckpointError(f"a checkpoint is {show(source)}; give a name, a path or a state dict")
    return Path(source)


def _stated_variant(stated: ModelInfo, file: Path | None) -> str:
    """Variant that a file states; it must be ours, because a file must not choose which code runs."""
    if not is_ours(str(stated.variant)):
        hint = did_you_mean(str(stated.variant), VARIANTS)
        raise ConfigError(
            f"'{file}' names a network outside of this package, {show(stated.variant)} ({hint}); if you trust it, "
            "give this name as the variant"
        )
    return str(stated.variant)


def _recognize(state: Mapping[str, Tensor], file: Path | None, published: Pretrained | None) -> str:
    """The variant whose parameters have the names and shapes of a file; some variants differ in other things alone."""
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
            f"'{file}' fits {', '.join(found)}, which differ in windows or preprocessing; {found[0]} is assumed, "
            "give the name of another",
            TrustWarning,
            stacklevel=users_level(),
        )
    return found[0]


def matching_variants(state: Mapping[str, Tensor]) -> list[str]:
    """Our variants whose parameters, but for the classifier, have the names and shapes of `state`."""
    size, segments = sum(t.numel() for t in state.values()), any("decode_head." in name for name in state)
    candidates: dict[NetworkConfig, list[str]] = {}
    for name, config in VARIANTS.items():
        if 0.8 < config.rough_size() / max(1, size) < 1.25 and isinstance(config, UPerNetConfig) == segments:
            candidates.setdefault(config, []).append(name)
    found: list[str] = []
    family: type[NetworkConfig] | None = None  # of the first match; parameters of two families are never alike
    for config in sorted(candidates, key=lambda c: abs(c.rough_size() - size)):
        if family in (None, type(config)) and _has_shapes_of(state, config, candidates[config][0]):
            found, family = found + candidates[config], type(config)
    return [name for name in VARIANTS if name in found]


def _has_shapes_of(state: Mapping[str, Tensor], config: NetworkConfig, variant: str) -> bool:
    def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        ignored = (*HEADS, AUXILIARY)
        named = {name: tensor.shape for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
        return {name: shape for name, shape in named.items() if not name.startswith(ignored)}

    with torch.device("meta"):
        network = build_network(variant, {})
    return shapes(_named(state, variant)) == shapes(network.state_dict())


@cache
def _warn_of_license(origin: str, license: str) -> None:
    """Say once that the weights may not be used commercially."""
    warnings.warn(
        f"{origin}: the license of these weights, {license}, forbids commercial use",
        TrustWarning,
        stacklevel=users_level(),
    )


def _read(file: Path | None, *, ema: bool) -> WeightsFile:
    return WeightsFile({}, {}, "") if file is None else read_weights(file, ema=ema)


def _make_foreign(variant: str, fields: Fields) -> nn.Module | None:
    """An outside network, built under a fixed seed; None for ours."""
    if is_ours(variant):
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_network(variant, fields)


def _named(state: Mapping[str, Tensor], network: nn.Module | str) -> dict[str, Tensor]:
    """State dict under the names of a network or variant; the network's own where there is no file."""
    if isinstance(VARIANTS[network] if isinstance(network, str) else network, VMambaConfig | VMamba | UPerNet):
        return rename(state)
    return strip_prefixes(state) if state or isinstance(network, str) else network.state_dict()


def _complete(stated: ModelInfo, network: nn.Module) -> ModelInfo:
    """Fill unknown fields from the attributes of an outside network."""
    own = cast(ScanNetwork, network)
    return replace(
        stated,
        num_classes=_first(stated.num_classes, outputs_of(network)),
        classes=stated.classes or (tuple(own.classes) if own.classes else None),
        preprocessing=stated.preprocessing or own.preprocessing,
    )


def read_info(weights: WeightsFile, file: Path | None, known: Pretrained | None) -> ModelInfo:
    """Description of a known checkpoint, or the one in the file's metadata."""
    if known is not None:
        return ModelInfo(known.variant, _NOTHING, known.num_classes, known.classes, known.preprocessing)
    metadata = weights.metadata
    fields = _json(metadata, "overrides", dict, file)
    classes = _json(metadata, "classes", list, file)
    preprocessing = _json(metadata, "preprocessing", dict, file)
    count = _json(metadata, "num_classes", int, file)
    if classes is not None and not all(isinstance(name, str) for name in classes):
        raise _unreadable("classes", file, "a class name is not a string")
    return ModelInfo(
        variant=metadata.get("variant"),
        fields={name: value for name, value in (fields or {}).items() if name != "num_classes"},
        num_classes=count,
        classes=tuple(classes) if classes else None,
        preprocessing=_stated_preprocessing(preprocessing, file),
    )


def _stated_preprocessing(stated: Any, file: Path | None) -> Preprocessing | None:
    if stated is None:
        return None
    if missing := [name for name in ("size", "mean", "std") if name not in stated]:
        raise _unreadable("preprocessing", file, f"it lacks {', '.join(missing)}")
    try:
        return Preprocessing.from_mapping(stated, where="")
    except ConfigError as error:
        raise _unreadable("preprocessing", file, str(error)) from None


def _json(metadata: Mapping[str, str], name: str, kind: type, file: Path | None) -> Any:
    """A JSON value of the metadata; None where it is absent."""
    if name not in metadata:
        return None
    try:
        value = parse_json(metadata[name], where="it", error=CheckpointError)
    except CheckpointError as error:
        raise _unreadable(name, file, str(error)) from None
    if not isinstance(value, kind):
        raise _unreadable(name, file, f"it is {show(value)}")
    return value


def _unreadable(name: str, file: Path | None, why: str) -> CheckpointError:
    return CheckpointError(
        f"the {name} stated in '{file}' cannot be read ({why}); load its weights into a network of your own "
        "with load_checkpoint"
    )


def _with_classes(
    stated: ModelInfo, count: int | None, classes: tuple[str, ...] | None
) -> tuple[ModelInfo, int | None]:
    """The metadata and the number of outputs with class names that the user gives."""
    if classes is None:
        return stated, count
    if count not in (None, len(classes)):
        raise ConfigError(f"the network outputs {count} classes, but {len(classes)} names are given; name each output")
    return replace(stated, classes=classes), len(classes)


def _first(*values: int | None) -> int | None:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def _outputs(state: Mapping[str, Tensor]) -> int | None:
    """The number of classes that the classifier's bias has; the weights of a head say the same."""
    for name in (f"{head}{leaf}" for head in HEADS for leaf in ("bias", "weight")):
        if name in state and state[name].dim():
            return int(state[name].shape[0])
    return None


def _choose(
    given: Preprocessing | None,
    stated: Preprocessing | None,
    trained_with: Preprocessing | None,
    variant: str,
    file: Path | None,
) -> Preprocessing:
    """The given preprocessing, else the stated one, else the variant's; refused if training used another."""
    if given is None and stated is None and not is_ours(variant):
        warnings.warn(
            f"the network '{variant}' does not say how its images are preprocessed, and ImageNet's way is assumed; "
            "set --preprocessing, or the attribute .preprocessing of the network",
            TrustWarning,
            stacklevel=users_level(),
        )
    if given is None:
        return stated or default_preprocessing(variant)
    if trained_with is not None and not _close(given, trained_with):
        raise ConfigError(
            f"'{file or variant}' was trained with mean {trained_with.mean} and std {trained_with.std}, and mean "
            f"{given.mean} and std {given.std} are given; omit the preprocessing or give these"
        )
    return given


def _close(one: Preprocessing, other: Preprocessing) -> bool:
    pairs = zip((*one.mean, *one.std), (*other.mean, *other.std), strict=True)
    return all(math.isclose(a, b, abs_tol=_TOLERANCE) for a, b in pairs)
