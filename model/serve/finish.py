"""Finish reasons in OpenAI's terms."""

from __future__ import annotations

from urdir.model.engine.requests.request import Ending, Finish
from urdir.model.serve.errors import ApiError

_REASONS = {
    Finish.END: "stop",
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.FULL: "length",
}


def finish_reason(ending: Ending) -> str:
    """ "stop" or "length"; ApiError for an answer that the server aborted."""
    reason = _REASONS.get(ending.finish)
    if reason is None:
        raise ApiError("the server is stopping", status=503, kind="server_error")
    return reason
