"""The engine's tokens are those of a request alone: in any batch, by any path, with any prefix shared."""

import asyncio

import numpy as np
import pytest

from engine_solo import (
    DEADLOCK_S,
    MODELS,
    Gate,
    assert_nothing_leaked,
    assert_solo,
    engine,
    greedy,
    prompt,
    result,
    solo_logprobs,
)
from hybrid_moe_ext.engine import Request, Sampling, Stream

pytestmark = pytest.mark.usefixtures("no_deadlock")


@pytest.mark.parametrize("name", MODELS)
def test_every_stream_is_its_solo_run(name: str) -> None:
    """Short and long prompts, more than there are sequences, that begin alike in part."""
    base = prompt(70, seed=1)
    prompts = [
        base[:3], prompt(90, seed=2), base[:40], prompt(17, seed=3), prompt(150, seed=4), base, base + prompt(30, seed=5),
        prompt(90, seed=2) + prompt(20, seed=6), base[:40],
    ]  # fmt: skip
    with engine(name) as e:
        streams = [e.submit(greedy(p)) for p in prompts]
        results = [result(s) for s in streams]
        n_compared = [assert_solo(name, p, r.tokens, is_whole=24) for p, r in zip(prompts, results, strict=True)]
        assert sum(n_compared) > 0.8 * 24 * len(prompts)  # ties are rare
        via = [r.finish.metrics.via for r in results]
        assert via[0] == "decode" and via[1] == "prefill" and via[4] == "prefill"
        assert all(r.finish.reason == "length" and len(r.finish.metrics.tpot_ms) == 23 for r in results)
        assert_nothing_leaked(e)


@pytest.mark.parametrize("name", ["demo", "qwen3-30b", "gpt-oss-120b"])
def test_with_the_default_attention_the_probabilities_are_those_of_the_solo_run(name: str) -> None:
    """Flash attention, on the CPU from four sequences on: it rounds by the rows beside, so tokens may part where two are close.
    What was chosen has the probability that it has alone; a token of another stream would not."""
    prompts = [prompt(n, seed=n) for n in (5, 90, 17, 150, 40, 7)]
    with engine(name, flash_attn="auto") as e:
        streams = [e.submit(greedy(p, logprobs=0)) for p in prompts]
        results = [result(s) for s in streams]
    off = np.concatenate(
        [
            np.abs(np.array([t.logprob for t in r.events if t.logprob is not None]) - solo_logprobs(name, p, r.tokens))
            for p, r in zip(prompts, results, strict=True)
        ]
    )
    assert len(off) == 24 * len(prompts)
    assert np.median(off) < 5e-3 and np.quantile(off, 0.9) < 0.05  # a router's tie may flip an expert of some tokens


def test_a_cache_of_the_window_only() -> None:
    """Without swa_full nothing of the sliding-window layers outlives its use, so nothing is kept and nothing reused."""
    with engine("gpt-oss-120b", swa_full=False, store_mib=0) as e:
        text = prompt(70, seed=1)
        for p in (text, [*text, 5], text[:30], prompt(150, seed=2), text):
            r = result(e.submit(greedy(p, 24)))
            assert_solo("gpt-oss-120b", p, r.tokens, is_whole=24)
            assert r.finish.metrics.n_reused == 0
        streams = [e.submit(greedy(p, 24)) for p in (text, text[:40], prompt(150, seed=2), text)]
        for s, p in zip(streams, (text, text[:40], prompt(150, seed=2), text), strict=True):
            assert_solo("gpt-oss-120b", p, result(s).tokens, is_whole=24)
        assert e.metrics().kept_now == 0
        assert_nothing_leaked(e)


def test_without_long_prompts_the_prefill_context_is_small() -> None:
    with engine("demo", prefill_from=512) as e:
        assert [c.n_ctx for c in e._contexts] == [256, 512]
        r = result(e.submit(greedy(prompt(400), 4)))
        assert r.finish.metrics.via == "decode"
        assert_solo("demo", prompt(400), r.tokens, is_whole=4)


@pytest.mark.parametrize("name", ["demo", "gpt-oss-120b", "mamba"])
def test_a_long_prompt_stalls_nobody(name: str) -> None:
    """While it is prefilled every running stream gets a token in every step, and at most one piece arrives between two."""
    gate = Gate()
    with engine(name, on_step=gate, prefill_batch=32) as e:
        gate.shut()
        short = [e.submit(greedy(prompt(5, seed=i), 100)) for i in range(2)]
        gate.wait_until_held()
        long = e.submit(greedy(prompt(140, seed=9), 4))
        gate.open()
        assert_solo(name, prompt(140, seed=9), result(long).tokens, is_whole=4)
        for i, s in enumerate(short):
            assert_solo(name, prompt(5, seed=i), result(s).tokens, is_whole=100)
        assert long.finish is not None and long.finish.metrics.via == "prefill"
        meanwhile = [r for r in gate.reports if long.id in r.prefilling]
        assert meanwhile
        assert all(id != long.id for r in meanwhile for id, _ in r.chunks)
        for s in short:
            steps = [i for i, r in enumerate(gate.reports) if s.id in r.decoding]
            assert steps == list(range(steps[0], steps[0] + 99))
        assert sum(r.installed for r in gate.reports) == 139
        most = 139 if name in ("gpt-oss-120b", "mamba") else 16  # memories that cannot be cut move at once
        assert max(r.installed for r in gate.reports if r.decoding) <= most


def test_a_short_prompt_joins_in_chunks() -> None:
    """Below prefill_from a prompt is computed beside the others, in chunks that the step's limit holds."""
    gate = Gate()
    with engine("qwen3-30b", on_step=gate, prefill_from=1000, n_batch=24, min_chunk=8) as e:
        gate.shut()
        first = e.submit(greedy(prompt(5, seed=0), 60))
        gate.wait_until_held()
        second, third = (e.submit(greedy(prompt(100, seed=s), 8)) for s in (1, 2))
        gate.open()
        for s, p in ((first, prompt(5, seed=0)), (second, prompt(100, seed=1)), (third, prompt(100, seed=2))):
            assert_solo("qwen3-30b", p, result(s).tokens)
        chunks = [r for r in gate.reports[1:] if r.chunks]
        assert len(chunks) >= 200 / 24
        for r in chunks:
            assert first.id in r.decoding
            assert sum(n for _, n in r.chunks) <= r.chunk_limit <= 24 - len(r.decoding)


def test_a_step_that_is_too_slow_shrinks_the_chunk() -> None:
    """With a service level that no machine keeps, a prompt beside others gets the least."""
    gate = Gate()
    with engine("qwen3-30b", on_step=gate, prefill_from=1000, min_chunk=4, tpot_ms=0.001) as e:
        gate.shut()
        first = e.submit(greedy(prompt(5), 100))
        gate.wait_until_held()
        second = e.submit(greedy(prompt(100, seed=1), 8))
        gate.open()
        assert_solo("qwen3-30b", prompt(5), result(first).tokens, is_whole=100)
        assert_solo("qwen3-30b", prompt(100, seed=1), result(second).tokens, is_whole=8)
        beside = [r for r in gate.reports if r.decoding and r.chunks]
        assert all(r.chunk_limit == 4 for r in beside)
        m = e.metrics()
        assert m.tpot_missed == 2 and m.tpot_met == 0 and m.ttft_met == 2


def test_first_come_first_served() -> None:
    """Who waits for cells is overtaken by nobody; who waits for the prefill worker only is, by short prompts."""

    def begin(s: Stream) -> int:
        return next(i for i, r in enumerate(gate.reports) if s.id in dict(r.chunks))

    gate = Gate()
    with engine("qwen3-30b", on_step=gate, n_ctx=256, prefill_from=60, prefill_batch=32) as e:
        gate.shut()
        first = e.submit(greedy(prompt(100, seed=0)[:50], 100))
        gate.wait_until_held()
        big = e.submit(greedy(prompt(50, seed=1), 150))  # needs 200 cells of the 106 left
        small = [e.submit(greedy(prompt(5, seed=2 + i), 5)) for i in range(3)]  # would fit now
        gate.open()
        for s in (first, big, *small):
            result(s)
        begun = [begin(s) for s in (first, big, *small)]
        assert begun == sorted(begun)
        # Two long prompts hold a place, the third waits for the prefill worker: the short one goes before it.
        gate.shut()
        hold = e.submit(greedy(prompt(5, seed=9), 20))
        gate.wait_until_held()
        long = [e.submit(greedy(prompt(62, seed=20 + i), 1)) for i in range(3)]
        short = e.submit(greedy(prompt(5, seed=30), 1))
        gate.open()
        for s in (hold, *long, short):
            result(s)
        assert [s.finish.metrics.via for s in (*long, short)] == ["prefill"] * 3 + ["decode"]
        assert begin(short) < begin(long[2])
        assert_nothing_leaked(e)


def test_asyncio_consumers() -> None:
    async def main() -> None:
        prompts = [prompt(5 + i, seed=i) for i in range(6)]
        streams = [e.submit(greedy(p, 20)) for p in prompts]

        async def read(stream) -> list[int]:
            return [event.token async for event in stream]

        read_tokens = await asyncio.wait_for(asyncio.gather(*map(read, streams[:3])), DEADLOCK_S)
        results = await asyncio.wait_for(asyncio.gather(*streams[3:]), DEADLOCK_S)
        for p, tokens in zip(prompts, [*read_tokens, *(r.tokens for r in results)], strict=True):
            assert_solo("qwen3-30b", p, tokens, is_whole=20)
        # A consumer that is cancelled while it waits leaves the stream usable.
        gate.shut()
        stream = e.submit(greedy(prompt(5), 20))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(stream), 0.2)
        gate.open()
        stream.cancel()
        assert len([event async for event in stream]) <= 20
        assert stream.finish is not None and stream.finish.reason == "cancelled"

    gate = Gate()
    with engine("qwen3-30b", on_step=gate) as e:
        asyncio.run(main())
        assert_nothing_leaked(e)


def test_text_of_a_prompt() -> None:
    """Text goes through the model's tokenizer as llama_cpp.Llama's does."""
    with engine("demo") as e:
        r = result(e.submit(Request("The licence", max_tokens=12, sampling=Sampling(temperature=0))))
        tokens = e.llama.tokenize(b"The licence", add_bos=True, special=True)
        assert e.tokenize("The licence") == tokens and r.finish.metrics.n_prompt == len(tokens)
        assert_solo("demo", tokens, r.tokens, is_whole=12)
        assert r.text == e.detokenize(r.tokens).decode()
