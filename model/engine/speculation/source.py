"""Where drafts come from: launches of a step that propose the next tokens."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol, TypeAlias

from urdir.ptxgen.kernels.speculation.ngram_drafts import NgramDrafts

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.model.engine.batch import StepShape
    from urdir.model.lower.parts import StepParts
    from urdir.model.lower.rows import Rows
    from urdir.model.memory.draft_settings import DraftSettings

#: Launches are appended piece by piece: other work can be done in between.
Pieces: TypeAlias = Generator[None, None, None]


class DraftSource(Protocol):
    """Proposes tokens for the sequences of a step, on the device.

    When its launches run, ``known[s]`` of `DecodeState` says how many ``tokens`` of sequence s are
    valid: the last one is pending. That alone says what was accepted of earlier drafts.
    """

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """Append launches that propose drafts for the rows of a step of ``shape``, in pieces.

        For each row r with ``place[r]`` 0 whose ``position[r]`` is below ``max_len``, of sequence
        s = ``sequence[r]``: up to ``wanted[r]`` tokens at ``tokens[s, known[s]]`` and after it, as
        far as ``max_len`` allows, and their number in ``found[s]``. ``wanted[r]`` is at most
        ``shape.drafts``. The positions of rows are stale: use ``known``.
        """

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """Append launches that keep what later drafts need of the ``rows`` of any step, in pieces:
        they follow the model's layers, whose streams are in the workspace."""

    def begin(self, sequence: int, length: int, p_min: float | None = None) -> None:
        """A sequence begins again, with ``length`` tokens that earlier steps processed. Its drafts
        end before a token less likely than ``p_min`` (None: that of the settings). What is written
        is queued."""


class NgramSource:
    """What followed the latest earlier occurrence of the last tokens: `NgramDrafts`."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""
        state, settings = parts.state, self._settings
        kernel = NgramDrafts(
            *(state.max_len, shape.rows, state.sequences),
            longest=settings.longest,
            shortest=settings.shortest,
            always=settings.chance is not None,
        )
        plan.launch(kernel, "drafts", **{p.name: state[p.name] for p in kernel.params})
        yield

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """Nothing: the tokens are in the state."""
        yield from ()

    def begin(self, sequence: int, length: int, p_min: float | None = None) -> None:
        """Nothing."""
