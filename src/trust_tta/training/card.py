"""A model card from the record of a training run: what is in it was measured, nothing is typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINED = """\
The averaged weights are exported, with running statistics taken anew on the training images.
No noise, blur or colour change was part of the augmentation, so corruption benchmarks stay honest."""


def model_card(
    course: Mapping[str, Any], *, name: str, data: str, licence: str, measured_on: str = "test", how: str = TRAINED
) -> str:
    """Markdown that says what the network is, how it was made, how well it does and how to check it.

    `course` is the record of a run: accuracy, recipe, hashes, versions, history; `measured_on` names the images of
    its accuracies, `how` says in words what was exported.
    """
    recipe = course["recipe"]
    rows = "\n".join(f"| {key.replace('_', ' ')} | {value} |" for key, value in recipe.items())
    scores = "\n".join(
        f"| {key.replace('_', ' ')} | {100 * value:.2f} % |" for key, value in course["accuracy"].items()
    )
    hashes = "\n".join(
        f"sha256 of the uint8 pixels, {part}: `{digest}`" for part, digest in course["data_sha256"].items()
    )
    return f"""# {name}

A `{course["model"]}` trained on {data}. Licence of the weights: {licence}.

Stored as fp16 safetensors with running statistics in float32; loads into a float32 network.
sha256 of the file: `{course["sha256"]}`

## Clean {measured_on} accuracy

| weights | top-1 |
| --- | --- |
{scores}

## Training

{len(course["history"])} epochs in {course["seconds"]:.0f} s on one {course["device"]}, PyTorch {course["torch"]}.
{how}

| setting | value |
| --- | --- |
{rows}

## Data

{hashes}
"""
