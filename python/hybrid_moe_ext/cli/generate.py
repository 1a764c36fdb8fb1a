"""One prompt through one model: loaded, streamed, timed, and where its experts ran, by the plug-in's own count."""

from __future__ import annotations

import codecs
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import llama_cpp.llama_cpp as C
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from .. import Llama, counters, streamed
from .._native import STREAMING, ggml_function, load_named_backend
from ..errors import HybridMoeError, OptionError, PluginError
from ..gpus import find_gpus
from ..info import BOTH, HOST, OURS, ModelInfo, describe_model
from ..machine import Copies, copies
from ..options import Options
from ..placement import Placement
from ..streamed import Streamed
from ..token_text import piece
from .terminal import last_errors, progress_bar

DEFAULT_CTX = 4096
DEFAULT_BATCH = 512  # llama-cpp-python's


@dataclass(frozen=True)
class Result:
    """Times: prefill ends with the first token, which it includes; decode is the tokens after it."""

    text: str
    prompt_tokens: int
    tokens: int
    finish: str  # "stop": the model ended it, "length": -n reached, "context": no room left
    load_s: float
    passes: int  # over the model, for the prompt
    ttft_s: float  # from the prompt to the first token
    prefill_tps: float
    decode_tps: float | None  # None for fewer than two tokens
    threads: int
    isa: str
    team: str
    device: str  # what computes everything but the experts; several: layer after layer
    experts_on: str | None  # "HybridMoE", "host" or "HybridMoE and host"; None: the model has no experts
    expert_matmuls: int  # expert matrix products that the plug-in computed for this prompt
    model: str
    architecture: str
    copies: Copies | None  # of experts in memory; None: they are used from their files
    placement: Placement
    remarks: tuple[str, ...]  # what of the request came to nothing
    prefill: Streamed | None  # what streaming did in each phase; None: there is nothing to stream to
    decode: Streamed | None

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self)
        for phase in ("prefill", "decode"):
            of_phase = getattr(self, phase)
            if of_phase is not None:
                told[phase]["cpu_share"] = of_phase.cpu_share
        return told

    def statistics(self) -> list[str]:
        decode = f"{self.decode_tps:.1f} tokens/s" if self.decode_tps is not None else "too short to time"
        return [
            f"prefill: {self.prompt_tokens} tokens, {self.prefill_tps:.1f} tokens/s, first token after {self.ttft_s:.2f} s",
            *(
                [f"prefill experts: {self.prefill}{f'; {self.passes} passes' if self.passes > 1 else ''}"]
                if self.prefill
                else []
            ),
            f"decode: {max(0, self.tokens - 1)} tokens, {decode}",
            f"device: {self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}",
            f"experts: {self._where()}",
            *([f"placement: {self.placement}"] if self.placement.devices else []),
            *self.remarks,
            *(f"streaming: {trouble}" for trouble in (self.prefill.troubles if self.prefill else ())),
            *(self.copies.lines() if self.copies else ()),
        ]

    def _where(self) -> str:
        if self.experts_on is None:
            return "none, this is not a Mixture-of-Experts model"
        return self.experts_on.replace(OURS, f"{OURS} ({self.isa})")


@dataclass(frozen=True)
class Request:
    model: str
    prompt: str
    n: int
    temp: float
    seed: int | None
    chat: bool
    n_ctx: int | None  # None: DEFAULT_CTX, or what the model was trained for if that is less
    n_threads: int
    options: dict[str, str | None]
    verbose: bool
    n_ubatch: int | None = None  # None: as many as fit, llama.cpp's default without a GPU
    n_gpu_layers: int | None = None  # None: all where experts are streamed, otherwise none

    def remarks(self, placement: Placement) -> tuple[str, ...]:
        """On what was asked for and not done."""
        told = []
        if not placement.devices and self._wants_gpu():
            told.append(f"placement: {placement}")
        if self.n_ubatch is not None and placement.n_ubatch < self.n_ubatch:
            told.append(f"tokens per pass: {placement.n_ubatch}, all of the context, not the {self.n_ubatch} of -ub")
        return tuple(told)

    def _wants_gpu(self) -> bool:
        """Whether something is asked for that only a GPU can do."""
        chosen = Options.resolve(None, **self.options)
        if self.n_gpu_layers or chosen.experts_memory == "pinned":
            return True
        is_off = chosen.slp == "off" or chosen.devices == "none"
        return not is_off and any(getattr(chosen, name) != "auto" for name in STREAMING)


def run(request: Request, show: Callable[[str], None]) -> Result:
    """`show` gets the text piece by piece. Raises HybridMoeError for everything that is wrong with the request."""
    if not request.prompt:
        raise OptionError("the prompt is empty: give one with -p TEXT, or -p - to read it from stdin")
    info = describe_model(request.model)
    n_ctx = context_length(request.n_ctx, info.n_ctx_train)
    started = time.perf_counter()
    llm = load(request, n_ctx)
    try:
        load_s = time.perf_counter() - started
        prompt = tokenize(llm, request)
        if len(prompt) >= n_ctx:
            raise OptionError(
                f"the prompt has {len(prompt)} tokens, but a context of {n_ctx} has no room for it and an answer: "
                f"shorten it, or ask for more with -c (this model has up to {info.n_ctx_train})"
            )
        n = min(request.n, n_ctx - len(prompt))
        llm.set_seed(C.LLAMA_DEFAULT_SEED if request.seed is None else request.seed)
        before = counters().n_matmuls
        reports = [streamed.report()]
        pieces, progress = [], Timing([time.perf_counter()])
        try:
            for text in stream(llm, prompt, n, request.temp, progress):
                if len(reports) == 1:
                    reports.append(streamed.report())
                pieces.append(text)
                show(text)
        except RuntimeError as error:
            raise HybridMoeError(f"{request.model}: llama.cpp stopped: {error} {last_errors()}") from error
        matmuls = counters().n_matmuls - before
        reports.append(streamed.report())
        phases = [streamed.between(*pair) for pair in pairwise(reports)] if llm.placement.devices else [None, None]
        times = progress.times
        return Result(
            text="".join(pieces),
            prompt_tokens=len(prompt),
            tokens=len(times) - 1 - progress.ended,
            finish="stop" if progress.ended else "length" if n == request.n else "context",
            load_s=load_s,
            passes=n_passes(len(prompt), llm.placement),
            ttft_s=times[1] - times[0],
            prefill_tps=len(prompt) / (times[1] - times[0]),
            decode_tps=(len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None,
            threads=request.n_threads,
            isa=llm.status.isa,
            team=llm.status.team,
            device=device_description(llm.placement),
            experts_on=where_experts_ran(info, matmuls + sum(phase.layers for phase in phases if phase)),
            expert_matmuls=matmuls,
            model=request.model,
            architecture=info.architecture,
            copies=copies() if Options.resolve(None, **request.options).experts_memory != "mmap" else None,
            placement=llm.placement,
            remarks=request.remarks(llm.placement),
            prefill=phases[0],
            decode=phases[1],
        )
    finally:
        llm.close()


def n_passes(n_tokens: int, placement: Placement) -> int:
    """llama_cpp.Llama cuts a prompt into batches, and llama.cpp each of them into passes."""
    whole, rest = divmod(n_tokens, placement.n_batch)
    return whole * -(-placement.n_batch // placement.n_ubatch) + -(-rest // placement.n_ubatch)


def where_experts_ran(info: ModelInfo, n_ours: int) -> str | None:
    """What the plug-in counted decides; the headers only say whether some expert types were the host's besides."""
    if info.experts_on is None:
        return None
    if not n_ours:
        return HOST
    return BOTH if info.host_expert_types else OURS


def context_length(wanted: int | None, n_ctx_train: int) -> int:
    """Longer than trained is refused: text decays there, and a typing error would fill the memory with KV cache."""
    if wanted is None:
        return min(DEFAULT_CTX, n_ctx_train or DEFAULT_CTX)
    if wanted > (n_ctx_train or 2**20):
        raise OptionError(f"-c {wanted} is more than the {n_ctx_train} tokens this model was trained for: ask for less")
    return wanted


def load(request: Request, n_ctx: int) -> Llama:
    given: dict[str, Any] = {name: value for name, value in request.options.items() if value is not None}
    if request.n_ubatch is not None:  # without a GPU llama-cpp-python would cut it to its n_batch in silence
        given |= {"n_ubatch": request.n_ubatch, "n_batch": max(request.n_ubatch, DEFAULT_BATCH)}
    if request.n_gpu_layers is not None:
        given["n_gpu_layers"] = request.n_gpu_layers
    if other := load_named_backend():
        raise PluginError(f"GGML_BACKEND_PATH={other} cannot be loaded ({last_errors()}): unset it or correct it")
    with progress_bar("loading") as progress:
        try:
            return Llama(
                request.model,
                n_ctx=n_ctx,
                n_threads=request.n_threads,
                n_threads_batch=request.n_threads,
                verbose=request.verbose,
                progress=progress,
                **given,
            )
        except HybridMoeError as error:
            reasons = last_errors()
            is_news = reasons and str(error).split(";")[0] not in reasons
            raise type(error)(f"{error} ({reasons})" if is_news else str(error)) from error
        except (ValueError, RuntimeError, MemoryError) as error:
            raise HybridMoeError(
                f"{request.model}: llama.cpp cannot make a context of {n_ctx} tokens ({error}): "
                f"try a smaller -c {last_errors()}"
            ) from error


def tokenize(llm: Llama, request: Request) -> list[int]:
    try:
        if request.chat:
            return _apply_template(llm, request.prompt)
        return list(llm.tokenize(request.prompt.encode(), add_bos=True, special=False))
    except UnicodeEncodeError as error:
        raise OptionError("the prompt is not valid UTF-8") from error


def _apply_template(llm: Llama, prompt: str) -> list[int]:
    template = llm.metadata.get("tokenizer.chat_template")
    if not template:
        raise OptionError("this model has no chat template: leave out --chat")
    bos, eos = (_token_text(llm, token) for token in (llm.token_bos(), llm.token_eos()))
    formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
    try:
        text = formatter(messages=[{"role": "user", "content": prompt}]).prompt
    except Exception as error:  # a template is a program of the model's author
        raise OptionError(f"the model's chat template fails ({error}): leave out --chat") from error
    return list(llm.tokenize(text.encode(), add_bos=not (bos and text.startswith(bos)), special=True))


@dataclass
class Timing:
    """Filled while a text is generated."""

    times: list[float]  # start, then one per token, the model's end mark included
    ended: bool = False  # by that mark


def stream(llm: Llama, prompt: list[int], n: int, temp: float, timing: Timing) -> Iterator[str]:
    """Up to n tokens' text, piece by piece; a piece is empty while a character is incomplete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    vocabulary = llm._model.vocab
    for token in llm.generate(prompt, temp=temp):
        timing.times.append(time.perf_counter())
        if C.llama_vocab_is_eog(vocabulary, token):
            timing.ended = True
            break
        yield decoder.decode(piece(vocabulary, token))
        if len(timing.times) > n:  # asking the generator for more would compute one token too many
            break
    yield decoder.decode(b"", final=True)


def _token_text(llm: Llama, token: int) -> str:
    return llm._model.token_get_text(token) if token >= 0 else ""


def device_description(placement: Placement) -> str:
    """The GPUs that have layers, or the CPU as ggml names it."""
    if placement.devices and placement.n_gpu_layers:
        return ", ".join(str(gpu) for gpu in find_gpus() if gpu.name in placement.devices)
    handle = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, [ctypes.c_int])(0)  # the type of CPUs
    if not handle:
        return "CPU"
    text = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, [ctypes.c_void_p])(handle)
    return f"CPU ({text.decode('utf-8', 'replace').strip()})"
