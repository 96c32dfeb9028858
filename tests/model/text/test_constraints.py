"""Constrained answers: masks against languages written out, JSON, limits, hostile constraints."""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import ConstraintError, ModelError
from urdir.model.files.gguf import Gguf
from urdir.model.text.constraints import MAX_BYTES, Constraint
from urdir.model.text.matcher import ConstraintCompiler, Matcher
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.vocabulary import TokenType

MARKUP = (TokenType.CONTROL, TokenType.UNKNOWN)
VOCABULARIES = ["demo", "llama-spm", "mpt"]
SLOW = ["llama-bpe", "gemma-4", "qwen2", "refact"]
LANGUAGE = [
    "yes", "yes please", "ye", "", " yes", "Größe: 12\n", '{"a": [1, 2]}', "🦙🦙 llama",
    "<|im_end|> is text", "tab\t and \\ \"quotes\"", "日本語", "\n\n\n", "</s>",
]  # fmt: skip


def allowed(matcher: Matcher, tokenizer: Tokenizer, spare: int = 0) -> set[int]:
    """The tokens of a mask, which is dirty before; none beyond the vocabulary."""
    mask = np.full(-(-tokenizer.vocab_size // 32) + spare, 0xDEADBEEF, np.uint32)
    matcher.mask(mask)
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), bitorder="little")
    ).tolist()
    assert max(found, default=0) < tokenizer.vocab_size
    return set(found)


class Language:
    """A finite language over a vocabulary: the tokens that keep a text the beginning of one of its
    own.
    """

    def __init__(self, texts: list[str], tokenizer: Tokenizer) -> None:
        self.texts = [text.encode() for text in texts]
        self.ends = set(tokenizer.end_ids)
        self.ids: dict[bytes, set[int]] = {}
        for token in range(tokenizer.vocab_size):
            if not tokenizer.is_markup(token) and token not in self.ends:
                self.ids.setdefault(tokenizer.token_bytes(token), set()).add(token)

    def after(self, prefix: bytes) -> set[int]:
        found = set(self.ends) if prefix in self.texts else set()
        for text in self.texts:
            if text.startswith(prefix):
                rest = text[len(prefix) :]
                for end in range(1, len(rest) + 1):
                    found |= self.ids.get(rest[:end], set())
        return found


def check_masks(tokenizer: Tokenizer, walks: int) -> None:
    with ConstraintCompiler(tokenizer) as compiler:
        check_walks(tokenizer, compiler, walks)


def check_walks(tokenizer: Tokenizer, compiler: ConstraintCompiler, walks: int) -> None:
    language = Language(LANGUAGE, tokenizer)
    chance = random.Random(5)
    for _ in range(walks):
        matcher, prefix = compiler.matcher(Constraint.choice(LANGUAGE)), b""
        while True:
            tokens = allowed(matcher, tokenizer, spare=3)
            assert tokens == language.after(prefix), prefix
            token = chance.choice(sorted(tokens))
            assert not (matcher.is_done and token not in tokenizer.end_ids)
            matcher.accept(token)
            if token in tokenizer.end_ids:
                assert matcher.is_done
                break
            prefix += tokenizer.token_bytes(token)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_mask_has_the_tokens_that_keep_a_text_a_beginning(
    tokenizer: Tokenizer, vocab_file: Callable[[str], Path], name: str
) -> None:
    check_masks(tokenizer if name == "demo" else Tokenizer.of(Gguf(vocab_file(name))), 8)


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_masks_of_other_vocabularies(vocab_file: Callable[[str], Path], name: str) -> None:
    check_masks(Tokenizer.of(Gguf(vocab_file(name))), 4)


def test_masks_of_a_unigram_vocabulary(data: Path, make_gguf: Callable[..., Path]) -> None:
    content = json.loads((data / "vocab" / "unigram.json").read_text())
    metadata = {
        "model": "t5", "tokens": content["pieces"], "eos_token_id": 1, "unknown_token_id": 2,
        "token_type": np.array(content["types"], np.int32),
        "scores": np.array(content["scores"], np.float32),
    }  # fmt: skip
    path = make_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    tokenizer = Tokenizer.of(Gguf(path))
    texts = ["the model", "them", "th"]
    language = Language(texts, tokenizer)
    with ConstraintCompiler(tokenizer) as compiler:
        matcher = compiler.matcher(Constraint.regex("the model|them|th"))
        assert allowed(matcher, tokenizer) == language.after(b"") != set()


def test_a_regex_is_matched_as_a_whole(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    patterns = {
        r"(ab|c){2}": ["abab", "abc", "cab", "cc"],
        "a/b\\/c\nd?": ["a/b/c\n", "a/b/c\nd"],
        "": [""],
        r"[x-z]/[/]": ["x//", "y//", "z//"],
    }
    for pattern, texts in patterns.items():
        language = Language(texts, tokenizer)
        matcher, prefix = compiler.matcher(Constraint.regex(pattern)), b""
        while (tokens := allowed(matcher, tokenizer)) - language.ends:
            assert tokens == language.after(prefix)
            token = max(tokens - language.ends)
            prefix += tokenizer.token_bytes(token)
            matcher.accept(token)
        assert prefix in language.texts


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 3, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "either": {"oneOf": [{"type": "boolean"}, {"const": None}]},
    },
    "required": ["name", "n", "tags", "either"],
    "additionalProperties": False,
}


def random_answer(tokenizer: Tokenizer, matcher: Matcher, chance: random.Random) -> str:
    """An answer of random tokens; those that close something are likelier, so that it ends."""
    ids: list[int] = []
    while not matcher.is_done:
        tokens = allowed(matcher, tokenizer)
        if tokens & tokenizer.end_ids:
            break
        closing = [t for t in tokens if tokenizer.token_bytes(t)[-1:] in b'"}]:']
        choice = closing if closing and chance.random() < 0.7 else sorted(tokens)
        ids.append(chance.choice(sorted(choice)))
        matcher.accept(ids[-1])
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_json_of_a_schema(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    chance = random.Random(3)
    for _ in range(10):
        matcher = compiler.matcher(Constraint.json_schema(SCHEMA))
        value = json.loads(random_answer(tokenizer, matcher, chance))
        assert list(value) == ["name", "n", "tags", "either"]
        assert len(value["name"]) <= 6
        assert 3 <= value["n"] <= 99
        assert len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"a", "b"}
        assert value["either"] in (True, False, None)


def test_any_json_object(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    chance = random.Random(4)
    for _ in range(10):
        matcher = compiler.matcher(Constraint.json_object())
        assert isinstance(json.loads(random_answer(tokenizer, matcher, chance)), dict)


def test_a_token_that_is_not_allowed(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    for token in (tokenizer.encode("a")[0], tokenizer.vocab_size + 7):
        matcher = compiler.matcher(Constraint.json_object())
        with pytest.raises(ConstraintError, match=f"token {token} is not allowed"):
            matcher.accept(token)
        with pytest.raises(ConstraintError):  # the answer is lost
            allowed(matcher, tokenizer)


def test_matchers_of_one_constraint_are_apart(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    constraint = Constraint.regex("ab|cd")
    first, second = compiler.matcher(constraint), compiler.matcher(constraint)
    start = allowed(second, tokenizer)
    first.accept(tokenizer.encode("a")[0])
    assert allowed(second, tokenizer) == start != allowed(first, tokenizer)


def test_nothing_but_an_end_follows_an_end(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    matcher = compiler.matcher(Constraint.regex("a?"))
    matcher.accept(min(tokenizer.end_ids))
    assert matcher.is_done
    assert allowed(matcher, tokenizer) == set(tokenizer.end_ids)


@pytest.mark.parametrize(
    "mask", [np.zeros(64, np.int32), np.zeros((1, 64), np.uint32), np.zeros(128, np.uint32)[::2]]
)
def test_a_mask_of_another_kind(compiler: ConstraintCompiler, mask: Any) -> None:
    with pytest.raises(ModelError, match="one contiguous row of u32"):
        compiler.matcher(Constraint.json_object()).mask(mask)


def test_a_mask_that_is_too_short(compiler: ConstraintCompiler) -> None:
    with pytest.raises(ModelError, match="needs 64 words, not 63"):
        compiler.matcher(Constraint.json_object()).mask(np.zeros(63, np.uint32))


# ---- the specification ---------------------------------------------------------------------------


def test_equal_constraints_are_one_key() -> None:
    assert len({Constraint.json_schema({"type": "integer"}) for _ in range(3)}) == 1
    assert Constraint.regex("a") != Constraint.regex("b")


NESTED: Any = {}
for _ in range(2000):
    NESTED = {"items": NESTED}
MULTIPLE = '{"type": "integer", "multiple\\u004ff": 999983}'


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.lark('start: "a" | b'), 'unknown name: "b"'),
        (Constraint.lark("start: (\n"), "Expected "),
        (Constraint.regex("a("), 'invalid regex "a\\("'),
        (Constraint.json_schema({"type": "text"}), "failed to compile JSON schema: .*text"),
    ],
)
def test_what_cannot_be_compiled_is_said_without_the_text_that_is_compiled(
    compiler: ConstraintCompiler, constraint: Constraint, message: str
) -> None:
    with pytest.raises(ConstraintError, match=rf"^the constraint cannot be used: {message}") as of:
        compiler.matcher(constraint)
    assert "llguidance" not in str(of.value)
    assert "start" not in str(of.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.regex("a" * (MAX_BYTES + 1)), "more than 131,072"),
        (lambda: Constraint.json_schema(NESTED), r"recursion|nests deeper"),
        (lambda: Constraint.json_schema({"const": 1e400}), "not JSON"),
        (lambda: Constraint.json_schema({"const": {1, 2}}), "not JSON"),
        (lambda: Constraint.regex("\ud800"), "surrogate"),
        (lambda: Constraint.choice([]), "is empty"),
        (lambda: Constraint.lark('%llguidance {}\nstart: "a"'), "leave %llguidance out"),
        (lambda: Constraint.lark("start: %json {"), "not JSON"),
        (lambda: Constraint.lark(f"start: %json {MULTIPLE}"), "multipleOf: 999983"),
        (lambda: Constraint.json_schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 0.5}]}),
         "multipleOf: 9973, 0.5"),
    ],
)  # fmt: skip
def test_constraints_that_are_refused(make: Callable[[], Constraint], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        make()


# ---- the library ---------------------------------------------------------------------------------


def test_without_the_library(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModelError, match=r"pip install 'urdir\[serve\]'"):
        ConstraintCompiler(tokenizer)


@pytest.mark.parametrize("version", ["0.7.30", "1.8.4"])
def test_an_older_library(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ModelError, match=rf"llguidance 1\.9 or newer, and {version} is installed"):
        ConstraintCompiler(tokenizer)
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert "llguidance>=1.9" in pyproject["project"]["optional-dependencies"]["serve"]
