"""Drafts of answers with a constraint: found on the host, which has the masks of all rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_speculation import given
from urdir.driver.device import Device
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.host_drafts import ngram_drafts
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.tokenizer import Tokenizer
from urdir.ptxgen.kernels.speculation.ngram_drafts import NgramDrafts

llguidance = pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"another animal": {"enum": ["a fox", "an owl"]}},
    "required": ["another animal"],
    "additionalProperties": False,
}
DRAFTS = DraftSettings(most=4, least=4, shortest=1)


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (1, 1), (7, 3)])
def test_the_host_finds_what_the_device_finds(longest: int, shortest: int) -> None:
    rng = np.random.default_rng(longest)
    rule = NgramDrafts(max_len=64, longest=longest, shortest=shortest)
    found = 0
    for _ in range(200):
        letters = rng.choice([1, 256, 65536], rng.integers(1, 4))
        text = rng.choice(letters * rng.integers(0, 3), rng.integers(1, 40)).tolist()
        wanted = int(rng.integers(0, 9))
        drafts = ngram_drafts(text, wanted, longest, shortest)
        assert drafts == rule.drafts(text, wanted)
        found += bool(drafts)
    assert 50 < found < 200


def allowed(mask: np.ndarray[Any, Any], token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


def test_drafts_follow_what_is_proposed_and_what_is_forced(demo_file: Path) -> None:
    """Each mask is that of an answer which has the drafts before it; the answer itself stays."""
    with Gguf(demo_file) as gguf:
        tokenizer = Tokenizer.of(gguf)
    words = -(-tokenizer.vocab_size // 32)
    with ConstraintCompiler(tokenizer) as compiler:
        constraint = Constraint.choice(["yes, of course", "yes, it is"])
        matcher, other = compiler.matcher(constraint), compiler.matcher(constraint)
        forced = matcher.follow([], 9, words)
        text = tokenizer.decode([token for token, _ in forced])
        assert text
        assert "yes, ".startswith(text) or text == "yes, "
        proposed = tokenizer.encode("yes, of course")
        for tokens in (proposed, [*proposed[:2], 0, 1, 2]):
            drafts = matcher.follow(tokens, 3, words)
            assert [token for token, _ in drafts[:2]] == proposed[:2]
            assert len(drafts) <= 3
        (first, mask), *_ = matcher.follow(proposed, 1, words)
        expected = np.zeros(words, np.uint32)
        other.accept(first)
        other.mask(expected)
        np.testing.assert_array_equal(mask, expected)
        for token in proposed:  # nothing was accepted
            before = np.zeros(words, np.uint32)
            matcher.mask(before)
            assert allowed(before, token)
            matcher.accept(token)
        assert all(token not in tokenizer.end_ids for token, _ in matcher.follow([], 5, words))


def test_answers_are_the_same_and_keys_are_drafted(
    device_name: str, demo_file: Path, random_model: Callable[..., Any]
) -> None:
    """Constrained ones, greedy and drawn, beside one that is not."""
    with Gguf(demo_file) as gguf:
        tokenizer = Tokenizer.of(gguf)
    model = random_model(Shape("llama", 1, 64, 4, 2, 32, 64, tokenizer.vocab_size, False), seed=1)
    prompt = tuple(tokenizer.encode("By the old mill"))
    greedy, constraint = SamplingSettings(temperature=0.0), Constraint.json_schema(SCHEMA)
    drawn = SamplingSettings(temperature=1.2, seed=5)
    requests = [
        Request(prompt=prompt, settings=greedy, limit=50, constraint=constraint),
        Request(prompt=prompt, settings=greedy, limit=5),
        Request(prompt=prompt, settings=drawn, limit=50, constraint=constraint),
    ]
    settings = SessionSettings(64, exact=True, sequences=3)
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.of(model), device) as weights,
    ):
        found = []
        for drafts in (None, DRAFTS):
            with Session(device, weights, replace(settings, drafts=drafts)) as session:
                found.append(given(session, requests, tokenizer))
    for mine, theirs in zip(found[1], found[0], strict=True):
        mine.check_equal(theirs)
    for answer in (found[1][0], found[1][2]):
        assert json.loads(answer.text).keys() == SCHEMA["properties"].keys()
        assert answer.ending is not None
        assert answer.ending.accepted_tokens > 2
