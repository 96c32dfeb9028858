"""The chat page: one file with a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def page(request: Request) -> HTMLResponse:
    """GET /."""
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page, and the security headers computed from its contents."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    sources = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind] += f" 'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src{sources['script']}; style-src{sources['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
