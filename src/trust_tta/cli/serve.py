"""`trust-tta serve`: a network that adapts while it serves, over HTTP."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import add_engine_arguments, add_network_arguments, check_engine, use_passive_threads
from trust_tta.cli.output import say, writable_folder
from trust_tta.config_io import read_class_names
from trust_tta.errors import ConfigError
from trust_tta.methods.registry import METHODS
from trust_tta.optional import require
from trust_tta.plugins import resolve

if TYPE_CHECKING:
    from trust_tta.serve.network import NetworkSource
    from trust_tta.serve.service import Service

EXAMPLES = """\
  trust-tta serve                      the shipped network on http://127.0.0.1:8000
  curl -F image=@photo.jpg localhost:8000/predict
  trust-tta serve --demo               see the live page move: fog, noise, a rollback
  trust-tta serve --checkpoint net.safetensors --reference clean/ --state /var/lib/trust-tta
  trust-tta serve --model package.module:MyNetwork --preprocessing imagenet --classes classes.txt
  trust-tta serve --engine ray --replicas 4 --state /shared/trust-tta    streams spread over a Ray cluster"""

DEFAULT_CHECKPOINT = "vmamba_nano_cifar10"
KEPT = "everything answered so far is in the folder of --state"
TOKEN_VARIABLE = "TRUST_TTA_TOKEN"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_network_arguments(parser)
    add("--method", default="tide", metavar="NAME", help="how streams adapt (default tide)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default 127.0.0.1)")
    host = "host name that clients may use, besides localhost, this machine's name and IP addresses; repeatable"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=host)
    add("--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one (default 8000)")
    token = f"needed to change a stream (default: the variable {TOKEN_VARIABLE}, or a generated one that is printed)"
    add("--token", metavar="TEXT", help=token)
    state = "folder of snapshots and the event log, from which a restart continues (default: nothing is kept)"
    add("--state", metavar="FOLDER", help=state)
    add("--reference", metavar="FOLDER", help="clean images from which the alarms are calibrated, once per state")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, or auto (default auto)")
    add("--batch-size", type=int, metavar="N", help="largest number of images in a batch (default 32)")
    add_engine_arguments(parser)
    add("--replicas", type=int, metavar="N", help="processes that share the streams (default 2)")
    add("--demo", action="store_true", help="replay images at itself: clean, fog, noise")


def run(arguments: Namespace) -> None:
    use_passive_threads()
    for package in ("starlette", "uvicorn", "h11", "prometheus_client", "python_multipart"):
        require(package, extra="serve")
    _check(arguments)
    folder = writable_folder("--state", arguments.state) if arguments.state else None
    token = _read_token(arguments)
    from trust_tta.serve.app import Api
    from trust_tta.serve.demo import NOTE, start_replay
    from trust_tta.serve.server import Server, address_of, bind, log_as_json, run_server

    listener = bind(arguments.host, arguments.port)
    with tempfile.TemporaryDirectory(prefix="trust-tta-") if folder is None else nullcontext(folder) as place:
        source = _network_source(arguments)
        service = _make_service(arguments, source, Path(place))
        address, used = address_of(listener), token or secrets.token_urlsafe(16)

        def ready() -> None:
            network = service.network
            say(f"{network.name} with {network.method.name}: {address} (page), {address}/predict, {address}/v2")
            for line in network.notes:
                say(line)
            if token is None:
                say(f"token for changing streams: {used}")
                say(f"page with the token: {address}/#token={used}")
            if folder is None:
                say("nothing is kept afterwards; to keep streams, give --state FOLDER")
            if arguments.demo:
                start_replay(service)

        if arguments.engine == "ray":
            host, port = listener.getsockname()[:2]
            listener.close()  # Ray Serve's proxy takes it
            _serve_on_cluster(arguments, source, service, host=host, port=port, token=used, on_ready=ready)
            return
        log_as_json()
        note = NOTE if arguments.demo else ""
        api = Api(service, token=used, note=note, allowed_hosts=arguments.allowed_host)
        run_server(Server(api, on_ready=ready), listener)


def _serve_on_cluster(
    arguments: Namespace,
    source: NetworkSource,
    service: Service,
    *,
    host: str,
    port: int,
    token: str,
    on_ready: Callable[[], None],
) -> None:
    """Serve replicas until SIGTERM or SIGINT; `service` keeps their folder locked."""
    from trust_tta.distributed.cluster import connected
    from trust_tta.distributed.serving import ReplicaConfig, resources_per_replica, serve_until_signal

    replicas, network = arguments.replicas or 2, service.network
    with connected(arguments.address) as ray:
        config = ReplicaConfig(
            source=source,
            method=arguments.method,
            folder=str(service.folder.resolve()),
            token=token,
            device=arguments.device,
            settings=service.settings,
            allowed_hosts=tuple(arguments.allowed_host),
            **resources_per_replica(ray.cluster_resources(), replicas, device=arguments.device),
        )
        serve_until_signal(config, network, host=host, port=port, replicas=replicas, on_ready=on_ready)
    service.stop()


def _check(arguments: Namespace) -> None:
    """Check the flags that can be checked before PyTorch is imported."""
    resolve(arguments.method, METHODS, group="trust_tta.methods")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: give a number from 0 to 65535")
    check_engine(arguments, "replicas")
    if arguments.replicas is not None and not 1 <= arguments.replicas <= 1024:
        raise ConfigError(f"--replicas {arguments.replicas}: give a number from 1 to 1024")
    if arguments.engine != "local" and arguments.demo:
        raise ConfigError("--demo is for one process; omit --engine ray")


def _read_token(arguments: Namespace) -> str | None:
    """The token of the flag or the environment, checked to fit into an HTTP header."""
    token = arguments.token or os.environ.get(TOKEN_VARIABLE)
    if token and not re.fullmatch("[!-~]+", token):
        where = "--token" if arguments.token else TOKEN_VARIABLE
        raise ConfigError(f"{where} holds a space, a line break or a character beyond ASCII; use visible ASCII alone")
    return token or None


def _network_source(arguments: Namespace) -> NetworkSource:
    from trust_tta.serve.network import NetworkSource

    checkpoint = arguments.checkpoint
    if checkpoint is None and arguments.model is None:
        checkpoint = DEFAULT_CHECKPOINT
    elif checkpoint is not None and Path(checkpoint).exists():
        checkpoint = str(Path(checkpoint).resolve())
    classes = read_class_names(arguments.classes) if arguments.classes else None
    source = NetworkSource(checkpoint, arguments.model, arguments.preprocessing, classes)
    folder = Path(arguments.reference or os.devnull)
    if classes is None and folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir()):
        opened, names = source.open(), read_class_names(folder)
        if opened.classes is None and opened.num_classes == len(names):
            return replace(source, classes=names)
    return source


def _make_service(arguments: Namespace, source: NetworkSource, folder: Path) -> Service:
    from trust_tta.bench.environment import choose_device
    from trust_tta.ops.cpu.native import load_all
    from trust_tta.serve.demo import GUARD, OPTIONS
    from trust_tta.serve.network import WARM_UP_IMAGES, open_network, read_folder
    from trust_tta.serve.service import Service
    from trust_tta.serve.settings import Settings

    settings = Settings() if arguments.batch_size is None else Settings(batch_size=arguments.batch_size)
    options = OPTIONS.get(arguments.method) if arguments.demo else None
    device = choose_device(arguments.device)
    on_gpu = device.type != "cpu"
    warm_up = (1, WARM_UP_IMAGES, settings.batch_size) if on_gpu else (WARM_UP_IMAGES,)
    if not on_gpu:  # kernels are compiled before the service reports that it is ready
        load_all()
    network = open_network(source, arguments.method, options=options, device=device, warm_up=warm_up)
    service = Service(network, folder, guard=GUARD if arguments.demo else None, settings=settings)
    if arguments.reference and not service.calibrated:
        say(f"calibrating the alarms on {arguments.reference}")
        service.calibrate(read_folder(Path(arguments.reference), network.preprocessing, batch=settings.batch_size))
    return service
