"""Files that have their name once they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from urdir.model.errors import ModelError


@contextmanager
def whole_file(path: Path, what: str = "") -> Iterator[Path]:
    """Where to write what becomes the file ``path`` at the end; after a failure, or an interrupt,
    there is what was there before. Devices and pipes are written as they are.

    Raises ModelError, with ``what`` ("--output ") before the name, where it cannot be written.
    """
    is_special = (path.exists() and not path.is_file()) or path.is_relative_to("/dev")
    target = path if is_special else path.resolve()  # of a link what it leads to
    part = target if is_special else target.with_name(f"{target.name}.part")
    try:
        yield part
        if not is_special:
            os.replace(part, target)
    except OSError as cause:
        why = cause.strerror or str(cause)
        if "requested" in why:  # numpy says only how many values were written
            why = f"{why}: is the disk full?"
        raise ModelError(f"{what}{path}: cannot be written: {why}") from cause
    finally:
        if not is_special:
            with suppress(OSError):  # there is none, or none could be
                part.unlink()
