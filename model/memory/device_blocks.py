"""Blocks of a file's rows, quantised on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.files.requantise import made_blocks
from urdir.model.memory.quantising import Quantising, can_quantise, quantise_spec
from urdir.model.owner import Owner
from urdir.ptxgen.weights.formats import FORMATS, format_of
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Buffer


class DeviceBlocks(Owner):
    """Blocks made by the device where it can, else by the processor; a `MakeBlocks`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.create_stream("quantising")
        self._staging: Buffer | None = None

    def __call__(
        self, rows: npt.NDArray[np.uint8], layout: Layout, type_id: int
    ) -> npt.NDArray[np.uint8]:
        """Make the blocks of some rows."""
        fmt = format_of(type_id)
        if not can_quantise(fmt):
            return made_blocks(rows, layout, type_id)
        if not layout.format.is_float:
            rows = layout.unpack(layout.pack(rows)).reshape(-1).view(np.uint8)
            layout = Layout(FORMATS["F32"], layout.rows, layout.cols)
        loaded = self._device.load(quantise_spec(fmt, layout.format, layout.rows, layout.cols))
        quantising = Quantising(loaded, fmt, layout)
        room = quantising.room(layout.rows)
        if self._staging is None or self._staging.nbytes < room:
            self.free()
            self._staging = self._device.allocate(room, "quantising")
        self._staging.upload(np.ascontiguousarray(rows))
        staged = self._staging.slice(0, room)
        blocks = quantising.queue(layout.rows, staged, self._stream)
        self._stream.synchronize()
        return blocks.download(np.uint8)

    def free(self) -> None:
        """Free the staging memory."""
        if self._staging is not None:
            self._staging.close()
        self._staging = None

    def close(self) -> None:
        """Free the memory and the stream. Idempotent."""
        self.free()
        self._stream.close()
