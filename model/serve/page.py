"""The chat page: one document, put together from the files of `web`, with a strict content security
policy."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

_WEB = Path(__file__).with_name("web")
#: In this order, as one script: constants stand before what runs at the start.
_SCRIPTS = (
    *("dom", "highlight", "math", "markdown", "conversation", "store", "server"),
    *("turns", "settings", "sidebar", "composer", "chats", "main"),
)


async def no_page(request: Request) -> Response:
    """GET / of a server without the page: ollama's command asks there whether a server runs."""
    return PlainTextResponse("urdir is running")


async def page(request: Request) -> HTMLResponse:
    """GET /."""
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page, and the security headers computed from its contents."""
    script = '"use strict";\n' + "".join(_text(f"{name}.js") for name in _SCRIPTS)
    inline = {"script": script, "style": _text("style.css")}
    html, sources = _text("index.html"), {}
    for tag, text in inline.items():
        html = html.replace(f"<{tag}></{tag}>", f"<{tag}>{text}</{tag}>")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[tag] = f" 'sha256-{digest}'"
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


def _text(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")
