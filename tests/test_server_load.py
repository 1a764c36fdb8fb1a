"""Many clients of every kind at once: those who stay get what they would get alone, and nothing is left of those who go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from engine_solo import DEADLOCK_S
from server_host import MODEL, PROMPTS, Host, serving, wait_for

# More by hand: HYBRID_MOE_ variables are the plug-in's, so this one has another name.
N_REQUESTS = int(os.environ.get("SERVER_LOAD_REQUESTS", "200"))
FIRST = int(os.environ.get("SERVER_LOAD_FIRST", "0"))  # its seed; others of the same number are other requests
N_PORTIONS = 10  # after each of them what is held is counted
TEXT = "/v1/completions"


def body(prompt: str, n: int, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True} | more


def texts(answer: httpx.Response) -> list[str]:
    data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line)["choices"][0]["text"] for line in data[:-1]]


class Client:
    """One of a kind that chance chooses; returns which."""

    def __init__(self, host: Host):
        self._host = host

    def __call__(self, seed: int) -> str:
        rng = random.Random(seed)
        kind = rng.choice([self.whole, self.streamed, self.leaves, self.gives_up, self.wrong, self.breaks_off])
        kind(rng)
        return kind.__name__

    def whole(self, rng: random.Random) -> None:
        prompt, n = rng.choice(PROMPTS), rng.randint(1, 16)
        answer = self._host.post(TEXT, json=body(prompt, n))
        assert answer.status_code == 200, answer.text
        assert (
            answer.json()["choices"][0]["text"]
            == self._host.expected(prompt, 16)[: len(answer.json()["choices"][0]["text"])]
        )
        assert answer.json()["usage"]["completion_tokens"] == n

    def streamed(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        with httpx.stream(
            "POST", self._host.url + TEXT, json=body(prompt, 16, stream=True), timeout=DEADLOCK_S
        ) as answer:
            assert "".join(texts(answer)) == self._host.expected(prompt, 16)

    def leaves(self, rng: random.Random) -> None:
        n = rng.randint(0, 6)
        request = body(rng.choice(PROMPTS), 300, stream=True)
        with httpx.stream("POST", self._host.url + TEXT, json=request, timeout=DEADLOCK_S) as answer:
            for i, _ in enumerate(answer.iter_lines()):
                if i >= n:
                    return

    def gives_up(self, rng: random.Random) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(self._host.url + TEXT, json=body(rng.choice(PROMPTS), 300), timeout=rng.uniform(0.01, 0.2))

    def wrong(self, rng: random.Random) -> None:
        wrong = rng.choice(
            [{"temperature": "x"}, {"prompt": "free " * 600}, {"n": 3}, {"x": 1}, {"grammar": "("}, {"prompt": None}]
        )
        answer = self._host.post(TEXT, json=body("Hello", 5) | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["message"]

    def breaks_off(self, rng: random.Random) -> None:
        """In the middle of its own request, or right after it."""
        data = json.dumps(body(rng.choice(PROMPTS), 300)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        whole = head.encode() + data
        address = ("127.0.0.1", int(self._host.url.rpartition(":")[2]))
        with socket.create_connection(address, DEADLOCK_S) as connection:
            connection.sendall(whole[: rng.choice([rng.randint(0, len(whole)), len(whole)])])


def test_load() -> None:
    # Without the store, which is meant to fill memory.
    with serving({"store_mib": 0, "n_kept": 2}) as host:
        for prompt in PROMPTS:
            host.expected(prompt, 16)  # the reference is no client: it runs before
        client, kinds, files, rss_kib = Client(host), [], [], []
        portions = [range(FIRST + i, FIRST + N_REQUESTS, N_PORTIONS) for i in range(N_PORTIONS)]
        for portion in portions:
            with ThreadPoolExecutor(12) as pool:
                kinds += pool.map(client, portion)
            host.wait_until_idle()
            gc.collect()
            wait_for(
                lambda: not files or n_files() <= files[0]
            )  # the server closes connections when it learns of their end
            files.append(n_files())
            rss_kib.append(memory_kib())
        print(f"KiB of memory after each portion: {rss_kib}")
        assert len(set(kinds)) == 6
        finished = host.engine.metrics().finished
        assert finished.get("error", 0) == 0 and finished["cancelled"] > 0
        assert finished["length"] >= kinds.count("whole") + kinds.count("streamed")
        if N_REQUESTS >= 5000:  # less than 1 KiB per request
            assert rss_kib[-1] < rss_kib[N_PORTIONS // 2 - 1] + N_REQUESTS // 2, rss_kib


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_kib() -> int:
    """What is held, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
