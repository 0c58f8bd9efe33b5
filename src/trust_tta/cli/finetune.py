"""`trust-tta finetune`: a new classifier on a frozen backbone."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trust_tta.cli.common import wait_politely
from trust_tta.cli.train import add_data_arguments, report, setting
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from trust_tta.models.checkpoint import Checkpoint
    from trust_tta.models.vmamba import VMamba
    from trust_tta.preprocessing import Preprocessing
    from trust_tta.training.data import Pictures, TrainingData
    from trust_tta.training.finetune import FinetuneResult

HELP = "train only the classifier on a frozen backbone, whose features are computed once"
EXAMPLES = """\
  trust-tta finetune --checkpoint vmamba_tiny_s1l8_imagenet --data cifar10 --root data --out runs/tiny_cifar10
  trust-tta finetune --checkpoint net.pth --model vmamba_tiny_s1l8_bn --data pacs --target photo --out runs/pacs_photo
  trust-tta finetune --checkpoint runs/nano/model.safetensors --data cifar100 --epochs 100 --out runs/nano100"""

HOW = """\
Only the classifier was trained, on features of the frozen backbone, without augmentation.
The backbone is that of the checkpoint named below."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help=".pth, .safetensors, or a known name")
    parser.add_argument("--model", metavar="NAME", help="variant (default: as the checkpoint says)")
    add_data_arguments(parser)
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="change the variant; repeatable"
    )
    parser.add_argument(
        "--preprocessing", metavar="NAME", help="such as imagenet, squash224 (default: the checkpoint's)"
    )
    parser.add_argument("--epochs", type=int, default=300, metavar="N", help="(default 300)")
    parser.add_argument("--lr", type=float, default=5e-4, metavar="RATE", help="(default 0.0005)")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="(default 128)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default 0)")


def run(arguments: Namespace) -> None:
    wait_politely()
    import torch

    from trust_tta.bench.environment import choose_device
    from trust_tta.models.checkpoint import Checkpoint
    from trust_tta.preprocessing import find_preset
    from trust_tta.training.data import Pictures, open_training_data

    check(arguments)
    begun = time.perf_counter()
    device = choose_device(arguments.device)
    given = find_preset(arguments.preprocessing) if arguments.preprocessing else None
    checkpoint = Checkpoint.open(
        arguments.checkpoint.replace("{domain}", arguments.target or "all"),
        variant=arguments.model,
        preprocessing=given,
        fields=dict(arguments.set),
    )
    data = open_training_data(
        arguments.data, arguments.root, target=arguments.target, share=arguments.share, seed=arguments.seed
    )
    fit = checkpoint.preprocessing.for_layout(data.spec.layout)
    chosen, held_out = (Pictures(data.dataset, indices) for indices in (data.chosen, data.held_out))
    print(f"{len(chosen)} images of {data.description} to train on, {len(held_out)} {data.measured_on} images")
    torch.manual_seed(arguments.seed)
    model = checkpoint.load(num_classes=len(data.dataset.class_names), head=False)
    result = train_head(arguments, model, chosen, fit, device)
    accuracies = {
        "classifier on its training images": result.accuracy,
        "classifier": score(model, held_out, fit, device),
    }
    finish(arguments, model, checkpoint, data, fit, result, accuracies, device, time.perf_counter() - begun)


def check(arguments: Namespace) -> None:
    """Refuse what would be found out only later, or would cost a network that is there."""
    from trust_tta.training.outputs import WEIGHTS

    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed}: it must lie in [0, 2**63)")
    weights = Path(arguments.out) / WEIGHTS
    if weights.exists():
        raise ConfigError(f"'{weights}' is there already and would be lost; give another --out, or delete this file")


def train_head(
    arguments: Namespace, model: VMamba, pictures: Pictures, fit: Preprocessing, device: torch.device
) -> FinetuneResult:
    from trust_tta.cli.progress import progress
    from trust_tta.training.finetune import finetune_head

    with progress(len(pictures) + arguments.epochs, "features and epochs") as advance:

        def prepare(images: Any) -> torch.Tensor:
            advance(len(images), note="features")
            return fit(images)

        def after(epoch: int, loss: float) -> None:
            advance(note=f"epoch {epoch + 1}, loss {loss:.4f}")
            if epoch + 1 == arguments.epochs or (epoch + 1) % max(1, arguments.epochs // 10) == 0:
                print(f"epoch {epoch + 1:3d}/{arguments.epochs}  loss {loss:.4f}", flush=True)

        return finetune_head(
            model,
            pictures,
            pictures.labels,
            preprocess=prepare,
            epochs=arguments.epochs,
            lr=arguments.lr,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            device=device,
            progress=after,
        )


def score(model: VMamba, pictures: Pictures, fit: Preprocessing, device: torch.device) -> float:
    """The share of the pictures that the network puts in their class."""
    import torch

    from trust_tta.training.finetune import extract_features

    features = extract_features(model, pictures, preprocess=fit, device=device)
    with torch.no_grad():
        predictions = model.forward_head(features).argmax(1).cpu().numpy()
    return float((predictions == pictures.labels).mean())


def finish(
    arguments: Namespace,
    model: VMamba,
    checkpoint: Checkpoint,
    data: TrainingData,
    fit: Preprocessing,
    result: FinetuneResult,
    accuracies: dict[str, float],
    device: torch.device,
    seconds: float,
) -> None:
    from trust_tta.training.outputs import Origin, write_network

    names = ("epochs", "lr", "batch_size", "seed")
    origin = Origin(
        variant=checkpoint.variant,
        overrides=checkpoint.fields,
        data=data,
        hashes={f"{data.description} and what is held out": data.dataset.fingerprint},
        preprocessing=fit,
        recipe={
            **{name: getattr(arguments, name) for name in names},
            "backbone": checkpoint.file.name,
            "backbone_sha256": checkpoint.sha256,
        },
    )
    write_network(
        Path(arguments.out),
        model,
        origin,
        accuracy=accuracies,
        history=[{"epoch": epoch, "loss": loss} for epoch, loss in enumerate(result.losses)],
        seconds=seconds,
        device=device,
        how=HOW,
    )
    report(arguments.out, accuracies["classifier"], data.measured_on)
