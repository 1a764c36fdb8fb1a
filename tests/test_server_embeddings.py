"""/v1/embeddings by the openai client: llama-cpp-python's own vectors, in any packing; what is refused; others go on."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from functools import cache

import httpx
import numpy as np
import openai
import pytest

from engine_solo import DEADLOCK_S, engine, model
from hybrid_moe_ext import Llama
from hybrid_moe_ext.engine import Embedder
from hybrid_moe_ext.errors import EngineClosed, OptionError, RequestError
from server_host import MODEL, PROMPTS, Host, serving, wait_for

LONG = "free software and the licence of it " * 40  # more tokens than a batch
TEXTS = [*PROMPTS, LONG, "a", "Löschen 🙂"]
TOLERANCE = 5e-4  # of a unit vector's components; what flash attention and the batch around a text move: 1.5e-4


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving(embedding_ctx=500) as started:
        yield started


@cache
def plain(pooling: int) -> Llama:
    """With all of a text in one batch, as llama.cpp's own pooling wants it."""
    path, exact = model(MODEL)
    return Llama(path, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, embedding=True, pooling_type=pooling, **exact)


def expected(texts: list[str], pooling: int = 3) -> np.ndarray:
    made = plain(pooling).create_embedding(texts)
    vectors = np.array([one["embedding"] for one in made["data"]])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def vectors_of(host: Host, texts: object, **more: object) -> np.ndarray:
    made = host.openai().embeddings.create(model=MODEL, input=texts, **more)
    assert [one.index for one in made.data] == list(range(len(made.data)))
    assert made.model == MODEL and made.object == "list" and {one.object for one in made.data} == {"embedding"}
    return np.array([one.embedding for one in made.data])


def test_vectors_are_llama_cpps(host: Host) -> None:
    """Texts that share a batch, and one that takes several."""
    assert len(host.tokens(LONG)) > 256
    got = vectors_of(host, TEXTS)
    assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    assert np.abs(got - expected(TEXTS)).max() < TOLERANCE
    assert np.abs(got[0] - got[1]).max() > 100 * TOLERANCE


def test_mean_pooling() -> None:
    with serving(embeddings="mean", embedding_ctx=500) as host:
        assert np.abs(vectors_of(host, TEXTS) - expected(TEXTS, pooling=1)).max() < TOLERANCE


def test_every_kind_of_input(host: Host) -> None:
    wanted = expected(PROMPTS)
    tokens = [list(host.tokens(text)) for text in PROMPTS]
    for given in (PROMPTS, tokens):
        assert np.abs(vectors_of(host, given) - wanted).max() < TOLERANCE
    for given in (PROMPTS[0], tokens[0]):
        assert np.abs(vectors_of(host, given) - wanted[:1]).max() < TOLERANCE
    made = host.openai().embeddings.create(model=MODEL, input=PROMPTS, dimensions=wanted.shape[1], user="someone")
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, tokens))


def test_encodings(host: Host) -> None:
    """The openai client asks for base64 unless it is told otherwise."""
    assert np.array_equal(vectors_of(host, PROMPTS), vectors_of(host, PROMPTS, encoding_format="float").astype("f4"))
    told = host.post("/v1/embeddings", json={"model": MODEL, "input": PROMPTS[0], "encoding_format": "base64"}).json()
    raw = np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4")
    assert np.abs(raw - expected(PROMPTS[:1])[0]).max() < TOLERANCE
    plain_json = host.post("/v1/embeddings", json={"model": MODEL, "input": PROMPTS[0]}).json()
    assert plain_json["data"][0]["embedding"] == raw.tolist()


@pytest.mark.parametrize(
    "wrong, status, code, param",
    [
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": ["a", ""]}, 400, "invalid_value", "input"),
        ({"input": [[1], []]}, 400, "invalid_value", "input"),
        ({"input": ["a", [1]]}, 400, "invalid_value", "input"),
        ({"input": ["a", 1]}, 400, "invalid_value", "input"),
        ({"input": [1, "a"]}, 400, "invalid_value", "input"),
        ({"input": [True]}, 400, "invalid_value", "input"),
        ({"input": {"text": "a"}}, 400, "invalid_value", "input"),
        ({"input": 5}, 400, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ({"input": [-1]}, 400, None, None),
        ({"input": [10**9]}, 400, None, None),
        ({"input": "free " * 600}, 400, "context_length_exceeded", "input"),
        ({"input": [[5] * 500] * 601}, 400, "max_tokens_per_request", "input"),
        ({"dimensions": 8}, 400, "unsupported_parameter", "dimensions"),
        ({"dimensions": 0}, 400, "invalid_value", "dimensions"),
        ({"encoding_format": "hex"}, 400, "invalid_value", "encoding_format"),
        ({"model": "text-embedding-3-small"}, 404, "model_not_found", "model"),
        ({"inputs": "a"}, 400, "unknown_parameter", "inputs"),
        ({"repetition_penalty": 1.1}, 400, "unknown_parameter", "repetition_penalty"),
    ],
)
def test_what_is_refused(host: Host, wrong: dict, status: int, code: str | None, param: str | None) -> None:
    answer = host.post("/v1/embeddings", json={"model": MODEL, "input": "a"} | wrong)
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    assert (told["code"], told["param"]) == (code, param) and told["message"]


def test_off() -> None:
    with serving(embeddings="off") as host, pytest.raises(openai.PermissionDeniedError) as refused:
        host.openai().embeddings.create(model=MODEL, input="a")
    assert refused.value.code == "embeddings_off"


def test_others_go_on(host: Host) -> None:
    """A stream gets tokens while a request of many batches is computed, and both are what they are alone."""
    n, n_texts = 8, 20
    body = {"model": MODEL, "max_tokens": n, "temperature": 0, "extra_body": {"ignore_eos": True}, "stream": True}
    chunks = host.openai().completions.create(prompt=PROMPTS[0], **body)
    text = [next(chunks).choices[0].text]
    host.gate.shut()
    host.gate.wait_until_held()
    with httpx.Client(timeout=DEADLOCK_S) as client:
        sent = client.build_request(
            "POST", f"{host.url}/v1/embeddings", json={"model": MODEL, "input": [LONG] * n_texts}
        )
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.send(sent)))
        asking.start()
        wait_for(lambda: host.engine._mail.n_embedding > 0)
        host.gate.open()
        text += [c.choices[0].text for c in chunks]
        assert not answers, "the embeddings were done before the stream: it may have waited for them"
        assert "".join(text) == host.expected(PROMPTS[0], n)
        asking.join(DEADLOCK_S)
    got = np.array([one["embedding"] for one in answers[0].json()["data"]])
    assert got.shape[0] == n_texts and np.abs(got - expected([LONG])).max() < TOLERANCE


def test_who_leaves_stops_the_work(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    n_texts, n_batches, left = 600, 0, threading.Event()
    real = Embedder._rows

    def rows(self: Embedder, *arguments: object) -> np.ndarray:
        nonlocal n_batches
        n_batches += 1
        left.wait(DEADLOCK_S)
        return real(self, *arguments)

    monkeypatch.setattr(Embedder, "_rows", rows)
    with pytest.raises(httpx.ReadTimeout):  # while the first batch is held
        body = {"model": MODEL, "input": [LONG] * n_texts}
        httpx.post(f"{host.url}/v1/embeddings", json=body, timeout=httpx.Timeout(DEADLOCK_S, read=5))
    left.set()
    wait_for(lambda: host.engine._mail.n_embeddings == 0)
    assert n_batches < n_texts  # each takes three
    assert vectors_of(host, "a").shape[0] == 1


def test_the_model_stays_while_a_thread_reads_it() -> None:
    """A client left while its texts were tokenized, and the server ended: the thread went on in a model that was gone."""
    with serving() as host, pytest.raises(httpx.ReadTimeout):
        body = {"model": MODEL, "input": [LONG] * 2000}
        httpx.post(f"{host.url}/v1/embeddings", json=body, timeout=httpx.Timeout(5, read=0.2))


def test_who_is_cut_when_the_server_ends_is_told() -> None:
    """Its texts are still being tokenized when drain_s is over."""
    answers: list[httpx.Response] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    with serving(drain_s=0.05) as host:
        real = host.engine.tokenize

        def held(*arguments: object) -> list[int]:
            has_begun.set()
            assert may_go_on.wait(DEADLOCK_S)
            return real(*arguments)

        def ask() -> None:
            answers.append(host.post("/v1/embeddings", json={"model": MODEL, "input": "a"}))
            may_go_on.set()

        host.engine.tokenize = held
        asking = threading.Thread(target=ask)
        asking.start()
        assert has_begun.wait(DEADLOCK_S)
    asking.join(DEADLOCK_S)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


def test_an_engine_that_closes_tells_who_waits() -> None:
    with engine() as e:
        embedder = Embedder(e, n_ctx=500)
        waiting = [embedder.submit([e.tokenize(LONG)] * 500) for _ in range(2)]
    for one in waiting:
        with pytest.raises(EngineClosed):
            one.future.result(DEADLOCK_S)
    with pytest.raises(EngineClosed):
        embedder.submit([[1]])


def test_draining_waits_for_embeddings_and_takes_no_more() -> None:
    with engine() as e:
        embedder = Embedder(e, n_ctx=500)
        waiting = [embedder.submit([list(range(3, 60))] * 40) for _ in range(3)]
        assert not e.drain(0) or all(one.future.done() for one in waiting)
        with pytest.raises(EngineClosed):
            embedder.submit([[1, 2, 3]])
        assert e.drain(DEADLOCK_S)
        assert all(one.future.result(0).shape == (40, embedder.n_embd) for one in waiting)
    with pytest.raises(EngineClosed):
        Embedder(e)


def test_a_text_that_is_too_long_for_the_context(host: Host) -> None:
    with pytest.raises(RequestError, match="text 1 has 101 tokens, the context for embeddings holds 100: shorten"):
        Embedder(host.engine, n_ctx=100).submit([[5] * 100, [5] * 101])


def test_wrong_options(host: Host) -> None:
    for wrong in ({"pooling": "rank"}, {"n_ctx": 1}):
        with pytest.raises(OptionError):
            Embedder(host.engine, **wrong)
