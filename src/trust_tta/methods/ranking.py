"""The offline phase: rank a network's traversal orders by the entropy of the predictions they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.losses import entropy
from trust_tta.methods.parameters import share_tensors
from trust_tta.methods.statistics import use_batch_statistics
from trust_tta.methods.trust_options import require_orders, scan_orders_of
from trust_tta.methods.validation import check_batch, check_finite
from trust_tta.orders import ScanOrder, find_order


def rank_orders(
    model: nn.Module, batches: Iterable[Tensor], *, statistics: Literal["batch", "source"] = "batch"
) -> list[tuple[ScanOrder | str, float]]:
    """(order, mean entropy) ascending, over batches of images (n, c, h, w); forward passes only.

    Memory is that of one evaluation, whatever the number of orders and batches; the model is left as it was.
    """
    require_orders(model)
    network = share_tensors(model)
    if statistics == "batch":
        use_batch_statistics(network)
    scan_orders = scan_orders_of(model)
    orders = [find_order(name, scan_orders) for name in scan_orders]
    sums = torch.zeros(len(orders), dtype=torch.float64)
    images = 0
    with torch.no_grad():
        for batch in batches:
            batch = check_batch(batch, network)
            check_finite(batch)
            images += batch.shape[0]
            for i, order in enumerate(orders):
                entropies = entropy(network(batch, order=order)).double()
                sums[i] += entropies.flatten(1).mean(1).sum().cpu() if entropies.dim() > 1 else entropies.sum().cpu()
    if images == 0:
        raise ConfigError("no images were given to rank the orders on; give at least one batch")
    if not bool(sums.isfinite().all()):
        raise ConfigError("the network's predictions are not finite, so no order can be preferred; check its weights")
    return sorted(zip(orders, (sums / images).tolist(), strict=True), key=lambda pair: (pair[1], str(pair[0])))
