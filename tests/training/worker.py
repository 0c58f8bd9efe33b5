"""Train the tiny network until the epoch given, then die as if killed, after its steps and before its checkpoint."""

from __future__ import annotations

import os
import signal
import sys

from tests.training.samples import SHORT, TASK, colored_images, tiny_network
from trust_tta.models.vmamba import VMamba
from trust_tta.training.loop import fit


def main(path: str, deadly_epoch: int) -> None:
    epochs = iter(range(SHORT.epochs))

    def evaluate(_: VMamba) -> float:
        if next(epochs) == deadly_epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5

    fit(tiny_network(), *colored_images(21), SHORT, task=TASK, state_path=path, evaluate=evaluate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
