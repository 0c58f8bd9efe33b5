"""K copies of the adapted weights that learn side by side while the rest of the network is shared.

The batches of all copies go through the network as one; where a layer is adapted, each part is routed to its own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.state import load_optimizer


class Routed(nn.Module):
    """One module a copy: the batch is cut into as many equal parts, each goes through its own."""

    def __init__(self, module: nn.Module, adapted: Collection[str], count: int) -> None:
        super().__init__()
        frozen = [p for name, p in module.named_parameters() if name not in adapted]
        shared = {id(t): t for t in (*frozen, *module.buffers())}
        self.copies = nn.ModuleList(copy.deepcopy(module, dict(shared)) for _ in range(count))

    def forward(self, x: Tensor, *orders: Tensor) -> Tensor:
        """x (k*n, ...) and, for modules that take one, the order of each image (k*n, 4), the same within a part."""
        count = len(self.copies)
        parts = zip(self.copies, x.chunk(count), *(o[:: len(o) // count] for o in orders), strict=True)
        return torch.cat([module(part, *order) for module, part, *order in parts])


class Copies:
    """The routed network, its weights by name (one tensor a copy), and one Adam with moments for each copy."""

    def __init__(self, model: nn.Module, adapted: Mapping[str, Tensor], count: int, lr: float) -> None:
        self.count = count
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.network = copy.deepcopy(model, shared)
        self.weights: dict[str, list[nn.Parameter]] = dict.fromkeys(adapted, [])
        for unit in _units(adapted):
            inner = [name.removeprefix(f"{unit}.") for name in adapted if name.startswith(f"{unit}.")]
            routed = Routed(model.get_submodule(unit), inner, count)
            self.network.set_submodule(unit, routed)
            for name in inner:
                self.weights[f"{unit}.{name}"] = [module.get_parameter(name) for module in routed.copies]
        self.optimizer = torch.optim.Adam(self._flat(), lr=lr)

    def start_from(self, adapted: Mapping[str, Tensor]) -> None:
        """Every copy begins at the current weights; the moments are kept."""
        with torch.no_grad():
            torch._foreach_copy_(self._flat(), [adapted[name] for name, row in self.weights.items() for _ in row])

    def predict(self, images: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """Logits (k, n, classes) of each copy under its order; images (n, ...) for all, or (k, n, ...) a part each."""
        parts = images if images.dim() == 5 else images.expand(self.count, *images.shape)
        slots = torch.stack(list(orders)).repeat_interleave(parts.shape[1], dim=0)
        logits: Tensor = self.network(parts.flatten(0, 1), order=slots)
        return logits.view(self.count, -1, logits.shape[1])

    def update(self, loss: Tensor) -> bool:
        """Descend the sum of the copies' losses; False, and nothing changed, if anything is not finite."""
        parameters = self._flat()
        gradients = torch.autograd.grad(loss, parameters)
        if not bool(torch.stack([loss.detach(), *(g.sum() for g in gradients)]).isfinite().all()):
            return False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def snapshots(self) -> list[list[Tensor]]:
        """The k sets of weights, each in the order of `adapted`."""
        return [[row[k].detach() for row in self.weights.values()] for k in range(self.count)]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the moments; refused when they are of another number of copies."""
        if len(state["param_groups"][0]["params"]) != len(self._flat()):
            raise StateError(f"this state is not of {self.count} copies; create the method with the same orders")
        load_optimizer(self.optimizer, state)

    def _flat(self) -> list[Tensor]:
        return [parameter for row in self.weights.values() for parameter in row]


def _units(adapted: Collection[str]) -> list[str]:
    """The outermost modules that own an adapted parameter themselves."""
    owners = {name.rpartition(".")[0] for name in adapted}
    return sorted(o for o in owners if not any(o.startswith(f"{other}.") for other in owners))
