"""Models as drafts of others against llama.cpp's (`tests/data/drafts`): logits, and rounds of
speculation with and without a least probability."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import logits_of_each
from urdir.driver.device import Device
from urdir.model.engine.draft_pair import open_alone
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.text.same_vocabulary import check_same_vocabulary
from urdir.model.verify.conformance import relative_rms

EXACT_RELATIVE_RMS = 1e-4
FEW, MOST = 4, 3


@dataclass(frozen=True)
class Two:
    """A model and its draft, each with a session of its own."""

    name: str
    model: Session
    draft: Session
    golden: Path
    whole: bool


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
    parts_of: Callable[[str], tuple[str, str | None]],
) -> Iterator[Two]:
    name, given = request.param, request.config.getoption("--references")
    whole = request.config.getoption("--full") or device_name == "cuda" or given is not None
    settings = SessionSettings(64, "f32", exact=True)
    with ExitStack() as owners:
        sessions = []
        for part in parts_of(name):
            assert part is not None
            gguf = owners.enter_context(closing(Gguf(reference_file(part))))
            device = owners.enter_context(Device.open(device_name, cache_folder=None))
            opened = open_alone(gguf, Config.of(gguf), device, settings)
            sessions.append(owners.enter_context(opened))
        yield Two(name, sessions[0], sessions[1], reference_golden("plain drafts", name), whole)


of_each = pytest.mark.references("plain drafts", ["simple-small"], argument="two")


@of_each
def test_exact_logits_are_llama_cpp_s(two: Two) -> None:
    with np.load(two.golden) as golden:
        tokens = golden["tokens"].tolist()
        wanted = golden["logits"], golden["draft_logits"]
    count = len(tokens) if two.whole else FEW
    for session, logits in zip((two.model, two.draft), wanted, strict=True):
        found = logits_of_each(session, tokens[:count])
        assert relative_rms(found, logits[:count]) <= EXACT_RELATIVE_RMS


def traces_of(two: Two, ending: str) -> Any:
    return json.loads(two.golden.with_suffix(ending).read_text())


@of_each
def test_rounds_of_speculation_are_llama_cpp_s(two: Two) -> None:
    traces = traces_of(two, ".json")
    tokens = [*traces["prompt"]]
    rounds = traces["rounds"] if two.whole else traces["rounds"][:MOST]
    with EagerSteps(two.model) as eager, EagerSteps(two.draft) as draft:
        for each in rounds:
            assert (each["pos0"], each["last"]) == (len(tokens) - 1, tokens[-1])
            drafted = greedy(draft, tokens, len(each["draft"]))
            assert drafted == each["draft"]
            check_round(eager, tokens, drafted, each)


@of_each
def test_rounds_with_a_least_probability_are_llama_cpp_s(two: Two) -> None:
    """A draft ends before a token that is less likely: by the softmax of the ten highest logits."""
    traces = traces_of(two, ".pmin.json")
    tokens = [*traces["prompt"]]
    rounds = traces["rounds"] if two.whole else traces["rounds"][:MOST]
    total = len(traces["prompt"]) + len(traces["output"])
    with EagerSteps(two.model) as eager, EagerSteps(two.draft) as draft:
        for each in rounds:
            most = min(traces["n_max"], total - len(tokens) - 1)
            drafted = likely(draft, tokens, most, traces["p_min"])
            assert drafted == each["draft"]
            check_round(eager, tokens, drafted, each)


def greedy(draft: EagerSteps, tokens: list[int], count: int) -> list[int]:
    draft.truncate(0)
    draft.feed(tokens)
    return [draft.step()[0] for _ in range(count)]


def likely(draft: EagerSteps, tokens: list[int], most: int, least: float) -> list[int]:
    drafted: list[int] = []
    draft.truncate(0)
    draft.feed(tokens)
    while len(drafted) < most:
        logits = draft.logits()[0]
        highest = np.sort(logits.astype(np.float64))[-10:]
        if 1 / np.exp(highest - highest[-1]).sum() < least:
            break
        drafted.append(int(np.argmax(logits)))
        draft.feed(drafted[-1:])
    return drafted


def check_round(eager: EagerSteps, tokens: list[int], drafted: list[int], wanted: Any) -> None:
    """Append to ``tokens`` what a round gives: the drafts that the model chooses itself, and its
    token after them."""
    out: list[int] = []
    for following in [*drafted, None]:
        eager.feed([*tokens, *out][len(eager.tokens[0]) :])
        out.append(int(np.argmax(eager.logits()[0])))
        if out[-1] != following:
            break
    assert (out, len(out) - 1) == (wanted["out"], wanted["accepted"])
    tokens += out


def vocabulary(make_gguf: Callable[..., Path], tokens: list[str], **keys: Any) -> Gguf:
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", **keys}
    return Gguf(make_gguf({**metadata, "tokenizer.ggml.tokens": tokens}))


def test_a_draft_of_another_vocabulary_is_refused(make_gguf: Callable[..., Path]) -> None:
    tokens = [f"t{i}" for i in range(300)]
    model = vocabulary(make_gguf, tokens)
    other = [*tokens[:7], "other", *tokens[8:]]
    adds = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 3}
    for draft, what in [
        (vocabulary(make_gguf, other), "'other' as token 7, the model 't7'"),
        (vocabulary(make_gguf, tokens[:171]), "171 tokens, the model has 300"),
        (vocabulary(make_gguf, tokens, **{"tokenizer.ggml.model": "llama"}), "a tokeniser 'llama'"),
        (vocabulary(make_gguf, tokens, **adds), "3 as the bos token that is added, the model None"),
    ]:
        with pytest.raises(UnsupportedError, match=what) as caught:
            check_same_vocabulary(model, draft)
        assert str(draft.path) in str(caught.value)
    check_same_vocabulary(model, vocabulary(make_gguf, ["x", *tokens[1:], "more"]))
    bare = Gguf(make_gguf({"general.architecture": "llama"}))
    check_same_vocabulary(model, bare)
