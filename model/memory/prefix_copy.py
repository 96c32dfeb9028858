"""The pages of a prefix as bytes on the host, read from a cache and written to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from urdir.model.memory.cache_groups import Group

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PrefixBytes:
    """The first ``tokens`` of a sequence, and ``arrays`` of bytes: for every plane of every group
    (pages, bytes of a page), then those of a recurrent state."""

    tokens: tuple[int, ...]
    arrays: list[Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


def read_pages(group: Group, pages: Sequence[int]) -> list[Bytes]:
    """The bytes of pages of a group, for each plane."""
    arrays = []
    for memory, start, nbytes in group.planes():
        rows = np.empty((len(pages), nbytes), np.uint8)
        for row, page in zip(rows, pages, strict=True):
            row[:] = memory.slice(start + page * nbytes, nbytes).download(np.uint8, nbytes)
        arrays.append(rows)
    return arrays


def write_pages(group: Group, pages: Sequence[int], arrays: Sequence[Bytes]) -> None:
    """Write what `read_pages` read to pages, after the queued steps."""
    for (memory, start, nbytes), rows in zip(group.planes(), arrays, strict=True):
        for row, page in zip(rows, pages, strict=True):
            memory.upload(np.ascontiguousarray(row), start + page * nbytes)
