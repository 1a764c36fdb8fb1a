"""/v1/embeddings: texts to vectors in OpenAI's shape. How they are computed is the engine's (engine/embed.py)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ..engine import Embedder, Embedding, Engine
from .options import ServerOptions
from .replies import ApiError
from .schema import EmbeddingsBody
from .serving import UntilGone, told

MAX_TOKENS = 300_000  # OpenAI's, of all inputs together


class Embeddings:
    """The route. `submit` takes a while (it tokenizes): it is for a thread."""

    def __init__(self, engine: Engine, options: ServerOptions, check_open: Callable[[], None]):
        self._engine = engine
        self._check_open = check_open
        self._timeout_s = options.timeout_s
        is_off = options.embeddings == "off"
        self.embedder = None if is_off else Embedder(engine, options.embeddings, options.embedding_ctx)

    def submit(self, body: EmbeddingsBody) -> Embedding:
        """Raises ApiError or what the engine refuses it with."""
        embedder = self.embedder
        if embedder is None:
            raise ApiError(
                403, "embeddings are off: start the server with --embeddings auto", "embeddings_off", "model"
            )
        if body.dimensions not in (None, embedder.n_embd):
            raise ApiError(
                400, f"This model does not support specifying dimensions: its vectors have {embedder.n_embd}",
                "unsupported_parameter", "dimensions",
            )  # fmt: skip
        texts = [self._tokens_of(one) for one in body.input]
        for i, tokens in enumerate(texts):
            if len(tokens) > embedder.n_ctx:
                raise ApiError(
                    400,
                    f"This model's maximum context length for embeddings is {embedder.n_ctx} tokens, but input {i} has "
                    f"{len(tokens)}: cut it, or start the server with a larger --embedding-ctx",
                    "context_length_exceeded", "input",
                )  # fmt: skip
        if (n := sum(map(len, texts))) > MAX_TOKENS:
            raise ApiError(
                400, f"the inputs have {n} tokens together, {MAX_TOKENS} go into one request", "max_tokens_per_request", "input"
            )  # fmt: skip
        return embedder.submit(texts, self._timeout_s)

    def _tokens_of(self, one: str | list[int]) -> list[int]:
        self._check_open()
        return self._engine.tokenize(one) if isinstance(one, str) else one


class EmbeddingsAnswer(UntilGone):
    def __init__(self, embedding: Embedding, model: str, encoding: str):
        super().__init__()
        self._embedding = embedding
        self._model = model
        self._encoding = encoding

    def _cancel(self) -> None:
        self._embedding.cancel()

    async def _work(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.wrap_future(self._embedding.future)
            # A vector at a time: json holds Python's lock for as long as one call takes.
            body = await run_in_threadpool(lambda: b"".join(self._parts()))
            reply = Response(body, media_type="application/json")
        except Exception as error:
            reply = told(error).response()
        await reply(scope, receive, send)

    def _parts(self) -> list[bytes]:
        parts = [b'{"object":"list","data":[']
        for i, vector in enumerate(self._embedding.future.result()):
            value = (
                base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if self._encoding == "base64"
                else vector.tolist()
            )
            one = {"object": "embedding", "index": i, "embedding": value}
            parts.append((b"," if i else b"") + json.dumps(one, separators=(",", ":")).encode())
        n = self._embedding.n_tokens
        rest = {"model": self._model, "usage": {"prompt_tokens": n, "total_tokens": n}}
        parts.append(b"]," + json.dumps(rest, separators=(",", ":")).encode()[1:])
        return parts
