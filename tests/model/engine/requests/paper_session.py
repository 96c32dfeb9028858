"""A session without a device, for the loop that answers requests: its steps are checked, not run.

Each step must lie in its shape, and in the room that was reserved for its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from urdir.driver.gate import Gate
from urdir.model.engine.batch import Batch, ShapeBuckets, StepShape
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.memory.buckets import choosing_rows

TOKEN = 7
VOCABULARY = 16


class PaperStorage:
    """Room for ``room`` tokens of all sequences together."""

    shared_states = None

    def __init__(self, room: int) -> None:
        self.most_tokens = self.room = room
        self.held: dict[int, int] = {}

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        assert sequence not in self.held
        self.held[sequence] = 0
        self.reserve(sequence, 0, end)
        return 0

    def reserve(self, sequence: int, start: int, end: int) -> int:
        assert start <= end <= self.room
        self.held[sequence] = max(self.held[sequence], end)
        return self.held[sequence]

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None:
        assert len(tokens) <= reached <= self.held.pop(sequence)

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return 0

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None: ...

    def keep_prefix(self, sequence: int, length: int) -> None: ...

    def learn(self, tokens: int, seconds: float) -> None: ...


class PaperSteps:
    """Graphs of the shapes that ``is_recorded`` says; nothing is left to prepare."""

    graph_bytes, is_waiting, observer, free_share = 0, False, None, 1.0

    def __init__(self, shapes: ShapeBuckets, is_recorded: Callable[[StepShape], bool]) -> None:
        self._shapes = shapes
        self.is_recorded = is_recorded
        self.gate = Gate()

    def prepare(self, shape: StepShape) -> bool:
        assert shape.keys in self._shapes.lengths
        return False

    def waits(self, shape: StepShape) -> bool:
        return False

    def wait_for_helper(self) -> None: ...

    def end_compilers(self) -> None: ...


class PaperSession:
    """``sequences`` of up to ``context`` tokens; every step chooses `TOKEN`."""

    drafting = paced = None
    takes_sources = False

    def __init__(
        self,
        shapes: ShapeBuckets,
        context: int,
        sequences: int,
        is_recorded: Callable[[StepShape], bool] = lambda shape: True,
    ) -> None:
        self.context, self.shapes = context, shapes
        self.adapters = None
        self.sequences = sequences
        self.storage = PaperStorage(context)
        self.steps: Any = PaperSteps(shapes, is_recorded)
        self.graphs = DecodeGraphs(self.steps, shapes)
        self.queue = SimpleNamespace(launch=self.launch, forget_rows=lambda: None)
        self.launched: list[StepShape] = []
        event = SimpleNamespace(is_done=True, synchronize=lambda: None, close=lambda: None)
        self.stream = SimpleNamespace(record=lambda event: None)
        self.parts = SimpleNamespace(
            device=SimpleNamespace(create_event=lambda name: event),
            config=SimpleNamespace(vocab_size=VOCABULARY, source=None, stage=None),
            cache=SimpleNamespace(pools=()),
            state=SimpleNamespace(
                drafts=None,
                rows=choosing_rows(sequences),
                write_tokens=self.write_tokens,
                write_sampling=lambda sequence, words: None,
                write_adapter=lambda sequence, slot, scale: None,
                chosen=lambda sequence, position: TOKEN,
            ),
        )

    def write_tokens(self, sequence: int, start: int, tokens: Sequence[int]) -> None:
        assert start + len(tokens) <= self.context

    def launch(
        self,
        shape: StepShape,
        batch: Batch,
        lasts: Sequence[int],
        masks: Mapping[int, Any],
        *,
        given: Mapping[int, Any],
        revise: Any = None,
        scored: Any = None,
    ) -> None:
        assert not given
        assert revise is None
        assert scored is None
        ends = [(s, at + shape.steps) for s, at in zip(batch.decode, lasts, strict=True)]
        for sequence, end in [*ends, *((s.sequence, s.end) for s in batch.segments)]:
            assert end <= shape.keys
            assert end <= min(self.context, self.storage.held[sequence])
        assert len(batch.decode) <= shape.decode
        assert all(sequence in batch.choosing for sequence in masks)
        self.launched.append(shape)

    def begin_drafts(self, sequence: int, length: int, p_min: float | None = None) -> None: ...

    def begin_sources(self, sources: Mapping[int, Sequence[int]]) -> None:
        assert not sources

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_tokens(self, tokens: Sequence[int]) -> None: ...

    def check_settings(self, settings: Any) -> None: ...

    def answers(self, limits: Limits | None = None) -> AnswerLoop:
        """The loop over these sequences, without text."""
        session: Any = self
        return AnswerLoop(session, None, limits or Limits.for_latency(self.shapes))
