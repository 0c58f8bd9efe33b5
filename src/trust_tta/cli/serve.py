"""`trust-tta serve`: a network that adapts while it serves, over HTTP."""

from __future__ import annotations

import os
import secrets
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import use_passive_threads
from trust_tta.cli.engines import add_cluster_arguments, check_cluster
from trust_tta.cli.output import say, try_folder
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from trust_tta.serve.service import Service

EXAMPLES = """\
  trust-tta serve                      the shipped network on http://127.0.0.1:8000
  curl -F image=@photo.jpg localhost:8000/predict
  trust-tta serve --demo               see the live page move: fog, noise, a rollback
  trust-tta serve --checkpoint net.safetensors --reference clean/ --state /var/lib/trust-tta
  trust-tta serve --engine ray --replicas 4 --state /shared/trust-tta    streams spread over a Ray cluster"""

KEPT = "everything answered so far is in the folder of --state"
TOKEN_VARIABLE = "TRUST_TTA_TOKEN"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint",
        default="vmamba_nano_cifar10",
        metavar="FILE",
        help="a .safetensors or .pth file, or a known name (default vmamba_nano_cifar10, which ships with the package)",
    )
    add("--variant", metavar="NAME", help="the variant, for a checkpoint that does not state it")
    add("--method", default="tide", metavar="NAME", help="how streams adapt (default tide)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one (default 8000)")
    add(
        "--token",
        metavar="TEXT",
        help=f"needed to change a stream (default: the variable {TOKEN_VARIABLE}, or one that is generated and shown)",
    )
    add(
        "--state",
        metavar="FOLDER",
        help="folder of snapshots and the journal, from which a restart continues (default: nothing is kept)",
    )
    add("--reference", metavar="FOLDER", help="clean images from which the alarms are calibrated, once per state")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, or auto (default auto)")
    add("--batch-size", type=int, metavar="N", help="largest number of images in a batch (default 32)")
    add_cluster_arguments(parser)
    add("--replicas", type=int, metavar="N", help="processes that share the streams (default 2)")
    add("--demo", action="store_true", help="replay images at itself: clean, fog, noise")


def run(arguments: Namespace) -> None:
    use_passive_threads()
    from trust_tta.optional import require

    for package in ("starlette", "uvicorn", "httptools", "prometheus_client", "python_multipart"):
        require(package, extra="serve")
    _check(arguments)
    folder = try_folder("--state", arguments.state) if arguments.state else None
    token = arguments.token or os.environ.get(TOKEN_VARIABLE)
    from trust_tta.serve.demo import NOTE, Replay
    from trust_tta.serve.server import address_of, bind, log_as_json, make_server, run_server

    listener = bind(arguments.host, arguments.port)
    with tempfile.TemporaryDirectory(prefix="trust-tta-") if folder is None else nullcontext(folder) as place:
        service = _make_service(arguments, Path(place))
        address, used = address_of(listener), token or secrets.token_urlsafe(16)
        replay = Replay(address, model=service.network.name, token=used) if arguments.demo else None

        def ready() -> None:
            network = service.network
            say(f"{network.name} with {network.method.name}: {address} (page), {address}/predict, {address}/v2")
            if token is None:
                say(f"token for changing streams: {used}")
                say(f"page with the token: {address}/#token={used}")
            if folder is None:
                say("nothing is kept afterwards; to keep streams, give --state FOLDER")
            if replay is not None:
                replay.start()

        if arguments.engine == "ray":
            host, port = listener.getsockname()[:2]
            listener.close()  # Ray Serve's proxy takes it
            _serve_on_cluster(arguments, service, host=host, port=port, token=used, on_ready=ready)
            return
        log_as_json()
        note = NOTE if arguments.demo else ""
        run_server(make_server(service, token=used, note=note, on_ready=ready), listener)


def _serve_on_cluster(
    arguments: Namespace, service: Service, *, host: str, port: int, token: str, on_ready: Callable[[], None]
) -> None:
    """Run replicas over the service's folder, which stays locked, until SIGTERM or SIGINT."""
    from trust_tta.distributed.cluster import connected
    from trust_tta.distributed.ingress import serve_until_signal
    from trust_tta.distributed.serving import Plan, share_of

    replicas, network = arguments.replicas or 2, service.network
    file = Path(arguments.checkpoint)
    with connected(arguments.address) as ray:
        plan = Plan(
            checkpoint=str(file.resolve()) if file.exists() else arguments.checkpoint,
            method=arguments.method,
            folder=str(service.folder.resolve()),
            token=token,
            variant=arguments.variant,
            device=arguments.device,
            settings=service.settings,
            **share_of(ray.cluster_resources(), replicas, device=arguments.device),
        )
        serve_until_signal(plan, network, host=host, port=port, replicas=replicas, on_ready=on_ready)
    service.stop()


def _check(arguments: Namespace) -> None:
    """Everything that can be refused before PyTorch is loaded."""
    from trust_tta.methods.registry import METHODS
    from trust_tta.plugins import resolve

    resolve(arguments.method, METHODS, group="trust_tta.methods")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: give a number from 0 to 65535")
    check_cluster(arguments, "replicas")
    if arguments.replicas is not None and not 1 <= arguments.replicas <= 1024:
        raise ConfigError(f"--replicas {arguments.replicas}: give a number from 1 to 1024")
    if arguments.engine != "local" and arguments.demo:
        raise ConfigError("--demo is for one process; omit --engine ray")


def _make_service(arguments: Namespace, folder: Path) -> Service:
    from trust_tta.bench.environment import choose_device
    from trust_tta.serve.demo import GUARD, OPTIONS
    from trust_tta.serve.images import read_folder
    from trust_tta.serve.service import Service, open_network
    from trust_tta.serve.settings import Settings

    changes = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    settings = Settings(**changes)
    device = choose_device(arguments.device)
    options = OPTIONS.get(arguments.method) if arguments.demo else None
    network = open_network(
        arguments.checkpoint, arguments.method, options=options, device=device, variant=arguments.variant
    )
    service = Service(network, folder, guard=GUARD if arguments.demo else None, settings=settings)
    if arguments.reference and not service.calibrated:
        say(f"calibrating the alarms on {arguments.reference}")
        service.calibrate(read_folder(Path(arguments.reference), network.preprocessing, batch=settings.batch_size))
    return service
