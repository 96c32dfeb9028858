"""Decode state: values that change with every token, in device memory advanced by kernels.

A step processes *rows*, each the token at ``position[r]`` of sequence ``sequence[r]``; the position
``IDLE`` marks a padding row.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.driver.context import close_all
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.memory.scored_rows import SCORED_WORDS, TURNS, ScoredRows, ScoresRead, most_scored
from urdir.model.memory.turns import ALL_GO_ON, Turns
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.sampling import SETTINGS_WORDS, pack_settings
from urdir.ptxgen.kernels.sampling_limits import MOST_LIKELY
from urdir.ptxgen.spec import ceil_div

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream

Words = npt.NDArray[np.uint32]

#: How far the states of a sequence's recurrent layers are where steps have drafts (`PlaceRows`).
STATE_WORDS = ("state_at", "next_state_at")
#: The slot of a sequence's adapter from 1 on (0: none), and its scale (f32).
ADAPTER_WORDS = ("adapter", "adapter_scale")
#: Maximum number of steps of a sequence that the host may lag behind in reading: a power of two.
MAILBOX_SLOTS = 8


def mailbox_slots(drafts: DraftSettings | None) -> int:
    """Maximum number of tokens of a sequence that the host may lag behind in reading: a power of
    two."""
    return MAILBOX_SLOTS << (0 if drafts is None else drafts.most.bit_length())


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of a state: ``sequences`` of up to ``max_len`` tokens, steps of ``rows`` rows of as
    many sequences and ``chunk`` prompt rows, a vocabulary of ``vocab`` tokens. Chunked-context
    prefill may use up to ``units`` units (`memory.walk`). With ``drafts`` there are rows of these
    beside those of the sequences' last tokens; ``states`` says whether layers are recurrent then.
    ``adapters``: sequences may have some. ``sources``: sequences have a source (`SourceText`).
    """

    sequences: int
    max_len: int
    rows: int
    chunk: int
    vocab: int
    units: int = 0
    drafts: DraftSettings | None = None
    states: bool = False
    adapters: bool = False
    sources: bool = False

    @property
    def turns(self) -> bool:
        """Whether sequences may take turns: more than a few, without drafts and sources."""
        return self.drafts is None and not self.sources and self.rows > ALL_GO_ON

    @property
    def slots(self) -> int:
        """How many tokens of a sequence the host may be late in reading: a power of two."""
        return mailbox_slots(self.drafts)

    def sizes(self) -> dict[str, int]:
        """Bytes of every part of the state, by name."""
        return {
            "tokens": 4 * self.sequences * self.max_len,
            "known": 4 * self.sequences,
            "settings": 4 * SETTINGS_WORDS * self.sequences,
            "sequence": 4 * self.rows,
            "position": 4 * self.rows,
            **({"source_last": 4 * self.rows} if self.sources else {}),
            **({"place": 4 * self.rows, "wanted": 4 * self.rows} if self.drafts else {}),
            **({"turn": 4 * self.rows, "waiting": 4} if self.turns else {}),
            "output_row": 4 * self.rows,
            "segment": 8 * self.rows,
            "step_sequence": 4 * (self.rows + self.chunk),
            "step_position": 4 * (self.rows + self.chunk),
            **({"step_source_last": 4 * (self.rows + self.chunk)} if self.sources else {}),
            **({"begin": 4 * self.chunk, "units": 16 * self.units} if self.units else {}),
            **dict.fromkeys(SCORED_WORDS, 4 * self.scored),
            "scored_settings": 4 * SETTINGS_WORDS * TURNS,
            "sampled": 4 * self.rows,
            "masked": 4 * self.rows,
            "masks": 4 * self.rows * ceil_div(self.vocab, 32),
            **dict.fromkeys(self.draft_words, 4 * self.sequences),
            **dict.fromkeys(ADAPTER_WORDS if self.adapters else (), 4 * self.sequences),
        }

    @property
    def scored(self) -> int:
        """Scored rows of a step, at most."""
        return most_scored(self.chunk)

    @property
    def draft_words(self) -> tuple[str, ...]:
        """Names of the words of each sequence that steps with drafts have."""
        if self.drafts is None:
            return ()
        states = STATE_WORDS if self.states else ()
        return "found", "given", *states


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: ``sequence`` and ``position`` (rows,) u32, `IDLE` for padding rows;
    ``segment`` (segments, 2) u32, the bounds of its segments among the prompt rows. In
    chunked-context prefill, ``begin`` (prompt,) and ``units`` (n, 4) u32 are those of
    `PrefillBlock` and `CachedTokens`."""

    sequence: Words
    position: Words
    segment: Words
    begin: Words | None = None
    units: Words | None = None


class DecodeState(Owner):
    """The sequences' tokens, and the rows of the next step.

    ``tokens`` (sequences, max_len) u32: prompts and answers. ``known`` (sequences,) u32: number of
    valid tokens. ``sequence``, ``position``, ``sampled`` (rows,) u32: the rows that choose a token,
    and the chosen tokens. These are all rows of a step without prompts. All rows of a step with
    prompts are ``step_sequence``, ``step_position`` (rows + chunk,) u32; ``segment`` (rows, 2) u32
    bounds the segments of its prompts, ``begin`` (chunk,) and ``units`` (units, 4) u32 describe its
    chunked-context prefill, and ``output_row`` (rows,) u32 are the rows that choose.
    ``settings`` (sequences, SETTINGS_WORDS) u32: sampling settings. Among the choosing rows, those
    marked in ``masked`` (rows,) u32 may take only the tokens whose bits are set in ``masks`` (rows,
    ceil(vocab / 32)) u32. Writes are queued on ``stream``, after the queued steps.

    Page-locked host memory has the result of a step after position p at index p % ``slots``:
    ``mailbox`` (sequences, slots) u32 is the token, ``logprobs`` (sequences, slots, 1 +
    MOST_LIKELY) f32 its log-probability and those of the likeliest tokens, ``likely`` (sequences,
    slots, MOST_LIKELY) u32 these tokens.

    Of scored rows (`ScoredRows`) there are `SCORED_WORDS` (scored,) u32 and ``scored_settings``
    (TURNS, SETTINGS_WORDS) u32; their results are in ``scores``.

    With ``drafts`` there is more (`DraftedRows`): of the rows that choose, ``place`` and ``wanted``
    (rows,) u32, ``found`` and ``given`` (sequences,) u32, the drafts of the device and of the host,
    with recurrent layers `STATE_WORDS` (sequences,) u32, and page-locked ``counts`` (sequences,
    slots) u32. The device then computes the positions of these rows from ``known``; the host says
    which rows have work and which are padding.

    With ``sources`` each row has the last position of its sequence's source, ``source_last``
    (rows,) and ``step_source_last`` (rows + chunk,) u32.

    With ``turns``, after the entries of a step's rows come those of ``waiting`` (1,) u32 sequences
    that have none in it; ``turn`` (rows,) u32 says when a row takes one's place (`Advance`).

    Writes also go to the ``followers``: the states of other ranks, which then choose the same
    tokens.
    """

    def __init__(
        self,
        device: Device,
        shape: StateShape,
        stream: Stream,
        followers: Sequence[DecodeState] = (),
    ) -> None:
        self.sequences = shape.sequences
        self.max_len = shape.max_len
        self.rows = shape.rows
        self.chunk = shape.chunk
        self.slots = shape.slots
        self.drafts = shape.drafts
        self.adapters = shape.adapters
        self.sources = shape.sources
        self.turns = shape.turns
        self._source_last = np.zeros(shape.sequences, np.uint32)
        #: Whether steps have drafts and layers with states.
        self.drafts_states = shape.drafts is not None and shape.states
        self._arena = device.arena(shape.sizes(), "decode state")
        for name, part in self._arena.items():
            if name in ("position", "step_position"):
                part.fill(0xFF)
            else:
                part.fill(0)
        self._writes = QueuedWrites(device, stream)
        self.followers = tuple(followers)
        self._has_masks = False
        letters = shape.sequences * self.slots
        self.mailbox = device.pinned(4 * letters, "mailbox")
        self._letters = self.mailbox.view(np.uint32, letters).data
        self.counts = None if shape.drafts is None else device.pinned(4 * letters, "counts")
        self._counts = None
        if self.counts is not None:
            self._counts = self.counts.view(np.uint32, letters).data
        self.logprobs = device.pinned(4 * letters * (1 + MOST_LIKELY), "log-probabilities")
        self.likely = device.pinned(4 * letters * MOST_LIKELY, "likely tokens")
        self.scored = shape.scored
        self.scores = ScoresRead(device)

    def __getitem__(self, name: str) -> Slice:
        """A part by name."""
        return self._arena[name]

    def write_tokens(self, sequence: int, start: int, tokens: Sequence[int]) -> None:
        """Write ``tokens`` from ``start`` of a sequence, as its last valid ones."""
        values = np.asarray(tokens, np.uint32)
        offset = 4 * (sequence * self.max_len + start)
        self._put("tokens", values, offset)
        self.write_known(sequence, start + len(values))

    def write_known(self, sequence: int, known: int) -> None:
        """Set the number of valid tokens of a sequence; prompts move its states on."""
        self._put("known", np.array([known], np.uint32), 4 * sequence)
        if self.drafts is not None:
            self._put("given", np.zeros(1, np.uint32), 4 * sequence)
        if self.drafts_states:
            self._put("next_state_at", np.array([IDLE], np.uint32), 4 * sequence)

    def write_drafts(self, sequence: int, known: int, drafts: Sequence[int]) -> None:
        """Write drafts of the host after the ``known`` tokens of a sequence, for its next step with
        drafts."""
        self._put("tokens", np.asarray(drafts, np.uint32), 4 * (sequence * self.max_len + known))
        self._put("given", np.array([len(drafts)], np.uint32), 4 * sequence)

    def copy_tokens(self, source: int, target: int, known: int) -> None:
        """Copy a sequence's tokens to another, of which the first ``known`` become valid."""
        nbytes = 4 * self.max_len
        if source != target:
            for state in (self, *self.followers):
                place = state["tokens"].slice(target * nbytes, nbytes)
                place.copy_from(state["tokens"].slice(source * nbytes, nbytes))
        self.write_known(target, known)

    def write_sampling(self, sequence: int, words: Words) -> None:
        """Set the sampling settings of a sequence: (SETTINGS_WORDS,) u32."""
        self._put("settings", words, sequence * words.nbytes)

    def write_adapter(self, sequence: int, slot: int, scale: float) -> None:
        """Give a sequence the adapter in a slot, counted from 1 on, times a scale; 0: none."""
        if self.adapters:
            self._put("adapter", np.array([slot], np.uint32), 4 * sequence)
            words = np.array([scale], np.float32).view(np.uint32)
            self._put("adapter_scale", words, 4 * sequence)

    def set_source(self, sequence: int, length: int) -> None:
        """Rows of a sequence that are written from now on attend to a source of ``length``
        tokens."""
        self._source_last[sequence] = length - 1

    def write_masks(self, masks: Mapping[int, Words]) -> None:
        """Restrict the rows of ``masks``, by number, to the tokens whose bits are set; words
        (ceil(vocab / 32),) u32. Other rows are unrestricted."""
        if not masks and not self._has_masks:
            return
        self._has_masks = True  # even if one of these writes fails
        masked = np.zeros(self.rows, np.uint32)
        masked[list(masks)] = 1
        self._put("masked", masked)
        for row, words in masks.items():
            self._put("masks", words, row * words.nbytes)
        self._has_masks = bool(masks)

    def positions(self) -> dict[int, int]:
        """Sequence -> position of the rows of the next decode step, read from the device."""
        pairs = zip(
            self["sequence"].download(np.uint32),
            self["position"].download(np.uint32),
            strict=True,
        )
        return {int(s): int(p) for s, p in pairs if p != IDLE}

    def chosen(self, sequence: int, position: int) -> int:
        """The token that a completed step chose after ``position``."""
        token: int = self._letters[sequence * self.slots + position % self.slots]
        return token

    def accepted(self, sequence: int, position: int) -> tuple[int, int]:
        """Number of tokens that a completed step with drafts chose from ``position`` on, that of
        the pending token, and number of drafts that it verified."""
        assert self._counts is not None
        word = self._counts[sequence * self.slots + position % self.slots]
        return word & 0xFFFF, word >> 16

    def log_probabilities(
        self, sequence: int, position: int, likely: int
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Log-probabilities of the token that a completed step chose after ``position`` and of the
        ``likely`` likeliest ones with their ids, highest first, at most as many as the sequence's
        settings request. They are those of the model's own distribution (`TokenLogprobs`)."""
        at = sequence * self.slots + position % self.slots
        entries = 1 + MOST_LIKELY
        values = self.logprobs.view(np.float32, entries, 4 * entries * at)
        tokens = self.likely.view(np.uint32, MOST_LIKELY, 4 * MOST_LIKELY * at)
        pairs = zip(tokens[:likely].tolist(), values[1 : 1 + likely].tolist(), strict=True)
        return float(values[0]), tuple(pairs)

    def write_rows(
        self,
        rows: Sequence[tuple[int, int]],
        drafts: Sequence[int] = (),
        given: Container[int] = (),
        turns: Turns[tuple[int, int]] | None = None,
    ) -> None:
        """Make (sequence, position) pairs the rows that choose a token; the rest become padding
        rows. After each pair come as many rows as its sequence has ``drafts``, those of the
        sequences ``given`` by the host. Others take ``turns`` with them, in steps of as many
        rows."""
        self._write(**self._choosing(rows, drafts, given, turns))

    def write_step(self, rows: StepRows, chosen: Sequence[int]) -> None:
        """Make ``rows`` those of the next step, which has prompts; the rows numbered ``chosen``
        choose a token."""
        pairs = [(int(rows.sequence[row]), int(rows.position[row])) for row in chosen]
        count = self.rows + self.chunk
        walk: dict[str, Words] = {}
        if rows.begin is not None and rows.units is not None:
            walk = {"begin": rows.begin, "units": rows.units.reshape(-1)}
        self._write(
            **self._choosing(pairs),
            output_row=_padded(np.array(chosen, np.uint32), self.rows, IDLE),
            segment=rows.segment.reshape(-1),
            step_sequence=_padded(rows.sequence, count, rows.sequence[0]),
            step_position=_padded(rows.position, count, IDLE),
            **self._of_sources("step_source_last", rows.sequence, rows.position, count),
            **walk,
        )

    def write_scored(self, scored: ScoredRows) -> None:
        """Make these the scored rows of the next step."""
        self._write(**scored.words(self.scored))
        words = pack_settings(logprobs=scored.likely)
        self._put("scored_settings", words, scored.turn * words.nbytes)

    def _of_sources(
        self, name: str, sequence: Words, position: Words, count: int
    ) -> dict[str, Words]:
        """The last positions of rows' sources, by that name; nothing without sources."""
        if not self.sources:
            return {}
        last = np.where(position == IDLE, IDLE, self._source_last[sequence])
        return {name: _padded(last.astype(np.uint32), count, IDLE)}

    def _choosing(
        self,
        rows: Sequence[tuple[int, int]],
        drafts: Sequence[int] = (),
        given: Container[int] = (),
        turns: Turns[tuple[int, int]] | None = None,
    ) -> dict[str, Words]:
        waiting = () if turns is None else turns.waiting
        pairs = np.asarray([*rows, *waiting], np.uint32).reshape(-1, 2)
        more: dict[str, Words] = {}
        if self.drafts is not None:
            counts = np.asarray(drafts or [0] * len(pairs), np.uint32)
            pairs = np.repeat(pairs, 1 + counts, axis=0)
            places = [np.arange(1 + count, dtype=np.uint32) for count in counts]
            place = np.concatenate(places) if places else np.zeros(0, np.uint32)
            of_device = [0 if int(sequence) in given else 1 for sequence in pairs[:, 0]]
            wanted = np.repeat(counts, 1 + counts) * np.array(of_device, np.uint32)
            more["place"] = _padded(place, self.rows, IDLE)
            more["wanted"] = _padded(wanted, self.rows, 0)
        if self.turns:
            first, count = (0, self.rows) if turns is None else (turns.first, len(rows))
            turn = (np.arange(count) - first) % count
            more["turn"] = _padded(turn.astype(np.uint32), self.rows, 0)
            more["waiting"] = np.array([len(waiting)], np.uint32)
        return {
            "sequence": _padded(pairs[:, 0], self.rows, pairs[0, 0] if rows else 0),
            "position": _padded(pairs[:, 1], self.rows, IDLE),
            **self._of_sources("source_last", pairs[:, 0], pairs[:, 1], self.rows),
            **more,
        }

    def _write(self, **parts: Words) -> None:
        """Write adjacent parts, from their beginnings, in one copy: each copy costs the host some
        10 us."""
        places = {name: self[name].offset for name in parts}
        start, stop = min(places.values()), max(places[n] + 4 * len(parts[n]) for n in parts)
        words = np.zeros((stop - start) // 4, np.uint32)
        for name, values in parts.items():
            at = (places[name] - start) // 4
            words[at : at + len(values)] = values
        for state in (self, *self.followers):
            state._writes.write(state._arena.buffer, words, start)

    def _put(self, name: str, words: Words, offset: int = 0) -> None:
        """Write to a part."""
        for state in (self, *self.followers):
            state._writes.write(state[name], words, offset)

    def close(self) -> None:
        """Free the state. Idempotent."""
        counts = [] if self.counts is None else [self.counts]
        likely = self.logprobs, self.likely, self.scores
        close_all([self._writes, self._arena, self.mailbox, *counts, *likely])


def _padded(values: Words, count: int, rest: int) -> Words:
    """``values`` padded with ``rest`` to ``count``; a padding row's sequence must exist too."""
    padded = np.full(count, rest, np.uint32)
    padded[: len(values)] = values
    return padded
