"""The match of a data set's classes with a network's, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.class_names import imagenet_classes
from trust_tta.errors import ConfigError, DataError

MAX_CLASSES = 100_000  # more than any data set has; a label above it is a mistake
_SHOWN = 20  # names of a list in a message


def imagenet_r_labels() -> NDArray[np.int64]:
    """The sorted labels of ImageNet-R's 200 classes within the 1000."""
    return np.array([label for label, c in enumerate(imagenet_classes()) if c.rendition], dtype=np.int64)


def fold_name(name: str) -> str:
    """`name` without case, dashes, dots, underscores and spaces, so that all its spellings compare equal."""
    folded = "".join(character for character in name.casefold() if character.isalnum())
    return folded or name


def numeric_class_names(labels: NDArray[np.int64], *, where: object) -> tuple[str, ...]:
    """Names "0", "1", ... for labels that come without any; a label beyond all reason is refused."""
    highest = int(labels.max(initial=0))
    if highest >= MAX_CLASSES:
        raise DataError(f"{where} has the label {highest}; labels must lie in 0..{MAX_CLASSES - 1}")
    return tuple(map(str, range(highest + 1)))


def are_numeric(names: Sequence[str]) -> bool:
    """Whether classes are called "0", "1", ... in order: bare labels, which say nothing about what they stand for."""
    return all(name == str(label) for label, name in enumerate(names))


@dataclass(frozen=True, eq=False)
class ClassMatch:
    """`outputs` (classes,): the network's output that stands for each label; `warning`: what could not be checked."""

    outputs: NDArray[np.int64]
    warning: str = ""

    @property
    def is_identity(self) -> bool:
        return bool((self.outputs == np.arange(len(self.outputs))).all())


def match_classes(
    names: Sequence[str], network: Sequence[str] | None, *, data: str = "the data", source: str = "the network"
) -> ClassMatch:
    """Match a data set's classes with a network's by name, in whatever order either has them.

    Names that differ are an error that shows both lists. Without names on one side the order decides, with a warning.
    """
    order = np.arange(len(names), dtype=np.int64)
    if are_numeric(names):
        return ClassMatch(order)
    if network is None:
        return ClassMatch(
            order,
            f"{source} does not name its classes: those of {data} are taken in the order {_listing(names)}; "
            "check that it was trained in this order",
        )
    if tuple(names) == tuple(network) or _are_wnids(names, network):
        return ClassMatch(order)
    if are_numeric(network):
        return ClassMatch(order, f"{source} numbers its classes: those of {data} are taken as {_listing(names)}")
    places = {name: place for place, name in enumerate(network)}
    if len(places) < len(network) or sorted(names) != sorted(network):
        raise ConfigError(
            f"the classes of {data} are not those of {source}: {_difference(names, network)}; "
            f"{data} has {_listing(names)}, {source} has {_listing(network)}"
        )
    return ClassMatch(np.array([places[name] for name in names], dtype=np.int64))


def spelling_variants(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """The names that differ from one of `others` in nothing but spelling, each with it."""
    known, folded = set(others), {fold_name(other): other for other in others}
    return [(name, folded[fold_name(name)]) for name in names if name not in known and fold_name(name) in folded]


def _are_wnids(names: Sequence[str], network: Sequence[str]) -> bool:
    """Whether one side names ImageNet's classes by their WordNet ids and the other in words."""
    wnids, words = tuple(c.wnid for c in imagenet_classes()), tuple(c.name for c in imagenet_classes())
    return {tuple(names), tuple(network)} <= {wnids, words}


def _difference(names: Sequence[str], network: Sequence[str]) -> str:
    if misses := spelling_variants(names, network):
        pairs = ", ".join(f"'{name}' is spelled '{other}'" for name, other in misses[:_SHOWN])
        return f"{pairs} in the network; rename it"
    strange, lacking = sorted(set(names) - set(network)), sorted(set(network) - set(names))
    if strange or lacking:
        return " and ".join(
            [f"the network has no {_listing(strange)}"] * bool(strange)
            + [f"the data has no {_listing(lacking)}"] * bool(lacking)
        )
    return "a name is there twice"


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"
