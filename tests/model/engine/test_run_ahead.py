"""Steps that run ahead: the order of tokens, what is prepared meanwhile, what the host does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import answer, launched_steps, set_sampling
from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.decode_graphs import LOOK_AHEAD
from urdir.model.engine.generate import Generation
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Piece, Request
from urdir.model.engine.run_ahead import AT_ONCE
from urdir.model.engine.runner import Steps
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

DATA = Path(__file__).parents[2] / "data"
DRAWN = SamplingSettings(temperature=1.5, seed=5)


@pytest.fixture(scope="module")
def weights(device: Device) -> Iterator[Weights]:
    with Gguf(DATA / "golden" / "nano-llama-q8_0.gguf") as gguf:
        config = replace(Config.of(gguf), context_length=1024)
        with Weights.load(gguf, config, device) as loaded:
            yield loaded


def single_steps(session: Session, prompt: Sequence[int], count: int) -> list[int]:
    """So many tokens after a prompt, by single steps."""
    with EagerSteps(session) as eager:
        eager.feed(prompt)
        return [eager.step()[0] for _ in range(count)]


def leave(session: Session, prompt: Sequence[int]) -> None:
    """Begin an answer and leave it after two tokens."""
    request = Request(prompt=tuple(prompt), settings=GREEDY)
    with closing(Generation(session, None, request).pieces()) as pieces:
        list(islice(pieces, 2))


def prepare_all(session: Session, shape: StepShape) -> int:
    """Prepare a graph to its end; the number of pieces."""
    pieces = 0
    while session.steps.prepare(shape):
        pieces += 1
    return pieces


def together(session: Session, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of several answers, begun in the same step."""
    with AnswerLoop(session, None, Limits.for_throughput(session.shapes, len(requests))) as loop:
        answers = [loop.answer_to(request) for request in requests]
        for each in answers:
            loop.add(each)
        tokens: dict[Answer, list[int]] = {each: [] for each in answers}
        while not loop.is_idle:
            loop.turn()
            for each, items in loop.take_items().items():
                pieces = (item for item in items if isinstance(item, Piece))
                tokens[each] += [choice.token for piece in pieces for choice in piece.choices]
    return [tokens[each] for each in answers]


@pytest.mark.slow
def test_sequences_together_equal_each_alone(device: Device, weights: Weights) -> None:
    """Three of different lengths, each until it is full."""
    prompts = ([3, 1, 4], [1, 5, 9, 2, 6], [5])
    with Session(device, weights, SessionSettings(8, sequences=3)) as session:
        alone = [answer(session, prompt) for prompt in prompts]
        assert [len(tokens) for tokens in alone] == [6, 4, 8]  # the last token needs no place
        requests = [Request(prompt=tuple(of), settings=GREEDY) for of in prompts]
        assert together(session, requests) == alone


@pytest.mark.full
def test_answers_that_take_turns_equal_each_alone(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine of them, in steps of eight: each has no row now and then, and the device goes on to
    the next one by itself until one ends."""
    prompts = [[3 + number, 1, 4 * number] for number in range(9)]
    monkeypatch.setattr(PacedRows, "choose", lambda self, answers: min(answers, 8))
    with Session(device, weights, SessionSettings(24, sequences=9)) as session:
        session.paced = PacedRows()  # on the emulator, too
        alone = [answer(session, prompt) for prompt in prompts]
        launched, written = launched_steps(session), list[int]()
        write = session.parts.state.write_rows

        def watched(rows: Sequence[tuple[int, int]], *more: Any) -> None:
            written.append(len(rows))
            write(rows, *more)

        monkeypatch.setattr(session.parts.state, "write_rows", watched)
        requests = [Request(prompt=tuple(of), settings=GREEDY) for of in prompts]
        assert together(session, requests) == alone
        assert len(launched) > 22  # the first step and 21 of nine rows would do
        assert written[:2] == [8, 8]  # those of the turns, and those that are left in the end
        assert written.count(8) == 2


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "settings", [GREEDY, pytest.param(DRAWN, marks=pytest.mark.full)], ids=["greedy", "drawn"]
)
def test_several_steps_at_once_equal_single_ones(
    device: Device, weights: Weights, settings: SamplingSettings
) -> None:
    """In every order of launches that an answer has: one first, several, and one by one again at
    the end; no step beyond what is asked for; left in the midst of a launch; of two sequences."""
    output, prompt = Output.of(settings), (3, 1, 4)
    with Session(device, weights, SessionSettings(16, sequences=2)) as session:
        launched = launched_steps(session)
        with EagerSteps(session) as eager:
            eager.feed(prompt)
            set_sampling(eager, settings)
            singly = [eager.step((0,), output)[0] for _ in range(14)]
        assert set(launched) == {1}
        for rows in (1, 2):
            shape = StepShape(rows, 256, output, AT_ONCE)
            assert prepare_all(session, shape) > AT_ONCE
            assert len(session.steps.bound(shape)) % AT_ONCE == 0
        for limit in (1, AT_ONCE + 1, 14):
            del launched[:]
            assert answer(session, prompt, limit, settings) == singly[:limit]
            assert sum(launched) == limit
            assert launched[:2] == ([1, AT_ONCE] if limit > AT_ONCE else [1] * min(limit, 2))
        for read in (1, 4):
            request = Request(prompt=prompt, settings=settings)
            generation = Generation(session, None, request)
            with closing(generation.pieces()) as pieces:
                while len(generation.tokens) < read:
                    next(pieces)
            assert generation.tokens == singly[: len(generation.tokens)]
            known = (*prompt, *generation.tokens)
            assert answer(session, known, 3, settings) == singly[len(generation.tokens) :][:3]
        del launched[:]
        other = Request(prompt=(5, 9), settings=settings, limit=12)
        both = together(session, [Request(prompt=prompt, settings=settings), other])
        assert both[0] == singly
        assert AT_ONCE in launched


def test_a_step_of_several_begins_when_the_one_before_is_complete(
    device: Device, weights: Weights
) -> None:
    """Its kernels look at positions before they wait, so its first launch starts after a plain
    edge, and everything else of it after that launch."""
    with Session(device, weights, SessionSettings(24)) as session:
        one = len(session.steps.bound(StepShape(1, 256, Output.GREEDY)))
        graph = session.steps.graph(StepShape(1, 256, Output.GREEDY, 3))
        assert graph.node_count == 3 * one
        across = [e for e in graph.edges if e.before // one != e.after // one]
        assert [(e.before, e.after) for e in across] == [(one - 1, one), (2 * one - 1, 2 * one)]
        assert not any(edge.programmatic for edge in across)


@pytest.mark.slow
def test_nothing_is_recorded_on_the_way_once_all_is_prepared(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(device, weights, SessionSettings(24)) as session:
        answer(session, [7], 1)  # the prompt's
        session.graphs.prepare_all(1, Output.GREEDY, 1, 15, AT_ONCE)
        monkeypatch.setattr(session.steps, "_recording", None)
        launched = launched_steps(session)
        assert len(answer(session, [7], 15)) == 15
    assert launched[:3] == [1, AT_ONCE, AT_ONCE]


@pytest.mark.slow
def test_several_steps_stay_in_a_length_bucket(device: Device, weights: Weights) -> None:
    """As single ones do: around 256 tokens attention changes its way to work."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 249)]
    with Session(device, weights, SessionSettings(300)) as session:
        singly = single_steps(session, tokens, 12)
        for keys in (256, 512):
            prepare_all(session, StepShape(1, keys, Output.GREEDY, AT_ONCE))
        launched = launched_steps(session)
        assert answer(session, tokens, 12) == singly
        assert launched[:4] == [1, AT_ONCE, 1, 1]


@pytest.mark.slow
def test_several_steps_take_what_room_there_is_in_pages(device: Device, weights: Weights) -> None:
    """To the last page's end."""
    settings = SessionSettings(64, sequences=2, page_len=16, pages=2)
    with Session(device, weights, settings) as session:
        prepare_all(session, StepShape(1, 256, Output.GREEDY, AT_ONCE))
        found = answer(session, [1] * 22)
        assert len(found) == 2 * 16 - 22 + 1
        assert found == single_steps(session, [1] * 22, len(found))


@pytest.mark.slow
def test_the_next_bucket_is_ready_before_it_is_needed(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is recorded at once in the middle of a stream, and tokens are as without."""
    if not device.is_emulated:
        pytest.skip("a GPU's steps of so small a model take less time than a graph")
    at_once: list[StepShape] = []
    make_ready = Steps.make_ready

    def watched(self: Steps, shape: StepShape) -> None:
        if shape not in self._graphs:
            at_once.append(shape)
        make_ready(self, shape)

    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 224)]
    with Session(device, weights, SessionSettings(500)) as session:
        expected = single_steps(session, tokens, 36)
    monkeypatch.setattr(Steps, "make_ready", watched)
    with Session(device, weights, SessionSettings(500)) as session:
        assert answer(session, tokens, 36) == expected
        prompt = StepShape(256, 512, Output.GREEDY, prompt=256)
        assert at_once in ([prompt], [prompt, StepShape(1, 256, Output.GREEDY)])


@pytest.mark.slow
def test_nothing_is_prepared_far_from_the_end_of_a_bucket(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(1000)) as session:
        leave(session, [1] * 100)
        assert set(session.steps._graphs) & {StepShape(1, 512, Output.GREEDY)} == set()
        several = StepShape(1, 256, Output.GREEDY, AT_ONCE)  # in the bucket that there is
        assert set(session.steps._begun) <= {several}
        leave(session, [1] * (257 - LOOK_AHEAD))
        assert StepShape(1, 512, Output.GREEDY) in {*session.steps._begun, *session.steps._graphs}


def test_a_graph_prepared_in_pieces_is_the_same(device: Device, weights: Weights) -> None:
    shape = StepShape(1, 256, Output.GREEDY)
    with Session(device, weights, SessionSettings(20)) as session:
        pieces = prepare_all(session, shape)
        in_pieces = session.steps.graph(shape)
        assert not session.steps.prepare(shape)
        edges, nodes = in_pieces.edges, [node.operation.label for node in in_pieces.nodes]
    assert pieces > len(nodes)
    with Session(device, weights, SessionSettings(20)) as session:
        session.steps.prepare(shape)
        session.steps.prepare(shape)  # begun, then needed at once
        at_once = session.steps.graph(shape)
        assert at_once.edges == edges
        assert [node.operation.label for node in at_once.nodes] == nodes
        assert at_once.node_count == len(session.steps.bound(shape))


def test_what_has_begun_is_finished_at_once(device: Device, weights: Weights) -> None:
    shapes = [StepShape(1, 256, Output.GREEDY), StepShape(1, 256, Output.LOGITS)]
    with Session(device, weights, SessionSettings(20)) as session:
        assert not session.steps.finish()
        for shape in shapes:
            assert session.steps.prepare(shape)
        assert session.steps.finish()
        assert all(session.steps.is_recorded(shape) for shape in shapes)
        assert not session.steps.is_waiting
        assert not session.steps.finish()


@pytest.mark.slow
def test_a_failed_preparation_may_be_tried_again(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = StepShape(1, 256, Output.GREEDY)
    api = device.api
    if not device.is_emulated:
        pytest.skip("breaks the driver")
    with Session(device, weights, SessionSettings(20)) as session:
        with monkeypatch.context() as broken:
            fails = (api.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            broken.setattr(api, "cuGraphInstantiate", lambda *_: fails, raising=False)
            with pytest.raises(CudaError):
                prepare_all(session, shape)
        prepare_all(session, shape)
        assert len(answer(session, [1, 2], 6)) == 6


@pytest.mark.slow
def test_waiting_is_counted(device: Device, weights: Weights) -> None:
    with (
        Session(device, weights, SessionSettings(20)) as session,
        AnswerLoop(session, None, Limits.for_one(session.shapes)) as loop,
    ):
        loop.add(loop.answer_to(Request(prompt=(1, 2), limit=6)))
        assert loop.waited_seconds == 0
        while not loop.is_idle:
            loop.turn()
        assert loop.waited_seconds > 0


def test_the_oldest_graphs_are_forgotten(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are recorded again, with the same result."""
    with Session(device, weights, SessionSettings(64)) as session:
        expected, steps = session_token(session), session.steps
        all_bytes = [graph.nbytes for graph in steps._graphs.values()]
        kernels = device.kernel_nbytes
        room = 2 * max(all_bytes) + kernels
        assert steps.graph_bytes == sum(all_bytes) + kernels > room
        steps.close()  # forgets all
        monkeypatch.setattr(steps._graphs, "most_bytes", room)
        assert [session_token(session) for _ in range(2)] == [expected] * 2
        kept = [graph.nbytes for graph in steps._graphs.values()]
        assert device.kernel_nbytes == kernels > 0  # they stay loaded
        assert kernels < steps.graph_bytes == sum(kept) + kernels <= room
        *_, last = steps._graphs
        steps.forget(last)
        assert not steps.is_recorded(last)
        assert steps.graph_bytes == sum(kept[:-1]) + kernels
        steps.forget(last)  # idempotent


def session_token(session: Session) -> list[int]:
    """Tokens after prompts of several lengths: a shape each."""
    tokens = []
    for count in (3, 12, 20, 40):
        tokens += single_steps(session, range(5, 5 + count), 1)
    return tokens
