"""Slots of the keys that a row attends to: the last tokens, and blocks of tokens (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.select_keys import NO_POSITION
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

THREADS = 128


@dataclass(frozen=True)
class BlockSlots(KernelSpec):
    """The slots in a cache of ``layout`` of a row's last ``window`` tokens, in order, and of its
    whole blocks of ``ratio`` tokens, up to ``most`` of them.

    A block's key is in the slot of its last token, in the second head. With ``chosen`` blocks are
    those of ``selected`` (rows, most * ratio + ratio - 1): slots of all tokens of each, in a cache
    of one head, as `SelectKeys` has them. Ratio 0: tokens alone.

    ``slots`` are followed by zeros where the row has fewer. ``last`` is how many there are, less
    one, and ``row`` the row's number: position and sequence of the row in a cache of chosen keys.
    """

    layout: KvLayout
    rows: int
    window: int
    ratio: int = 0
    most: int = 0
    chosen: bool = False

    name = "block_slots"
    limits = limited(rows=GRID_ROWS, window=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        layout, heads = self.layout, 2 if self.ratio else 1
        if layout.kv_heads != heads or not layout.values_in_keys or layout.capacity:
            raise PtxgenError("block_slots: keys of all tokens, and beside them those of blocks")
        if self.ratio < 0 or self.most < 0 or (self.most and not self.ratio):
            raise PtxgenError(f"block_slots: {self.most} blocks of {self.ratio} tokens")
        if self.chosen and not self.most:
            raise PtxgenError("block_slots: none of some blocks is chosen")

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            *self.layout.table_params,
            self.chosen and Param("selected", "u32", ("rows", "tokens"), Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("slots", "u32", ("rows", "width"), Access.OUT),
            Param("last", "u32", ("rows",), Access.OUT),
            Param("row", "u32", ("rows",), Access.OUT),
        )

    @property
    def tokens(self) -> int:
        """Tokens of the selected blocks of a row, and after them."""
        return (self.most + 1) * self.ratio - 1

    @property
    def width(self) -> int:
        """Slots of a row at most."""
        return self.window + self.most

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        slots = np.zeros((self.rows, self.width), np.uint32)
        last = np.full(self.rows, NO_POSITION, np.uint32)
        span = self.layout.page_len or self.layout.places
        for row in np.flatnonzero(inputs["position"] < self.layout.max_len).tolist():
            count = int(inputs["position"][row]) + 1
            sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
            tokens = np.arange(max(0, count - self.window), count)
            found = [self.layout.slots_of(sequence, tokens, table)[0]]
            blocks = min(self.most, count // self.ratio) if self.ratio else 0
            if blocks and self.chosen:
                one = inputs["selected"][row, self.ratio - 1 :: self.ratio][:blocks].astype(
                    np.int64
                )
                found.append(one // span * 2 * span + span + one % span)
            elif blocks:
                ends = np.arange(1, blocks + 1) * self.ratio - 1
                found.append(self.layout.slots_of(sequence, ends, table)[1])
            all_of_row = np.concatenate(found)
            slots[row, : all_of_row.size] = all_of_row
            last[row] = all_of_row.size - 1
        return {"slots": slots, "last": last, "row": np.arange(self.rows, dtype=np.uint32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A full row, the first token of a sequence, a padding row, others at random places."""
        inputs, layout = super().make_inputs(rng), self.layout
        positions = rng.integers(0, layout.max_len, self.rows)
        positions[0] = layout.max_len - 1
        positions[1:3] = (0, layout.max_len + 9)[: self.rows - 1]
        if layout.is_paged:
            inputs["block_table"] = layout.random_table(rng)
        if self.chosen:
            shape = self.rows, self.tokens
            inputs["selected"] = rng.integers(0, layout.slots // 2, shape).astype(np.uint32)
        sequences = rng.integers(0, layout.sequences, self.rows)
        at = {"sequence": sequences, "position": positions}
        return inputs | {name: of.astype(np.uint32) for name, of in at.items()}

    @classmethod
    def examples(cls) -> dict[str, BlockSlots]:
        layout = partial(KvLayout, values_in_keys=True)
        return {
            "tokens": cls(layout(2, 1, 70, 64, "f16"), 4, 20),
            "blocks": cls(layout(2, 2, 300, 64, "f16"), 5, 9, 4, 75),
            "pages": cls(layout(2, 2, 256, 32, "f32", 16, 40), 4, 17, 64, 4),
            "chosen": cls(layout(2, 2, 100, 64, "f32"), 4, 20, 4, 6, chosen=True),
            "chosen in pages": cls(layout(2, 2, 256, 64, "f16", 32, 19), 4, 128, 8, 9, chosen=True),
        }

    def bytes_moved(self) -> int:
        """Slots, and those that are selected."""
        return 4 * self.rows * (self.width + (self.most if self.chosen else 0))
