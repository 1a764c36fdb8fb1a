"""What server tests share: a server in a thread of this process, on an engine that answers exactly. No tests."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import uvicorn

from conftest import DEMO
from engine_solo import DEADLOCK_S, Gate, assert_nothing_leaked, engine, solo
from hybrid_moe_ext.engine import Engine
from hybrid_moe_ext.server import ServerOptions
from hybrid_moe_ext.server.app import create_app
from hybrid_moe_ext.server.metrics import Metrics
from hybrid_moe_ext.server.run import Server, bind

MODEL = "demo"
KEY = "a secret"
PROMPTS = ["The licenses for most software are designed to", "Redistribution and use in source", "This program is"]


@dataclass
class Host:
    url: str
    engine: Engine
    gate: Gate
    server: uvicorn.Server

    def openai(self, **more: object) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": DEADLOCK_S} | more
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def post(self, path: str, **more: object) -> httpx.Response:
        return httpx.post(self.url + path, timeout=DEADLOCK_S, **more)

    def wait_until_idle(self) -> None:
        """Nothing waits, nothing runs: what was cancelled is gone."""
        wait_for(lambda: (m := self.engine.metrics()).running_now == 0 and m.queued_now == 0)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenize(text))

    def expected(self, text: str, n: int) -> str:
        """The greedy continuation by a plain Llama; none of its choices is a close one."""
        return self.expected_after(self.tokens(text), n)

    def expected_after(self, prompt: tuple[int, ...], n: int) -> str:
        tokens, margins = solo(MODEL, prompt, n)
        assert min(margins) > 2e-3, "choose another prompt"
        return self.engine.detokenize(tokens).decode()


@contextlib.contextmanager
def neighbour_of(host: Host) -> Iterator[None]:
    """A stream that runs during the test, and is what it is alone."""
    n, got = 24, []
    request = {
        "model": MODEL,
        "prompt": PROMPTS[0],
        "max_tokens": n,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    chunks = host.openai(api_key=KEY).completions.create(**request, stream=True)
    got.append(next(chunks).choices[0].text)
    yield
    got += [c.choices[0].text for c in chunks]
    assert "".join(got) == host.expected(PROMPTS[0], n)


def headers(**more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in more.items()
    }


def error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"} and told["message"]
    return told


def said(host: Host, text: str, bias: Sequence[int] = (), **more: object):
    """What the client gets when the model says this: a grammar makes it, of the tokens in `bias` where that is possible."""
    rule = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 200}
    extra = {"grammar": rule, "logit_bias": {str(token): 100 for token in bias}}
    return host.openai().chat.completions.create(**request, extra_body=extra, **more)


def joined(chunks) -> tuple[str, str, list, str]:
    """Of a stream: reasoning, content, calls, the reason of its end."""
    choices = [chunk.choices[0] for chunk in chunks]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    return reasoning, "".join(choice.delta.content or "" for choice in choices), calls, choices[-1].finish_reason


def demo_with(folder: Path, template: str, control: Sequence[str] = ()) -> str:
    """The demo model with another chat template; `control`: texts that are control tokens, in the place of its last words."""
    for file in DEMO.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    told = json.loads((DEMO / "tokenizer.json").read_text())
    vocab, merges = told["model"]["vocab"], told["model"]["merges"]
    for text in control:
        word = max(vocab, key=vocab.__getitem__)
        id = vocab.pop(word)
        merges[:] = [merge for merge in merges if merge.replace(" ", "") != word]
        told["added_tokens"].append(told["added_tokens"][0] | {"id": id, "content": text, "special": True})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


def wait_for(is_so: object) -> None:
    end = time.monotonic() + DEADLOCK_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(engine_options: dict | None = None, path: str | None = None, **options: object) -> Iterator[Host]:
    """The demo model, or the one at `path`. Ends with the proof that no sequence is left in the engine."""
    gate, metrics = Gate(), Metrics()

    def on_step(report: object) -> None:
        metrics.on_step(report)
        gate(report)

    given = {"on_step": on_step} | (engine_options or {})
    made = engine(MODEL, **given) if path is None else Engine(path, n_ctx=512, n_threads=1, verbose=False, **given)
    limits = ServerOptions(**{"name": MODEL, "drain_s": 1} | options)
    ready = threading.Event()
    server = Server(create_app(made, limits, metrics), limits, ready.set)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run_on, args=(bound,), daemon=True)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    thread.start()
    try:
        assert ready.wait(DEADLOCK_S)
        yield Host(url, made, gate, server)
        gate.open()
        assert_nothing_leaked(made)
    finally:
        gate.open()
        server.should_exit = True
        thread.join(DEADLOCK_S)
        made.close()
    assert not thread.is_alive()
