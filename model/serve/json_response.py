"""JSON responses in ASCII."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse


class JsonResponse(JSONResponse):
    """An ASCII JSON response."""

    def render(self, content: Any) -> bytes:
        """See `encode_json`."""
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """Encode a JSON value in ASCII. UTF-8 cannot hold a lone surrogate, which a client's field, a
    tool call or a file name may have, also in an error message."""
    return json.dumps(value, separators=(",", ":")).encode()


def iso_time(seconds: float) -> str:
    """A time since 1970 in UTC, as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
