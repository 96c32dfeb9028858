"""The rows of a step, as plans see them: how many, where they stand, how far they look back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from urdir.model.lower.arguments import without_none
from urdir.model.memory.device_state import ADAPTER_WORDS, DecodeState
from urdir.model.memory.walk import NO_BLOCKS, Blocks
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.recurrent.rows import SEGMENT_ROWS

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.families.config import Config


def state_alignment(config: Config) -> int:
    """The rows at multiples of which segments of prompts begin, so that layers with a state take
    them."""
    return SEGMENT_ROWS if config.recurrents else 1


@dataclass(frozen=True, slots=True)
class RowsWalk:
    """The walk of rows of prompts over ``blocks`` of what is cached (`memory.walk`); in device
    memory ``begin`` (prompt,), as `PrefillBlock` has it, and the ``units`` (n, 4) u32 of
    `CachedTokens`."""

    blocks: Blocks
    begin: Slice
    units: Slice


@dataclass(frozen=True, slots=True)
class RowsOfTexts:
    """What rows of whole texts side by side have: their ``tokens``, the tokens' ``types`` and
    their ``places`` in a table of positions (rows,) u32; ``segment`` (texts, 2) u32, the bounds of
    each text; and for each kind of attention, as `Scores.bounds` of ``kinds`` have them, the first
    and last row that each attends to, (rows,) u32. ``short`` texts have `MOST_TOKENS` tokens at
    most."""

    tokens: Slice
    types: Slice
    places: Slice
    segment: Slice
    kinds: Sequence[Scores]
    bounds: Sequence[tuple[Slice, Slice]]
    short: bool = False

    def of(self, scores: Scores) -> tuple[Slice, Slice]:
        """Bounds of the keys that each row attends to with these scores."""
        return self.bounds[self.kinds.index(bounds_kind(scores))]


def bounds_kind(scores: Scores) -> Scores:
    """The fields of ``scores`` that decide which keys a row attends to."""
    return Scores(window=scores.window, chunk=scores.chunk, causal=scores.causal)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one plan: ``sequence`` and ``position`` (count,) u32 in device memory.

    Each attends to at most ``keys`` keys. The first ones are the next tokens of as many sequences.
    The last ``prompt`` are up to ``segments`` segments of prompts: tokens of one sequence side by
    side. Their bounds are ``segment`` (segments, 2) u32, as `RecurrentRows` has them. Where a
    sequence ``begins`` with them, they are its first tokens, and there are no other rows. Else they
    may ``walk``. Where there are ``drafts``, several rows side by side are of one sequence: its
    last token, and up to this many drafts of those after it. In sessions with drafts ``state_at``
    (sequences,) u32 says how far the states of recurrent layers are (`DraftedStates`). Where there
    are adapters, ``adapter`` and ``adapter_scale`` (sequences,) are those of `LoraShrink`. Rows of
    ``texts`` are all of prompts, at their positions in their texts. Where sequences have sources,
    ``source_last`` (count,) u32 are the last positions of these.
    """

    count: int
    keys: int
    prompt: int
    sequence: Slice
    position: Slice
    segments: int = 0
    segment: Slice | None = None
    begins: bool = False
    walk: RowsWalk | None = None
    drafts: int = 0
    state_at: Slice | None = None
    adapter: Slice | None = None
    adapter_scale: Slice | None = None
    texts: RowsOfTexts | None = None
    source_last: Slice | None = None

    @property
    def attend_to_each_other(self) -> bool:
        """Whether some rows are of one sequence: their keys must be in the cache before."""
        return self.prompt > 0 or self.drafts > 0

    @classmethod
    def of(
        cls,
        state: DecodeState,
        count: int,
        keys: int,
        prompt: int = 0,
        segments: int = 1,
        begins: bool = False,
        walk: Blocks = NO_BLOCKS,
        drafts: int = 0,
    ) -> Rows:
        """``count`` rows of a step in ``state``, the last ``prompt`` of them of prompts, which may
        ``walk``; or with up to ``drafts`` drafts of each sequence among them."""
        more: dict[str, Any] = {"state_at": state["state_at"]} if state.drafts_states else {}
        if state.adapters:
            more |= {name: state[name] for name in ADAPTER_WORDS}
        if state.sources:
            more["source_last"] = state["step_source_last" if prompt else "source_last"]
        if not prompt:
            at = state["sequence"], state["position"]
            return cls(count, keys, 0, *at, drafts=drafts, **more)
        at = state["step_sequence"], state["step_position"]
        way = RowsWalk(walk, state["begin"], state["units"]) if walk.count else None
        return cls(count, keys, prompt, *at, segments, state["segment"], begins, way, **more)

    @classmethod
    def of_scored(cls, state: DecodeState, sequence: Slice, position: Slice, keys: int) -> Rows:
        """Some scored rows of a step in ``state``, after its layers."""
        adapters: dict[str, Any] = {}
        if state.adapters:
            adapters = {name: state[name] for name in ADAPTER_WORDS}
        return cls(sequence.nbytes // 4, keys, 0, sequence, position, **adapters)

    @property
    def decode(self) -> int:
        """Number of decoded rows."""
        return self.count - self.prompt

    def split(self) -> tuple[Rows, Rows]:
        """The decoded rows, and the rows of prompts."""
        first = replace(self, count=self.decode, prompt=0, segments=0, segment=None, walk=None)
        at, nbytes = 4 * self.decode, 4 * self.prompt
        rest = replace(
            self,
            count=self.prompt,
            sequence=self.sequence.slice(at, nbytes),
            position=self.position.slice(at, nbytes),
            source_last=self.source_last and self.source_last.slice(at, nbytes),
        )
        return first, rest

    @property
    def parts(self) -> tuple[tuple[int, Rows], ...]:
        """The two kinds of rows, without an empty one, each with the number of its first row."""
        if not self.decode or not self.prompt:
            return ((0, self),)
        first, rest = self.split()
        return (0, first), (first.count, rest)

    @property
    def arguments(self) -> dict[str, Slice]:
        """Arguments of kernels that work by row."""
        return {"sequence": self.sequence, "position": self.position}

    @property
    def recurrent_arguments(self) -> dict[str, Slice]:
        """Arguments of kernels that advance states: as `arguments`, and the segments of prompts."""
        return {**self.arguments, **without_none(segment=self.segment, state_at=self.state_at)}


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of a step with prompts whose results are wanted: their numbers ``index`` (count,)
    u32, in device memory; ``rows`` are these rows alone, as a decode step has them."""

    index: Slice
    rows: Rows

    @classmethod
    def of(cls, state: DecodeState, count: int, keys: int) -> OutputRows:
        """The first ``count`` output rows."""
        return cls(state["output_row"], Rows.of(state, count, keys))
