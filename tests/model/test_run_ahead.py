"""Steps that run ahead: the order of tokens, what is prepared meanwhile, what the host does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.model.config import Config
from urdir.model.gguf import Gguf
from urdir.model.rows import Ending, StepShape
from urdir.model.run_ahead import AHEAD
from urdir.model.session import LOOK_AHEAD, Session
from urdir.model.steps import Steps
from urdir.model.weights import Weights


@pytest.fixture
def weights(data: Path, device_name: str) -> Iterator[Weights]:
    path = data / "golden" / "nano-llama-q8_0.gguf"
    with (
        Gguf(path) as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, replace(Config.from_gguf(gguf), context_length=1024), device) as weights,
    ):
        yield weights


def prepare_all(session: Session, shape: StepShape) -> int:
    """Prepare a graph to its end; the number of pieces."""
    pieces = 0
    while session.steps.prepare(shape):
        pieces += 1
    return pieces


def test_sequences_together_equal_each_alone(weights: Weights) -> None:
    """Three of different lengths, until the longest is full; the others may go on."""
    prompts = ([3, 1, 4], [1, 5, 9, 2, 6], [5])
    with Session(weights, 12, sequences=3) as session:
        alone = []
        for sequence, prompt in enumerate(prompts):
            session.feed(prompt, sequence)
            alone.append(list(session.stream(Ending.GREEDY, sequence)))
            session.truncate(0, sequence)
        for sequence, prompt in enumerate(prompts):
            session.feed(prompt, sequence)
        together = list(session.stream_together(Ending.GREEDY, (0, 1, 2)))
        assert len(together) == 12 - 5 + 1  # the last token needs no place
        assert session.lengths == [2 + 8, 12, 8]
        for sequence, expected in enumerate(alone):
            assert [step[sequence] for step in together] == expected[:8]
        rest = list(session.stream(Ending.GREEDY, 2))
        assert rest == alone[2][8:]


def test_only_what_was_read_counts(weights: Weights) -> None:
    with Session(weights, 24, sequences=2) as session:
        session.feed([3, 1, 4], 0)
        session.feed([1, 5], 1)
        steps = session.stream_together(Ending.GREEDY, (0, 1))
        first = list(islice(steps, 2))
        assert session.lengths[0] > 2 + 2
        steps.close()
        assert session.lengths == [2 + 2, 1 + 2]
        second = session.forward_gpu_resident_to_token_id((0, 1))
        session.truncate(2, 0)
        session.truncate(1, 1)
        session.feed([4], 0)
        session.feed([5], 1)
        again = list(islice(session.stream_together(Ending.GREEDY, (0, 1)), 3))
        assert again == [*first, second]


def test_the_next_bucket_is_ready_before_it_is_needed(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is recorded at once in the middle of a stream, and tokens are as without."""
    at_once: list[StepShape] = []
    launch = Steps.launch

    def watched(self: Steps, shape: StepShape, stream: object) -> None:
        if shape not in self._graphs:
            at_once.append(shape)
        launch(self, shape, stream)  # type: ignore[arg-type]

    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 450)]
    with Session(weights, 1000) as session:
        session.feed(tokens)
        expected = [session.greedy_step() for _ in range(70)]
        assert session.length > 512
    monkeypatch.setattr(Steps, "launch", watched)
    with Session(weights, 1000) as session:
        session.feed(tokens)
        del at_once[:]
        assert list(islice(session.stream(Ending.GREEDY), 70)) == expected
        assert at_once == [StepShape(1, 512, Ending.GREEDY)]


def test_nothing_is_prepared_far_from_the_end_of_a_bucket(weights: Weights) -> None:
    with Session(weights, 1000) as session:
        session.feed([1] * 100)
        next(session.stream(Ending.GREEDY))
        assert set(session.steps._graphs) & {StepShape(1, 1024, Ending.GREEDY)} == set()
        assert not session.steps._begun
        session.truncate(0)
        session.feed([1] * (513 - LOOK_AHEAD))
        next(session.stream(Ending.GREEDY))
        assert StepShape(1, 1024, Ending.GREEDY) in {*session.steps._begun, *session.steps._graphs}


def test_a_graph_prepared_in_pieces_is_the_same(weights: Weights) -> None:
    shape = StepShape(1, 256, Ending.GREEDY)
    with Session(weights, 20) as session:
        pieces = prepare_all(session, shape)
        in_pieces = session.steps.graph(shape)
        assert not session.steps.prepare(shape)
        edges, nodes = in_pieces.edges, [node.operation.label for node in in_pieces.nodes]
    assert pieces > len(nodes)
    with Session(weights, 20) as session:
        session.steps.prepare(shape)
        session.steps.prepare(shape)  # begun, then needed at once
        at_once = session.steps.graph(shape)
        assert at_once.edges == edges
        assert [node.operation.label for node in at_once.nodes] == nodes
        assert at_once.node_count == len(session.steps.bound(shape))


def test_a_failed_preparation_may_be_tried_again(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = StepShape(1, 256, Ending.GREEDY)
    api = weights.device.api
    if not weights.device.is_emulated:
        pytest.skip("breaks the driver")
    with Session(weights, 20) as session:
        with monkeypatch.context() as broken:
            fails = (api.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            broken.setattr(api, "cuGraphInstantiate", lambda *_: fails, raising=False)
            with pytest.raises(CudaError):
                prepare_all(session, shape)
        prepare_all(session, shape)
        session.feed([1, 2])
        assert len(list(islice(session.stream(Ending.GREEDY), 2 * AHEAD))) == 2 * AHEAD


def test_waiting_is_counted(weights: Weights) -> None:
    with Session(weights, 20) as session:
        session.feed([1, 2])
        before = session.ahead.waited_seconds
        assert len(list(session.stream(Ending.GREEDY))) == 19
        assert session.ahead.waited_seconds > before
