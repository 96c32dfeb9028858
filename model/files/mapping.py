"""Files as read-only mappings."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from urdir.model.errors import ModelError


def map_file(path: Path, kind: str, error: type[ModelError]) -> memoryview:
    """The bytes of a regular, non-empty file; ``kind`` ("a GGUF file") is for messages.

    Raises ``error`` for anything else.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: not a regular file")
            if status.st_size == 0:
                raise error(f"{path}: the file is empty, not {kind}")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except IsADirectoryError:
        raise error(f"{path}: a directory, not {kind}") from None
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except (OSError, ValueError) as cause:  # ValueError: a NUL byte in the name
        reason = getattr(cause, "strerror", None) or str(cause)
        raise error(f"{path}: cannot be read: {reason}") from None
