"""What a session's sequences ask of the choice of their tokens: on the device as in numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.stepping import answer, set_sampling
from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.request import Piece, Request
from urdir.model.engine.requests.service import Item, Service
from urdir.model.engine.sampling import sample
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

PROMPT = [3, 141, 59, 26, 5, 3]
PLAIN = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)


@pytest.fixture(scope="module")
def weights(device: Device) -> Iterator[Weights]:
    path = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
    with Gguf(path) as gguf, Weights.load(gguf, Config.of(gguf), device) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def session(device: Device, weights: Weights) -> Iterator[Session]:
    with Session(device, weights, SessionSettings(context=40, sequences=3)) as opened:
        yield opened


@pytest.fixture
def eager(session: Session) -> Iterator[EagerSteps]:
    """Its sequences, emptied, which draw."""
    with EagerSteps(session) as opened:
        for slot in range(3):
            set_sampling(opened, PLAIN, slot)
        yield opened


def chosen(eager: EagerSteps, settings: SamplingSettings, count: int, slot: int = 0) -> list[int]:
    """So many tokens after the prompt, by the device."""
    eager.truncate(0, slot)
    eager.feed(PROMPT, slot)
    set_sampling(eager, settings, slot)
    return [eager.step((slot,), Output.of(settings))[0] for _ in range(count)]


ASKED = {
    "nothing": PLAIN,
    "repetition": replace(PLAIN, repeat_penalty=1.4, repeat_last_n=5),
    "presence": replace(PLAIN, presence_penalty=3.0),
    "frequency": replace(PLAIN, temperature=0.0, frequency_penalty=2.0),
    "bias": replace(PLAIN, logit_bias=((7, 6.0), (250, 5.5)), top_k=4, nonce=9),
}


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize("settings", ASKED.values(), ids=list(ASKED))
def test_the_device_chooses_as_numpy_does(eager: EagerSteps, settings: SamplingSettings) -> None:
    found = chosen(eager, settings, 10)
    eager.truncate(0)
    eager.feed(PROMPT)
    known = list(PROMPT)
    for _ in found:
        token = sample(eager.logits()[0], settings, len(known), known, answer_at=len(PROMPT))
        known.append(token)
        eager.feed([token])
    assert found == known[len(PROMPT) :]


@pytest.mark.slow
def test_a_seeded_answer_is_the_same_in_every_place(eager: EagerSteps) -> None:
    found = [chosen(eager, PLAIN, 8, slot) for slot in range(3)]
    assert found[0] == found[1] == found[2]
    assert chosen(eager, replace(PLAIN, nonce=1), 8) != found[0]


@pytest.mark.parametrize(
    "settings", [PLAIN, SamplingSettings(temperature=0.0)], ids=["draw", "greedy"]
)
def test_the_device_stops_at_an_end_id(session: Session, settings: SamplingSettings) -> None:
    """The row is idle after it, though steps were queued; the next answer goes on from there."""
    free = answer(session, PROMPT, 20, settings)
    end = free[6]
    first = free.index(end)
    assert answer(session, PROMPT, None, settings, (end, 1)) == free[:first]
    assert session.parts.state.positions() == {}
    known = [*PROMPT, *free[: first + 1]]
    assert answer(session, known, 3, settings) == free[first + 1 : first + 4]


def test_steps_one_at_a_time_have_no_end_ids(session: Session) -> None:
    """Whatever the last answer in their place had."""
    greedy = SamplingSettings(temperature=0.0)
    free = answer(session, PROMPT, 4, greedy)
    assert answer(session, PROMPT, None, greedy, free[1:2]) == free[: free.index(free[1])]
    with EagerSteps(session) as eager:
        eager.feed(PROMPT)
        assert [eager.step()[0] for _ in range(4)] == free


def test_end_ids_wait_for_min_tokens(session: Session) -> None:
    """End ids that are all but certain come as the sixth token, after five others."""
    ends = range(20, 36)
    settings = replace(PLAIN, min_tokens=5, logit_bias=tuple((token, 50.0) for token in ends))
    found = answer(session, PROMPT, None, settings, ends)
    assert [token in ends for token in found] == [False] * 5


def test_log_probabilities_are_of_the_models_own_distribution(eager: EagerSteps) -> None:
    settings = replace(PLAIN, logprobs=4, logit_bias=((9, 40.0),), temperature=0.3)
    eager.feed(PROMPT)
    eager.logits()[0]
    # the last token alone, both times: a step of several rows rounds otherwise
    eager.truncate(len(PROMPT) - 1)
    eager.feed(PROMPT[-1:])
    logits = eager.logits()[0].astype(np.float64)
    eager.truncate(len(PROMPT) - 1)
    eager.feed(PROMPT[-1:])
    set_sampling(eager, settings)
    (token,) = eager.step(output=Output.LOGPROBS)
    assert token == 9
    state, at = eager.session.parts.state, len(PROMPT) - 1
    logprob, likely = state.log_probabilities(0, at, 4)
    exact = logits - np.logaddexp.reduce(logits)
    assert logprob == pytest.approx(exact[9], abs=1e-4)
    assert [token for token, _ in likely] == np.argsort(-logits, kind="stable")[:4].tolist()
    for token, value in likely:
        assert value == pytest.approx(exact[token], abs=1e-4)


@pytest.mark.slow
def test_masks_are_of_the_rows_of_one_step(eager: EagerSteps) -> None:
    """One of two sequences may take three tokens alone; in the next step both may take all."""
    greedy = SamplingSettings(temperature=0.0)
    free = {s: chosen(eager, greedy, 2, s) for s in (0, 1)}
    mask = np.zeros((eager.session.parts.config.vocab_size + 31) // 32, np.uint32)
    allowed = [token for token in (5, 100, 250) if token not in free[1]]
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    for slot in (0, 1):
        eager.truncate(0, slot)
        eager.feed(PROMPT[:-1], slot)
        eager.launch(Batch((), (Segment(slot, 0, len(PROMPT) - 1),)), Output.NONE)
        eager.feed(PROMPT[-1:], slot)
    eager.launch(Batch((0, 1)), Output.of(greedy, masked=True), {1: mask})
    drawn = eager.session.parts.state["sampled"].download(np.uint32, 2).tolist()
    assert drawn[0] == free[0][0]
    assert drawn[1] in allowed
    for slot, token in enumerate(drawn):
        eager.tokens[slot].append(token)
    eager.launch(Batch((0, 1)), Output.SAMPLE)
    later = eager.session.parts.state["sampled"].download(np.uint32, 2).tolist()
    assert later[0] == free[0][1]
    for slot, token in enumerate(later):
        eager.tokens[slot].append(token)


@pytest.mark.parametrize("output", [Output.GREEDY, Output.SAMPLE])
def test_no_choice_is_an_error_that_names_the_sequence(eager: EagerSteps, output: Output) -> None:
    """A mask that allows nothing, or logits that are NaN; the sequence is as before the token."""
    settings = PLAIN if output is Output.SAMPLE else SamplingSettings(temperature=0.0)
    free = chosen(eager, settings, 3)
    for slot in (0, 2):
        eager.truncate(0, slot)
        eager.feed(PROMPT, slot)
        set_sampling(eager, settings, slot)
    config = eager.session.parts.config
    assert config.output_norm is not None
    norm = eager.session.parts.weights.norm(config.output_norm).weight
    kept = norm.download(np.float32)
    norm.upload(np.full_like(kept, np.nan))
    try:
        with pytest.raises(ModelError, match=r"^sequence 2: no token can be chosen: its logits"):
            eager.step((2,), output)
        with pytest.raises(ModelError, match=r"^sequence 0: no token can be chosen: its logits"):
            eager.step(output=output)
    finally:
        norm.upload(kept)
    assert eager.tokens[0] == eager.tokens[2] == PROMPT
    assert [eager.step((2,), output)[0] for _ in range(3)] == free


def test_a_bias_outside_the_vocabulary_is_refused(session: Session) -> None:
    size = session.parts.config.vocab_size
    with pytest.raises(ModelError, match=rf"^logit_bias of token {size}: the vocabulary"):
        answer(session, PROMPT, 1, replace(PLAIN, logit_bias=((size, 1.0),)))


@pytest.mark.slow
def test_a_service_reports_what_each_request_wants(device_name: str) -> None:
    """Log-probabilities for one of four, and the same tokens by seed and nonce in any slot."""
    path = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
    asked = [
        PLAIN,
        replace(PLAIN, logprobs=2),
        replace(PLAIN, nonce=5, presence_penalty=1.0),
        PLAIN,
    ]
    items: list[list[Item]] = [[] for _ in asked]
    done = threading.Semaphore(0)

    def taker(of: list[Item]) -> Callable[[Item], None]:
        def take(item: Item) -> None:
            of.append(item)
            if not isinstance(item, Piece):
                done.release()

        return take

    with (
        Engine.open(path, device=device_name, context=64, sequences=3, page_len=16) as engine,
        Service(engine, None) as service,
    ):
        for settings, of in zip(asked, items, strict=True):
            service.submit(Request(prompt=tuple(PROMPT), settings=settings, limit=5), taker(of))
        for _ in asked:
            assert done.acquire(timeout=250)
    pieces = [[item for item in of if isinstance(item, Piece)] for of in items]
    choices = [[choice for piece in of for choice in piece.choices] for of in pieces]
    tokens = [[choice.token for choice in of] for of in choices]
    assert [len(of) for of in tokens] == [5] * 4
    assert tokens[0] == tokens[1] == tokens[3] != tokens[2]
    assert {choice.logprob for choice in choices[0]} == {None}
    for choice in choices[1]:
        assert choice.logprob is not None
        assert len(choice.top) == 2
        assert choice.logprob <= choice.top[0][1] + 1e-6
