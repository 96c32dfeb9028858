"""The parser: regular expressions over statements, one pass.

This module has the module level; ``entry`` parses kernels, ``source`` has the text and shared
helpers.
"""

from __future__ import annotations

import re

from urdir.ptxgen.ptx.entry import parse_entry
from urdir.ptxgen.ptx.source import STATEMENT, Source
from urdir.ptxgen.ptx.syntax import Entry, Module, Variable

_VERSION = re.compile(r"\.version\s+(\d+)\.(\d+)")
_TARGET = re.compile(r"\.target\s+(\w+)((?:\s*,\s*\w+)*)")
_ADDRESS_SIZE = re.compile(r"\.address_size\s+(\d+)")
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")


def parse(text: str) -> Module:
    """Parse a PTX module; raises PtxSyntaxError (line and text) at the first error."""
    source = Source(text)
    version: tuple[int, int] | None = None
    target = ""
    options: tuple[str, ...] = ()
    entries: dict[str, Entry] = {}
    variables: list[Variable] = []
    at = 0
    while (at := source.skip_space(at)) < len(source.text):
        if m := _VERSION.match(source.text, at):
            version = (int(m[1]), int(m[2]))
        elif m := _TARGET.match(source.text, at):
            target = m[1]
            options = tuple(part.strip() for part in m[2].split(",")[1:])
        elif m := _ADDRESS_SIZE.match(source.text, at):
            if m[1] != "64":
                raise source.error("only 64-bit addresses are supported", at, m[0])
        elif m := _ENTRY.match(source.text, at):
            if m[1] in entries:
                raise source.error(f"entry {m[1]!r} is defined twice", at, m[1])
            entry, at = parse_entry(source, m, variables)
            entries[entry.name] = entry
            continue
        elif (m := STATEMENT.match(source.text, at)) and m[3] is not None:
            variables.append(source.variable(m[3], at))
        else:
            raise source.error("not a module-level statement", at, source.line_text(at))
        at = m.end()
    if version is None or not target:
        raise source.error("no .version and .target", 0, source.line_text(0))
    return Module(version, target, entries, tuple(variables), options)
