"""JIT options, checked as in the bindings, including log buffers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np

from urdir.driver.emulator.calls import expect, uint

_BUFFERS = ("CU_JIT_INFO_LOG_BUFFER", "CU_JIT_ERROR_LOG_BUFFER")
_ENUMS = ("CU_JIT_TARGET", "CU_JIT_FALLBACK_STRATEGY", "CU_JIT_CACHE_MODE")


@dataclass
class JitOptions:
    """Options by name; holds the buffers, which the caller must keep alive in the real API."""

    values: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(count: Any, options: Any, values: Any) -> JitOptions:
        """From the three arguments of a linking or loading call.

        As in the bindings: TypeError for an option that is not a CUjit_option or a log buffer that
        is neither bytes nor bytearray, RuntimeError if the lists are shorter than ``count``.
        """
        number = uint(count)
        names = expect("options", options, cuda.CUjit_option)
        given = list(values or [])
        for items in (names, given):
            if number > len(items):
                raise RuntimeError(f"List is too small: {len(items)} < {number}")
        result = JitOptions()
        for option, value in zip(names[:number], given[:number], strict=True):
            result.values[option.name] = _check(option.name, value)
        return result

    @property
    def target(self) -> str | None:
        """The target set by CU_JIT_TARGET."""
        target = self.values.get("CU_JIT_TARGET")
        return None if target is None else f"sm_{target.name.rsplit('_', 1)[-1].lower()}"

    def write_log(self, kind: str, text: str) -> None:
        """Write to the "INFO" or "ERROR" buffer, cut to its size and NUL-terminated."""
        buffer = self.values.get(f"CU_JIT_{kind}_LOG_BUFFER")
        room = self.values.get(f"CU_JIT_{kind}_LOG_BUFFER_SIZE_BYTES", 0)
        if buffer is None or not room or not len(buffer):
            return
        data = text.encode()[: min(room, len(buffer)) - 1] + b"\0"
        ctypes.memmove(np.frombuffer(buffer, np.uint8).ctypes.data, data, len(data))


def _check(name: str, value: Any) -> Any:
    if name in _BUFFERS:
        if not isinstance(value, bytes | bytearray):
            raise TypeError(f"expected bytes, {type(value).__name__} found")
        return value
    if name in _ENUMS:
        return type(value)(value.value)  # an AttributeError for a plain int, as in the bindings
    return value if isinstance(value, float | list | tuple) else uint(value)
