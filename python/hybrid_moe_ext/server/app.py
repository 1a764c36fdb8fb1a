"""The routes. What they take is schema.py's, what they answer answers.py's, how a request runs serving.py's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from .. import __version__
from ..engine import Engine, Request, Stream
from ..errors import HybridMoeError
from . import translate
from .answers import ChatShape, Shape, TextShape
from .chat import ChatTemplate
from .embeddings import Embeddings, EmbeddingsAnswer
from .guard import Guard
from .metrics import Metrics
from .options import ServerOptions
from .replies import ApiError, Json, of_error, on_error, on_http_error, on_invalid
from .schema import Body, ChatBody, DetokenizeBody, EmbeddingsBody, SamplingFields, TextBody, TokenizeBody, lenient
from .serving import StreamedAnswer, WholeAnswer
from .threads import Threads
from .timeline import Timeline

STATIC = Path(__file__).parent / "static"


def create_app(engine: Engine, options: ServerOptions, metrics: Metrics | None = None) -> FastAPI:
    """`metrics`: one whose on_step the engine has. The application closes the engine when it ends."""
    return _Server(engine, options, metrics or Metrics()).app()


class _Server:
    def __init__(self, engine: Engine, options: ServerOptions, metrics: Metrics):
        self._engine = engine
        self._options = options
        self._metrics = metrics
        self._template = ChatTemplate(engine)
        self._threads = Threads()
        self._embeddings = Embeddings(engine, options, self._threads.check_open)
        self._timeline = Timeline(engine, self._embeddings.embedder)
        self._name = options.name or "model"
        metrics.watch(engine)

    def app(self) -> FastAPI:
        app = FastAPI(
            title="hybrid-moe-ext", version=__version__, docs_url=None, redoc_url=None, lifespan=self._lifespan,
            default_response_class=Json,
        )  # fmt: skip
        app.post("/v1/chat/completions")(self._taking(ChatBody, self.chat))
        app.post("/v1/completions")(self._taking(TextBody, self.complete))
        app.post("/v1/embeddings")(self._taking(EmbeddingsBody, self.embed))
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.get("/running")(self.running)
        app.get("/timeline")(self.timeline)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/static", StaticFiles(directory=STATIC))
        app.add_exception_handler(RequestValidationError, on_invalid)
        app.add_exception_handler(HTTPException, on_http_error)
        for kind in (ApiError, HybridMoeError, Exception):
            app.add_exception_handler(kind, on_error)
        app.add_middleware(Guard, options=self._options)
        if self._options.cors_origins:  # outside of the guard: a browser's question before a request bears no key
            app.add_middleware(
                CORSMiddleware, allow_origins=list(self._options.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
            )  # fmt: skip
        return app

    def _taking(self, kind: type[Body], route: Callable[[Body], Awaitable[Response]]) -> Callable[..., Any]:
        """The route for FastAPI, which reads what a body may have from the annotation."""

        async def called(body: Any) -> Response:
            return await route(body)

        called.__annotations__["body"] = lenient(kind) if self._options.unknown_fields == "ignore" else kind
        called.__annotations__["return"] = Response
        return called

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(self._threads.close)
        await run_in_threadpool(self._engine.close)

    # --- completions

    async def chat(self, body: ChatBody) -> Response:
        def prepare() -> tuple[Request, Shape]:
            chat = translate.chat_request(
                body, self._engine, self._template, self._options.timeout_s, self._options.reasoning == "auto"
            )
            shape = ChatShape(self._name, self._engine, bool(body.logprobs), chat.reader, chat.offer)
            return chat.request, shape

        return await self._answer(body, prepare)

    async def complete(self, body: TextBody) -> Response:
        def prepare() -> tuple[Request, Shape]:
            request = translate.text_request(body, self._engine, self._options.timeout_s)
            return request, TextShape(self._name, self._engine, body.logprobs is not None)

        return await self._answer(body, prepare)

    async def _answer(self, body: SamplingFields, prepare: Callable[[], tuple[Request, Shape]]) -> Response:
        self._check_model(body.model)

        # Templates, tokenizing and grammars take a while, so that a thread does them.
        def submit() -> tuple[Stream, Shape]:
            given, shape = prepare()
            stream = self._engine.submit(given)
            most = self._engine.options.default_max_tokens if given.max_tokens is None else given.max_tokens
            most = min(most, self._engine.n_ctx - len(given.prompt))
            self._metrics.requests.add(stream, len(given.prompt), most)
            return stream, shape

        stream, shape = await self._threads.run(submit)
        if not body.stream:
            return WholeAnswer(stream, shape, self._metrics.finished)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamedAnswer(stream, shape, self._metrics.finished, include_usage, self._options.ping_s)

    async def embed(self, body: EmbeddingsBody) -> Response:
        self._check_model(body.model)
        embedding = await self._threads.run(lambda: self._embeddings.submit(body))
        return EmbeddingsAnswer(embedding, self._name, body.encoding_format or "float")

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ApiError(
                404, f"The model `{name}` does not exist: this server has `{self._name}`", "model_not_found", "model"
            )

    # --- everything else

    async def models(self) -> Json:
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Json:
        self._check_model(name)
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "hybrid-moe-ext",
            "context_length": self._engine.n_ctx,
        }

    def page(self) -> Response:
        # Nothing but its own files runs in it, whatever a model writes.
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return FileResponse(STATIC / "index.html", headers=headers)

    async def tokenize(self, body: TokenizeBody) -> Json:
        add_bos = None if body.add_special else False
        tokens = await self._threads.run(lambda: self._engine.tokenize(body.content, add_bos, body.parse_special))
        return Json({"tokens": tokens})

    async def detokenize(self, body: DetokenizeBody) -> Json:
        data = await self._threads.run(lambda: self._engine.detokenize(body.tokens)) if body.tokens else b""
        return Json({"content": data.decode("utf-8", "replace")})

    # Not in a thread: those may all be busy with long prompts.
    async def health(self) -> Json:
        try:
            self._engine.submit(Request([0], max_tokens=0))  # ends at once, if the engine takes requests
        except HybridMoeError as error:
            told = of_error(error)
            return Json({"status": "error", **told.body}, 503)
        return Json({"status": "ok", "needs_key": bool(self._options.api_key)})

    async def running(self) -> Json:
        queued = self._engine.metrics().queued_now
        return Json({"running": self._metrics.requests.told(), "queued": queued})

    async def timeline(self) -> Json:
        return Json(await self._threads.run(self._timeline.read))

    async def metrics(self) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)
