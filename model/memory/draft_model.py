"""A draft model beside a session's: what it takes of the session's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_settings import DraftSettings


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """The draft of a session's model.

    ``config`` describes its layers, whose keys and values have the positions and pages of the
    model's. Its weights are in ``file``; None: they are the model's. ``widths`` are values a row of
    intermediates that it has beside its layers, ``of_drafts`` of those that rows of prompts do not
    have. Of each sequence ``held`` values are kept for each
    of the last positions (0: nothing), and while it rests the vectors of ``streams``, buffers of
    the model's workspace, each of ``stream`` values. ``each`` rows are of a sequence in the pass
    that begins a draft, or a block of ``slots``. ``mapped`` tokens of its own are mapped to the
    model's (0: they are the same); heads of the model itself draft its first ``tokens`` alone
    (0: all). With ``shares_cache`` its layers read the keys and values of the model's.
    """

    config: Config
    file: ModelFile | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    of_drafts: Mapping[str, int] = field(default_factory=dict)
    held: int = 0
    streams: tuple[str, ...] = ()
    stream: int = 0
    each: int = 1
    mapped: int = 0
    slots: int = 1
    tokens: int = 0
    shares_cache: bool = False

    @property
    def passed(self) -> int:
        """Rows of a sequence in the largest pass of a draft."""
        return max(self.each, self.slots)

    def state_sizes(self, sequences: int, rows: int, drafts: DraftSettings) -> dict[str, int]:
        """Bytes of what is kept from step to step, by name, for steps of ``rows`` rows with
        ``drafts``."""
        made = 4 * self.each * rows
        sizes = {"draft_sequence": made, "draft_position": made, "token_position": made}
        sizes |= {"until": 4 * rows, "map": 4 * self.mapped}
        if self.shares_cache:
            sizes["seen_position"] = made
        if self.slots > 1:
            sizes |= {f"block {name}": 4 * self.slots * rows for name in BLOCK_ROWS}
        if drafts.p_min:
            sizes |= {"p_min": 4 * sequences, "probability": 4 * self.slots * rows}
        if self.held:
            sizes["begun"] = 4 * sequences
            sizes["held"] = 4 * sequences * held_slots(drafts.most) * self.held
        if self.streams and not self.shares_cache:
            sizes["ring"] = 4 * sequences * RING_SLOTS * self.stream * len(self.streams)
            sizes["ring_at"] = 4 * sequences * RING_SLOTS
        return {name: size for name, size in sizes.items() if size}


#: Positions of a sequence whose streams are kept while a draft rests: its keys of earlier ones are
#: made without them.
RING_SLOTS = 32
#: What is known of each row of a block, see `BlockRows`.
BLOCK_ROWS = ("sequence", "position", "end", "token", "number", "first")


def held_slots(most: int) -> int:
    """Positions of a sequence of which hidden states are kept, a power of two: those of a step with
    ``most`` drafts."""
    return 1 << most.bit_length()
