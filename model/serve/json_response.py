"""JSON as the server sends it."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class JsonResponse(JSONResponse):
    """A response of JSON, in ASCII."""

    def render(self, content: Any) -> bytes:
        """See `encode_json`."""
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """A JSON value in ASCII: UTF-8 has no bytes for a lone surrogate, which a client's field, a
    call of a tool or a file's name may have, in an error, too."""
    return json.dumps(value, separators=(",", ":")).encode()
