"""Faults of kernels: internal signals of the machine, and the fault that the driver reports."""

from __future__ import annotations

from typing import Self

ILLEGAL_ADDRESS = "CUDA_ERROR_ILLEGAL_ADDRESS"
MISALIGNED_ADDRESS = "CUDA_ERROR_MISALIGNED_ADDRESS"
ILLEGAL_INSTRUCTION = "CUDA_ERROR_ILLEGAL_INSTRUCTION"
LAUNCH_FAILED = "CUDA_ERROR_LAUNCH_FAILED"
LAUNCH_TIMEOUT = "CUDA_ERROR_LAUNCH_TIMEOUT"
INVALID_PTX = "CUDA_ERROR_INVALID_PTX"
UNSUPPORTED_PTX_VERSION = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"


class KernelFault(Exception):  # noqa: N818 - the driver names it so
    """A kernel failed on the device: ``code`` is the driver's error name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CompileError(Exception):
    """PTX that the emulated device cannot run; ptxas would refuse it as well."""

    def __init__(self, message: str, code: str = INVALID_PTX) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class AccessFault(Exception):  # noqa: N818 - a signal
    """A lane's memory access failed; the machine adds kernel, line and thread.

    ``position`` counts the lanes of the access; ``line`` is the PTX line if it differs from that of
    the generated line that raises.
    """

    def __init__(self, position: int, code: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.position = position
        self.code = code
        self.message = message

    @classmethod
    def of(cls, position: int, what: str, nbytes: int, place: str) -> Self:
        """``what`` ("misaligned load") in an access of ``nbytes`` bytes at a ``place``."""
        code = MISALIGNED_ADDRESS if what.startswith("misaligned") else ILLEGAL_ADDRESS
        return cls(position, code, f"{what}, {nbytes} bytes at {place}")
