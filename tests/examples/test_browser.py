"""The example page in a real browser: a picture goes in as a user gives it, a class comes out."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import trust_tta as tt
from tests.report.browser import CHROMIUM, FLAGS
from trust_tta.data.sample import load_sample
from trust_tta.export import export_network

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
DRIVER = Path("/usr/bin/chromedriver")
READY = "started successfully on port "

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM.exists() and DRIVER.exists()), reason="needs chromium and chromedriver"),
    pytest.mark.skipif(not (EXAMPLE / "vendor").is_dir(), reason="needs examples/browser/get_runtime.sh"),
]
pytest.importorskip("onnxscript")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """A session of chromedriver, by the W3C's protocol."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = address
        options = {"binary": str(CHROMIUM), "args": [*FLAGS, "--window-size=900,800", f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.address += f"/session/{self('POST', '/session', wanted)['sessionId']}"

    def __call__(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if verb == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=verb)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def find(self, query: str) -> str:
        found = self("POST", "/element", {"using": "css selector", "value": query})
        return str(next(iter(found.values())))

    def text(self, query: str) -> str:
        return str(self("GET", f"/element/{self.find(query)}/text"))

    def wait_for(self, attribute: str) -> str:
        """The `data-*` attributes of the page's body."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            script = f"return document.body.dataset.{attribute} ?? ''"
            if value := self("POST", "/execute/sync", {"script": script, "args": []}):
                return str(value)
            time.sleep(0.1)
        raise AssertionError(f"the page never said {attribute}: {self.text('#status')}")


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        port = next(line.split(READY)[1].strip(" .\n") for line in process.stdout if READY in line)
        browser = Browser(f"http://127.0.0.1:{port}", profile)
        yield browser
        browser("DELETE", "")
    finally:
        process.terminate()
        process.wait(timeout=30)
        if process.stdout:
            process.stdout.close()


@contextmanager
def opened(folder: Path, network: Any) -> Iterator[Browser]:
    """The page with an exported network."""
    site = folder / "site"
    site.mkdir()
    for name in ("index.html", "app.js", "model.js", "vendor"):
        (site / name).symlink_to(EXAMPLE / name)
    export_network(network, "onnx", site / "network.onnx", pixels="uint8")
    with serving(site) as address, browsing(folder / "profile") as browser:
        browser("POST", "/url", {"url": address})
        assert browser.wait_for("ready") == "yes", browser.text("#status")
        yield browser


def show(browser: Browser, folder: Path, pixels: NDArray[np.uint8]) -> str:
    """The label that the page gives to a picture."""
    picture = folder / "picture.png"
    Image.fromarray(pixels).save(picture)
    browser("POST", f"/element/{browser.find('#file')}/value", {"text": str(picture)})
    return browser.wait_for("label")


def test_browser_classifies_a_picture(tmp_path: Path) -> None:
    images, labels = load_sample()
    with opened(tmp_path, "vmamba_nano_cifar10") as browser:
        assert browser.text("#network") == "network.onnx: 10 classes"
        assert show(browser, tmp_path, images[np.flatnonzero(labels == 8)[0]]) == "ship"
        assert browser.text("#result li").startswith("ship")


def test_mambavision_in_the_browser_agrees_with_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = tt.create_model("mambavision_tiny").eval()  # 32 M parameters, random ones
    images, _ = load_sample()
    pixels = np.kron(
        images[8], np.ones((7, 7, 1), dtype=np.uint8)
    )  # 224 x 224, which the page neither scales nor crops
    with torch.no_grad():
        expected = model(model.preprocessing(pixels)).softmax(1)[0].topk(1)
    with opened(tmp_path, model) as browser:
        assert show(browser, tmp_path, pixels) == f"class {int(expected.indices)}"
        assert f"{100 * float(expected.values):.1f} %" in browser.text("#result li")
