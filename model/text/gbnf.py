"""Grammars for llguidance: Lark unchanged, GBNF (llama.cpp's grammars) converted to Lark.

GBNF is described in llama.cpp's grammars/README.md. A rule that refers to no recursive rule becomes
one lexer expression: a grammar without recursion is a single one, which matches exactly the texts
that GBNF does. In a recursive grammar such an expression takes the longest match, as every lexer
does: give what follows `[a-z]*` a first character that is not a letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from urdir.model.errors import ConstraintError

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_NO_OPTIONS = re.compile(r"\s*%llguidance[ \t]*\{[ \t]*\}[ \t]*(?:\n|$)")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[\w-]+)\s*::=
    |(?P<name>[\w-]+)
    |"(?P<literal>(?:[^"\\\n]|\\.)*)"
    |\[(?P<class>\^?(?:[^\]\\]|\\.)*)\]
    |(?P<any>\.)
    |(?P<times>[*+?]|\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6}\s*)?)?\})
    |(?P<bar>\|)|(?P<open>\()|(?P<close>\))""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_ROOT = "root"


def as_lark(grammar: str) -> str:
    """Convert a grammar in GBNF or Lark to one for `Constraint.lark`.

    Lark may begin with `%llguidance {}`, llama.cpp's marker for it. Raises ConstraintError for
    malformed GBNF, and for token references (`<...>`).
    """
    if _RULE.search(grammar) is None:
        return _NO_OPTIONS.sub("", grammar, count=1) if _NO_OPTIONS.match(grammar) else grammar
    rules = dict(_rules(grammar))
    if _ROOT not in rules:
        raise ConstraintError("the grammar has no rule 'root'")
    for name, rule in rules.items():
        for other in rule.names:
            if other not in rules:
                raise ConstraintError(f"the grammar's rule {name!r} names {other!r}: no such rule")
    regular = _regular(rules)
    numbers = {name: number for number, name in enumerate(rules)}
    called = {n: f"{'EXPRESSION' if n in regular else 'rule'}_{i}" for n, i in numbers.items()}
    lines = [f"{called[name]}: {rule.text(called)}" for name, rule in rules.items()]
    return "\n".join([f"start: {called[_ROOT]}", *lines])


class _Rule:
    """A rule converted to Lark: parts, some of them names of other rules."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._parts: list[tuple[str, bool]] = []  # text, and whether it is a name
        self._needs_item = True

    def add(self, text: str, is_name: bool = False) -> None:
        """Append a literal, a class or another rule."""
        self._parts.append((text, is_name))
        self._needs_item = False
        if is_name:
            self.names.add(text)

    def divide(self, text: str) -> None:
        """Append a bar or bracket; an empty alternative before it becomes an empty text."""
        if self._needs_item and text != "(":
            self.add('""')
        self._parts.append((text, False))
        self._needs_item = text != ")"

    def repeat(self, times: str) -> bool:
        """Repeat the last part; False if there is none."""
        if self._needs_item:
            return False
        self._parts.append((times, False))
        return True

    def text(self, called: dict[str, str]) -> str:
        """The rule in Lark, with rule names replaced by ``called``."""
        if self._needs_item:
            self.add('""')
        return " ".join(called[text] if is_name else text for text, is_name in self._parts)


def _rules(grammar: str) -> Iterator[tuple[str, _Rule]]:
    """The rules by name, in order. The Lark parser checks their structure."""
    seen: set[str] = set()
    name, rule = "", None
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            _fail(grammar, at, "this is not GBNF, or refers to a token")
        at, kind = found.end(), str(found.lastgroup)
        if kind == "space":
            continue
        if kind == "rule":
            if rule is not None:
                yield name, rule
            name, rule = found["rule"], _Rule()
            if name in seen:
                _fail(grammar, found.start(), f"the rule {name!r} is defined twice")
            seen.add(name)
        elif rule is None:
            _fail(grammar, found.start(), "a rule begins with its name and '::='")
        else:
            _add_to(rule, kind, found[kind], grammar, found.start())
    if rule is not None:
        yield name, rule


def _add_to(rule: _Rule, kind: str, text: str, grammar: str, at: int) -> None:
    """Add a token at position ``at`` of the grammar to a rule."""
    if kind == "name":
        rule.add(text, is_name=True)
    elif kind in _PARTS:
        rule.add(_PARTS[kind](text, grammar, at))
    elif kind != "times":
        rule.divide(text)
    elif not rule.repeat(re.sub(r"\s", "", text)):
        _fail(grammar, at, f"nothing precedes {text!r}")


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """The rules that refer to no recursive rule."""
    waits = {name: set(rule.names) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in waits.items():
        for other in others:
            users[other].append(name)
    ready = [name for name, others in waits.items() if not others]
    found: set[str] = set()
    while ready:
        done = ready.pop()
        found.add(done)
        for user in users[done]:
            waits[user].discard(done)
            if not waits[user]:
                ready.append(user)
    return found


def _literal(text: str, grammar: str, at: int) -> str:
    return json.dumps("".join(_characters(text, grammar, at)), ensure_ascii=False)


def _class(text: str, grammar: str, at: int) -> str:
    """A class as a regular expression with every character escaped."""
    negated = text.startswith("^")
    raw = list(_CHARACTER.finditer(text, int(negated)))
    characters = list(_characters(text[int(negated) :], grammar, at))
    if not characters:
        if negated:
            return _ANY
        _fail(grammar, at, "an empty character class")
    items, i = [], 0
    while i < len(characters):
        is_range = i + 2 < len(characters) and raw[i + 1][0] == "-"
        last = characters[i + 2] if is_range else characters[i]
        if last < characters[i]:
            _fail(grammar, at, "a character range in reverse order")
        first = _spelled(characters[i])
        items.append(f"{first}-{_spelled(last)}" if is_range else first)
        i += 3 if is_range else 1
    return f"/[{'^' * negated}{''.join(items)}]/"


_ANY = "/(?s:.)/"
_PARTS = {"literal": _literal, "class": _class, "any": lambda *_: _ANY}


def _spelled(character: str) -> str:
    return (
        character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):x}}}"
    )


def _characters(text: str, grammar: str, at: int) -> Iterator[str]:
    """The characters of a literal or a class, with escapes resolved."""
    for found in _CHARACTER.finditer(text):
        code = found[1] or found[2] or found[3]
        if code:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                _fail(grammar, at, f"{found[0]} is not a character")
            yield chr(number)
        elif found[4]:
            if found[4] not in _ESCAPES:
                _fail(grammar, at, f"{found[0]!r} is not an escape")
            yield _ESCAPES[found[4]]
        else:
            yield found[5]


def _fail(grammar: str, at: int, why: str) -> NoReturn:
    line = grammar.count("\n", 0, at) + 1
    raise ConstraintError(f"the grammar, line {line}, at {grammar[at : at + 20]!r}: {why}")
