"""Zeroed memory that costs nothing until it is touched."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

#: Bytes up to which clearing memory takes less time than mapping it.
_SMALL = 1 << 18
#: Private to the process, where the system makes a difference: a shared map's first writes cost
#: twice as much.
_FLAGS: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)


def zeros(nbytes: int) -> npt.NDArray[Any]:
    """``nbytes`` (at least 1) zero bytes, uint8, at a page's start if they are many.

    Not ``np.zeros``: once a process has freed a large block, the C library takes the next ones from
    its heap and clears them, which took 3 % of the time of tests that load small models.

    Raises MemoryError.
    """
    if nbytes <= _SMALL:
        return np.zeros(nbytes, np.uint8)
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes, **_FLAGS), np.uint8)
    except (OSError, ValueError, OverflowError) as exc:
        raise MemoryError(f"the system has no {nbytes} bytes") from exc
