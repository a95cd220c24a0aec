"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``, on every path.

What the caller can fix is told in a sentence.
What happened inside is told to the log; the caller learns only that it was not their fault.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from minivllm.errors import ContextLengthError, EngineDeadError, EngineLostError, MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm.server.bodies.other_clients import ADVICE

logger = logging.getLogger(__name__)

MAX_REPORTED_PROBLEMS = 3
MAX_PROBLEMS_READ = 1000
MAX_SHOWN_CHARACTERS = 200


class ErrorDetail(TypedDict):
    """message: a sentence. param: the field it is about. code: a stable name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than a success: the HTTP status and what the error body says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(error=self.detail)

    @property
    def error_class(self) -> str:
        """One of a fixed set of names, fit to label a metric."""
        return _STATUSES.get(self.status, ("other", ""))[0]


_STATUSES = {
    400: ("bad_request", "The request cannot be served; the error names the field."),
    401: ("unauthorized", "The API key is missing or wrong."),
    403: ("forbidden", "The operator does not allow it."),
    404: ("not_found", "There is no such model."),
    405: ("method_not_allowed", ""),
    408: ("too_slow", ""),
    409: ("conflict", "The name is taken, or the adapter is in use."),
    413: ("too_large", "The body is too large."),
    415: ("unsupported_media", "The body is not JSON, or is compressed."),
    429: ("overloaded", "The queue is full; Retry-After says when to come back."),
    499: ("client_left", ""),
    500: ("internal", "The server failed."),
    502: ("bad_gateway", "The server that was answering has gone."),
    503: ("unavailable", "The engine is dead, or the server is shutting down."),
    504: ("timeout", "The request took longer than the server allows."),
}
"""Class for metrics, and what the schema says of those that an endpoint documents."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The failures that an endpoint documents, besides those every path has."""
    return {status: {"model": ErrorBody, "description": _STATUSES[status][1]} for status in statuses}


def unsupported(param: str, why: str) -> ApiError:
    """400 for a parameter, or a value of one, that this server does not have."""
    return ApiError(400, f"{param} {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """400 for a value that cannot be."""
    return ApiError(400, f"{param} {why}", param=param, code="invalid_value")


def engine_dead() -> ApiError:
    return ApiError(
        503, "The engine has died and the server is stopping.", type="server_error", code="engine_dead"
    )


def engine_lost() -> ApiError:
    message = (
        "The engine that worked on this request has died, or all are being started again: send it again."
    )
    return ApiError(503, message, type="server_error", code="engine_lost", headers={"retry-after": "1"})


def shutting_down() -> ApiError:
    message = "The server is shutting down."
    return ApiError(503, message, type="server_error", code="shutting_down", headers={"retry-after": "5"})


def timed_out(seconds: float | None) -> ApiError:
    limit = "its time limit" if seconds is None else f"{seconds:g} seconds"
    return ApiError(
        504,
        f"The request was not done within {limit}: ask for fewer tokens, or try again when the server is "
        "less busy.",
        type="server_error",
        code="timeout",
        # Official clients would repeat it at once, and it would time out again.
        headers={"x-should-retry": "false"},
    )


def to_api_error(error: BaseException) -> ApiError:
    """Any exception as an answer; unexpected ones are logged with their traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineLostError):
        return engine_lost()
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, MinivllmError):
        message = str(error)
        return ApiError(400, message, param=_named_parameter(message), code="invalid_value")
    if isinstance(error, TimeoutError):
        return timed_out(None)
    logger.error("A request failed.", exc_info=error)
    return ApiError(
        500, "The server failed to answer this request.", type="server_error", code="internal_error"
    )


@contextmanager
def named_in(field: str) -> Iterator[None]:
    """Blame a prompt that is too long on the field of the body that it came in."""
    try:
        yield
    except ContextLengthError as error:
        raise ApiError(400, str(error), param=field, code="context_length_exceeded") from None


def _named_parameter(message: str) -> str | None:
    """The field that a sentence of SamplingParams or InputProcessor begins with, and where it is inside."""
    path = message.split(" ", 1)[0].rstrip(":")
    known = *SamplingParams.__struct_fields__, "priority", "cache_salt", "prompt", "messages"
    return path if path.split(".", 1)[0] in known else None


def error_response(error: ApiError) -> Response:
    return Response(
        msgspec.json.encode(error.body), error.status, headers=error.headers, media_type="application/json"
    )


def validation_error(problems: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """What pydantic found wrong with a body, as one sentence per problem with the path to it."""
    problems = problems[:MAX_PROBLEMS_READ]
    # Of the members of a union, the one that understood most of the value has the most to say.
    # What is of another type than expected has other fields as well, which is no further problem.
    other_types = {
        problem["loc"][:-1]
        for problem in problems
        if problem["type"] == "literal_error" and problem["loc"][-1] == "type"
    }
    problems = [one for one in problems if one["loc"][:-1] not in other_types or one["loc"][-1] == "type"]
    problems = sorted(problems, key=lambda problem: -_path(problem, body).count("."))
    first = problems[0]
    param = _path(first, body)
    others = [problem for problem in problems if not _contains(problem, body, param)]
    sentences = list(dict.fromkeys(_sentence(problem, body) for problem in others))
    if len(sentences) > MAX_REPORTED_PROBLEMS:
        sentences[MAX_REPORTED_PROBLEMS:] = [
            f"There are {len(sentences) - MAX_REPORTED_PROBLEMS} more problems."
        ]
    code = _CODE_OF_PROBLEM.get(first["type"])
    return ApiError(400, " ".join(sentences), param=param or None, code=code or "invalid_value")


_CODE_OF_PROBLEM = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "none_required": "unsupported_parameter",
}


def _contains(problem: Mapping[str, Any], body: Any, param: str) -> bool:
    """True if the problem is about something that ``param`` is a part of:
    another member of a union did not fit."""
    return problem["type"] != "extra_forbidden" and param.startswith(f"{_path(problem, body)}.")


def _sentence(problem: Mapping[str, Any], body: Any) -> str:
    path = _path(problem, body) or "The body"
    kind = problem["type"]
    if kind == "extra_forbidden":
        advice = ADVICE.get(str(problem["loc"][-1])) if "." not in path else None
        return f"Unknown parameter: {path!r} is not supported here{f': {advice}' if advice else ''}."
    if kind == "none_required":
        return f"{path} is not supported here: leave it out."
    if kind == "union_tag_invalid":
        tag = _shortened(str(problem["ctx"]["tag"]))
        return f"{path} is {tag!r}, but may only be {problem['ctx']['expected_tags']} here."
    if kind in ("missing", "union_tag_not_found"):
        return f"{path} is missing."
    if kind == "json_invalid":
        return "The body is not valid JSON."
    if kind in ("model_attributes_type", "model_type", "dict_type") and path == "The body":
        return "The body must be a JSON object, sent with the header Content-Type: application/json."
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        return f"{path} must be an object."
    return f"{path}: {_shortened(str(problem['msg']).replace(' after validation', ''))}."


def _path(problem: Mapping[str, Any], body: Any) -> str:
    """``messages.0.content``, as the caller wrote it:
    pydantic's own names for the members of a union are left out."""
    if problem["type"] == "json_invalid":
        return ""
    if problem["loc"][:1] in (("query",), ["query"]):
        return _shortened(str(problem["loc"][-1]))
    location = [part for part in problem["loc"] if part not in ("body", "path", "query")]
    is_missing = problem["type"] == "missing"
    names = _names_in(location[:-1] if is_missing else location, body)
    if is_missing and location:
        names.append(str(location[-1]))
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = str(problem["ctx"]["discriminator"])
        names.append(discriminator.strip("'") if discriminator.startswith("'") else "type")
    return _shortened(".".join(names))


def _not_json(content_type: str | None) -> ApiError:
    """415. A page of another site may send a text without asking,
    and JSON only if the server allows it (CORS)."""
    sent = "without that header" if content_type is None else f"as {_shortened(content_type)!r}"
    message = (
        f"The body must be a JSON object, sent with the header Content-Type: application/json, not {sent}."
    )
    return ApiError(415, message, code="unsupported_content_type")


def _names_in(location: Sequence[Any], body: Any) -> list[str]:
    """The parts of a location that lead through the body.

    A member of a union may be called like a key that is there as well (a text part has the key "text"). So
    the way that reaches the last part counts, and of several the longest one.
    """
    ways: list[tuple[Any, list[str], bool]] = [(body, [], False)]
    for part in location:
        taken = [
            (_inside(value, part), [*names, str(part)], True) for value, names, _ in ways if _has(value, part)
        ]
        skipped = [] if isinstance(part, int) else [(value, names, False) for value, names, _ in ways]
        ways = [*taken, *skipped] or ways
    return max(ways, key=lambda way: (way[2], len(way[1])))[1]


def _has(value: Any, part: Any) -> bool:
    return (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int))


def _inside(value: Any, part: Any) -> Any:
    if isinstance(value, dict):
        return value[part]
    return value[part] if part < len(value) else None


def _shortened(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure of ``app`` the OpenAI form, those of the framework too."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        if isinstance(getattr(error, "body", None), bytes):  # the framework read no JSON from it
            return error_response(_not_json(request.headers.get("content-type")))
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        return error_response(validation_error(problems, getattr(error, "body", None)))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = getattr(error, "headers", None)
        if status == 404:
            message = f"There is no {_shortened(request.scope['path'])} here."
        elif status == 405:
            allowed = (headers or {}).get("Allow", "another method")
            message = f"{request.scope['path']} answers {allowed}, not {_shortened(request.method)}."
        elif status == 413:
            message = str(getattr(error, "detail", "The body is too large."))
        else:
            message = "The body is not valid JSON."
        code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(
            status, "invalid_value"
        )
        return error_response(ApiError(status, message, code=code, headers=headers))

    for kind in (ApiError, MinivllmError):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_api_error)
