"""Text of the tokens that an engine delivers: stop strings, text that is held, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from urdir.model.engine.requests.answer_text import AnswerText
from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request, TokenChoice
from urdir.model.files.gguf import Gguf
from urdir.model.text.tokenizer import Tokenizer

TEXT = "By the old mill lived a little girl."


@pytest.fixture(scope="module")
def tokenizer(demo_file: Path) -> Tokenizer:
    return Tokenizer.of(Gguf(demo_file))


def told(tokenizer: Tokenizer, stops: tuple[str, ...], sizes: int) -> tuple[list[Item], int]:
    """The items of an answer of `TEXT` in pieces of so many tokens; how often it was stopped."""
    items: list[Item] = []
    stopped: list[None] = []
    request = Request(prompt=(1,), stops=stops)
    text = AnswerText(tokenizer, request, items.append, lambda: stopped.append(None))
    tokens = tokenizer.encode(TEXT)
    for at in range(0, len(tokens), sizes):
        text(Piece("", tuple(map(TokenChoice, tokens[at : at + sizes]))))
    text(Ending(Finish.LENGTH, 1, 0, len(tokens)))
    return items, len(stopped)


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, Piece))


@pytest.mark.parametrize("sizes", [1, 2, 3, 100])
def test_text_and_stop_strings(tokenizer: Tokenizer, sizes: int) -> None:
    tokens = tokenizer.encode(TEXT)
    items, stopped = told(tokenizer, ("no such text", "girl.."), sizes)
    assert (text_of(items), stopped) == (TEXT, 0)
    assert items[-1] == Ending(Finish.LENGTH, 1, 0, len(tokens))
    choices = [each for item in items if isinstance(item, Piece) for each in item.choices]
    assert [choice.token for choice in choices] == tokens
    for stop in ("mill", "l", "girl."):
        items, stopped = told(tokenizer, (stop,), sizes)
        count = next(n for n in range(len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
        assert (text_of(items), stopped) == (TEXT[: TEXT.index(stop)], 1)
        assert items[-1] == Ending(Finish.STOP, 1, 0, count, stop)
        choices = [each for item in items if isinstance(item, Piece) for each in item.choices]
        assert [choice.token for choice in choices] == tokens[:count]


def test_text_that_fails_is_the_last_item(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, made = RuntimeError("text"), tokenizer.token_bytes

    def token_bytes(of: Tokenizer, token: int) -> Any:
        if token == tokens[2]:
            raise error
        return made(token)

    tokens = tokenizer.encode(TEXT)
    monkeypatch.setattr(Tokenizer, "token_bytes", token_bytes)
    items, stopped = told(tokenizer, (), 1)
    assert (items[-1], stopped, len(items)) == (error, 1, 3)
