"""What clients may send, as pydantic models: OpenAI's fields, and a few of the engine's own. Unknown ones are refused, as OpenAI
does. What a field may hold is checked here; what the engine makes of it is translate.py's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from .front_ends import known

# A body of megabytes that is wrong a million times must not cost a million errors while nobody else is served: lists stop at
# the first, and what has no order has a largest size.
MAX_FIELDS = 200
MAX_STOPS = 16
MAX_BIASES = 4096
MAX_TEXTS = 2048  # OpenAI's, of /v1/embeddings

Item = TypeVar("Item")


class _FailFast(FailFast):
    def __hash__(self) -> int:  # typing wants one from what stands in a union
        return hash(self.fail_fast)


Few = Annotated[list[Item], _FailFast()]


def _at_most(n: int) -> BeforeValidator:
    def check(given: Any) -> Any:
        if isinstance(given, (list, dict)) and len(given) > n:
            raise ValueError(f"give up to {n} of them")
        return given

    return BeforeValidator(check)


def _some(n: int | None) -> int | None:
    if n is not None and n < 1 and n != -1:
        raise ValueError("give 1 or more, or -1 for the server's default")
    return n


def _prompt(given: Any) -> Any:
    """A text, or tokens; also in a list of its own."""
    one = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)) else given
    if isinstance(one, str) or (isinstance(one, list) and all(type(token) is int for token in one)):
        return one
    if isinstance(given, list) and len(given) > 1 and isinstance(given[0], (str, list)):
        raise ValueError("one prompt per request: send a request for each")
    raise ValueError("give a text or a list of token ids")


def _texts(given: Any) -> Any:
    """A text, a list of texts, token ids, or a list of lists of token ids: to a list of texts or of lists of ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists, and at least one")
    if len(given) > MAX_TEXTS:
        raise ValueError(f"{len(given)} inputs are too many: up to {MAX_TEXTS} go into one request")
    kind = str if isinstance(given[0], str) else list
    for i, one in enumerate(given):
        if not isinstance(one, kind):
            raise ValueError(
                f"input {i} is of another kind than the first: give only texts, or only lists of token ids"
            )
        if not one:
            raise ValueError(f"input {i} is empty: leave it out")
        if kind is list and not all(type(token) is int for token in one):
            raise ValueError(f"input {i} has what is no token id")
    return given


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    _is_request: ClassVar[bool] = False  # a whole one, in which front ends put fields of their own

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} parameters are too many")
        return known(given, set(cls.model_fields)) if isinstance(given, dict) and cls._is_request else given


class Part(BaseModel):
    """Of a message; only text can be used, other kinds are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class Message(BaseModel):
    # Templates read more than OpenAI names (tool_name, ...).
    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Few[Part] | None = None
    name: str | None = None
    tool_calls: Few[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer, as DeepSeek, llama-server and this server call it
    reasoning: str | None = None  # the same, as OpenRouter and newer vLLM do


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(_Body):
    """What both kinds of completion take. None is always "not given"."""

    _is_request = True
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=-1)  # -1: LM Studio's and llama-server's "no limit"
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, _at_most(MAX_BIASES)] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str] | str | None, _at_most(MAX_STOPS)] = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    # The engine's own, as llama-server and others name them.
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, lt=2**31)
    grammar: str | None = None
    ignore_eos: bool | None = None
    # Without an effect on the answer of one local model.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatBody(SamplingFields):
    messages: Few[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int | None, AfterValidator(_some)] = None
    max_tokens: Annotated[int | None, AfterValidator(_some)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Few[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Few[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # passed to the template, such as enable_thinking


class TextBody(SamplingFields):
    prompt: Annotated[str | list[Any], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingsBody(_Body):
    _is_request = True
    model: str
    input: Annotated[list[Any], BeforeValidator(_texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None  # without an effect


class TokenizeBody(_Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    model: str | None = None


class DetokenizeBody(_Body):
    tokens: Few[int]
    model: str | None = None


Body = TypeVar("Body", bound=_Body)


def lenient(kind: type[Body]) -> type[Body]:
    """The same, but unknown fields are left out."""
    return type(kind.__name__, (kind,), {"model_config": ConfigDict(extra="ignore"), "__module__": kind.__module__})
