"""Failures of other people's code end as errors of the project."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from urdir.model.errors import ModelError, TokenizerError
from urdir.model.files.gguf import Gguf
from urdir.model.files.source import open_model
from urdir.model.foreign import foreign
from urdir.model.text.tokenizer import Tokenizer


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (PanicException("index 2\nout of range"), "it: index 2 out of range"),
        (OSError(36, "File name too long"), "it: File name too long"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "it: 'utf-8' codec"),
        (MemoryError(), "it: MemoryError"),
        (OverflowError("too large"), "it: too large"),
        (Exception("of Rust \x1b[31m"), "it: of Rust [31m"),
        (RecursionError("x" * 1000), "it: " + "x" * 300 + "..."),
    ],
)
def test_what_is_translated(cause: BaseException, message: str) -> None:
    with pytest.raises(TokenizerError) as caught, foreign("it", TokenizerError):
        raise cause
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "cause",
    [KeyboardInterrupt(), SystemExit(1), ModelError("ours"), KeyError("a bug"), IndexError()],
)
def test_what_passes(cause: BaseException) -> None:
    with pytest.raises(type(cause)) as caught, foreign("it", TokenizerError):
        raise cause
    assert caught.value is cause


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/dev/zero", "/proc/self/mem", "\udcff"])
def test_names_that_are_no_files(name: str) -> None:
    with pytest.raises(ModelError):
        open_model(name)


@pytest.mark.parametrize(
    ("vocabulary", "merges"),
    [
        ({"a": 0}, [["a", "\0"]]),
        ({"a": 0, "b": 1}, [["a", "b"]]),
        ({"a": 0, "b": 1}, [["a", "c"]]),
        ({"a": 1 << 40}, []),
    ],
)
def test_merges_of_tokens_that_do_not_exist(
    make_gguf: Callable[..., Path], vocabulary: dict[str, int], merges: Any
) -> None:
    """The first makes the library panic."""
    text = json.dumps(
        {
            "version": "1.0", "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        }
    )  # fmt: skip
    values = {"tokenizer.ggml.model": "huggingface", "tokenizer.huggingface.json": text}
    with (
        Gguf(make_gguf(values)) as gguf,
        pytest.raises(TokenizerError, match=f"{gguf.path}: ") as caught,
    ):
        Tokenizer.of(gguf)
    assert str(caught.value).isprintable()


def test_a_text_that_a_library_fails_on(demo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does on 12 million blanks, of which a regular expression makes too much."""
    tokenizer = Tokenizer.of(Gguf(demo_file))

    def panic(text: str, after_special: bool) -> list[int]:
        raise PanicException("retry-limit-in-match over")

    monkeypatch.setattr(tokenizer._model, "encode", panic)
    with pytest.raises(TokenizerError, match="cut into tokens: retry-limit-in-match over"):
        tokenizer.encode("a")


@pytest.mark.full
def test_twelve_million_blanks(demo_file: Path) -> None:
    tokenizer = Tokenizer.of(Gguf(demo_file))
    with pytest.raises(TokenizerError, match="cut into tokens"):
        tokenizer.encode(" " * 12_000_000)
