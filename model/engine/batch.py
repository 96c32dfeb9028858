"""What a step processes and how large it is: the shapes that plans are made for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.memory.buckets import (
    COARSE_CHUNKS,
    COARSE_ROWS,
    COMMON_ROWS,
    FINE_ROWS,
    MIDDLE_GRAIN,
    WHOLE_CHUNK,
    fine_chunk,
    first_rows,
    row_bucket,
)
from urdir.model.memory.device_state import StepRows
from urdir.model.memory.draft_scope import DraftScope
from urdir.model.memory.scored_rows import Words, scored_bucket
from urdir.model.memory.turns import Turns
from urdir.model.memory.walk import NO_BLOCKS, Blocks, Walk
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.attention.choice import length_buckets, several_rows_buckets
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.spec import ceil_div

#: Rows of a step that passes tokens through the draft model alone, unless there are many.
CATCH_UP = 256


class Output(Enum):
    """What comes out of a step once the layers are through."""

    NONE = "none"  # of a prompt's chunk with others after it: the next tokens are known
    LOGITS = "logits"  # for the host, which supplies the next token
    GREEDY = "greedy"  # the most likely token becomes the next one
    SAMPLE = "sample"  # a token chosen by the sequence's settings becomes the next one
    LOGPROBS = "logprobs"  # the same, and log-probabilities for sequences that want them

    @classmethod
    def of(cls, *settings: SamplingSettings, masked: bool = False) -> Output:
        """The cheapest one that serves sequences with these settings; ``masked``: some may take
        certain tokens alone."""
        if any(each.logprobs is not None for each in settings):
            return cls.LOGPROBS
        greedy = not masked and all(each.is_greedy for each in settings)
        return cls.GREEDY if greedy else cls.SAMPLE

    @property
    def is_token(self) -> bool:
        """True where the device itself supplies the next token."""
        return self in (Output.GREEDY, Output.SAMPLE, Output.LOGPROBS)


class Part(Enum):
    """What of a step a plan has."""

    WHOLE = "whole"
    LAYERS = "layers"  # up to the logits, which the host may change
    CHOICE = "choice"  # the choice of tokens by the logits, and what moves the rows on


class Grain(Enum):
    """How far the rows of a step with prompts are rounded up. Graphs of coarse shapes are recorded
    ahead, others while steps of these run."""

    COARSE = "coarse"
    MIDDLE = "middle"
    FINE = "fine"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start`` to ``end`` of a sequence, rows of a step side by side. Where it ``chooses``,
    the last one's result is wanted; the first ``scored`` rows are `memory.scored_rows`."""

    sequence: int
    start: int
    end: int
    chooses: bool = False
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step processes: the last token of each sequence of ``decode``, and ``segments`` of
    prompts, of other sequences; or after each last token up to ``drafts`` drafts of the next
    ones, none if ``drafts`` is empty. Others, sequence and position, may take ``turns`` with
    those of ``decode``."""

    decode: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    drafts: tuple[int, ...] = ()
    turns: Turns[tuple[int, int]] | None = None

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Drafts of each sequence of ``decode``: 0 of any if ``drafts`` is empty."""
        return self.drafts or (0,) * len(self.decode)

    @property
    def scored(self) -> int:
        """How many rows are scored."""
        return sum([segment.scored for segment in self.segments])

    @property
    def choosing(self) -> tuple[int, ...]:
        """The sequences whose results are wanted, in the order of the rows that give them."""
        return (*self.decode, *(s.sequence for s in self.segments if s.chooses))

    def row_of(self, sequence: int) -> int:
        """Which of the rows that choose a token is the first one of a sequence."""
        number = self.choosing.index(sequence)
        return number + sum(self.drafts[:number])


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a plan is made for: everything that is fixed while its graph is replayed.

    ``rows`` tokens a step, each with at most ``keys`` keys to attend to. The last ``prompt`` of
    them are up to ``segments`` segments of prompts. The ``output`` is that of all rows; beside
    prompts it is that of ``outputs`` of them. ``steps`` steps without prompts follow one another,
    each with the tokens that the one before has chosen. With ``drafts`` the rows are of fewer
    sequences: their last tokens, and up to this many drafts of each. A step that ``begins`` has
    nothing but the first tokens of one sequence: these attend to each other alone. Prompts may
    ``walk`` over what is cached in blocks (`memory.walk`), beside which ``keys`` are those of other
    rows. A ``draft_only`` step passes rows of a prompt through the draft model alone. ``narrow``
    drafts are of the first tokens of the vocabulary alone (`DraftScope`). ``part`` of the step is
    all of it, or one of its `halves`. Of its rows of prompts up to ``scored`` are scored.
    """

    rows: int
    keys: int
    output: Output
    steps: int = 1
    prompt: int = 0
    outputs: int = 1
    segments: int = 1
    begins: bool = False
    walk: Blocks = NO_BLOCKS
    drafts: int = 0
    draft_only: bool = False
    narrow: bool = False
    part: Part = Part.WHOLE
    scored: int = 0

    @property
    def halves(self) -> tuple[StepShape, StepShape]:
        """The layers, and the choice of tokens by the logits: launched one after the other they are
        the step."""
        layers = replace(self, part=Part.LAYERS, output=Output.LOGITS)
        return layers, replace(self, part=Part.CHOICE)

    @property
    def decode(self) -> int:
        """Rows that are no prompt's."""
        return self.rows - self.prompt

    @property
    def kind(self) -> str:
        """The step in words: "greedy", "drafted greedy", "prompt" (without an output), "prompt
        greedy", "beginning greedy", "mixed greedy", "draft's prompt"."""
        if self.draft_only:
            return "draft's prompt"
        if not self.prompt:
            return f"drafted {self.output.value}" if self.drafts else self.output.value
        kind = "mixed" if self.decode else "beginning" if self.begins else "prompt"
        kind = f"scored {kind}" if self.scored else kind
        return kind if self.output is Output.NONE else f"{kind} {self.output.value}"


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    """The few shapes that serve all steps: rows and lengths are rounded up.

    Every shape costs a graph. ``chunks`` are the rows of prompts and ``lengths`` the keys of all
    steps, smallest first. At most ``rows`` rows choose a token. Segments begin at multiples of
    ``alignment`` rows. ``begin_apart``: a step that begins a sequence has a shape of its own. With
    a ``walk`` the prompts of others walk over what is cached. With ``drafts`` up to this many of
    each sequence are verified, of the tokens that ``scope`` says. ``one_length``: launches of many
    rows of a prompt are the same whatever its length, so that all have the bucket of the longest.
    """

    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int = 1
    alignment: int = 1
    begin_apart: bool = False
    walk: Walk | None = None
    drafts: int = 0
    scope: DraftScope = field(default_factory=DraftScope)
    one_length: bool = False

    @classmethod
    def of(
        cls,
        chunks: tuple[int, ...],
        max_len: int,
        rows: int = 1,
        alignment: int = 1,
        begin_apart: bool = False,
        walk: Walk | None = None,
        drafts: int = 0,
    ) -> ShapeBuckets:
        """The buckets of a session with these chunks and room for ``max_len`` tokens."""
        lengths = tuple(length_buckets(max_len))
        return cls(chunks, lengths, rows, alignment, begin_apart, walk, drafts)

    def beside(self, others: Iterable[ShapeBuckets]) -> ShapeBuckets:
        """The shapes of steps that other ranks run too, with these of their own: segments begin
        where tiles of queries do on all ranks, whose heads may be groups of other sizes."""
        alignment = math.lcm(self.alignment, *(of.alignment for of in others))
        return replace(self, alignment=alignment)

    def keys(self, length: int, rows: int = 1) -> int:
        """The length bucket of a step of ``rows`` sequences after which the longest has ``length``
        tokens."""
        lengths = self.lengths if rows == 1 else several_rows_buckets(self.lengths)
        return lengths[bisect_left(lengths, length)]

    def decode(
        self, rows: int, length: int, output: Output, steps: int = 1, drafted: bool = False
    ) -> StepShape:
        """The shape of ``steps`` steps of ``rows`` sequences, or if it is ``drafted`` of their
        rows and those of drafts, the longest of which then has ``length`` tokens.
        """
        keys, drafts = self.keys(length, rows), self.drafts if drafted else 0
        narrow = drafts > 0 and self.scope.is_narrow
        return StepShape(row_bucket(rows), keys, output, steps, drafts=drafts, narrow=narrow)

    def prompt(self, start: int, end: int, output: Output = Output.NONE) -> tuple[StepShape, int]:
        """The shape of the first prompt step of the tokens from ``start`` to ``end``, and where it
        ends: one step may not take all of them (`first`), and the ``output`` is that of the last
        one's step. Rows that are left over are padding.
        """
        if (stop := start + self.first(end - start)) < end:
            end, output = stop, Output.NONE
        return self._of_one_prompt(start, end, end, output), end

    def prompts(self, start: int, end: int, output: Output) -> Iterator[StepShape]:
        """The shapes of all steps of a prompt alone from ``start`` to ``end``; see `prompt`."""
        while start < end:
            shape, start = self.prompt(start, end, output)
            yield shape

    def first(self, rows: int) -> int:
        """How many of the ``rows`` that a prompt alone has left its next step takes."""
        return first_rows(rows, self.chunks)

    @property
    def first_chunks(self) -> tuple[int, ...]:
        """Rows of steps that do not end the prompt that they take alone."""
        whole = self.chunks[-1]
        shorter = (chunk for chunk in self.chunks[:-1] if self.first(chunk + 1) == chunk)
        return (*shorter, whole)

    def catch_up(self, start: int, end: int) -> tuple[StepShape, int]:
        """The shape of the first step that passes the tokens from ``start`` to ``end`` through the
        draft model alone, and where it ends. All but long gaps have the same number of rows."""
        rows, most = self._chunk(CATCH_UP), self.chunks[-1]
        rows = rows if end - start <= 4 * rows else most
        end = min(end, start + rows)
        keys = self.keys(end)
        return StepShape(rows, keys, Output.NONE, prompt=rows, draft_only=True), end

    def of_batch(
        self, batch: Batch, length: int, output: Output, grain: Grain = Grain.COARSE
    ) -> StepShape:
        """The shape of one step of a batch, after which its longest sequence has ``length`` tokens.
        Its segments fit the largest chunk.

        Where there is more than one segment, rows are rounded up by the ``grain``: there are many
        combinations.
        """
        segments = batch.segments
        if not segments:
            rows = len(batch.decode) + sum(batch.drafts)
            return self.decode(rows, length, output, drafted=any(batch.drafts))
        if not batch.choosing:
            output = Output.NONE
        scored = scored_bucket(batch.scored, self.chunks[-1])
        if not batch.decode and len(segments) == 1:
            shape = self._of_one_prompt(segments[0].start, segments[0].end, length, output)
            return replace(shape, scored=scored)
        rows = self.segment_rows(segments)
        if grain is Grain.COARSE:
            rows = next(c for c in COARSE_CHUNKS if c >= rows)
        prompt = self._chunk(rows)
        if grain is Grain.FINE:
            prompt = min(prompt, fine_chunk(rows))
        decode, outputs = (self._rounded(len(of), grain) for of in (batch.decode, batch.choosing))
        most = min(self.rows, ceil_div(prompt, self.alignment))
        rows, walk = decode + prompt, self.walked(decode + prompt, [s.end for s in segments])
        # without answers only the last layer's output rows depend on them: one graph serves all
        few = batch.decode or (rows <= MAX_BATCH and not walk.count)
        keys = self.keys(length, 2) if few else self.lengths[-1]
        shape = StepShape(rows, keys, output, prompt=prompt, walk=walk, scored=scored)
        return replace(shape, outputs=max(1, outputs), segments=most)

    def _of_one_prompt(self, start: int, end: int, length: int, output: Output) -> StepShape:
        """The shape of a step for the tokens from ``start`` to ``end`` of a sequence, in the bucket
        of ``length`` keys where it does not walk and its launches depend on that."""
        rows, begins = self._chunk(end - start), self.begin_apart and start == 0
        walk = NO_BLOCKS if begins else self.walked(rows, [end])
        is_longest = walk.count or (self.one_length and rows > MAX_BATCH)
        keys = self.lengths[-1] if is_longest else self.keys(length, 2)
        return StepShape(rows, keys, output, prompt=rows, begins=begins, walk=walk)

    def fine(self, shape: StepShape, rows: int, grain: Grain = Grain.FINE) -> StepShape:
        """The shape of a step with one prompt alone, of ``rows`` rows, with as little padding as
        the ``grain`` says where that is faster."""
        whole = shape.walk.count or shape.draft_only or shape.rows <= WHOLE_CHUNK
        if whole or grain is Grain.COARSE:
            return shape
        rows = min(shape.rows, fine_chunk(rows, grain=8 if grain is Grain.FINE else MIDDLE_GRAIN))
        return replace(shape, rows=rows, prompt=rows)

    def walked(self, rows: int, lengths: Sequence[int]) -> Blocks:
        """What the prompts of a step of this many rows walk over, to these lengths."""
        if self.walk is None or rows <= MAX_BATCH:
            return NO_BLOCKS
        return self.walk.blocks(lengths)

    def segment_rows(self, segments: Sequence[Segment]) -> int:
        """Rows of prompts that segments take."""
        *first, last = (s.end - s.start for s in segments)
        return sum(self.alignment * ceil_div(n, self.alignment) for n in first) + last

    def rows_of(self, batch: Batch, shape: StepShape, lasts: Sequence[int]) -> StepRows:
        """The rows of a step with prompts; ``lasts`` are the positions of the decoded tokens."""
        sequence = np.full(shape.rows, batch.segments[0].sequence, np.uint32)
        position = np.full(shape.rows, IDLE, np.uint32)
        sequence[: len(batch.decode)] = batch.decode
        position[: len(batch.decode)] = lasts
        bounds = np.full((shape.segments, 2), shape.prompt, np.uint32)
        starts = self._starts(batch, shape)
        for number, (row, segment) in enumerate(zip(starts, batch.segments, strict=True)):
            end = row + segment.end - segment.start
            sequence[row:end] = segment.sequence
            position[row:end] = np.arange(segment.start, segment.end)
            bounds[number] = row - shape.decode, end - shape.decode
        if not shape.walk.count or self.walk is None:
            return StepRows(sequence, position, bounds)
        begin, ends = np.zeros(shape.prompt, np.uint32), [s.end for s in batch.segments]
        for row, key in zip(starts, self.walk.begins(ends), strict=True):
            begin[row - shape.decode :] = key
        units = self.walk.units(shape.walk.tokens, [(s.sequence, s.end) for s in batch.segments])
        return StepRows(sequence, position, bounds, begin, units)

    def choosing_rows(self, batch: Batch, shape: StepShape) -> list[int]:
        """The rows of `Batch.choosing` in a step with prompts."""
        starts = zip(self._starts(batch, shape), batch.segments, strict=True)
        ends = [row + s.end - s.start - 1 for row, s in starts if s.chooses]
        return [*range(len(batch.decode)), *ends]

    def scored_rows(self, batch: Batch, shape: StepShape) -> Words:
        """The numbers of the scored rows of a step, (n,) u32."""
        starts = zip(self._starts(batch, shape), batch.segments, strict=True)
        rows = [np.arange(row, row + s.scored, dtype=np.uint32) for row, s in starts]
        return np.concatenate(rows)

    def _starts(self, batch: Batch, shape: StepShape) -> list[int]:
        """The first row of each segment."""
        row, starts = shape.decode, []
        for segment in batch.segments:
            starts.append(row)
            row += self.alignment * ceil_div(segment.end - segment.start, self.alignment)
        return starts

    def _chunk(self, rows: int) -> int:
        return next((c for c in self.chunks if c >= rows), self.chunks[-1])

    def _rounded(self, rows: int, grain: Grain) -> int:
        """Rows that choose a token in a step with several segments."""
        if grain is Grain.COARSE:
            return min(self.rows, next(c for c in (*COARSE_ROWS, self.rows) if c >= rows))
        if not rows:
            return 0
        rows = max(FINE_ROWS, row_bucket(rows))
        if grain is Grain.MIDDLE:
            rows = next((c for c in COMMON_ROWS if c >= rows), rows)
        return min(self.rows, rows)
