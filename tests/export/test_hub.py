"""Saving for the Hugging Face hub and loading from it, with the real library; the hub is a server on the loopback."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trust_tta as tt
from trust_tta.errors import CheckpointError, ConfigError, StateError
from trust_tta.export.hub import CARD, CONFIG, STATE, adapted_from_pretrained, from_pretrained, save_pretrained
from trust_tta.models.checkpoint import Checkpoint


def small(name: str = "vmamba_tiny_s1l8_bn", **fields: Any) -> Any:
    torch.manual_seed(0)
    fields = fields or {"depths": (1, 1), "dims": (8, 16)}
    return tt.create_model(name, num_classes=5, preprocessing="cifar32", **fields).eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vmamba_tiny_s1l8_bn", {"depths": (1, 1), "dims": (8, 16)}),
        ("vim_tiny", {"image_size": (32, 32), "patch_size": 8, "stride": 8, "dim": 24, "depth": 2}),
        ("groupmamba_tiny", {"dims": (16, 32), "depths": (1, 1), "mlp_ratios": (2, 2), "stem_dim": 8}),
    ],
)
def test_saved_network_is_restored(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = small(name, **fields)
    model.classes = ("a", "b", "c", "d", "e")
    save_pretrained(model, tmp_path / "net", license="apache-2.0")
    again: Any = from_pretrained(tmp_path / "net")
    assert torch.equal(again(images()), model(images()))
    assert (again.classes, again.preprocessing, again.config) == (model.classes, model.preprocessing, model.config)
    found = Checkpoint.open(f"hf:{tmp_path / 'net'}")
    assert found.license == "apache-2.0"
    assert found.variant.startswith(name)  # of the variants that it may be seen as, the nearest
    card = (tmp_path / "net" / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: "trust-tta"\nlicense: "apache-2.0"\n')
    assert json.loads((tmp_path / "net" / CONFIG).read_text())["variant"] == found.variant


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tide", {}),
        ("tent", {"lr": 1e-2}),
        ("trust", {"orders": ["abcd", "badc"], "lr": 1e-3}),
        ("sar", {"statistics": "stream"}),
        ("bn_ema", {}),
        ("neo", {}),
    ],
)
def test_saved_method_continues_bit_for_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    before = small()
    method: Any = tt.create_method(name, small(), **options)
    method(images(1))
    save_pretrained(method, tmp_path, adapted_to="noise that a test has drawn")
    again: Any = adapted_from_pretrained(tmp_path)
    assert (again.name, again.options) == (name, method.options)
    assert torch.equal(again(images(2)), method(images(2)))
    again.reset()
    fresh: Any = tt.create_method(name, before, **options)
    assert torch.equal(again(images(1)), fresh(images(1)))


def test_the_network_of_a_state_predicts_as_the_method_does(tmp_path: Path) -> None:
    method = tt.create_method("tide", small(), views="none", correct_prior=False)
    method(images(1))
    save_pretrained(method, tmp_path, adapted_to="noise")
    alone = from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(alone(images(2)).log_softmax(1), method.evaluate(images(2)))


def test_card_states_the_target(tmp_path: Path) -> None:
    method = tt.create_method("tent", small(), lr=1e-2)
    method(images())
    save_pretrained(method, tmp_path, adapted_to="CIFAR-10-C, fog")
    card = (tmp_path / CARD).read_text()
    assert "# vmamba_tiny_s1l8_bn, adapted to CIFAR-10-C, fog" in card
    assert "by `tent` (lr=0.01): 1 batches, 1 updates" in card
    assert "needs the method" in card
    library = pytest.importorskip("huggingface_hub")
    data = library.ModelCard.load(tmp_path / CARD).data
    assert (data.library_name, data.pipeline_tag) == ("trust-tta", "image-classification")
    assert "test-time-adaptation" in data.tags


def test_invalid_folders_and_methods_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapted_to is missing"):
        save_pretrained(tt.create_method("tent", small()), tmp_path)
    with pytest.raises(ConfigError, match="adapted_to goes with a method"):
        save_pretrained(small(), tmp_path, adapted_to="fog")
    with pytest.raises(ConfigError, match="the network is a Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    save_pretrained(small(), tmp_path)
    with pytest.raises(StateError, match="holds a network and no adapted state; use from_pretrained"):
        adapted_from_pretrained(tmp_path)


def test_a_state_of_another_network_is_refused(tmp_path: Path) -> None:
    method = tt.create_method("tent", small())
    method(images())
    save_pretrained(method, tmp_path / "one", adapted_to="noise")
    save_pretrained(small("vmamba_tiny_s1l8_bn", depths=(1, 1), dims=(12, 16)), tmp_path / "other")
    (tmp_path / "one" / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(StateError, match="does not fit the network beside it"):
        adapted_from_pretrained(tmp_path / "one")
    assert (tmp_path / "one" / STATE).is_file()


class Hub(ThreadingHTTPServer):
    """As much of the hub as a push and a download ask for: repositories in memory, files sent within the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            self.answer({"url": f"{self.server.address}/me/net", "name": "me/net"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            self.answer({"files": [{**f, "shouldIgnore": False, "oid": None} for f in files]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    value = operation["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self.answer({"commitUrl": f"{self.server.address}/me/net/commit/{'a' * 40}", "commitOid": "a" * 40})
        else:
            self.answer({"error": "unknown"}, status=404)

    def do_GET(self) -> None:
        self.send_file(body=True)

    def do_HEAD(self) -> None:
        self.send_file(body=False)

    def send_file(self, *, body: bool) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        found = re.fullmatch(r"/me/net/resolve/[^/]+/(.+)", self.path)
        if found and found[1] in self.server.files:
            content = self.server.files[found[1]]
            self.send_response(200)
            for name, value in {
                "Content-Length": str(len(content)), "ETag": f'"{found[1]}"', "X-Repo-Commit": "a" * 40,
            }.items():  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if body else b"")
        elif self.path.startswith("/api/models/me/net"):
            files = self.server.files.items()
            if "/tree/" in self.path:
                self.answer([{"type": "file", "path": n, "size": len(c), "oid": "b" * 40} for n, c in files])
            else:
                siblings = [{"rfilename": name} for name, _ in files]
                self.answer({"id": "me/net", "sha": "a" * 40, "siblings": siblings, "private": False, "tags": []})
        else:
            self.answer({"error": "unknown"}, status=404)

    def answer(self, content: Any, *, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="needs the extra 'hub'")
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


PUSH = """
import torch, trust_tta as tt
from trust_tta.export.hub import adapted_from_pretrained, from_pretrained, push_to_hub
torch.manual_seed(0)
model = tt.create_model("vmamba_tiny_s1l8_bn", num_classes=5, preprocessing="cifar32", depths=(1, 1), dims=(8, 16))
method = tt.create_method("tide", model.eval())
images = torch.randn(8, 3, 32, 32)
method(images)
print(push_to_hub(method, "me/net", adapted_to="noise", license="mit", token="hf_none"))
again = adapted_from_pretrained("me/net")
assert torch.equal(again(images), method(images))
assert from_pretrained("me/net").config == model.config
from trust_tta.models import Checkpoint
assert Checkpoint.open("hf:me/net@main").license == "mit"
"""


def run_with(hub: Hub, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads the address of the hub once, when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_push_and_download_use_the_hub_interface(hub: Hub, tmp_path: Path) -> None:
    done = run_with(hub, PUSH, tmp_path)
    assert done.returncode == 0, f"{done.stderr}\n{hub.asked}"
    assert done.stdout.strip() == f"{hub.address}/me/net/commit/{'a' * 40}"
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors", "adaptation.safetensors"}
    assert b"adapted to noise" in hub.files["README.md"]


def test_errors_of_the_hub_are_one_line(hub: Hub, tmp_path: Path) -> None:
    code = (
        "import trust_tta as tt\nfrom trust_tta.models import Checkpoint\n"
        "try: Checkpoint.open('hf:me/nothing')\nexcept tt.TrustError as e: print(e)"
    )
    done = run_with(hub, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("'me/nothing' is not a folder here and cannot be fetched from the hub: ")
    assert done.stdout.count("\n") == 1


def test_folder_loads_without_huggingface_hub(tmp_path: Path) -> None:
    save_pretrained(small(), tmp_path)
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        f"from trust_tta.export.hub import from_pretrained\nfrom_pretrained({str(tmp_path)!r})\n"
        "from trust_tta import TrustError\n"
        "try: from_pretrained('me/net')\nexcept TrustError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "pip install 'trust-tta[hub]'" in done.stdout


def test_checkpoint_error_is_the_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        Checkpoint.open(f"hf:{tmp_path}")
