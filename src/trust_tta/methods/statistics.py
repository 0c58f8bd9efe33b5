"""Which statistics the BatchNorms of a network normalize with: those of the batch, of the stream, or of training.

"stream" follows the images since the reset: each norm keeps a moving mean and variance over a long memory, of which a
batch is a small share. Where the images themselves show another domain (`tide/shift_detector.py`), the memory shrinks,
up to starting anew; single images and runs of one class, which always differ, are not taken for a change of domain. A
norm uses as much of them as the images prove to differ from those of training (`tide/source_mixing.py`); a method may
keep statistics for each domain of a mixed stream (`tide/domain_clusters.py`).

An adapting pass takes the values of the moving statistics and the gradient of the batch's (test-time batch
renormalization, as in Zhao et al., "DELTA", ICLR 2023); a prediction normalizes as in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.errors import ConfigError
from trust_tta.methods.state import Array, Spec, clone
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.domain_clusters import DomainClusters
from trust_tta.methods.tide.shift_detector import ShiftDetector
from trust_tta.methods.tide.source_mixing import mix_statistics, standard_moments, stream_share
from trust_tta.ops.batch_norm import (
    batch_norm,
    can_use_kernels,
    fixed_norm,
    follow_stream,
    image_moments,
    moments,
    triton_norm,
)
from trust_tta.ops.cuda_graphs import GraphedFunction

StatisticsKind: TypeAlias = Literal["batch", "stream", "source"]

ALIGNED = 8  # elements: kernels read whole blocks of 16 bytes
PICTURE = 16  # images that a picture with labeled pixels counts for: it shows many objects


class OwnNorm(nn.Module):
    """A BatchNorm, over the same weights, with statistics of its own that start at the source's.

    `MEMORY` names what it remembers: `mean` and `variance` (channels,), and numbers (). `observing`: whether a pass
    adapts; `observing_without_grad`: also one without gradients.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("mean", "variance")
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean: Tensor
    variance: Tensor
    source_mean: Tensor | None
    source_variance: Tensor | None

    def __init__(self, norm: _BatchNorm, *, like: Tensor, observing: bool = False) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.eps, self.observing, self.observing_without_grad = norm.eps, observing, False
        self.register_buffer("source_mean", norm.running_mean, persistent=False)
        self.register_buffer("source_variance", norm.running_var, persistent=False)
        # What a BatchNorm that holds modules applies afterwards: timm's hold a dropout and an activation.
        self.after = nn.Sequential(*norm.children()) if any(True for _ in norm.children()) else None
        like = next((t for t in (norm.running_mean, norm.weight) if t is not None), like)
        for name in self.MEMORY:
            value = like.new_zeros(norm.num_features if name in ("mean", "variance") else ())
            self.register_buffer(name, value, persistent=False)
        self.train(False)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: without the rest of the vectors that the buffers are views of."""
        buffers = {name: None if buffer is None else buffer.clone() for name, buffer in self._buffers.items()}
        return {**vars(self), "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle: a memory of its own, also where tensors came as shared memory."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())

    @property
    def source(self) -> tuple[Tensor | None, Tensor | None]:
        """The mean and the variance (channels,) of training, where the network keeps them."""
        return self.source_mean, self.source_variance

    @torch.no_grad()
    def restore_source(self) -> None:
        mean, variance = self.source
        self.mean.zero_() if mean is None else self.mean.copy_(mean)
        self.variance.fill_(1) if variance is None else self.variance.copy_(variance)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) in and out."""
        normal = self.normalize(x)
        return normal if self.after is None else cast(Tensor, self.after(normal))

    def normalize(self, x: Tensor) -> Tensor:
        """(n, channels, ...) normalized as this kind of norm does."""
        raise NotImplementedError

    def used(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance (channels,) that a prediction normalizes with."""
        return self.mean, self.variance


class Statistics:
    """Statistics of all BatchNorms of one network: policy and state.

    `observing_without_grad`: also passes without gradients adapt, for methods that adapt no weights. `make`: norms in
    the place of those that `kind` asks for, from a BatchNorm and a tensor of the network's device and dtype.
    `mix_source`: norms that follow the stream use no more of it than differs from the source by more than chance.
    `cluster_domains`: they keep statistics for each cluster of a mixed stream; a pass is then over whole copies of the
    batch. `detect_shifts`: follow the images also where no norm follows the stream.
    `samples_per_image`: images that one picture counts for.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: StatisticsKind,
        *,
        observing_without_grad: bool = False,
        make: Callable[[_BatchNorm, Tensor], OwnNorm] | None = None,
        mix_source: bool = True,
        cluster_domains: bool = False,
        detect_shifts: bool = False,
    ) -> None:
        found = {name: module for name, module in model.named_modules() if has_statistics(module)}
        self.kind, self.norms = kind, dict[str, Any]()
        self.samples_per_image = PICTURE if getattr(model, "dense", False) else 1
        self.of_batches = kind == "batch" and make is None and bool(found)  # a batch is normalized by itself alone
        self.memory = OwnNorm.MEMORY if make is not None else StreamNorm.MEMORY if kind == "stream" else ()
        if make is None and kind == "batch":
            use_batch_statistics(model)
        like = next(model.parameters(), torch.empty(0))
        for name, module in found.items() if self.memory else ():
            _refuse_computed_weights(name, module)
            if make is not None:
                self.norms[name] = make(module, like)
            else:
                self.norms[name] = StreamNorm(
                    module, like=like, observing_without_grad=observing_without_grad, mix_source=mix_source
                )
            self.norms[name].restore_source()
            _share_hooks(name, module, self.norms[name])
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, self.norms[name])
        self.following = [norm for norm in self.norms.values() if isinstance(norm, StreamNorm)]
        self.shift_detector: ShiftDetector | None = None
        self.clusters: DomainClusters | None = None
        self.unchanged: Tensor | float = 1.0  # probability () that the batch continues the domain
        if kind == "stream" and make is None and (self.following or detect_shifts):
            self.shift_detector = ShiftDetector(like)
        if self.following and self.shift_detector is not None:  # registered on the first norm, to move with the network
            self.following[0].shift_detector = self.shift_detector
            if cluster_domains:
                self.clusters = self.following[0].clusters = DomainClusters(self.shift_detector.reference)
                self.memory += StreamNorm.GROUP_MEMORY
        self._gather()

    @torch.inference_mode(False)
    def _gather(self) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], dict[str, Any]] = {}
        for path, norm in self.norms.items() if self.memory else ():
            kinds.setdefault((norm.mean.device, norm.mean.dtype), {})[path] = norm
        self.vectors = [Vectors(norms, self.memory) for norms in kinds.values()]
        self._prelude = GraphedFunction(self._prepare)  # recordings hold addresses

    def moved(self) -> None:
        """Follow norms that were moved to another device or dtype."""
        self._prelude = GraphedFunction(self._prepare)
        if not all(vectors.hold() for vectors in self.vectors):
            self._gather()

    def __getstate__(self) -> dict[str, Any]:
        """Views do not survive a copy or a pickle: they are made anew."""
        return {name: value for name, value in vars(self).items() if name not in ("vectors", "_prelude")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._gather()

    @property
    def mixed(self) -> bool:
        """Whether the images at hand have statistics by group."""
        return self.clusters is not None and self.clusters.active

    @property
    def groups(self) -> Tensor | None:
        """The group (n,) of each image at hand, where they have statistics by group."""
        return self.following[0].groups if self.following else None

    def _split(self, groups: Tensor | None) -> None:
        for norm in self.following if groups is not self.groups else ():
            norm.groups = groups

    def begin(self, images: Tensor, *, samples_per_image: int = 1) -> None:
        """A batch (n, ...) comes; passes over it, however many, change the memory once.

        `samples_per_image`: how many images each of them stands for.
        """
        if self.shift_detector is None:
            return
        descriptions, mixed, self.unchanged = self._prelude(images, float(samples_per_image * self.samples_per_image))
        if self.clusters is not None:
            was_mixed = self.mixed
            self._split(self.clusters.assign(descriptions, mixed=bool(mixed)))
            for norm in self.following if was_mixed and not self.mixed else ():
                norm.forget_groups()

    @torch.no_grad()
    def _prepare(self, images: Tensor, samples: float) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `begin` without host synchronization.

        Returns descriptions (n, features), whether they are of several domains (), and the probability () that the
        domain is unchanged. `samples`: images that each of them stands for.
        """
        detector = cast(ShiftDetector, self.shift_detector)
        for vectors in self.vectors:
            vectors.begin(len(images), samples)
        descriptions = detector.describe(images)
        left = 1 - detector.observe(descriptions)
        mixed = torch.zeros_like(left, dtype=torch.bool)
        if self.clusters is not None:
            mixed = self.clusters.enqueue(descriptions, detector.variance)
        for vectors in self.vectors:
            vectors.fade(left)
        return descriptions, mixed, left

    @contextmanager
    def frozen(self, images: Tensor | None = None) -> Iterator[None]:
        """Passes inside are predictions, whatever the mode of gradients: the memory stays.

        `images` (n, ...): those that are predicted, so that each finds the statistics of its group.
        """
        groups = self.groups
        if images is None or self.clusters is None or self.shift_detector is None or not self.mixed:
            self._split(None)
        else:
            self._split(self.clusters.nearest(self.shift_detector.describe(images)))
        try:
            with self._observing(False):
                yield
        finally:
            self._split(groups)

    def observing(self) -> AbstractContextManager[None]:
        """Passes inside adapt the statistics, whatever the mode of gradients."""
        return self._observing(True)

    @contextmanager
    def _observing(self, flag: bool) -> Iterator[None]:
        before = {module: (module.observing, module.observing_without_grad) for module in self.norms.values()}
        for module in before:
            module.observing = module.observing_without_grad = flag
        try:
            yield
        finally:
            for module, was in before.items():
                module.observing, module.observing_without_grad = was

    @contextmanager
    def going_on(self, images: Tensor, run: Callable[[Tensor], Any], *, samples_per_image: int = 1) -> Iterator[None]:
        """Inside, the statistics are those with the images (n, ...), which `run` passes through the network."""
        before, groups = self.state(), self.groups
        try:
            if self.following:
                self.begin(images, samples_per_image=samples_per_image)
                with self.observing():
                    run(images)
            yield
        finally:
            self.load(before)
            self._split(groups)

    def restore_source(self) -> None:
        for module in self.norms.values():
            module.restore_source()
        self._split(None)
        for part in self._parts.values():
            part.restore_source()

    @property
    def _parts(self) -> dict[str, ShiftDetector | DomainClusters]:
        parts = {"domain": self.shift_detector, "clusters": self.clusters}
        return {name: part for name, part in parts.items() if part is not None}

    def state(self) -> dict[str, Any]:
        """Copies; those of the norms, by name and path, are views of a few vectors."""
        state: dict[str, Any] = clone({name: part.values() for name, part in self._parts.items()})
        copies = [(vectors.places, vectors.now.clone()) for vectors in self.vectors]
        return state | {name: Copies(name, tuple(self.norms), copies) for name in self.memory}

    def spec(self) -> dict[str, Spec]:
        parts: dict[str, Spec] = {name: part.spec() for name, part in self._parts.items()}
        return parts | {
            name: {path: _spec(name, getattr(n, name)) for path, n in self.norms.items()} for name in self.memory
        }

    def upgrade(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state saved before shares were computed in closed form: all of the stream counts until the next batch."""
        known = {name: value for name, value in state.items() if name != "source_mixing"}
        for name in self.memory:
            if name not in known and name.endswith(("image_variance", "share")):
                value = float(name.endswith("share"))
                known[name] = {path: torch.full_like(getattr(n, name), value) for path, n in self.norms.items()}
        return known

    def load(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load(state[name])
        for vectors in self.vectors:
            vectors.load(state)


class Vectors:
    """State of the norms of one device and dtype, as flat vectors that their tensors are views of.

    To copy or change them all takes one kernel in place of one for each norm. `now`: what `names` name, as the last
    pass left it; `before`: the same before the present batch, with `remembered` (norms,), the images that it stands
    for; `weighed`: what the norms name `BATCH`, each (norms,).
    """

    def __init__(self, norms: Mapping[str, Any], names: tuple[str, ...]) -> None:
        self.norms, self.names = norms, names
        self.now, self.views = _join([(norm, name) for name in names for norm in norms.values()])
        keys = [(name, path) for name in names for path in norms]
        places = ((int(view.storage_offset()), view.shape) for view in self.views)
        self.places = dict(zip(keys, places, strict=True))
        if all(isinstance(norm, StreamNorm) for norm in norms.values()):
            self.before, _ = _join([(norm, f"memory_{name}") for name in names for norm in norms.values()])
            batch, _ = _join([(norm, name) for name in StreamNorm.BATCH for norm in norms.values()])
            self.weighed = batch.view(len(StreamNorm.BATCH), len(norms), ALIGNED)[..., 0].unbind()
            start, _ = self.places["images", next(iter(norms))]
            self.remembered = self.before[start : start + len(norms) * ALIGNED : ALIGNED]
            self.weigh()

    def hold(self) -> bool:
        """Whether the norms still have these views."""
        views = iter(self.views)
        return all(getattr(norm, name) is next(views) for name in self.names for norm in self.norms.values())

    def begin(self, images: int, samples: float) -> None:
        """A batch comes, of which each image counts for so many."""
        self.before.copy_(self.now)
        self.weighed[0].fill_(images * samples)
        self.weighed[4].fill_(samples)

    def fade(self, left: Tensor) -> None:
        """Shorten the memory to what is `left` () of it, from 0 to 1: the images may be of another domain."""
        kept = self.remembered * left.square().to(self.remembered.dtype)
        self.remembered.copy_(kept.maximum(self.remembered.clamp_max(TIDE.kept_images)))
        self.weigh()

    def weigh(self) -> None:
        """Set what the present batch counts for beside the memory, once for all passes over it."""
        count, fresh, apart, total, _ = self.weighed
        fresh.copy_(_share(self.remembered, count))
        apart.copy_(fresh * (1 - fresh))
        total.copy_(count / fresh)

    def load(self, state: Mapping[str, Any]) -> None:
        torch._foreach_copy_(self.views, [state[name][path] for name, path in self.places])


class Copies(Mapping[str, Tensor]):
    """State of the norms under one name, by path: views of copied vectors, made on access.

    Nearly all copies are made for the case of an error, and never read.
    """

    def __init__(
        self, name: str, paths: tuple[str, ...], copies: list[tuple[dict[tuple[str, str], tuple[int, Any]], Tensor]]
    ) -> None:
        self.name, self.paths, self.copies = name, paths, copies

    def __getitem__(self, path: str) -> Tensor:
        for places, copy in self.copies:
            if (self.name, path) in places:
                start, shape = places[self.name, path]
                return copy[start : start + shape.numel()].view(shape)
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _join(places: list[tuple[OwnNorm, str]]) -> tuple[Tensor, list[Tensor]]:
    """One vector of the named buffers, and views of it, which take their place."""
    buffers = [getattr(norm, name) for norm, name in places]
    sizes = [-(-buffer.numel() // ALIGNED) * ALIGNED for buffer in buffers]
    vector = torch.zeros(sum(sizes), dtype=buffers[0].dtype, device=buffers[0].device)
    # `data` counts its changes alone: what one norm's backward keeps is not changed by the next norm's forward.
    pieces = zip(vector.split(sizes), buffers, strict=True)
    views = [piece[: buffer.numel()].view(buffer.shape).data for piece, buffer in pieces]
    for (norm, name), view in zip(places, views, strict=True):
        setattr(norm, name, view.copy_(getattr(norm, name)))
    return vector, views


class StreamNorm(OwnNorm):
    """A BatchNorm that normalizes with moving statistics of the stream, shrunk towards the source's.

    `mean`, `variance`: of the stream with the last pass over the present batch; `images`: how many they stand for;
    `image_variance` (): of the standard moments between images, and `share` (): of the stream's statistics in those
    that are used (see `source_mixing.py`). `memory_*`: the same before the present batch. `BATCH` names numbers ():
    `count`, what its images count for; `fresh`, their share beside the memory; `apart`, by how much their two means are
    a variance; `total`, all images; `samples`, what each image counts for. `groups` (n,): the domain of each image of a
    mixed batch, with statistics `group_*` (groups, channels) and (groups,); else None.
    """

    MEMORY = ("mean", "variance", "images", "image_variance", "share")
    GROUP_MEMORY = ("group_mean", "group_variance", "group_images", "group_image_variance", "group_share")
    BATCH = ("count", "fresh", "apart", "total", "samples")
    images: Tensor
    image_variance: Tensor
    share: Tensor
    memory_mean: Tensor
    memory_variance: Tensor
    memory_images: Tensor
    memory_image_variance: Tensor
    count: Tensor
    fresh: Tensor
    apart: Tensor
    total: Tensor
    samples: Tensor
    group_mean: Tensor
    group_variance: Tensor
    group_images: Tensor
    group_image_variance: Tensor
    group_share: Tensor
    memory_group_mean: Tensor
    memory_group_variance: Tensor
    memory_group_images: Tensor
    memory_group_image_variance: Tensor
    groups: Tensor | None
    clusters: DomainClusters | None
    shift_detector: ShiftDetector | None

    def __init__(
        self, norm: _BatchNorm, *, like: Tensor, observing_without_grad: bool = False, mix_source: bool = True
    ) -> None:
        super().__init__(norm, like=like, observing=True)
        self.observing_without_grad = observing_without_grad
        self.mix_source = mix_source and all(value is not None for value in self.source)
        self.shift_detector = self.clusters = self.groups = None
        for name, group_name in zip(self.MEMORY, self.GROUP_MEMORY, strict=True):
            value = getattr(self, name)
            self.register_buffer(group_name, value.expand(TIDE.clusters, *value.shape).clone(), persistent=False)
        for name in (*self.MEMORY, *self.GROUP_MEMORY):
            self.register_buffer(f"memory_{name}", getattr(self, name).clone(), persistent=False)
        for name in self.BATCH:
            self.register_buffer(name, torch.ones_like(self.images), persistent=False)

    @torch.no_grad()
    def restore_source(self) -> None:
        super().restore_source()
        for value, start in zip(
            (self.images, self.image_variance, self.share), (0, 0, not self.mix_source), strict=True
        ):
            value.fill_(start)
        for name in self.MEMORY:
            getattr(self, f"memory_{name}").copy_(getattr(self, name))
        self.forget_groups()

    @torch.no_grad()
    def forget_groups(self) -> None:
        """Each group begins as the stream does: with the statistics of the source."""
        mean, variance = self.source
        self.group_mean.zero_() if mean is None else self.group_mean.copy_(mean)
        self.group_variance.fill_(1) if variance is None else self.group_variance.copy_(variance)
        self.group_images.zero_()
        self.group_image_variance.zero_()
        self.group_share.fill_(not self.mix_source)

    def normalize(self, x: Tensor) -> Tensor:
        adapting = self.observing and (torch.is_grad_enabled() or self.observing_without_grad)
        if self.groups is not None:
            return self.normalize_groups(x, self.groups.repeat(len(x) // len(self.groups)), adapting=adapting)
        if adapting and self.takes_kernels(x):
            return self.fork(x)[1]
        batch = self.observe(x) if adapting else None
        mean, variance = self.used()
        if batch is None or not torch.is_grad_enabled():
            return fixed_norm(x, mean, variance, self.weight, self.bias, self.eps)
        deviation = (variance + self.eps).rsqrt()
        ratio, offset = (batch[1] + self.eps).sqrt() * deviation, (batch[0] - mean) * deviation
        weight = ratio if self.weight is None else self.weight * ratio
        bias = offset if self.weight is None else self.weight * offset
        bias = bias if self.bias is None else self.bias + bias
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, torch.backends.cudnn.enabled)

    def uses_kernels(self, x: Tensor) -> bool:
        """Whether `fork` takes x."""
        return self.observing and self.groups is None and self.after is None and self.takes_kernels(x)

    def takes_kernels(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled() or not can_use_kernels(x) or self.mean.dtype != torch.float32:
            return False
        return all(value is not None for value in (*self.source, self.weight, self.bias))

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the normalized x of an adapting pass, in few kernels: a norm's numbers are less work than a launch.

        The backward adds the gradients of both in its last pass over the map.
        """
        batch = moments(x)
        image_variance = self.image_variance
        if self.mix_source:
            with torch.no_grad():
                image_variance = self._standard(*image_moments(x)).var(1, correction=0).mean()
        memory = (f"memory_{name}" for name in self.MEMORY[:4])
        names = (*memory, "count", "samples", *self.MEMORY, "source_mean", "source_variance")
        weight, bias = follow_stream(
            (*batch, image_variance),
            triton_norm().StreamStatistics(*(getattr(self, name) for name in names)),
            (cast(Tensor, self.weight), cast(Tensor, self.bias)),
            TIDE.min_standard_errors if self.mix_source else None,
            eps=self.eps,
            half_life=TIDE.stream_memory,
        )
        return batch_norm(x, weight, bias, self.eps, batch)

    def normalize_groups(self, x: Tensor, groups: Tensor, *, adapting: bool) -> Tensor:
        """x (n, channels, ...) with images of the groups (n,), each normalized by the statistics of its own."""
        width = (len(x), -1, *[1] * (x.dim() - 2))
        batch = self.observe_groups(x, groups) if adapting else None
        mean, variance = self._mixed(self.group_mean, self.group_variance, self.group_share[:, None])
        mean, deviation = mean[groups], (variance[groups] + self.eps).rsqrt()
        if batch is not None and torch.is_grad_enabled():  # values of the memory, gradients of the batch
            center, scale = batch[0][groups], (batch[1][groups] + self.eps).rsqrt()
            normal = (x - center.view(width)) * scale.view(width)
            normal = normal * (deviation / scale).detach().view(width)
            normal = normal + ((center - mean) * deviation).detach().view(width)
        else:
            normal = (x - mean.view(width)) * deviation.view(width)
        shape = width[1:] if self.weight is None else (-1, *width[2:])
        normal = normal if self.weight is None else normal * self.weight.view(shape)
        return (normal if self.bias is None else normal + self.bias.view(shape)).to(x.dtype)

    def observe_groups(self, x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Move the memory of each group by its images; the batch's own mean and variance (groups, channels)."""
        members = F.one_hot(groups, TIDE.clusters).to(self.mean.dtype)
        count = members.sum(0)
        of_group = members.T / count.clamp_min(1)[:, None]
        x = x.to(self.mean.dtype).flatten(2)
        mean = of_group @ x.mean(2)
        variance = of_group @ (x - mean[groups][:, :, None]).square().mean(2)
        with torch.no_grad():
            worth = count * self.count / len(x)
            share = _share(self.memory_group_images, worth)
            apart = share * (1 - share)
            memory = self.memory_group_mean, self.memory_group_variance
            _pool((self.group_mean, self.group_variance), memory, (mean, variance), (share[:, None], apart[:, None]))
            self.group_images.copy_(torch.where(worth > 0, worth / share, self.memory_group_images))
            images = image_moments(x)
            if self.mix_source:
                middle = self._standard(mean, variance)
                between = of_group @ (self._standard(*images) - middle[:, groups]).square().mean((0, 2))
                between = torch.lerp(self.memory_group_image_variance, between, share)
                between += apart * (middle - self._standard(*memory)).square().mean((0, 2))
                self.group_image_variance.copy_(between)
                distance = self._standard(self.group_mean, self.group_variance).square().mean((0, 2))
                self.group_share.copy_(stream_share(distance, between, self.group_images / self.samples))
            # The memory of the whole stream follows as well: it is used when the stream stops being mixed.
            self._remember(*images)
        return mean, variance

    @torch.no_grad()
    def used(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance (channels,) that a prediction normalizes with."""
        return self._mixed(self.mean, self.variance, self.share)

    def _mixed(self, mean: Tensor, variance: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics (..., channels) of a mixture of stream and training data in the proportion share : 1 - share."""
        if not self.mix_source:
            return mean, variance
        return mix_statistics((mean, variance), cast(tuple[Tensor, Tensor], self.source), share)

    @torch.no_grad()
    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Move the memory by what the batch counts for; the batch's own mean and variance (channels,)."""
        return self._remember(*image_moments(x.to(self.mean.dtype)))

    def _remember(self, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Move the memory by images of the given statistics (n, channels); those of the batch (channels,)."""
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        memory = self.memory_mean, self.memory_variance
        _pool((self.mean, self.variance), memory, (mean, variance), (self.fresh, self.apart))
        self.images.copy_(self.total)
        if self.mix_source:
            middle = self._standard(mean, variance)
            between = (self._standard(means, variances) - middle[:, None]).square().mean()
            between = torch.lerp(self.memory_image_variance, between, self.fresh)
            between += self.apart * (middle - self._standard(*memory)).square().mean()
            self.image_variance.copy_(between)
            self.update_share()
        return mean, variance

    @torch.no_grad()
    def update_share(self) -> None:
        """Estimate the share of the stream from its statistics."""
        if self.mix_source:
            distance = self._standard(self.mean, self.variance).square().mean()
            self.share.copy_(stream_share(distance, self.image_variance, self.images / self.samples))

    def _standard(self, mean: Tensor, variance: Tensor) -> Tensor:
        return standard_moments(mean, variance, cast(tuple[Tensor, Tensor], self.source), self.eps)


def _share(remembered: Tensor, new: Tensor) -> Tensor:
    """Weight of the new batch in the exponentially decayed average."""
    return torch.maximum(new / (remembered + new).clamp_min(1e-6), 1 - torch.exp2(-new / TIDE.stream_memory))


def _pool(
    into: tuple[Tensor, Tensor], memory: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor],
    share: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Write mean and variance of a memory with a batch, which counts for the first of `share`, s; the other, s (1 - s).

    Adds the variance between the two means.
    """
    apart = share[1] * (batch[0] - memory[0]).square()
    torch.lerp(memory[0], batch[0], share[0], out=into[0])
    into[1].copy_(torch.lerp(memory[1], batch[1], share[0]) + apart)


def _spec(name: str, value: Tensor) -> Array:
    return Array.like(value) if name in ("mean", "group_mean") else Array.like(value, least=0)


def _refuse_computed_weights(name: str, norm: _BatchNorm) -> None:
    """Refuse a BatchNorm whose weight or bias is computed in every forward: parametrized, pruned or weight-normed."""
    if norm.affine and not {"weight", "bias"} <= norm._parameters.keys():
        raise ConfigError(
            f"weight or bias of the layer '{name}' is computed from other parameters (parametrized or pruned), which "
            "statistics that follow the images cannot do; make it permanent (torch.nn.utils.parametrize."
            "remove_parametrizations, torch.nn.utils.prune.remove), or use a method with statistics='batch' or 'source'"
        )


def _share_hooks(name: str, norm: _BatchNorm, own: OwnNorm) -> None:
    """Let the hooks of a BatchNorm run on the norm in its place; refuse a forward that would not run."""
    defined_in = next(cls for cls in type(norm).__mro__ if "forward" in vars(cls)).__module__.split(".")[0]
    known = defined_in in ("torch", "trust_tta") or own.after is not None  # `after` applies what timm's hold
    if not known or "forward" in vars(norm):
        raise ConfigError(
            f"the layer '{name}' is a {type(norm).__name__} with a forward of its own, which statistics that follow "
            "the images would skip; use a plain BatchNorm, or a method with statistics='batch' or 'source'"
        )
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        setattr(own, f"_{kind}", getattr(norm, f"_{kind}"))
    for flag in ("forward_hooks_with_kwargs", "forward_hooks_always_called", "forward_pre_hooks_with_kwargs"):
        setattr(own, f"_{flag}", getattr(norm, f"_{flag}"))
    own._is_full_backward_hook = norm._is_full_backward_hook


def has_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a BatchNorm whose statistics may follow the images.

    Those that see a handful of values per image, as after a pooling to 1x1, say so: statistics of these would be noise.
    """
    return isinstance(module, _BatchNorm) and not getattr(module, "sees_few_values", False)


def use_batch_statistics(model: nn.Module) -> None:
    """Normalize with the statistics of the batch at hand, in every mode; running statistics are not touched."""
    for module in model.modules():
        if has_statistics(module):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
