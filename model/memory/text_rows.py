"""Device memory of steps of whole texts: their rows, and the keys and values of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.families.config import Config
from urdir.model.memory.cache_shape import CachedLayer, CacheShape
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.memory.workspace import aligned
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.scores import Scores

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream

Words = npt.NDArray[np.uint32]
Places = npt.NDArray[np.intp]


class TextKeys(Owner):
    """The keys and values of the rows of a step: every layer has the same memory, for its own turn.

    `LayerCaches` of one sequence of ``rows`` places.
    """

    def __init__(self, device: Device, config: Config, rows: int, dtype: KvDtype) -> None:
        layers = {
            index: CachedLayer(
                KvLayout(
                    1,
                    mixer.kv_heads,
                    rows,
                    mixer.key_dim,
                    dtype,
                    value_dim=0 if mixer.value_dim == mixer.key_dim else mixer.value_dim,
                ),
                0,
            )
            for index, mixer in enumerate(config.attentions)
        }
        self.shape = CacheShape(layers, tuple(layers), 1, rows)
        self.layout = self.shape.layout
        sizes = {
            name: max(layer.arrays[name].nbytes for layer in layers.values())
            for name in ("keys", "values")
        }
        self._arena = device.arena(sizes, "keys of a layer")

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._arena.nbytes

    def arguments(self, layer: int) -> dict[str, Slice]:
        """See `LayerCaches.arguments`."""
        arrays = self.shape.layers[layer].arrays
        return {
            f"{name[0]}_cache": self._arena[name].slice(0, of.nbytes) for name, of in arrays.items()
        }

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._arena.close()


@dataclass(frozen=True, slots=True)
class TextRowsShape:
    """Steps of up to ``rows`` rows of up to ``texts`` texts, with attention of some ``kinds``
    (`RowsOfTexts`). ``padding``: a token that the table of positions does not count, and its row
    there."""

    rows: int
    texts: int
    kinds: tuple[Scores, ...]
    padding: tuple[int, int] | None = None

    def sizes(self) -> dict[str, int]:
        """Bytes of the parts of the allocation: the sequence of each row, and all that is written
        for a step."""
        return {"sequence": 4 * self.rows, "step": self.step_nbytes(self.rows, self.texts)}

    def spans(self, rows: int, texts: int) -> dict[str, tuple[int, int]]:
        """The offset and bytes of each part that is written for a step of this many rows and texts,
        side by side, so that one copy writes all."""
        names = ["tokens", "types", "position", "slot"]
        names += [f"{end} {i}" for i in range(len(self.kinds)) for end in ("begin", "last")]
        names += ["place"] * (self.padding is not None)
        sizes = dict.fromkeys(names, 4 * rows) | {"segment": 8 * texts, "picked": 4 * texts}
        spans, offset = {}, 0
        for name, nbytes in sizes.items():
            spans[name] = offset, nbytes
            offset += aligned(nbytes)
        return spans

    def step_nbytes(self, rows: int, texts: int) -> int:
        """Bytes of these parts."""
        return _end(self.spans(rows, texts))

    def parts(self, arena: Mapping[str, Slice], rows: int, texts: int) -> dict[str, Slice]:
        """What a step of this many rows and texts reads, by name, in an ``arena`` of these
        `sizes`."""
        spans = self.spans(rows, texts).items()
        parts = {name: arena["step"].slice(*span, name) for name, span in spans}
        return parts | {"sequence": arena["sequence"].slice(0, 4 * rows)}


class TextRows(Owner):
    """The rows of the next step of texts. Writes are queued on ``stream``.

    ``tokens``, ``types`` and ``position`` (rows,) u32, the last in each text; with `padding`
    ``place`` (rows,) u32, the rows of the table of positions; ``begin i`` and
    ``last i`` (rows,) u32, the bounds of the attention of kind i; ``segment`` (texts, 2) u32, the
    rows of each text; ``picked`` (texts,) u32, one row of each. Of padding rows and texts all are
    `IDLE`, but tokens and types 0. Texts that are sources have the ``slot`` (rows,) u32 of a
    sequence. The ``sequence`` (rows,) u32 of all rows is 0.
    """

    def __init__(self, device: Device, shape: TextRowsShape, stream: Stream) -> None:
        self.shape = shape
        most = shape.step_nbytes(shape.rows, shape.texts)
        with ExitStack() as owners:
            self._arena = owners.enter_context(device.arena(shape.sizes(), "rows of texts"))
            self._writes = owners.enter_context(QueuedWrites(device, stream, most))
            self._arena["sequence"].fill(0)
            self._owners = owners.pop_all()

    def parts(self, rows: int, texts: int) -> dict[str, Slice]:
        """What a step of this many rows and texts reads, by name."""
        return self.shape.parts(self._arena, rows, texts)

    def write(
        self,
        texts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        rows: int,
        count: int,
        *,
        last: bool = False,
        seconds: Sequence[int] = (),
        slots: Sequence[int] = (),
        picked: Sequence[int] = (),
    ) -> None:
        """Make these texts the rows of a step of ``rows`` rows and ``count`` texts; the row that is
        picked of each is its first one, or the ``last``, or in all these are the ``picked`` ones.
        Tokens have type 1 from number ``seconds`` of their text on, before it type 0. Sources have
        ``slots``."""
        spans = self.shape.spans(rows, count)
        words = np.full(_end(spans) // 4, IDLE, np.uint32)
        into = {
            name: words[offset // 4 : (offset + nbytes) // 4]
            for name, (offset, nbytes) in spans.items()
        }
        lengths = np.array([len(text) for text in texts])
        ends = np.cumsum(lengths)
        starts = ends - lengths
        of_rows = [np.repeat(of, lengths) for of in (starts, ends)]
        live = int(ends[-1])
        tokens, places = into["tokens"][:live], np.arange(live) - of_rows[0]
        np.concatenate(texts, out=tokens, casting="unsafe")
        into["position"][:live] = places
        into["types"][:live] = places >= np.repeat(seconds or lengths, lengths)
        for name in ("tokens", "types"):
            into[name][live:] = 0
        if self.shape.padding is not None:
            into["place"][:live] = self._places(tokens, places, of_rows[0])
        for number, kind in enumerate(self.shape.kinds):
            bounds = kind.bounds(*of_rows)
            into[f"begin {number}"][:live], into[f"last {number}"][:live] = bounds
        into["segment"][: 2 * len(texts)] = np.stack([starts, ends], axis=1).reshape(-1)
        of_each = ends - 1 if last else starts
        of_each = np.asarray(picked) if len(picked) else of_each
        into["picked"][: len(of_each)] = of_each
        if slots:
            into["slot"][:live] = np.repeat(slots, lengths)
            into["slot"][live:] = 0
        self._writes.write(self._arena["step"], words)

    def _places(self, tokens: Words, positions: Places, starts: Places) -> Places:
        """The rows of the table of positions, for tokens of texts that begin in some rows."""
        assert self.shape.padding is not None
        padding, place = self.shape.padding
        is_padding = tokens == padding
        before = np.cumsum(is_padding) - is_padding
        return np.where(is_padding, place, positions - (before - before[starts]))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owners.close()


def _end(spans: Mapping[str, tuple[int, int]]) -> int:
    """Where the last of some spans ends."""
    return max(map(sum, spans.values()))
