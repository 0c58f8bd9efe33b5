"""TRUST's parallel modes, and its merges other than the mean.

In the parallel modes all orders start from the same weights and optimizer state, which are averaged after the batch.
"""

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
from trust_tta.methods import merging
from trust_tta.methods.losses import entropy, most_likely
from trust_tta.methods.parameters import parameter_roles
from trust_tta.methods.state import clone

if TYPE_CHECKING:
    from trust_tta.methods.trust import WeightAveraging
    from trust_tta.methods.trust_options import TrustOptions


class OrderStep(NamedTuple):
    """A step under one order: the weights (n,) after it, and whether it was made, () bool on the device.

    `entropy`: the mean entropy of its predictions, where the merge needs it.
    """

    weights: Tensor
    made: Tensor
    entropy: Tensor | None = None


def merge(method: WeightAveraging, steps: Sequence[OrderStep]) -> Tensor:
    """The weights (n,) of the steps that were made, averaged with weights 1 / entropy as the option `merge` says."""
    steps = [step for step in steps if bool(step.made)] or steps[:1]
    vectors = [step.weights for step in steps]
    if len(vectors) == 1:
        return vectors[0]
    weights = merging.inverse_entropy_weights(torch.stack([step.entropy for step in steps if step.entropy is not None]))
    if method.merge_by == "entropy":
        return merging.weighted(vectors, weights)
    networks = [list(method.weights.unflatten(vector).values()) for vector in vectors]
    if method.merge_by == "slerp_released":
        return method.weights.flatten(merging.slerp_released(networks, weights))
    return method.weights.flatten(merging.slerp(layer, weights) for layer in zip(*networks, strict=True))


def adapt(method: WeightAveraging, images: Tensor) -> list[OrderStep]:
    """Adapt under each order from the same weights: one joint forward, or one order after the other."""
    joint = method.mode == "split" and getattr(method.options, "split_statistics", "part") == "batch"
    if joint and (method.statistics.uses_batch or method.statistics.norms):  # else images do not affect one another
        return adapt_jointly(method, images)
    return adapt_separately(method, images)


def adapt_separately(method: WeightAveraging, images: Tensor) -> list[OrderStep]:
    """Adapt under one order after the other, each on the whole batch or on its part.

    On one device, running the K adaptations at once would not be faster, and take K times the memory.
    """
    weights, orders, split = method.weights, method.orders, method.mode == "split"
    parts = equal_parts(images, len(orders)) if split else images.expand(len(orders), *images.shape)
    before, start, state = replace(method.counters), weights.snapshot(), clone(weights.optimizer_state)
    steps: list[OrderStep] = []
    average, count = clone(state), torch.zeros((), device=images.device)
    for order, part in zip(orders, parts, strict=True):
        weights.load(start)
        weights.load_optimizer_state(state)
        for i in range(method.options.steps):
            step = method.adapt_under(order, part, first=i == 0)
        steps.append(step._replace(made=torch.stack(method.finite_steps[-method.options.steps :]).any()))
        count += steps[-1].made
        for name, mean in average.items():  # in place, of the orders that made a step: allocates nothing of their size
            mean.lerp_(weights.optimizer_state[name], (steps[-1].made / count.clamp_min(1)).to(mean))
    weights.load(start)
    weights.load_optimizer_state(average)
    if split:  # counted in passes over the whole batch
        k = len(orders)
        method.counters.forwards = before.forwards + (method.counters.forwards - before.forwards) // k
        method.counters.backwards = before.backwards + (method.counters.backwards - before.backwards) // k
    return steps


def adapt_jointly(method: WeightAveraging, images: Tensor) -> list[OrderStep]:
    """The paper's parallel network: one forward, in which each part of the batch has SS2D weights of its own.

    Everything else is shared, the batch statistics too.
    """
    check_parts(images, len(method.orders))
    weights, state = method.weights, clone(method.weights.optimizer_state)
    vectors, states = [weights.snapshot()] * len(method.orders), [state] * len(method.orders)
    start, made = vectors[0], torch.zeros((), dtype=torch.bool, device=images.device)
    for _ in range(method.options.steps):
        gradients, entropies, finite = joint_gradients(method, images, vectors)
        for k, gradient in enumerate(gradients):
            weights.load_optimizer_state(states[k])
            weights.gradient.copy_(gradient)
            weights.step(finite, start=vectors[k])
            vectors[k], states[k] = weights.snapshot(), clone(weights.optimizer_state)
        method.finite_steps += [finite] * len(vectors)
        made = made | finite
    weights.load(start)
    weights.load_optimizer_state({name: merging.mean([each[name] for each in states]) for name in state})
    return [OrderStep(vector, made, mean) for vector, mean in zip(vectors, entropies, strict=True)]


def joint_gradients(
    method: WeightAveraging, images: Tensor, vectors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients (n,) of each copy, the mean entropy of its part's predictions, and whether all gradients are finite.

    The weights that are not copied have one gradient, that of the whole batch.
    """
    weights, roles = method.weights, parameter_roles(method.model)
    copied = [name for name in weights.named if roles[name].kind in ("scan", "projection")]
    weights.load(vectors[0])
    named = [weights.unflatten(vector) for vector in vectors]
    leaves = [{name: each[name].detach().clone().requires_grad_() for name in copied} for each in named]
    with scan_weights_by_part(method, leaves):
        logits = method.logits(images, stochastic_depth=method.options.stochastic_depth, capture=False)
        prediction = method.predict(images, capture=False) if method.options.stochastic_depth else logits
    loss = method.loss(logits, most_likely(prediction))
    method.counters.backwards += 1
    owners = [{**weights.named, **each} for each in leaves]
    flat = list({id(t): t for owner in owners for t in owner.values()}.values())
    found = torch.autograd.grad(loss, flat, allow_unused=True)
    values = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(flat, found, strict=True)}
    gradients = [weights.flatten(values[id(tensor)] for tensor in owner.values()) for owner in owners]
    finite = torch.stack([g.isfinite().all() for g in gradients]).all() & loss.detach().isfinite()
    entropies = [part.mean() for part in entropy(logits.detach()).tensor_split(len(vectors))]
    return gradients, entropies, finite


@contextmanager
def scan_weights_by_part(method: WeightAveraging, copies: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """Run each scanning module once for each part of the batch, with the part's weights and order."""
    model: Any = method.model
    modules: dict[str, Any] = scanning_modules(model)
    directions = [model.scan_directions(order, 1) for order in method.orders]
    for path, module in modules.items():
        prefix = f"{path}."
        own = [{n.removeprefix(prefix): v for n, v in each.items() if n.startswith(prefix)} for each in copies]
        module.forward = partial(_forward_by_part, module, own, directions)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward  # the class's own is used again


def _forward_by_part(
    module: nn.Module,
    copies: Sequence[dict[str, Tensor]],
    directions: Sequence[Tensor],
    x: Tensor,
    order: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    del order  # of the whole batch
    replaced, module.forward = module.forward, partial(type(module).forward, module)
    try:
        parts = zip(copies, x.tensor_split(len(copies)), directions, strict=True)
        y = torch.cat([functional_call(module, weights, (part, each)) for weights, part, each in parts])
        return y if residual is None else residual + y
    finally:
        module.forward = replaced


def scanning_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters of the scans, by their paths."""
    scans = [name for name, role in parameter_roles(model).items() if role.kind == "scan"]
    return {path: model.get_submodule(path) for path in {name.rpartition(".")[0] for name in scans}}


def check_options(options: TrustOptions, model: nn.Module) -> None:
    """Refuse the joint forward for a network whose scan weights belong to modules without a forward."""
    joint = options.mode == "split" and options.split_statistics == "batch" and options.statistics != "source"
    if joint and any(type(module).forward is nn.Module.forward for module in scanning_modules(model).values()):
        raise ConfigError(
            "split_statistics='batch' gives each part of a batch a copy of the scan's weights, for which "
            f"{type(model).__name__} has no place; use 'part'"
        )


def check_parts(images: Tensor, k: int) -> None:
    """Refuse a batch smaller than the number of orders."""
    if len(images) < k:
        raise ShapeError(
            f'{len(images)} images cannot be split among {k} orders; give at least {k} or use mode="replicate"'
        )


def equal_parts(images: Tensor, k: int) -> Tensor:
    """(n, ...) as (k, ceil(n/k), ...); where k does not divide n, the first images are used twice."""
    check_parts(images, k)
    size = -(-images.shape[0] // k)
    return images[torch.arange(k * size, device=images.device) % images.shape[0]].view(k, size, *images.shape[1:])
