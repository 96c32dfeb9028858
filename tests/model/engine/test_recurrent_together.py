"""Models with recurrent layers or latent vectors, many sequences at once: segments of prompts
beside decoded tokens, and a service."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.requests.test_service import GREEDY, Collected, ask, is_idle
from tests.model.stepping import stepping
from tests.patience import wait_for
from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.session import Session
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data" / "families"
#: What the default run has: convolutions and the gated delta rule beside attention.
SAMPLE = "qwen35-dense"
OTHERS = (
    *("mamba-dense", "mamba2-dense", "lfm2-dense", "lfm2moe-moe", "qwen3next-moe", "qwen35moe-moe"),
    *("falcon-h1-dense", "granitehybrid-dense", "jamba-dense", "kimi-linear-moe"),
    *("nemotron_h-dense", "nemotron_h_moe-dense", "plamo2-dense", "rwkv6-dense", "rwkv7-dense"),
)
NAMES = [SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
#: Lightning attention, and latent vectors, which many rows of a step read.
MORE = ("minimax-01-moe", "bailingmoe3-moe", "deepseek2-moe", "mistral4-moe", "minicpm3-dense")
of_all = pytest.mark.parametrize("family", [*OTHERS, SAMPLE, *MORE], indirect=True, scope="module")
EXACT_RELATIVE_RMS = 1e-4
#: Tokens of each sequence's prompt, and of its whole text.
PROMPTS, TEXTS = (17, 1, 26, 9), (20, 4, 28, 11)


@dataclass(frozen=True)
class Family:
    """A golden: the ``logits`` (48, vocabulary) f32 after each of the first ``tokens``; ``native``
    is the error of llama.cpp's kernels."""

    engine: Engine
    tokens: list[int]
    logits: np.ndarray
    native: float


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, device_name: str, reference_file: Callable[[str], Path]
) -> Iterator[Family]:
    with np.load(DATA / f"{request.param}.npz") as golden:
        tokens = [int(token) for token in golden["tokens"]]
        logits, native = golden["logits"], float(golden["native"])
    file = reference_file(request.param)
    with Engine.open(file, device=device_name, context=48, kv_dtype="f32", exact=True) as engine:
        yield Family(engine, tokens, logits, native)


def ragged(eager: EagerSteps, family: Family, seed: int) -> float:
    """The error of the logits of `TEXTS` in steps of random segments and decoded tokens; a sequence
    begins anew where another ended. Some steps have two segments, where these fit."""
    rng, tokens, session = np.random.default_rng(seed), family.tokens, eager.session
    waiting = list(range(len(TEXTS)))
    texts: dict[int, int] = {}
    found, golden, most = [], [], 0
    while waiting or texts:
        room, decode, segments = session.shapes.chunks[-1], [], []
        for slot in rng.permutation([2, 0, 3]).tolist():
            if slot not in texts and waiting:
                texts[slot] = waiting.pop(0)
                eager.truncate(0, slot)
                eager.feed(tokens[: PROMPTS[texts[slot]]], slot)
            if slot not in texts or rng.random() < 0.2:
                continue
            start, end = eager.lengths[slot], len(eager.tokens[slot])
            if end - start == 1 and start:
                decode.append(slot)
                continue
            count = min(int(rng.integers(1, 20)), end - start, room)
            if count > 0:
                stop = start + count
                segments.append(Segment(slot, start, stop, chooses=stop == end))
                room -= session.shapes.alignment * -(-count // session.shapes.alignment)
        batch = Batch(tuple(decode), tuple(segments))
        if not decode and not segments:
            continue
        most = max(most, len(segments))
        eager.launch(batch, Output.LOGITS)
        if not batch.choosing:
            continue
        shape = (len(batch.choosing), session.parts.config.vocab_size)
        logits = session.parts.work["logits"].download(np.float32, shape)
        for slot, row in zip(batch.choosing, logits, strict=True):
            length = eager.lengths[slot]
            found.append(row)
            golden.append(family.logits[length - 1])
            if length == TEXTS[texts[slot]]:
                del texts[slot]
            else:
                eager.feed(tokens[length : length + 1], slot)
    assert most >= min(2, session.shapes.chunks[-1] // session.shapes.alignment)
    assert len(found) == sum(TEXTS) - sum(PROMPTS) + len(TEXTS)
    return relative_rms(np.stack(found), np.stack(golden))


@pytest.mark.full
@of_all
def test_exact_logits_are_llama_cpp_s(family: Family) -> None:
    """A segment beside decoded tokens: exact steps have no room for two."""
    engine = family.engine
    with stepping(
        engine.device, engine.weights, SessionSettings(48, "f32", exact=True, sequences=4)
    ) as eager:
        assert ragged(eager, family, 1) <= EXACT_RELATIVE_RMS


@pytest.mark.full
@pytest.mark.slow
@of_all
def test_default_logits_are_at_least_as_near_as_llama_cpp_s(family: Family) -> None:
    engine, allowed = family.engine, max(2e-3, 1.1 * family.native)
    with stepping(
        engine.device, engine.weights, SessionSettings(256, sequences=4, page_len=16)
    ) as eager:
        assert ragged(eager, family, 2) <= allowed


class Letters:
    """A tokenizer: every token is a character, some end answers."""

    def __init__(self, *end_ids: int) -> None:
        self.end_ids = end_ids

    def is_control(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


@dataclass(frozen=True)
class Opened:
    """What a service needs of an engine."""

    session: Session
    tokenizer: Any


def patient(session: Session) -> Limits:
    """Requests may wait for as long as the emulator takes."""
    return replace(Limits.for_latency(session.shapes), wait_seconds=1000.0)


#: Of the logits' standard deviation: what rounding may decide.
TIE = 0.02


def check_greedy(exact: Session, request: Request, collected: Collected, ends: list[int]) -> None:
    """Each token of an answer, and its end, is the likeliest of the sequence alone."""
    ending = collected.ended()
    assert isinstance(ending, Ending), ending
    chosen: list[list[int]] = [[token] for token in collected.tokens]
    with EagerSteps(exact) as eager:
        eager.feed(request.prompt)
        for allowed in [*chosen, ends] if ending.finish is Finish.END else chosen:
            logits = eager.logits()[0]
            assert logits[allowed].max() >= logits.max() - TIE * logits.std()
            eager.feed(allowed[:1])
    if ending.finish is not Finish.END:
        assert ending.finish is Finish.LENGTH
        assert len(chosen) == request.limit


def check_preempted(
    weights: Weights,
    device: Device,
    settings: SessionSettings,
    exact: SessionSettings,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Answers of a session with too few pages for all are those of each alone, in ``exact``."""
    with (
        Session(device, weights, settings) as session,
        Service(Opened(session, None), None, replace(patient(session), ahead=1)) as service,
    ):
        asked = []
        for number, prompt in enumerate(prompts):
            request = Request(prompt=(*prompt, number), settings=GREEDY, limit=14)
            asked.append((request, ask(service, request)))
        for _, collected in asked:
            collected.ended()
        assert service.metrics().preemptions > 0
    with Session(device, weights, exact) as alone:
        for request, collected in asked:
            check_greedy(alone, request, collected, [])


@pytest.mark.full
@pytest.mark.slow
def test_a_service_answers_each_request_as_alone(family: Family) -> None:
    """In a small pool, beside some that are cancelled by their first token. What a step that ran
    ahead made of an answer that ends is of no consequence for who has the slot next."""
    # with these prompts no router's choice hangs on rounding
    rng, engine, ends = random.Random(7), family.engine, [5, 17, 40, 77, 101, 120]
    asked, cancelled, gate = [], [], threading.Event()
    with Session(
        engine.device,
        engine.weights,
        SessionSettings(256, sequences=3, page_len=16, pages=4, shared_states=0),
    ) as session:
        opened = Opened(session, Letters(*ends))
        limits = replace(patient(session), ahead=1)
        with Service(opened, opened.tokenizer, limits) as service:
            first = Request(prompt=(1,), settings=GREEDY, limit=1)
            service.submit(first, lambda _: gate.wait(250))  # until all others are there
            for number, length in enumerate((29, 14, 30, 15, 14)):
                prompt = tuple(rng.randrange(128) for _ in range(length))
                grows = number < 3  # beyond the page that it begins in
                request = Request(prompt=prompt, settings=GREEDY, limit=8, ignore_end=grows)
                asked.append((request, ask(service, request)))
                if number % 3 == 1:
                    cancel = partial(lambda i, _: service.cancel(cancelled[i]), len(cancelled))
                    cancelled.append(service.submit(request, cancel))
            gate.set()
            for _, collected in asked:
                collected.ended()
            wait_for(lambda: is_idle(service))  # after the last cancellation
            metrics = service.metrics()
    assert metrics.prefix_hits == 0
    assert metrics.preemptions > 0 or not session.parts.cache.pools
    for request, collected in asked:
        check_greedy(engine.session, request, collected, ends)


def test_a_slot_is_taken_over_while_a_step_of_its_last_owner_runs(family: Family) -> None:
    engine, prompts = family.engine, ((3, 50, 81), (9,), (77, 12), (100, 31, 90, 4))

    def answers(session: Session, order: tuple[int, ...], *ends: int) -> list[list[int]]:
        opened = Opened(session, Letters(*ends))
        with Service(opened, opened.tokenizer, patient(session)) as service:
            requests = (Request(prompt=prompts[i], settings=GREEDY, limit=6) for i in order)
            asked = [ask(service, request) for request in requests]
            for collected in asked:
                collected.ended()
        return [collected.tokens for collected in asked]

    with Session(engine.device, engine.weights, SessionSettings(48, "f32", exact=True)) as session:
        whole = answers(session, (0, 1, 2, 3))
        first, end = next(
            (i, token)
            for i, tokens in enumerate(whole)
            for at, token in enumerate(tokens[1:5], start=1)
            if token not in tokens[:at]
        )
        cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
        assert 1 <= len(cut[first]) < 6
        order = (first, 1, first, first, 2)
        assert answers(session, order, end) == [cut[i] for i in order]
