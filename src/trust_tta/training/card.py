"""A model card from the record of a training run: what is in it was measured, nothing is typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(course: Mapping[str, Any], *, name: str, data: str, licence: str) -> str:
    """Markdown that says what the network is, how it was made, how well it does and how to check it.

    `course` is what `benchmarks/train_cifar10.py` writes: accuracy, recipe, hashes, versions, history.
    """
    recipe = course["recipe"]
    rows = "\n".join(f"| {key.replace('_', ' ')} | {value} |" for key, value in recipe.items())
    scores = "\n".join(
        f"| {key.replace('_', ' ')} | {100 * value:.2f} % |" for key, value in course["accuracy"].items()
    )
    return f"""# {name}

A `{course["model"]}` trained on {data}. Licence of the weights: {licence}.

Stored as fp16 safetensors with running statistics in float32; loads into a float32 network.
sha256 of the file: `{course["sha256"]}`

## Clean test accuracy

| weights | top-1 |
| --- | --- |
{scores}

## Training

{len(course["history"])} epochs in {course["seconds"]:.0f} s on one {course["device"]}, PyTorch {course["torch"]}.
The averaged weights are exported, with running statistics taken anew on the training images.
No noise, blur or colour change was part of the augmentation, so corruption benchmarks stay honest.

| setting | value |
| --- | --- |
{rows}

## Data

sha256 of the uint8 pixels, train: `{course["data_sha256"]["train"]}`
sha256 of the uint8 pixels, test: `{course["data_sha256"]["test"]}`
"""
