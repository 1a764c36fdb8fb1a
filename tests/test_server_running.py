"""What /running tells of a request: its answer by its stream, its prompt by the engine's steps."""

from __future__ import annotations

from hybrid_moe_ext.engine import Stream, Token
from hybrid_moe_ext.engine.metrics import StepReport
from hybrid_moe_ext.server.requests import Requests


def _step(**told: object) -> StepReport:
    nothing = {"decoding": (), "chunks": (), "chunk_limit": 0, "installed": 0, "prefilling": (), "seconds": 0.1}
    return StepReport(**{**nothing, **told})


def test_tokens_that_came_before_it_was_looked_at_are_counted() -> None:
    """The engine may have computed some between submit() and add()."""
    stream, requests = Stream(7, lambda: None), Requests()
    for token in (1, 2, None, 3):  # None: text that had been held back
        stream.put(Token(token, "a"))
    requests.add(stream, n_prompt=5, max_tokens=9)
    [told] = requests.told()
    assert (told["state"], told["generated_tokens"], told["prompt_done"], told["ttft_s"]) == ("writing", 3, 5, 0.0)
    stream.next()  # taking one changes nothing
    assert requests.told()[0]["generated_tokens"] == 3


def test_a_prompt_is_read_then_an_answer_written() -> None:
    stream, requests = Stream(7, lambda: None), Requests()
    requests.add(stream, n_prompt=50, max_tokens=9)
    assert requests.told()[0]["state"] == "waiting" and requests.told()[0]["tokens_per_s"] is None
    requests.on_step(_step(chunks=((7, 16), (8, 3))))
    assert (requests.told()[0]["state"], requests.told()[0]["prompt_done"]) == ("prompt", 16)
    requests.on_step(_step(prefilling=(7,)))
    assert requests.told()[0]["state"] == "prefill"
    stream.put(Token(1, "a"))
    assert (requests.told()[0]["state"], requests.told()[0]["prompt_done"]) == ("writing", 50)
    stream.cancel()
    stream.fail(RuntimeError("ended"))
    assert requests.told() == []
