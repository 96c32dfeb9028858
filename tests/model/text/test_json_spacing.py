r"""White space of constrained JSON: what is allowed by default, what requests may say, and that no
text can consist of blanks for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import ConstraintError
from urdir.model.text.constraints import Constraint
from urdir.model.text.json_spacing import MOST_BLANKS
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": [1, 2]}
BLANKS = " \t\r\n"


class Reader:
    """Takes texts byte by byte under a constraint."""

    def __init__(self, compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the text is a whole answer."""
        matcher = self._compiler.matcher(constraint)
        try:
            for char in text:
                (token,) = self._tokenizer.encode(char)
                matcher.accept(token)
            matcher.mask(self._mask)
        except ConstraintError:
            return False
        return all(self._mask[i // 32] >> (i % 32) & 1 for i in self._tokenizer.end_ids)

    def blanks_after(self, constraint: Constraint, beginning: str) -> int:
        matcher = self._compiler.matcher(constraint)
        for char in beginning:
            matcher.accept(self._tokenizer.encode(char)[0])
        for run in range(3 * MOST_BLANKS):
            matcher.mask(self._mask)
            bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits).tolist()
            texts = {self._tokenizer.token_bytes(token): token for token in tokens}
            blank = next((one for one in texts if len(one) == 1 and one in b" \t\r\n"), None)
            if blank is None:
                return run
            matcher.accept(texts[blank])
        return 3 * MOST_BLANKS


@pytest.fixture(scope="module")
def reader(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> Reader:
    return Reader(compiler, tokenizer)


CONSTRAINTS: dict[str, Callable[[], Constraint]] = {
    "object": Constraint.json_object,
    "schema": lambda: Constraint.json_schema(SCHEMA),
    "true": lambda: Constraint.json_schema(True),
    "grammar": lambda: Constraint.lark(f"start: %json {json.dumps(SCHEMA)}"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_at_most_one_blank_after_colon_and_comma(reader: Reader, name: str) -> None:
    constraint = CONSTRAINTS[name]()
    spaced, packed = json.dumps(VALUE), json.dumps(VALUE, separators=(",", ":"))
    assert spaced == '{"a": 1, "b": [1, 2]}'
    for text in (spaced, packed, '{"a":1, "b": [1,2]}'):
        assert reader.accepts(constraint, text), text
    for blank in BLANKS:
        for place in range(len(packed) + 1):
            text = packed[:place] + 2 * blank + packed[place:]
            inside = packed[:place].count('"') % 2  # a string may have any
            if not inside:
                assert not reader.accepts(constraint, text), text
    assert not reader.accepts(constraint, spaced.replace(": ", ":\n"))
    assert not reader.accepts(constraint, spaced.replace(", ", " ,"))
    assert not reader.accepts(constraint, spaced + "\n")
    outside = '{"a": 1, "b": [1, '
    starts = [outside[:end] for end in range(len(outside) + 1) if outside[:end].count('"') % 2 == 0]
    assert max(reader.blanks_after(constraint, start) for start in starts) == 1


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("", ['{"a":1,"b":[1,2]}'], ['{"a": 1,"b":[1,2]}']),
        ("[ ]?", ['{ "a" : 1 , "b":[ 1,2 ] }'], ['{"a":  1,"b":[]}', '{"a":\n1,"b":[]}']),
        ("[\\n\\t ]*", ['{\n\t"a": 1,\n\t"b": []\n}'], ['{"a":\r1,"b":[]}']),
        (r"\s+", ['{ "a" : 1 , "b" : [ ] }', '{"a":1,"b":[]}'], ['{"a":' + 33 * " " + '1,"b":[]}']),
        (r"\n?[ ]{0,2}", ['{\n  "a":1,\n  "b":[]}'], ['{\n   "a":1,"b":[]}']),
    ],
)
def test_a_pattern_of_the_request(
    reader: Reader, pattern: str, allowed: list[str], refused: list[str]
) -> None:
    for constraint in (
        Constraint.json_schema(SCHEMA, whitespace_pattern=pattern),
        Constraint.json_schema({**SCHEMA, "x-guidance": {"whitespace_pattern": pattern}}),
    ):
        assert [reader.accepts(constraint, text) for text in allowed] == [True] * len(allowed)
        assert [reader.accepts(constraint, text) for text in refused] == [False] * len(refused)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"whitespace_pattern": r"[ \n]*"}, ""),
    ({"whitespace_pattern": r"\n*[ ]*\t*"}, ""),
    ({"whitespace_flexible": True}, ""),
    ({"item_separator": r"\s*,\s*", "key_separator": r"\s+:\s{0,999}"}, " : "),
]


@pytest.mark.parametrize(("options", "colon"), OPTIONS)
def test_what_a_request_says_is_bounded(reader: Reader, options: Any, colon: str) -> None:
    constraint = Constraint.json_schema({**SCHEMA, "x-guidance": options})
    text = json.dumps(VALUE).replace(": ", colon or ": ")
    assert reader.accepts(constraint, text)
    runs = 3 if "\\t*" in str(options) else 1
    starts = [text[:end] for end in range(len(text)) if text[:end].count('"') % 2 == 0]
    most = max(reader.blanks_after(constraint, start) for start in starts)
    assert 1 < most <= runs * MOST_BLANKS


def test_an_object_of_the_request(reader: Reader) -> None:
    constraint = Constraint.json_object(whitespace_pattern=r"\n{0,2}")
    assert reader.accepts(constraint, '{\n\n"a":\n[]}')
    assert not reader.accepts(constraint, '{"a": []}')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whitespace_pattern": "a*"}, r"x-guidance.whitespace_pattern: only runs of blanks"),
        ({"whitespace_pattern": "( *)*"}, "only runs of blanks"),
        ({"whitespace_pattern": "[ a]"}, "only runs of blanks"),
        ({"whitespace_pattern": r"\d"}, "only runs of blanks"),
        ({"whitespace_pattern": " * * * * *"}, "only runs of blanks"),
        ({"whitespace_pattern": " {33}"}, "more than 32 blanks"),
        ({"whitespace_pattern": 3}, "only runs of blanks"),
        ({"whitespace_flexible": "yes"}, "must be true or false"),
        ({"item_separator": ";"}, "x-guidance.item_separator: must be ',' between blanks"),
        ({"key_separator": ".*:"}, "x-guidance.key_separator: must be ':' between blanks"),
        ({"indent": 2}, "'indent' is not a known option, item_separator"),
        ([], "must be an object"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        Constraint.json_schema({"type": "object", "x-guidance": options})


def test_two_patterns() -> None:
    with pytest.raises(ConstraintError, match="x-guidance has one too"):
        Constraint.json_schema(
            {"x-guidance": {"whitespace_pattern": " ?"}}, whitespace_pattern=" ?"
        )


def test_other_options_are_kept(reader: Reader) -> None:
    either = {"oneOf": [{"type": "integer"}, {"const": 1}]}
    assert reader.accepts(Constraint.json_schema(either), "1")
    strict = Constraint.json_schema({**either, "x-guidance": {"coerce_one_of": False}})
    with pytest.raises(ConstraintError, match="oneOf"):
        reader.accepts(strict, "1")


@pytest.mark.parametrize("schema", ["text", 3, None, []])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(ConstraintError, match="must be an object, true or false"):
        Constraint.json_schema(schema)
