"""Whether keys and values may move between two contexts: compared before anything moves, then tried, and the values looked at."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from ..errors import EngineError
from .context import Context

# Of the logits' variance, how far two contexts may be apart that computed one token from the same keys and values. Devices round
# differently, and a token near a tie may go to another expert: 1e-3 is much. Values that did not arrive give about 1.
_CLOSE = 0.01
_TRIALS = 3  # with different tokens; one that is close is enough

_KV_TYPES = {0: "F32", 1: "F16", 30: "BF16", 8: "Q8_0", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 20: "IQ4_NL"}


def agree(prefill: Context, decode: Context, seq: int, n_threads: int) -> tuple[int, int]:
    """Moves a sequence of one and of two tokens from `prefill`'s sequence 0 to `decode`'s `seq`. Returns the bytes of a sequence
    and of each token. Both contexts are empty before and after. Raises EngineError, which names what differs."""
    compare_models(C.llama_get_model(prefill.ctx), C.llama_get_model(decode.ctx))
    apart = []
    for i in range(_TRIALS):
        tokens = _tokens(prefill, i)
        try:
            sizes = _move(prefill, decode, tokens, seq, n_threads)
            apart.append(_distance(prefill, decode, tokens[2], seq, n_threads))
        finally:
            prefill.clear()
            decode.clear()
        if apart[-1] <= _CLOSE:
            per_token = sizes[1] - sizes[0]
            return sizes[0] - per_token, per_token
    raise EngineError(
        "the contexts of prefill and decode do not agree: from the same keys and values they compute different logits (by "
        f"{min(apart):.2g} of their variance, {_CLOSE} is allowed); give prefill_from=n_ctx, so that no prompt moves"
    )


def _tokens(context: Context, i: int) -> list[int]:
    n = context.n_vocab
    return [0, (i * 7919 + 1) % n, (i * 104729 + 2) % n]


def _move(prefill: Context, decode: Context, tokens: list[int], seq: int, n_threads: int) -> list[int]:
    sizes = []
    for n in (1, 2):
        prefill.add(tokens[n - 1 : n], n - 1, 0, logits=False)
        prefill.decode(n_threads)
        state = prefill.state(0)
        with _LlamaErrors() as said:
            try:
                decode.set_state(seq, state)
            except EngineError as error:
                raise EngineError(_explain(said.lines) or str(error)) from error
        if decode.state_bytes(seq) != len(state):
            raise EngineError(
                f"the contexts of prefill and decode do not agree: {n} tokens are {len(state)} bytes in one and "
                f"{decode.state_bytes(seq)} in the other"
            )
        sizes.append(len(state))
    return sizes


def _distance(prefill: Context, decode: Context, token: int, seq: int, n_threads: int) -> float:
    """One more token in both: mean squared difference of its logits, by their variance."""
    rows = []
    for context, s in ((prefill, 0), (decode, seq)):
        place = context.add([token], 2, s, logits=True)
        context.decode(n_threads)
        rows.append(np.array(context.logits(place), np.float64))
    a, b = rows
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(((a - b) ** 2).mean() / max(float(a.var()), 1e-30)) if (a != b).any() else 0.0


def compare_models(prefill: Any, decode: Any) -> None:
    """Raises EngineError, which names the first thing that differs: all metadata, sizes and the vocabulary."""
    if ctypes.cast(prefill, ctypes.c_void_p).value == ctypes.cast(decode, ctypes.c_void_p).value:
        return
    one, other = _facts(prefill), _facts(decode)
    for name in (*one, *(n for n in other if n not in one)):
        if one.get(name) != other.get(name):
            raise EngineError(
                f"the models of prefill and decode differ: {name} is {one.get(name)!r} in one and {other.get(name)!r} in the "
                "other: the files were changed in between, load again"
            )


def _facts(model: Any) -> dict[str, object]:
    facts: dict[str, object] = {"general.architecture": None}  # named first
    buffer = ctypes.create_string_buffer(4096)
    for i in range(C.llama_model_meta_count(model)):
        C.llama_model_meta_key_by_index(model, i, buffer, len(buffer))
        key = buffer.value.decode("utf-8", "replace")
        C.llama_model_meta_val_str_by_index(model, i, buffer, len(buffer))
        facts[key] = buffer.value.decode("utf-8", "replace")
    vocab = C.llama_model_get_vocab(model)
    return facts | {
        "n_layer": C.llama_model_n_layer(model),
        "n_embd": C.llama_model_n_embd(model),
        "n_head": C.llama_model_n_head(model),
        "n_head_kv": C.llama_model_n_head_kv(model),
        "n_swa": C.llama_model_n_swa(model),
        "n_params": C.llama_model_n_params(model),
        "vocabulary": C.llama_vocab_n_tokens(vocab),
        "vocabulary type": C.llama_vocab_type(vocab),
    }


def _explain(lines: list[str]) -> str:
    """What llama.cpp said when it refused a state, in the options' words. Empty: it said nothing known."""
    for line in lines:
        what = line.partition(": ")[2].strip() or line
        if "V transposition" in what:
            what = "flash attention is on in one and off in the other: give flash_attn=True or flash_attn=False"
        elif "mismatched" not in what and "incompatible" not in what:
            continue
        elif " type (" in what:
            found = what.partition("(")[2].partition(",")[0].split(" != ")
            names = " and ".join(_KV_TYPES.get(int(t), t) if t.isdigit() else t for t in found)
            what = f"{what.partition(' (')[0]}s ({names}): give type_k and type_v"
        return f"the contexts of prefill and decode do not agree: {what}"
    return ""


class _LlamaErrors:
    """Collects what llama.cpp logs on this thread; what others log goes where it went."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> _LlamaErrors:
        C.llama_log_get(ctypes.byref(_before), ctypes.byref(_before_data))
        _this_thread.lines = self.lines
        C.llama_log_set(_collector, None)
        return self

    def __exit__(self, *_: object) -> None:
        C.llama_log_set(_before, _before_data)
        _this_thread.lines = None


_this_thread = threading.local()
_before, _before_data = C.llama_log_callback(), ctypes.c_void_p()


def _collect(level: int, text: bytes, data: Any) -> None:
    lines = getattr(_this_thread, "lines", None)
    if lines is not None:
        lines.append(text.decode("utf-8", "replace").strip())
    elif _before:
        _before(level, text, _before_data)


_collector = C.llama_log_callback(_collect)  # for as long as the process lives: another thread may be in it
