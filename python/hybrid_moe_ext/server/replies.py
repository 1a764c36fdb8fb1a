"""JSON replies, and errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. What becomes of each exception."""

from __future__ import annotations

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import DeadlinePassed, EngineBusy, EngineClosed, HybridMoeError, RequestError

# Clients of OpenAI's make retry some statuses on their own; what will fail again tells them not to.
NO_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """What a request is refused with."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": _type(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Json:
        return Json(self.body, self.status, self.headers)


class Json(Response):
    """ASCII only: half a surrogate pair that a client sent can come back in a message."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"


def of_error(error: BaseException) -> ApiError:
    """Whatever was raised, as what the client is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error), "queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineClosed):
        return ApiError(
            503, "the server is going down: try again later", "shutting_down", headers={"retry-after": "10"}
        )
    if isinstance(error, DeadlinePassed):
        return timed_out()
    if isinstance(error, HybridMoeError):
        return ApiError(500, str(error), "engine_error", headers=NO_RETRY)
    return ApiError(
        500, "the server failed with an error of its own; its log has more", "internal_error", headers=NO_RETRY
    )


def timed_out() -> ApiError:
    return ApiError(504, "the request took longer than this server allows (timeout_s)", "timeout", headers=NO_RETRY)


# --- exception handlers of the application


async def on_error(_: Request, error: Exception) -> Response:
    return of_error(error).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """No such path, wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return ApiError(
        error.status_code, f"{error.detail}: {request.method} {request.url.path}", headers=headers
    ).response()


async def on_invalid(_: Request, error: Exception) -> Response:
    """The body is no JSON, or not what the path wants. One thing that is wrong is told."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    # Of a parameter that may be this or that, whatever it is most nearly: where the check came furthest.
    same = [other for other in found if other["loc"][:2] == found[0]["loc"][:2]]
    return invalid(max(same, key=lambda other: len(other["loc"]))).response()


def invalid(found: Any) -> ApiError:
    where = [part for part in found["loc"] if part != "body"]
    if found["type"] == "json_invalid":
        reason = found.get("ctx", {}).get("error", "not JSON")
        return ApiError(
            400, f"the body is not valid JSON: {reason} (character {where[0] if where else 0})", "invalid_json"
        )
    param = ".".join(str(part) for part in where if isinstance(part, int) or not _is_branch(str(part))) or None
    if found["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", "unknown_parameter", param)
    if found["type"] == "missing":
        if param is None:
            return ApiError(400, "the body is missing: send a JSON object", "missing_body")
        return ApiError(400, f"Missing required parameter: '{param}'.", "missing_required_parameter", param)
    message = str(found["msg"]).removeprefix("Value error, ")
    code = "invalid_type" if found["type"].endswith("_type") else "invalid_value"
    return ApiError(400, f"Invalid value for '{param or 'the body'}': {message}", code, param)


def _is_branch(part: str) -> bool:
    """pydantic names the alternative of a union in the path, such as list[str]; no parameter is called so."""
    return "[" in part or part in {"str", "int", "float", "bool"} or part[:1].isupper()
