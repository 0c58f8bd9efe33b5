"""The parallel modes of TRUST: all orders start from the same weights and moments, and meet after the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.losses import entropy, most_likely
from trust_tta.methods.parameters import parameter_roles
from trust_tta.methods.state import clone

if TYPE_CHECKING:
    from trust_tta.methods.trust import Trust


class Step(NamedTuple):
    """A step under one order: the weights after it, and whether it was made, which the device knows.

    Where the merge asks for it, also the mean entropy of its predictions.
    """

    theta: Tensor
    finite: Tensor
    entropy: Tensor | None = None


def adapt_apart(method: Trust, images: Tensor) -> list[Step]:
    """Each order on the whole batch, or on its part of it.

    The K adaptations do not depend on each other. One after the other they take as long on one device as side by
    side, and the memory of one.
    """
    weights, orders, split = method.weights, method.orders, method.options.mode == "split"
    parts = equal_parts(images, len(orders)) if split else images.expand(len(orders), *images.shape)
    before, start, moments = replace(method.counters), weights.read(), clone(weights.moments)
    steps: list[Step] = []
    moved: list[bool] = []
    average = Average()
    method.seen = False
    for order, part in zip(orders, parts, strict=True):
        weights.write(start)
        weights.load_moments(moments)
        earlier = [
            method.update.settle([method.adapt_under(order, part).finite]) for _ in range(method.options.steps - 1)
        ]
        moved.append([True] in earlier)
        steps.append(method.adapt_under(order, part))
        average.add(weights.moments, steps[-1].finite | moved[-1])
    weights.write(start)
    made = method.update.settle([step.finite for step in steps])
    weights.load_moments(average.value() if any(made) or any(moved) else moments)
    if split:  # counted in passes over the whole batch
        k = len(orders)
        method.counters.forwards = before.forwards + (method.counters.forwards - before.forwards) // k
        method.counters.backwards = before.backwards + (method.counters.backwards - before.backwards) // k
    return [step._replace(finite=step.finite | earlier) for step, earlier in zip(steps, moved, strict=True)]


def adapt_side_by_side(method: Trust, images: Tensor) -> list[Step]:
    """The paper's parallel network: one pass, in which each part of the batch meets SS2D weights of its own.

    Everything else is shared, the statistics of the BatchNorms too.
    """
    check_parts(images, len(method.orders))
    weights, start = method.weights, clone(method.weights.moments)
    thetas, moments = [weights.read()] * len(method.orders), [start] * len(method.orders)
    origin, learned = thetas[0], False
    for _ in range(method.options.steps):
        gradients, entropies, finite = side_by_side_pass(method, images, thetas)
        for k, gradient in enumerate(gradients):
            weights.load_moments(moments[k])
            weights.gradient.copy_(gradient)
            weights.step(finite, start=thetas[k])
            thetas[k], moments[k] = weights.read(), clone(weights.moments)
        learned |= any(method.update.settle([finite] * len(thetas)))
    weights.write(origin)
    if not learned:
        weights.load_moments(start)
        return []
    average, made = Average(), finite.new_ones(())
    for each in moments:
        average.add(each, made)
    weights.load_moments(average.value())
    return [Step(theta, made, entropy) for theta, entropy in zip(thetas, entropies, strict=True)]


def side_by_side_pass(
    method: Trust, images: Tensor, thetas: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients (n,) for each copy, the entropies of its part's predictions, and whether all of it is finite.

    The weights that are not copied have one gradient, that of the whole batch.
    """
    weights, roles = method.weights, parameter_roles(method.model)
    copied = [name for name in weights.named if roles[name].kind in ("scan", "projection")]
    weights.write(thetas[0])
    named = [weights.by_name(theta) for theta in thetas]
    leaves = [{name: each[name].detach().clone().requires_grad_() for name in copied} for each in named]
    with copies_in_place(method, leaves):
        logits = method.predict.coarse(images, stochastic_depth=method.options.stochastic_depth, recorded=False)
        labels = logits
        if method.options.stochastic_depth:
            with torch.no_grad():
                labels = method.predict.coarse(images, recorded=False)
    loss = method.loss(logits, most_likely(labels))
    method.counters.backwards += 1
    owners = [{**weights.named, **each} for each in leaves]
    flat = list({id(t): t for owner in owners for t in owner.values()}.values())
    found = torch.autograd.grad(loss, flat, allow_unused=True)
    values = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(flat, found, strict=True)}
    gradients = [weights.flatten(values[id(tensor)] for tensor in owner.values()) for owner in owners]
    finite = torch.stack([g.isfinite().all() for g in gradients]).all() & loss.detach().isfinite()
    entropies = [part.mean() for part in entropy(logits.detach()).tensor_split(len(thetas))]
    return gradients, entropies, finite


@contextmanager
def copies_in_place(method: Trust, copies: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """Inside, each module that scans runs once for each part of the batch, with the part's weights and order."""
    model: Any = method.model
    modules: dict[str, Any] = _scanning_modules(model)
    directions = [model.scan_directions(order, 1) for order in method.orders]
    for path, module in modules.items():
        prefix = f"{path}."
        own = [{n.removeprefix(prefix): v for n, v in each.items() if n.startswith(prefix)} for each in copies]
        module.forward = partial(_by_parts, module, own, directions)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward  # the class's own comes to light again


def _scanning_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters of the scans, by their paths."""
    scans = [name for name, role in parameter_roles(model).items() if role.kind == "scan"]
    return {path: model.get_submodule(path) for path in {name.rpartition(".")[0] for name in scans}}


def check_copies(model: nn.Module) -> None:
    """Refuse a network whose scans read weights out of modules that are not called: copies of these have no place."""
    if any(type(module).forward is nn.Module.forward for module in _scanning_modules(model).values()):
        raise ConfigError(
            "split_statistics='batch' gives each part of a batch a copy of the scan's weights, for which "
            f"{type(model).__name__} has no place; use 'part'"
        )


def _by_parts(
    module: nn.Module,
    copies: Sequence[dict[str, Tensor]],
    directions: Sequence[Tensor],
    x: Tensor,
    order: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    del order  # of the whole batch
    plain = partial(type(module).forward, module)
    replaced, module.forward = module.forward, plain
    try:
        parts = zip(copies, x.tensor_split(len(copies)), directions, strict=True)
        y = torch.cat([functional_call(module, weights, (part, each)) for weights, part, each in parts])
        return y if residual is None else residual + y
    finally:
        module.forward = replaced


class Average:
    """The weighted mean of named tensors of several moments."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}
        self.weight: Tensor | None = None

    def add(self, values: dict[str, Tensor], weight: Tensor) -> None:
        """Add values with a weight () on the device."""
        for name, value in values.items():
            weight = weight.to(value.dtype)
            if self.weight is None:
                self.total[name] = value * weight
            else:  # nothing of their size beside them
                self.total[name].addcmul_(value, weight)
        self.weight = weight if self.weight is None else self.weight + weight

    def value(self) -> dict[str, Tensor]:
        """The mean; not a number where all weights are zero."""
        if self.total and self.weight is not None:  # SGD without momentum has no moments
            torch._foreach_div_(list(self.total.values()), self.weight)
        return self.total


def check_parts(images: Tensor, k: int) -> None:
    """Refuse a batch that cannot be divided, before anything changes."""
    if len(images) < k:
        raise ShapeError(
            f'{len(images)} images cannot be split among {k} orders; give at least {k} or use mode="replicate"'
        )


def equal_parts(images: Tensor, k: int) -> Tensor:
    """(n, ...) as (k, ceil(n/k), ...); where k does not divide n, the first images serve twice."""
    check_parts(images, k)
    size = -(-images.shape[0] // k)
    return images[torch.arange(k * size, device=images.device) % images.shape[0]].view(k, size, *images.shape[1:])
