"""`trust-tta finetune`: a new classifier on a frozen backbone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trust_tta.cli.arguments import add_schema_arguments, schema_values, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, writable_folder
from trust_tta.cli.train import add_data_arguments, print_result
from trust_tta.data.registry import find_spec
from trust_tta.preprocessing import find_preset
from trust_tta.schema import parse
from trust_tta.training.recipe import FinetuneRecipe

EXAMPLES = """\
  trust-tta finetune --checkpoint vmamba_tiny_s1l8_imagenet --data cifar10 --root data --out runs/tiny_cifar10
  trust-tta finetune --checkpoint net.pth --model vmamba_tiny_s1l8_bn --data pacs --target photo --out runs/pacs_photo
  trust-tta finetune --checkpoint runs/nano/model.safetensors --data cifar100 --epochs 100 --out runs/nano100"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="FILE", help=".pth, .safetensors, or a known name")
    add("--model", metavar="NAME", help="variant (default: what the checkpoint says)")
    add_data_arguments(parser)
    add("--preprocessing", metavar="NAME", help="such as imagenet, squash224 (default: the checkpoint's)")
    add_schema_arguments(parser.add_argument_group("recipe"), FinetuneRecipe)


def run(arguments: Namespace) -> None:
    use_passive_threads()
    find_spec(arguments.data)  # refuses an unknown name before PyTorch is imported
    preprocessing = find_preset(arguments.preprocessing) if arguments.preprocessing else None
    recipe = parse(FinetuneRecipe, schema_values(arguments, FinetuneRecipe), where="the recipe")
    writable_folder("--out", arguments.out)
    from trust_tta.bench.environment import choose_device
    from trust_tta.models.checkpoint import Checkpoint
    from trust_tta.training import finetune, open_training_data

    checkpoint = Checkpoint.open(
        arguments.checkpoint.replace("{domain}", arguments.target or "all"),
        variant=arguments.model,
        preprocessing=preprocessing,
        fields=dict(arguments.set),
    )
    with ProgressDisplay() as progress:
        trained = finetune(
            checkpoint,
            open_training_data(
                arguments.data, arguments.root, target=arguments.target, share=arguments.share, seed=recipe.seed
            ),
            recipe=recipe,
            out=Path(arguments.out),
            device=choose_device(arguments.device),
            progress=progress,
        )
    print_result(trained, arguments, arguments.target)
