"""Logit processors: what they see and change, on device and host, alone and beside others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.model.engine.requests.test_service import ask
from tests.model.stepping import set_sampling
from tests.patience import PATIENCE
from urdir.model import (
    DraftSettings,
    Engine,
    LogitProcessor,
    LogitRow,
    ModelError,
    Request,
    SamplingSettings,
)
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.choices import draw
from urdir.model.engine.requests.request import Ending
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling import Logits
from urdir.model.errors import SettingsError, UnsupportedError

NANO = Path(__file__).parents[3] / "data" / "golden" / "nano-llama-q8_0.gguf"
GREEDY = SamplingSettings(temperature=0.0)
PROMPT = (3, 141, 59, 26, 5, 3)


@pytest.fixture(scope="module")
def engine(device_name: str) -> Iterator[Engine]:
    with Engine.open(NANO, device=device_name, context=40, sequences=3, page_len=16) as opened:
        yield opened


class Spy(LogitProcessor):
    """Notes what it is called with, and adds ``bias`` (n_vocab,) if given."""

    def __init__(self, bias: Logits | None = None) -> None:
        self.calls: list[list[LogitRow]] = []
        self.logits: list[Logits] = []
        self._bias = bias

    def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
        self.calls.append(list(rows))
        self.logits.append(logits.copy())
        if self._bias is not None:
            logits += self._bias


class Only(LogitProcessor):
    """Allows some tokens alone, one after the other."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
        for row, of in zip(rows, logits, strict=True):
            wanted = self._tokens[len(row.answer)]
            kept = of[wanted]
            of[:] = -np.inf
            of[wanted] = kept


class Fails(LogitProcessor):
    def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
        if len(rows[0].answer) == 2:
            raise ZeroDivisionError("mine")


class Returns(LogitProcessor):
    def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
        return logits + 1  # type: ignore[return-value]


def tokens(
    engine: Engine, *processors: LogitProcessor, limit: int = 5, settings: SamplingSettings = GREEDY
) -> list[int]:
    """An answer, by the device or the host as the engine was opened."""
    request = Request(prompt=PROMPT, settings=settings, limit=limit, processors=processors)
    choose = draw if engine.host_sampling else None
    generation = Generation(engine.session, None, request, choose)
    for _ in generation.pieces():
        pass
    assert generation.statistics.drafted_tokens == 0 or not processors
    return generation.tokens


def together(
    engine: Engine, processors: Sequence[Sequence[LogitProcessor]], limit: int
) -> list[list[int]]:
    """Answers of a service to requests with these processors, which begin together."""
    gate = threading.Event()
    with Service(engine, None) as service:
        first = Request(prompt=PROMPT, settings=GREEDY, limit=1)
        service.submit(first, lambda _: gate.wait(PATIENCE))  # until the others are there
        answers = [
            ask(service, Request(prompt=PROMPT, settings=GREEDY, limit=limit, processors=tuple(of)))
            for of in processors
        ]
        gate.set()
        for answer in answers:
            assert isinstance(answer.ended(), Ending)
    return [answer.tokens for answer in answers]


def only(vocab: int, token: int, value: float) -> Logits:
    bias = np.zeros(vocab, np.float32)
    bias[token] = value
    return bias


def test_it_sees_the_models_logits_and_every_token(engine: Engine) -> None:
    spy = Spy()
    plain = tokens(engine)
    assert tokens(engine, spy) == plain
    assert [len(call) for call in spy.calls] == [1] * 5
    rows = [call[0] for call in spy.calls]
    assert [tuple(row.prompt) for row in rows] == [PROMPT] * 5
    assert [list(row.answer) for row in rows] == [plain[:n] for n in range(5)]
    exact = engine.logits([*PROMPT, *plain[:-1]])[len(PROMPT) - 1 :]
    error = np.abs(np.concatenate(spy.logits) - exact).max()
    assert error < 1e-2 * np.abs(exact).max()


def test_it_decides_the_tokens(engine: Engine) -> None:
    wanted = [7, 250, 7, 11, 0]
    assert tokens(engine, Only(wanted)) == wanted
    assert tokens(engine, Only(wanted), settings=SamplingSettings(temperature=1.0)) == wanted


def test_processors_come_in_order_and_before_the_settings(engine: Engine) -> None:
    """A bias of the settings is added to what the last processor leaves."""
    bias = only(engine.config.vocab_size, 7, 100.0)
    first, second = Spy(bias), Spy()
    settings = SamplingSettings(temperature=0.0, logit_bias=((250, 100.0), (7, -100.0)))
    assert tokens(engine, first, second, limit=1, settings=settings) == [250]
    assert second.logits[0] - first.logits[0] == pytest.approx(bias[None], abs=1e-4)


@pytest.mark.parametrize(
    "output", [Output.GREEDY, pytest.param(Output.LOGPROBS, marks=pytest.mark.full)]
)
def test_halves_are_the_step_bit_for_bit(engine: Engine, output: Output) -> None:
    """Tokens, logits and log-probabilities, of answers and of a prompt beside one."""
    drawn = SamplingSettings(temperature=1.0, seed=5, logprobs=2)

    def steps(revise: Callable[[], None] | None) -> list[object]:
        found: list[object] = []
        with EagerSteps(engine.session) as eager, pytest.MonkeyPatch.context() as patch:
            queue, parts = engine.session.queue, engine.session.parts
            for slot in (0, 1):
                eager.feed(PROMPT, slot)
                set_sampling(eager, drawn, slot)
                eager.process(4, slot)
            eager.process(5, 0)
            patch.setattr(queue, "launch", partial(queue.launch, revise=revise))
            eager.launch(Batch((0,), (Segment(1, 4, 6, chooses=True),)), output)
            for slot, token in enumerate(parts.state["sampled"].download(np.uint32, 2).tolist()):
                eager.tokens[slot].append(token)
            for _ in range(2):
                eager.step((0, 1), output)
                found.append(parts.work["logits"].download(np.float32, (2, 2)).tobytes())
            found += eager.tokens[:2]
            if output is Output.LOGPROBS:
                found.append(parts.state.log_probabilities(1, 7, 2))
        return found

    assert steps(None) == steps(lambda: None)


def test_answers_of_one_step_share_a_call(engine: Engine) -> None:
    """Two of three have it, and one of these another one as well; all have the tokens of one."""
    spy, other = Spy(), Spy()
    found = together(engine, ((spy,), (), (spy, other)), limit=6)
    assert found == [tokens(engine, limit=6)] * 3
    assert max(len(call) for call in spy.calls) == 2
    assert sum(len(call) for call in spy.calls) == 12
    assert [len(call) for call in other.calls] == [1] * 6


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_an_error_ends_its_answers_alone(device_name: str, on_host: bool) -> None:
    with Engine.open(NANO, device=device_name, context=40, host_sampling=on_host) as engine:
        plain = tokens(engine)
        with pytest.raises(ZeroDivisionError, match="mine"):
            tokens(engine, Fails())
        nothing = np.full(engine.config.vocab_size, -np.inf, np.float32)
        with pytest.raises(ModelError, match=r"^Spy\.process left a row with NaN"):
            tokens(engine, Spy(nothing))
        with pytest.raises(SettingsError, match=r"^Returns\.process returned a ndarray: change"):
            tokens(engine, Returns())
        spy = Spy()
        assert tokens(engine, spy) == plain
        assert [len(call) for call in spy.calls] == [1] * 5
        assert tokens(engine, Only(plain[::-1])) == plain[::-1]


def test_what_is_no_processor_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^logit processors are .*derive from urdir\.model"):
        Request(prompt=PROMPT, processors=(lambda rows, logits: None,))  # type: ignore[arg-type]


def test_it_takes_no_drafts(device_name: str) -> None:
    """The session has drafts; the rows of others in its steps may have some."""
    drafts = DraftSettings(tokens=2)
    options = {"context": 40, "sequences": 2, "drafts": drafts}
    with Engine.open(NANO, device=device_name, **options) as engine:  # type: ignore[arg-type]
        plain, spy = tokens(engine), Spy()
        assert tokens(engine, spy) == plain
        assert len(spy.calls) == 5
        assert together(engine, ((spy,), ()), limit=5) == [plain] * 2


def test_every_rank_has_the_logits(device_name: str) -> None:
    """Split by tensors; split by layers they are refused, unless the host chooses."""
    if not device_name.startswith("emulator"):
        pytest.skip("two emulated devices are enough")
    wanted = [7, 250, 7]
    with Engine.open(NANO, device=device_name, gpus=2, context=40) as engine:
        assert tokens(engine, Only(wanted), limit=3) == wanted
    with (
        Engine.open(NANO, device=device_name, gpus=2, split="layers", context=40) as engine,
        pytest.raises(UnsupportedError, match=r"^logit processors: the model is split by layers"),
    ):
        tokens(engine, Only(wanted))
    by_layers = {"gpus": 2, "split": "layers", "host_sampling": True, "context": 40}
    with Engine.open(NANO, device=device_name, **by_layers) as engine:  # type: ignore[arg-type]
        assert tokens(engine, Only(wanted), limit=3) == wanted


@pytest.mark.slow
def test_every_call_of_the_library_takes_them(device_name: str) -> None:
    """Chats, streams, asyncio, many prompts; a constraint decides last."""
    pytest.importorskip("llguidance")
    question = [{"role": "user", "content": "What is 2 plus 3?"}]
    with Engine.open("demo", device=device_name, context=64, sequences=2) as engine:
        yes = engine.tokenizer.encode("y")[0]
        spy = Spy(only(engine.config.vocab_size, yes, 100.0))
        assert engine.generate("Is it?", settings=GREEDY, processors=[spy], regex="yes|no") == "yes"
        says = Only([*engine.tokenizer.encode("7"), *engine.tokenizer.end_ids])
        assert engine.chat(question, settings=GREEDY, processors=[says]).content == "7"
        stream = engine.chat(question, settings=GREEDY, processors=[says], stream=True)
        assert "".join(delta.content for delta in stream) == "7"

        async def both() -> list[str]:
            replies = (
                engine.chat_async(question, settings=GREEDY, processors=[says]) for _ in "12"
            )
            return [str(reply) for reply in await asyncio.gather(*replies)]

        assert asyncio.run(both()) == ["7", "7"]
        found = engine.generate_all(["Is", "It"], settings=GREEDY, processors=[says])
        assert [each.text for each in found] == ["7", "7"]


def test_a_choice_of_the_caller_is_a_token(engine: Engine) -> None:
    request, vocab = Request(prompt=PROMPT[:1], limit=1), engine.config.vocab_size
    least = Generation(engine.session, None, request, lambda _, tokens, logits: logits.argmin())
    assert len([*least.pieces()]) == len(least.tokens) == 1
    for wrong in (vocab, "x"):
        chosen = Generation(engine.session, None, request, lambda *_, token=wrong: token)
        with pytest.raises(SettingsError, match=f"{wrong!r}: expected a token id below {vocab}"):
            list(chosen.pieces())
