"""Errors, in the shape of each protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from urdir.driver.errors import DriverError
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.errors import (
    BusyError,
    ConstraintError,
    ContextFullError,
    LongConversationError,
    ModelError,
    PrefixFileError,
    SettingsError,
    TemplateError,
    TokenizerError,
)
from urdir.model.serve.interface import Json


class ApiError(Exception):
    """A refused request: status and body of the response.

    ``param`` is the offending field, ``code`` identifies the error for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: Json = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    """The error for a model name that is not served."""
    return ApiError(
        f"there is no model {name!r}; this server has {', '.join(map(repr, served))}",
        status=404,
        kind="not_found_error",
        param="model",
        code="model_not_found",
    )


def overloaded(why: str, seconds: float = 1.0) -> ApiError:
    """The error for an overloaded server; clients retry after ``seconds``."""
    return ApiError(
        why,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def loading() -> ApiError:
    """The error before there is a model to answer with."""
    return ApiError(
        "loading: the model is being read",
        status=503,
        kind="unavailable_error",
        code="loading",
        headers={"Retry-After": "1"},
    )


#: The field of a request that has its text, by the beginning of its path.
_TEXTS = {
    "/v1/chat": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/rerank": "documents",
    "/v2/rerank": "documents",
    "/rerank": "documents",
    "/embeddings": "input",
    "/completion": "prompt",
    "/api/chat": "messages",
    "/api/generate": "prompt",
    "/api/embed": "input",
    "/apply-template": "messages",
}


def text_field(path: str) -> str | None:
    """The field that has the text of a request; None where it is one of several."""
    return next((name for begin, name in _TEXTS.items() if path.startswith(begin)), None)


def api_error(error: Exception, text: str | None = None) -> ApiError:
    """Convert any error to a response; internal errors reveal nothing to clients. ``text`` is the
    field of the request that has its text."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return overloaded(str(error), error.retry_after)
        case ContextFullError() | LongConversationError():
            return ApiError(str(error), param=text, code=CONTEXT_LENGTH)
        case TemplateError():
            return ApiError(str(error), param=text, code="template_error")
        case ConstraintError():
            return ApiError(str(error), code="invalid_constraint")
        case TokenizerError():
            return ApiError(str(error), param=text)
        case SettingsError() | PrefixFileError():
            return ApiError(str(error))
        case DeviceLostError():
            return ApiError(str(error), status=503, kind="server_error", code="device_lost")
        case ModelError() | DriverError():
            return ApiError(str(error), status=500, kind="server_error")
        case _:
            return ApiError("internal error; see the server's log", status=500, kind="server_error")


#: The code of a prompt that does not fit.
CONTEXT_LENGTH = "context_length_exceeded"
#: Anthropic's types of errors, by status.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> Json:
    """The body of an error as Anthropic's clients read it."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind, message = _ANTHROPIC.get(error.status, usual), str(error)
    if error.body["error"]["code"] == CONTEXT_LENGTH:  # by which clients know that they must cut
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: ApiError) -> Json:
    """The body of an error as ollama's clients read it."""
    return {"error": str(error)}


#: Beginnings of paths whose errors have another shape than OpenAI's.
_SHAPES = {"/v1/messages": anthropic_error, "/api/": ollama_error}


def error_body(path: str, error: ApiError) -> Json:
    """The body of an error in the shape of the protocol that a path belongs to."""
    shape = next((shape for begin, shape in _SHAPES.items() if path.startswith(begin)), None)
    return error.body if shape is None else shape(error)
