"""The tutorials, followed as a reader would: Python, commands and the service in turn, in one folder."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.docs.pages import DOCS, PYTHON, SHELLS, blocks

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((DOCS / "guides").glob("tutorial_*.md"))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page: Path, tmp_path: Path) -> None:
    """One process runs the Python blocks, so that names live on, and the commands between them."""
    port = free_port()
    script = ["from tests.docs.test_tutorials import Shell", "shell = Shell()", "try:"]
    for block in blocks(page, PYTHON, *SHELLS):
        if block.marker:
            continue
        code = block.code if block.language == PYTHON else "\n".join(f"shell({line!r})" for line in block.lines)
        script.append(f"    exec(compile({code.replace('8000', port)!r}, {str(block)!r}, 'exec'), globals())")
    script += ["finally:", "    shell.close()"]
    (tmp_path / "tutorial.py").write_text("\n".join(script) + "\n", encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=900,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "answered" in done.stdout, "the service was not asked"
    assert list(tmp_path.glob("runs/*.html"))


class Shell:
    """Runs the lines of a page's shell blocks; `trust-tta serve` stays up until `close`."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None

    def __call__(self, line: str) -> None:
        program, *words = shlex.split(line)
        command = [sys.executable, "-m", "trust_tta", *words]
        if program == "curl":
            self.ask(words)
        elif words[0] == "serve":
            self.server = subprocess.Popen(command)
            self.wait_until_ready(words[words.index("--port") + 1])
        else:
            subprocess.run(command, check=True)

    def wait_until_ready(self, port: str) -> None:
        for _ in range(600):
            assert self.server is not None
            assert self.server.poll() is None, "the service ended"
            try:
                if httpx.get(f"http://localhost:{port}/v2/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the service is not ready after a minute")

    def ask(self, words: list[str]) -> None:
        """`curl URL`, or `curl -F image=@FILE URL`."""
        if words[0] == "-F":
            file = Path(words[1].removeprefix("image=@"))
            answer = httpx.post(f"http://{words[2]}", files={"image": file.read_bytes()}, timeout=60)
            assert {"class", "label", "confidence", "stream", "adapted"} <= answer.json().keys()
        else:
            answer = httpx.get(f"http://{words[0]}")
        assert answer.status_code == 200
        print("answered", words[-1])  # noqa: T201

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(30) == 0
