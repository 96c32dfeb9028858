"""Quantising on the device: floats to blocks, before they are repacked or written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from urdir.driver.launch import launch, pack
from urdir.ptxgen.kernels.quantise import Quantise
from urdir.ptxgen.kernels.quantise_rows import QuantiseRows

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.module import LoadedKernel
    from urdir.driver.stream import Stream
    from urdir.ptxgen.weights.format import Format
    from urdir.ptxgen.weights.layout import Layout

_ALIGNMENT = 256  # of blocks behind their floats


@dataclass(frozen=True, slots=True)
class FloatRows:
    """Bytes of rows of the type ``format``, to be quantised on the device; a slice reads them."""

    format: Format
    data: Any


def can_quantise(fmt: Format) -> bool:
    """Whether the device makes blocks of this type."""
    return fmt.name in Quantise.types + QuantiseRows.types


def quantise_spec(fmt: Format, floats: Format, rows: int, cols: int) -> Quantise | QuantiseRows:
    """The kernel that makes blocks of (rows, cols) floats; its text is that of any ``rows``."""
    made: type[Quantise | QuantiseRows] = Quantise if fmt.name in Quantise.types else QuantiseRows
    return made(fmt, floats, rows, cols)


@dataclass(frozen=True, slots=True)
class Quantising:
    """A loaded kernel that makes blocks of ``format`` of some rows of a matrix of ``floats``."""

    loaded: LoadedKernel
    format: Format
    floats: Layout

    def room(self, rows: int) -> int:
        """Bytes of rows and their blocks."""
        spec = quantise_spec(self.format, self.floats.format, rows, self.floats.cols)
        return self._begin(rows) + spec.nbytes(spec.param("y"))

    def _begin(self, rows: int) -> int:
        return -(-rows * self.floats.source_row_nbytes // _ALIGNMENT) * _ALIGNMENT

    def queue(self, rows: int, staged: Slice, stream: Stream) -> Slice:
        """Queue the making of blocks of the rows at the start of ``staged``; they come behind
        them."""
        spec = quantise_spec(self.format, self.floats.format, rows, self.floats.cols)
        blocks = staged.slice(self._begin(rows), spec.nbytes(spec.param("y")))
        args: dict[str, Any] = {"source": staged, "y": blocks}
        if isinstance(spec, Quantise):
            args["blocks"] = spec.blocks
        launch(self.loaded, pack(spec, args), stream)
        return blocks
