"""Steps that run ahead: the order of tokens, what is prepared meanwhile, what the host does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.stream import Stream
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.decode_graphs import LOOK_AHEAD
from urdir.model.engine.run_ahead import AHEAD, AT_ONCE
from urdir.model.engine.runner import Steps
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import ContextFullError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@pytest.fixture
def device(device_name: str) -> Iterator[Device]:
    with Device.open(device_name) as opened:
        yield opened


@pytest.fixture
def weights(data: Path, device: Device) -> Iterator[Weights]:
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        config = replace(Config.from_gguf(gguf), context_length=1024)
        with Weights.load(gguf, config, device) as loaded:
            yield loaded


def prepare_all(session: Session, shape: StepShape) -> int:
    """Prepare a graph to its end; the number of pieces."""
    pieces = 0
    while session.steps.prepare(shape):
        pieces += 1
    return pieces


@pytest.mark.slow
def test_sequences_together_equal_each_alone(device: Device, weights: Weights) -> None:
    """Three of different lengths, until the longest is full; the others may go on."""
    prompts = ([3, 1, 4], [1, 5, 9, 2, 6], [5])
    with Session(device, weights, SessionSettings(12, sequences=3)) as session:
        alone = []
        for sequence, prompt in enumerate(prompts):
            session.feed(prompt, sequence)
            alone.append(list(session.stream(Output.GREEDY, sequence)))
            session.truncate(0, sequence)
        for sequence, prompt in enumerate(prompts):
            session.feed(prompt, sequence)
        together = list(session.stream_together(Output.GREEDY, (0, 1, 2)))
        assert len(together) == 12 - 5 + 1  # the last token needs no place
        assert session.lengths == [2 + 8, 12, 8]
        for sequence, expected in enumerate(alone):
            assert [step[sequence] for step in together] == expected[:8]
        rest = list(session.stream(Output.GREEDY, 2))
        assert rest == alone[2][8:]


@pytest.mark.slow
def test_only_what_was_read_counts(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(24, sequences=2)) as session:
        session.feed([3, 1, 4], 0)
        session.feed([1, 5], 1)
        steps = session.stream_together(Output.GREEDY, (0, 1))
        first = list(islice(steps, 2))
        assert session.lengths[0] > 2 + 2
        steps.close()
        assert session.lengths == [2 + 2, 1 + 2]
        second = session.forward_gpu_resident_to_token_id((0, 1))
        session.truncate(2, 0)
        session.truncate(1, 1)
        session.feed([4], 0)
        session.feed([5], 1)
        again = list(islice(session.stream_together(Output.GREEDY, (0, 1)), 3))
        assert again == [*first, second]


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "output", [Output.GREEDY, pytest.param(Output.SAMPLE, marks=pytest.mark.full)]
)
def test_several_steps_at_once_equal_single_ones(
    device: Device, weights: Weights, output: Output
) -> None:
    """In every order of launches that a stream has: one first, several, and one by one again at
    the end of the context; undone in the midst of a launch; of two sequences together."""
    shapes = [StepShape(rows, 256, output, AT_ONCE) for rows in (1, 2)]
    launched: list[int] = []
    with Session(device, weights, SessionSettings(24, sequences=2)) as session:
        launch = session.steps.launch

        def counting(shape: StepShape, stream: Stream) -> None:
            if shape.output is not Output.NONE:
                launched.append(shape.steps)
            launch(shape, stream)

        session.steps.launch = counting  # type: ignore[method-assign]
        for sequence in (0, 1):
            session.set_sampling(SamplingSettings(temperature=1.5, seed=5), sequence)
        session.feed([3, 1, 4])
        singly = [session.forward_gpu_resident_to_token_id((0,), output)[0] for _ in range(22)]
        assert set(launched) == {1}
        for shape in shapes:
            assert prepare_all(session, shape) > AT_ONCE
            assert len(session.steps.bound(shape)) % AT_ONCE == 0
        for read in (22, 1, 4, 7):
            session.truncate(0)
            session.feed([3, 1, 4])
            del launched[:]
            with closing(session.stream(output)) as tokens:
                assert list(islice(tokens, read)) == singly[:read]
            assert session.length == 2 + read
            assert launched[:3] == [1, AT_ONCE, AT_ONCE] if read > 1 else launched[0] == 1
            if read < 22:
                after = session.forward_gpu_resident_to_token_id((0,), output)
                assert after == [singly[read]]
        assert session.lengths == [2 + 7 + 1, 0]
        session.truncate(0)
        session.feed([3, 1, 4])
        session.feed([5, 9], 1)
        del launched[:]
        together = list(session.stream_together(output, (0, 1)))
        assert [step[0] for step in together] == singly
        assert AT_ONCE in launched
        assert sum(launched) == len(together)


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
        session.feed([7])
        session.graphs.prepare_all(1, Output.GREEDY, 1, 15)
        monkeypatch.setattr(session.steps, "_recording", None)
        launched: list[int] = []
        launch = session.stepper.launch

        def counting(shape: StepShape, slots: Sequence[int]) -> None:
            launched.append(shape.steps)
            launch(shape, slots)

        monkeypatch.setattr(session.stepper, "launch", counting)
        assert len(list(session.stream(Output.GREEDY, most=14))) == 14
    assert launched[:3] == [1, AT_ONCE, AT_ONCE]


@pytest.mark.slow
def test_no_step_runs_beyond_what_is_asked_for(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(24)) as session:
        prepare_all(session, StepShape(1, 256, Output.GREEDY, AT_ONCE))
        session.feed([3, 1, 4])
        expected = list(session.stream(Output.GREEDY))
        for most in (0, 1, 2, AT_ONCE + 1, AT_ONCE + 3, 22, 30):
            session.truncate(0)
            session.feed([3, 1, 4])
            stream = session.stream(Output.GREEDY, most=most)
            tokens = []
            for token in stream:
                tokens.append(token)
                assert session.length <= 2 + most
            assert tokens == expected[:most]
            assert session.length == (2 + len(tokens) if most else 0)
            if session.length < 24:
                assert session.greedy_step() == expected[len(tokens)]


@pytest.mark.slow
def test_several_steps_stay_in_a_length_bucket(device: Device, weights: Weights) -> None:
    """As single ones do: around 256 tokens attention changes its way to work."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 249)]
    with Session(device, weights, SessionSettings(300)) as session:
        session.feed(tokens)
        singly = [session.greedy_step() for _ in range(20)]
        for keys in (256, 512):
            prepare_all(session, StepShape(1, keys, Output.GREEDY, AT_ONCE))
        session.truncate(0)
        session.feed(tokens)
        assert list(session.stream(Output.GREEDY, most=20)) == singly


@pytest.mark.slow
def test_several_steps_take_what_room_there_is_in_pages(device: Device, weights: Weights) -> None:
    """Where there is none for all of them, they come one by one, to the last page's end."""
    with Session(
        device, weights, SessionSettings(64, sequences=2, page_len=16, pages=3)
    ) as session:
        session.feed([1] * 14)
        expected = [session.greedy_step() for _ in range(19)]
        session.truncate(0)
        session.feed([2] * 15, 1)  # takes a page, leaves two
        prepare_all(session, StepShape(1, 256, Output.GREEDY, AT_ONCE))
        session.feed([1] * 14)
        found: list[int] = []
        with pytest.raises(ContextFullError):
            found.extend(session.stream(Output.GREEDY))
        assert found == expected[: len(found)]
        assert len(found) > 19 - 2 * AT_ONCE


@pytest.mark.slow
def test_the_next_bucket_is_ready_before_it_is_needed(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is recorded at once in the middle of a stream, and tokens are as without."""
    at_once: list[StepShape] = []
    make_ready = Steps.make_ready

    def watched(self: Steps, shape: StepShape) -> None:
        if shape not in self._graphs:
            at_once.append(shape)
        make_ready(self, shape)

    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 480)]
    with Session(device, weights, SessionSettings(1000)) as session:
        session.feed(tokens)
        expected = [session.greedy_step() for _ in range(40)]
        assert session.length > 512
    monkeypatch.setattr(Steps, "make_ready", watched)
    with Session(device, weights, SessionSettings(1000)) as session:
        session.feed(tokens)
        del at_once[:]
        assert list(islice(session.stream(Output.GREEDY), 40)) == expected
        prompt = StepShape(512, 512, Output.GREEDY, prompt=512)
        assert at_once in ([prompt], [prompt, StepShape(1, 512, Output.GREEDY)])


@pytest.mark.slow
def test_nothing_is_prepared_far_from_the_end_of_a_bucket(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(1000)) as session:
        session.feed([1] * 100)
        list(islice(session.stream(Output.GREEDY), 2))
        assert set(session.steps._graphs) & {StepShape(1, 512, Output.GREEDY)} == set()
        several = StepShape(1, 256, Output.GREEDY, AT_ONCE)  # in the bucket that there is
        assert set(session.steps._begun) <= {several}
        session.truncate(0)
        session.feed([1] * (257 - LOOK_AHEAD))
        list(islice(session.stream(Output.GREEDY), 2))
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
        session.feed([1, 2])
        assert len(list(islice(session.stream(Output.GREEDY), 2 * AHEAD))) == 2 * AHEAD


@pytest.mark.slow
def test_waiting_is_counted(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(20)) as session:
        session.feed([1, 2])
        before = session.waited_seconds
        assert len(list(session.stream(Output.GREEDY))) == 19
        assert session.waited_seconds > before


def test_the_oldest_graphs_are_forgotten(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are recorded again, with the same result."""
    with Session(device, weights, SessionSettings(64)) as session:
        expected, steps = session_token(session), session.steps
        all_bytes = [graph.nbytes for graph in steps._graphs.values()]
        room = 2 * max(all_bytes)
        assert steps.graph_bytes == sum(all_bytes) > room
        steps.close()  # forgets all
        monkeypatch.setattr(steps, "_most_bytes", room)
        assert [session_token(session) for _ in range(2)] == [expected] * 2
        kept = [graph.nbytes for graph in steps._graphs.values()]
        assert 0 < steps.graph_bytes == sum(kept) <= room


def session_token(session: Session) -> list[int]:
    """Tokens after prompts of several lengths: a shape each."""
    tokens = []
    for count in (3, 12, 20, 40):
        session.truncate(0)
        session.feed(list(range(5, 5 + count)))
        tokens.append(session.greedy_step())
    return tokens
