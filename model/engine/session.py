"""A session: sequences on a device, and the steps that process and continue them."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.blocks.attention import segment_alignment
from urdir.model.blocks.rows import state_alignment
from urdir.model.engine.batch import Output, ShapeBuckets
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.rank import budget_of, open_ranks
from urdir.model.engine.run_ahead import AHEAD, Launch, RunAhead
from urdir.model.engine.runner import Observer
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.sequence import Ids, Sequence
from urdir.model.engine.sequence_steps import SequenceSteps
from urdir.model.engine.step_clock import StepClock
from urdir.model.engine.step_queue import StepQueue
from urdir.model.engine.stream import DecodeStream
from urdir.model.errors import ModelError
from urdir.model.memory.budget import check_context
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.walk import Walk
from urdir.model.memory.weights import Weights
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN

if TYPE_CHECKING:
    from urdir.driver.device import Device

Slots = abc.Sequence[int]
Words = npt.NDArray[np.uint32]


class Session(Owner):
    """The sequences that the ``settings`` have room for, numbered from 0.

    ``sequences[s]`` says what a sequence holds. Tokens that are known but not yet processed are
    *pending*, at most a chunk of them; a step processes them. ``observer`` looks at every step,
    launch by launch. ``weights`` are on ``device``; those of a share of the model are rank 0's, and
    ``peers`` those of the other ranks, on the other devices of its group. Raises ModelError for a
    context that the model does not take, OutOfMemoryError.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights,
        settings: SessionSettings,
        *,
        observer: Observer | None = None,
        peers: abc.Sequence[Weights] = (),
    ) -> None:
        config = weights.config
        check_context(config, settings.context)
        budget = budget_of(weights, settings)
        self.context = settings.context
        self.weights = weights
        #: How long the readers of streams had nothing to do but wait for the device.
        self.waited_seconds = 0.0
        self._is_lent = False
        self.sequences = tuple(Sequence(slot, self.context) for slot in range(settings.sequences))
        alignment, walk = state_alignment(config), None
        if not settings.exact:
            target, cache = device.native_target, budget.cache
            walk = Walk.of(config, cache.max_len, budget.chunks[-1], target)
            aligned = segment_alignment(config, cache, target), 1 if walk is None else walk.rows
            alignment = math.lcm(alignment, *aligned)
        self.shapes = ShapeBuckets.of(
            budget.chunks,
            budget.cache.max_len,
            budget.state.rows,
            alignment,
            begin_apart=not (settings.exact or walk)
            and any(m.written_out for m in config.attentions),
            walk=walk,
        )
        with ExitStack() as owners:
            lead, self.exchange = open_ranks(owners, (weights, *peers), settings, observer)
            self.parts, self.steps, self.storage = lead.parts, lead.steps, lead.storage
            self._stream = lead.stream
            self.graphs = DecodeGraphs(self.steps, self.shapes)
            self.queue = StepQueue(self.steps, self.parts.state, self.shapes, self._stream)
            self.stepper = SequenceSteps(self.sequences, self.shapes, self.storage, self.queue)
            self._owners = owners.pop_all()

    # ---- who uses the sequences ----

    def lend(self) -> None:
        """The sequences are for requests from now on, which begin with what is left there of the
        tokens that they hold. Raises ModelError while they are lent."""
        if self._is_lent:
            raise ModelError("the sequences are in use: close the answer, or the service, first")
        for sequence in self.sequences:
            sequence.check_read()
        for sequence in self.sequences:
            if sequence.known:
                held, reached = sequence.tokens[: sequence.length], sequence.length
                self.storage.release(sequence.slot, held, reached)
                sequence.truncate(0)
        self.queue.forget_rows()
        self._is_lent = True

    def take_back(self) -> None:
        """Requests use the sequences no more, which are empty."""
        self.queue.forget_rows()
        self._is_lent = False

    # ---- one sequence ----

    @property
    def length(self) -> int:
        """Tokens of sequence 0 in the cache."""
        return self.sequences[0].length

    @property
    def is_full(self) -> bool:
        """True when no further token fits the context of sequence 0."""
        return self.sequences[0].is_full

    def greedy_step(self) -> int:
        """Process the pending token of sequence 0; the most likely next one becomes pending."""
        return self.forward_gpu_resident_to_token_id()[0]

    def logits_step(self) -> npt.NDArray[np.float32]:
        """Process the pending token of sequence 0; logits (n_vocab,) of the one after it."""
        logits: npt.NDArray[np.float32] = self.forward_gpu_resident()[0]
        return logits

    def stream(
        self, output: Output, sequence: int = 0, *, most: int | None = None
    ) -> Generator[int, None, None]:
        """Tokens of a sequence, one a step, until it is full or an end id of its stop conditions
        was chosen; steps run ahead of the reader.

        When the iterator is closed, steps that ran beyond the last token it gave are undone. It
        ends after ``most`` tokens, beyond which no step runs.
        """
        with closing(self.stream_together(output, (sequence,), most=most)) as steps:
            for (token,) in steps:
                yield token

    # ---- any sequences ----

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence in the cache."""
        return [sequence.length for sequence in self.sequences]

    def feed(self, tokens: Ids, sequence: int = 0) -> None:
        """Append ``tokens``; all but the last chunk of what is pending then is processed.

        The next step processes that chunk, too, and its output is that of the last token. Raises
        ModelError for a token id outside the vocabulary and ContextFullError when the tokens do not
        fit; the sequence is then as it was.
        """
        if not tokens:
            return
        fed = self.sequences[sequence]
        self._check_append(tokens, fed)
        self.storage.reserve(fed.slot, fed.length, fed.known + len(tokens) - 1)
        self.append(tokens, sequence)
        self.stepper.process_chunks(fed)

    def append(self, tokens: Ids, sequence: int = 0) -> None:
        """Append ``tokens``, which are pending then, however many: for `launch_batch`. Raises as
        `feed` does, where the context has no room.
        """
        extended = self.sequences[sequence]
        self._check_append(tokens, extended)
        self.parts.state.write_tokens(extended.slot, extended.known, tokens)
        extended.append(tokens)

    def prepare(self, tokens: int, output: Output) -> None:
        """Record the graphs that one sequence needs for a prompt of so many tokens and for the
        first token after it. Nothing runs: the weights need not be there yet. Raises DriverError.
        """
        known, length = min(max(tokens, 1), self.context), 0
        shapes = []
        while length < known - self.shapes.chunks[-1]:
            shape, length = self.shapes.prompt(length, known - 1)
            shapes.append(shape)
        if known - length > 1:
            shapes.append(self.shapes.prompt(length, known, output)[0])
        else:
            shapes.append(self.shapes.decode(1, known, output))
        self.steps.record(shapes)

    def set_sampling(
        self,
        settings: SamplingSettings,
        sequence: int = 0,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """What follows the tokens of a sequence so far is an answer: how its tokens are chosen, by
        steps whose output is SAMPLE or LOGPROBS, and when it ends. The device itself stops at an
        end id. Where no seed is set the sequence's ``settings`` tell the new one. Raises as
        `check_settings` does."""
        self.check_settings(settings)
        answering = self.sequences[sequence]
        answering.settings = settings = settings.with_seed()
        answering.begin_answer(end_ids)
        words = settings.words(answering.answer_at, end_ids)
        self.parts.state.write_sampling(sequence, words)

    def forward_gpu_resident(self, sequences: Slots = (0,)) -> npt.NDArray[np.float32]:
        """Process the pending tokens of each sequence: embedding, layers, norm, LM head. The last
        ones share a step; those of a single sequence are one step with those before them.

        Returns the logits (len(sequences), n_vocab) f32 of the tokens after them; the host supplies
        these (``feed``). Raises ContextFullError and ModelError, nothing done then.
        """
        shape = (len(sequences), self.parts.config.vocab_size)
        self.stepper.step(Output.LOGITS, sequences)
        return self.parts.work["logits"].download(np.float32, shape)

    def forward_gpu_resident_to_token_id(
        self, sequences: Slots = (0,), output: Output = Output.GREEDY
    ) -> list[int]:
        """The same, and the next tokens are chosen on the device: only they come back.

        ``output`` is GREEDY (the most likely, lowest id on ties), SAMPLE or LOGPROBS
        (``set_sampling``). Raises ModelError where a sequence has no token to choose (`read`); the
        tokens of all are pending as before then.
        """
        self.stepper.step(output, sequences)
        chosen = self.parts.state["sampled"].download(np.uint32, len(sequences))
        tokens = [int(token) for token in chosen]
        if INVALID_TOKEN in tokens:
            for sequence in sequences:
                self.undo_unread(sequence)
            raise self.no_choice(sequences[tokens.index(INVALID_TOKEN)])
        for sequence, token in zip(sequences, tokens, strict=True):
            self.read(sequence, token)
        return tokens

    def read(self, sequence: int, token: int) -> None:
        """The host knows the next token of a sequence, which the device has chosen.

        Raises ModelError where the device found none: see `no_choice`.
        """
        reader = self.sequences[sequence]
        if token == INVALID_TOKEN:
            raise self.no_choice(sequence)
        reader.read(token)
        if token in reader.end_ids:
            self.queue.forget_rows()  # the device has made its row idle

    def no_choice(self, sequence: int) -> ModelError:
        """The error that names a sequence for which the device chose INVALID_TOKEN: one of its
        logits is NaN, or the highest is infinite, also where nothing is allowed. Its row is idle.
        """
        self.queue.forget_rows()
        return ModelError(
            f"sequence {sequence}: no token can be chosen: its logits hold NaN or infinity (the "
            "forward pass went wrong), or no token is allowed"
        )

    def stream_together(
        self, output: Output, sequences: Slots, *, most: int | None = None
    ) -> Generator[list[int], None, None]:
        """The next token of each sequence, step after step, until one is full or has chosen one of
        its end ids; see ``stream``.

        While the host would wait for the device, it records the graphs of several steps and of the
        next length bucket.
        """
        return DecodeStream(self, output, sequences, most).tokens()

    def kept(self, length: int, sequence: int = 0) -> int:
        """How many of the first ``length`` tokens `truncate` can leave: all that can be processed
        before the next step; none where layers with a window no longer hold what the next token
        looks back on; with recurrent layers, of those that are processed as many as there is a
        state of, which is kept after each prompt."""
        cut = self.sequences[sequence]
        return self.storage.kept(sequence, min(length, cut.reach), cut.length)

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget every token of a sequence from ``length`` on; nothing is pending then.

        Pending ones before it are processed. Raises ModelError, nothing changed, for tokens that
        there are not or that are not `kept`.
        """
        cut = self.sequences[sequence]
        if length <= cut.reach:
            self.stepper.process(cut, length)
        cut.check_truncate(length)
        self.storage.truncate(cut.slot, length, cut.length)
        self.parts.state.write_known(cut.slot, length)
        cut.truncate(length)
        self.queue.forget_rows()

    def undo_unread(self, sequence: int) -> None:
        """Forget the steps of a sequence whose tokens were not read; the last one that was read is
        pending then. Caches have room for so many steps more than layers look back on. With
        recurrent layers more is pending: what came after the state that is kept.
        """
        undone = self.sequences[sequence]
        reached = undone.length
        if undone.forget_unread():
            length = self.storage.kept(undone.slot, undone.length, reached)
            self.storage.truncate(undone.slot, length, reached)
            self.parts.state.write_known(undone.slot, undone.known)
            undone.rewind(length)
            self.queue.forget_rows()
            self.stepper.process_chunks(undone)

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``, its pending token included."""
        original = self.sequences[source]
        original.check_read()
        self.stepper.process(original, original.last)
        self.storage.fork(source, target, original.length)
        self.parts.state.copy_tokens(source, target, original.known)
        self.sequences[target].copy(original)
        self.queue.forget_rows()

    # ---- launches ----

    def run_ahead(self, steps: int = AHEAD) -> RunAhead[Launch]:
        """To note the launches that are queued from now on and read later; the caller closes it."""
        return RunAhead(self.parts.device, self._stream, steps)

    def step_clock(self) -> StepClock:
        """To time launches that are queued from now on; the caller closes it."""
        return StepClock(self.parts.device, self._stream)

    def device_positions(self) -> dict[int, int]:
        """Sequence -> position as device memory has them, for comparing with ``lengths``."""
        return self.parts.state.positions()

    def check_tokens(self, tokens: Ids) -> None:
        """Raise ModelError for a token id outside the vocabulary."""
        size = self.parts.config.vocab_size
        for token in {min(tokens, default=0), max(tokens, default=0)}:
            if not 0 <= token < size:
                raise ModelError(f"token id {token} is outside the vocabulary of {size} tokens")

    def check_settings(self, settings: SamplingSettings) -> None:
        """Raise ModelError for a bias of a token outside the vocabulary."""
        size = self.parts.config.vocab_size
        for token, _ in settings.logit_bias:
            if token >= size:
                raise ModelError(f"logit_bias of token {token}: the vocabulary has {size} tokens")

    def _check_append(self, tokens: Ids, sequence: Sequence) -> None:
        sequence.check_append(len(tokens))
        self.check_tokens(tokens)

    def close(self) -> None:
        """Free graphs, cache, state and workspace; closing twice does nothing."""
        self._owners.close()
