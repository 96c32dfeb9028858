"""The rows of operations in device memory: the sequence and the position of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

#: The sequence and the position of a row.
Pair = tuple[int, int]
_PROMPT = ("prompt sequence", "prompt position")


class PlacedRows:
    """Rows in ``memory`` (uint32): of each layer those of its last operation, which are written
    only where they have changed, and of a prompt of any layer."""

    def __init__(self, memory: Mapping[str, Slice]) -> None:
        self._memory = memory
        self._known: dict[int, list[Pair]] = {}  # by layer; what is missing is not known

    @staticmethod
    def sizes(layout: KvLayout, layers: int) -> dict[str, int]:
        """Bytes of the rows of all layers."""
        names = [name for layer in range(layers) for name in _names(layer)]
        return dict.fromkeys(names, 4 * layout.sequences) | dict.fromkeys(
            _PROMPT, 4 * layout.max_len
        )

    def of(self, layer: int, is_prompt: bool) -> tuple[Slice, Slice]:
        """The sequences and the positions of the rows of a layer's operation."""
        sequences, positions = _PROMPT if is_prompt else _names(layer)
        return self._memory[sequences], self._memory[positions]

    def place(self, layer: int, pairs: list[Pair]) -> None:
        """Write the rows of a layer, unless it has them. Raises CudaError."""
        if self._known.get(layer) != pairs:
            self._known.pop(layer, None)
            self._write(self.of(layer, is_prompt=False), pairs)
            self._known[layer] = pairs

    def place_prompt(self, sequence: int, start: int, tokens: int) -> None:
        """Write the rows of a prompt from position ``start`` on. Raises CudaError."""
        pairs = [(sequence, start + i) for i in range(tokens)]
        self._write(self.of(0, is_prompt=True), pairs)

    def advance(self, layer: int) -> None:
        """The device has moved the positions of a layer on by one."""
        self._known[layer] = [(sequence, at + 1) for sequence, at in self._known[layer]]

    def forget(self) -> None:
        """Launches have failed: no row is known."""
        self._known.clear()

    @staticmethod
    def _write(memory: tuple[Slice, Slice], pairs: Sequence[Pair]) -> None:
        table = np.ascontiguousarray(np.array(pairs, np.uint32).T)
        for part, values in zip(memory, table, strict=True):
            part.upload(values)


def _names(layer: int) -> tuple[str, str]:
    return f"sequence.{layer}", f"position.{layer}"
