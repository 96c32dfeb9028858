r"""White space in constrained JSON: one blank after `:` and `,`, or a requested pattern.

Some models write blanks forever if allowed. So any requested white space becomes a pattern of
bounded length, made of runs of blanks such as `[ \n]*` or `\n?[ ]{0,8}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from urdir.model.errors import ConstraintError

MOST_BLANKS = 32  # in a run
_MOST_RUNS = 4  # in a pattern
_ANY = " \t\r\n"
_ESCAPES = {
    **{r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\s": _ANY},
    **{r"\x20": " ", r"\x09": "\t", r"\x0a": "\n", r"\x0d": "\r"},
}
_BLANK = r"[ \n\r\t]|\\[nrts]|\\x20|\\x0[9aAdD]"
_BLANKS = rf"{_BLANK}|\[(?:{_BLANK})+\]"
_REPEAT = r"[*+?]|\{\d{1,4}(?:,\d{0,4})?\}"
_PATTERN = f"(?:(?:{_BLANKS})(?:{_REPEAT})?){{0,{_MOST_RUNS}}}"
_SUPPORTED = (
    r"only runs of blanks are supported (' ', '\n', '\r', '\t', '\s', in brackets or not, with *, "
    f"+, ? or {{m,n}}), {_MOST_RUNS} at most"
)


def json_options(given: Any, whitespace_pattern: str | None) -> dict[str, Any]:
    """llguidance's options of a schema (its docs/json_schema.md) with bounded white space.

    ``given`` are the schema's own, `x-guidance`; ``whitespace_pattern`` is vLLM's field, for white
    space wherever JSON allows it. Raises ConstraintError: an unknown option, a wrong type, or a
    pattern that matches more than blanks.
    """
    if not isinstance(given, Mapping):
        raise ConstraintError("x-guidance must be an object")
    options = {name: _read(name, value) for name, value in given.items() if value is not None}
    if whitespace_pattern is not None:
        if "whitespace_pattern" in options:
            raise ConstraintError("whitespace_pattern: x-guidance has one too; leave one out")
        options["whitespace_pattern"] = bounded_blanks("whitespace_pattern", whitespace_pattern)
    if options.pop("whitespace_flexible", False):
        options.setdefault("whitespace_pattern", bounded_blanks("", r"\s*"))
    after = "" if "whitespace_pattern" in options else " ?"
    return {
        "coerce_one_of": True,
        "whitespace_flexible": False,
        "item_separator": f",{after}",
        "key_separator": f":{after}",
        **options,
    }


def bounded_blanks(name: str, pattern: Any) -> str:
    r"""``pattern`` with each run of blanks bounded by `MOST_BLANKS`: `[ \n]*` is up to 32 of them.

    Raises ConstraintError, which names ``name``, for a pattern of anything else.
    """
    if not isinstance(pattern, str) or not re.fullmatch(_PATTERN, pattern):
        raise ConstraintError(f"{name}: {_SUPPORTED}")
    runs = re.findall(f"({_BLANKS})({_REPEAT})?", pattern)
    return "".join(_run(name, blanks, repeat) for blanks, repeat in runs)


def _run(name: str, blanks: str, repeat: str) -> str:
    low, high = _bounds(repeat)
    if low > MOST_BLANKS:
        raise ConstraintError(f"{name}: a run of more than {MOST_BLANKS} blanks is not supported")
    chars = {char for one in re.findall(_BLANK, blanks) for char in _ESCAPES.get(one.lower(), one)}
    codes = "".join(f"\\x{ord(char):02x}" for char in sorted(chars))
    return f"[{codes}]{{{low},{min(high, MOST_BLANKS)}}}"


def _bounds(repeat: str) -> tuple[int, int]:
    """Minimum and maximum number of repetitions."""
    known = {"": (1, 1), "?": (0, 1), "*": (0, MOST_BLANKS), "+": (1, MOST_BLANKS)}
    if repeat in known:
        return known[repeat]
    low, comma, high = repeat[1:-1].partition(",")
    return int(low), int(high) if high else MOST_BLANKS if comma else int(low)


def _separator(mark: str) -> Callable[[str, Any], str]:
    def read(name: str, pattern: Any) -> str:
        between = re.compile(f"({_PATTERN}){mark}({_PATTERN})")
        found = between.fullmatch(pattern) if isinstance(pattern, str) else None
        if found is None:
            raise ConstraintError(f"{name}: must be {mark!r} between blanks; {_SUPPORTED}")
        before, after = (bounded_blanks(name, blanks) for blanks in found.groups())
        return f"{before}{mark}{after}"

    return read


def _of_type(kind: type, called: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ConstraintError(f"{name}: must be {called}")
        return value

    return read


_flag = _of_type(bool, "true or false")
_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "item_separator": _separator(","),
    "key_separator": _separator(":"),
    "whitespace_pattern": bounded_blanks,
    "whitespace_flexible": _flag,
    "coerce_one_of": _flag,
    "lenient": _flag,
    "json_allowed_escapes": _of_type(str, "text"),
    "json_allow_general_unicode_escapes": _flag,
}


def _read(name: str, value: Any) -> Any:
    if name not in _OPTIONS:
        known = ", ".join(_OPTIONS)
        raise ConstraintError(f"x-guidance: {str(name)[:40]!r} is not a known option, {known}")
    return _OPTIONS[name](f"x-guidance.{name}", value)
