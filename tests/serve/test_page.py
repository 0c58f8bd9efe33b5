"""The live page in a real browser: what it shows is what happened, and its buttons do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.report.browser import CHROMIUM
from tests.serve.browser import Tab, browser
from tests.serve.services import CLASSES, PRIVATE, TOKEN, picture, serving
from trust_tta.serve.service import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium in /usr/bin"),
]

CARD = "document.querySelector('[data-stream=left]')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[httpx.Client, Service]]:
    with serving(tmp_path) as served:
        yield served


def send(client: httpx.Client, stream: str, *, count: int = 4) -> list[dict[str, object]]:
    """Predictions of so many pictures, each of which is told to be a bee."""
    answers = []
    for seed in range(count):
        answers.append(client.post(f"/predict?stream={stream}", content=picture(seed=seed)).json())
        client.post("/feedback", json={"id": answers[-1]["id"], "label": "bee"})
    return answers


def test_page_shows_predictions(tab: Tab, served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    page = client.get("/").text
    assert 'id="loading" role="status">loading' in page  # until the first message arrives
    assert 'id="empty" hidden' in page
    tab.open(str(client.base_url))
    tab.wait_for("document.getElementById('connection').textContent === 'live'")
    tab.wait_for("document.getElementById('loading').hidden")
    assert f"curl -F image=@photo.jpg {str(client.base_url).rstrip('/')}/predict" in tab.evaluate(
        "document.getElementById('empty').innerText"
    )
    answers = send(client, "left")
    send(client, "right", count=1)
    tab.wait_for("document.querySelectorAll('.card').length === 2")
    tab.wait_for(f"{CARD}.querySelectorAll('.shown .right, .shown .wrong').length === 4")
    shown = tab.evaluate(f"[...{CARD}.querySelectorAll('.shown li')].map((item) => [item.title, item.className])")
    for answer, (title, tone) in zip(answers, shown, strict=True):
        right = answer["label"] == "bee"
        verdict = "right" if right else "wrong"
        assert title == f"{answer['label']}, {100 * float(str(answer['confidence'])):.0f} %, {verdict}"
        assert tone == verdict
        assert answer["label"] in CLASSES
    numbers = tab.evaluate(f"[...{CARD}.querySelectorAll('.number b')].map((number) => number.textContent)")
    assert numbers[0] == f"{25 * sum(answer['label'] == 'bee' for answer in answers)} %"
    assert tab.evaluate(f"{CARD}.querySelector('.counts').textContent") == "4 images, 4 batches"
    tab.wait_for(f"{CARD}.querySelector('[data-chart=entropy] .curve')")
    assert tab.evaluate("document.getElementById('empty').hidden")
    assert tab.errors == []


def test_buttons_ask_for_the_token_and_change_the_stream(tab: Tab, served: tuple[httpx.Client, Service]) -> None:
    client, service = served
    send(client, "left", count=1)
    tab.open(str(client.base_url))
    tab.wait_for(CARD)

    def paused() -> bool:
        return service.streams.open("left").paused

    def press(action: str, token: str | None) -> None:
        tab.evaluate(f"{CARD}.querySelector('[data-action={action}]').click()")
        if token is not None:
            tab.wait_for("document.getElementById('ask').open")
            tab.evaluate(f"document.getElementById('token').value = '{token}'")
            tab.press_enter()

    tab.evaluate(f"{CARD}.querySelector('[data-action=pause]').click()")
    tab.evaluate("document.getElementById('cancel').click()")
    tab.wait_for("!document.getElementById('ask').open")
    press("pause", "wrong")
    tab.wait_for(f"{CARD}.querySelector('.reply').textContent === 'this is not the token'")
    assert not paused()
    press("pause", TOKEN)
    tab.wait_for(f"{CARD}.querySelector('.badge').textContent === 'paused'")
    assert paused()
    press("resume", None)
    tab.wait_for(f"{CARD}.querySelector('[data-action=pause]')")
    assert not paused()
    for action, done in (("rollback", "rolled back"), ("reset", "back to the source")):
        press(action, None)
        tab.wait_for(f"{CARD}.querySelector('.reply').textContent === '{done}'")
    tab.wait_for("document.querySelectorAll('#events tr').length === 4")
    done = tab.evaluate("[...document.querySelectorAll('#events tr')].map((row) => row.cells[3].textContent)")
    assert done == ["back to the source", "rolled back", "resumed", "paused"]
    assert [error for error in tab.errors if "403" not in error] == []


def test_removed_stream_leaves_the_page(tab: Tab, served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    for stream in ("left", "right"):
        send(client, stream, count=1)
    tab.open(str(client.base_url))
    tab.wait_for("document.querySelectorAll('.card').length === 2")
    client.delete("/streams/left", headers=PRIVATE)
    tab.wait_for("document.querySelectorAll('.card').length === 1")
    assert tab.evaluate("document.querySelector('.card h2').textContent") == "right"


@pytest.mark.parametrize("width", [390, 820, 1400])
def test_page_fits_and_follows_dark_mode(tab: Tab, served: tuple[httpx.Client, Service], width: int) -> None:
    client, _ = served
    send(client, "left", count=2)
    client.post("/streams/left/pause", headers=PRIVATE)
    grounds = []
    for dark in (False, True):
        tab.open(str(client.base_url), width=width, dark=dark)
        tab.wait_for(CARD)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(251, 250, 248)", "rgb(20, 22, 26)"]


def test_clock_set_back_does_not_freeze_charts(tab: Tab, served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    send(client, "left", count=2)
    tab.open(str(client.base_url))
    tab.wait_for(f"{CARD}?.querySelector('[data-chart=entropy] .curve')")
    # One script, so that no answer of the service comes between.
    news = "{...streams.get('left'), card: undefined, points: [[T, 0.25, 1, 1, 1, 1, 1]]}"
    script = f"update({{now: T, names: ['left'], events: [], streams: [{news}]}}); draw();"
    last = f"[{CARD}.querySelector('[data-chart=entropy] b').textContent, streams.get('left').points.length]"
    assert tab.evaluate(script.replace("T", "1000") + script.replace("T", "1001") + last) == ["0.25", 2]
