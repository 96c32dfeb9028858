"""Answers with drafts have the tokens, log-probabilities and endings of those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import Eager, Numbers
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.answer_text import AnswerText
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Item, Piece, Request, TokenChoice
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.step_costs import StepCosts
from urdir.model.errors import SettingsError
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.attention.choice import LARGE_SHARED
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.speculation.ngram_drafts import NgramDrafts
from urdir.ptxgen.target import Target

RNG = np.random.default_rng(32)
CONTEXT, VOCABULARY = 96, 37
PLAIN = SessionSettings(CONTEXT, exact=True, sequences=4)
#: Always as many drafts as there may be, and as many as pay.
FIXED, CHOSEN = DraftSettings(most=3, least=3), DraftSettings(most=7)


@pytest.fixture(scope="module")
def weights(device: Device, random_model: Callable[..., Any]) -> Iterator[Weights]:
    """Of a layer: a token depends most on the one before, so text repeats itself now and then."""
    model = random_model(Shape("llama", 1, 64, 4, 2, 32, 64, VOCABULARY, False), seed=1)
    model.tensors["blk.0.attn_output.weight"].data.view(np.float32)[:] *= np.float32(0.3)
    with Weights.load(model, Config.of(model), device) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def without(device: Device, weights: Weights) -> Iterator[Session]:
    with Session(device, weights, PLAIN) as session:
        yield session


@pytest.fixture(scope="module")
def fixed(device: Device, weights: Weights) -> Iterator[Session]:
    with Session(device, weights, replace(PLAIN, drafts=FIXED)) as session:
        yield session


@dataclass(slots=True)
class Given:
    """What came of a request."""

    choices: list[TokenChoice] = field(default_factory=list)
    text: str = ""
    ending: Ending | None = None

    @property
    def tokens(self) -> list[int]:
        return [choice.token for choice in self.choices]

    def take(self, item: Item) -> None:
        if isinstance(item, Piece):
            self.choices += item.choices
            self.text += item.text
        else:
            assert isinstance(item, Ending)
            self.ending = item

    def check_equal(self, other: Given) -> None:
        """All but log-probabilities is equal; these to rounding: steps of several rows take other
        kernels."""
        assert self.tokens == other.tokens
        assert self.text == other.text
        for mine, theirs in zip(self.choices, other.choices, strict=True):
            assert (mine.logprob is None) == (theirs.logprob is None)
            if mine.logprob is not None and theirs.logprob is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert self.ending is not None
        assert other.ending is not None
        # what is found of a prompt depends on which answers have ended before
        plain = replace(self.ending, drafted_tokens=0, accepted_tokens=0, cached_tokens=0)
        assert plain == replace(other.ending, cached_tokens=0)


def given(
    session: Session,
    requests: Sequence[Request],
    tokenizer: Any = None,
    limits: Limits | None = None,
    left: Sequence[int] = (),
    compiler: Any = None,
) -> list[Given]:
    """What comes of requests that are there at once. Those with numbers in ``left`` are cancelled
    after five tokens; a ``compiler`` makes constraints."""
    limits = limits or Limits.for_throughput(session.shapes, len(requests))
    session._compilers = {} if compiler is None else {tokenizer: compiler}
    with AnswerLoop(session, tokenizer, limits) as loop:
        answers = [loop.answer_to(request) for request in requests]
        found: dict[Answer, Given] = {each: Given() for each in answers}
        takers: dict[Answer, Callable[[Item], None]] = {}
        for each in answers:
            takers[each] = take = found[each].take
            if tokenizer is not None:
                takers[each] = AnswerText(tokenizer, each.request, take, partial(loop.stop, each))
            loop.add(each)
        while not loop.is_idle:
            loop.turn()
            while told := loop.take_items():  # again for the endings of stops
                for each, items in told.items():
                    for item in items:
                        takers[each](item)
                    if answers.index(each) in left and len(found[each].choices) >= 5:
                        loop.cancel(each)
        assert session.parts.state.drafts is None or loop.metrics().steps > 0
    return [found[each] for each in answers]


def prompts(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    """Prompts of any length that repeat themselves, so that drafts are found."""
    found = []
    for _ in range(count):
        part = rng.integers(3, VOCABULARY, rng.integers(2, 7))
        found.append(tuple(int(t) for t in np.tile(part, 4)[: rng.integers(3, 24)]))
    return found


def random_settings(rng: np.random.Generator, drawn: bool) -> SamplingSettings:
    """Settings of every kind."""
    bias = tuple(
        (int(t), float(rng.normal(0, 3))) for t in rng.choice(VOCABULARY, 5, replace=False)
    )
    return SamplingSettings(
        temperature=0.7 if drawn else 0.0,
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([0.9, 1.0])),
        repeat_penalty=float(rng.choice([1.0, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.2])),
        logit_bias=bias if rng.random() < 0.5 else (),
        logprobs=int(rng.choice([0, 3])) if rng.random() < 0.5 else None,
        min_tokens=int(rng.choice([0, 9])),
        seed=int(rng.integers(2**32)),
    )


def accepted_by_rule(prompt: Sequence[int], tokens: Sequence[int], most: int) -> tuple[int, int]:
    """Drafts and those accepted of an answer by steps of up to ``most`` drafts of n-grams: the rule
    in plain Python, which knows the answer."""
    rule = NgramDrafts(max_len=1 << 20)
    text, drafted, accepted = [*prompt, tokens[0]], 0, 0  # the first token is the prompt's
    end = len(prompt) + len(tokens) - 1  # no row stands there
    while len(text) - 1 < end:
        after = tokens[len(text) - len(prompt) :]
        drafts = rule.drafts(text, min(most, end - len(text)))
        stand = 0
        while stand < len(drafts) and drafts[stand] == after[stand]:
            stand += 1
        drafted, accepted = drafted + len(drafts), accepted + stand
        text += after[: stand + 1]
    return drafted, accepted


def test_one_answer_is_the_same_and_takes_fewer_steps(
    without: Session, fixed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the rule says, where each step is read before the next one is planned."""
    monkeypatch.setattr("urdir.model.engine.run_ahead.AHEAD", 1)
    request = Request(prompt=(3, 1, 4, 1, 5, 3, 1, 4), settings=GREEDY, limit=32)
    expected, found = given(without, [request])[0], given(fixed, [request])[0]
    found.check_equal(expected)
    assert found.ending is not None
    assert found.ending.accepted_tokens >= 8
    by_rule = accepted_by_rule(request.prompt, found.tokens, FIXED.most)
    assert (found.ending.drafted_tokens, found.ending.accepted_tokens) == by_rule


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 25))]
)
def test_answers_beside_each_other_are_the_same(
    without: Session, fixed: Session, seed: int
) -> None:
    """As each alone without drafts: more than there are sequences, so that prompts come beside
    answers, with settings of all kinds, end ids and texts that end them, and some that are left."""
    rng = np.random.default_rng([32, seed])
    requests = [
        Request(
            prompt=prompt,
            settings=GREEDY if at % 4 == 0 else random_settings(rng, drawn=at % 2 == 1),
            limit=int(rng.integers(10, 24)),
            stops=("7 1",) if at % 3 == 0 else (),
            drafts=at != 5,
        )
        for at, prompt in enumerate(prompts(rng, 7))
    ]
    tokenizer = Numbers(0, 1)
    left = (2,)
    expected = [
        given(without, [request], tokenizer, left=(0,) if at in left else ())[0]
        for at, request in enumerate(requests)
    ]
    found = given(fixed, requests, tokenizer, left=left)
    for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if at in left:
            length = min(len(mine.tokens), len(theirs.tokens))
            assert mine.tokens[:length] == theirs.tokens[:length]
        else:
            mine.check_equal(theirs)
    drafted = [each.ending.drafted_tokens if each.ending else 0 for each in found]
    assert sum(drafted) > 10 or seed > 0
    assert drafted[5] == 0


def test_the_context_ends_within_drafts(without: Session, fixed: Session) -> None:
    """By any number of places."""
    for rest in (1, 2, 6):
        prompt = tuple([5, 9, 2] * 40)[: CONTEXT - rest]
        request = Request(prompt=prompt, settings=GREEDY)
        expected, found = given(without, [request])[0], given(fixed, [request])[0]
        found.check_equal(expected)
        assert len(found.tokens) == rest + 1


@pytest.mark.full  # test_model_drafts.py and test_drafted_states.py have it, too
def test_answers_that_are_preempted_go_on_the_same(device: Device, weights: Weights) -> None:
    """Pages run out, also for drafts."""
    rng = np.random.default_rng(5)
    settings = replace(PLAIN, page_len=16, pages=7)
    requests = [
        Request(prompt=prompt, settings=GREEDY, limit=24, ignore_end=True)
        for prompt in prompts(rng, 4)
    ]
    with Session(device, weights, settings) as session:
        expected = given(session, requests)
    with Session(device, weights, replace(settings, drafts=FIXED)) as session:
        limits = replace(Limits.for_throughput(session.shapes, 4), ahead=4)
        found = given(session, requests, limits=limits)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tokens == theirs.tokens


def test_as_many_drafts_as_pay(
    device: Device, weights: Weights, without: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences whose drafts fail, and of those whose drafts stand, where all is recorded and
    steps take as long as on a GPU."""
    monkeypatch.setattr(StepCosts, "learn", lambda self, rows, seconds, *, drafted: None)
    repeats = Request(prompt=(3, 1, 4, 1, 5, 3, 1, 4), settings=GREEDY, limit=40)
    drawn = SamplingSettings(temperature=30.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    fails = Request(prompt=(3, 1, 3, 1), settings=drawn, limit=40)
    expected = given(without, [repeats, fails])
    with Session(device, weights, replace(PLAIN, drafts=CHOSEN)) as session:
        decode = session.shapes.decode
        session.steps.record([decode(n, 1, Output.SAMPLE, drafted=True) for n in (2, 4, 8, 16)])
        found = given(session, [repeats, fails])
    for mine, theirs in zip(found, expected, strict=True):
        mine.check_equal(theirs)
    first, second = (each.ending for each in found)
    assert first is not None
    assert second is not None
    assert first.accepted_tokens > 5
    assert second.drafted_tokens < 30


def test_no_graph_is_recorded_for_the_last_drafts(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer drafts near the end take a graph with more rows."""
    monkeypatch.setattr(StepCosts, "learn", lambda self, rows, seconds, *, drafted: None)
    settings = replace(PLAIN, sequences=1, drafts=DraftSettings(least=7, shortest=1))
    request = Request(prompt=(5, 9, 5, 9, 5, 9, 5), settings=GREEDY, limit=30)
    with Session(device, weights, settings) as session:
        decode, launched = session.shapes.decode, []
        session.steps.record([decode(8, 1, Output.GREEDY, drafted=True)])
        launch = session.queue.launch

        def watched(shape: StepShape, batch: Batch, *rest: Any, **more: Any) -> None:
            launched.append((shape.rows, batch.drafts))
            launch(shape, batch, *rest, **more)

        session.queue.launch = watched  # type: ignore[method-assign]
        given(session, [request])
    drafted = [(rows, drafts) for rows, drafts in launched if drafts]
    assert {rows for rows, _ in drafted} == {8}
    assert {drafts for _, drafts in drafted} > {(7,)}


def test_replayed_steps_equal_launches_one_by_one(device: Device, weights: Weights) -> None:
    """The tokens of a graph of several steps with drafts, and of its launches on a stream."""

    requests = [Request(prompt=(3, 1, 4, 3, 1, 4), settings=GREEDY, limit=30)]
    settings = replace(PLAIN, exact=False, drafts=FIXED)
    with Session(device, weights, settings) as session:
        steps, decode = session.steps, session.shapes.decode
        steps.record([decode(4, 1, Output.GREEDY, count, drafted=True) for count in (1, 4)])
        launched: list[int] = []
        launch = steps.launch

        def watched(shape: StepShape, stream: Any) -> None:
            launched.append(shape.steps)
            launch(shape, stream)

        steps.launch = watched  # type: ignore[method-assign]
        replayed = given(session, requests)[0]
    assert 4 in launched
    with Session(device, weights, settings, observer=Eager()) as session:
        eager = given(session, requests)[0]
    assert replayed.tokens == eager.tokens
    assert replayed.ending is not None
    assert replayed.ending.accepted_tokens > 5


def test_rows_of_long_sequences_share_reads_of_keys(device: Device, weights: Weights) -> None:
    """Two answers in default arithmetic, after more keys than attention reads unsplit: the same as
    without drafts. A row is alone on devices whose SMs have less shared memory."""
    shared = set()

    class Watched:
        def run(self, bound: execute.BoundPlan, stream: Any) -> None:
            shared.update(k.run for k in bound.plan.kernels() if isinstance(k, FlashDecode))
            execute.run(bound, bound.device, stream)

    rng = np.random.default_rng(33)
    prompts = [tuple(rng.integers(0, VOCABULARY, count).tolist()) for count in (560, 519)]
    requests = [Request(prompt=prompt, settings=GREEDY, limit=14) for prompt in prompts]
    settings = replace(PLAIN, context=640, exact=False, sequences=2)
    with Session(device, weights, settings) as session:
        plain = given(session, requests)
    with Session(device, weights, replace(settings, drafts=FIXED), observer=Watched()) as session:
        drafted = given(session, requests)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert sum(each.ending.accepted_tokens for each in drafted if each.ending) > 2
    assert (4 in shared) == (Target.parse(device.native_target).sm in LARGE_SHARED)


def test_drafts_by_chance_move_on_as_often(device: Device, weights: Weights) -> None:
    """Of drafts that are accepted with a probability, about as many are."""
    settings = replace(PLAIN, drafts=replace(FIXED, chance=0.5))
    requests = [
        Request(prompt=(seed + 1,), settings=replace(GREEDY, seed=seed), limit=40)
        for seed in range(2)
    ]
    with Session(device, weights, settings) as session:
        endings = [each.ending for each in given(session, requests)]
    assert all(each is not None and each.generated_tokens == 40 for each in endings)
    accepted = sum(each.accepted_tokens for each in endings if each)
    steps = 2 * 39 - accepted
    # 1/2 + 1/4 + 1/8 a step: 0.875, with a standard deviation of about 1.05 a step
    assert abs(accepted / steps - 0.875) < 4 * 1.05 / np.sqrt(steps)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "oracle"}, "drafts of 'oracle': expected ngram"),
        ({"most": 0}, "at most 0 drafts: expected 1 to 31"),
        ({"least": 9}, "at least 9 drafts: expected 0 to 7"),
        ({"shortest": 5}, "n-grams of 5 to 4 tokens: expected 1 to 32"),
        ({"p_min": -0.5}, "as likely as -0.5: expected 0 to 1"),
        ({"chance": 1.5}, "with probability 1.5: expected 0 to 1"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        DraftSettings(**fields)


FAMILIES = (
    "gemma3-dense fp8 q4_0",  # rings
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in (
            "mamba-dense",  # a scan: ptxgen/test_drafted_states.py
            "qwen35-dense",  # the delta rule and convolutions are test_drafted_states.py
            *("deepseek2-moe", "gpt-oss-moe", "gemma2-dense", "gemma4-e", "cohere2-dense"),
            *("mistral3-dense", "llama4-moe", "qwen3moe-moe", "qwen35moe-moe", "qwen3next-moe"),
            *("mamba2-dense", "falcon-h1-dense", "granitehybrid-dense", "jamba-dense"),
            *("lfm2-dense", "lfm2moe-moe", "minimax-01-moe", "nemotron_h-dense", "plamo2-dense"),
            "kimi-linear-moe",  # the delta rule by channels: ptxgen/test_drafted_states.py
            *("bailingmoe3-moe", "kimi-k3-moe"),
        )
    ),
)


def few_letters(rng: np.random.Generator, count: int) -> list[Request]:
    """Requests whose prompts and answers have three different tokens, so that drafts are found in
    any model and some are accepted."""
    requests = []
    for at in range(count):
        letters = rng.choice(np.arange(3, 60), 3, replace=False).tolist()
        settings = SamplingSettings(
            temperature=0.0 if at % 2 == 0 else 0.9,
            logit_bias=tuple((token, 90.0) for token in letters),
            seed=int(rng.integers(2**32)),
        )
        prompt = tuple(int(t) for t in rng.choice(letters, rng.integers(1, 26)))
        requests.append(Request(prompt=prompt, settings=settings, limit=20, ignore_end=True))
    return requests


@pytest.mark.parametrize("name", FAMILIES)
def test_families_answer_the_same(device: Device, reference_file: Any, name: str) -> None:
    """Several at once, greedy and drawn, with prompts beside them and, where rings have one, beyond
    the end of a window. Names may have types of the caches."""
    name, *caches = name.split()
    settings = SessionSettings(64, *caches[:1], exact=True, sequences=2)
    settings = replace(settings, value_dtype=caches[1] if caches else None)
    requests = [replace(of, limit=14) for of in few_letters(np.random.default_rng(7), 3)]
    found = []
    with (
        Gguf(reference_file(name)) as gguf,
        Weights.load(gguf, Config.of(gguf), device) as loaded,
    ):
        for drafts in (None, replace(FIXED, shortest=1)):
            with Session(device, loaded, replace(settings, drafts=drafts)) as session:
                found.append(given(session, requests))
    for mine, theirs in zip(found[1], found[0], strict=True):
        mine.check_equal(theirs)
    endings = [each.ending for each in found[1] if each.ending is not None]
    drafted, accepted = (
        sum(getattr(each, f"{kind}_tokens") for each in endings) for kind in ("drafted", "accepted")
    )
    assert 5 < accepted < drafted


@pytest.mark.full
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_two_devices_answer_the_same(device_name: str, data: Path, draft: str) -> None:
    """Each rank accepts the same drafts, and has all of a draft model: here the model itself."""
    if device_name != "emulator":
        pytest.skip("two devices of one kind")
    request = Request(prompt=(3, 1, 4, 1, 5, 3, 1, 4), settings=GREEDY, limit=24)
    nano, found = data / "golden" / "nano-llama-q8_0.gguf", []
    for drafts in (None, replace(FIXED, kind="ngram" if draft == "ngram" else "model")):
        with Engine.open(
            nano,
            device=device_name,
            gpus=2,
            context=64,
            exact=True,
            drafts=drafts,
            draft=nano if drafts is not None and draft == "model" else None,
        ) as engine:
            found.append(given(engine.session, [request])[0])
    found[1].check_equal(found[0])
    assert found[1].ending is not None
    assert found[1].ending.accepted_tokens > (0 if draft == "ngram" else 8)
