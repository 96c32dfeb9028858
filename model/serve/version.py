"""GET /version: this server's own, as vLLM has its own there."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import Response

from urdir.model.serve.json_response import JsonResponse


async def own_version(request: Request) -> Response:
    """GET /version."""
    return JsonResponse({"version": installed()})


@cache
def installed() -> str:
    """The version that is installed; of a checkout that is not, "unknown"."""
    try:
        return version("urdir")
    except PackageNotFoundError:
        return "unknown"
