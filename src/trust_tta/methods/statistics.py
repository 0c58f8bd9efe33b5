"""BatchNorm statistics at test time: of the batch, of the stream of test images, or of training.

`Statistics` replaces the BatchNorms of a network. For "stream", each becomes a `StreamNorm` (`stream_norm.py`): running
mean and variance of the images since the reset, mixed with those of training (`tide/source_mixing.py`). `start_batch`,
called once per batch, sets the momentum of the running statistics. When the shift detector (`tide/shift_detector.py`)
sees a new domain, earlier images count for less, down to a few; single images and runs of one class, which always
differ, are not taken for a new domain. A mixed stream may have running statistics for each domain
(`tide/domain_clusters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.errors import ConfigError
from trust_tta.methods.state import Spec, clone
from trust_tta.methods.stream_norm import AdaptiveNorm, StreamNorm, average_weight
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.domain_clusters import DomainClusters
from trust_tta.methods.tide.shift_detector import ShiftDetector, describe
from trust_tta.ops.cuda_graphs import GraphedFunction

StatisticsKind: TypeAlias = Literal["batch", "stream", "source"]

SAMPLES_PER_SEGMENTED_IMAGE = 16  # an image with labeled pixels shows many objects


class Statistics(nn.Module):
    """Statistics of all BatchNorms of one network.

    `updating_without_grad`: forwards without gradients update the running statistics too, for methods that adapt no
    weights. `make_norm`: makes the layer that replaces a BatchNorm, from it and a tensor of the network's device and
    dtype; None: the layer of `kind`. `mix_source`: mix the stream's statistics with the source's. `cluster_domains`:
    running statistics for each domain of a mixed stream; a forward is then over whole copies of the batch.
    `detect_shifts`: detect new domains even if the network has no BatchNorm.

    `norms`: the layers that replaced BatchNorms, by path. `uses_batch`: each batch is normalized by its own statistics.
    `unchanged`: probability () that the batch continues the domain. `groups`: index (n,) of each image's domain in a
    mixed stream, else None. `trust`: factor of the stream's share in all norms (`set_trust`).
    """

    trust: float
    shift_detector: ShiftDetector | None
    clusters: DomainClusters | None

    def __init__(
        self,
        model: nn.Module,
        kind: StatisticsKind,
        *,
        updating_without_grad: bool = False,
        make_norm: Callable[[_BatchNorm, Tensor], AdaptiveNorm] | None = None,
        mix_source: bool = True,
        cluster_domains: bool = False,
        detect_shifts: bool = False,
    ) -> None:
        super().__init__()
        found = {name: module for name, module in model.named_modules() if has_statistics(module)}
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.kind, self.norms = kind, dict[str, Any]()
        self.samples_per_image = SAMPLES_PER_SEGMENTED_IMAGE if getattr(model, "dense", False) else 1
        self.uses_batch = kind == "batch" and make_norm is None and bool(found)
        self.shift_detector = self.clusters = None
        self.unchanged: Tensor | float = 1.0
        self.groups: Tensor | None = None
        self.state_names: tuple[str, ...] = ()
        if make_norm is not None:
            self.state_names = AdaptiveNorm.STATE
        elif kind == "stream":
            make_norm = partial(StreamNorm, updating_without_grad=updating_without_grad, mix_source=mix_source)
            self.state_names = StreamNorm.STATE
            if found or detect_shifts:
                self.shift_detector = ShiftDetector(like)
                if cluster_domains:
                    self.clusters = DomainClusters(self.shift_detector.reference)
                    self.state_names += StreamNorm.GROUP_STATE
        elif kind == "batch":
            use_batch_statistics(model)
        for path, norm in found.items():
            if make_norm is None:
                break
            _check_replaceable(path, norm)
            self.norms[path] = make_norm(norm, like)
            self.norms[path].restore_source()
            _replace(model, path, self.norms[path])
        parts = {"domain": self.shift_detector, "clusters": self.clusters}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self.stream_norms = [norm for norm in self.norms.values() if isinstance(norm, StreamNorm)]
        self.set_trust(1.0)
        self._observe = GraphedFunction(self._observe_images)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._observe = GraphedFunction(self._observe_images)  # graphs hold addresses
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _set_groups(self, groups: Tensor | None) -> None:
        self.groups = groups
        for norm in self.stream_norms:
            norm.groups = groups

    def start_batch(self, images: Tensor) -> None:
        """Detect a new domain from images (n, ...) and set the momentum, before the first forward over them."""
        if self.shift_detector is None:
            return
        descriptions, mixed, self.unchanged = self._observe(images, float(self.samples_per_image))
        if self.clusters is not None:
            was_mixed = self.clusters.active
            self._set_groups(self.clusters.assign(descriptions, mixed=bool(mixed)))
            if was_mixed and self.groups is None:
                for norm in self.stream_norms:
                    norm.restore_groups()

    @torch.no_grad()
    def _observe_images(self, images: Tensor, samples: float) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `start_batch` without host synchronization; `samples`: weight of each image.

        Returns descriptions (n, features), whether they are of several domains (), and `unchanged`.
        """
        detector = cast(ShiftDetector, self.shift_detector)
        descriptions = describe(images.detach().to(detector.reference.dtype))
        unchanged = 1 - detector.observe(descriptions)
        mixed = torch.zeros_like(unchanged, dtype=torch.bool)
        if self.clusters is not None:
            mixed = self.clusters.enqueue(descriptions, detector.variance)
        self.weigh_batch(len(images), samples, unchanged)
        return descriptions, mixed, unchanged

    def set_trust(self, trust: float, *, images: int = 0) -> None:
        """Set the factor of the stream's share in each norm, and of the weight of the present batch of `images`."""
        self.trust = trust
        for norm in self.stream_norms:
            norm.trust = trust
            if images:
                norm.count.fill_(images * self.samples_per_image * trust)
                norm.batch_weight.copy_(average_weight(norm.previous_images, norm.count))

    def early_distance(self) -> Tensor:
        """Largest squared distance () of the stream from the source in the first third of the norms."""
        early = self.stream_norms[: -(-len(self.stream_norms) // 3)]
        return torch.stack([norm.standard_moments(norm.mean, norm.variance).square().mean() for norm in early]).amax()

    @torch.no_grad()
    def weigh_batch(self, images: int, samples: float, unchanged: Tensor) -> None:
        """Set each norm's momentum for a batch of `images`; a new domain shrinks the weight of earlier images."""
        norms = self.stream_norms
        if not norms:
            return
        places = [(norm, name) for norm in norms for name in self.state_names]
        previous = [getattr(norm, f"previous_{name}") for norm, name in places]
        torch._foreach_copy_(previous, [getattr(norm, name) for norm, name in places])
        before = torch.stack([norm.images.to(norms[0].images) for norm in norms])
        kept = (before * unchanged.square().to(before)).maximum(before.clamp_max(TIDE.recent_images / 2))
        count = torch.full_like(kept, images * samples)
        weight, samples_per_image = average_weight(kept, count), torch.full_like(kept, samples)
        names = ("previous_images", "count", "batch_weight", "samples")
        for name, values in zip(names, (kept, count, weight, samples_per_image), strict=True):
            torch._foreach_copy_([getattr(norm, name) for norm in norms], list(values.unbind()))

    @contextmanager
    def frozen(self, images: Tensor | None = None) -> Iterator[None]:
        """Context in which no forward updates the running statistics.

        `images` (n, ...): the images to predict; in a mixed stream, each is normalized by the statistics of its domain.
        """
        groups, nearest = self.groups, None
        if images is not None and self.clusters is not None and self.clusters.active:
            nearest = self.clusters.nearest(describe(images.detach().to(self.clusters.centers.dtype)))
        self._set_groups(nearest)
        try:
            with self.updating(False):
                yield
        finally:
            self._set_groups(groups)

    @contextmanager
    def updating(self, updating: bool = True) -> Iterator[None]:
        """Context in which every forward updates the running statistics, or none does."""
        before = [(norm, norm.updating, norm.updating_without_grad) for norm in self.norms.values()]
        for norm, *_ in before:
            norm.updating = norm.updating_without_grad = updating
        try:
            yield
        finally:
            for norm, *flags in before:
                norm.updating, norm.updating_without_grad = flags

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context at whose end the statistics are as at its beginning."""
        before, groups, trust = self.state(), self.groups, self.trust
        try:
            yield
        finally:
            self.load(before)
            self._set_groups(groups)
            self.set_trust(trust)

    def stream_share(self) -> Tensor | None:
        """Mean proportion () of the stream in the statistics of the BatchNorms; None without any."""
        norms = self.stream_norms
        return torch.stack([norm.share.to(norms[0].share) for norm in norms]).mean() if norms else None

    def restore_source(self) -> None:
        self._set_groups(None)
        self.set_trust(1.0)
        for part in (*self.norms.values(), *self._parts.values()):
            part.restore_source()

    def state(self) -> dict[str, Any]:
        """Copies of the norms' statistics by name and path, and of the tensors of the detector and the clusters."""
        norms = {name: {path: getattr(norm, name) for path, norm in self.norms.items()} for name in self.state_names}
        parts = {name: {each: getattr(part, each) for each in part.STATE} for name, part in self._parts.items()}
        return clone(parts | norms)

    def spec(self) -> dict[str, Spec]:
        """The shape, type and limits of each entry of `state`."""
        specs = {path: norm.spec(self.state_names) for path, norm in self.norms.items()}
        norms = {name: {path: spec[name] for path, spec in specs.items()} for name in self.state_names}
        parts: dict[str, Spec] = {name: part.spec() for name, part in self._parts.items()}
        return parts | norms

    def upgrade(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state saved before shares were computed in closed form, with a share of 1 until the next batch."""
        known = {name: value for name, value in state.items() if name != "source_mixing"}
        for name in self.state_names:
            if name not in known and name.endswith(("image_variance", "share")):
                value = float(name.endswith("share"))
                known[name] = {path: torch.full_like(getattr(n, name), value) for path, n in self.norms.items()}
        return known

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` gave."""
        for name, part in self._parts.items():
            part.load(state[name])
        places = [(name, path) for name in self.state_names for path in self.norms]
        if places:
            into = [getattr(self.norms[path], name) for name, path in places]
            torch._foreach_copy_(into, [state[name][path] for name, path in places])


def _check_replaceable(path: str, norm: _BatchNorm) -> None:
    """Refuse a BatchNorm that computes more than a BatchNorm."""
    if norm.affine and not {"weight", "bias"} <= norm._parameters.keys():
        raise ConfigError(
            f"weight or bias of the layer '{path}' is computed from other parameters (parametrized or pruned), which "
            "statistics that follow the images cannot do; make it permanent (torch.nn.utils.parametrize."
            "remove_parametrizations, torch.nn.utils.prune.remove), or use a method with statistics='batch' or 'source'"
        )
    defined_in = next(cls for cls in type(norm).__mro__ if "forward" in vars(cls)).__module__.split(".")[0]
    known = defined_in in ("torch", "trust_tta") or any(True for _ in norm.children())  # as timm's BatchNormAct
    if not known or "forward" in vars(norm):
        raise ConfigError(
            f"the layer '{path}' is a {type(norm).__name__} with a forward of its own, which statistics that follow "
            "the images would skip; use a plain BatchNorm, or a method with statistics='batch' or 'source'"
        )


def _replace(model: nn.Module, path: str, own: AdaptiveNorm) -> None:
    """Replace the BatchNorm at `path`; its hooks are kept."""
    norm = model.get_submodule(path)
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        setattr(own, f"_{kind}", getattr(norm, f"_{kind}"))
    for flag in ("forward_hooks_with_kwargs", "forward_hooks_always_called", "forward_pre_hooks_with_kwargs"):
        setattr(own, f"_{flag}", getattr(norm, f"_{flag}"))
    own._is_full_backward_hook = norm._is_full_backward_hook
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, own)


def has_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a BatchNorm whose statistics may be adapted.

    Not those marked `sees_few_values`, as after a pooling to 1x1: the statistics of few values per image are noise.
    """
    return isinstance(module, _BatchNorm) and not getattr(module, "sees_few_values", False)


def use_batch_statistics(model: nn.Module) -> None:
    """Normalize with the statistics of the batch at hand, in every mode; running statistics are not touched."""
    for module in model.modules():
        if has_statistics(module):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
