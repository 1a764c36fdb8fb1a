"""The engine benchmark beside a stock server: it gets the same requests, and what becomes of one that fails is said."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest

import models
from conftest import DEMO
from engine_request import ENTRIES, request
from hybrid_moe_ext import OptionError, PluginError
from hybrid_moe_ext.bench import engine_http
from hybrid_moe_ext.bench.engine import bench_engine
from hybrid_moe_ext.bench.engine_load import (
    Entry,
)
from tiny_families import tiny, write_model

pytestmark = pytest.mark.usefixtures("no_deadlock")


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def gguf_model() -> Path:
    path = models.FOLDER / "bench-qwen3.gguf"
    write_model(path, tiny("qwen3-30b"))
    return path


def test_peers_that_cannot_be(tmp_path, gguf_model):
    cases = [
        (request(gguf_model, [], ENTRIES, peer=tmp_path / "nowhere"), OptionError, "does not exist"),
        (request(DEMO, [], ENTRIES, peer=Path(sys.executable)), OptionError, "does not run FP8"),
        (request(gguf_model, ["fast"], ENTRIES), OptionError, "unknown engine 'fast'"),
        (request(gguf_model, [], ENTRIES), OptionError, "--engines is empty"),
        (request(gguf_model, ["chunked"], ENTRIES, rounds=0), OptionError, "--rounds 0"),
    ]
    for r, kind, rule in cases:
        with pytest.raises(kind, match=rule):
            list(bench_engine(r))


IDS = [Entry(0.0, (5, 6, 7), 2)]  # the model has no tokenizer


def test_a_peer_that_does_not_start_says_why(tmp_path, gguf_model):
    peer = program(
        tmp_path, "peer", "import sys\nprint('loading')\nprint('no memory left', file=sys.stderr)\nsys.exit(3)"
    )
    with pytest.raises(PluginError, match=r"llama-server ended with 3: .*no memory left"):
        list(bench_engine(request(gguf_model, [], IDS, peer=peer)))


# Speaks as llama-server does: an event per token, chunks that end anywhere.
SERVER = """
    import http.server, json, os, sys, time

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        n = 0

        def log_message(self, *_): pass

        def do_GET(self):
            self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")

        def do_POST(self):
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            Handler.n += 1
            if Handler.n > int(os.environ.get("PEER_LIVES", "100")):
                print("out of memory, good bye", flush=True)
                os._exit(9)
            n = told["n_predict"]
            assert told["ignore_eos"] and told["stream"] and not told["cache_prompt"] and all(told["prompt"])
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            events = [{"content": "x", "tokens": [7], "stop": False} for _ in range(n)]
            events += [{"content": "", "tokens": [], "stop": True, "tokens_predicted": n, "timings": {"cache_n": 0}}]
            text = "".join("data: " + json.dumps(e) + "\\n\\n" for e in events).encode()
            for i in range(0, len(text), 37):
                piece = text[i : i + 37]
                self.wfile.write(b"%x\\r\\n" % len(piece) + piece + b"\\r\\n")
            self.wfile.write(b"0\\r\\n\\r\\n")

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_peer_gets_the_same_requests(tmp_path, gguf_model):
    r = request(
        gguf_model, ["chunked"], [Entry(0.0, 12, 6), Entry(0.0, (4, 5), 3)], peer=program(tmp_path, "peer", SERVER)
    )
    ours, peer = bench_engine(r)
    assert (ours.engine, peer.engine) == ("chunked", "llama-server")
    assert [s.n_prompt for s in peer.served] == [12, 2] == [s.n_prompt for s in ours.served]
    assert [len(s.token_s) for s in peer.served] == [6, 3] and not any(s.error for s in peer.served)


def test_a_peer_that_dies_in_the_middle(tmp_path, gguf_model, monkeypatch):
    monkeypatch.setenv("PEER_LIVES", "2")  # the warm-up's
    with pytest.raises(PluginError, match=r"llama-server ended with 9: .*out of memory, good bye"):
        list(bench_engine(request(gguf_model, [], IDS, peer=program(tmp_path, "peer", SERVER))))


def test_answers_that_are_refused_or_broken_off():
    async def told(answer: bytes) -> list[dict]:
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return [e async for e in engine_http.events(port, "/x", {})]

    whole = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n0\r\n\r\n'
    assert asyncio.run(told(whole)) == [{"a": 1}]
    assert asyncio.run(told(b'HTTP/1.1 200 OK\r\n\r\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\n')) == [{"b": 2}]
    with pytest.raises(ValueError, match="status 503: busy"):
        asyncio.run(told(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"))
    for answer in (b"", whole[:-20], whole[:-5]):
        with pytest.raises(ConnectionError):
            asyncio.run(told(answer))


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server to compare with")
def test_next_to_a_real_llama_server():
    entries = [Entry(0.0, 12, 6), Entry(0.0, 70, 3)]
    ours, peer = bench_engine(request(models.twin("F32"), ["chunked"], entries, peer=Path(os.environ["LLAMA_SERVER"])))
    for one in (ours, peer):
        assert [(s.n_prompt, s.n_generated, s.error) for s in one.served] == [(12, 6, ""), (70, 3, "")]
