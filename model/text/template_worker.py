"""Worker process that renders untrusted chat templates (parent side: `sandbox`).

Jinja's sandbox keeps a template from reaching Python, but bounds neither time nor memory: this
process limits itself, and its parent kills it after a timeout.
Requests and replies (`sandbox_main` starts this and describes the framing):
    {"path": [str], "timezone": str or null}            ->  {"id": 0}, when ready
    {"id": int, "template": str, "variables": {...} or null}    ->
        {"id": int, "text": str} or {"id": int, "error": str, "fatal": bool}
Without variables the template is only compiled, and the text is empty.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Environment

    from urdir.model.text.sandbox_main import Messages

OUTPUT_LIMIT = 1 << 20  # characters
ERROR_LIMIT = 1000  # characters
ORPHAN_SECONDS = 10  # a rendering ends after this time, in case the parent died


def _environment() -> Environment:
    """The Jinja environment that chat templates expect (that of Hugging Face's transformers)."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Stricter sandbox: a name with a leading underscore is an error, never undefined."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if attribute.startswith("_"):
                self.unsafe_undefined(obj, attribute)
            return super().getattr(obj, attribute)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            appends = isinstance(obj, list) and attr == "append"  # Kimi K2 collects turns so
            return appends or super().is_safe_attribute(obj, attr, value)

        def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
            name = type(obj).__name__
            raise SecurityError(f"access to the attribute '{attribute}' of a {name} is not allowed")

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks text for training; rendered as plain
        text."""

        tags = {"generation"}  # noqa: RUF012 (so declared in Jinja)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_listed, **options)


def _listed(value: Any) -> list[Any]:
    """What a filter such as map yields, as a list."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


class _Renderer:
    """Renders templates; caches the last one compiled, since every turn of a chat uses it."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._source: str | None = None
        self._generate: Callable[..., Any]

    def render(self, source: str, variables: Mapping[str, Any] | None) -> str:
        if source != self._source:
            self._generate = self._environment.from_string(source).generate
            self._source = source
        parts, size = [], 0
        for part in () if variables is None else self._generate(variables):
            size += len(part)
            if size > OUTPUT_LIMIT:
                _raise_exception(f"its output exceeds {OUTPUT_LIMIT:,} characters")
            parts.append(part)
        return "".join(parts)


def _reply(renderer: _Renderer, request: Mapping[str, Any], memory: int) -> dict[str, Any]:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return {"text": renderer.render(request["template"], request["variables"])}
    except MemoryError:
        return {"error": f"it needs more than {memory >> 20} MB of memory", "fatal": True}
    except RecursionError:
        return {"error": "it nests too deeply", "fatal": False}
    except TemplateSyntaxError as error:
        return {"error": f"syntax error in line {error.lineno}: {error.message}", "fatal": False}
    except Exception as error:  # an untrusted template can raise anything
        text = str(error) if isinstance(error, TemplateError) else repr(error)
        return {"error": text[:ERROR_LIMIT], "fatal": False}


def _alarm(seconds: int) -> None:
    """End this process after `seconds`; 0: never."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


#: Template that triggers the lazy imports of Jinja and Python.
_LATE = (
    *("jinja2.constants", "jinja2.debug", "html", "pprint", "textwrap", "traceback"),
    *("encodings.unicode_escape", "unicodedata"),
)
_WARM_UP = """{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f({"a": [1.5, none]}) | upper }}
{{- strftime_now("%d %b %Y %p") }}{{ "%s" | format("é") }}{{ missing.attribute }}"""


def _prepared(settings: Mapping[str, Any]) -> _Renderer:
    """A renderer that needs no further files."""
    if settings["timezone"] is not None:
        os.environ["TZ"] = settings["timezone"]
    if hasattr(time, "tzset"):
        time.tzset()
    renderer = _Renderer()
    for name in _LATE:
        importlib.import_module(name)
    for source in (_WARM_UP, "{% if %}"):
        _reply(renderer, {"template": source, "variables": {}}, 0)
    return renderer


def serve(settings: Mapping[str, Any], messages: Messages, limits: ModuleType) -> None:
    """Answer requests until the parent closes the pipe."""
    renderer = _prepared(settings)
    limits.confine()
    messages.write({"id": 0})
    while (request := messages.read()) is not None:
        _alarm(ORPHAN_SECONDS)
        reply = _reply(renderer, request, limits.MEMORY_LIMIT)
        _alarm(0)
        messages.write({"id": request["id"]} | reply)
