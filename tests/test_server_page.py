"""The page at /, in a headless Chromium: a chat, its speed, the requests, and the last prefill's layers, on the CPU and with a
device. Nothing is asked of another origin, and nothing is wrong on the console."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import chromium
from conftest import DEMO
from hybrid_moe_ext.server.timeline import Timeline
from server_host import MODEL, Host, demo_with, serving, wait_for

needs_chromium = pytest.mark.skipif(chromium.program() is None, reason="no chromium: apt-get install chromium")
QUESTION = (
    "May I copy and distribute this program, and must I then give its source code to whoever has it from me? " * 3
)
DONE, SPEED = "document.getElementById('stop').hidden", "document.getElementById('speed').textContent"
N_LAYERS = 2  # of the demo model, with experts


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving() as started:
        yield started


@pytest.fixture
def page(tmp_path: Path) -> Iterator[chromium.Page]:
    with chromium.browsing(tmp_path) as opened:
        yield opened


def ask(page: chromium.Page, n_tokens: int) -> None:
    page.value(f"document.getElementById('tokens').value = {n_tokens}; document.getElementById('temperature').value = 0; "
               "document.getElementById('text').focus()")  # fmt: skip
    page.type(QUESTION)
    page.press_enter()


def assert_clean(page: chromium.Page, url: str) -> None:
    assert page.complaints == []
    assert {
        asked.partition("?")[0] for asked in page.requests if not asked.startswith((url + "/", "data:", "about:"))
    } == set()


def bars(page: chromium.Page) -> list[str]:
    """What each bar of the timeline says."""
    page.value("document.getElementById('timeline-box').open = true")
    page.until("document.querySelectorAll('#timeline rect').length > 0")
    assert page.value(
        "[...document.querySelectorAll('#timeline rect')].every(r => r.getBBox().width > 0 && r.getBBox().x >= 0)"
    )
    return page.value("[...document.querySelectorAll('#timeline rect title')].map(t => t.textContent)")


def test_without_a_prefill_there_is_a_reason(host: Host) -> None:
    told = httpx.get(f"{host.url}/timeline").json()
    assert told["lanes"] == [] and told["why"] == "No prompt has been computed yet."


@needs_chromium
def test_a_chat_on_the_cpu(host: Host, page: chromium.Page) -> None:
    page.open(host.url + "/")
    page.until(f"document.getElementById('model').textContent.startsWith('{MODEL}')")
    page.value("document.getElementById('timeline-box').open = true")
    page.until("document.getElementById('timeline-why').textContent === 'No prompt has been computed yet.'")
    page.value("document.getElementById('running-box').open = true")
    host.gate.shut()
    ask(page, 8)
    host.gate.wait_until_held()
    row = page.until("document.querySelector('#running-table tbody tr')?.innerText")
    assert re.search(r"(prompt|writing|waiting|prefill)\s.*of \d+\s+\d+ of 8", row), row
    host.gate.open()
    page.until(f"{DONE} && /, 8 tokens, [\\d.]+ tokens\\/s/.test({SPEED})")
    assert re.match(r"first token after [\d.]+ s", page.value(SPEED))
    assert page.value("document.querySelector('p.assistant').textContent").strip()
    page.until("document.getElementById('running').textContent === 'no requests'")
    said = bars(page)
    assert {re.search(r"CPU layers, (layer \d+), .* ms from", bar)[1] for bar in said if "CPU layers" in bar}
    rows = [one for bar in said for one in re.findall(r"(\d+) rows", bar)]
    assert sum(map(int, rows)) % N_LAYERS == 0 and int(rows[0]) > 8
    title = page.value("document.getElementById('timeline-title').textContent")
    assert re.match(r"Layers of the last prefill: \d+ tokens in [\d.]+ ms, \d+ batch", title)
    assert page.value("document.querySelector('#timeline-table tbody tr').innerText").startswith("CPU")
    assert_clean(page, host.url)


@needs_chromium
def test_reasoning_is_apart(page: chromium.Page, tmp_path: Path) -> None:
    """This model's never ends, so that the answer stays empty."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<think>{# </think> #}"
    (tmp_path / "model").mkdir()
    with serving(path=demo_with(tmp_path / "model", template)) as host:
        page.open(host.url + "/")
        page.until(f"document.getElementById('model').textContent.startsWith('{MODEL}')")
        ask(page, 8)
        page.until(f"{DONE} && /, 8 tokens, [\\d.]+ tokens\\/s/.test({SPEED})")
        assert page.value("document.querySelector('details.reasoning[open] p').textContent").strip()
        assert page.value("document.querySelector('p.assistant').textContent") == ""
        assert_clean(page, host.url)


@pytest.fixture
def with_a_device(simgpu: Path, tmp_path: Path) -> Iterator[str]:
    """The command on the demo model, with a simulated GPU that experts stream to, and a key. Its URL."""
    (tmp_path / "key").write_text("a secret\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_MOE_", "SIMGPU_"))}
    clean |= {name: os.environ[name] for name in ("HYBRID_MOE_LIBRARY", "HYBRID_MOE_ISA") if name in os.environ}
    clean |= {"GGML_BACKEND_PATH": str(simgpu), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "serve", str(DEMO), "--port", "0", "--slp", "on",
        "-c", "512", "-t", "1", "--prefill-from", "64", "--n-parallel", "4", "--name", MODEL, "--api-key-file",
        str(tmp_path / "key"),
    ]  # fmt: skip
    with (tmp_path / "server.log").open("w+") as log:
        process = subprocess.Popen(command, env=clean, stderr=log)
        try:

            def url() -> str | None:
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                found = re.search(r"serving \S+ at\s+(http://[\d.:]+)/v1", (tmp_path / "server.log").read_text())
                return found[1] if found else None

            wait_for(url)
            yield str(url())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@needs_chromium
def test_a_key_and_a_device(with_a_device: str, tmp_path: Path) -> None:
    url = with_a_device
    assert httpx.get(f"{url}/timeline").status_code == httpx.get(f"{url}/running").status_code == 401
    (tmp_path / "profile").mkdir()
    with chromium.browsing(tmp_path / "profile") as page:
        page.open(url + "/")
        page.until("!document.getElementById('key-row').hidden")
        page.value("document.getElementById('key').focus()")
        page.type("a secret")
        page.press_enter()
        page.until(f"document.getElementById('model').textContent.startsWith('{MODEL}')")
        assert page.value("document.getElementById('key-row').hidden")
        ask(page, 4)
        page.until(f"{DONE} && /, 4 tokens/.test({SPEED})")
        said = bars(page)
        for lane in ("upload", "compute", "result"):
            of_lane = [bar for bar in said if re.match(rf"\S*GPU\S* {lane}, layer \d+", bar)]
            assert len(of_lane) >= N_LAYERS, (lane, said)
        assert any(" MB" in bar for bar in said if " upload" in bar)
        assert_clean(page, url)


def test_models_of_llama_cpps_own_are_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(host.engine)
    monkeypatch.setattr(timeline, "_prefill_layers", list)
    host.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    assert "smaller ones are not recorded" in timeline.read()["why"]
