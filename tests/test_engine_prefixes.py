"""Prefixes that prompts share: of running and of kept sequences, in both contexts, as far as each memory can give them."""

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
)

pytestmark = pytest.mark.usefixtures("no_deadlock")


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_goes_on_where_it_was(name: str) -> None:
    """Each turn's prompt is all that came before, so only the new part is computed, and the answer is the same."""
    with engine(name) as e:
        text, n_known = prompt(30, seed=1), 0
        for turn in range(3):
            r = result(e.submit(greedy(text, 12)))
            assert_solo(name, text, r.tokens, is_whole=12)
            # The last token of an answer was never computed; of the prompt one token always is.
            assert r.finish.metrics.n_reused == n_known
            n_known = len(text) + 11
            text = text + r.tokens + prompt(7, seed=10 + turn)
        assert e.metrics().reused_tokens > 0
        assert_nothing_leaked(e)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_part_ways(name: str) -> None:
    """A prefix in the middle of a finished sequence: attention reuses it; a recurrent state of there does not exist, and
    neither does the window of a sequence that went on too far, if its cells were given to others."""
    begin = prompt(40, seed=1)
    with engine(name) as e:
        result(e.submit(greedy(begin + prompt(10, seed=2), 20)))
        other = begin + prompt(10, seed=3)
        r = result(e.submit(greedy(other, 20)))
        assert_solo(name, other, r.tokens, is_whole=20)
        assert r.finish.metrics.n_reused == (0 if name == "mamba" else 40)
        same = result(e.submit(greedy(other, 20)))
        assert same.tokens == r.tokens
        assert same.finish.metrics.n_reused == (0 if name == "mamba" else len(other) - 1)
        assert_nothing_leaked(e)


def test_a_running_sequence_lends_its_prefix() -> None:
    gate = Gate()
    with engine("qwen3-30b", on_step=gate) as e:
        text = prompt(40, seed=1)
        gate.shut()
        first = e.submit(greedy(text, 40))
        gate.wait_until_held()  # its prompt is computed
        second = e.submit(greedy([*text, 7], 20))
        gate.open()
        r = result(second)
        assert r.finish.metrics.n_reused == 40
        assert_solo("qwen3-30b", [*text, 7], r.tokens, is_whole=20)
        assert_solo("qwen3-30b", text, result(first).tokens, is_whole=40)
        assert_nothing_leaked(e)


def test_long_prompts_reuse_both_contexts() -> None:
    """The decode context's prefix is not moved again, the prefill context's is not computed again."""
    with engine("qwen3-30b", n_kept=2, n_parallel=2) as e:
        begin = prompt(100, seed=1)
        result(e.submit(greedy(begin, 4)))
        m = e.metrics()
        assert m.prefill_tokens == 99 and m.reused_tokens == 0
        longer = begin + prompt(80, seed=2)
        r = result(e.submit(greedy(longer, 20)))
        assert r.finish.metrics.via == "prefill" and r.finish.metrics.n_reused == 100
        assert_solo("qwen3-30b", longer, r.tokens, is_whole=20)
        assert e.metrics().prefill_tokens == 99 + 79  # the prompt's last token came over from the decode context
        elsewhere = begin[:75] + prompt(80, seed=3)
        r = result(e.submit(greedy(elsewhere, 20)))
        assert r.finish.metrics.via == "prefill" and r.finish.metrics.n_reused == 75
        assert_solo("qwen3-30b", elsewhere, r.tokens, is_whole=20)
        assert e.metrics().prefill_tokens == 99 + 79 + 79
        assert_nothing_leaked(e)


def test_the_prefill_worker_borrows_a_prefix() -> None:
    """Two agents in turns: the prefill context has the other one's prompt, the decode context still has both."""
    gate = Gate()
    with engine("qwen3-30b", on_step=gate, prefill_batch=32, pieces_ahead=2) as e:
        agents = [prompt(70, seed=1), prompt(70, seed=2)]
        for p in agents:
            result(e.submit(greedy(p, 4)))
        assert e.metrics().prefill_tokens == 2 * 69
        longer = agents[0] + prompt(80, seed=3)
        gate.shut()
        other = e.submit(greedy(prompt(5, seed=4), 30))  # with and without somebody who decodes
        gate.wait_until_held()
        late = e.submit(greedy(longer, 20))
        gate.open()
        r = result(late)
        assert r.finish.metrics.via == "prefill" and r.finish.metrics.n_reused == 70
        assert_solo("qwen3-30b", longer, r.tokens, is_whole=20)
        assert_solo("qwen3-30b", prompt(5, seed=4), result(other).tokens, is_whole=30)
        assert e.metrics().prefill_tokens == 2 * 69 + 79
        second = agents[1] + prompt(70, seed=5)
        assert_solo("qwen3-30b", second, result(e.submit(greedy(second, 20))).tokens, is_whole=20)
        assert e.metrics().prefill_tokens == 2 * 69 + 79 + 69
        assert_nothing_leaked(e)


def test_what_a_window_left_behind_is_not_reused() -> None:
    """Of a long prompt only the last window moves to the decode context: earlier places cannot be gone on from."""
    with engine("gpt-oss-120b", piece_tokens=40) as e:
        text = prompt(150, seed=1)
        assert result(e.submit(greedy(text, 4))).finish.metrics.via == "prefill"
        middle = [*text[:58], 7, 8]
        r = result(e.submit(greedy(middle, 20)))
        assert r.finish.metrics.n_reused == 0
        assert_solo("gpt-oss-120b", middle, r.tokens, is_whole=20)
        r = result(e.submit(greedy([*text, 9, 9], 20)))
        assert r.finish.metrics.n_reused == 150 and r.finish.metrics.via == "decode"
        assert_solo("gpt-oss-120b", [*text, 9, 9], r.tokens, is_whole=20)
        assert_nothing_leaked(e)


def test_without_room_nothing_is_kept_and_nothing_breaks() -> None:
    """Sequences of nearly the whole context, one after the other: kept ones give way."""
    with engine("qwen3-30b", n_ctx=256, n_parallel=3, prefill_from=1000) as e:
        prompts = [prompt(100, seed=i) for i in range(5)]
        streams = [e.submit(greedy(p, 60)) for p in prompts]
        for p, s in zip(prompts, streams, strict=True):
            assert_solo("qwen3-30b", p, result(s).tokens, is_whole=60)
        m = e.metrics()
        assert m.cells == 256 and m.cells_now <= 256
        assert_nothing_leaked(e)


def test_the_byte_budget_of_kept_sequences_holds() -> None:
    with engine("qwen3-30b") as e:
        result(e.submit(greedy(prompt(50, seed=1), 11)))
        per_token = e.metrics().kept_bytes_now / 60
    assert per_token > 0
    with engine("qwen3-30b", kept_mib=100 * per_token / 2**20, store_mib=0) as e:
        for i in range(4):
            result(e.submit(greedy(prompt(50, seed=i), 11)))
        assert e.drain(DEADLOCK_S)
        m = e.metrics()
        assert m.kept_now == 1 and 0 < m.kept_bytes_now <= 100 * per_token
        assert_nothing_leaked(e)
    with engine("qwen3-30b", kept_mib=0, store_mib=0) as e:
        result(e.submit(greedy(prompt(50, seed=1), 11)))
        assert result(e.submit(greedy(prompt(50, seed=1), 11))).finish.metrics.n_reused == 0
