"""Match the classes of a data set to the outputs of a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.class_names import imagenet_classes, label_of_wnid
from trust_tta.errors import ConfigError, DataError

MAX_CLASSES = 100_000  # more than any data set has; a larger label is a mistake
_SHOWN = 20  # names of a list in a message


def imagenet_r_labels() -> NDArray[np.int64]:
    """The sorted labels of ImageNet-R's 200 classes within the 1000."""
    return np.array([label for label, c in enumerate(imagenet_classes()) if c.rendition], dtype=np.int64)


def fold_name(name: str) -> str:
    """`name` without case, dashes, dots, underscores and spaces, so that all its spellings compare equal."""
    folded = "".join(character for character in name.casefold() if character.isalnum())
    return folded or name


def numeric_class_names(labels: NDArray[np.int64], *, where: object) -> tuple[str, ...]:
    """Names "0", "1", ... for labels without class names; labels from 100,000 on are refused."""
    highest = int(labels.max(initial=0))
    if highest >= MAX_CLASSES:
        raise DataError(f"{where} has the label {highest}; labels must lie in 0..{MAX_CLASSES - 1}")
    return tuple(map(str, range(highest + 1)))


def are_numeric(names: Sequence[str]) -> bool:
    """Whether class names are "0", "1", ... in order: bare labels without names."""
    return all(name == str(label) for label, name in enumerate(names))


@dataclass(frozen=True, eq=False)
class ClassMatch:
    """`outputs` (classes,): the network's output index of each class of the data; `names`: all of its classes."""

    outputs: NDArray[np.int64]
    names: tuple[str, ...]
    warning: str = ""  # an assumption that could not be checked

    @property
    def is_identity(self) -> bool:
        return bool((self.outputs == np.arange(len(self.outputs))).all())

    @property
    def is_subset(self) -> bool:
        return len(self.outputs) < len(self.names)


def match_classes(
    names: Sequence[str],
    network: Sequence[str] | None,
    *,
    outputs: int | None = None,
    data: str = "the data",
    source: str = "the network",
) -> ClassMatch:
    """Match the classes of a data set to a network's by name, WordNet id or output index, in any order.

    The data may have a subset of the network's classes. `network`: its class names, None where it has none; `outputs`:
    its number of classes. Without names on one side the order decides, with a warning.
    """
    count = len(network) if network is not None else outputs or len(names)
    if are_numeric(names) and len(names) <= count:
        return ClassMatch(np.arange(len(names)), tuple(network or map(str, range(count))))
    if network is None or are_numeric(network):
        return _match_unnamed(names, network, count, data=data, source=source)
    wnids, words = tuple(c.wnid for c in imagenet_classes()), tuple(c.name for c in imagenet_classes())
    if tuple(names) == tuple(network) or {tuple(names), tuple(network)} <= {wnids, words}:
        return ClassMatch(np.arange(len(names)), tuple(network))
    places = _places(network)
    if tuple(network) in (wnids, words):
        places |= _places(words) | label_of_wnid()
    found = [places.get(name) for name in names]
    matched = [place for place in found if place is not None]
    if len(matched) < len(names) and _are_indices(names, count):
        matched = [int(name) for name in names]
    if len(set(matched)) < len(names):
        unknown = sorted(set(names) - set(network))
        difference = f"the network has no {_listing(unknown)}" if unknown else "a name occurs twice"
        if misses := spelling_variants(names, network):
            pairs = ", ".join(f"'{name}' is spelled '{other}'" for name, other in misses[:_SHOWN])
            difference = f"{pairs} in the network; rename it"
        raise ConfigError(
            f"the classes of {data} are not those of {source}: {difference}; "
            f"{data} has {_listing(names)}, {source} has {_listing(network)}"
        )
    return ClassMatch(np.array(matched, dtype=np.int64), tuple(network))


def _places(names: Sequence[str]) -> dict[str, int]:
    """The index of each name that occurs once."""
    counts = Counter(names)
    return {name: place for place, name in enumerate(names) if counts[name] == 1}


def _match_unnamed(
    names: Sequence[str], network: Sequence[str] | None, count: int, *, data: str, source: str
) -> ClassMatch:
    """Match classes to the outputs of a network that has numbers for class names, or none."""
    all_names = [str(output) for output in range(count)]
    wnids = label_of_wnid()
    if _are_indices(names, count):
        places, warning = (
            [int(name) for name in names],
            f"the classes of {data} are taken as output indices of {source}",
        )
    elif count == len(wnids) and all(name in wnids for name in names):
        places, all_names = [wnids[name] for name in names], [c.name for c in imagenet_classes()]
        warning = (
            f"{source} does not name its classes: its {count} outputs are taken as ImageNet's, sorted by WordNet id"
        )
    elif len(names) == count:
        places, all_names = list(range(count)), list(network or names)
        numbers = "numbers its classes" if network is not None else "does not name its classes"
        warning = (
            f"{source} {numbers}: those of {data} are taken in the order {_listing(names)}; "
            "check that it was trained in this order"
        )
    else:
        raise ConfigError(
            f"{source} outputs {count} classes, but {data} has {len(names)}; name its classes by output index or "
            "WordNet id, or give a checkpoint that was trained or fine-tuned on these classes"
        )
    return ClassMatch(np.array(places, dtype=np.int64), tuple(all_names), warning)


def _are_indices(names: Sequence[str], count: int) -> bool:
    return all(name.isdecimal() and len(name) < 8 and int(name) < count for name in names) and (
        len({int(name) for name in names}) == len(names)
    )


def spelling_variants(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """The names that differ from one of `others` in nothing but spelling, each with it."""
    known, folded = set(others), {fold_name(other): other for other in others}
    return [(name, folded[fold_name(name)]) for name in names if name not in known and fold_name(name) in folded]


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"
