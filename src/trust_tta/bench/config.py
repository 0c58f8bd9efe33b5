"""The configuration of an experiment, from which TOML files, flags, documentation and stored records derive."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from trust_tta.data.corruptions.table import ALL_CORRUPTIONS
from trust_tta.data.registry import find_domain, find_spec
from trust_tta.data.streams import parse_setting
from trust_tta.methods.registry import check_options, method_options
from trust_tta.models.config import VMambaConfig
from trust_tta.models.variants import VARIANTS
from trust_tta.plugins import resolve
from trust_tta.preprocessing import Preprocessing, find_preset
from trust_tta.results.codec import canonical_json
from trust_tta.results.display import make_label
from trust_tta.schema import Count, Name, Natural, Positive, Schema, Title, did_you_mean, show

SAMPLE, ARRAY = "sample", "array"  # data sets that are corrupted as they are read
SHIPPED = "shipped"  # the root of the 16 pictures of CamVid in the package
CLEAN = "clean"
CLEAN_DATA_OPTIONS = frozenset({"source_statistics", "fisher"})  # options that are computed from clean images


def _as_tuple(value: Any) -> Any:
    """A single value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("the list is empty; give at least one")
    if len(set(values)) != len(values):
        raise ValueError(f"{show(list(values))} has a value twice; give each once")
    return values


def _preset(value: Any) -> Any:
    """A preset by name; a table without `crop` crops only if it resizes."""
    if isinstance(value, str):
        return find_preset(value)
    if isinstance(value, Mapping):
        return {"resize": None, "crop": value.get("resize") is not None, **value}
    return value


Counts = Annotated[tuple[Count, ...], AfterValidator(_distinct), BeforeValidator(_as_tuple)]
Seeds = Annotated[tuple[Natural, ...], AfterValidator(_distinct), BeforeValidator(_as_tuple)]
Titles = Annotated[tuple[Title, ...], AfterValidator(_distinct), BeforeValidator(_as_tuple)]


class ModelConfig(Schema):
    """The network."""

    name: Name | None = Field(
        default=None,
        description="variant of the network, timm:NAME or package.module:Name; default: what the checkpoint says",
    )
    checkpoint: Name | None = Field(
        default=None,
        description="a .pth or .safetensors file, or a known name; {domain} stands for the domain being run",
        validate_default=True,
    )
    num_classes: Count | None = Field(
        default=None, description="classes of the network; default: what the checkpoint or the data say"
    )
    classes: Name | None = Field(
        default=None,
        description="class names of the network, one per line, or a folder of class folders; default: the checkpoint's",
    )
    overrides: dict[str, Any] = Field(default={}, description="fields of the variant to change")
    preprocessing: Annotated[Preprocessing | None, BeforeValidator(_preset)] = Field(
        default=None,
        description="preset, or table of size, resize, crop, mean, std, interpolation; default: the checkpoint's",
    )

    @property
    def per_domain(self) -> bool:
        """Whether each domain has a network of its own."""
        return "{domain}" in (self.checkpoint or "")

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None:
            resolve(name, VARIANTS, group="trust_tta.models")
        return name

    @field_validator("checkpoint")
    @classmethod
    def _is_given(cls, checkpoint: str | None, info: ValidationInfo) -> str | None:
        name = info.data.get("name")
        if checkpoint is None and not _is_from_outside(name):
            raise ValueError(
                "is missing; give a .pth or .safetensors file, a known name, or --model package.module:Name, a network "
                "that loads its own weights"
            )
        return checkpoint

    @field_validator("overrides")
    @classmethod
    def _fit_the_network(cls, overrides: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name")
        if name in VARIANTS:
            VARIANTS[name].override(overrides)
        elif not _is_from_outside(name) and (unknown := sorted(overrides.keys() - VMambaConfig.model_fields.keys())):
            raise ValueError(f"there is no field {unknown[0]}; {did_you_mean(unknown[0], VMambaConfig.model_fields)}")
        return overrides


class DataConfig(Schema):
    """The images."""

    dataset: Name = Field(
        description="data set, hf:NAME, package.module:Name, `sample` (shipped) or `array` (your files)"
    )
    root: Name = Field(default="data", description="folder that holds the data sets")
    images: Name | None = Field(
        default=None, description="uint8 (n, h, w, 3) .npy file of the data set `array`", validate_default=True
    )
    labels: Name | None = Field(default=None, description=".npy file of its labels", validate_default=True)
    domains: Titles | None = Field(default=None, description="domains in this order; default: all that are found")
    clean: Title | None = Field(
        default=None, description="domain with clean images, for methods that need some and for clean_after"
    )
    severity: Annotated[int, Field(ge=1, le=5)] = Field(default=5, description="severity of corruptions, 1 to 5")
    limit: Count | None = Field(default=None, description="at most this many images per domain, sampled with the seed")
    class_mask: bool = Field(default=True, description="score ImageNet-R among its 200 classes")
    options: dict[str, Any] = Field(
        default={}, description="keywords for a data set from outside; protocol and scale of segmentation masks"
    )

    @property
    def folder(self) -> Path:
        if self.root != SHIPPED:
            return Path(self.root)
        return Path(str(resources.files("trust_tta"))) / "assets" / "camvid_sample"

    @property
    def corrupts(self) -> bool:
        """Whether the images are corrupted as they are read."""
        return self.dataset in (SAMPLE, ARRAY) or self.is_segmentation

    @property
    def is_segmentation(self) -> bool:
        """Whether every pixel has a label; clean pictures are then corrupted as they are read."""
        return self.dataset not in (SAMPLE, ARRAY) and find_spec(self.dataset).layout == "segmentation"

    @field_validator("dataset")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return name if name in (SAMPLE, ARRAY) else find_spec(name).name

    @field_validator("images", "labels")
    @classmethod
    def _belong_to_arrays(cls, path: str | None, info: ValidationInfo) -> str | None:
        dataset = info.data.get("dataset")
        if dataset == ARRAY and path is None:
            raise ValueError(f"the data set '{ARRAY}' needs the files images and labels")
        if dataset not in (ARRAY, None) and path is not None:
            raise ValueError(f"only the data set '{ARRAY}' takes images and labels, not '{dataset}'; omit them")
        return path

    @field_validator("clean")
    @classmethod
    def _has_no_clean_images(cls, domain: str | None, info: ValidationInfo) -> str | None:
        if domain is not None and info.data.get("dataset") in (SAMPLE, ARRAY):
            raise ValueError(f"'{info.data['dataset']}' has clean images that are corrupted as they are read; omit it")
        return domain

    @field_validator("domains")
    @classmethod
    def _are_known(cls, domains: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        """The domains under their canonical names."""
        dataset = info.data.get("dataset")
        if domains is None or dataset is None:
            return domains
        if dataset in (SAMPLE, ARRAY):
            known = (CLEAN, *ALL_CORRUPTIONS)
            if unknown := [name for name in domains if name not in known]:
                raise ValueError(f"{show(unknown[0])} is not a corruption; {did_you_mean(unknown[0], known)}")
            return domains
        spec = find_spec(dataset)
        if spec.layout == "segmentation":  # corruptions of the evaluation's split, or splits that the folder names
            return domains
        return tuple(find_domain(spec, name).name for name in domains) if spec.domains else domains


class StreamsConfig(Schema):
    """Order and batching of the images; one stream per batch size and seed."""

    setting: Title = Field(
        default="online",
        description="online, continual, standard, mixed, correlated, gradual, sequence, or several joined by +",
    )
    batch_size: Counts = Field(default=(128,), description="images per batch, one size or several")
    seeds: Seeds = Field(default=(0,), description="one seed or several")
    shuffle: bool = Field(default=True, description="shuffle the images of a domain")
    drop_last: bool = Field(default=False, description="drop a last batch that is smaller than the others")
    gamma: Positive = Field(
        default=0.1,
        description="Dirichlet concentration of the setting `correlated`: smaller, longer runs of a class",
    )
    segments: Count = Field(default=100, description="number of short domains in the setting `sequence`")

    @field_validator("setting")
    @classmethod
    def _is_known(cls, setting: str) -> str:
        return parse_setting(setting).name


class MethodConfig(Schema):
    """A method and the options given for it; `label` names it in tables and charts.

    A bare name stands for the method's defaults, and in a table the options follow the name.
    """

    name: Name
    label: Title = ""
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _options_follow_the_name(cls, values: Any) -> Any:
        if isinstance(values, str):
            return {"name": values}
        if not isinstance(values, Mapping):
            raise ValueError(f"{show(values)} is not a name or a table with a name")
        if "options" in values or "name" not in values:
            return values
        own = {key: value for key, value in values.items() if key in ("name", "label")}
        return {**own, "options": {key: value for key, value in values.items() if key not in own}}

    @model_validator(mode="after")
    def _options_fit_the_method(self) -> MethodConfig:
        check_options(self.name, self.options)
        return self

    def all_options(self) -> dict[str, Any]:
        """All options including defaults, JSON-serializable."""
        return {name: jsonable(value) for name, value in {**method_options(self.name), **self.options}.items()}

    @property
    def display_name(self) -> str:
        """The label that was given, else the name with the options that differ from the method's defaults."""
        usual = {name: jsonable(value) for name, value in method_options(self.name).items()}
        stated = {name: jsonable(value) for name, value in self.options.items()}
        return self.label or make_label(self.name, {n: v for n, v in stated.items() if v != usual.get(n)})


class RunConfig(Schema):
    """One experiment."""

    experiment: Annotated[Title, Field(min_length=1)] = Field(
        description="name of the experiment; default: that of the file"
    )
    model: ModelConfig
    data: DataConfig
    stream: StreamsConfig = StreamsConfig()
    methods: Annotated[tuple[MethodConfig, ...], BeforeValidator(_as_tuple)] = Field(
        description="names, or tables of a name, options and a label"
    )
    device: Name = Field(default="auto", description="auto, cpu, cuda or cuda:1")
    dtype: Literal["float32", "bf16"] = Field(
        default="float32", description="float32, or bf16 to compute under autocast"
    )
    store: Name = Field(description="results store; default: runs/EXPERIMENT.sqlite")
    clean_after: bool = Field(default=False, description="measure the accuracy on clean images after each domain")
    keep_samples: Natural = Field(
        default=0, description="images per domain whose predictions are kept, with small pictures"
    )
    confusion: bool = Field(default=False, description="keep the confusion matrix of each cell")

    @field_validator("device")
    @classmethod
    def _device_exists(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{show(device)} is unknown; give auto, cpu, cuda or cuda:1")
        return device

    @field_validator("methods")
    @classmethod
    def _methods_differ(cls, methods: tuple[MethodConfig, ...]) -> tuple[MethodConfig, ...]:
        if not methods:
            raise ValueError("the list is empty; name at least one method")
        seen: dict[str, str] = {}
        for method in methods:
            key = canonical_json([method.name, method.all_options()])
            if key in seen:
                raise ValueError(f"'{method.name}' is listed twice with the same options; list it once")
            if method.display_name in seen.values():
                raise ValueError(f"two methods have the label '{method.display_name}'; give them different ones")
            seen[key] = method.display_name
        return methods

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        setting = parse_setting(self.stream.setting)
        if setting.correlated and self.data.is_segmentation:
            raise ValueError(f"stream.setting: the images of {self.data.dataset} have no classes to be correlated by")
        if self.model.per_domain and setting.reset == "never":
            raise ValueError("model.checkpoint: a network for each {domain} needs a reset at each domain; use online")
        if setting.gradual and not (self.data.corrupts or find_spec(self.data.dataset).has_severities):
            raise ValueError(f"stream.setting: {self.data.dataset} has no severities, so it has no gradual stream")
        return self

    def to_json(self) -> str:
        """The configuration as it is recorded with the results."""
        return canonical_json(jsonable(self.model_dump()))


def jsonable(value: Any) -> Any:
    """A JSON-serializable copy; what JSON lacks, such as infinity, becomes a string."""
    if isinstance(value, Mapping):
        return {str(name): jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _is_from_outside(network: str | None) -> bool:
    return network is not None and network not in VARIANTS
