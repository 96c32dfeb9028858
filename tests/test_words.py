"""Prose uses plain technical English: expressions to avoid, in every room."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Expression -> what to write instead.
AVOID = {
    r"whoever|whosever|whomever": "a caller, a client, a request",
    r"nobody|somebody": "name who, or use the passive voice",
    r"newcomers?": "new request",
    r"strangers?|strangers?'s?": "untrusted",
    r"set back": "preempted",
    r"written out": "non-absorbed; expanded; spelled out",
    r"own tokens?": "new token",
    r"idle rows?": "padding row",
    r"lend|lends|lent": "owns, shares",
    r"(is|are|be|being) told": "receives; reports",
    r"where there (is|are) (none|no|any|one|some)": "if there is none; without",
    r"(what|as|that) there (is|are)": "name the thing",
    r"of which there": "name the thing",
    r"those that are there|(?<!that )(is|are) there(?= (where|if|when)\b)": "exists, is given",
    r"on (its|their) way": "in flight, issued",
    r"under way": "in flight, in progress",
    r"by turns": "alternately, interleaved",
    r"anew": "again, new",
    r"but for": "except",
    r"for want of": "without",
    r"for nothing": "without effect, unused",
    r"as good as": "counts as",
    r"(can|cannot|could) be had": "is available; cannot be combined",
    r"closing twice does nothing|again is harmless": "Idempotent.",
    r"stands? still": "does not rotate",
    r"heads? of (keys|queries|values)": "key heads, query heads, value heads",
    r"gates? by (value|head)": "elementwise gate, per-head gate",
    r"beginnings? of prompts|share (their |its |the )?beginnings?": "prefix",
    r"begins? alike": "share a prefix",
    r"(?<![Tt]here )(?<!that )is no (?!longer|more|less|such)(\w+)": "is not a",
    r"are no (?!longer|more|less|such)\w+ (of|that)": "are not",
    r"as if by|in the place of": "instead of",
    r"hardly|seldom": "rarely",
    r"what (it|they) (is|are) of": "name the thing",
    r"so many(?! that\b)": "``count``, this many, as many as",
    r"leads? astray": "is inconsistent",
    r"where nothing (else )?is said|if nothing is said|if they say nothing": "by default",
    r"drafts? (that |which )?stood|accepted`* stood": "accepted",
    r"worth the while": "pays",
    r"(is|are|be) turned by": "rotated by",
    r"nothing to do but": "only",
    r"be it the": "also if it is",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})(?!\w)" for words in AVOID), re.IGNORECASE)

#: Files that are generated, or hold other people's words.
EXCEPT = ("model/data", "templates/compiled", "model/serve/request_fields.py")
#: Tables of a document that a test generates from code.
GENERATED = re.compile(r"<!-- (?!end)[a-z ]+ -->.*?<!-- end -->", re.DOTALL)
#: A comment of Jinja, of any number of lines, or of PTX.
TEMPLATE_COMMENT = re.compile(r"\{#.*?#\}|//[^\n]*", re.DOTALL)
SOURCES = ("*.py", "*.j2", "*.md")


def _files() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for folder in ("driver", "model", "ptxgen", "templates"):
        for pattern in SOURCES:
            for path in (ROOT / folder).rglob(pattern):
                name = str(path.relative_to(ROOT))
                if not name.startswith(EXCEPT):
                    yield path


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and constant texts of a module, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number, line in enumerate(node.value.split("\n")):
                yield node.lineno + number, line


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file by line: all of a document, the comments of a template or module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python_prose(text)
        return
    if path.suffix == ".j2":
        for comment in TEMPLATE_COMMENT.finditer(text):
            first = text.count("\n", 0, comment.start()) + 1
            yield from enumerate(comment[0].split("\n"), first)
        return
    text = GENERATED.sub(lambda table: "\n" * table[0].count("\n"), text)
    yield from enumerate(text.split("\n"), 1)


def test_prose_avoids_these_expressions() -> None:
    suspects = (  # the rest need not be read as Python or templates
        path for path in _files() if PATTERN.search(path.read_text("utf-8").replace("\\n", "\n"))
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()!r}"
        for path in suspects
        for number, line in _prose(path)
        if (match := PATTERN.search(line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "a request is set back",
        "keys written out of latents",
        "Whoever asks",
        "an idle row",
        "where there is none",
        "tensor is no part of it",
        "so many rows",
        "what is there when it ends",
    ],
)
def test_such_expressions_are_found(text: str) -> None:
    assert PATTERN.search(text.lower())


@pytest.mark.parametrize(
    "text",
    ["there is no GPU", "it is no longer", "but forget it", "is not a part", "a renewed key"],
)
def test_others_pass(text: str) -> None:
    assert not PATTERN.search(text.lower())
