"""The server as the openai client sees it: the same tokens as a plain Llama's, and every parameter does what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from engine_solo import solo
from server_host import MODEL, PROMPTS, Host, serving, wait_for

N = 12


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def client(host: Host) -> openai.OpenAI:
    return host.openai()


def complete(client: openai.OpenAI, prompt: str, **more: object):
    given = {"model": MODEL, "max_tokens": N, "temperature": 0, "extra_body": {"ignore_eos": True}} | more
    return client.completions.create(prompt=prompt, **given)


def chat(client: openai.OpenAI, text: str, **more: object):
    given = {"model": MODEL, "max_tokens": N, "temperature": 0, "extra_body": {"ignore_eos": True}} | more
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)


def test_models(client: openai.OpenAI, host: Host) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4o")
    assert refused.value.code == "model_not_found"


def test_completion_is_the_plain_llamas(client: openai.OpenAI, host: Host) -> None:
    done = complete(client, PROMPTS[0])
    assert done.choices[0].text == host.expected(PROMPTS[0], N)
    assert done.choices[0].finish_reason == "length"
    n_prompt = len(host.tokens(PROMPTS[0]))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        n_prompt,
        N,
        n_prompt + N,
    )
    again = complete(client, PROMPTS[0])
    assert again.choices[0].text == done.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == n_prompt - 1


def test_prompt_of_token_ids(client: openai.OpenAI, host: Host) -> None:
    assert complete(client, list(host.tokens(PROMPTS[0]))).choices[0].text == host.expected(PROMPTS[0], N)
    assert complete(client, [PROMPTS[0]]).choices[0].text == host.expected(PROMPTS[0], N)


def test_completion_stream(client: openai.OpenAI, host: Host) -> None:
    chunks = list(complete(client, PROMPTS[1], stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == host.expected(PROMPTS[1], N)
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == N
    assert len(chunks) > 4, "it did not come in pieces"
    assert len({c.id for c in chunks}) == 1


def test_chat_uses_the_models_template(client: openai.OpenAI, host: Host) -> None:
    text = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Who may copy this?<｜Assistant｜>"
    prompt = tuple(host.engine.tokenize(text, add_bos=False))
    assert prompt[0] == host.engine.llama.token_bos() and prompt[1] != prompt[0]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who may "}, {"type": "text", "text": "copy this?"}]},
    ]
    given = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}, "messages": messages}
    done = client.chat.completions.create(max_completion_tokens=N, **given)
    assert done.choices[0].message.content == host.expected_after(prompt, N)
    assert done.choices[0].message.role == "assistant"
    assert done.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(max_tokens=N, stream=True, **given))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == host.expected_after(prompt, N)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_many_clients_at_once(host: Host) -> None:
    def one(i: int) -> tuple[str, str]:
        prompt, client = PROMPTS[i % len(PROMPTS)], host.openai()
        if i % 2:
            return prompt, "".join(c.choices[0].text for c in complete(client, prompt, stream=True))
        return prompt, complete(client, prompt).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(16)))
    assert max(len(report.decoding) for report in host.gate.reports) > 1, "nothing ran at the same time"
    for prompt, text in answers:
        assert text == host.expected(prompt, N)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    content = chat(client, "Hello", logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == N
    for token in content:
        top = [t.logprob for t in token.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        chosen = [t for t in token.top_logprobs if t.token == token.token]
        assert [t.logprob for t in chosen] == [token.logprob]  # the likeliest one may be the forbidden end of text
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-9
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    streamed = chat(client, "Hello", logprobs=True, stream=True)
    told = [t for c in streamed for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert [t.token for t in told] == [t.token for t in content]
    assert chat(client, "Hello").choices[0].logprobs is None


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, PROMPTS[0], logprobs=2).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert [choice.text[at : at + len(t)] for at, t in zip(told.text_offset, told.tokens, strict=True)] == told.tokens
    assert all(max(top.values()) == p for top, p in zip(told.top_logprobs, told.token_logprobs, strict=True))


def test_stop(client: openai.OpenAI, host: Host) -> None:
    whole = host.expected(PROMPTS[0], N)
    stop = whole[20:23]
    for stops in (stop, ["never there", stop]):
        choice = complete(client, PROMPTS[0], stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.find(stop)], "stop")
    pieces = [c.choices[0].text for c in complete(client, PROMPTS[0], stop=stop, stream=True)]
    assert "".join(pieces) == whole[: whole.find(stop)]


def test_seed_and_temperature(client: openai.OpenAI) -> None:
    def text(seed: int, **more: object) -> str:
        return complete(client, PROMPTS[0], temperature=2, seed=seed, **more).choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1
    assert text(3, top_p=0) == complete(client, PROMPTS[0]).choices[0].text


def test_logit_bias(client: openai.OpenAI, host: Host) -> None:
    first = solo(MODEL, host.tokens(PROMPTS[0]), 1)[0][0]
    other = complete(client, PROMPTS[0], max_tokens=1, logit_bias={str(first): -100}).choices[0].text
    assert other != host.engine.detokenize([first]).decode() == host.expected(PROMPTS[0], 1)
    forced = host.engine.tokenize(" share", False)[0]
    text = complete(client, PROMPTS[0], max_tokens=3, logit_bias={str(forced): 100}).choices[0].text
    assert text == host.engine.detokenize([forced] * 3).decode()


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"free": {"enum": ["yes", "no"]}},
        "required": ["free"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    done = chat(client, "Is it free?", response_format=wanted, max_tokens=60, extra_body=None)
    assert json.loads(done.choices[0].message.content)["free"] in ("yes", "no")
    assert done.choices[0].finish_reason == "stop"
    done = chat(client, "Is it free?", response_format={"type": "json_object"}, max_tokens=10, extra_body=None)
    assert done.choices[0].message.content.lstrip().startswith("{")


def test_no_tokens_wanted(client: openai.OpenAI) -> None:
    done = complete(client, PROMPTS[0], max_tokens=0)
    assert (done.choices[0].text, done.choices[0].finish_reason, done.usage.completion_tokens) == ("", "length", 0)
    assert [c.choices[0].finish_reason for c in complete(client, PROMPTS[0], max_tokens=0, stream=True)] == ["length"]


def test_answers_end_where_the_context_does(client: openai.OpenAI, host: Host) -> None:
    prompt = list(host.tokens("free software ")) * 200
    done = complete(client, prompt[: host.engine.n_ctx - 5], max_tokens=100)
    assert (done.usage.completion_tokens, done.choices[0].finish_reason) == (5, "length")


def test_tokenize(host: Host) -> None:
    text = "Löschen, free software 🙂"
    tokens = host.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == host.engine.tokenize(text, add_bos=False)
    assert host.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    with_bos = host.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    assert with_bos == host.engine.tokenize(text) != tokens


def test_disconnected_streams_end_in_the_engine(host: Host) -> None:
    """While it is generated, while its first token is awaited, and while it waits in the queue."""
    body = {
        "model": MODEL,
        "prompt": PROMPTS[0],
        "max_tokens": 450,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    before = host.engine.metrics().finished.get("cancelled", 0)
    with httpx.stream("POST", f"{host.url}/v1/completions", json=body) as answer:
        for i, _ in enumerate(answer.iter_lines()):
            if i == 4:
                break
    wait_for(lambda: host.engine.metrics().finished.get("cancelled", 0) == before + 1)
    host.gate.shut()
    others = [httpx.Client(timeout=httpx.Timeout(5, read=0.5)) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        bodies = [body | {"stream": i % 2 == 0} for i in range(6)]  # four run, two wait
        list(pool.map(impatient, others, [f"{host.url}/v1/completions"] * 6, bodies))
    host.gate.open()
    wait_for(lambda: host.engine.metrics().finished["cancelled"] == before + 7)
    host.wait_until_idle()


def impatient(client: httpx.Client, url: str, body: dict) -> None:
    with pytest.raises(httpx.TimeoutException), client:
        answer = client.post(url, json=body)
        raise AssertionError(answer.text)


def test_metrics_and_health(host: Host, client: openai.OpenAI) -> None:
    assert httpx.get(f"{host.url}/health").json() == {"status": "ok", "needs_key": False}
    before = samples(host)
    complete(client, PROMPTS[2])
    list(complete(client, PROMPTS[2], stream=True))
    after = samples(host)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("hybrid_moe_ttft_seconds_count") == 2
    assert grown("hybrid_moe_tpot_seconds_count") == 2 * (N - 1)
    assert grown("hybrid_moe_generated_tokens_total") == 2 * N
    assert grown('hybrid_moe_finished_total{reason="length"}') == 2
    assert grown("hybrid_moe_batch_sequences_count") >= 2 * (N - 1)
    assert after["hybrid_moe_running_now"] == 0


def samples(host: Host) -> dict[str, float]:
    lines = httpx.get(f"{host.url}/metrics").text.splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if not name.startswith("#")
    }
