"""The engine: many requests at a time from one model, and a long prompt that does not freeze the others. See docs/engine.md.

    with Engine("DeepSeek-V3/", n_ctx=32768) as engine:
        for token in engine.submit(Request("The licence", max_tokens=32, stop=["\\n"])):
            print(token.text, end="")

Reading order: engine (construction, submit), decode (`step()`), prefill (`step()`), cache (sequences), store and exchange
(prefixes in host memory), pace (service levels), embed (vectors of texts).
"""

from .embed import Embedder, Embedding
from .engine import Engine
from .metrics import EngineMetrics, RequestMetrics, StepReport
from .options import EngineOptions
from .request import Request, Sampling
from .stream import Finish, Result, Stream, Token

__all__ = [
    "Embedder",
    "Embedding",
    "Engine",
    "EngineMetrics",
    "EngineOptions",
    "Finish",
    "Request",
    "RequestMetrics",
    "Result",
    "Sampling",
    "StepReport",
    "Stream",
    "Token",
]
