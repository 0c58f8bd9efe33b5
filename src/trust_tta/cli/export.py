"""`trust-tta export`: a network as a file that runs without this package."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from trust_tta.cli.arguments import add_network_arguments, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, writable_file
from trust_tta.config_io import read_class_names
from trust_tta.errors import ConfigError
from trust_tta.preprocessing import find_preset

EXAMPLES = """\
  trust-tta export vmamba_nano_cifar10 --to onnx          writes vmamba_nano_cifar10.onnx
  trust-tta export net.safetensors --to pt2 --out net.pt2
  trust-tta export --model package.module:MyNetwork --preprocessing imagenet     a network that loads its own weights
  trust-tta export net.safetensors --size any --int8      images of any size, weights of one byte
  trust-tta export state/streams/default --checkpoint net.safetensors --to onnx --out adapted.onnx
  trust-tta export method.pt --checkpoint vmamba_nano_cifar10 --to safetensors --out adapted.safetensors"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    source = "a known name or weights; with --checkpoint, an adapted state: snapshot, its folder, or state_dict()"
    add("source", nargs="?", metavar="SOURCE", help=source)
    add("--to", default="onnx", choices=("onnx", "pt2", "aoti", "safetensors"), help="format (default onnx)")
    add("--out", metavar="FILE", help="the file to write (default: here, named after the network)")
    add_network_arguments(parser)
    size = "height and width of the images (default: those of training); any, for ONNX files: any height and width"
    add("--size", type=lambda text: int(text) if text.isdecimal() else text, metavar="PIXELS|any", help=size)
    pixels = "input of the file: float, (n, 3, h, w) from 0 to 1, or uint8, (n, h, w, 3) (default float)"
    add("--pixels", default="float", choices=("float", "uint8"), help=pixels)
    add("--int8", action="store_true", help="quantize the linear layers of an ONNX file to int8")
    add("--images", metavar="FOLDER", help="real images for the comparison with PyTorch (default: some of CIFAR-10)")


def run(arguments: Namespace) -> None:
    use_passive_threads()
    if arguments.out:
        writable_file("--out", arguments.out)
    if not (arguments.source or arguments.checkpoint or arguments.model):
        raise ConfigError("there is no network; give SOURCE, --checkpoint FILE or --model package.module:Name")
    from trust_tta.export import export_network

    with ProgressDisplay() as progress:
        exported = export_network(
            arguments.source or arguments.checkpoint,
            arguments.to,
            arguments.out,
            checkpoint=arguments.checkpoint if arguments.source else None,
            variant=arguments.model,
            preprocessing=find_preset(arguments.preprocessing) if arguments.preprocessing else None,
            classes=read_class_names(arguments.classes) if arguments.classes else None,
            size=arguments.size,
            pixels=arguments.pixels,
            int8=arguments.int8,
            images=arguments.images,
            progress=progress,
        )
    found, details = exported.agreement, exported.details
    graph = f", opset {details['opset']}, {details['nodes']} nodes" if "nodes" in details else ""
    say(f"{exported.path}: {details['bytes'] / 1e6:.1f} MB{graph}")
    say(
        f"compared with PyTorch on {found.images} images: largest error {found.largest_error:.2g} of logits up to "
        f"{found.largest_logit:.3g}, the same class for {found.equal_classes}"
    )
