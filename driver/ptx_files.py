"""PTX in files: edited text in place of what a kernel generates, and a folder of what was compiled.

Files are named by the module key, ``<key>.ptx``; whatever else lies in a folder is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from urdir.driver.errors import DriverError


def to_stderr(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


class PtxFiles:
    """Two folders, either of which may be None, for `Device.open` and `Engine.open`.

    A kernel whose key names a file in ``override`` is compiled from that file's text. ``dump`` gets
    the PTX and the cubin of every kernel that is loaded. ``report`` receives each override once
    when it is used, and the unused ones when a device closes; as a context manager, which may
    serve several devices, at its own end instead. Raises DriverError for an ``override`` that is no
    folder and a ``dump`` that cannot be made.
    """

    def __init__(
        self,
        override: str | os.PathLike[str] | None = None,
        dump: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] = to_stderr,
    ) -> None:
        self.override = None if override is None else Path(override)
        self.dump = None if dump is None else Path(dump)
        self.report = report
        self._used: set[str] = set()
        self._is_shared = False
        if self.override is not None and not self.override.is_dir():
            raise DriverError(f"PTX override: there is no folder {self.override}")
        if self.dump is not None:
            try:
                self.dump.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise DriverError(f"PTX dump: cannot make {self.dump}: {exc.strerror}") from exc

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the files of ``override`` that took the place of generated text."""
        return tuple(sorted(self._used))

    def overriding(self, key: str) -> str | None:
        """The text to use in place of the module ``key``'s, reported; or None.

        Raises DriverError for a file that cannot be read.
        """
        if self.override is None:
            return None
        path = self.override / f"{key}.ptx"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as exc:
            self._used.add(path.name)  # asked for, so that it is not reported as idle, too
            raise DriverError(f"PTX override {path} cannot be read: {exc}") from exc
        if path.name not in self._used:
            self._used.add(path.name)
            self.report(f"PTX override: {path} is used instead of the generated text")
        return text

    def write(self, key: str, ptx: str, cubin: bytes | None) -> None:
        """Write a module's PTX and machine code (None: there is none, on the emulator) to ``dump``,
        if that is wanted. Raises DriverError where that fails.
        """
        if self.dump is None:
            return
        try:
            (self.dump / f"{key}.ptx").write_text(ptx, encoding="utf-8")
            if cubin is not None:
                (self.dump / f"{key}.cubin").write_bytes(cubin)
        except OSError as exc:
            raise DriverError(f"PTX dump: cannot write to {self.dump}: {exc.strerror}") from exc

    def device_closed(self) -> None:
        """Report what was not used, unless other devices may still use it."""
        if not self._is_shared:
            self._report_unused()

    def __enter__(self) -> Self:
        self._is_shared = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_shared = False
        self._report_unused()

    def _report_unused(self) -> None:
        """Report the files of ``override`` that no kernel's key named: edits without effect."""
        if self.override is None or not self.override.is_dir():
            return
        unused = sorted({path.name for path in self.override.glob("*.ptx")} - self._used)
        if unused:
            self.report(
                f"PTX override: {len(unused)} of the files in {self.override} were not used, such "
                f"as {unused[0]}: no kernel that was loaded has that key (it changes with fields, "
                "target and version)"
            )
