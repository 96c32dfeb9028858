"""Text as it comes: whole characters only, no control tokens, stop strings held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from urdir.model.errors import SettingsError
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer


class Chunks:
    """Stands for a tokeniser: token i is the i-th chunk of bytes, None a control token."""

    def __init__(self, *chunks: bytes | None) -> None:
        self.chunks = chunks

    def is_control(self, token_id: int) -> bool:
        return self.chunks[token_id] is None

    def token_bytes(self, token_id: int) -> bytes:
        return self.chunks[token_id] or b""


def pieces(*chunks: bytes | None, stops: tuple[str, ...] = ()) -> list[str]:
    """What is printed for each chunk and at the end."""
    stream = TextStream(Chunks(*chunks), stops)  # type: ignore[arg-type]
    return [*(stream.push(i) for i in range(len(chunks))), stream.finish()]


def test_text_comes_at_once() -> None:
    assert pieces(b"Hello", b" wor", b"ld") == ["Hello", " wor", "ld", ""]


def test_characters_are_never_cut() -> None:
    raw = "é🦙".encode()
    assert pieces(*(raw[i : i + 1] for i in range(6))) == ["", "é", "", "", "", "🦙", ""]


def test_what_is_no_utf8_becomes_a_replacement_character() -> None:
    assert pieces(b"a\xf0\x9f", b"b") == ["a", "�b", ""]
    assert pieces(b"a\xff", b"b") == ["a�", "b", ""]


def test_an_incomplete_character_at_the_end() -> None:
    assert pieces(b"a", b"\xf0\x9f") == ["a", "", "�"]


def test_control_tokens_are_never_printed(tokenizer: Tokenizer) -> None:
    assert pieces(b"a", None, b"b") == ["a", "", "b", ""]
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert "".join(map(stream.push, [*ids, tokenizer.vocab_size + 5])) + stream.finish() == "hi"


def test_a_stop_string_over_several_tokens() -> None:
    assert pieces(b"one ST", b"O", b"P two", stops=("STOP",)) == ["one ", "", "", ""]


def test_what_turns_out_to_be_no_stop_string_is_printed() -> None:
    assert pieces(b"ST", b"OR", b"ST", stops=("STOP",)) == ["", "STOR", "", "ST"]


def test_the_longest_possible_beginning_is_held_back() -> None:
    assert pieces(b"aab", b"aab", b"c", stops=("aabaac",)) == ["", "aab", "aabc", ""]
    assert pieces(b"abab", b"c", stops=("ababc", "bab!")) == ["", "", ""]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    stream = TextStream(Chunks(b"abcde"), ("bcde", "cd"))  # type: ignore[arg-type]
    assert stream.push(0) == "ab"
    assert stream.stopped_by == "cd"
    assert stream.push(0) == stream.finish() == ""


def test_a_stop_string_of_split_characters() -> None:
    raw = "→fin".encode()
    assert pieces(b"x" + raw[:2], raw[2:], b"y", stops=("→f",)) == ["x", "", "", ""]


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingsError, match="empty stop string"):
        TextStream(tokenizer, ("a", ""))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab€", max_size=30),
    cuts=st.sets(st.integers(0, 90)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3),
)
@example(text="aaabaaab", cuts={1, 2}, stops=["aab", "b"])
def test_the_text_does_not_depend_on_the_tokens(
    text: str, cuts: set[int], stops: list[str]
) -> None:
    raw = text.encode()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    chunks = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    longest_first = sorted(stops, key=len, reverse=True)
    stopped = (
        text[: end - len(stop)]
        for end in range(len(text) + 1)
        for stop in longest_first
        if text[:end].endswith(stop)
    )
    expected = next(stopped, text)
    printed = pieces(*chunks, stops=tuple(stops))
    assert "".join(printed) == expected


def test_real_tokens(tokenizer: Tokenizer) -> None:
    text = 'Überraschung: 🦙 says "hi"!\n'
    stream = TextStream(tokenizer)
    printed = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(printed) + stream.finish() == text
    assert "�" not in "".join(printed)
