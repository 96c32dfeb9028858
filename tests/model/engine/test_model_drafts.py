"""Drafts of draft models in the steps of an engine: those of llama.cpp's traces, and answers that
are the same as without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.drafted_answers import END_IDS, Counted, Patterns, any_requests
from tests.model.engine.test_plain_drafts import likely
from tests.model.engine.test_speculation import (
    CONTEXT,
    FIXED,
    PLAIN,
    VOCABULARY,
    Given,
    given,
    prompts,
)
from tests.model.stepping import Numbers
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.budget import MemoryPlan, SessionBudget
from urdir.model.engine.draft_pair import Pair, pair_of
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.task import Task
from urdir.model.engine.requests.tasks import Tasks
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.model_source import Drafter
from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

DRAFTS = replace(FIXED, kind="model")
#: Rounds of a trace on the emulator by default.
FEW = 3


# ---- llama.cpp's traces ----


@dataclass(frozen=True)
class Round:
    """A step with drafts: the position of its pending token, the drafts verified and accepted, the
    tokens chosen, and what the sequence's places after the pending token hold once it is over."""

    position: int
    drafts: int
    accepted: int
    chosen: tuple[int, ...]
    places: tuple[int, ...]

    def check(self, wanted: Any) -> None:
        """It is a round of a trace. Places hold what was drafted there, or chosen instead."""
        assert (self.position, self.drafts) == (wanted["pos0"], len(wanted["draft"]))
        assert (self.accepted, self.chosen) == (wanted["accepted"], tuple(wanted["out"]))
        drafted, count = tuple(wanted["draft"]), self.accepted
        assert self.places == (*self.chosen, *drafted[count + 1 :])[: len(self.places)]
        assert drafted[:count] == self.chosen[:count]


def rounds_of(session: Session, request: Request, monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """The steps with drafts of an answer, each read before the next one is planned."""
    found: list[Round] = []
    chosen_of, state = Scheduler.chosen, session.parts.state

    def watched(self: Scheduler, plan: Any, chosen: Any) -> Any:
        if plan.batch.drafts:
            position = self.last(plan.requests[0])
            assert position is not None
            (of,) = chosen
            row = state["tokens"].download(np.uint32, (state.sequences, state.max_len))[0]
            places = row[position + 1 : position + 1 + max(of.drafts, len(of.tokens))]
            accepted = len(of.tokens) - 1
            found.append(Round(position, of.drafts, accepted, of.tokens, tuple(places.tolist())))
        return chosen_of(self, plan, chosen)

    with monkeypatch.context() as patch:
        patch.setattr("urdir.model.engine.run_ahead.AHEAD", 1)
        patch.setattr(Scheduler, "chosen", watched)
        given(session, [request])
    return found


@pytest.mark.parametrize(
    "name",
    [
        "mtp-deepseek2-bigram",  # latent vectors, drafts that are accepted
        pytest.param("simple-small", marks=pytest.mark.full),  # test_plain_drafts.py
        pytest.param("eagle3-d2t", marks=pytest.mark.full),  # the demo's: test_demo_draft.py
        pytest.param("simple-small.pmin", marks=pytest.mark.full),
        pytest.param("gemma4assistant-e", marks=pytest.mark.full),
        pytest.param("dflash-d2t", marks=pytest.mark.full),  # test_block_drafts.py
        pytest.param("dspark-anchor", marks=pytest.mark.full),  # logits: test_block_drafts.py
        pytest.param("dspark-bonus", marks=pytest.mark.full),
        pytest.param("dflash2-select", marks=pytest.mark.full),
        pytest.param("mtp-mimo2", marks=pytest.mark.full),  # two heads
        pytest.param("mtp-qwen35-own", marks=pytest.mark.full),  # recurrent layers
        pytest.param("eagle3-own", marks=pytest.mark.full),
    ],
)
def test_rounds_of_an_answer_are_llama_cpp_s(
    name: str,
    device_name: str,
    request: pytest.FixtureRequest,
    reference_file: Callable[[str], Path],
    parts_of: Callable[[str], tuple[str, str | None]],
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second round on: a service chooses the first token without drafts."""
    trace = json.loads((data / "drafts" / f"{name}.json").read_text())
    rounds, p_min = trace["rounds"][1:], trace["p_min"] if name.endswith(".pmin") else 0.0
    most = trace["n_max"] if p_min else len(rounds[0]["draft"])
    text = trace["prompt"] + trace["output"]
    if not (device_name == "cuda" or request.config.getoption("--full")):
        rounds = rounds[:FEW]
    # near the end of its text llama.cpp drafts fewer
    if p_min:
        rounds = [each for each in rounds if each["pos0"] + most + 2 <= len(text)]
    else:
        rounds = list(takewhile(lambda each: len(each["draft"]) == most, rounds))
    start, end = rounds[0]["pos0"], rounds[-1]["pos0"] + most + 2
    model, draft = parts_of(name.removesuffix(".pmin"))
    settings = DraftSettings(kind="model", most=most, least=most, p_min=p_min)
    with Engine.open(
        reference_file(model),
        draft="mtp" if draft is None else reference_file(draft),
        drafts=settings,
        device=device_name,
        context=64,
        kv_dtype="f32",
        exact=True,
        cache_folder=None,
    ) as engine:
        asked = Request(prompt=tuple(text[:start]), settings=GREEDY, limit=end - start + most)
        found = rounds_of(engine.session, asked, monkeypatch)
    assert len(found) >= len(rounds)
    for mine, wanted in zip(found, rounds, strict=False):
        mine.check(wanted)


# ---- answers with and without ----


@dataclass(frozen=True)
class Two:
    """A model and its draft with their weights; without a draft there are n-grams."""

    pair: Pair | None
    target: Weights
    own: Weights

    def session(self, device: Device, settings: SessionSettings, **more: Any) -> Session:
        """A session that drafts where the settings say so."""
        pair = self.pair
        if settings.drafts is None or pair is None:
            if settings.drafts is not None:
                settings = replace(settings, drafts=replace(FIXED, shortest=1))
            return Session(device, self.target, settings, **more)
        drafts = pair.settings(settings.drafts)
        drafter = Drafter(pair.model, self.own, pair.launches, pair.token_map)
        settings = replace(settings, drafts=drafts)
        return Session(device, self.target, settings, drafters=[drafter], **more)


@pytest.fixture(scope="module")
def similar(device: Device, random_model: Callable[..., Any]) -> Iterator[Two]:
    """A random model, and another one with other weights of its attention: some drafts stand."""
    shape = Shape("llama", 1, 64, 2, 1, 32, 64, VOCABULARY, False)
    model, other = (random_model(shape, seed=1) for _ in range(2))
    for of, factor in ((model, 0.3), (other, 0.1)):
        of.tensors["blk.0.attn_output.weight"].data.view(np.float32)[:] *= np.float32(factor)
    with open_two(device, model, other) as two:
        yield two


class open_two(ExitStack):  # noqa: N801
    """A model and its draft (None: its own heads) for the length of a block."""

    def __init__(self, device: Device, model: Any, draft: Any) -> None:
        super().__init__()
        self._parts = device, model, draft

    def __enter__(self) -> Two:  # type: ignore[override]
        device, model, draft = self._parts
        pair = pair_of(model, draft)
        target = own = self.enter_context(Weights.load(model, pair.config, device))
        if draft is not None:
            own = self.enter_context(Weights.load(draft, pair.own, device))
        return Two(pair, target, own)


#: Kinds of drafts of a model; "ngram" has none.
MODELS = ["plain", "mtp", "eagle3", "dflash", "dflash2", "dspark", "assistant"]


@pytest.fixture(scope="module", params=[*MODELS, "ngram"])
def two(
    request: pytest.FixtureRequest,
    device: Device,
    similar: Two,
    reference_file: Callable[[str], Path],
) -> Iterator[Two]:
    """A pair of each kind."""
    if request.param in ("plain", "ngram"):
        yield similar if request.param == "plain" else replace(similar, pair=None)
        return
    names = {
        "mtp": ("mtp-deepseek2-bigram", None),
        "eagle3": ("target-any", "eagle3-d2t.draft"),
        "dflash": ("target-any", "dflash-d2t.draft"),
        "dflash2": ("target-any", "dflash2-select.draft"),
        "dspark": ("target-any", "dspark-anchor.draft"),
        "assistant": ("gemma4assistant-e.target", "gemma4assistant-e.draft"),
    }
    with ExitStack() as files:
        model, draft = (
            None if name is None else files.enter_context(Gguf(reference_file(name)))
            for name in names[request.param]
        )
        yield files.enter_context(open_two(device, model, draft))


def check_same(found: list[Given], expected: list[Given], left: tuple[int, ...] = ()) -> None:
    """Answers are those without drafts; of one that was cancelled, after five tokens, the
    beginning. One that had ended by then is compared whole."""
    for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if at in left and None in (mine.ending, theirs.ending):
            length = min(len(mine.tokens), len(theirs.tokens))
            assert length >= 5
            assert mine.tokens[:length] == theirs.tokens[:length]
        else:
            mine.check_equal(theirs)


def drafted_of(answers: list[Given]) -> tuple[int, int]:
    """Drafts of all answers, and those accepted."""
    endings = [each.ending for each in answers if each.ending is not None]
    return (
        sum(ending.drafted_tokens for ending in endings),
        sum(ending.accepted_tokens for ending in endings),
    )


@pytest.mark.turns(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 29))]
)
def test_answers_are_the_same(device: Device, two: Two, seed: int) -> None:
    """In pages, with prompts beside answers, of more requests than there are sequences; one of them
    is left in the middle. Steps accept what the rule says: every second time they run launch by
    launch, and are compared with it; every fourth time drafts end before unlikely tokens."""
    rng = np.random.default_rng([33, seed])
    requests, left, tokenizer = any_requests(rng, 6), (2,), Numbers(*END_IDS)
    settings = replace(PLAIN, sequences=3, page_len=16)
    with two.session(device, settings) as session:
        expected = given(session, requests, tokenizer, left=left, compiler=Patterns())
    counted = None if seed % 2 else Counted()
    p_min = 0.2 if seed % 4 == 2 else 0.0
    drafts = replace(DRAFTS, p_min=p_min)
    with two.session(device, replace(settings, drafts=drafts), observer=counted) as session:
        if counted is not None:
            counted.session = session
        found = given(session, requests, tokenizer, left=left, compiler=Patterns())
    check_same(found, expected, left)
    drafted, accepted = drafted_of(found)
    assert p_min or drafted > (0 if two.pair is None else 5)
    assert found[3].ending is not None
    assert found[3].ending.drafted_tokens == 0
    assert counted is None or (counted.drafted >= drafted and counted.accepted >= accepted)


@pytest.mark.parametrize("p_min", [pytest.param(0.0, marks=pytest.mark.full), 0.2])
def test_a_plain_draft_is_accepted_as_often_as_the_rule_says(
    device: Device, similar: Two, monkeypatch: pytest.MonkeyPatch, p_min: float
) -> None:
    """The rule in plain Python, which knows the answer; the draft has a session of its own. With a
    least probability drafts end before a token that is less likely."""
    monkeypatch.setattr("urdir.model.engine.run_ahead.AHEAD", 1)
    request = Request(prompt=(3, 1, 4, 1, 5, 9), settings=GREEDY, limit=20, ignore_end=True)
    settings = replace(PLAIN, sequences=1)
    with similar.session(device, replace(settings, drafts=replace(DRAFTS, p_min=p_min))) as session:
        answer = given(session, [request])[0]
    text, drafted, accepted, ended = [*request.prompt, answer.tokens[0]], 0, 0, 0
    end = len(request.prompt) + len(answer.tokens) - 1  # no row stands there
    with Session(device, similar.own, settings) as session, EagerSteps(session) as draft:
        while len(text) - 1 < end:
            after = answer.tokens[len(text) - len(request.prompt) :]
            most = min(DRAFTS.most, end - len(text))
            drafts = likely(draft, text, most, p_min)
            ended += len(drafts) < most
            stand = 0
            while stand < len(drafts) and drafts[stand] == after[stand]:
                stand += 1
            drafted, accepted = drafted + len(drafts), accepted + stand
            text += after[: stand + 1]
    assert 3 < accepted < drafted
    assert (ended > 3) == (p_min > 0)
    assert drafted_of([answer]) == (drafted, accepted)


@pytest.mark.slow
def test_the_context_ends_within_drafts(device: Device, similar: Two) -> None:
    """By any number of places."""
    settings = replace(PLAIN, sequences=1)
    requests = [
        Request(prompt=tuple([5, 9, 2] * 40)[: CONTEXT - rest], settings=GREEDY, ignore_end=True)
        for rest in (1, 2, 3, 5, 7)
    ]
    with similar.session(device, settings) as session:
        expected = [given(session, [each])[0] for each in requests]
    with similar.session(device, replace(settings, drafts=DRAFTS)) as session:
        found = [given(session, [each])[0] for each in requests]
    check_same(found, expected)
    assert [len(each.tokens) for each in found] == [2, 3, 4, 6, 8]


@pytest.mark.full  # with drafts: test_drafted_states.py
def test_answers_that_are_preempted_go_on_the_same(
    device: Device, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages run out beside drafts."""
    settings = replace(PLAIN, sequences=3, page_len=16, pages=4)
    requests = [
        Request(prompt=(prompt * 9)[:9], settings=GREEDY, limit=16, ignore_end=True)
        for prompt in prompts(np.random.default_rng(5), 4)
    ]
    preempt, preempted, found = Tasks.preempt, list[Task](), list[list[Given]]()

    def watched(tasks: Tasks, task: Task) -> None:
        preempted.append(task)
        preempt(tasks, task)

    monkeypatch.setattr(Tasks, "preempt", watched)
    for drafts in (None, DRAFTS):
        preempted.clear()
        with two.session(device, replace(settings, drafts=drafts)) as session:
            limits = replace(Limits.for_throughput(session.shapes, 4), ahead=4)
            found.append(given(session, requests, limits=limits))
    assert preempted
    assert [each.tokens for each in found[1]] == [each.tokens for each in found[0]]
    assert drafted_of(found[1])[0] > 0


@pytest.mark.slow
def test_a_prefix_is_shared_with_its_drafts_keys(device: Device, similar: Two) -> None:
    """The second request finds the pages of the first one, and drafts as well after them."""
    prompt = tuple(int(t) for t in np.random.default_rng(3).integers(3, VOCABULARY, 40))
    settings = replace(PLAIN, sequences=2, page_len=16, drafts=DRAFTS)
    request = Request(prompt=prompt, settings=GREEDY, limit=20, ignore_end=True)
    with similar.session(device, settings) as session:
        first, second = (given(session, [request])[0] for _ in range(2))
    assert second.tokens == first.tokens
    assert second.ending is not None
    assert second.ending.cached_tokens >= 32
    assert drafted_of([second])[1] == drafted_of([first])[1] > 0


@pytest.mark.turns(8)
@pytest.mark.sanitizer
@pytest.mark.slow
def test_replayed_steps_equal_launches_one_by_one(device: Device, two: Two) -> None:
    """The tokens of a graph of several steps with drafts, and of its launches on a stream."""

    class Eager:
        def run(self, bound: execute.BoundPlan, stream: Any) -> None:
            execute.run(bound, bound.device, stream)

    request = Request(prompt=(3, 1, 4, 3, 1, 4), settings=GREEDY, limit=24, ignore_end=True)
    settings = replace(PLAIN, sequences=1, exact=False, drafts=DRAFTS)
    with two.session(device, settings) as session:
        steps, decode, launched = session.steps, session.shapes.decode, set[int]()
        for count in (1, 4):
            steps.record([decode(4, 1, Output.GREEDY, count, drafted=True)])
        launch = steps.launch

        def watched(shape: StepShape, stream: Any) -> None:
            launched.add(shape.steps)
            launch(shape, stream)

        steps.launch = watched  # type: ignore[method-assign]
        replayed = given(session, [request])
    assert 4 in launched
    with two.session(device, settings, observer=Eager()) as session:
        eager = given(session, [request])
    assert replayed[0].tokens == eager[0].tokens
    assert drafted_of(replayed)[0] > 0


# ---- memory, and what is refused ----


@pytest.mark.parametrize("two", MODELS, indirect=True)
def test_a_draft_is_in_the_budget(two: Two) -> None:
    """Its weights, its cache and what it keeps; a step's intermediates are the larger of both."""
    assert two.pair is not None
    pair, file = two.pair, two.pair.gguf
    with_drafts = replace(PLAIN, page_len=16, drafts=pair.settings(DRAFTS))
    budget_without = SessionBudget.of(two.target, with_drafts)
    without = MemoryPlan.of(file, pair.config, budget_without)
    settings = replace(with_drafts, draft_model=pair.model)
    budget = SessionBudget.of(two.target, settings)
    plan = MemoryPlan.of(file, pair.config, budget)
    own = 0 if pair.file is None else two.own.nbytes
    assert plan.weights - without.weights <= own <= plan.weights - without.weights + (1 << 16)
    layers = 0 if pair.shares_cache else len(pair.own.layers)
    assert len(budget.cache.layers) == len(budget_without.cache.layers) + layers
    assert len(budget.cache.groups) == len(budget_without.cache.groups)  # the same pages
    assert (plan.kv_cache > without.kv_cache) == (layers > 0)
    assert plan.state - without.state == sum(budget.draft.values()) > 0
    assert plan.workspace >= without.workspace


def test_a_draft_larger_than_its_model_has_room(
    device: Device, random_model: Callable[..., Any]
) -> None:
    """Its intermediates are several times the model's."""
    shape = Shape("llama", 1, 64, 2, 1, 32, 64, VOCABULARY, False)
    larger = Shape("llama", 1, 256, 8, 4, 32, 1024, VOCABULARY, False)
    request = Request(prompt=(3, 1, 4), settings=GREEDY, limit=8, ignore_end=True)
    settings = replace(PLAIN, sequences=1)
    with open_two(device, random_model(shape, seed=1), random_model(larger, seed=2)) as two:
        with two.session(device, settings) as session:
            expected = given(session, [request])
        with two.session(device, replace(settings, drafts=DRAFTS)) as session:
            found = given(session, [request])
    check_same(found, expected)
    assert drafted_of(found)[0] > 0


def test_what_does_not_fit_is_refused(
    device_name: str, reference_file: Callable[[str], Path], data: Path
) -> None:
    nano = data / "golden" / "nano-llama-q8_0.gguf"
    for model, draft, more, what in [
        (nano, "mtp", {}, "no layers for predicting several tokens"),
        (nano, reference_file("eagle3-d2t.draft"), {}, "hidden states of 128 values"),
        (nano, reference_file("qwen35-dense"), {}, "vocabulary|recurrent"),
        (
            reference_file("mtp-deepseek2-bigram"),
            "mtp",
            {"gpus": 2, "device": "emulator"},
            "heads of its model on 2 GPUs is not supported",
        ),
    ]:
        with pytest.raises(UnsupportedError, match=what):
            Engine.open(model, draft=draft, context=64, **{"device": device_name, **more})


def test_a_draft_with_fewer_tokens_at_once(reference_file: Callable[[str], Path]) -> None:
    """Two heads draft two tokens."""
    with Gguf(reference_file("mtp-mimo2")) as gguf:
        pair = pair_of(gguf, None)
    found = pair.settings(DraftSettings(most=7, least=5))
    assert (found.kind, found.most, found.least) == ("model", 2, 2)
    assert Config is type(pair.config)


@pytest.mark.slow
def test_heads_that_draft_the_first_tokens_alone(
    device: Device, reference_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafts where these are among them, and other answers never."""
    request = Request(prompt=(3, 1, 4, 1, 5, 9), settings=GREEDY, limit=16, ignore_end=True)
    settings = replace(PLAIN, sequences=1, drafts=replace(DRAFTS, most=1, least=1))
    found: list[list[Round]] = []
    with (
        Gguf(reference_file("mtp-deepseek2-bigram")) as gguf,
        open_two(device, gguf, None) as two,
    ):
        for tokens in (0, 50):
            pair = two.pair
            drafter = Drafter(replace(pair.model, tokens=tokens), two.own, pair.launches)
            of = replace(settings.drafts, tokens=tokens)
            given = replace(settings, drafts=of)
            with Session(device, two.target, given, drafters=[drafter]) as session:
                found.append(rounds_of(session, request, monkeypatch))
    chosen: list[list[int]] = [[t for r in rounds for t in r.chosen] for rounds in found]
    length = min(map(len, chosen))
    assert chosen[0][:length] == chosen[1][:length]
    drafts = [{r.position: r.places[0] for r in rounds if not r.accepted} for rounds in found]
    stood = [{r.position: r.chosen[0] for r in rounds if r.accepted} for rounds in found]
    assert all(token < 50 for token in stood[1].values())
    both = stood[0].keys() & (drafts[1].keys() | stood[1].keys())
    assert all((stood[0][at] < 50) == (at in stood[1]) for at in both)
    assert any(stood[0][at] >= 50 for at in both)
    assert any(stood[0][at] < 50 for at in both)


@pytest.mark.full
def test_a_block_ends_before_a_draft_that_it_is_not_confident_of(
    device_name: str, reference_file: Callable[[str], Path], data: Path
) -> None:
    """As confident as llama.cpp is; a request may have a least probability of its own."""
    with np.load(data / "drafts" / "dspark-anchor.npz") as golden:
        tokens, ids, confidence = (golden[n].tolist() for n in ("tokens", "ids", "confidence"))
    least = float(np.mean(np.sort(confidence)[1:3]))
    seen, found = list[float](), list[int]()

    class Watched:
        session: Session

        def run(self, bound: execute.BoundPlan, stream: Any) -> None:
            for operation, loaded in bound.steps():
                execute.queue(operation, loaded, stream)
                source = self.session.source
                if operation.label == "draft.token" and source is not None:
                    stream.synchronize()
                    seen.append(source._state["probability"].download(np.float32, 1)[0])
                elif operation.label == "accept":
                    stream.synchronize()
                    found.append(int(self.session.parts.state["found"].download(np.uint32)[0]))

    watched, most = Watched(), len(confidence)
    with Engine.open(
        reference_file("target-any"),
        draft=reference_file("dspark-anchor.draft"),
        drafts=DraftSettings(kind="model", most=most, least=most, p_min=1e-9),
        device=device_name,
        context=64,
        kv_dtype="f32",
        exact=True,
        observer=watched,
    ) as engine:
        watched.session = engine.session
        request = Request(prompt=tuple(tokens), settings=GREEDY, limit=most + 3, ignore_end=True)
        answer = given(engine.session, [request])[0]
        assert answer.tokens[0] == ids[0]
        np.testing.assert_allclose(seen[:most], confidence, rtol=1e-4)
        assert found[0] == most
        found.clear()
        given(engine.session, [replace(request, draft_p_min=least)])
    assert found[0] == next(at for at, of in enumerate(confidence) if of < least)
