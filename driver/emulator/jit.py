"""JIT compilation of PTX: checks of version, target, syntax and instructions."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from urdir.driver.emulator.calls import Refused
from urdir.driver.emulator.images import Image
from urdir.driver.emulator.machine.compile import Program, check_target, compile_entry
from urdir.driver.emulator.machine.faults import CompileError
from urdir.ptxgen import ptx

#: Compiled texts that a process keeps, about 1 MB each without register files (execution.py).
KEPT_UNITS = 256

_VERSION = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.M)
_LINE = re.compile(r"\bline (\d+)\b:?\s*")


@dataclass(frozen=True, slots=True)
class Unit:
    """Compiled PTX: the image, its parsed form, and a program for each kernel."""

    image: Image
    module: ptx.Module
    programs: dict[str, Program]


class JitError(Refused):
    """PTX that does not compile; ``log`` is the text for the error log."""

    def __init__(self, code: str, log: str) -> None:
        super().__init__(code, log)
        self.log = log


def compile_ptx(text: str, target: str, newest: tuple[int, int]) -> Unit:
    """Compile PTX for ``target`` ("sm_90"); ``newest`` is the newest PTX ISA of the driver.

    Raises JitError: UNSUPPORTED_PTX_VERSION or INVALID_PTX.
    """
    _check_version(text, newest)
    return _compile(text, target)


@functools.lru_cache(maxsize=KEPT_UNITS)
def _compile(text: str, target: str) -> Unit:
    """Shared by all emulated drivers of the process: programs hold no device state."""
    try:
        module = ptx.parse(text)
        check_target(module, target)
        programs = {name: compile_entry(module, name, target) for name in module.entries}
    except ptx.PtxSyntaxError as exc:
        raise _failure("CUDA_ERROR_INVALID_PTX", str(exc)) from None
    except CompileError as exc:
        raise _failure(exc.code, exc.message) from None
    return Unit(Image(target, text), module, programs)


def _check_version(text: str, newest: tuple[int, int]) -> None:
    found = _VERSION.search(text)
    if not found:
        raise _failure("CUDA_ERROR_INVALID_PTX", "line 1: Missing .version directive")
    if (int(found[1]), int(found[2])) > newest:
        line = text.count("\n", 0, found.start(1)) + 1
        raise _failure(
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            f"line {line}: Unsupported .version {found[1]}.{found[2]}; "
            f"current version is '{newest[0]}.{newest[1]}'",
        )


def _failure(code: str, message: str) -> JitError:
    found = _LINE.search(message)
    where = f"application ptx input, line {found[1]}; error   " if found else "fatal   "
    what = message[found.end() :] if found else message
    aborted = "\nptxas fatal   : Ptx assembly aborted due to errors" if found else ""
    return JitError(code, f"ptxas {where}: {what}{aborted}")
