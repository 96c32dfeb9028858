"""Tool call formats: how models write calls, and which format a chat template uses.

The formats are those of the models' own templates on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from urdir.model.text.deltas import ToolCall
from urdir.model.text.tool_calls import CallTags, Tools, UnfinishedError


def as_call(value: Any) -> ToolCall:
    """A call from {"name", "arguments" or "parameters", "id"}; ValueError for anything else."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call must be an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = loads(arguments)
    call_id = value.get("id")
    return ToolCall(call_id if isinstance(call_id, str) else "", value["name"], dumps(arguments))


def loads(text: str) -> Any:
    """Parse JSON; UnfinishedError if it ends within a string, else ValueError."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError(error.msg) from None
        raise


def dumps(arguments: Any) -> str:
    """The arguments as text; ValueError if they are not an object or not valid Unicode."""
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _hermes(text: str, tools: Tools) -> list[ToolCall]:
    return [as_call(loads(text.strip()))]


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL
)


def _xml(text: str, tools: Tools) -> list[ToolCall]:
    if not text.lstrip().startswith("<function="):
        raise ValueError("no function")
    if (whole := _FUNCTION.fullmatch(text)) is None:
        raise UnfinishedError("no </function> at the end")
    name, body = whole[1].strip(), whole[2]
    schemas = tools.get(name, {}).get("properties", {})
    arguments, end = {}, 0
    while found := _PARAMETER.match(body, end):
        key, end = found[1].strip(), found.end()
        value = found[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, schemas.get(key) if isinstance(schemas, dict) else None)
    if body[end:].strip():
        raise ValueError("text between the parameters")
    return [ToolCall("", name, dumps(arguments))]


def _typed(text: str, schema: Any) -> Any:
    """A value written without quotes: text if the schema says so or JSON parsing fails."""
    wanted = schema.get("type") if isinstance(schema, dict) else None
    if wanted == "string":
        return text
    for spelled in (text, text.lower()):  # Python writes True
        try:
            value = json.loads(spelled)
        except (ValueError, RecursionError):
            continue
        return text if wanted is None and not isinstance(value, dict | list) else value
    return text


def _mistral(text: str, tools: Tools) -> list[ToolCall]:
    if text.lstrip().startswith("["):
        return [as_call(value) for value in loads(text.strip())]
    return list(_mistral_named(text))


_NAMED = re.compile(
    r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?(\s*\{.*)", re.DOTALL
)


def _mistral_named(text: str) -> Iterator[ToolCall]:
    while text.strip():
        if (found := _NAMED.fullmatch(text)) is None:
            raise ValueError("no name and arguments")
        arguments, end = _DECODER.raw_decode(found[3].lstrip())
        yield ToolCall(found[2] or "", found[1], dumps(arguments))
        text = found[3].lstrip()[end:].lstrip().removeprefix(MISTRAL_CALLS)


_DECODER = json.JSONDecoder(strict=False)


def _llama(text: str, tools: Tools) -> list[ToolCall]:
    """JSON objects, one after the other, with or without semicolons."""
    calls = []
    text = text.strip()
    while text:
        value, end = _DECODER.raw_decode(text)
        calls.append(as_call(value))
        text = text[end:].lstrip("; \t\n").removeprefix(PYTHON_TAG).lstrip()
    return calls


_FIRST_KEYS = ('{"name":', '{"type":"function"', '{"function":', '{"parameters":')


def _begins_as_call(text: str) -> bool | None:
    start = re.sub(r"\s", "", text)
    if start.startswith(_FIRST_KEYS):
        return True
    return None if any(key.startswith(start) for key in _FIRST_KEYS) else False


_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<named>[^<\n]+)\n```json\n(?P<fenced>.*?)\n```"
    r"|(?P<name>[^<\n]+)<｜tool▁sep｜>(?P<plain>.*?))<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def _deepseek(text: str, tools: Tools) -> list[ToolCall]:
    calls, end = [], 0
    while found := _DEEPSEEK.match(text, end):
        name = found["named"] or found["name"]
        arguments = loads(found["fenced"] or found["plain"])
        calls.append(ToolCall("", name.strip(), dumps(arguments)))
        end = found.end()
    if text[end:].strip():
        raise ValueError("text between the calls")
    return calls


PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call format, used by templates that contain all of `evidence` and none of `against`."""

    name: str
    tags: CallTags
    evidence: tuple[str, ...]
    against: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()  # tags that may be control tokens


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK_TAGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CONTROLS = (
    *_DEEPSEEK_TAGS,
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_MISTRAL_CONTROLS = (MISTRAL_CALLS, "[CALL_ID]", "[ARGS]")

# The first match wins. gpt-oss is apart, with its channels: `harmony`.
CALL_FORMATS = (
    CallFormat("deepseek-v3", CallTags(*_DEEPSEEK_TAGS, _deepseek),
               ("<｜tool▁calls▁begin｜>", "```json"), (), _DEEPSEEK_CONTROLS),
    CallFormat("deepseek-v3.1", CallTags(*_DEEPSEEK_TAGS, _deepseek),
               ("<｜tool▁calls▁begin｜>",), (), _DEEPSEEK_CONTROLS),
    CallFormat("mistral-named", CallTags(MISTRAL_CALLS, None, _mistral),
               (MISTRAL_CALLS, "[ARGS]"), (), _MISTRAL_CONTROLS),
    CallFormat("mistral", CallTags(MISTRAL_CALLS, None, _mistral),
               (MISTRAL_CALLS,), (), _MISTRAL_CONTROLS),
    CallFormat("qwen3-coder", CallTags(*_TOOL_CALL, _xml),
               ("<tool_call>", "<function=", "<parameter="), (), _TOOL_CALL),
    CallFormat("hermes", CallTags(*_TOOL_CALL, _hermes),
               ("<tool_call>", "</tool_call>"), ("<arg_key>", "<tool_calls>"), _TOOL_CALL),
    CallFormat("llama-3", CallTags(PYTHON_TAG, None, _llama, _begins_as_call),
               ("<|start_header_id|>", "ipython", "parameters"), ("<function=",), (PYTHON_TAG,)),
)  # fmt: skip

# For templates without a known format; tools are described as text (`generic_tools`).
GENERIC = CallFormat("generic", CallTags(*_TOOL_CALL, _hermes), (), (), _TOOL_CALL)


def find_call_format(template: str) -> CallFormat:
    """The call format of a chat template; GENERIC if it contains no known one."""
    for form in CALL_FORMATS:
        if all(e in template for e in form.evidence) and not any(
            e in template for e in form.against
        ):
            return form
    return GENERIC
