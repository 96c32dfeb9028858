"""The workspace of a session: room for the values of a step, and what outlives a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.partial_results import PARTIAL, partial_sizes
from urdir.model.memory.scored_rows import AT_ONCE, most_scored
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.argmax import Argmax

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena, Buffer, Slice

#: The stream before the layers of a stage, and after them, for the rank that has the next ones.
RECEIVED, PASSED = "received", "passed"

#: Where the values of a step lie.
_ROOM = "step"


def saved(name: str) -> str:
    """The buffer that keeps the stream under a name."""
    return f"saved {name}"


@dataclass(frozen=True, slots=True)
class WorkspaceShape:
    """Bytes of a workspace: ``room`` for the values of a step, at its start the ``outputs``, which
    are read after the step; buffers that are ``kept``; and those that are ``zeroed``, zeros at
    first, which launches leave so."""

    kept: Mapping[str, int]
    outputs: Mapping[str, int] = field(default_factory=dict)
    zeroed: Mapping[str, int] = field(default_factory=dict)
    room: int = 0

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Bytes of the parts of the allocation."""
        sizes = {**self.kept, **self.zeroed}
        return sizes | ({_ROOM: self.room} if self.room else {})


def kept_shape(
    config: Config,
    cache: CacheShape,
    rows: int,
    chunk: int,
    sm_count: int,
    exact: bool,
    drafts: int = 0,
) -> WorkspaceShape:
    """What outlives a step, in sessions with steps of ``rows`` rows that choose a token and up to
    ``chunk`` rows of prompts beside them: partial results of attention (with ``exact`` arithmetic
    also those of prompts), ranks of tokens, kept streams, and as outputs the logits, as they are
    chosen from and as the model gave them; these have the place of those of scored rows. There is
    no room for the values of a step yet."""
    stream = 4 * config.stream_width * (rows + chunk)
    choosing = max(rows, chunk) if exact else rows
    partial = partial_sizes(config, cache, choosing, sm_count, {1} if exact else {1, 1 + drafts})
    arrived = PARTIAL["arrived"]
    kept = {name: nbytes for name, nbytes in partial.items() if name != arrived}
    kept["ranks"] = 8 * Argmax(n=config.vocab_size).slices * rows
    kept |= {saved(name): stream for name in config.saved_streams}
    if config.stage is not None:
        kept |= {RECEIVED: stream, PASSED: stream}
    logits, scored = (4 * config.vocab_size * n for n in (rows, min(AT_ONCE, most_scored(chunk))))
    return WorkspaceShape(
        kept,
        {"logits": logits, "raw logits": max(logits, scored)},
        {name: nbytes for name, nbytes in partial.items() if name == arrived},
    )


class Workspace(Owner):
    """Memory for the values of a step (``shared``, None for none), where `lower.sheet` places them,
    and beside them buffers by name (``kept``)."""

    def __init__(self, device: Device, shape: WorkspaceShape, name: str = "workspace") -> None:
        with ExitStack() as owners:
            self._arena: Arena = owners.enter_context(device.arena(shape.sizes(), name))
            for zeroed in shape.zeroed:
                self._arena[zeroed].fill(0)
            owners.pop_all()
        self.shared: Slice | None = self._arena.get(_ROOM)
        self.kept: dict[str, Slice] = dict(self._arena)
        self.kept.pop(_ROOM, None)
        offset = 0
        for output, nbytes in shape.outputs.items():
            assert self.shared is not None
            self.kept[output] = self.shared.slice(offset, nbytes, output)
            offset = aligned(offset + nbytes)

    @property
    def buffer(self) -> Buffer:
        """The allocation."""
        return self._arena.buffer

    def __getitem__(self, name: str) -> Slice:
        """A buffer that is kept, or an output."""
        return self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.kept

    def room_for(self, nbytes: int, name: str) -> int:
        """Where the values of a step of that name begin in ``buffer``. Raises ModelError where
        there is too little room."""
        shared = self.shared
        if shared is None or nbytes > shared.nbytes:
            has = 0 if shared is None else shared.nbytes
            raise ModelError(f"{name}: its values take {nbytes:,} bytes, the workspace has {has:,}")
        return shared.offset

    def check_zeroed(self, name: str, nbytes: int) -> None:
        """Raise ModelError for memory that was to be zeros and is not kept."""
        raise ModelError(f"the workspace has no {name!r} of {nbytes:,} bytes, zeros at first")

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._arena.close()


def outputs_nbytes(outputs: Mapping[str, int]) -> int:
    """Bytes of outputs side by side."""
    return sum(map(aligned, outputs.values()))


def aligned(nbytes: int) -> int:
    """The next multiple of an arena's alignment."""
    return -(-nbytes // 256) * 256
