"""Checkpoints that were made to hurt: each ends in one line, no code runs, and little memory is taken."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import trust_tta as tt
from tests.models.networks import TINY, tiny_network
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.checkpoint import Checkpoint, load_checkpoint

BIAS, WEIGHT = "classifier.head.bias", "classifier.head.weight"


def state() -> dict[str, torch.Tensor]:
    return {name: tensor.float().contiguous() for name, tensor in tiny_network().state_dict().items()}


@contextmanager
def little_memory(limit: int = 1 << 30) -> Iterator[None]:
    """Fail where the process would grow by more than `limit` bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < limit, f"{grown} bytes were taken"


def refused(source: Any, words: str, *, limit: int = 1 << 30) -> str:
    model = tt.VMamba(TINY)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with little_memory(limit), pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        load_checkpoint(model, source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    message.encode()  # what cannot be printed would end in a traceback
    return message


ODD: dict[str, tuple[torch.Tensor, str]] = {
    "float8": (torch.zeros(3).to(torch.float8_e4m3fn), r"of a dtype that no network has: .*bias \(float8_e4m3fn\)"),
    "complex": (torch.zeros(3, dtype=torch.complex64), "of whole numbers|of a dtype"),
    "sparse": (torch.zeros(3).to_sparse(), r"not a plain tensor: .*bias \(of layout sparse_coo\)"),
    "meta": (torch.zeros(3, device="meta"), r"not a plain tensor: .*bias \(without data\)"),
    "huge": (torch.zeros(1).expand(10**12), r"\(1000000000000,\) in the file, \(3,\) in the network"),
    "huge matrix": (torch.zeros(1, 1, 1, 1).expand(10**6, 10**6, 1, 1), r"\(1000000, 1000000, 1, 1\) in the file"),
    "1e300": (torch.full((3,), 1e300, dtype=torch.float64), "with values beyond float32: .*bias"),
    "nan": (torch.tensor([0.0, torch.nan, 0.0]), "with values that are not finite: .*bias"),
    "booleans": (torch.zeros(3, dtype=torch.bool), "of whole numbers"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", [True, False], ids=["file", "in memory"])
def test_tensors_that_no_network_can_use(tmp_path: Path, kind: str, file: bool) -> None:
    tensor, words = ODD[kind]
    content: Any = state() | {BIAS: tensor}
    if file:
        torch.save(content, tmp_path / "net.pth")
        content = tmp_path / "net.pth"
    refused(content, words)


def test_a_huge_projection_is_never_copied() -> None:
    """Its shape is looked at before the two ones at its end are taken off."""
    name = "layers.0.blocks.0.op.in_proj.weight"
    refused(state() | {name: torch.zeros(1, 1, 1, 1).expand(10**6, 10**6, 1, 1)}, "of another shape")


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    refused(state() | {BIAS: tensor}, "not a plain tensor")


def test_float8_in_safetensors(tmp_path: Path) -> None:
    save_file(state() | {BIAS: torch.zeros(3).to(torch.float8_e5m2)}, tmp_path / "net.safetensors")
    refused(tmp_path / "net.safetensors", "of a dtype that no network has")


def test_names_that_cannot_be_printed(tmp_path: Path) -> None:
    for name in ("\udcff\udc80", "\x1b[31mred\x1b[0m", "line\nbreak", "x" * 100_000):
        message = refused(state() | {name: torch.zeros(1)}, "1 unknown to the network")
        assert "\x1b" not in message


def test_a_name_in_safetensors_that_is_no_utf8(tmp_path: Path) -> None:
    header = b'{"\xff\xfe": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (tmp_path / "net.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(tmp_path / "net.safetensors", "cannot be read as a checkpoint")


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": ' * 5000 + b"1" + b"}" * 5000,
        b"{}",
        b"null",
        b'{"a": 1}',
        b'{"__metadata__": 3}',
        b"\x00",
    ],
    ids=["brackets", "nested", "empty", "null", "number", "metadata", "zero"],
)
def test_headers_of_safetensors(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "net.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    refused(tmp_path / "net.safetensors", "cannot be read as a checkpoint|holds no parameters")


def test_a_header_of_safetensors_that_states_a_huge_length(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    refused(tmp_path / "net.safetensors", "cannot be read as a checkpoint")


METADATA: dict[str, tuple[dict[str, str], str]] = {
    "infinite size": (
        {"preprocessing": '{"size": Infinity, "mean": [0, 0, 0], "std": [1, 1, 1]}'},
        "Infinity is not valid in JSON",
    ),
    "huge size": (
        {"preprocessing": '{"size": 1000000000, "mean": [0, 0, 0], "std": [1, 1, 1]}'},
        "give a value <= 8192",
    ),
    "nan mean": (
        {"preprocessing": '{"size": 32, "mean": [NaN, 0, 0], "std": [1, 1, 1]}'},
        "NaN is not valid in JSON",
    ),
    "deep preprocessing": ({"preprocessing": "[" * 100_000}, "the preprocessing stated in .* nested deeper than 64"),
    "deep overrides": ({"overrides": '{"a":' * 100_000}, "the overrides stated in .* nested deeper than 64"),
    "list of overrides": ({"overrides": "[1]"}, r"the overrides stated in .* \(it is \[1\]\)"),
    "digits": ({"num_classes": "1" * 5000}, "the num_classes stated in"),
    "words": ({"num_classes": "ten"}, "the num_classes stated in"),
    "infinite ratio": ({"overrides": '{"ssm_ratio": Infinity}'}, "Infinity is not valid in JSON"),
    "nan ratio": ({"overrides": '{"ssm_ratio": NaN}'}, "NaN is not valid in JSON"),
    "huge network": ({"overrides": '{"dims": [16384, 16384], "depths": [99, 99]}'}, "parameters; at most 1e"),
    "classes": ({"classes": "[1, 2]"}, "a class name is not a string"),
    "variant": ({"variant": "vmamba_nanno"}, "did you mean 'vmamba_nano'"),
    "a module as variant": ({"variant": "os:getcwd"}, "names a network outside of this package, 'os:getcwd'"),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata(tmp_path: Path, kind: str) -> None:
    metadata, words = METADATA[kind]
    save_file(state(), tmp_path / "net.safetensors", metadata={"variant": "vmamba_nano"} | metadata)
    with little_memory(), pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        Checkpoint.open(tmp_path / "net.safetensors").load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/data/0"])
def test_a_zip_that_expands_is_refused_before_it_does(tmp_path: Path, name: str) -> None:
    torch.save({"model": state()}, tmp_path / "plain.pth")
    path = tmp_path / "net.pth"
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        root = plain.namelist()[0].split("/")[0]
        for entry in plain.namelist():
            bomb.writestr(entry, plain.read(entry))
        with bomb.open(name.replace("archive", f"{root}-more"), "w", force_zip64=True) as file:
            for _ in range(400):
                file.write(bytes(1 << 20))
    assert path.stat().st_size < 4 << 20
    refused(path, "compressed, which PyTorch never does", limit=100 << 20)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, legacy: bool, keep: float) -> None:
    torch.save(state(), tmp_path / "net.pth", _use_new_zipfile_serialization=not legacy)
    content = (tmp_path / "net.pth").read_bytes()
    (tmp_path / "net.pth").write_bytes(content[: int(keep * len(content))])
    refused(tmp_path / "net.pth", "cannot be read as a checkpoint")


def complaint(path: Path) -> str:
    try:
        load_checkpoint(tt.VMamba(TINY), path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_flipped_bits_never_end_in_a_traceback(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for suffix, write in ((".pth", torch.save), (".safetensors", save_file)):
        path = tmp_path / f"net{suffix}"
        write(state(), path)
        whole = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(60):
            content = whole.copy()
            places = rng.integers(0, min(len(content), 6000), 3)
            content[places] ^= rng.integers(1, 256, 3, dtype=np.uint8)
            path.write_bytes(content.tobytes())
            assert "\n" not in complaint(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "net.pth").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on disk
    refused(tmp_path / "net.pth", "has 1099511627776 bytes; files up to 8589934592 bytes are read")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "net.pth")
    refused(tmp_path / "net.pth", "no checkpoint at")


def stub_class(module: str, name: str, base: type = object) -> type:
    """A class that can be pickled by a name that no package here has."""
    made = type(name, (base,), {"__module__": module, "mean": lambda self: 0.0})
    made.__qualname__ = name
    return made


@contextmanager
def installed(*classes: type) -> Iterator[None]:
    """Make modules of these classes importable for as long as a file is written."""
    modules: dict[str, types.ModuleType] = {}
    for made in classes:
        parts = made.__module__.split(".")
        for i in range(len(parts)):
            modules.setdefault(".".join(parts[: i + 1]), types.ModuleType(".".join(parts[: i + 1])))
        setattr(modules[made.__module__], made.__name__, made)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def test_a_file_of_another_training_framework_is_read_without_its_classes(tmp_path: Path) -> None:
    """As mmengine writes them: a hub of messages with histories, arrays of NumPy, a configuration."""
    history = stub_class("mmengine.logging.history_buffer", "HistoryBuffer")
    config = stub_class("mmengine.config.config", "ConfigDict", dict)
    hook = stub_class("lightning.callbacks", "Checkpointing")
    with installed(history, config, hook):
        buffer = history()
        buffer.__dict__.update(_log_history=np.arange(5.0), _count_history=np.ones(5, np.int64), _max_length=10)
        buffer.__dict__["_statistics_methods"] = OrderedDict(mean=np.float64(3))
        content = {
            "meta": {"cfg": config(a=1, b=config(c=[1, 2])), "seed": np.int64(4), "time": np.datetime64("2024-01-01")},
            "message_hub": {"log_scalars": OrderedDict(loss=buffer), "runtime_info": OrderedDict(), "hook": hook()},
            "state_dict": state(),
            "path": Path("work_dirs/a"),
            "counts": defaultdict(int, a=1),
        }
        torch.save(content, tmp_path / "net.pth")
    assert "mmengine" not in sys.modules
    model = tt.VMamba(TINY)
    load_checkpoint(model, tmp_path / "net.pth")
    assert torch.equal(model.state_dict()[WEIGHT], state()[WEIGHT])


def test_a_pickled_network_says_what_to_save_instead(tmp_path: Path) -> None:
    network = stub_class("their.models", "VSSM")
    with installed(network):
        torch.save(network(), tmp_path / "net.pth")
    refused(
        tmp_path / "net.pth",
        r"holds a pickled 'their.models.VSSM', and loading a file never executes code; save model.state_dict",
    )


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "function", [subprocess.call, exec, eval, __import__, io.open, pickle.loads, compile], ids=lambda f: f.__name__
)
def test_functions_of_the_standard_library_are_not_called(
    tmp_path: Path, function: Callable[..., Any], legacy: bool
) -> None:
    content = {"model": state(), "run": Calls(function, str(tmp_path / "ran"))}
    torch.save(content, tmp_path / "net.pth", _use_new_zipfile_serialization=not legacy)
    refused(tmp_path / "net.pth", "asks for the Python object '.*', and loading a file never executes code")
    assert not (tmp_path / "ran").exists()


def test_functions_of_other_packages_are_not_called(tmp_path: Path) -> None:
    """A stand-in takes their place: NumPy is installed here, and its `save` writes nothing."""
    torch.save({"model": state(), "run": Calls(np.save, str(tmp_path / "ran"), [1])}, tmp_path / "net.pth")
    load_checkpoint(tt.VMamba(TINY), tmp_path / "net.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["net.pth"]


def test_no_error_shows_a_network() -> None:
    model = tt.VMamba(TINY)
    attempts: list[Callable[[], Any]] = [
        lambda: load_checkpoint(model, {"a": torch.zeros(1)}),
        lambda: load_checkpoint(model, {"model": model}),
        lambda: load_checkpoint(model, model),  # type: ignore[arg-type]
        lambda: tt.create_model("vmamba_nano", num_classes=model),  # type: ignore[call-overload]
        lambda: tt.create_model(model),  # type: ignore[call-overload]
        lambda: tt.create_model("vmamba_nano", checkpoint=model),  # type: ignore[call-overload]
        lambda: model(model),
    ]
    for attempt in attempts:
        with pytest.raises(tt.TrustError) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert "Conv2d" not in str(caught.value)
        assert len(str(caught.value)) < 600
