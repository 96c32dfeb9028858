"""GBNF (llama.cpp's grammars) and Lark, as what llguidance takes."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from urdir.model.errors import ConstraintError
from urdir.model.files.gguf import Gguf
from urdir.model.text.constraints import Constraint
from urdir.model.text.gbnf import as_lark
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.tokenizer import Tokenizer

# as in llama.cpp's grammars, with blanks and comments where they may be
JSON = r"""
root  ::= object # the whole
value ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def compiler(demo_file: Path) -> Iterator[tuple[ConstraintCompiler, Tokenizer]]:
    tokenizer = Tokenizer.of(Gguf(demo_file))
    with ConstraintCompiler(tokenizer) as compiler:
        yield compiler, tokenizer


def accepts(compiler: tuple[ConstraintCompiler, Tokenizer], grammar: str, text: str) -> bool:
    matchers, tokenizer = compiler
    matcher = matchers.matcher(Constraint.lark(as_lark(grammar)))
    try:
        for token in tokenizer.encode(text):
            matcher.accept(token)
        matcher.accept(min(tokenizer.end_ids))
    except ConstraintError:
        return False
    return True


def test_a_recursive_grammar(compiler: tuple[ConstraintCompiler, Tokenizer]) -> None:
    for text in ('{"a": [1,-2.5,{"b":true}] }', "{}", '{"\\u00e9\\n": "é"}', '{"a":\n\t null}'):
        assert accepts(compiler, JSON, text), text
    for text in ("[1]", '{"a":1,}', '{"a":01}', '{"a":"\n"}', '{"a": 1', '{"\\x": 1}'):
        assert not accepts(compiler, JSON, text), text


#: GBNF, and the same as an expression of Python's.
SAME = [
    (r'root ::= [a-c]* "b"', r"[a-c]*b"),
    ('root ::= word "b" | "x"\nword ::= [abx]+', r"[abx]+b|x"),
    ('root ::= "ab" | [a-z] "bx"', r"ab|[a-z]bx"),
    ('root ::= ("a" | "b"){2,3} "x"?', r"[ab]{2,3}x?"),
    ('root ::= "a"{2} | "b" {1,} | ("x" | )', r"aa|b+|x?"),
    ("root ::= [^ab]", r"[^ab]"),
    ("root ::= [-a] [b-] [\\]x] [/\\\\]", r"[-a][b-][\]x][/\\]"),
    ("root ::= . .", r"(?s:..)"),
    ("root ::= [&~^] [^^]", r"[&~^][^^]"),
    (r'root ::= "\x61\u0062\U00000078\"\\/"', r'abx"\\/'),
    (r"root ::= [\x61-\u0062]", r"[ab]"),
    ("root ::= a-b a_b AB\na-b ::= \"a\"\na_b ::= \"b\"\nAB ::= \"x\"", r"abx"),
    ('root ::= start\nstart ::= "a" | start "b"', r"ab*"),
    ('root ::= "a" # root ::= "b"\n# "x"', r"a"),
    ("root ::=\n", r""),
    ('root ::= "a" |\n "b"', r"a|b"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "pattern"), SAME)
def test_the_texts_of_a_grammar(
    compiler: tuple[ConstraintCompiler, Tokenizer], grammar: str, pattern: str
) -> None:
    """Of random texts those are allowed that Python's expression matches."""
    chance, found = random.Random(5), 0
    texts = {"".join(chance.choices('abx-]/\\"\n^&~', k=chance.randrange(5))) for _ in range(400)}
    for text in [*texts, 'abx"\\/', "abbb", "aaab", "abx", "ab", "-b]/", "&^b"]:
        is_match = re.fullmatch(pattern, text) is not None
        assert accepts(compiler, grammar, text) == is_match, text
        found += is_match
    assert found


def test_other_characters(compiler: tuple[ConstraintCompiler, Tokenizer]) -> None:
    grammar = 'root ::= "é" [à-ü]+ [😀-😂] [^a] [\\u4e00-\\u9fff]'
    assert accepts(compiler, grammar, "éàü😁é中")
    assert not accepts(compiler, grammar, "éàü😅é中")


def test_lark_stays_as_it_is() -> None:
    lark = 'start: "a" b\nb: /x/ // root ::= none'
    assert as_lark(lark) == lark
    assert as_lark("%llguidance {}\n" + lark) == lark
    with pytest.raises(ConstraintError, match="leave %llguidance out"):
        Constraint.lark(as_lark('%llguidance {"no_forcing": true}\n' + lark))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('Root ::= "a"', "no rule 'root'"),
        ("root ::= a", "'root' names 'a'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, .*'root' is defined twice"),
        ('"a"\nroot ::= "b"', "line 1, .*begins with its name"),
        ("root ::= <think>", "refers to a token"),
        ("root ::= !<[7]>", "refers to a token"),
        ('root ::= "a', "not GBNF"),
        ("root ::= [a", "not GBNF"),
        ("root ::= []", "an empty character class"),
        ("root ::= [b-a]", "in reverse order"),
        (r'root ::= "\d"', "is not an escape"),
        (r'root ::= "\uD800"', "is not a character"),
        (r'root ::= "\UFFFFFFFF"', "is not a character"),
        ("root ::= *", "nothing precedes"),
        ('root ::= "a" | +', "nothing precedes"),
        ('root ::= "a"{9999999}', "not GBNF"),
    ],
)
def test_what_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        as_lark(grammar)


@pytest.mark.parametrize("grammar", ['root ::= ("a"', 'root ::= "a")'])
def test_what_the_lark_parser_refuses(
    compiler: tuple[ConstraintCompiler, Tokenizer], grammar: str
) -> None:
    with pytest.raises(ConstraintError):
        compiler[0].matcher(Constraint.lark(as_lark(grammar)))


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 60_000,
        "root ::= [" + "a" * 60_000,
        'root ::= "' + "\\" * 60_000,
        "root ::= " + "# " * 30_000,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)),
        "root ::=" + " " * 60_000 + "x",
        "a" * 60_000 + "::=",
    ],
)
def test_hostile_grammars_end_soon(grammar: str) -> None:
    started = time.process_time()
    with contextlib.suppress(ConstraintError):
        as_lark(grammar)
    assert time.process_time() - started < 10
