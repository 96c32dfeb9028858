"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from urdir.driver.errors import DriverError
from urdir.model.engine.requests.answer_loop import DeviceLostError
from urdir.model.errors import (
    BusyError,
    ConstraintError,
    ContextFullError,
    ModelError,
    SettingsError,
    TemplateError,
    TokenizerError,
)
from urdir.model.serve.interface import Json


class ApiError(Exception):
    """A request is refused: the status and body of the response.

    ``param`` is the field that is at fault, ``code`` what a program can tell it by.
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
    """There is one model, and it has other names."""
    return ApiError(
        f"there is no model {name!r}; this server has {', '.join(map(repr, served))}",
        status=404,
        kind="not_found_error",
        param="model",
        code="model_not_found",
    )


def overloaded(why: str, seconds: float = 1.0) -> ApiError:
    """No more is taken now; clients try again after some ``seconds``."""
    return ApiError(
        why,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def api_error(error: Exception) -> ApiError:
    """What a client is told of any error; a stranger learns nothing of those that are our own."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return overloaded(str(error), error.retry_after)
        case ContextFullError():
            return ApiError(str(error), param="messages", code="context_length_exceeded")
        case TemplateError():
            return ApiError(str(error), param="messages", code="template_error")
        case ConstraintError():
            return ApiError(str(error), code="invalid_constraint")
        case SettingsError() | TokenizerError():
            return ApiError(str(error))
        case DeviceLostError():
            return ApiError(str(error), status=503, kind="server_error", code="device_lost")
        case ModelError() | DriverError():
            return ApiError(str(error), status=500, kind="server_error")
        case _:
            return ApiError("the server failed; its log says how", status=500, kind="server_error")
