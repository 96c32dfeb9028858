"""What a draft takes on the device beside its weights: a cache, intermediates, its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.memory.workspace import WorkspaceShape, kept_shape
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.spec import ceil_div

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream
    from urdir.model.families.config import Config
    from urdir.model.memory.cache_shape import CacheShape
    from urdir.model.memory.draft_model import DraftModel

Words = npt.NDArray[np.uint32]

#: The stream before a layer of a draft, and after it.
STREAM, OTHER_STREAM = "stream", "other stream"


def draft_workspace(
    config: Config,
    cache: CacheShape,
    rows: int,
    chunk: int,
    sm_count: int,
    *,
    exact: bool,
    widths: Mapping[str, int],
    of_drafts: Mapping[str, int] = MappingProxyType({}),
) -> WorkspaceShape:
    """What outlives the launches of a draft, for steps of ``rows`` rows that choose a token and
    ``chunk`` rows of prompts beside them: streams, logits and their ranks, and beside its layers
    (`speculation.draft`) buffers of this many values a row as ``widths`` has by name, and those
    ``of_drafts``, which prompts do not have."""
    # a draft by itself may take two tokens of a sequence at once
    shape = kept_shape(config, cache, rows, chunk, sm_count, exact, drafts=1)
    most = rows + chunk
    width = config.stream_width
    widths = {**widths, STREAM: width, OTHER_STREAM: width}
    own = {name: 4 * width * most for name, width in widths.items()}
    own |= {name: 4 * width * rows for name, width in of_drafts.items()}
    return replace(shape, kept={**shape.kept, **own, **shape.outputs}, outputs={})


def with_draft(
    work: WorkspaceShape,
    draft: DraftModel,
    cache: CacheShape,
    rows: int,
    chunk: int,
    sm_count: int,
    *,
    exact: bool,
) -> WorkspaceShape:
    """What outlives a step of a session whose steps draft as well. Model and draft run one after
    the other, so they have the same buffers, as large as the larger of both needs. Logits are apart
    from the values of a step: the draft keeps what it needs of a step before a token is chosen."""
    shape = (cache, draft.passed * rows, chunk, sm_count)
    own = draft_workspace(
        draft.config, *shape, exact=exact, widths=draft.widths, of_drafts=draft.of_drafts
    )
    kept = {**work.kept, **work.outputs}
    return WorkspaceShape(_most(kept, own.kept), zeroed=_most(work.zeroed, own.zeroed))


def _most(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """The larger of both, by name."""
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b))}


@dataclass(frozen=True, slots=True)
class DraftRowsShape:
    """Rows of a draft's steps: ``rows``, up to ``most`` with those of prompts; ``columns`` tokens
    of each that is drafted from, the last one of the sequence among them."""

    rows: int
    most: int
    columns: int

    @property
    def stride(self) -> int:
        """Words of a column's numbers: kernels take them at 16 bytes."""
        return 4 * ceil_div(self.rows, 4)

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {
            "sequence": 4 * self.most,
            "position": 4 * self.most,
            "token_position": 4 * self.most,
            "segment": 8 * self.rows,
            "numbers": 4 * self.rows,
            "columns": 4 * self.stride * self.columns,
            "drafts": 4 * self.rows * self.columns,
        }


class DraftRows(Owner):
    """The rows of a draft's next step, in device memory; what is written is queued on ``stream``.

    ``sequence`` and ``position`` (most,) u32: their places in the draft's cache;
    ``token_position`` (most,) u32: where their tokens are. ``drafts`` (rows, columns) u32: the last
    token of each row that is drafted from, and what is drafted after it; ``numbers`` (rows,) u32
    are those of the rows, ``columns`` (columns, stride) u32 those of the columns.
    """

    def __init__(self, device: Device, shape: DraftRowsShape, stream: Stream) -> None:
        self.shape = shape
        with ExitStack() as owners:
            self._arena = owners.enter_context(device.arena(shape.sizes(), "draft rows"))
            self._writes = owners.enter_context(QueuedWrites(device, stream))
            self["segment"].fill(0)
            self["drafts"].fill(0)
            self["numbers"].upload(np.arange(shape.rows, dtype=np.uint32))
            columns = np.repeat(np.arange(shape.columns, dtype=np.uint32), shape.stride)
            self["columns"].upload(columns)
            self._owners = owners.pop_all()

    def __getitem__(self, name: str) -> Slice:
        """A part by name."""
        return self._arena[name]

    def write(self, rows: Sequence[tuple[int, int, int]], count: int, *, prompt: bool) -> None:
        """Make (sequence, position, token's position) those of the next step of ``count`` rows; the
        others are idle. Those of a ``prompt`` are one segment."""
        words = np.full((3, count), IDLE, np.uint32)
        words[0] = rows[0][0]
        words[:, : len(rows)] = np.array(rows, np.uint32).T
        for name, values in zip(("sequence", "position", "token_position"), words, strict=True):
            self._writes.write(self[name], values)
        if prompt:
            self._writes.write(self["segment"], np.array([0, len(rows)], np.uint32))

    def write_last(self, tokens: Sequence[int]) -> None:
        """Make ``tokens`` those that rows are drafted from."""
        for row, token in enumerate(tokens):
            at = 4 * row * self.shape.columns
            self._writes.write(self["drafts"], np.array([token], np.uint32), at)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owners.close()


class BlockRows(Owner):
    """The rows of a step that drafts blocks, up to ``most`` of them, in device memory: ``sequence``
    and ``position`` (most,) u32, their places in the draft's cache, ``end`` the last one that they
    attend to; their tokens are those of ``tokens`` (rows, slots) u32 at ``row`` and ``slot``. What
    each proposes is in ``chosen`` (most,) u32. Writes are queued on ``stream``."""

    def __init__(self, device: Device, rows: int, slots: int, most: int, stream: Stream) -> None:
        names = ("sequence", "position", "end", "row", "slot", "chosen")
        sizes = dict.fromkeys(names, 4 * most) | {"tokens": 4 * rows * slots}
        self.rows, self.slots = rows, slots
        with ExitStack() as owners:
            self._arena = owners.enter_context(device.arena(sizes, "block rows"))
            self._writes = owners.enter_context(QueuedWrites(device, stream))
            self._owners = owners.pop_all()

    def __getitem__(self, name: str) -> Slice:
        """A part by name."""
        return self._arena[name]

    def write(
        self, lasts: Sequence[tuple[int, int, int]], mask: int, count: int, *, causal: bool
    ) -> None:
        """Make the blocks after each of the ``lasts`` (sequence, position, token) the rows of the
        next step of ``count``: those of a slot side by side, the others idle."""
        slots = self.slots
        each = np.array(lasts, np.uint32)
        rows = np.arange(count, dtype=np.uint32)
        of, slot = rows % self.rows, rows // self.rows
        used = (of < len(each)) & (slot < slots)
        place = np.where(used, of, 0)
        position = np.where(used, each[place, 1] + slot, IDLE).astype(np.uint32)
        last = np.where(used, each[place, 1] + slots - 1, IDLE).astype(np.uint32)
        tokens = np.full((self.rows, self.slots), mask, np.uint32)
        tokens[: len(each), 0] = each[:, 2]
        words = {
            "sequence": each[place, 0],
            "position": position,
            "end": position if causal else last,
            "row": place.astype(np.uint32),
            "slot": np.where(used, slot, 0).astype(np.uint32),
            "tokens": tokens.reshape(-1),
        }
        for name, values in words.items():
            self._writes.write(self[name], values)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owners.close()
