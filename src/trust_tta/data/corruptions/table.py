"""The 19 corruptions and their severities, as CIFAR-10-C and ImageNet-C were made (Hendrycks & Dietterich, 2019)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TypeAlias

from trust_tta.errors import ConfigError
from trust_tta.schema import did_you_mean

Level: TypeAlias = tuple[float, ...]
Levels: TypeAlias = tuple[Level, Level, Level, Level, Level]

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
ALL_CORRUPTIONS = CORRUPTIONS + EXTRA_CORRUPTIONS  # a name's place here seeds its random numbers: only ever append
SEVERITIES = (1, 2, 3, 4, 5)
TABLES = ("cifar", "imagenet")
SMALL_SIDE = 32  # the largest side for which the CIFAR table is the default

_ELASTIC_SIDE = 244 / 224  # ImageNet-C was made with a side of 244 for its 224-pixel images

CIFAR_LEVELS: MappingProxyType[str, Levels] = MappingProxyType(
    {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),  # standard deviation
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),  # photons at full brightness
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),  # share of values replaced
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # disk radius, anti-alias sigma
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sigma, shift, rounds
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),  # stop, step
        "snow": (  # mean, sd, zoom, threshold, blur radius, blur sigma, share of the image
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 5), (1, 0.3, 5), (0.9, 0.4, 5), (0.85, 0.4, 5), (0.75, 0.45, 5)),  # image, ice, shrinking
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay of the fractal
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),  # added to the HSV value
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),  # factor about the channel means
        "elastic_transform": (  # displacement, its sigma, affine jitter; in sides of the image
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),  # share of the side that is left
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),  # quality
        "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),  # standard deviation at full brightness
        "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1,)),  # sigma
        "spatter": (  # mean, sd, sigma, threshold, strength (water) or sigma (mud), 0 for water and 1 for mud
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),  # factor and offset of the HSV saturation
    }
)

IMAGENET_LEVELS: MappingProxyType[str, Levels] = MappingProxyType(
    {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (2 * _ELASTIC_SIDE, 0.7 * _ELASTIC_SIDE, 0.1 * _ELASTIC_SIDE),
            (2 * _ELASTIC_SIDE, 0.08 * _ELASTIC_SIDE, 0.2 * _ELASTIC_SIDE),
            (0.05 * _ELASTIC_SIDE, 0.01 * _ELASTIC_SIDE, 0.02 * _ELASTIC_SIDE),
            (0.07 * _ELASTIC_SIDE, 0.01 * _ELASTIC_SIDE, 0.02 * _ELASTIC_SIDE),
            (0.12 * _ELASTIC_SIDE, 0.01 * _ELASTIC_SIDE, 0.02 * _ELASTIC_SIDE),
        ),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
        "speckle_noise": ((0.15,), (0.2,), (0.35,), (0.45,), (0.6,)),
        "gaussian_blur": ((1,), (2,), (3,), (4,), (6,)),
        "spatter": (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    }
)


def check_corruption(corruption: str) -> None:
    """Refuse a name that is not one of the 19."""
    if corruption not in ALL_CORRUPTIONS:
        raise ConfigError(f"unknown corruption {corruption!r}; {did_you_mean(corruption, ALL_CORRUPTIONS)}")


def check_severity(severity: int) -> None:
    """Refuse a severity outside 1 to 5."""
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ConfigError(f"severity {severity!r} does not exist; give an integer from 1 to 5")


def choose_table(table: str | None, *, height: int, width: int) -> str:
    """The named table, or without a name the one that fits the image size."""
    if table is None:
        return "cifar" if max(height, width) <= SMALL_SIDE else "imagenet"
    if table not in TABLES:
        raise ConfigError(f"unknown severity table {table!r}; give 'cifar', 'imagenet' or None to go by the image size")
    return table


def level_of(corruption: str, severity: int, table: str) -> Level:
    """The figures of one corruption at one severity."""
    levels = CIFAR_LEVELS if table == "cifar" else IMAGENET_LEVELS
    return levels[corruption][severity - 1]
