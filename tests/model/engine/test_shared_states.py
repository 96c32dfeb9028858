"""Requests of recurrent models begin with states that others have left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.requests.test_service import GREEDY, Collected, ask, is_idle
from tests.model.engine.test_recurrent_together import Letters, Opened, check_greedy, patient
from tests.model.stepping import logits_of
from tests.patience import wait_for
from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.memory.session_settings import SessionSettings, Split
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: A state beside attention, in one layer, and in all of a model without attention.
SAMPLE = "qwen35-dense"
OTHERS = ("mamba-dense", "falcon-h1-dense", "minimax-01-moe", "kimi-linear-moe", "rwkv7-dense")
NAMES = [SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")
PAGE = 16
#: The same tokens in other divisions: rounding differs.
CLOSE = 1e-5
LIKELY = SamplingSettings(temperature=0.0, logprobs=20)
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 128, 200)]
ENDS = [5, 17, 40, 77, 101, 120]


@pytest.fixture(scope="module", params=NAMES)
def engine(
    request: pytest.FixtureRequest, device_name: str, reference_file: Callable[[str], Path]
) -> Iterator[Engine]:
    file = reference_file(request.param)
    with Engine.open(file, device=device_name, context=128, kv_dtype="f32", exact=True) as engine:
        yield engine


def sharing(engine: Engine, states: int, *, exact: bool = True, **fields: Any) -> Session:
    """A session of three sequences."""
    dtype = "f32" if exact else "f16"
    settings = SessionSettings(
        128, dtype, exact=exact, sequences=3, page_len=PAGE, shared_states=states, **fields
    )
    return Session(engine.device, engine.weights, settings)


def cached(collected: Collected) -> int:
    ending = collected.ended()
    assert isinstance(ending, Ending), ending
    return ending.cached_tokens


def first_logprobs(
    service: Service, prompt: list[int], scope: bytes = b""
) -> tuple[int, dict[int, float]]:
    """How many tokens of a prompt were found, and the likeliest tokens after it."""
    pieces: list[Any] = []

    class Choices(Collected):
        def deliver(self, item: Any) -> None:
            pieces.append(item)
            super().deliver(item)

    collected = Choices()
    request = Request(prompt=tuple(prompt), settings=LIKELY, limit=1, scope=scope)
    service.submit(request, collected.deliver)
    found = cached(collected)
    (choice,) = (choice for piece in pieces if isinstance(piece, Piece) for choice in piece.choices)
    return found, dict(choice.top)


def check_a_prefix_is_found(
    device: Device, weights: Weights, settings: SessionSettings, prompt: list[int], other: list[int]
) -> None:
    """What follows another prompt, which begins like an earlier one, is as if nothing was found."""
    with (
        Session(device, weights, settings) as session,
        Service(Opened(session, None), None) as service,
    ):
        assert first_logprobs(service, prompt)[0] == 0
        found, top = first_logprobs(service, other)
        assert found >= 16
    with Session(device, weights, replace(settings, shared_states=None)) as session:
        logits = logits_of(session, other).astype(np.float64)
    whole = (logits - np.log(np.exp(logits).sum()))[list(top)]
    assert relative_rms(np.array([*top.values()]), whole) < CLOSE


def logprobs_of(engine: Engine, prompt: list[int]) -> np.ndarray[Any, Any]:
    """After a prompt that was processed whole."""
    logits = logits_of(engine.session, prompt).astype(np.float64)
    result: np.ndarray[Any, Any] = logits - np.log(np.exp(logits - logits.max()).sum())
    return result - logits.max()


SAME, OWN = TOKENS[:23], (TOKENS[30:42], TOKENS[50:62], TOKENS[70:77])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "known"),
    [
        ((TOKENS[:18], [*TOKENS[:16], 7, 9]), [0, 16]),
        pytest.param(
            ([*SAME, *OWN[0]], [*SAME[:20], *OWN[1]], [*SAME, *OWN[2]], [*SAME, *OWN[0], 7]),
            [0, 0, 16, 32],
            marks=pytest.mark.full,
        ),
    ],
    ids=["two", "four"],
)
def test_logits_after_a_state_of_another_are_those_of_the_whole(
    engine: Engine, prompts: tuple[list[int], ...], known: list[int]
) -> None:
    """After that of the last page, and after that where prompts part."""
    with sharing(engine, 4) as session, Service(Opened(session, None), None) as service:
        for prompt, found in zip(prompts, known, strict=True):
            cached_tokens, top = first_logprobs(service, prompt)
            assert cached_tokens == found
            if found:
                whole = logprobs_of(engine, prompt)[list(top)]
                assert relative_rms(np.array([*top.values()]), whole) < CLOSE
        metrics = service.metrics()
    kept = len(prompts) // 2
    assert (metrics.prefix_hits, metrics.states_kept, metrics.states_total) == (sum(known), kept, 4)


@pytest.mark.slow
def test_a_state_comes_back_from_the_host(engine: Engine) -> None:
    """One place on the device, and two prompts in turns: the same bits as if it had stayed."""
    prompts, seen = (TOKENS[:18], TOKENS[60:78]), list[tuple[int, dict[int, float]]]()
    host = {"prefix_host_memory": 4 << 20}
    with sharing(engine, 1, **host) as session, Service(Opened(session, None), None) as service:
        for number in (0, 0, 1, 0, 1):
            seen.append(first_logprobs(service, prompts[number]))
        assert service.metrics().states_kept == 1
    assert [found for found, _ in seen] == [0, 16, 0, 16, 16]
    assert seen[3] == seen[1]


@pytest.mark.slow
def test_states_of_another_scope_are_not_found(engine: Engine) -> None:
    """Each scope computes what it has not had, and its logits are the same to the last bit."""
    prompt, seen = TOKENS[:18], list[tuple[int, dict[int, float]]]()
    with sharing(engine, 4) as session, Service(Opened(session, None), None) as service:
        for scope in (b"a", b"b", b"", b"a", b"b", b""):
            seen.append(first_logprobs(service, prompt, scope))
        metrics = service.metrics()
    assert [found for found, _ in seen] == [0, 0, 0, 16, 16, 16]
    assert seen[0][1] == seen[1][1] == seen[2][1]
    assert seen[3][1] == seen[4][1] == seen[5][1]
    assert (metrics.prefix_hits, metrics.states_kept) == (48, 3)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("states", [1, 5])
def test_any_requests_are_answered_as_alone(engine: Engine, states: int) -> None:
    """With common beginnings, some cancelled, in few pages, with few states, in default
    arithmetic."""
    rng, asked = random.Random(states), []
    with sharing(engine, states, exact=False, pages=12) as session:
        opened = Opened(session, Letters(*ENDS))
        with Service(opened, opened.tokenizer, patient(session)) as service:
            for number in range(12):
                start, length = rng.choice([0, 0, 40]), rng.randrange(10, 70)
                prompt = (*TOKENS[start : start + length], *TOKENS[number : number + 3])
                request = Request(
                    prompt=prompt, settings=GREEDY, limit=rng.randrange(1, 20), ignore_end=True
                )
                asked.append((request, ask(service, request)))
                if rng.random() < 0.3:
                    service.cancel(service.submit(request, lambda _: None))
                if rng.random() < 0.5:
                    asked[-1][1].ended()
            for _, collected in asked:
                collected.ended()
            wait_for(lambda: is_idle(service))  # after the last cancellation
            metrics = service.metrics()
    assert metrics.prefix_hits > 0
    assert metrics.states_kept <= states
    for request, collected in asked:
        check_greedy(engine.session, request, collected, ENDS)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), [(SAMPLE, "tensors"), ("mamba-dense", "layers")])
def test_states_of_several_devices_are_kept_together(
    name: str,
    split: Split,
    device_name: str,
    needs_gpus: Callable[[int], None],
    reference_file: Callable[[str], Path],
) -> None:
    needs_gpus(2)
    common: Any = {"device": device_name, "context": 64, "kv_dtype": "f32", "exact": True}
    many: Any = {"sequences": 2, "page_len": PAGE, "memory_share": 0.1}
    file = reference_file(name)
    with (
        Engine.open(file, **common) as alone,
        Engine.open(file, **common, **many, gpus=2, split=split) as engine,
        Service(engine, None) as service,
    ):
        for prompt, known in ((TOKENS[:18], 0), ([*TOKENS[:16], 7, 9], 16)):
            found, top = first_logprobs(service, prompt)
            assert found == known
            whole = logprobs_of(alone, prompt)[list(top)]
            assert relative_rms(np.array([*top.values()]), whole) < CLOSE


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
def test_copies_that_fail_end_their_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The first copy keeps a state, the second gives it to another; both are tried again later."""
    prompt = TOKENS[:20]
    with sharing(engine, 2) as session, Service(Opened(session, None), None) as service:
        recurrent = session.parts.recurrent
        assert recurrent is not None
        copy, calls = recurrent._copy, [0]

        def failing(*args: Any) -> None:
            calls[0] += 1
            if calls[0] == call:
                raise DriverError("no such luck")
            copy(*args)

        monkeypatch.setattr(recurrent, "_copy", failing)
        asked = []
        for _ in range(4):
            request = Request(prompt=tuple(prompt), settings=LIKELY, limit=1)
            asked.append(ask(service, request))
            asked[-1].ended()
        failed = [number for number, a in enumerate(asked) if isinstance(a.last, DriverError)]
        assert failed == [call - 1]
        found = [cached(a) for number, a in enumerate(asked) if number not in failed]
        assert found == [0, 16, 16]
        assert (service.metrics().pages_used, service.metrics().states_kept) == (0, 1)
        _, top = first_logprobs(service, prompt)
        whole = logprobs_of(engine, prompt)[list(top)]
        assert relative_rms(np.array([*top.values()]), whole) < CLOSE
