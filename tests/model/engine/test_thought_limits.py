"""Reasoning that ends at the exact token, and the answer that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.engine.test_speculation import given
from urdir.driver.device import Device
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.constraints import Constraint
from urdir.model.text.reasoning import THINK_TAGS
from urdir.model.text.thought_limit import ThoughtClock, ThoughtLimit
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.tool_choice import after_thoughts

FORM = AnswerFormat(thinks=THINK_TAGS[0])
SETTINGS = [
    SamplingSettings(temperature=0.0),
    SamplingSettings(temperature=1.3, seed=5),
    SamplingSettings(temperature=1.3, seed=6, logprobs=2),
]
LIMIT = 12


@pytest.fixture(scope="module")
def tokenizer(demo_file: Path) -> Tokenizer:
    with Gguf(demo_file) as gguf:
        return Tokenizer.of(gguf)


def limit(tokens: int, *, is_open: bool) -> ThoughtLimit:
    made = FORM.limit(tokens, "<think>" if is_open else "")
    assert made is not None
    return made


def of_open_thoughts(tokenizer: Tokenizer, some: Sequence[Any]) -> Iterator[Request]:
    prompt = tuple(tokenizer.encode("By <think>"))
    for settings in some:
        for tokens in (None, 0, 4):
            thoughts = None if tokens is None else limit(tokens, is_open=True)
            yield Request(prompt=prompt, settings=settings, limit=LIMIT, ignore_end=True,
                          thoughts=thoughts)  # fmt: skip


@pytest.mark.parametrize(
    ("some", "drafts"),
    [(SETTINGS[:2], None), (SETTINGS[:1], DraftSettings(most=2, least=2, shortest=1))],
)
def test_thoughts_end_at_their_limit(
    device_name: str,
    tokenizer: Tokenizer,
    random_model: Callable[..., Any],
    some: Sequence[Any],
    drafts: Any,
) -> None:
    """Up to it the answer is that without a limit; then the tag comes, then other tokens."""
    model = random_model(Shape("llama", 1, 64, 4, 2, 32, 64, tokenizer.vocab_size, False), seed=1)
    requests = [*of_open_thoughts(tokenizer, some)]
    settings = SessionSettings(96, exact=True, sequences=len(requests), drafts=drafts)
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.of(model), device) as weights,
        Session(device, weights, settings) as session,
    ):
        answers = [answer.tokens for answer in given(session, requests, tokenizer)]
    tag = tokenizer.encode("</think>")
    for request, tokens in zip(requests, answers, strict=True):
        if request.thoughts is None:
            free = tokens
            continue
        at = request.thoughts.tokens
        assert tokens[:at] == free[:at]
        assert tokens[at : at + len(tag)] == tag
        assert len(tokens) == LIMIT
        assert tokens[at + len(tag) :][: len(tag)] != tag


def test_a_constraint_goes_on_after_the_limit(
    device_name: str, tokenizer: Tokenizer, random_model: Callable[..., Any]
) -> None:
    pytest.importorskip("llguidance")
    model = random_model(Shape("llama", 1, 64, 4, 2, 32, 64, tokenizer.vocab_size, False), seed=1)
    constraint = after_thoughts(Constraint.choice(["yes", "no"]), FORM, "<think>")
    requests = [
        Request(prompt=tuple(tokenizer.encode("Well <think>")), settings=settings, limit=LIMIT,
                constraint=constraint, thoughts=limit(2, is_open=True))
        for settings in SETTINGS[1:]
    ]  # fmt: skip
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.of(model), device) as weights,
        Session(device, weights, SessionSettings(96, exact=True, sequences=3)) as session,
    ):
        for answer in given(session, requests, tokenizer):
            assert answer.text.partition("</think>")[2].strip() in ("yes", "no")


def clock(tokenizer: Tokenizer, tokens: int, text: str, *, is_open: bool) -> ThoughtClock:
    made = ThoughtClock(limit(tokens, is_open=is_open), tokenizer)
    for token in tokenizer.encode(text):
        assert made.forced is None
        made.accept(token)
    return made


def test_thoughts_that_the_model_begins_or_ends(tokenizer: Tokenizer) -> None:
    tag = tokenizer.encode("</think>")
    hm = tokenizer.encode("hm, I see")
    made = clock(tokenizer, len(hm), " \n<think>hm, I see", is_open=False)
    assert (made.forced, made.free) == (tag[0], 0)
    for token in tag:
        assert made.forced == token
        made.accept(token)
    assert made.forced is None
    assert made.free > 1 << 40
    assert clock(tokenizer, 99, "<think>hm</think>", is_open=False).free > 1 << 40
    assert clock(tokenizer, 99, "hm</think> and", is_open=True).free > 1 << 40
    assert clock(tokenizer, 0, "It is <think>", is_open=False).free > 1 << 40
    assert clock(tokenizer, 7, " ", is_open=False).free == 7
    assert clock(tokenizer, 0, "", is_open=True).forced == tag[0]
    assert clock(tokenizer, 0, "<think>", is_open=False).forced == tag[0]


def test_limits_by_format() -> None:
    assert AnswerFormat().limit(5, "") is None
    assert FORM.limit(None, "") is None
    assert FORM.limit(5, "x<think>\n", "Enough.") == ThoughtLimit(
        5, "<think>", "</think>", "Enough.</think>", is_open=True
    )
    for prompt, begun, is_open in (
        ("x<think>\n", "So", True),  # reasoning that the answer continues
        ("x", "<think>So", True),
        ("x<think>", "So</think> 1", False),
        ("x<think></think>", "", False),
    ):
        made = FORM.limit(5, prompt, begun=begun)
        assert made is not None
        assert made.is_open is is_open
    harmony = AnswerFormat(is_harmony=True).limit(5, "")
    assert harmony is not None
    assert harmony.ending == "<|end|><|start|>assistant"
    assert replace(harmony, tokens=6) != harmony
