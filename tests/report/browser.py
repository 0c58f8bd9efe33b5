"""A page opened in headless Chromium: a script clicks through it, and what it returns comes back through the DOM."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip

# Downloads are caught instead of saved; errors of the page are gathered before its own script runs.
_BEFORE = """<script>
window.__errors = []; window.__saved = [];
addEventListener("error", (event) => __errors.push(event.message));
addEventListener("unhandledrejection", (event) => __errors.push(String(event.reason)));
URL.createObjectURL = (blob) => { __saved.push(blob); return "#saved"; };
</script>"""
_AFTER = """<script>
(async () => {
  const saved = async () => Promise.all(__saved.splice(0).map((blob) => blob.text()));
  const all = (query) => Array.from(document.querySelectorAll(query));
  const table = (query) => Array.from(document.querySelector(query).rows).filter((r) => r.style.display !== "none")
    .map((r) => Array.from(r.cells).filter((c) => c.style.display !== "none").map((c) => c.innerText.trim()));
  let out;
  try { out = { value: await (async () => { STEPS })() }; } catch (error) { out = { error: String(error) }; }
  out.errors = window.__errors;
  const mark = document.createElement("pre");
  mark.id = "outcome";
  const bytes = new TextEncoder().encode(JSON.stringify(out));
  mark.textContent = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  document.body.replaceChildren(mark);
})();
</script>"""


def browse(page: Path, steps: str, profile: Path, *, width: int = 1400, dark: bool = False) -> Any:
    """Run JavaScript `steps` in the page and return what it returns; an error in the page or the steps is raised."""
    html = page.read_text(encoding="utf-8")
    probe = page.with_name(f"probe_{page.name}")
    html = html.replace("<head>", f"<head>{_BEFORE}", 1).replace("</body>", _AFTER.replace("STEPS", steps) + "</body>")
    probe.write_text(html, encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(CHROMIUM), *FLAGS, *scheme, f"--user-data-dir={profile}", f"--window-size={width},1200"]
    wait = ["--virtual-time-budget=4000", "--dump-dom", probe.as_uri()]
    dumped = subprocess.run([*command, *wait], check=True, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="outcome">([^<]*)</pre>', dumped)
    assert found, dumped[:500]
    outcome = json.loads(base64.b64decode(found[1]))
    assert outcome["errors"] == []
    assert "error" not in outcome, outcome["error"]
    return outcome["value"]
