"""Device names, parsed without importing the driver, so that flags are checked at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from urdir.driver.emulator.properties import DEFAULT_TARGET
from urdir.driver.errors import DeviceNameError
from urdir.ptxgen.ptx.architecture import FIRST_VERSION, OPENED, number_of


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A parsed device string: ``kind`` is "auto", "cuda" or "emulator"."""

    kind: str
    index: int = 0
    target: str = DEFAULT_TARGET

    @staticmethod
    def parse(text: str) -> DeviceName:
        """Parse ``auto``, ``cuda[:i]`` or ``emulator[:sm_NN]``; raises DeviceNameError."""
        pattern = r"(auto)|(cuda)(?::(\d+))?|(emulator)(?::(sm_\d+a?))?"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        targets = [t for t in FIRST_VERSION if number_of(t) in OPENED]
        if not found:
            raise DeviceNameError(
                f"unknown device {text!r}: give auto, cuda, cuda:INDEX, emulator or emulator:sm_NN"
            )
        target = found[5] or DEFAULT_TARGET
        if target not in targets:
            raise DeviceNameError(f"unknown device {text!r}: sm_NN is one of {', '.join(targets)}")
        return DeviceName(found[1] or found[2] or found[4], int(found[3] or 0), target)

    def __str__(self) -> str:
        if self.kind == "emulator":
            return f"emulator:{self.target}" + (f"/{self.index}" if self.index else "")
        return f"cuda:{self.index}"
